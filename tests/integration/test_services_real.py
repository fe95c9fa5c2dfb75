"""tests/services for real: the engine, the registry with its tools, the base image, and what stopping leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.services.base import BaseLayout, cached_base
from tests.services.faulty_registry import Fault, FaultyRegistry, credentials_required, no_fault, server_errors

from cufallback.image.layout import find_files, read_image

pytestmark = pytest.mark.services
CHECKOUT = Path(__file__).resolve().parents[2]


def output(*words: str | Path, **changes: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def layout(tmp_path: Path, oras: str) -> Path:
    """A layout with one small artifact, tagged ``1``."""
    (tmp_path / "file").write_text("content")
    output(
        *(oras, "push", "--oci-layout", f"{tmp_path / 'layout'}:1", "--disable-path-validation", tmp_path / "file"),
        "--artifact-type=text/plain",
    )
    return tmp_path / "layout"


def test_the_engine_has_buildkit_and_the_image_store_with_the_oci_exporter(engine: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    target = tmp_path / "image"
    output(
        *("docker", "buildx", "build", "--quiet", "--provenance=false", "--output"),
        *(f"type=oci,tar=false,dest={target}", tmp_path),
    )
    assert list(find_files(read_image(target), re.compile("Dockerfile"))) == ["Dockerfile"]


def test_the_sdk_finds_the_same_engine(engine: str) -> None:
    import docker

    client = docker.from_env()
    try:
        assert client.info()["ID"] == output("docker", "info", "--format", "{{.ID}}")
    finally:
        client.close()


def test_the_registry_keeps_the_digest_and_every_byte(registry: str, oras: str, layout: Path, tmp_path: Path) -> None:
    remote = f"{registry}/services/trip:1"
    output(oras, "cp", "--from-oci-layout", f"{layout}:1", "--to-plain-http", remote)
    digest = output(oras, "resolve", "--plain-http", remote)
    assert digest == output(oras, "resolve", "--oci-layout", f"{layout}:1")
    back = tmp_path / "back"
    output(oras, "cp", "--from-plain-http", f"{registry}/services/trip@{digest}", "--to-oci-layout", f"{back}:1")
    blobs = [{path.name: path.read_bytes() for path in (at / "blobs/sha256").iterdir()} for at in (layout, back)]
    assert blobs[0] == blobs[1]


def test_the_registry_lets_things_be_deleted(registry: str, oras: str, layout: Path) -> None:
    remote = f"{registry}/services/gone:1"
    output(oras, "cp", "--from-oci-layout", f"{layout}:1", "--to-plain-http", remote)
    output(oras, "manifest", "delete", "--force", "--plain-http", remote)
    assert output(oras, "repo", "tags", "--plain-http", f"{registry}/services/gone") == ""


def test_the_other_tools_run(cosign: str, skopeo: str) -> None:
    assert "GitVersion" in output(cosign, "version")
    assert output(skopeo, "--version").startswith("skopeo version")


def test_a_push_by_oras_survives_one_error_of_the_server(
    faulty_registry: Callable[[Fault], FaultyRegistry], oras: str, layout: Path
) -> None:
    front = faulty_registry(server_errors(1, matching="^PUT .*/manifests/"))
    output(oras, "cp", "--from-oci-layout", f"{layout}:1", "--to-plain-http", f"{front.address}/services/error:1")
    assert [asked.status for asked in front.requests if re.search("^PUT .*/manifests/", asked.line)] == [500, 201]


def test_credentials_of_the_configuration_reach_the_registry(
    faulty_registry: Callable[[Fault], FaultyRegistry], oras: str, layout: Path, tmp_path: Path
) -> None:
    front = faulty_registry(credentials_required("user", "secret"))
    settings = {"auths": {front.address: {"auth": "dXNlcjpzZWNyZXQ="}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    words = (oras, "cp", "--from-oci-layout", f"{layout}:1", "--to-plain-http", f"{front.address}/services/known:1")
    output(*words, DOCKER_CONFIG=str(tmp_path))
    assert {asked.headers.get("Authorization") for asked in front.requests} == {None, "Basic dXNlcjpzZWNyZXQ="}
    refused = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"DOCKER_CONFIG": "/nowhere"})
    assert refused.returncode != 0


def test_docker_pushes_and_pulls_through_a_front(
    engine: str, faulty_registry: Callable[[Fault], FaultyRegistry], tmp_path: Path
) -> None:
    front = faulty_registry(no_fault)
    name = f"{front.address}/services/pushed:1"
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY big /\n")
    (tmp_path / "big").write_bytes(os.urandom(5 << 20))
    output("docker", "buildx", "build", "--quiet", "--provenance=false", "--load", "--tag", name, tmp_path)
    try:
        output("docker", "push", "--quiet", name)
        output("docker", "image", "rm", name)
        output("docker", "pull", "--quiet", name)
    finally:
        output("docker", "image", "rm", name)
    asked = [request.line for request in front.requests]
    assert any(line.startswith("PUT /v2/services/pushed/blobs/uploads/") for line in asked)
    assert "PUT /v2/services/pushed/manifests/1" in asked


def test_the_base_runs_with_a_whole_python_and_says_its_packages(
    engine: str, base_layout: BaseLayout, tmp_path: Path
) -> None:
    image = read_image(base_layout.folder, base_layout.digest)
    assert image.platform == "linux/amd64"
    found = find_files(image, re.compile(r"var/lib/dpkg/status|usr/share/doc/libssl3/.*"))
    assert sorted(found) == ["usr/share/doc/libssl3/copyright", "var/lib/dpkg/status"]
    assert b"Package: libstdc++6\n" in found["var/lib/dpkg/status"]

    loaded = output("docker", "load", "--input", base_layout.archive(tmp_path / "base.tar"))
    name = loaded.removeprefix("Loaded image: ")
    try:
        script = "import ctypes, sqlite3, ssl, sys; ctypes.CDLL('libstdc++.so.6'); print(sys.version_info[:2])"
        # By digest: what was loaded is the very image.
        assert output("docker", "image", "inspect", "--format", "{{.ID}}", name) == base_layout.digest
        assert output("docker", "run", "--rm", "--network", "none", name, "python3", "-c", script) == "(3, 11)"
    finally:
        output("docker", "image", "rm", name)


def test_a_damaged_base_in_the_cache_is_not_used(base_layout: BaseLayout, tmp_path: Path) -> None:
    copy = shutil.copytree(base_layout.folder, tmp_path / "copy")
    assert cached_base(copy) == BaseLayout(copy, base_layout.digest)
    image = read_image(copy)
    (layer,) = image.layers
    os.truncate(image.blob(layer), layer.size - 1)
    assert cached_base(copy) is None


# Runs in a network and mount namespace of its own: the other engine of this machine does not notice.
LIFE = """
import os, signal, subprocess, sys
from pathlib import Path
from tests.services.engine import PrivateEngine, _command, engine_answers, private_engine
from tests.services.network import FORWARD, Network

