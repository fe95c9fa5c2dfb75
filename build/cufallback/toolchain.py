"""The toolchain as a value: versions of everything that touches bytes, and what this machine lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from packaging.version import Version

from cufallback.errors import CommandError, ToolchainError
from cufallback.process import Runner
from cufallback.recipe import GitSource, Recipe
from cufallback.source.gitrepo import MINIMUM_GIT
from cufallback.store import workspace_errors

# vLLM's CMake asks for GCC 11.3 (docs of the 0.27 and 0.28 source distributions); of uv 0.9.17 and 0.9.26 only the
# second takes --exclude-newer-package NAME=false (both tried).
MINIMUM = {"gcc": "11.3", "g++": "11.3", "git": MINIMUM_GIT, "uv": "0.9.26"}
_CONNECT_SECONDS = 0.6
_ANSWER_SECONDS = 0.8


@dataclass(frozen=True)
class Toolchain:
    """Versions of what turns source into bytes. A plan holds it; hosts, paths and job counts are no part of it.

    ``compiler`` is g++, ``c_compiler`` gcc.
    """

    machine: str
    libc: str
    python: str
    compiler: str
    c_compiler: str
    linker: str

    def to_json(self) -> dict[str, str]:
        """Return the fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Need:
    """One thing the plan needs of this machine.

    ``state``: ``ok``; ``missing`` (the build cannot run); ``degraded`` (it runs, and the record says what is lost);
    ``not checked`` (with the reason in ``found``).
    """

    what: str
    wanted: str
    found: str
    state: Literal["ok", "missing", "degraded", "not checked"]
    remedy: str = ""


def probe_toolchain(recipe: Recipe, runner: Runner) -> tuple[Toolchain | None, tuple[Need, ...]]:
    """Ask this machine for the toolchain that ``recipe`` would use here, and for the tools it needs.

    A recipe with a builder image takes its toolchain from that image and never from the host: for it the
    toolchain is None until the image's own is locked.
    """
    needs = [probe_uv(runner)]
    if isinstance(recipe.source, GitSource):
        needs.append(_tool("git", _version_of(("git", "--version"), runner), "install git with the system's packages"))
    if recipe.builder.image is not None:
        needs.append(
            Need(
                "builder image",
                recipe.builder.image,
                "this version compiles with the host's toolchain only",
                "missing",
                "build the rehearsal recipe here: --recipe rehearsal",
            )
        )
        return None, tuple(needs)

    from cufallback.wheel.builder import DEFAULT_PATH
    from cufallback.wheel.environment import find_interpreter

    version = recipe.python.version
    python: str | None = None
    try:
        interpreter = find_interpreter(version, runner=runner)
        python = _version_of((interpreter, "--version"), runner)
        needs.append(Need("Python", version, python or "no version", "ok"))
        needs.append(_headers(interpreter, version, runner))
    except ToolchainError as error:
        needs.append(Need("Python", version, error.reason, "missing", error.remedy))
    # As the build finds them, not as this shell does.
    path = {"PATH": recipe.wheel.environment.get("PATH", DEFAULT_PATH), "LC_ALL": "C"}
    compiler = _first_line(("g++", "--version"), runner, path)
    c_compiler = _first_line(("gcc", "--version"), runner, path)
    linker = _first_line(("ld", "--version"), runner, path)
    needs.append(_tool("gcc", _version_in(c_compiler), "install gcc with the system's packages"))
    needs.append(_tool("g++", _version_in(compiler), "install g++ with the system's packages"))
    if linker is None:
        needs.append(Need("ld", "any", "not found", "missing", "install binutils with the system's packages"))
    needs.append(_isolation(runner))
    toolchain = None
    if python and compiler and c_compiler and linker:
        libc = " ".join(platform.libc_ver()).strip() or "unknown"
        toolchain = Toolchain(platform.machine(), libc, python, compiler, c_compiler, linker)
    return toolchain, tuple(needs)


def _headers(interpreter: Path, version: str, runner: Runner) -> Need:
    from cufallback.wheel.environment import find_headers

    remedy = f"install python3-dev or python{version}-dev with the system's packages, or use a Python that has them"
    try:
        header, present = find_headers(interpreter, runner)
    except CommandError as error:
        return Need("Python headers", "Python.h", error.reason, "missing", remedy)
    if present:
        return Need("Python headers", "Python.h", "present", "ok")
    return Need("Python headers", "Python.h", f"no {header}", "missing", remedy)


def _isolation(runner: Runner) -> Need:
    from cufallback.wheel.isolate import probe_isolation

    found = probe_isolation(runner)
    if found.kind != "none":
        return Need("isolation", "a build without network", found.statement, "ok")
    return Need(
        "isolation",
        "a build without network",
        f"the record will say: {found.statement}",
        "degraded",
        "allow user namespaces (package util-linux for unshare; in a container --privileged or --cap-add SYS_ADMIN)",
    )


