"""tests/services: what can be tested of the engine, the registry's faulty front and the packages without them."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.services import engine as engine_module
from tests.services.debian import debian_sources
from tests.services.engine import PrivateEngine, another_engine_runs, changed_environment
from tests.services.faulty_registry import (
    Fault,
    FaultyRegistry,
    blobs_truncated,
    connections_closed,
    credentials_required,
    manifests_refused,
    no_fault,
    running_front,
    server_errors,
)
from tests.services.network import Network

pytest_plugins = ["pytester"]

CHECKOUT = Path(__file__).resolve().parents[2]
BLOB = bytes(range(256)) * 16


class Upstream(BaseHTTPRequestHandler):
    """Serves one blob, and names the place of uploads as a registry does."""

    protocol_version = "HTTP/1.1"
    received: list[tuple[str, bytes]]

    def do_GET(self) -> None:
        self.reply(200, BLOB)

    def do_HEAD(self) -> None:
        self.reply(200, BLOB)

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.headers["Host"], body))
        self.reply(201, b"", Location="http://elsewhere.invalid/v2/a/blobs/uploads/1?state=x")

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def front() -> Iterator[Callable[[Fault], FaultyRegistry]]:
    Upstream.received = []
    with ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Upstream))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield lambda fault: stack.enter_context(running_front(f"127.0.0.1:{server.server_address[1]}", fault))


def ask(front: FaultyRegistry, method: str, path: str, **options: Any) -> tuple[http.client.HTTPMessage, int, bytes]:
    connection = http.client.HTTPConnection(front.address, timeout=10)
    try:
        connection.request(method, path, **options)
        answer = connection.getresponse()
        return answer.headers, answer.status, answer.read()
    finally:
        connection.close()


def test_without_fault_everything_passes_and_is_recorded(front: Callable[[Fault], FaultyRegistry]) -> None:
    shown = front(no_fault)
    assert ask(shown, "GET", "/v2/a/blobs/1", headers={"Accept": "x/y"})[1:] == (200, BLOB)
    headers, status, body = ask(shown, "HEAD", "/v2/a/blobs/1")
    assert (headers["Content-Length"], status, body) == (str(len(BLOB)), 200, b"")
    headers, status, _body = ask(shown, "PUT", "/v2/a/manifests/1", body=b"whole")
    assert (headers["Location"], status) == (f"http://{shown.address}/v2/a/blobs/uploads/1?state=x", 201)
    ask(shown, "PUT", "/v2/a/manifests/2", body=iter([b"in ", b"chunks"]), encode_chunked=True)
    assert Upstream.received == [(shown.address, b"whole"), (shown.address, b"in chunks")]
    assert [(request.method, request.path, request.status) for request in shown.requests] == [
        ("GET", "/v2/a/blobs/1", 200),
        ("HEAD", "/v2/a/blobs/1", 200),
        ("PUT", "/v2/a/manifests/1", 201),
        ("PUT", "/v2/a/manifests/2", 201),
    ]
    assert shown.requests[0].headers["Accept"] == "x/y"


def test_errors_come_the_given_number_of_times_and_only_where_they_match(
    front: Callable[[Fault], FaultyRegistry],
) -> None:
    shown = front(server_errors(2, matching="^GET .*/blobs/", status=503))
    assert ask(shown, "HEAD", "/v2/a/blobs/1")[1] == 200
    assert [ask(shown, "GET", path)[1] for path in ("/v2/", *["/v2/a/blobs/1"] * 3)] == [200, 503, 503, 200]


def test_a_manifest_is_refused_and_not_passed_on(front: Callable[[Fault], FaultyRegistry]) -> None:
    shown = front(manifests_refused())
    _headers, status, body = ask(shown, "PUT", "/v2/a/manifests/1", body=b"{}")
    assert (status, b"MANIFEST_INVALID" in body) == (400, True)
    assert Upstream.received == []
    assert ask(shown, "GET", "/v2/a/manifests/1")[1] == 200


def test_a_blob_is_cut_off_below_its_announced_length(front: Callable[[Fault], FaultyRegistry]) -> None:
    shown = front(blobs_truncated(1))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(shown, "GET", "/v2/a/blobs/1")
    assert caught.value.partial == BLOB[: len(BLOB) // 2]
    assert caught.value.expected == len(BLOB) - len(BLOB) // 2
    assert ask(shown, "GET", "/v2/a/blobs/1")[2] == BLOB


def test_a_closed_connection_has_no_answer(front: Callable[[Fault], FaultyRegistry]) -> None:
    shown = front(connections_closed())
    with pytest.raises(ConnectionError):
        ask(shown, "GET", "/v2/")
    assert [request.status for request in shown.requests] == [None]


@pytest.mark.parametrize(
    ("sent", "status"),
    [(None, 401), ("Basic dXNlcjp3cm9uZw==", 401), ("Basic dXNlcjpzZWNyZXQ=", 200)],
    ids=["none", "wrong", "right"],
)
def test_only_the_right_credentials_pass(
    front: Callable[[Fault], FaultyRegistry], sent: str | None, status: int
) -> None:
    shown = front(credentials_required("user", "secret"))
    headers, got, _body = ask(shown, "GET", "/v2/", headers={"Authorization": sent} if sent else {})
    assert got == status
    assert (headers["WWW-Authenticate"] or "").startswith("Basic realm=") == (status == 401)


DEB822 = """\
# a comment
Types: deb
URIs: http://one.example/debian
# within
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://two.example/debian-security
 http://three.example/debian-security