FORWARD.write_text("0")
engine = PrivateEngine(Path(sys.argv[1]), Path(sys.argv[2]), network=sys.argv[3] == "network")
before = Network.now()
environment = dict(os.environ)
with private_engine(engine):
    assert os.environ["DOCKER_HOST"] == engine.host
    first = int((engine.run / "docker.pid").read_text())
    containerd = int((engine.run / "exec/containerd/containerd.pid").read_text())
    assert (Network.now() != before) == engine.network
    with engine.shared():
        assert int((engine.run / "docker.pid").read_text()) == first, "a second user joins"
    assert engine_answers(), "and does not stop what the first one uses"
    if sys.argv[4] == "killed":
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
assert dict(os.environ) == environment
assert not _command(first) and not _command(containerd)
assert Network.now() == before, Network.now()
assert {path.suffix for path in engine.run.iterdir()} == {".lock"}
assert not engine.data.exists()
print("all as before")
"""


@pytest.mark.parametrize(("network", "end"), [("network", "asked"), ("network", "killed"), ("beside", "asked")])
def test_an_engine_leaves_the_machine_as_it_was(engine: str, tmp_path: Path, network: str, end: str) -> None:
    run = Path("/run") / f"cufallback-{os.getpid()}"
    words = ("unshare", "--net", "--mount", "--propagation", "private", sys.executable, "-c", LIFE)
    try:
        shown = output(
            *(*words, run, tmp_path / "data", network, end), PYTHONPATH=os.pathsep.join((str(CHECKOUT), "build"))
        )
        assert shown == "all as before"
    finally:
        for lock in run.glob("*.lock"):
            lock.unlink()
        run.rmdir()
