"""The dependency lock: a requirements file with one hashed wheel per distribution, and a header that binds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from cufallback.download import Wanted
from cufallback.errors import LockError
from cufallback.recipe import Recipe
from cufallback.store import sha256_bytes

SCHEMA_VERSION = 1
Which = Literal["build", "runtime"]

_TITLE = "# cufallback dependency lock; written by `nox -s lock`, never by hand"
_FIELDS = ("schema", "recipe", "which", "python", "platform", "exclude-newer", "inputs", "body")
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
    index = {canonicalize_name(name): row.url for row in recipe.deps.index for name in row.packages}
    return tuple(
        Wanted(item.name, item.version, item.filename, item.sha256, index.get(canonicalize_name(item.name)))
        for item in lock.distributions
    )


def render_lock(distributions: Sequence[LockedDistribution], *, recipe: Recipe, which: Which, inputs: str) -> str:
    """Return the text of a lock, ordered by name; pip and uv read it with ``--require-hashes``."""
    body = "".join(
        f"# {item.filename}\n{item.name}=={item.version} \\\n    --hash=sha256:{item.sha256}\n"
        for item in sorted(distributions, key=lambda item: item.name)
    )
    values = {
        "schema": str(SCHEMA_VERSION),
        "recipe": recipe.name,
        "which": which,
        "python": recipe.python.version,
        "platform": recipe.python.platform,
        "exclude-newer": recipe.deps.exclude_newer,
        "inputs": f"sha256:{inputs}",
        "body": f"sha256:{sha256_bytes(body.encode())}",
    }
    return "\n".join([_TITLE, *(f"# {field}: {values[field]}" for field in _FIELDS), "", body])


def load_lock(path: Path, recipe: Recipe, which: Which) -> Lock:
    """Read a committed lock and check that it is whole and made for ``recipe``.

    Raises:
        LockError: missing, not a lock, edited, for another recipe, Python, platform or time bound; with the line.
    """
    return parse_lock(_text(path), recipe, which, where=str(path))


def parse_lock(text: str, recipe: Recipe, which: Which, *, where: str) -> Lock:
    """Read the text of a lock; see :func:`load_lock`."""
    lines = text.split("\n")
    header = _header(lines, where)
    expected = {
        "schema": str(SCHEMA_VERSION),
        "recipe": recipe.name,
        "which": which,
        "python": recipe.python.version,
        "platform": recipe.python.platform,
        "exclude-newer": recipe.deps.exclude_newer,
    }
    for number, field in enumerate(_FIELDS, start=2):
        if field in expected and header[field] != expected[field]:
            raise LockError(
                f"the lock is for {field} {header[field]}, the recipe says {expected[field]}",
                remedy=_AGAIN,
                where=f"{where}:{number}",
            )
    distributions = _distributions(lines, len(_FIELDS) + 2, where)
    body = "\n".join(lines[len(_FIELDS) + 2 :])
    if header["body"] != f"sha256:{sha256_bytes(body.encode())}":
        raise LockError(
            "the lock was edited: its body does not have the digest in its header",
            remedy=_AGAIN,
            where=f"{where}:{len(_FIELDS) + 1}",
        )
    return Lock(recipe.name, which, header["inputs"].removeprefix("sha256:"), distributions)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LockError("there is no such lock", remedy="run `nox -s lock`", where=str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise LockError("the lock cannot be read", remedy=_AGAIN, where=str(path)) from error


def _header(lines: Sequence[str], where: str) -> dict[str, str]:
    if not lines or lines[0] != _TITLE:
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
            raise LockError(f"a wheel's file name was expected, not {line!r}", remedy=_AGAIN, where=f"{where}:{number}")
        if not pin:
            message = f"an exact pin (name==version) was expected, not {texts[1]!r}"
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
        raise LockError("the lock names no distribution", remedy=_AGAIN, where=where)
    return tuple(found.values())


def _is_of(item: LockedDistribution) -> bool:
    try:
        name, version, _build, _tags = parse_wheel_filename(item.filename)
    except InvalidWheelFilename:
        return False
    return name == canonicalize_name(item.name) and str(version) == item.version
