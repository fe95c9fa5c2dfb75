"""One build at fixed paths and without network: in namespaces where the machine allows them, else under a lock.

Compilers and linkers write paths into what they make, so source, environment, interpreter and temporary folder
appear at the same place in every build on every machine: below :data:`FIXED`. Where namespaces are refused the
same paths are real folders, used by one build at a time, and the record says that the network was reachable.
The environment variable ``CUFALLBACK_ISOLATION=none`` chooses that second way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cufallback.errors import BuildError, CommandError, WorkspaceError
from cufallback.process import Completed, Runner
from cufallback.store import workspace_errors
from cufallback.wheel.environment import Environment, machine_names

# /var/tmp: on disk even where /tmp is memory, present on every Linux (FHS), and hardly anything lives below it.
FIXED = Path("/var/tmp/cufallback-build")  # noqa: S108 - ownership and links are checked before use
SOURCE, ENVIRONMENT, PYTHON, OUTPUT, TEMPORARY = (FIXED / name for name in ("src", "env", "python", "out", "tmp"))
SWITCH = "CUFALLBACK_ISOLATION"

_HELPER = Path(__file__).with_name("enter.py")
_MARK = "cufallback-network"


@dataclass(frozen=True)
class Isolation:
    """How a build is kept off the network and at fixed paths.

    ``why`` says what the probe saw; ``interfaces`` what /proc/net/dev showed inside, one line each before and
    after the build, with bytes received and sent.
    """

    kind: Literal["network namespace", "none"]
    root: bool
    why: str
    interfaces: tuple[str, ...] = ()

    @property
    def statement(self) -> str:
        """The line for the record."""
        if self.kind == "none":
            return f"network: not isolated ({self.why})"
        return f"network: isolated ({self.why})"


@dataclass(frozen=True)
class Room:
    """Where a build takes place: host paths to fill and to read. Inside, they are the fixed paths.

    ``names``: paths of this machine, each with what the log says instead.
    """

    isolation: Isolation
    source: Path
    output: Path
    temporary: Path
    binds: tuple[tuple[str, str], ...]
    names: tuple[tuple[str, str], ...] = ()

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        runner: Runner,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> tuple[Completed, Isolation]:
        """Run ``argv`` inside and return what it left, and the isolation with the evidence seen inside.

        Raises:
            CommandError: the program that enters the room could not be started.
            BuildError: the room is isolated, and yet a network interface other than loopback carried traffic, or the
                command ended well but what the interfaces carried before and after it was not seen.
        """
        completed = runner.run(
            _command(self.isolation, self.binds, argv, cwd=TEMPORARY),
            env=env,
            log=log,
            check=False,
            on_line=on_line,
            shown=argv,
            names=dict(self.names),
        )
        seen = tuple(line.removeprefix(f"{_MARK} ") for line in _evidence(completed.output))
        if self.isolation.kind != "none":
            # A command that failed has no result to vouch for, and better words than these for what went wrong.
            if completed.returncode == 0:
                _expect_both_moments(seen)
            _expect_no_network(seen)
        return completed, replace(self.isolation, interfaces=seen)


def probe_isolation(runner: Runner, *, environ: Mapping[str, str] = os.environ) -> Isolation:
    """Find out, by doing it, which isolation this machine grants.

    Args:
        runner: starts ``unshare``.
        environ: consulted for the switch ``CUFALLBACK_ISOLATION`` (``none`` or ``auto``).
    """
    choice = environ.get(SWITCH, "auto")
    if choice not in ("auto", "none"):
        raise WorkspaceError(f"unknown isolation {choice!r}", remedy="use auto or none", where=SWITCH)
    root = os.geteuid() == 0
    if choice == "none":
        return Isolation("none", root, f"{SWITCH}=none")
    refusals: list[str] = []
    # A container's root often lacks the right to unshare but may still make a user namespace.
    for as_root in (True, False) if root else (False,):
        way = Isolation("network namespace", as_root, "")
        try:
            done = runner.run(
                _command(way, ((str(_HELPER.parent), str(ENVIRONMENT)),), ["true"], cwd=ENVIRONMENT),
                env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"},
                check=False,
                timeout=30,
            )
        except CommandError as error:
            refusals.append(error.reason)
            break
        seen = _evidence(done.output)
        if done.returncode == 0 and seen:
            with_user = "" if as_root else "user, "
            return replace(way, why=f"unshare granted {with_user}mount, network, PID and UTS namespaces")
        lines = done.output.strip().splitlines()
        refusals.append(lines[-1] if lines else f"unshare exited with {done.returncode}")
    return Isolation("none", root, "; ".join(dict.fromkeys(refusals)))


def _command(
    isolation: Isolation, binds: Sequence[tuple[str, str]], argv: Sequence[str | Path], *, cwd: Path
) -> list[str]:
    namespaces = isolation.kind != "none"
    closed = [target for _source, target in binds if Path(target).is_relative_to(ENVIRONMENT) or target == str(PYTHON)]
    spec = {
        "namespaces": namespaces,
        "cover": str(FIXED.parent),
        "binds": list(binds),
        # One wheel's build must not alter what builds the next. Bytecode goes elsewhere (PYTHONPYCACHEPREFIX).
        "read_only": closed,
        "cwd": str(cwd),
        "argv": [str(word) for word in argv],
    }
    helper = [sys.executable, "-I", "-S", str(_HELPER), json.dumps(spec, ensure_ascii=False)]
    if not namespaces:
        return helper
    user = [] if isolation.root else ["--map-root-user"]
    shares = ["--mount", "--propagation", "private", "--net", "--uts", "--pid", "--fork", "--kill-child"]
    return ["unshare", *user, *shares, "--", *helper]


def _evidence(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"{_MARK} ")]


def _expect_both_moments(seen: Sequence[str]) -> None:
    moments = [line.partition(" ")[0] for line in seen]
    if moments != ["before", "after"]:
        raise BuildError(
            f"the network was to be read before and after the build, and was read {' and '.join(moments) or 'never'}",
            remedy="the build must not print lines that begin with the mark, nor end what watches it; read the log",
            where=_MARK,
        )


def _expect_no_network(seen: Sequence[str]) -> None:
    for line in seen:
        moment, _, text = line.partition(" ")
        # Kernels with tunnel modules show their idle fallback devices (tunl0, sit0 …) in every new namespace.
        try:
            counters = json.loads(text)
            busy = [name for name, (received, sent) in counters.items() if name != "lo" and received + sent]
        except (ValueError, TypeError, AttributeError) as error:
            raise BuildError(
                "the build printed something that looks like evidence of its network",
                remedy="no line of its output may begin with the mark",
                where=_MARK,
            ) from error
        if busy:
            raise BuildError(
                f"{', '.join(busy)} carried traffic {moment} the build although its network is isolated",
                remedy="report this machine's kernel and container setup as a bug",
                where="/proc/net/dev inside the build",
            )


@contextlib.contextmanager
def open_room(
    isolation: Isolation, scratch: Path, environment: Environment, *, say: Callable[[str], None] = lambda _line: None
) -> Iterator[Room]:
    """Prepare the folders of one build and, without namespaces, hold the machine-wide lock while it lasts.

    Args:
        isolation: from :func:`probe_isolation`.
        scratch: an existing folder of this build; its contents are ours.
        environment: the build environment to show at its fixed path.
        say: told when another build is waited for.

    Raises:
        WorkspaceError: the fixed folder belongs to somebody else or forbids programs.
    """
    with workspace_errors(scratch):
        if isolation.kind == "none":
            with _fixed_folder(say):
                yield _real_room(isolation, scratch.absolute(), environment)
        else:
            yield _mounted_room(isolation, scratch.absolute(), environment)


def _mounted_room(isolation: Isolation, scratch: Path, environment: Environment) -> Room:
    source, output, temporary, face = (scratch / name for name in ("src", "out", "tmp", "face"))
    for folder in (source, output, temporary, face):
        folder.mkdir(parents=True)
    _copy_folder(environment.folder / "bin", face / "bin", shutil.copy2)
    _face(environment, face)
    pairs = (
        (source, SOURCE),
        (environment.folder, ENVIRONMENT),
        (face / "bin", ENVIRONMENT / "bin"),
        (face / "pyvenv.cfg", ENVIRONMENT / "pyvenv.cfg"),
        (environment.base_prefix, PYTHON),
        (output, OUTPUT),
        (temporary, TEMPORARY),
    )
    binds = tuple((str(from_), str(to)) for from_, to in pairs)
    return Room(isolation, source, output, temporary, binds, _names(scratch, environment))


def _names(scratch: Path, environment: Environment) -> tuple[tuple[str, str], ...]:
    """Return paths of this machine that a build can still learn of, with what a log that travels says instead."""
    include = PYTHON / "include" / environment.headers.name
    pairs = (
        (environment.headers, include),
        (environment.folder, ENVIRONMENT),
        *machine_names(environment.base_prefix, str(PYTHON)),
        (scratch, FIXED),
    )
    return tuple((str(path), str(name)) for path, name in pairs if path != Path())


def _real_room(isolation: Isolation, scratch: Path, environment: Environment) -> Room:
    for folder in (SOURCE, OUTPUT, TEMPORARY):
        folder.mkdir()
    _copy_folder(environment.folder, ENVIRONMENT, _link_or_copy)
    _face(environment, ENVIRONMENT)
    _show_python(environment.base_prefix)
    return Room(isolation, SOURCE, OUTPUT, TEMPORARY, (), _names(scratch, environment))


def _show_python(prefix: Path) -> None:
    """Make the interpreter's installation appear at its fixed path.

    By links, but for the headers: CMake resolves links of include folders, and debug information would keep
    where they lead.
    """
    PYTHON.mkdir()
    for entry in prefix.iterdir():
        if entry.name != "include":
            (PYTHON / entry.name).symlink_to(entry)
    (PYTHON / "include").mkdir()
    for entry in (prefix / "include").glob("python3*"):
        _copy_folder(entry, PYTHON / "include" / entry.name, shutil.copy2)


def _copy_folder(source: Path, target: Path, copy_file: Callable[[Path, Path], object]) -> None:
    """Copy a tree, links as links. Unlike shutil.copytree it stops at the first fault and keeps its error number."""
    target.mkdir()
    for entry in source.iterdir():
        copy = target / entry.name
        if entry.is_symlink():
            copy.symlink_to(entry.readlink())
        elif entry.is_dir():
            _copy_folder(entry, copy, copy_file)
        else:
            copy_file(entry, copy)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _face(environment: Environment, folder: Path) -> None:
    """Make ``folder``'s ``bin`` and ``pyvenv.cfg`` name the interpreter by its fixed path.

    The interpreter derives its include folder from there, and debug information keeps it.
    """
    inner = PYTHON / environment.base_executable.relative_to(environment.base_prefix)
    for name in ("python", "python3", inner.name):
        link = folder / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(inner)
    settings = (environment.folder / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    kept = [line for line in settings if line.partition("=")[0].strip() != "home"]
    config = folder / "pyvenv.cfg"
    config.unlink(missing_ok=True)
    config.write_text("\n".join([f"home = {inner.parent}", *kept, ""]), encoding="utf-8")


@contextlib.contextmanager
def _fixed_folder(say: Callable[[str], None]) -> Iterator[None]:
    """Own :data:`FIXED` and hold its lock; contents of an earlier, killed build are removed first."""
    with contextlib.suppress(FileExistsError):
        FIXED.mkdir(mode=0o700)
    facts = FIXED.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise WorkspaceError(
            "must be a folder that belongs to this user and that nobody else can write",
            remedy="remove it, or build where namespaces are allowed: then no fixed folder is needed",
            where=str(FIXED),
        )
    if os.statvfs(FIXED).f_flag & os.ST_NOEXEC:
        raise WorkspaceError(
            "lies on a file system mounted noexec, so nothing built there can run",
            remedy=f"mount {FIXED.parent} without noexec, or build where namespaces are allowed",
            where=str(FIXED),
        )
    handle = os.open(FIXED / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            say(f"another build uses {FIXED}; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        _empty_fixed()
        try:
            yield
        finally:
            _empty_fixed()
    finally:
        os.close(handle)


def _empty_fixed() -> None:
    for entry in FIXED.iterdir():
        if entry.name == "lock":
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry)
