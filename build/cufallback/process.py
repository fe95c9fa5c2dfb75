"""The only place that starts other programs: argument lists, log files, redaction, clean ends."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cufallback.errors import CommandError
from cufallback.redact import redact
from cufallback.store import workspace_errors

_TAIL_LINES = 15


@dataclass(frozen=True)
class Completed:
    """What a program left: its arguments, exit status, redacted output and duration in seconds."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    seconds: float


class Runner(Protocol):
    """Starts programs. Stages take one, tests pass a :class:`RecordingRunner`."""

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        check: bool = True,
        timeout: float | None = None,
        on_line: Callable[[str], None] | None = None,
        shown: Sequence[str | Path] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run ``argv`` and return what it left.

        Args:
            argv: program and arguments; never a shell line.
            cwd: working folder.
            env: the whole environment, or None to inherit this process's.
            log: file that receives the command line and the redacted output as it comes.
            check: raise when the exit status is not 0.
            timeout: seconds after which the program and its children are ended.
            on_line: called with each redacted output line, for progress.
            shown: the command line as the log and errors name it; None: ``argv``.
            names: paths, each with what the log says instead, so that a log can leave this machine. The returned
                output keeps the paths.

        Raises:
            CommandError: the program is missing, failed (with ``check``) or ran out of time.
            WorkspaceError: the log cannot be written (full, read-only); the program has been ended.
        """
        ...


class LocalRunner:
    """Runs programs on this machine, stdout and stderr as one stream, each in a session of its own."""

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        check: bool = True,
        timeout: float | None = None,
        on_line: Callable[[str], None] | None = None,
        shown: Sequence[str | Path] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Completed:
        """See :meth:`Runner.run`."""
        words = tuple(str(word) for word in argv)
        command = redact(shlex.join(map(str, argv if shown is None else shown)))
        rename = _renamer(names or {})
        lines: list[str] = []
        timed_out = False
        with contextlib.ExitStack() as stack:
            sink = None
            if log is not None:
                # Before the program starts: a log that cannot be written must not leave a program running.
                stack.enter_context(workspace_errors(log))
                log.parent.mkdir(parents=True, exist_ok=True)
                sink = stack.enter_context(log.open("a", encoding="utf-8"))
                sink.write(f"+ {rename(command)}\n")
                sink.flush()
            started = time.monotonic()
            child = _start(words, command, cwd=cwd, env=env)

            def expire() -> None:
                nonlocal timed_out
                timed_out = True
                _end_session(child)

            try:
                if timeout is not None:
                    timer = threading.Timer(timeout, expire)
                    timer.start()
                    stack.callback(timer.join)
                    stack.callback(timer.cancel)
                assert child.stdout is not None  # noqa: S101 - PIPE was asked for
                for raw in child.stdout:
                    line = redact(raw)
                    lines.append(line)
                    if sink is not None:
                        sink.write(rename(line))
                        sink.flush()
                    if on_line is not None:
                        on_line(line.rstrip("\n"))
                child.wait()
            except BaseException:
                _end_session(child)
                raise
            finally:
                if child.stdout is not None:
                    child.stdout.close()
        done = Completed(words, child.returncode, "".join(lines), time.monotonic() - started)
        if timed_out:
            raise CommandError(f"{words[0]} did not end within {timeout:g} s", remedy=_see(log, lines), where=command)
        if check and done.returncode != 0:
            raise CommandError(f"{words[0]} exited with {done.returncode}", remedy=_see(log, lines), where=command)
        return done


def _renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return what replaces each path of ``names``, the longest first, where it stands as a whole path or a parent."""
    if not names:
        return lambda line: line
    longest = sorted(names, key=len, reverse=True)
    # Not within a longer path: with /a/b known, neither /x/a/b nor /a/bc is meant; file:///a/b and -I/a/b are.
    pattern = re.compile(rf"(?<![\w.-])(?<![^/]/)(-[A-Za-z]+)?({'|'.join(map(re.escape, longest))})(?![\w-]|\.\w)")
    return lambda line: pattern.sub(lambda found: (found[1] or "") + names[found[2]], line)


def _start(
    words: tuple[str, ...], shown: str, *, cwd: Path | None, env: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        missing = cwd if cwd is not None and not cwd.is_dir() else words[0]
        raise CommandError(
            f"{missing} was not found", remedy=f"install it or correct PATH, then run again: {shown}"
        ) from error
    except OSError as error:
        raise CommandError(f"{words[0]} could not be started: {error.strerror}", remedy=f"check {shown}") from error


def _see(log: Path | None, lines: list[str]) -> str:
    tail = "".join(f"    {line}" for line in lines[-_TAIL_LINES:]).rstrip()
    return f"read {log}; it ends:\n{tail}" if log else f"read its output:\n{tail}"


def _end_session(child: subprocess.Popen[str], grace: float = 3.0) -> None:
    """End the child and everything it started: SIGTERM, then SIGKILL after ``grace`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@dataclass
class RecordingRunner:
    """For tests: starts nothing, keeps every call, answers from ``answer`` (default: success, no output)."""

    answer: Callable[[tuple[str, ...]], tuple[int, str]] = lambda _argv: (0, "")
    calls: list[tuple[str, ...]] = field(default_factory=list)
    environments: list[Mapping[str, str] | None] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,  # noqa: ARG002 - same signature as Runner
        env: Mapping[str, str] | None = None,
        log: Path | None = None,  # noqa: ARG002
        check: bool = True,
        timeout: float | None = None,  # noqa: ARG002
        on_line: Callable[[str], None] | None = None,
        shown: Sequence[str | Path] | None = None,  # noqa: ARG002
        names: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> Completed:
        """See :meth:`Runner.run`."""
        words = tuple(str(word) for word in argv)
        self.calls.append(words)
        self.environments.append(env)
        returncode, output = self.answer(words)
        for line in output.splitlines():
            if on_line is not None:
                on_line(line)
        if check and returncode != 0:
            raise CommandError(f"{words[0]} exited with {returncode}", remedy=output)
        return Completed(words, returncode, output, 0.0)
