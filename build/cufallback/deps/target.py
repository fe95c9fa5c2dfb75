"""The Python and platform that locks are made for: markers and wheel tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from cufallback.errors import RecipeError
from cufallback.recipe import Recipe

_PLATFORM = re.compile(r"^(?P<machine>x86_64|aarch64)-manylinux_2_(?P<minor>\d+)$")
# The aliases of PEP 600 for the older manylinux names, by the glibc they stand for.
_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
# The oldest glibc that a wheel may name: manylinux1 and manylinux2010 never existed for other machines (PEP 599).
_OLDEST = {"x86_64": 5, "aarch64": 17}


@dataclass(frozen=True)
class Target:
    """A CPython line on a glibc platform, such as 3.11 on x86_64-manylinux_2_28."""

    python: str
    platform: str

    def _parts(self) -> tuple[str, int]:
        found = _PLATFORM.match(self.platform)
        if not found:
            raise RecipeError(
                f"platform {self.platform!r} is not known",
                remedy="use x86_64-manylinux_2_28 or aarch64-manylinux_2_28 (another glibc version is fine)",
                where="python.platform",
            )
        return found["machine"], int(found["minor"])

    def tags(self) -> list[Tag]:
        """Return the wheel tags that this target takes, best first (PEP 425, PEP 600)."""
        machine, newest = self._parts()
        platforms = []
        for minor in range(newest, _OLDEST[machine] - 1, -1):
            platforms.append(f"manylinux_2_{minor}_{machine}")
            if minor in _ALIASES:
                platforms.append(f"{_ALIASES[minor]}_{machine}")
        platforms.append(f"linux_{machine}")
        major, minor_ = (int(part) for part in self.python.split("."))
        version, interpreter = (major, minor_), f"cp{major}{minor_}"
        return [
            # The ABI is named: left out, it would be that of the Python that runs this, free-threaded ones included.
            *cpython_tags(version, abis=[interpreter], platforms=platforms),
            *compatible_tags(version, interpreter=interpreter, platforms=platforms),
        ]

    def markers(self) -> dict[str, str]:
        """Return the PEP 508 environment of this target, for markers of requirements."""
        machine, _minor = self._parts()
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
            "extra": "",
        }

    def best(self, filenames: Iterable[str]) -> str | None:
        """Return the wheel among ``filenames`` that an installer would choose here, or None."""
        rank = {tag: number for number, tag in enumerate(self.tags())}
        ranked = []
        for filename in filenames:
            try:
                _name, _version, build, tags = parse_wheel_filename(filename)
            except InvalidWheelFilename:
                continue
            fitting = [rank[tag] for tag in tags if tag in rank]
            if fitting:
                # A higher build number wins among equals, as PEP 427 says; the name settles what is left.
                ranked.append((-min(fitting), build, filename))
        return max(ranked)[2] if ranked else None


def target_of(recipe: Recipe) -> Target:
    """Return the Python and platform that a recipe's locks are for."""
    return Target(recipe.python.version, recipe.python.platform)


def wheels_in(folder: Path, name: str, version: str) -> list[Path]:
    """Return the wheels of that distribution and version in a folder, for whatever platform, sorted by name."""
    found = []
    for path in sorted(folder.glob("*.whl")):
        try:
            named, versioned, _build, _tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if named == canonicalize_name(name) and versioned == Version(version):
            found.append(path)
    return found
