"""The program ``oras``: its version, its runs, repeated when what failed may pass, its errors in our words."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cufallback.errors import CommandError, RegistryError, ToolchainError
from cufallback.image.reference import Reference
from cufallback.process import Completed, Runner
from cufallback.redact import redact
from cufallback.tomlplace import printable

_OLDEST = (1, 2)
_GET_ORAS = "install oras 1.2 or newer (Debian 13: `apt install oras`; elsewhere https://oras.land/docs/installation)"
_ATTEMPTS = 3
_FIRST_PAUSE = 1.0  # seconds; each further one is twice as long
# oras itself never gives up on a peer that says nothing.
QUESTION_SECONDS: Final = 120.0
TRANSFER_SECONDS: Final = 4 * 3600.0

_NETWORK = re.compile(
    r"connection refused|connection reset|broken pipe|no such host|server misbehaving|network is unreachable"
    r"|no route to host|timeout|\bEOF\b|did not end within|context deadline exceeded",
    re.IGNORECASE,
)
# What a registry answers with 429 and 5xx: the status where it sent no error document, else the document's code (OCI
# distribution specification 1.1, "Error Codes"; UNKNOWN and UNAVAILABLE are those of docker-registry). oras repeats
# such requests by itself, but not the upload of a blob, whose body it has only once.
_TROUBLE = re.compile(
    r"status code (?:408|429|5[0-9]{2})\b|response from registry: (?:unknown|unavailable|toomanyrequests):",
    re.IGNORECASE,
)
_MISSING = re.compile(r": not found\s*$|status code 404\b|manifest unknown|name unknown", re.IGNORECASE)
_DENIED = re.compile(
    r"status code 40[13]\b|unauthorized|denied|authentication required|basic credential", re.IGNORECASE
)


class Oras:
    """Runs oras >= 1.2.

    Args:
        runner: starts it.
        log: file that receives each command and its redacted output, or None.
        sleep: waits that many seconds between attempts.
    """

    def __init__(self, runner: Runner, *, log: Path | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._runner = runner
        self._log = log
        self._sleep = sleep
        self._version: str | None = None

    def version(self) -> str:
        """Return oras's version, such as ``1.2.0``.

        Raises:
            ToolchainError: there is no oras, or it is older than 1.2.
        """
        if self._version is None:
            output = self._start(["version"], seconds=QUESTION_SECONDS, names=None).output
            found = re.search(r"^Version:\s*v?([0-9]+)\.([0-9]+)(\S*)", output, re.MULTILINE)
            if found is None:
                raise ToolchainError("oras does not tell its version", remedy=_GET_ORAS)
            version = f"{found[1]}.{found[2]}{found[3]}"
            if (int(found[1]), int(found[2])) < _OLDEST:
                raise ToolchainError(f"oras is {version}, needed is 1.2 or newer", remedy=_GET_ORAS)
            self._version = version
        return self._version

    def run(
        self,
        reference: Reference,
        arguments: Sequence[str],
        *,
        seconds: float = QUESTION_SECONDS,
        names: Mapping[str, str] | None = None,
    ) -> str:
        """Run ``oras ARGUMENTS`` and return what it printed.

        Args:
            reference: what it is about, for errors.
            arguments: subcommand, options, operands; never credentials.
            seconds: after which it is ended; :data:`TRANSFER_SECONDS` for images.
            names: paths, each with what the log says instead.

        Raises:
            RegistryError: it failed, three times when network or registry were in trouble.
            ToolchainError: there is no oras, or an old one.
        """
        done = self._try(arguments, seconds=seconds, names=names)
        if done.returncode != 0:
            raise _failure(reference, done)
        return done.output

    def ask(self, reference: Reference, arguments: Sequence[str]) -> str | None:
        """As :meth:`run`, but None when the registry has no such tag, digest or repository."""
        done = self._try(arguments, seconds=QUESTION_SECONDS, names=None)
        if done.returncode == 0:
            return done.output
        if is_missing(done.output):
            return None
        raise _failure(reference, done)

    def _try(self, arguments: Sequence[str], *, seconds: float, names: Mapping[str, str] | None) -> Completed:
        self.version()
        for attempt in range(_ATTEMPTS):
            done = self._start(arguments, seconds=seconds, names=names)
            if done.returncode == 0 or attempt + 1 == _ATTEMPTS or not is_passing(done.output):
                break
            self._sleep(_FIRST_PAUSE * 2**attempt)
        return done

    def _start(self, arguments: Sequence[str], *, seconds: float, names: Mapping[str, str] | None) -> Completed:
        argv = ("oras", *arguments)
        try:
            return self._runner.run(argv, log=self._log, check=False, timeout=seconds, names=names)
        except CommandError as error:
            if shutil.which("oras") is None:
                raise ToolchainError("the program oras was not found", remedy=_GET_ORAS) from error
            return Completed(argv, 124, f"Error: {error.reason}", seconds)


def is_passing(output: str) -> bool:
    """Say whether oras failed because the network or the registry is in trouble, not because it refused."""
    told = _told(output)
    return _TROUBLE.search(told) is not None or _is_network(told)


def _is_network(told: str) -> bool:
    return "status code" not in told and _NETWORK.search(told) is not None


def is_missing(output: str) -> bool:
    """Say whether oras failed because the registry has no such thing, which it may only say to those logged in."""
    told = _told(output)
    return _MISSING.search(told) is not None and _DENIED.search(told) is None


def _told(output: str) -> str:
    """Return oras's error without what stands before it: progress and warnings."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("Error")), 0)
    return " ".join(line.strip() for line in lines[first:])


def _failure(reference: Reference, done: Completed) -> RegistryError:
    """Return the error for a failed oras, with the remedy that its words call for."""
    told = _told(done.output)
    registry = reference.registry
    if _is_network(told):
        remedy = f"see that {registry} runs and can be reached from here (name, port, proxy), then run again"
    elif _DENIED.search(told):
        remedy = f"run `docker login {registry}` with an account that may do this, then run again"
    elif "HTTP response to HTTPS client" in told:
        remedy = f"{registry} speaks plain http; if you trust the way to it, say --plain-http"
    elif "certificate" in told or "x509" in told:
        remedy = f"make this machine trust the certificate authority of {registry}"
    elif is_missing(done.output):
        remedy = "check the name; what a lock or a record names by digest must still be there"
    elif _TROUBLE.search(told):
        remedy = f"{registry} is in trouble: run again later, or ask who runs it"
    else:
        remedy = f"ask who runs {registry} why it refuses this"
    return RegistryError(
        f"oras {done.argv[1]} failed: {printable(redact(told), 600)}", remedy=remedy, where=str(reference)
    )
