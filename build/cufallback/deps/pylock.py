"""PEP 751: the runtime environment as pylock.toml, with paths beside the lock and no URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.markers import Marker
from packaging.pylock import Package, PackageWheel, Pylock
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from cufallback.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """One wheel of the lock; ``path`` is relative to the lock file, ``size`` in bytes."""

    name: str
    version: str
    path: str
    sha256: str
    size: int


def render_pylock(entries: Sequence[Entry], recipe: Recipe) -> str:
    """Return pylock.toml for the given wheels, ordered by name.

    Args:
        entries: locked runtime distributions below ``wheelhouse/`` and the built wheels below ``wheels/``.
        recipe: names the Python and the platform.
    """
    machine = recipe.python.platform.partition("-")[0]
    lock = Pylock(
        lock_version=Version("1.0"),
        created_by="cufallback",
        requires_python=SpecifierSet(f"=={recipe.python.version}.*"),
        environments=[Marker(f"sys_platform == 'linux' and platform_machine == '{machine}'")],
        packages=[
            Package(
                name=canonicalize_name(entry.name),
                version=Version(entry.version),
                wheels=[PackageWheel(path=entry.path, size=entry.size, hashes={"sha256": entry.sha256})],
            )
            for entry in sorted(entries, key=lambda entry: canonicalize_name(entry.name))
        ],
    )
    lock.validate()
    return _toml(dict(lock.to_dict()))


def _toml(data: dict[str, Any]) -> str:
    packages = data.pop("packages")
    lines = [f"{key} = {_value(value)}" for key, value in data.items()]
    for package in packages:
        lines += ["", "[[packages]]", *(f"{key} = {_value(value)}" for key, value in package.items())]
    return "\n".join([*lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
