"""The Docker engine that builds images: what it is, and why one cannot be used."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from cufallback.errors import CommandError
from cufallback.process import Runner

# `rewrite-timestamp` came with BuildKit 0.13; engines 25.0 and older carry 0.12 (release notes of moby/buildkit
# v0.13.0 and of Docker Engine 26.0).
MINIMUM_ENGINE = 26
_OLD_BUILDKITS = {(0, minor) for minor in range(1, 13)}  # Debian's builds call theirs 0.0.0
_SECONDS = 20
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_ODD = (ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class Engine:
    """What builds images here: its versions decide about bytes (gzip and zstd streams), so the record holds them.

    ``driver`` is buildx's: ``docker`` for the engine's own BuildKit, ``docker-container`` and others for another one.
    """

    driver: str
    engine: str
    containerd: str
    buildx: str
    buildkit: str

    def to_json(self) -> dict[str, str]:
        """Return the fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class NoEngine:
    """Why no image can be built here, and what would change that."""

    why: str
    remedy: str


def find_engine(runner: Runner) -> Engine | NoEngine:
    """Ask for the engine and for buildx's current builder (``BUILDX_BUILDER`` and ``DOCKER_HOST`` are honoured)."""
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(_engine_facts, runner)
        versions = pool.submit(_output, ("docker", "buildx", "version"), runner)
        builder = pool.submit(_output, ("docker", "buildx", "inspect"), runner)
        facts, buildx, inspected = asked.result(), versions.result(), builder.result()
    if isinstance(facts, NoEngine):
        return facts
    if isinstance(buildx, NoEngine) and "was not found" in buildx.why:
        return NoEngine("there is no docker program", "install Docker's command line with its plugin buildx")
    if isinstance(buildx, NoEngine):
        return NoEngine("docker has no buildx", "install the buildx plugin (package docker-buildx)")
    if isinstance(inspected, NoEngine):
        return NoEngine(f"the builder does not answer: {inspected.why}", "look at `docker buildx ls`")
    driver = _found(r"^Driver:\s*(\S+)", inspected)
    if driver == "docker":
        if int(_found(r"^(\d+)", facts["engine"], "0")) < MINIMUM_ENGINE:
            remedy = f"upgrade to Docker Engine {MINIMUM_ENGINE} or newer, or use a docker-container builder"
            return NoEngine(f"Docker Engine {facts['engine']} cannot rewrite timestamps", remedy)
        if facts["store"] != "io.containerd.snapshotter.v1":
            return NoEngine(
                "the engine's image store has no OCI exporter",
                'set {"features": {"containerd-snapshotter": true}} in its daemon.json, or use a docker-container '
                "builder (`docker buildx create --use`)",
            )
    buildkit = _found(r"^BuildKit(?: version)?:\s*(\S+)", inspected)
    if tuple(map(int, re.findall(r"\d+", buildkit)[:2])) in _OLD_BUILDKITS:
        return NoEngine(
            f"BuildKit {buildkit} cannot rewrite timestamps", "upgrade the builder to BuildKit 0.13 or newer"
        )
    return Engine(
        driver=driver,
        engine=facts["engine"],
        containerd=facts["containerd"],
        buildx=_found(r"\bv?(\d+\.\d+\.\d+\S*)", buildx),
        buildkit=buildkit,
    )


def _found(pattern: str, text: str, otherwise: str = "unknown") -> str:
    match = re.search(pattern, text, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else otherwise


def _engine_facts(runner: Runner) -> dict[str, str] | NoEngine:
    import docker
    import docker.errors
    import docker.utils
    import requests

    start = "start Docker, or point DOCKER_HOST at an engine"
    host = _host(runner)
    try:
        _knock(host or _DEFAULT_HOST)
        client = docker.DockerClient(
            **{**docker.utils.kwargs_from_env(), **({"base_url": host} if host else {})}, timeout=_SECONDS
        )
        try:
            version, info = client.version(), client.info()
        finally:
            client.close()
    except PermissionError:
        return NoEngine("no right to use the Docker engine", "join the group docker, or use a rootless engine")
    except (OSError, docker.errors.DockerException, requests.RequestException):
        return NoEngine("no Docker engine answers", start)
    except _ODD:  # the client trusts that an engine answers; this may be anything behind a socket
        return NoEngine("what answers is no Docker engine", start)
    try:
        return _facts(version, info)
    except _ODD:
        return NoEngine("what answers is no Docker engine", start)


def _facts(version: Any, info: Any) -> dict[str, str]:
    components = {item["Name"]: item["Version"] for item in version.get("Components") or []}
    drivers = {row[0]: row[1] for row in info.get("DriverStatus") or [] if len(row) == 2}
    return {
        "engine": str(version["Version"]),
        "containerd": str(components.get("containerd", "unknown")),
        "store": str(drivers.get("driver-type", "")),
    }


def _knock(host: str) -> None:
    """Connect to a local engine once: the SDK says less of why it cannot, and leaves the socket open."""
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(host.removeprefix("unix://"))


def _host(runner: Runner) -> str | None:
    """Return the engine's address as the docker command finds it: DOCKER_HOST, else the current context."""
    if os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    asked = _output(("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"), runner)
    return None if isinstance(asked, NoEngine) else asked.strip() or None


def _output(argv: tuple[str, ...], runner: Runner) -> str | NoEngine:
    try:
        return runner.run(argv, timeout=_SECONDS).output
    except CommandError as error:
        return NoEngine(error.reason, error.remedy)
