"""How oras is run: its version, other attempts when what failed may pass and only then, its errors in our words."""

from __future__ import annotations

from pathlib import Path

import pytest

from cufallback.errors import RegistryError, ToolchainError
from cufallback.image.oras import Oras
from cufallback.image.reference import parse_reference
from cufallback.process import LocalRunner, RecordingRunner

REFERENCE = parse_reference("registry.example/team/app:v1")
HEAD = 'Error: failed to resolve: Head "https://registry.example/v2/team/app/manifests/v1": '


class FakeOras(RecordingRunner):
    """Answers ``oras version`` rightly and every other command with the next of ``answers``, the last one for ever."""

    def __init__(self, *answers: tuple[int, str], version: str = "1.2.0+Debian") -> None:
        self._answers = list(answers)
        self._version = version
        super().__init__(self._next)

    def _next(self, argv: tuple[str, ...]) -> tuple[int, str]:
        if argv == ("oras", "version"):
            return 0, f"Version:    {self._version}\nGo version: go1.24.4\n"
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    @property
    def attempts(self) -> int:
        return len([call for call in self.calls if call != ("oras", "version")])


@pytest.mark.parametrize(
    ("output", "attempts", "remedy"),
    [
        (HEAD + "dial tcp 192.0.2.1:443: connect: connection refused", 3, "see that registry.example runs"),
        (HEAD + "dial tcp: lookup registry.example: no such host", 3, "see that registry.example runs"),
        (HEAD + "read tcp: connection reset by peer", 3, "see that registry.example runs"),
        (HEAD + "EOF", 3, "see that registry.example runs"),
        (HEAD + "net/http: TLS handshake timeout", 3, "see that registry.example runs"),
        (HEAD + "response status code 401: unauthorized: authentication required", 1, "docker login registry.example"),
        (HEAD + "response status code 403: denied: requested access to the resource is denied", 1, "docker login"),
        (HEAD + "response status code 400: manifest invalid: manifest invalid", 1, "why it refuses"),
        (HEAD + "response status code 500: unknown", 3, "is in trouble"),
        (HEAD + "response status code 429: Too Many Requests", 3, "is in trouble"),
        ("Error response from registry: unknown: unknown error", 3, "is in trouble"),
        ("Error response from registry: manifest invalid: manifest invalid", 1, "why it refuses"),
        (HEAD + "response status code 504: gateway timeout", 3, "is in trouble"),
        ("Error response from registry: registry.example/team/app:v1: not found", 1, "check the name"),
        (HEAD + "http: server gave HTTP response to HTTPS client", 1, "plain http"),
        (HEAD + "tls: failed to verify certificate: x509: certificate signed by unknown authority", 1, "trust"),
    ],
)
def test_each_failure_has_its_attempts_and_remedy(output: str, attempts: int, remedy: str) -> None:
    runner, slept = FakeOras((1, f"Copying 12 layer\n{output}\n")), list[float]()
    with pytest.raises(RegistryError) as caught:
        Oras(runner, log=None, sleep=slept.append).run(REFERENCE, ["cp", "x"])
    assert runner.attempts == attempts
    assert slept == [1.0, 2.0][: attempts - 1]
    assert remedy in caught.value.remedy
    assert caught.value.where == str(REFERENCE)
    assert "Copying" not in caught.value.reason


def test_an_attempt_that_succeeds_ends_the_attempts() -> None:
    runner, slept = FakeOras((1, HEAD + "EOF\n"), (0, "Digest: sha256:1\n")), list[float]()
    assert Oras(runner, log=None, sleep=slept.append).run(REFERENCE, ["cp"]) == "Digest: sha256:1\n"
    assert slept == [1.0]


@pytest.mark.parametrize(
    "output",
    [
        HEAD + "response status code 401: unauthorized: not found",
        'Error: error getting credentials - err: exec: "docker-credential-x": executable file not found in $PATH',
        HEAD + "dial tcp: connect: connection refused",
        HEAD + "response status code 500: x",
    ],
)
def test_only_what_the_registry_lacks_is_missing(output: str) -> None:
    with pytest.raises(RegistryError):
        Oras(FakeOras((1, output)), log=None, sleep=lambda _seconds: None).ask(REFERENCE, ["manifest", "fetch"])


def test_what_the_registry_lacks_is_none() -> None:
    missing = 'Error response from registry: failed to find "x": registry.example/team/app:v1: not found\n'
    assert Oras(FakeOras((1, missing)), log=None).ask(REFERENCE, ["manifest", "fetch"]) is None


def test_errors_are_redacted() -> None:
    output = 'Error: Get "https://user:hunter2@registry.example/v2/": Authorization: Basic aHVudGVyMg==\n'
    with pytest.raises(RegistryError) as caught:
        Oras(FakeOras((1, output)), log=None).run(REFERENCE, ["cp"])
    assert "hunter2" not in str(caught.value)
    assert "aHVudGVyMg" not in str(caught.value)


@pytest.mark.parametrize("version", ["1.1.0", "0.15.0", "unreleased"])
def test_an_old_oras_is_refused(version: str) -> None:
    with pytest.raises(ToolchainError) as caught:
        Oras(FakeOras((0, ""), version=version), log=None).run(REFERENCE, ["cp"])
    assert "1.2" in caught.value.remedy


@pytest.mark.parametrize("version", ["1.2.0", "1.3.3+Debian", "2.0.0"])
def test_newer_ones_are_taken(version: str) -> None:
    assert Oras(FakeOras((0, ""), version=version), log=None).version() == version


def test_a_missing_oras_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="oras was not found") as caught:
        Oras(LocalRunner(), log=None).run(REFERENCE, ["cp"])
    assert "install oras" in caught.value.remedy
