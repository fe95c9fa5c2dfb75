"""Build one wheel from a pristine tree: copied, isolated, at fixed paths, with a cleaned environment."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cufallback.errors import BuildError, WorkspaceError
from cufallback.process import Runner
from cufallback.progress import Advance, Progress
from cufallback.resources import PYTHON_CACHES
from cufallback.store import EARLIEST_EPOCH, tree_entries, workspace_errors
from cufallback.wheel.buildlog import KernelReport, parse_build_log
from cufallback.wheel.environment import Environment
from cufallback.wheel.isolate import (
    ENVIRONMENT,
    FIXED,
    OUTPUT,
    PYTHON,
    SOURCE,
    TEMPORARY,
    Isolation,
    open_room,
    probe_isolation,
)

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"

# The same in every build on every machine, so a plan can state it.
BUILD_COMMAND = (
    *(str(ENVIRONMENT / "bin/python"), "-P", "-m", "build"),
    *("--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", str(OUTPUT), str(SOURCE)),
)
DEFAULT_PATH = "/usr/bin:/bin"


@dataclass(frozen=True)
class BuildRequest:
    """One wheel to build.

    Args:
        source: pristine tree; only read. A ``.git`` at its top is not given to the build, so a version that
            setuptools-scm would take from there must come from ``build_environment``.
        environment: the build environment, complete: nothing is installed during the build.
        output: folder that receives the wheel.
        build_environment: the recipe's variables. ``LDFLAGS`` is appended to ours, ``PATH``
            replaces the default folders behind the environment's own programs.
        epoch: SOURCE_DATE_EPOCH, seconds.
        jobs: parallel compile jobs; None means one per CPU.
        log: file for the whole output of the build.
        scratch: work folder of this build; emptied at the start, removed after success.
        title: what progress calls this build; "" means the source folder's name.
    """

    source: Path
    environment: Environment
    output: Path
    build_environment: Mapping[str, str]
    epoch: int
    jobs: int | None
    log: Path
    scratch: Path
    title: str = ""


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel and how it came about: isolation with its evidence, kernels, command line, whole environment."""

    path: Path
    isolation: Isolation
    kernels: KernelReport
    command: tuple[str, ...]
    environment: Mapping[str, str]


