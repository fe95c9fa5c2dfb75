"""A fresh virtual environment from the wheelhouse alone, and the interpreter that it is made of."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cufallback.errors import BuildError, CommandError, IntegrityError, ToolchainError, WorkspaceError
from cufallback.process import Runner
from cufallback.store import workspace_errors

_DESCRIBE = (
    "import json,os,sys,sysconfig;print(json.dumps(["
    "'%d.%d'%sys.version_info[:2],os.path.realpath(sys.base_prefix),os.path.realpath(sys._base_executable),"
    "sysconfig.get_config_var('INCLUDEPY') or '']))"
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its interpreter and folder, and the installation that the interpreter belongs to.

    ``base_executable`` is the real interpreter file, always below ``base_prefix``. ``headers`` is the include
    folder that the interpreter was compiled to name, wherever it lies now.
    """

    python: Path
    folder: Path
    base_prefix: Path
    base_executable: Path
    headers: Path


def find_interpreter(version: str, runner: Runner) -> Path:
    """Return an installed CPython of that line: this process's own, one that uv finds, or one on PATH.

    Nothing is ever downloaded: an interpreter is an input that the user chooses.

    Args:
        version: such as ``3.11``.
        runner: starts the candidates to see what they are (a shim on PATH may be an empty promise).

    Raises:
        ToolchainError: no such interpreter is installed.
    """
    for candidate in _candidates(version, runner):
        described = _describe(candidate, runner)
        if described is not None and described[0] == version:
            return candidate
    raise ToolchainError(
        f"Python {version} is not installed",
        remedy=f"install it (package python{version} and python{version}-dev, pyenv, or `uv python install {version}`)",
        where="PATH and the interpreters known to uv",
    )


def _candidates(version: str, runner: Runner) -> Iterator[Path]:
    yield Path(sys.executable)
    try:
        found = runner.run(
            [find_uv(), "python", "find", "--no-config", "--offline", "--no-project", "--system", version],
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "UV_PYTHON_DOWNLOADS": "never",
            },
            check=False,
        )
    except (CommandError, ToolchainError):
        found = None
    if found is not None and found.returncode == 0:
        yield Path(found.output.strip().splitlines()[-1])
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield Path(on_path)


def _describe(python: Path, runner: Runner) -> tuple[str, Path, Path, Path] | None:
    """Return (version line, real base prefix, real base executable, headers), or None when it does not run."""
    try:
        done = runner.run([python, "-I", "-c", _DESCRIBE], check=False, timeout=60)
        version, prefix, executable, headers = json.loads(done.output)
    except (CommandError, ValueError):
        return None
    return str(version), Path(prefix), Path(executable), Path(headers)


