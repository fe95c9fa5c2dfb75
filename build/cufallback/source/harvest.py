"""Read from a vLLM tree every source that some build of it would fetch, with the line that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cufallback.errors import HarvestError
from cufallback.source.cargo import harvest_cargo_lock, require_locked_cargo
from cufallback.source.cmake import harvest_cmake
from cufallback.source.downloads import harvest_downloads
from cufallback.source.harvested import ALL_SUBMODULES, GIT_KINDS, Harvested

__all__ = ["ALL_SUBMODULES", "GIT_KINDS", "Harvested", "harvest"]

_SCRIPTS = (".sh", ".bash", ".py")


def harvest(tree: Path) -> tuple[Harvested, ...]:
    """Return everything the tree's build files fetch, whatever the target: a recipe says which of it is unused.

    Read are all CMake files, Cargo.lock files, Dockerfiles, and the scripts in ``tools/``, in ``docker/`` and at
    the top. CMake and cargo are read completely or not at all. Scripts are read as far as they name a URL.

    Args:
        tree: any vLLM source tree.

    Raises:
        HarvestError: the folder has no CMakeLists.txt, or a CMake file or Cargo.lock cannot be understood; with file
            and line.
    """
    if not (tree / "CMakeLists.txt").is_file():
        raise HarvestError("has no CMakeLists.txt", remedy="give the top folder of a vLLM source tree", where=str(tree))
    files = sorted(_files(tree))
    cmake = [name for name in files if name.endswith(".cmake") or name.rsplit("/", 1)[-1] == "CMakeLists.txt"]
    locks = [name for name in files if name.rsplit("/", 1)[-1] == "Cargo.lock"]
    manifests = [name for name in files if name.rsplit("/", 1)[-1] == "Cargo.toml"]
    found = harvest_cmake((name, _text(tree, name)) for name in cmake)
    require_locked_cargo(((name, _text(tree, name)) for name in manifests), locks)
    for name in locks:
        found += harvest_cargo_lock(name, (tree / name).read_bytes())
    for name in filter(_may_download, files):
        found += harvest_downloads(name, _text(tree, name))
    return tuple(sorted(found, key=lambda row: (_ORDER[row.kind], row.name.lower(), row.when)))


_ORDER = {
    kind: place
    for place, kind in enumerate(("fetchcontent", "externalproject", "cargo-git", "crates", "git-clone", "download"))
}


def _files(tree: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if name not in (".git", "node_modules")]
        for name in files:
            yield (Path(folder) / name).relative_to(tree).as_posix()


def _may_download(name: str) -> bool:
    folder, _, base = name.rpartition("/")
    if folder == "docker" or folder.startswith(("docker/", "tools/")) or folder in ("tools", ""):
        return (
            base.startswith("Dockerfile")
            or base.endswith((".sh", ".bash"))
            or (base.endswith(".py") and name.startswith("tools/"))
        )
    return False


def _text(tree: Path, name: str) -> str:
    return (tree / name).read_bytes().decode("utf-8", "replace")
