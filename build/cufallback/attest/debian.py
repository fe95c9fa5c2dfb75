"""What a Debian-like image says of itself: installed packages and the distribution's name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cufallback.errors import ImageError

# Where dpkg keeps its database, where images made of single packages keep one file for each, and os-release(5).
SYSTEM_FILES = re.compile(r"var/lib/dpkg/status(\.d/[^/]+)?|(etc|usr/lib)/os-release")
_STATUS = re.compile(r"var/lib/dpkg/status(\.d/[^/]+)?")
_SOURCE = re.compile(r"(?P<name>\S+)(?:\s+\((?P<version>\S+)\))?")


@dataclass(frozen=True, order=True)
class DebianPackage:
    """An installed package. ``source`` and ``source_version`` name the source package it was built from."""

    name: str
    version: str
    architecture: str
    source: str
    source_version: str


@dataclass(frozen=True)
class Distro:
    """A distribution as os-release(5) names it: ``debian`` and ``12``; ``version`` may be empty."""

    id: str
    version: str
    pretty: str

    @property
    def qualifier(self) -> str:
        """What package URLs call it, such as ``debian-12``."""
        return f"{self.id}-{self.version}" if self.version else self.id


def parse_dpkg_status(text: str) -> list[DebianPackage]:
    """Return the installed packages of a dpkg database, sorted.

    A stanza without ``Status`` counts as installed: so are those in ``status.d`` of images without dpkg.

    Args:
        text: ``/var/lib/dpkg/status`` or one file of ``/var/lib/dpkg/status.d/`` (deb-control(5) stanzas).

    Raises:
        ImageError: a stanza of an installed package lacks its name, version or architecture.
    """
    packages = []
    for line, stanza in _stanzas(text):
        if stanza.get("status", "ok installed").split()[-1] != "installed":
            continue
        missing = [key for key in ("package", "version", "architecture") if not stanza.get(key)]
        if missing:
            raise ImageError(
                f"the package database has an entry without {missing[0].capitalize()}",
                remedy="build or fetch the image again",
                where=f"dpkg status:{line}",
            )
        match = _SOURCE.fullmatch(stanza.get("source", ""))
        packages.append(
            DebianPackage(
                stanza["package"],
                stanza["version"],
                stanza["architecture"],
                match["name"] if match else stanza["package"],
                (match["version"] if match else None) or stanza["version"],
            )
        )
    return sorted(packages)


def _stanzas(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the fields of each paragraph; names in lower case, continued lines left out."""
    stanza: dict[str, str] = {}
    start = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if not line.strip():
            if stanza:
                yield start, stanza
            stanza = {}
        elif line[0] not in " \t#":
            start = start if stanza else number
            name, _, value = line.partition(":")
            stanza[name.lower()] = value.strip()


def parse_os_release(text: str) -> Distro:
    """Return the distribution that an os-release(5) file names; without ``ID`` it is ``linux``, as that page says.

    Raises:
        ImageError: a value is not quoted as a shell would take it.
    """
    values = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = line.strip().partition("=")
        if not equals or name.startswith("#"):
            continue
        try:
            values[name] = "".join(shlex.split(value))
        except ValueError as error:
            raise ImageError(
                f"{name}: {error}", remedy="build or fetch the image again", where=f"os-release:{number}"
            ) from error
    name = values.get("ID", "linux")
    return Distro(name, values.get("VERSION_ID", ""), values.get("PRETTY_NAME", name))


def read_system(files: Mapping[str, bytes]) -> tuple[list[DebianPackage], Distro]:
    """Return packages and distribution from the files of an image that match :data:`SYSTEM_FILES`.

    Args:
        files: path without a leading slash → content, as :func:`cufallback.image.layout.find_files` gives them.

    Raises:
        ImageError: a file is damaged or no UTF-8.
    """
    texts = {}
    for path, content in files.items():
        try:
            texts[path] = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ImageError("is no UTF-8 text", remedy="build or fetch the image again", where=path) from error
    statuses = [text for path, text in texts.items() if _STATUS.fullmatch(path) and not path.endswith(".md5sums")]
    packages = {package for text in statuses for package in parse_dpkg_status(text)}
    release = texts.get("etc/os-release") or texts.get("usr/lib/os-release", "")
    return sorted(packages), parse_os_release(release)