def find_headers(python: Path, runner: Runner) -> tuple[Path, bool]:
    """Return where an interpreter's ``Python.h`` should be, and whether it is there.

    Raises:
        CommandError: the interpreter does not run.
    """
    done = runner.run([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('include'))"], timeout=60)
    header = Path(done.output.strip()) / "Python.h"
    return header, header.is_file()


def machine_names(prefix: Path, name: str) -> tuple[tuple[str, str], ...]:
    """Return paths that tell one machine from another, with what a log that travels says instead.

    Args:
        prefix: installation of the interpreter; ``/usr`` and ``/usr/local`` are everybody's and stay.
        name: what to call it.
    """
    private = prefix not in (Path("/usr"), Path("/usr/local"))
    home = Path.home()
    return (*(((str(prefix), name),) if private else ()), *(((str(home), "~"),) if home != Path("/") else ()))


def find_uv() -> Path:
    """Return the uv of this installation, or the one on PATH.

    Raises:
        ToolchainError: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    if beside.is_file():
        return beside
    on_path = shutil.which("uv")
    if on_path is None:
        raise ToolchainError("uv is not installed", remedy="run `python -m pip install uv`", where="PATH")
    return Path(on_path)


def create_environment(
    folder: Path, *, wheelhouse: Path, lock: Path, python: str | Path, runner: Runner, log: Path
) -> Environment:
    """Create a virtual environment that holds exactly what ``lock`` names, from files of ``wheelhouse`` alone.

    It appears at ``folder`` when it is complete; an older one there is replaced. It is relocatable, because
    the build sees it at another path than the one it was made at.

    Args:
        folder: where the environment shall be.
        wheelhouse: folder of wheels; no index is asked and no network used.
        lock: requirements file with a hash for every file.
        python: version line such as ``3.11``, or the path of an interpreter.
        runner: starts uv.
        log: file for uv's output.

    Raises:
        ToolchainError: no such interpreter, or no uv.
        IntegrityError: a wheel has another hash than the lock says.
        BuildError: uv could not make the environment; its words are in the log.
        WorkspaceError: the folder cannot be written, or its disk is full.
    """
    interpreter = Path(python).absolute() if "/" in str(python) else find_interpreter(str(python), runner)
    described = _describe(interpreter, runner)
    partial = folder.absolute().with_name(f"{folder.name}.partial")
    cache = folder.absolute().with_name(f"{folder.name}.uv-cache")
    program = find_uv()
    uv: tuple[str | Path, ...] = (*_leash(), program)
    # The log goes into the record: it names things by what they are, not by where this machine keeps them.
    names = {
        str(interpreter): "PYTHON",
        str(program): "uv",
        str(partial): "ENVIRONMENT",
        str(wheelhouse.absolute()): "WHEELHOUSE",
        str(lock.absolute()): lock.name,
        str(partial.parent): "WORK",
        **(dict(machine_names(described[1], "PYTHON_PREFIX")) if described else {}),
    }
    # uv's own settings and pip's must not reach in, hence no variable of the caller's but these.
    clean = {
        "HOME": str(cache),
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        # A cache of its own on the same disk: hard links instead of copies, and no inode shared with the
        # user's cache that a build could damage.
        "UV_CACHE_DIR": str(cache),
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    with workspace_errors(folder):
        for old in (partial, cache):
            shutil.rmtree(old, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        runner.run(
            [
                *uv,
                "venv",
                "--no-config",
                "--offline",
                "--no-project",
                "--relocatable",
                "--python",
                interpreter,
                partial,
            ],
            env=clean,
            log=log,
            names=names,
        )
        runner.run(
            [
                *(*uv, "pip", "sync", "--no-config", "--offline", "--no-index", "--find-links", "."),
                *("--require-hashes", "--only-binary", ":all:", "--python", partial / "bin/python", lock.absolute()),
            ],
            # uv splits the value of --find-links at commas, and a folder may have one in its name.
            cwd=wheelhouse.absolute(),
            env=clean,
            log=log,
            names=names,
        )
        with workspace_errors(folder):
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
    except CommandError as error:
        if "hash mismatch" in error.remedy.lower():
            raise IntegrityError(
                "a wheel of the wheelhouse has another hash than the lock says",
                remedy=error.remedy,
                where=str(wheelhouse),
            ) from error
        if os.strerror(errno.ENOSPC) in error.remedy:
            # Said here, since what uv had unpacked is gone again and the disk no longer looks full.
            raise WorkspaceError(
                f"the disk is full: {os.strerror(errno.ENOSPC)}",
                remedy="free disk space or choose another work folder (--work), then run again: it resumes",
                where=str(folder),
            ) from error
        raise BuildError(
            f"the build environment could not be made of {wheelhouse}",
            remedy=error.remedy,
            where=str(lock),
        ) from error
    finally:
        for leftover in (partial, cache):
            shutil.rmtree(leftover, ignore_errors=True)
    return open_environment(folder, runner)


def _leash() -> tuple[str, ...]:
    """Return words that make the kernel end a program with us: after kill -9 no orphan may write on.

    Empty where util-linux (2.33 or newer, as unshare for the build's namespaces) is not installed.
    """
    setpriv = shutil.which("setpriv", path="/usr/bin:/bin")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


def open_environment(folder: Path, runner: Runner) -> Environment:
    """Return the finished environment that lies at ``folder``.

    Raises:
        BuildError: it does not run, or its interpreter lies outside its own installation.
    """
    folder = folder.absolute()
    described = _describe(folder / "bin/python", runner)
    if described is None:
        raise BuildError("the build environment does not run", remedy="remove it and run again", where=str(folder))
    _version, prefix, executable, headers = described
    if not executable.is_relative_to(prefix):
        raise BuildError(
            f"the interpreter {executable} lies outside its installation {prefix}",
            remedy="use another Python installation, such as one by `uv python install`",
            where=str(folder),
        )
    return Environment(folder / "bin/python", folder, prefix, executable, headers)
