"""Entry point of the `cufallback` command and of `python -m cufallback`."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import FrameType

from cufallback.cli import run
from cufallback.errors import CufallbackError, ExitCode
from cufallback.redact import redact


class _Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that no handler on the way swallows it."""


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. No traceback reaches the user."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal gets escapes, not a failure
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk or a reader that has gone can still be told
        return code
    except CufallbackError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except _Terminated:
        print("stopped by SIGTERM; run the same command again to resume", file=sys.stderr)
        return ExitCode.TERMINATED
    except BrokenPipeError:
        _abandon_stdout()  # its reader has gone (`| head`)
        return ExitCode.OK
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _abandon_stdout()
            print(f"error: {error.strerror}\n  remedy: free disk space, also where stdout goes", file=sys.stderr)
            return ExitCode.WORKSPACE
        where = _report(redact(f"{' '.join(sys.argv)}\n{traceback.format_exc()}"))
        print(
            f"error: unexpected fault in cufallback\n  remedy: this is a bug; please send {where} with your report",
            file=sys.stderr,
        )
        return ExitCode.UNEXPECTED


def _abandon_stdout() -> None:
    """Give the interpreter nothing left to flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(text: str) -> str:
    """Write a report file and return its name, or the text itself where none can be written."""
    try:
        handle, name = tempfile.mkstemp(prefix="cufallback-report-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return f"this\n{text}"
    return name


if __name__ == "__main__":
    sys.exit(main())