Suites: bookworm-security
Components: main
"""
ONE_LINE = """\
# deb http://off.example/debian bookworm main
deb http://four.example/debian bookworm main non-free
deb [arch=amd64] http://five.example/debian bookworm-updates main
deb-src http://source.example/debian bookworm main
deb http://others.example/linux bookworm stable
deb http://others.example/pg bookworm-pgdg main
"""


def test_the_sources_of_another_release_are_the_machines_own_with_its_name() -> None:
    assert debian_sources([DEB822, ONE_LINE, ONE_LINE], own="bookworm", release="trixie").splitlines() == [
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://one.example/debian trixie main",
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://one.example/debian trixie-updates main",
        "deb http://two.example/debian-security trixie-security main",
        "deb http://three.example/debian-security trixie-security main",
        "deb http://four.example/debian trixie main",
        "deb [arch=amd64] http://five.example/debian trixie-updates main",
    ]


def test_a_process_that_only_mentions_dockerd_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ["vi dockerd.log", "containerd --config x"]
    monkeypatch.setattr(engine_module, "_command", lambda pid: commands[pid % 2])
    assert not another_engine_runs()
    commands[:] = ["dockerd -H fd://"] * 2
    assert another_engine_runs()


def test_what_is_no_longer_ours_is_not_ended(tmp_path: Path) -> None:
    """The identifier in the file of a run that was killed belongs to this test by now."""
    (tmp_path / "docker.pid").write_text(str(os.getpid()))
    PrivateEngine(tmp_path, tmp_path / "data")._end_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_the_network_survives_its_file() -> None:
    state = Network("0\n", "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n", had_bridge=False)
    assert Network.from_json(state.to_json()) == state


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with changed_environment({"DOCKER_CONTEXT": None, "DOCKER_HOST": "unix:///x"}):
        assert "DOCKER_CONTEXT" not in os.environ
        assert os.environ["DOCKER_HOST"] == "unix:///x"
    assert os.environ["DOCKER_CONTEXT"] == "mine"
    assert "DOCKER_HOST" not in os.environ


INNER = """
import pathlib, pytest

@pytest.fixture(scope="session")
def test_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")

@pytest.mark.services
@pytest.mark.parametrize("name", ["engine", "registry", "oras", "cosign", "skopeo", "base_layout"])
def test_asks(name, request):
    request.getfixturevalue(name)

@pytest.mark.services
def test_front(faulty_registry):
    pass
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_on_a_users_machine_nothing_is_installed_or_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """No program is found and no engine answers; an attempt to install would fail the inner test."""
    for name in ("CI", "CUFALLBACK_TEST_SERVICES"):
        monkeypatch.delenv(name, raising=False)
    if allowed:
        monkeypatch.setenv("CUFALLBACK_TEST_SERVICES", "1")
    pytester.makeini(f"[pytest]\npythonpath = {CHECKOUT} {CHECKOUT}/build\nmarkers =\n    services: needs a service\n")
    pytester.makeconftest(
        'pytest_plugins = ["tests.services.plugin", "tests.services.containers"]\n'
        "import os, pytest\n"
        "from tests.services import debian\n"
        "debian.PATH = os.devnull\n"
        "os.geteuid = lambda: 1000\n"
    )
    pytester.makepyfile(INNER)
    done = pytester.runpytest_subprocess("-rs", "-p", "no:cacheprovider")
    text = done.stdout.str()
    if allowed:
        assert done.parseoutcomes() == {"failed": 6, "errors": 1}
        assert "as root only" in text
    else:
        assert done.parseoutcomes() == {"skipped": 7}
        assert "CUFALLBACK_TEST_SERVICES=1" in text
