"""Read from a vLLM tree every source that some build of it would fetch, with the line that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cufallback.errors import HarvestError, WorkspaceError
from cufallback.source.cargo import harvest_cargo_lock, require_locked_cargo
from cufallback.source.cmake import harvest_cmake
from cufallback.source.downloads import harvest_downloads
from cufallback.source.harvested import ALL_SUBMODULES, GIT_KINDS, Harvested
from cufallback.store import open_regular

__all__ = ["ALL_SUBMODULES", "GIT_KINDS", "Harvested", "harvest"]

# vLLM's largest build files are its CMakeLists.txt and Cargo.lock, each below 200 kB.
_MAXIMUM_BYTES = 1 << 20
_REMEDY = "fetch the tree again: what this file asks for must be known before the build may run without network"


def harvest(tree: Path) -> tuple[Harvested, ...]:
    """Return everything the tree's build files fetch, whatever the target: a recipe says which of it is unused.

    Read are all CMake files, Cargo.lock files, Dockerfiles, and the scripts in ``tools/``, in ``docker/`` and at
    the top. CMake and cargo are read completely or not at all. Scripts are read as far as they name a URL.

    Args:
        tree: any vLLM source tree.

    Raises:
        HarvestError: the folder has no CMakeLists.txt; a build file is no regular file or too large; or a CMake
            file or Cargo.lock cannot be understood; with file and line.
    """
    try:
        if not (tree / "CMakeLists.txt").is_file():
            raise HarvestError(
                "has no CMakeLists.txt", remedy="give the top folder of a vLLM source tree", where=str(tree)
            )
        files = sorted(_files(tree))
    except OSError as error:
        raise HarvestError(
            f"cannot be read: {error.strerror}",
            remedy="give the top folder of a vLLM source tree that you may read",
            where=str(error.filename or tree),
        ) from error
    cmake = [name for name in files if name.endswith(".cmake") or name.rsplit("/", 1)[-1] == "CMakeLists.txt"]
    locks = [name for name in files if name.rsplit("/", 1)[-1] == "Cargo.lock"]
    manifests = [name for name in files if name.rsplit("/", 1)[-1] == "Cargo.toml"]
    found = harvest_cmake((name, _text(tree, name)) for name in cmake)
    require_locked_cargo(((name, _text(tree, name)) for name in manifests), locks)
    for name in locks:
        found += harvest_cargo_lock(name, _bytes(tree, name))
    for name in filter(_may_download, files):
        found += harvest_downloads(name, _text(tree, name))
    return tuple(sorted(found, key=lambda row: (_ORDER[row.kind], row.name.lower(), row.when)))


_ORDER = {
    kind: place
    for place, kind in enumerate(("fetchcontent", "externalproject", "cargo-git", "crates", "git-clone", "download"))
}


def _files(tree: Path) -> Iterator[str]:
    """Yield the path of every file, and of every folder that is named like a build file: it hides what it replaced."""
    for folder, folders, files in os.walk(tree, onerror=_raise):
        folders[:] = [name for name in folders if name not in (".git", "node_modules")]
        for name in (*files, *filter(_is_build_file, folders)):
            yield (Path(folder) / name).relative_to(tree).as_posix()


def _is_build_file(base: str) -> bool:
    return base in ("CMakeLists.txt", "Cargo.lock", "Cargo.toml", "Dockerfile") or base.endswith(".cmake")


def _raise(error: OSError) -> None:
    """Without this os.walk leaves out what it cannot read, and what that asks for would be missing in silence."""
    raise error


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
    return _bytes(tree, name).decode("utf-8", "replace")


def _bytes(tree: Path, name: str) -> bytes:
    """Return the bytes of a build file, never waiting for a pipe nor reading a device or without end."""
    try:
        with open_regular(tree / name) as file:
            data = file.read(_MAXIMUM_BYTES + 1)
    except WorkspaceError as error:
        raise HarvestError("is no regular file", remedy=_REMEDY, where=name) from error
    except OSError as error:
        raise HarvestError(f"cannot be read: {error.strerror}", remedy=_REMEDY, where=name) from error
    if len(data) > _MAXIMUM_BYTES:
        raise HarvestError(
            f"is larger than {_MAXIMUM_BYTES >> 20} MiB, which no real build file is", remedy=_REMEDY, where=name
        )
    return data
