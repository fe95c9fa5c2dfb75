"""Which engine builds images here, and why one cannot: real answers of buildx, and a fake engine behind a socket."""

from __future__ import annotations

import gc
import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cufallback.errors import CommandError
from cufallback.image.engine import Engine, NoEngine, find_engine
from cufallback.process import Completed, RecordingRunner

# What docker-buildx 0.13.1 of Debian 13 prints for Docker Engine 26.1.5.
INSPECTED = """\
Name:          default
Driver:        docker
Last Activity: 2026-12-01 04:48:34 +0000 UTC

Nodes:
Name:             default
Endpoint:         default
Status:           running
BuildKit version: v0.0.0+unknown
Platforms:        linux/amd64, linux/amd64/v2, linux/amd64/v3, linux/amd64/v4
Labels:
 org.mobyproject.buildkit.worker.executor:             containerd
 org.mobyproject.buildkit.worker.snapshotter:          overlayfs
"""
BUILDX = "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3\n"
# And of a builder of its own, as buildx 0.17.1 of Docker's packages prints it.
CONTAINER = """\
Name:          mine
Driver:        docker-container
Last Activity: 2026-12-01 04:48:34 +0000 UTC

Nodes:
Name:                  mine0
Endpoint:              unix:///var/run/docker.sock
Status:                running
BuildKit daemon flags: --allow-insecure-entitlement=network.host
BuildKit version:      v0.16.0
Platforms:             linux/amd64
"""
UPSTREAM_BUILDX = "github.com/docker/buildx v0.17.1 257815a6fbaee88976808020bf04274388275ae8\n"
VERSION = {
    "Platform": {"Name": ""},
    "Components": [{"Name": "Engine", "Version": "26.1.5+dfsg1"}, {"Name": "containerd", "Version": "1.7.24~ds1"}],
    "Version": "26.1.5+dfsg1",
    "ApiVersion": "1.45",
    "MinAPIVersion": "1.24",
}
INFO = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}

Answers = dict[str, Any]

# docker's client leaves its socket open when an engine's first answer is odd.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def no_socket_for_later_tests() -> Iterator[None]:
    yield
    gc.collect()


