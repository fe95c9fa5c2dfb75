"""tests/services/plugin.py, with a small HTTP server as the service."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CHECKOUT = Path(__file__).resolve().parents[2]

INNER = """
import contextlib, subprocess, sys, time, urllib.request
import pytest

PORT = {port}

def answers():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{{PORT}}/", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False

@contextlib.contextmanager
def server():
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1"], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            if answers():
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()

@pytest.mark.services
@pytest.mark.parametrize("time", [1, 2])
def test_asks(need, time):
    need("small server", check=answers, start={start})
    assert answers()

def test_needs_nothing():
    pass
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "CUFALLBACK_TEST_SERVICES"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini(f"[pytest]\npythonpath = {CHECKOUT}\nmarkers =\n    services: needs a service\n")
    pytester.makeconftest('pytest_plugins = ["tests.services.plugin"]')
    return pytester


def results(inner: pytest.Pytester, text: str) -> tuple[dict[str, int], str]:
    inner.makepyfile(text)
    done = inner.runpytest_subprocess("-rs", "-p", "no:cacheprovider")
    return done.parseoutcomes(), done.stdout.str()


def test_without_leave_the_tests_skip_and_say_how_to_get_it(inner: pytest.Pytester, port: int) -> None:
    outcomes, text = results(inner, INNER.format(port=port, start="server"))
    assert outcomes == {"passed": 1, "skipped": 2}
    assert "'small server' does not run here" in text
    assert "CUFALLBACK_TEST_SERVICES=1" in text
    assert not listens(port)


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("CUFALLBACK_TEST_SERVICES", "1")])
def test_with_leave_it_is_started_once_and_stopped(
    inner: pytest.Pytester, port: int, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    outcomes, _text = results(inner, INNER.format(port=port, start="server"))
    assert outcomes == {"passed": 3}
    assert not listens(port)


def test_what_runs_already_is_used_and_left_running(inner: pytest.Pytester, port: int) -> None:
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=inner.path) as process:
        try:
            for _ in range(100):
                if listens(port):
                    break
                time.sleep(0.05)
            outcomes, _text = results(inner, INNER.format(port=port, start="None"))
            assert outcomes == {"passed": 3}
            assert listens(port)
        finally:
            process.terminate()


def test_a_service_that_starts_but_does_not_answer_fails(
    inner: pytest.Pytester, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFALLBACK_TEST_SERVICES", "1")
    outcomes, text = results(inner, INNER.format(port=port, start="contextlib.nullcontext"))
    assert outcomes == {"passed": 1, "failed": 2}
    assert "was started but does not answer" in text


SKIPS = """
import pytest

@pytest.mark.services
def test_gives_up():
    pytest.skip("no engine")

@pytest.mark.services
@pytest.mark.skipif(True, reason="no engine")
def test_never_starts():
    pass

def test_other():
    pytest.skip("no need")

@pytest.mark.services
@pytest.mark.xfail(reason="known")
def test_known():
    raise ValueError
"""


def test_in_ci_no_test_of_services_may_be_skipped(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results(inner, SKIPS)[0] == {"skipped": 3, "xfailed": 1}
    monkeypatch.setenv("CI", "true")
    outcomes, text = results(inner, SKIPS)
    assert outcomes.pop("errors", 0) + outcomes.pop("failed", 0) == 2
    assert outcomes == {"skipped": 1, "xfailed": 1}
    assert "allows no skip for want of a service" in text
    assert "no engine" in text
