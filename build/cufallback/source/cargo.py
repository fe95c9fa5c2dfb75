"""What cargo fetches: one row per Git repository, and one for all registry packages of a Cargo.lock."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cufallback.errors import HarvestError
from cufallback.source.harvested import ALL_SUBMODULES, Harvested
from cufallback.store import sha256_bytes

_REMEDY = "upstream's Cargo.lock is damaged: fetch the tree again, or repair it upstream with cargo"


def harvest_cargo_lock(file: str, data: bytes) -> list[Harvested]:
    """Return what one Cargo.lock fetches.

    Args:
        file: path relative to the tree.
        data: its bytes.

    Raises:
        HarvestError: it is no Cargo.lock, or a Git source in it has no commit.
    """
    try:
        text = data.decode("utf-8")
        packages = tomllib.loads(text).get("package", [])
    except RecursionError as error:
        raise HarvestError("cannot be read: its values are nested too deep", remedy=_REMEDY, where=file) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{file}:{line[1]}" if line else file
        raise HarvestError(f"cannot be read: {error}", remedy=_REMEDY, where=where) from error
    if not isinstance(packages, list) or not all(isinstance(package, dict) for package in packages):
        raise HarvestError("has no list of packages", remedy=_REMEDY, where=file)
    sources = [(package, str(package["source"])) for package in packages if "source" in package]
    rows = {source: _git_row(file, text, source) for _package, source in sources if source.startswith("git+")}
    registry = [(package, source) for package, source in sources if not source.startswith("git+")]
    return [*rows.values(), *_registry_row(file, text, data, registry)]


@dataclass(frozen=True)
class Crate:
    """A package that a Cargo.lock takes from a registry; ``sha256`` is cargo's checksum of its archive."""

    name: str
    version: str
    sha256: str


def registry_crates(data: bytes) -> tuple[Crate, ...]:
    """Return the registry packages of a Cargo.lock that :func:`harvest_cargo_lock` has accepted with a digest."""
    packages = tomllib.loads(data.decode("utf-8")).get("package", [])
    return tuple(
        Crate(package["name"], package["version"], package["checksum"])
        for package in packages
        if str(package.get("source", "")).startswith(("registry+", "sparse+"))
    )


def require_locked_cargo(manifests: Iterable[tuple[str, str]], locks: Iterable[str]) -> None:
    """Demand a Cargo.lock at or above each Cargo.toml that has a Git dependency.

    Args:
        manifests: (path relative to the tree, text) of each Cargo.toml.
        locks: path of each Cargo.lock.

    Raises:
        HarvestError: without one, cargo would take whatever the branch holds on the day of the build.
    """
    folders = [lock.removesuffix("Cargo.lock") for lock in locks]
    for file, text in manifests:
        match = re.search(r"^[^#\n]*\bgit\s*=\s*\"", text, re.MULTILINE)
        if match and not any(file.startswith(folder) for folder in folders):
            raise HarvestError(
                "has a Git dependency, but no Cargo.lock at or above it pins a commit",
                remedy="create the lock upstream with `cargo generate-lockfile`",
                where=f"{file}:{text.count(chr(10), 0, match.start()) + 1}",
            )


def _git_row(file: str, text: str, source: str) -> Harvested:
    line = _line(text, source)
    try:
        parts = urlsplit(source.removeprefix("git+"))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    except ValueError as error:
        raise HarvestError(f"a Git source that is no URL ({error})", remedy=_REMEDY, where=f"{file}:{line}") from error
    if not re.fullmatch(r"[0-9a-f]{40}", parts.fragment):
        raise HarvestError(f"a Git source without a full commit id: {source}", remedy=_REMEDY, where=f"{file}:{line}")
    url = f"{parts.scheme}://{parts.netloc}{parts.path}"
    ref = query.get("rev") or query.get("tag") or query.get("branch") or parts.fragment
    name = parts.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    return Harvested(name, "cargo-git", url, ref, ALL_SUBMODULES, None, file, line, resolved=parts.fragment)


def _registry_row(file: str, text: str, data: bytes, packages: list[tuple[dict[str, Any], str]]) -> list[Harvested]:
    if not packages:
        return []
    urls = sorted({source.partition("+")[2] for _package, source in packages})
    all_hashed = all("checksum" in package for package, _source in packages)
    line = _line(text, packages[0][1])
    digest = sha256_bytes(data) if all_hashed else None
    return [Harvested(file, "crates", " ".join(urls), f"{len(packages)} packages", (), None, file, line, sha256=digest)]


def _line(text: str, source: str) -> int:
    return text.count("\n", 0, max(text.find(f'"{source}"'), 0)) + 1
