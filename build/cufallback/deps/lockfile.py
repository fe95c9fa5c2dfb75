"""The dependency lock: a requirements file with one hashed wheel per distribution, and a header that binds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from cufallback.download import Wanted
from cufallback.errors import LockError
from cufallback.recipe import Recipe
from cufallback.store import sha256_bytes

SCHEMA_VERSION = 1
Which = Literal["build", "runtime"]

_TITLE = "# cufallback dependency lock; written by `nox -s lock`, never by hand"
_FIELDS = ("schema", "recipe", "which", "python", "platform", "exclude-newer", "inputs", "digest")
_FILE = re.compile(r"^# (?P<filename>\S+\.whl)$")
_PIN = re.compile(r"^(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[^\s;\\]+) \\$")
_HASH = re.compile(r"^    --hash=sha256:(?P<sha256>[0-9a-f]{64})$")
_AGAIN = "run `nox -s lock`; a lock is never edited by hand"


@dataclass(frozen=True)
class LockedDistribution:
    """A distribution and the one wheel of it that the target installs."""

    name: str
    version: str
    filename: str
    sha256: str


@dataclass(frozen=True)
class Lock:
    """One dependency lock. ``inputs`` is the digest of the operated requirements it was resolved from."""

    recipe: str
    which: Which
    inputs: str
    distributions: tuple[LockedDistribution, ...]


def wanted(lock: Lock, recipe: Recipe) -> tuple[Wanted, ...]:
    """Return the lock's files with the one index that may serve each."""
    index = explicit_indexes(recipe)
    return tuple(
        Wanted(item.name, item.version, item.filename, item.sha256, index.get(item.name)) for item in lock.distributions
    )


def explicit_indexes(recipe: Recipe) -> dict[str, str]:
    """Return normalised name → URL of the one index for every package that the recipe ties to one."""
    return {canonicalize_name(name): index.url for index in recipe.deps.index for name in index.packages}


def render_lock(distributions: Sequence[LockedDistribution], *, recipe: Recipe, which: Which, inputs: str) -> str:
    """Return the text of a lock, ordered by name; pip and uv read it with ``--require-hashes``."""
    body = "".join(
        f"# {item.filename}\n{item.name}=={item.version} \\\n    --hash=sha256:{item.sha256}\n"
        for item in sorted(distributions, key=lambda item: item.name)
    )
    values = {**_purpose(recipe, which), "inputs": f"sha256:{inputs}"}
    lines = [_TITLE, *(f"# {field}: {value}" for field, value in values.items()), "", *body.split("\n")]
    lines.insert(len(_FIELDS), f"# digest: {_digest(lines)}")
    return "\n".join(lines)


def _purpose(recipe: Recipe, which: Which) -> dict[str, str]:
    """Return the header fields that say what a lock is for."""
    return {
        "schema": str(SCHEMA_VERSION),
        "recipe": recipe.name,
        "which": which,
        "python": recipe.python.version,
        "platform": recipe.python.platform,
        "exclude-newer": recipe.deps.exclude_newer,
    }


def _digest(others: Sequence[str]) -> str:
    """Digest of every line but the one that names the digest."""
    return "sha256:" + sha256_bytes("\n".join(others).encode())


def parse_lock(text: str, recipe: Recipe, which: Which, *, where: str) -> Lock:
    """Read the text of a lock and check that it is whole and made for ``recipe``.

    Args:
        text: the lock.
        recipe: the recipe it must be for.
        which: the lock it must be.
        where: its path, for messages.

    Raises:
        LockError: not a lock, edited, or for another recipe, Python, platform or time bound; with the line.
    """
    lines = text.split("\n")
    header = _header(lines, where)
    for number, (field, expected) in enumerate(_purpose(recipe, which).items(), start=2):
        if header[field] != expected:
            raise LockError(
                f"the lock is for {field} {header[field]}, the recipe says {expected}",
                remedy=_AGAIN,
                where=f"{where}:{number}",
            )
    distributions = _distributions(lines, len(_FIELDS) + 2, where)
    at = len(_FIELDS)
    if header["digest"] != _digest([*lines[:at], *lines[at + 1 :]]):
        raise LockError("the lock was edited: it does not have its digest", remedy=_AGAIN, where=f"{where}:{at + 1}")
    return Lock(recipe.name, which, header["inputs"].removeprefix("sha256:"), distributions)


def _header(lines: Sequence[str], where: str) -> dict[str, str]:
    if lines[0] != _TITLE:
        raise LockError("this is not a dependency lock", remedy=_AGAIN, where=f"{where}:1")
    header = {}
    for number, field in enumerate(_FIELDS, start=2):
        line = lines[number - 1] if number <= len(lines) else ""
        start = f"# {field}: "
        if not line.startswith(start):
            raise LockError(f"the header lacks {field!r} here", remedy=_AGAIN, where=f"{where}:{number}")
        header[field] = line.removeprefix(start)
    return header


def _distributions(lines: Sequence[str], start: int, where: str) -> tuple[LockedDistribution, ...]:
    rows = list(enumerate(lines, start=1))[start:]
    while rows and not rows[-1][1]:
        rows.pop()
    found: dict[str, LockedDistribution] = {}
    for at in range(0, len(rows), 3):
        number, line = rows[at]
        texts = [text for _number, text in rows[at : at + 3]] + ["", ""]
        file, pin, digest = _FILE.match(line), _PIN.match(texts[1]), _HASH.match(texts[2])
        if not file:
            raise LockError(
                f"a wheel's file name was expected, not {line[:200]!r}", remedy=_AGAIN, where=f"{where}:{number}"
            )
        if not pin:
            message = f"an exact pin (name==version) was expected, not {texts[1][:200]!r}"
            raise LockError(message, remedy=_AGAIN, where=f"{where}:{number + 1}")
        if not digest:
            message = f"{pin['name']} has no sha256 hash"
            raise LockError(message, remedy=_AGAIN, where=f"{where}:{number + 2}")
        if pin["name"] in found:
            raise LockError(f"{pin['name']} stands here twice", remedy=_AGAIN, where=f"{where}:{number + 1}")
        item = LockedDistribution(pin["name"], pin["version"], file["filename"], digest["sha256"])
        if not _is_of(item):
            message = f"{item.filename} is no wheel of {item.name} {item.version}"
            raise LockError(message, remedy=_AGAIN, where=f"{where}:{number}")
        found[item.name] = item
    if not found:
        raise LockError("the lock names no distribution", remedy=_AGAIN, where=f"{where}:{len(lines)}")
    return tuple(found.values())


def _is_of(item: LockedDistribution) -> bool:
    try:
        name, version, _build, _tags = parse_wheel_filename(item.filename)
        return name == item.name and version == Version(item.version)
    except (InvalidWheelFilename, InvalidVersion):
        return False