class FakeEngine(socketserver.ThreadingUnixStreamServer):
    """Answers /version and /info of the Docker Engine API on a unix socket, and nothing else."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.answers: Answers = {"version": VERSION, "info": INFO}
        self.status = 200
        super().__init__(str(path), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        answer = server.answers[self.path.rpartition("/")[2]]
        if answer is None:
            return  # closes without a word
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    path = tmp_path / "s"
    with FakeEngine(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield server
        server.shutdown()
        thread.join()


def buildx(
    inspected: str | None = INSPECTED, version: str | None = BUILDX, context: str | None = None
) -> RecordingRunner:
    """A runner that answers as docker does; None: that command fails."""

    def answer(argv: tuple[str, ...]) -> tuple[int, str]:
        said = context if argv[1] == "context" else version if argv[2] == "version" else inspected
        return (0, said) if said is not None else (1, "docker: 'buildx' is not a docker command")

    return RecordingRunner(answer)


def test_the_engines_own_builder(fake_engine: FakeEngine) -> None:
    runner = buildx()
    found = find_engine(runner)
    assert found == Engine("docker", "26.1.5+dfsg1", "1.7.24~ds1", "0.13.1+ds1", "v0.0.0+unknown")
    assert sorted(runner.calls) == [("docker", "buildx", "inspect"), ("docker", "buildx", "version")]
    assert isinstance(found, Engine)
    assert found.to_json()["engine"] == "26.1.5+dfsg1"


OLD = {**VERSION, "Version": "24.0.7", "Components": None}
GRAPH = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"], ["Supports d_type", "true"]]}


def test_a_builder_of_its_own_needs_nothing_of_the_engine(fake_engine: FakeEngine) -> None:
    fake_engine.answers = {"version": OLD, "info": GRAPH}
    found = find_engine(buildx(CONTAINER, UPSTREAM_BUILDX))
    assert found == Engine("docker-container", "24.0.7", "unknown", "0.17.1", "v0.16.0")


@pytest.mark.parametrize("version", ["v0.12.5", "v0.9.3", "0.12.0-rc1"])
def test_a_buildkit_that_is_too_old(fake_engine: FakeEngine, version: str) -> None:
    found = find_engine(buildx(CONTAINER.replace("v0.16.0", version), UPSTREAM_BUILDX))
    assert found == NoEngine(
        f"BuildKit {version} cannot rewrite timestamps", "upgrade the builder to BuildKit 0.13 or newer"
    )


@pytest.mark.parametrize("version", ["25.0.5", "24.0.7", "20.10.24+dfsg1", "", "dev"])
def test_an_engine_that_is_too_old(fake_engine: FakeEngine, version: str) -> None:
    fake_engine.answers["version"] = {**VERSION, "Version": version}
    found = find_engine(buildx())
    assert isinstance(found, NoEngine)
    assert "cannot rewrite timestamps" in found.why
    assert "26 or newer" in found.remedy
    assert "docker-container" in found.remedy


@pytest.mark.parametrize(
    "info", [GRAPH, {}, {"DriverStatus": None}, {"DriverStatus": [["driver-type", "x"], ["alone"]]}]
)
def test_an_image_store_without_oci_exporter(fake_engine: FakeEngine, info: dict[str, Any]) -> None:
    fake_engine.answers["info"] = info
    found = find_engine(buildx())
    assert isinstance(found, NoEngine)
    assert "no OCI exporter" in found.why
    assert '{"features": {"containerd-snapshotter": true}}' in found.remedy
    assert "docker-container" in found.remedy


def test_docker_without_buildx(fake_engine: FakeEngine) -> None:
    found = find_engine(buildx(None, None))
    assert found == NoEngine("docker has no buildx", "install the buildx plugin (package docker-buildx)")


def test_a_builder_that_does_not_answer(fake_engine: FakeEngine) -> None:
    found = find_engine(buildx(None))
    assert isinstance(found, NoEngine)
    assert "the builder does not answer" in found.why
    assert "docker buildx ls" in found.remedy


class NoProgram(RecordingRunner):
    def run(self, argv: Any, **_options: Any) -> Completed:
        raise CommandError(f"{argv[0]} was not found", remedy="install it")


def test_an_engine_without_the_docker_program(fake_engine: FakeEngine) -> None:
    assert isinstance(find_engine(NoProgram()), NoEngine)


def test_without_docker_host_the_current_context_names_the_engine(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ["DOCKER_HOST"]
    monkeypatch.delenv("DOCKER_HOST")
    runner = buildx(context=f"{address}\n")
    assert isinstance(find_engine(runner), Engine)
    assert ("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}") in runner.calls
    assert isinstance(find_engine(buildx(context=f"{address}-elsewhere\n")), NoEngine)


HOSTS = ["unix:///nowhere/at/all.sock", "tcp://127.0.0.1:1", "nonsense", "npipe:////./pipe/docker", "tcp://a b"]


@pytest.mark.parametrize("host", HOSTS)
def test_an_address_at_which_nothing_answers(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    found = find_engine(buildx())
    assert isinstance(found, NoEngine)
    assert "DOCKER_HOST" in found.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_socket_that_one_may_not_use(fake_engine: FakeEngine) -> None:
    assert isinstance(find_engine(buildx()), Engine)  # and everything is imported that another user may not read
    os.seteuid(65534)
    try:
        found = find_engine(buildx())
    finally:
        os.seteuid(0)
    assert isinstance(found, NoEngine)
    assert "no right" in found.why
    assert "group docker" in found.remedy


ODD: list[Any] = [
    None, b"", b"<html>", b"\xff", b"[" * 20_000, [], [1], "text", 7, {}, {"Version": None},
    {**VERSION, "ApiVersion": 7}, {**VERSION, "ApiVersion": "x"}, {**VERSION, "ApiVersion": None},
    {**VERSION, "Components": 7}, {**VERSION, "Components": [7]}, {**VERSION, "Components": [{}]},
    {**VERSION, "Components": {"a": 1}}, {"ApiVersion": "1.45"}, {**VERSION, "Version": []},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_versions_are_no_engine_and_no_traceback(fake_engine: FakeEngine, number: int) -> None:
    fake_engine.answers["version"] = ODD[number]
    found = find_engine(buildx())
    assert isinstance(found, NoEngine)
    assert found.remedy


ODD_INFO: list[Any] = [
    None, b"", b"<html>", [], "text", 7, {"DriverStatus": 7}, {"DriverStatus": [7]}, {"DriverStatus": [[{}, 1]]},
    {"DriverStatus": {"a": 1}}, {"DriverStatus": [None]},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD_INFO)))
def test_odd_infos_are_no_engine_and_no_traceback(fake_engine: FakeEngine, number: int) -> None:
    fake_engine.answers["info"] = ODD_INFO[number]
    found = find_engine(buildx())
    assert isinstance(found, NoEngine)
    assert found.remedy


@pytest.mark.parametrize("status", [400, 403, 404, 500, 503])
def test_an_engine_that_refuses(fake_engine: FakeEngine, status: int) -> None:
    fake_engine.status = status
    assert isinstance(find_engine(buildx()), NoEngine)


@pytest.mark.parametrize("said", ["", "x", "Driver:", "Driver: \n\n", "\0"])
@pytest.mark.parametrize("make", [lambda said: buildx(said), lambda said: buildx(CONTAINER, said)])
def test_odd_words_of_buildx_are_unknown_facts(
    fake_engine: FakeEngine, said: str, make: Callable[[str], RecordingRunner]
) -> None:
    found = find_engine(make(said))
    assert isinstance(found, Engine)
    assert "unknown" in (found.driver, found.buildx)