def probe_uv(runner: Runner) -> Need:
    """Ask for uv and its version."""
    return _tool("uv", _version_of((_uv_or_name(), "--version"), runner), "python3 -m pip install uv")


def probe_machine(recipe: Recipe, work: Path) -> tuple[Need, ...]:
    """Ask for processor, disk and memory."""
    needs = []
    wanted = recipe.python.platform.partition("-")[0]
    if platform.system() != "Linux" or platform.machine() != wanted:
        found = f"{platform.system()} {platform.machine()}"
        needs.append(Need("platform", f"Linux {wanted}", found, "missing", f"build on a Linux {wanted} machine"))
    with workspace_errors(work):
        existing = next(folder for folder in (work, *work.parents) if folder.exists())
        free = shutil.disk_usage(existing).free / 2**30
    needs.append(_amount("free disk", recipe.builder.minimum_disk_gib, free, f"free space below {existing}, or --work"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    needs.append(_amount("memory", recipe.builder.minimum_memory_gib, memory, "use a machine with more memory"))
    return tuple(needs)


def probe_network(servers: Mapping[str, str]) -> tuple[Need, ...]:
    """Try a TCP connection to each server, all at once and for less than a second.

    Behind a proxy nothing is tried, since a direct connection says nothing there.

    Args:
        servers: what to call each, and its URL.
    """
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))

    def reach(server: tuple[str, str]) -> Need:
        what, parts = f"network: {server[0]}", urlsplit(server[1])
        host = parts.hostname or ""
        # Never the host of an index: the default one may be a secret of this machine.
        place = host if server[0] == host else f"the server of {server[0]}"
        if parts.scheme == "file":
            return Need(what, "reachable", "a local folder", "ok")
        if proxied:
            return Need(what, "reachable", "a proxy is set", "not checked")
        try:
            port = parts.port or {"http": 80, "ssh": 22}.get(parts.scheme, 443)
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            # Only indexes have a stand-in; their names are the recipe's, a Git server's is its host.
            mirror = "" if server[0] == host else "; or point CUFALLBACK_FIND_LINKS at a folder with its files"
            remedy = f"open the way to {place} or set HTTPS_PROXY{mirror}"
            return Need(what, "reachable", _words(error), "missing", remedy)
        return Need(what, "reachable", "reachable", "ok")

    answers: dict[str, Need] = {}
    # Daemon threads, since a name server that does not answer would hold up a pool for longer than anyone waits.
    threads = [
        threading.Thread(target=lambda server=server: answers.update({server[0]: reach(server)}), daemon=True)
        for server in servers.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ANSWER_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = f"no answer within {_ANSWER_SECONDS:g} s"
    return tuple(
        answers.get(name) or Need(f"network: {name}", "reachable", silent, "missing", f"open the way to {name}")
        for name in servers
    )


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)
    return "no valid address"


def require(needs: Sequence[Need]) -> None:
    """Stop when something is missing.

    Raises:
        ToolchainError: naming each missing thing, what was found instead and the remedy.
    """
    missing = [need for need in needs if need.state == "missing"]
    if missing:
        raise ToolchainError(
            "this machine lacks what the plan needs:\n  "
            + "\n  ".join(f"{need.what}: wanted {need.wanted}, found {need.found}" for need in missing),
            remedy="; ".join(dict.fromkeys(need.remedy for need in missing)),
        )


def _uv_or_name() -> Path:
    from cufallback.wheel.environment import find_uv

    try:
        return find_uv()
    except ToolchainError:
        return Path("uv")


def _amount(what: str, wanted_gib: int, found_gib: float, remedy: str) -> Need:
    state: Literal["ok", "missing"] = "ok" if found_gib >= wanted_gib else "missing"
    return Need(what, f"{wanted_gib} GiB", f"{found_gib:.0f} GiB", state, remedy if state == "missing" else "")


def _tool(name: str, found: str | None, remedy: str) -> Need:
    wanted = f"{MINIMUM[name]} or newer"
    if found is None:
        return Need(name, wanted, "not found", "missing", remedy)
    if Version(found) < Version(MINIMUM[name]):
        return Need(name, wanted, found, "missing", f"{remedy} (a newer one)")
    return Need(name, wanted, found, "ok")


def _first_line(argv: Sequence[str | Path], runner: Runner, environment: Mapping[str, str] | None = None) -> str | None:
    try:
        lines = runner.run(argv, env=environment, timeout=20).output.splitlines()
    except CommandError:
        return None
    return lines[0].strip() if lines else None


def _version_in(line: str | None) -> str | None:
    # the last number wins: "g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "git version 2.39.5", "uv 0.13.9 (x86_64…)"
    found = re.findall(r"(?<![\w.+-])\d+\.\d+(?:\.\d+)*", re.sub(r"\([^)]*\)", "", line or ""))
    return found[-1] if found else None


def _version_of(argv: Sequence[str | Path], runner: Runner) -> str | None:
    return _version_in(_first_line(argv, runner))
