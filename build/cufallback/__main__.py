"""Entry point of the `cufallback` command and of `python -m cufallback`."""

from __future__ import annotations

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
        return run(sys.argv[1:] if arguments is None else arguments)
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
        # The reader of stdout has gone (`| head`); give the interpreter nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception:
        handle, name = tempfile.mkstemp(prefix="cufallback-report-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as report:
            report.write(redact(f"{' '.join(sys.argv)}\n{traceback.format_exc()}"))
        print(
            f"error: unexpected fault in cufallback\n  remedy: this is a bug; please send {name} with your report",
            file=sys.stderr,
        )
        return ExitCode.UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
