"""Debian packages for tests: one quiet installation that changes no settings of the machine.

Debian 12's docker.io (20.10) has a BuildKit without OCI exporter; the one of Debian 13 (26.1) needs only what
Debian 12 has. So on Debian 12 the packages of ``NEWER`` come from Debian 13, from the same archive that the machine's
own list of sources names. The list for that lives in a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

NEWER = ("docker.io", "docker-cli", "docker-buildx", "containerd", "docker-registry", "oras", "cosign")
PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "docker-registry", "oras", "cosign", "skopeo", "mmdebstrap")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))

PREFERENCES = f"""\
Package: *
Pin: release n=trixie*
Pin-Priority: 1

Package: {" ".join(NEWER)}
Pin: release n=trixie*
Pin-Priority: 600
"""


def program(name: str) -> str | None:
    """Return the path of a program, also of one for administrators; None when it is not installed."""
    return shutil.which(name, path=PATH)


def call(argv: Sequence[str | Path], *, timeout: float, **changes: str) -> str:
    """Run a program with PATH as above and ``changes`` to the environment, and return its output.

    Fails the test with the end of the output when the program fails or takes more than ``timeout`` seconds.
    """
    environment = os.environ | {"PATH": PATH} | changes
    done = subprocess.run(
        argv,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, argv))}: exited with {done.returncode}:\n{done.stdout[-3000:]}", pytrace=False)
    return done.stdout


def machine_sources() -> list[str]:
    """Return the texts of the machine's lists of apt sources."""
    folder = Path("/etc/apt")
    paths = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    return [path.read_text() for path in paths if path.suffix in (".list", ".sources") and path.is_file()]


def debian_sources(texts: Iterable[str], *, own: str, release: str) -> str:
    """Return the machine's sources of Debian itself, for another release, in the one-line format.

    Args:
        texts: lists in the one-line or the deb822 format.
        own: code name of the machine's release, such as ``bookworm``.
        release: code name of the one that is wanted.

    Taken are the component main and the suites of the release, its updates and its security updates; repositories
    of others have components or suites of their own.
    """
    lines: dict[str, None] = {}
    for text in texts:
        for options, addresses, suites, components in _entries(text):
            if "main" not in components:
                continue
            for address in addresses:
                for suite in suites:
                    if suite in (own, f"{own}-updates", f"{own}-security"):
                        renamed = suite.replace(own, release)
                        lines[f"deb {f'[{options}] ' if options else ''}{address} {renamed} main"] = None
    return "".join(f"{line}\n" for line in lines)


def _entries(text: str) -> Iterator[tuple[str, list[str], list[str], list[str]]]:
    """Return options, addresses, suites and components of each entry for binary packages."""
    text = re.sub(r"(?m)^#.*\n?", "", text)
    for line in text.splitlines():
        if found := re.fullmatch(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+(.+)", line.strip()):
            yield found[1] or "", [found[2]], [found[3]], found[4].split()
    for stanza in re.split(r"\n\s*\n", text):
        fields = {
            key.lower(): value.split() for key, value in re.findall(r"(?m)^([\w-]+):((?:.*)(?:\n[ \t].*)*)", stanza)
        }
        if "deb" in fields.get("types", []) and fields.get("enabled") != ["no"]:
            key = fields.get("signed-by", [])
            # A key written out in the list has no one-line form; Debian's own are in Debian's key ring anyway.
            options = f"signed-by={key[0]}" if len(key) == 1 and key[0].startswith("/") else ""
            yield options, fields.get("uris", []), fields.get("suites", []), fields.get("components", [])


def sources_for(release: str) -> str:
    """Return the sources of a Debian release from the archive that this machine uses.

    Fails the test where the machine is no Debian or names no archive of Debian's.
    """
    system = platform.freedesktop_os_release()
    own = system.get("VERSION_CODENAME", "")
    sources = debian_sources(machine_sources(), own=own, release=release) if system.get("ID") == "debian" else ""
    if not sources:
        pytest.fail("tests install their services on Debian only: start the service yourself", pytrace=False)
    return sources


def install() -> None:
    """Install ``PACKAGES`` with what they need. No daemon is started, no setting of apt is changed.

    Fails the test without root or Debian, or when apt fails.
    """
    if os.geteuid() != 0:
        pytest.fail("tests install their services as root only: install them yourself", pytrace=False)
    own = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    releases = dict.fromkeys((own, "trixie") if own == "bookworm" else (own,))
    with tempfile.TemporaryDirectory(prefix="cufallback-apt-") as name, _one_at_a_time(), _no_service_starts():
        folder = Path(name)
        for part in ("sources", "preferences", "lists/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "sources/all.list").write_text("".join(map(sources_for, releases)))
        (folder / "preferences/newer").write_text(PREFERENCES)
        folder.chmod(0o755)  # apt reads its lists as another user
        apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
        for key, part in (("Etc::SourceParts", "sources"), ("Etc::PreferencesParts", "preferences")):
            apt += ["-o", f"Dir::{key}={folder / part}"]
        apt += ["-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::State::Lists={folder / 'lists'}"]
        call([*apt, "update"], timeout=300)
        call([*apt, "--no-install-recommends", "install", *PACKAGES], timeout=900, DEBIAN_FRONTEND="noninteractive")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    with Path("/run/cufallback-tests-apt.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Keep the packages from starting daemons, by the file that Debian asks, unless the machine has its own."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    try:
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the packages; as a ``start`` for ``need``. They stay."""
    install()
    yield