def build_wheel(
    request: BuildRequest, runner: Runner, progress: Progress, *, isolation: Isolation | None = None
) -> BuiltWheel:
    """Build the wheel of ``request``.

    The tree is copied with normalised modes and times, so the pristine one stays pristine. The wheel appears in
    ``request.output`` complete or not at all.

    Args:
        request: what to build.
        runner: starts the build.
        progress: shows ninja's steps and, without namespaces, that another build is waited for.
        isolation: what :func:`probe_isolation` found; None probes now.

    Raises:
        BuildError: the build failed, with the compiler's first words, or left no wheel or several.
        WorkspaceError: a folder cannot be written.
    """
    isolation = isolation or probe_isolation(runner)
    variables = build_variables(request)
    title = f"build {request.title or request.source.name}"
    with workspace_errors(request.scratch):
        if request.scratch.exists():
            shutil.rmtree(request.scratch)
        request.scratch.mkdir(parents=True)
        request.output.mkdir(parents=True, exist_ok=True)
    with open_room(isolation, request.scratch, request.environment, say=progress.say) as room:
        with progress.bar(f"{title}: copying the source", None):
            copy_source(request.source, room.source, epoch=request.epoch)
        (room.temporary / "home").mkdir()
        with _Steps(progress, title) as steps:
            done, isolation = room.run(BUILD_COMMAND, env=variables, runner=runner, log=request.log, on_line=steps.see)
        if done.returncode != 0:
            if os.strerror(errno.ENOSPC) in done.output:
                raise WorkspaceError(
                    f"the disk is full: {os.strerror(errno.ENOSPC)}",
                    remedy="free disk space or choose another work folder (--work), then run again",
                    where=str(room.source.parent),
                )
            raise BuildError(
                f"the build exited with {done.returncode}{_first_errors(done.output)}",
                remedy=f"read {request.log}; the tree as it was built is in {room.source}"
                if isolation.kind != "none"
                else f"read {request.log}",
                where=str(request.source),
            )
        wheels = sorted(room.output.glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(
                f"the build left {len(wheels)} wheels: {', '.join(wheel.name for wheel in wheels) or 'none'}",
                remedy=f"read {request.log}",
                where=str(request.source),
            )
        path = _deliver(wheels[0], request.output)
    with progress.bar(f"{title}: removing its work folder", None):
        shutil.rmtree(request.scratch, ignore_errors=True)
    return BuiltWheel(path, isolation, parse_build_log(done.output.splitlines()), BUILD_COMMAND, variables)


def compiler_environment(given: Mapping[str, str] | None = None, *, epoch: int | None = None) -> dict[str, str]:
    """Return the build's variables but job counts; nothing of this process's own environment is in it.

    Args:
        given: the recipe's variables. They win, except that ``PATH`` and ``LDFLAGS`` are joined with ours and
            ``SOURCE_DATE_EPOCH`` is always ours (a recipe that sets it is refused).
        epoch: seconds for SOURCE_DATE_EPOCH, from 1980 on; None while no lock says it: it is absent.
    """
    given = {name: value for name, value in (given or {}).items() if name != EPOCH_VARIABLE}
    if epoch is not None:
        given[EPOCH_VARIABLE] = str(max(epoch, EARLIEST_EPOCH))
    path = given.pop("PATH", DEFAULT_PATH)
    linking = given.pop("LDFLAGS", "")
    return {
        # setuptools would take these from the interpreter's Makefile, with rpaths of the machine it was built on.
        "CC": "gcc",
        "CXX": "g++",
        "LDSHARED": "gcc -shared",
        "LDCXXSHARED": "g++ -shared",
        # A build id is a hash over the link's inputs; it would tell builds apart that agree in all that runs.
        "LDFLAGS": f"-Wl,--build-id=none {linking}".strip(),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": str(TEMPORARY / "home"),
        "LC_ALL": "C.UTF-8",
        "PATH": f"{ENVIRONMENT}/bin:{path}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # A network namespace does not stop file:// indexes.
        "PIP_NO_INDEX": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        # Not PYTHONDONTWRITEBYTECODE: importing torch twice without a cache costs more than the build.
        "PYTHONPYCACHEPREFIX": str(TEMPORARY / "pycache"),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(TEMPORARY),
        "TZ": "UTC",
        "UV_NO_CONFIG": "1",
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "VIRTUAL_ENV": str(ENVIRONMENT),
        **given,
    }


def build_variables(request: BuildRequest) -> dict[str, str]:
    """Return the whole environment of the build: :func:`compiler_environment`, jobs, and one path map."""
    jobs = str(request.jobs or len(os.sched_getaffinity(0)))
    given = dict(request.build_environment)
    headers = request.environment.headers
    # setuptools takes the include folder from the interpreter's Makefile: where it was installed when it was made.
    if re.fullmatch(r"/[^\s=]+", str(headers)):
        mapped = f"-ffile-prefix-map={headers}={PYTHON}/include/{headers.name}"
        for name in ("CFLAGS", "CXXFLAGS"):
            given[name] = f"{mapped} {given.get(name, '')}".strip()
    return {
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAX_JOBS": jobs,
        **compiler_environment(given, epoch=request.epoch),
    }


def copy_source(source: Path, target: Path, *, epoch: int) -> None:
    """Copy a tree with modes 0644 and 0755, every time set to ``epoch``; ``.git`` and Python's caches stay behind.

    Raises:
        BuildError: there is no tree.
        WorkspaceError: the target cannot be written.
    """
    if not source.is_dir():
        raise BuildError("there is no source tree", remedy="run the sources stage again", where=str(source))
    with workspace_errors(target):
        for mode, name, path in tree_entries(source, ignore=PYTHON_CACHES):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if mode == "120000":
                copy.symlink_to(path.readlink())
            else:
                shutil.copyfile(path, copy)
                copy.chmod(0o755 if mode == "100755" else 0o644)
            os.utime(copy, (epoch, epoch), follow_symlinks=False)
        for folder, _folders, _files in os.walk(target, topdown=False):
            Path(folder).chmod(0o755)
            os.utime(folder, (epoch, epoch))


def _deliver(wheel: Path, folder: Path) -> Path:
    """Copy the wheel to ``folder`` under a hidden name, then rename: it is there whole or not at all."""
    target = folder / wheel.name
    temporary = folder / f".{wheel.name}.{os.getpid()}"
    with workspace_errors(target):
        try:
            shutil.copyfile(wheel, temporary)
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


_FAULTS = re.compile(
    r"(?:\b(?:fatal )?error: |undefined reference to |^CMake Error|^ERROR\b|^FAILED: |^\w*(?:Error|Exception)\b)"
)
_SHOWN_FAULTS = 3


def _first_errors(output: str) -> str:
    """Return the first lines that look like a compiler's, linker's, CMake's or Python's complaint."""
    found = [line.strip() for line in output.splitlines() if _FAULTS.search(line)][:_SHOWN_FAULTS]
    return "".join(f"\n    {line.replace(f'{FIXED}/', '')}" for line in found)


class _Steps:
    """Turns ninja's ``[3/87] Building …`` lines into a progress bar per ninja run, and shows that packing goes on."""

    _LINE = re.compile(r"^\[(\d+)/(\d+)\] ")

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._bar = contextlib.ExitStack()
        self._advance: Advance | None = None
        self._done = self._total = 0

    def __enter__(self) -> _Steps:
        # Configuring can take as long as compiling, and some builds use no ninja at all.
        self._bar.enter_context(self._progress.bar(self._title, None))
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def see(self, line: str) -> None:
        """Look at one line of output."""
        step = self._LINE.match(line)
        if step is None:
            if self._advance is not None and self._done == self._total:
                self._bar.close()
                self._advance = None
                self._bar.enter_context(self._progress.bar(f"{self._title}: installing and packing", None))
            return
        done, total = int(step[1]), int(step[2])
        if self._advance is None or total != self._total or done <= self._done:
            self._bar.close()
            self._advance = self._bar.enter_context(self._progress.bar(self._title, total, "steps"))
            self._done, self._total = 0, total
        self._advance(done - self._done)
        self._done = done
