"""The registry client against a real registry without the referrers API: what it writes, docker, skopeo, oras and
cosign read; what it reads is held to its digest; every fault of the registry is one error."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from registry_rooms import (
    PROVENANCE,
    Layout,
    get,
    make_image,
    make_key,
    provenance,
    signed_statement,
    tags,
    verify_attestation,
)
from registry_rooms import (
    cosign as run_cosign,
)
from tests.services.faulty_registry import (
    Exchange,
    Fault,
    FaultyRegistry,
    blobs_truncated,
    connections_closed,
    credentials_required,
    manifests_refused,
    no_fault,
    server_errors,
)

from cufallback.errors import AttestationError, ImageError, RegistryError
from cufallback.image.layout import blob_path, check_blobs, read_image
from cufallback.image.lock import RESOLVED, ImageLock, resolve_images
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Registry
from cufallback.process import Completed, LocalRunner
from cufallback.store import sha256_bytes, sha256_file

pytestmark = pytest.mark.services

Front = Callable[[Fault], FaultyRegistry]
AMD64 = "linux/amd64"
TYPE = "application/vnd.in-toto+json"
SIZE = 300_000  # bytes; truncated, its half is still many packets


@pytest.fixture
def client(oras: str, tmp_path: Path) -> Registry:
    return Registry(LocalRunner(), log=tmp_path / "oras.log", sleep=lambda _seconds: None)


@pytest.fixture
def repository(registry: str, tmp_path: Path) -> Reference:
    """A repository of the test's own."""
    return parse_reference(f"{registry}/tests/{sha256_bytes(str(tmp_path).encode())[:16]}")


@pytest.fixture
def pushed(client: Registry, repository: Reference, tmp_path: Path) -> Reference:
    """An image in the registry, by digest."""
    digest = make_image(tmp_path / "image", str(repository), size=SIZE)
    client.push(tmp_path / "image", digest, repository)
    return repository.at(digest)


class Watched(LocalRunner):
    """Keeps every command line."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str | Path], **options: Any) -> Completed:
        self.seen.append(tuple(map(str, argv)))
        return super().run(argv, **options)


def output(*argv: str | Path) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def attach(client: Registry, subject: Reference, file: Path) -> str:
    return client.attach(subject, file, artifact_type=TYPE, media_type=TYPE, annotations={"b": "2", "a": "1"})


def test_what_is_pushed_by_digest_has_no_tag_and_comes_back_whole(
    client: Registry, pushed: Reference, tmp_path: Path
) -> None:
    assert tags(pushed) == {}
    assert pushed.digest is not None
    image = client.pull(pushed, tmp_path / "pulled", platform=AMD64)
    assert image == read_image(tmp_path / "pulled", pushed.digest)
    assert image.labels == {"text": pushed.named}
    check_blobs(image)
    assert sorted(path.name for path in (tmp_path / "pulled").iterdir()) == ["blobs", "index.json", "oci-layout"]
    found = client.digest_of(pushed)
    assert found == image.manifest
    assert client.manifest(pushed) == blob_path(tmp_path / "image", pushed.digest).read_bytes()


def test_docker_skopeo_and_oras_give_the_same_digest(
    client: Registry, pushed: Reference, engine: str, skopeo: str, oras: str
) -> None:
    client.tag(pushed, "v1")
    tagged = str(pushed.tagged("v1"))
    assert output(oras, "resolve", "--plain-http", tagged).strip() == pushed.digest
    inspected = output(skopeo, "inspect", "--tls-verify=false", "--format", "{{.Digest}}", f"docker://{tagged}")
    assert inspected.strip() == pushed.digest
    try:
        assert f"Digest: {pushed.digest}" in output("docker", "pull", tagged)
        assert json.loads(output("docker", "inspect", tagged))[0]["RepoDigests"] == [str(pushed)]
    finally:
        subprocess.run(["docker", "rmi", tagged], check=False, capture_output=True)


def test_of_an_index_one_platform_is_pulled_and_both_digests_lead_to_it(
    client: Registry, repository: Reference, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "index")
    images = {name: layout.image(f"{repository} {name}", name) for name in ("amd64", "arm64")}
    index = layout.name(layout.index(images))
    client.push(layout.folder, index, repository)
    image = client.pull(repository.at(index), tmp_path / "pulled", platform="linux/arm64")
    assert (image.digest, image.platform) == (images["arm64"]["digest"], "linux/arm64")
    assert read_image(tmp_path / "pulled", image.digest) == image
    assert read_image(tmp_path / "pulled") == image
    assert read_image(tmp_path / "pulled", index, platform="linux/arm64") == image
    assert not blob_path(tmp_path / "pulled", images["amd64"]["digest"]).exists()
    with pytest.raises(ImageError, match="no image for linux/riscv64, only for linux/amd64, linux/arm64"):
        client.pull(repository.at(index), tmp_path / "other", platform="linux/riscv64")
    assert not (tmp_path / "other").exists()


def test_an_image_for_another_platform_is_not_taken(client: Registry, pushed: Reference, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is for linux/amd64, not for linux/arm64"):
        client.pull(pushed, tmp_path / "pulled", platform="linux/arm64")
    assert not (tmp_path / "pulled").exists()


def test_what_is_not_there_is_none(client: Registry, pushed: Reference) -> None:
    assert client.digest_of(pushed.tagged("none")) is None
    assert client.digest_of(pushed.at("sha256:" + "0" * 64)) is None
    assert client.digest_of(Reference(pushed.registry, "tests/no-such", "v1")) is None
    with pytest.raises(RegistryError, match="not found"):
        client.manifest(pushed.at("sha256:" + "0" * 64))


def test_a_digest_that_the_layout_does_not_name(client: Registry, repository: Reference, tmp_path: Path) -> None:
    make_image(tmp_path / "image", "x")
    with pytest.raises(ImageError, match=r"index\.json does not name"):
        client.push(tmp_path / "image", "sha256:" + "0" * 64, repository)


def test_a_document_attached_twice_is_one_referrer(
    client: Registry, pushed: Reference, oras: str, tmp_path: Path
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        file.write_text(f'{{"name": "{file.name}", "odd": "\\u00fc", "token": "not-a-secret-but-looks-so"}}\n')
    digests = [attach(client, pushed, file) for file in files]
    state = tags(pushed)
    assert [attach(client, pushed, file) for file in files] == digests
    assert tags(pushed) == state
    # No referrers API here: oras keeps the list under the tag of the specification's fallback.
    assert list(state) == [str(pushed.digest).replace(":", "-")]
    found = client.referrers(pushed)
    assert sorted(referrer.digest for referrer in found) == sorted(digests)
    assert {referrer.artifact_type for referrer in found} == {TYPE}
    assert [client.fetch(pushed, digest) for digest in digests] == [file.read_bytes() for file in files]
    manifest = json.loads(get(pushed.registry, f"{pushed.repository}/manifests/{digests[0]}"))
    assert manifest["annotations"] == {"a": "1", "b": "2"}
    # What an auditor would type.
    output(oras, "pull", "--plain-http", "--output", tmp_path / "got", str(pushed.at(digests[0])))
    assert (tmp_path / "got" / "one.json").read_bytes() == files[0].read_bytes()


def test_nothing_is_attached_to_what_is_not_there(client: Registry, pushed: Reference, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(RegistryError, match="does not have the image"):
        attach(client, pushed.at("sha256:" + "0" * 64), tmp_path / "x.json")
    assert client.referrers(pushed) == []


def test_cosign_finds_the_envelopes_and_its_own(
    client: Registry, pushed: Reference, cosign: str, tmp_path: Path
) -> None:
    key, other, digest = make_key(tmp_path / "key"), make_key(tmp_path / "other"), str(pushed.digest)
    predicate = tmp_path / "predicate.json"
    predicate.write_text("{}")
    options = ("--yes", "--key", key.private, "--tlog-upload=false", "--allow-http-registry", "--type", "spdx")
    done = run_cosign("attest", *options, "--predicate", predicate, str(pushed))
    assert done.returncode == 0, done.stderr
    tag = f"{digest.replace(':', '-')}.att"
    theirs = json.loads(get(pushed.registry, f"{pushed.repository}/manifests/{tag}"))["layers"]

    bom = signed_statement(tmp_path / "bom.json", key, digest, "https://cyclonedx.org/bom", {"specVersion": "1.6"})
    envelopes = [provenance(tmp_path / "provenance.json", key, digest), bom]
    manifest = client.attach_cosign(pushed, envelopes)
    assert tags(pushed)[tag] == manifest
    ours = json.loads(get(pushed.registry, f"{pushed.repository}/manifests/{tag}"))["layers"]
    assert ours[:1] == theirs
    assert [layer["annotations"]["predicateType"] for layer in ours[1:]] == [PROVENANCE, "https://cyclonedx.org/bom"]
    assert [layer["digest"] for layer in ours[1:]] == [f"sha256:{sha256_file(path)}" for path in envelopes]
    for kind in ("slsaprovenance1", "cyclonedx", "spdx"):
        done = verify_attestation(key, pushed, kind)
        assert done.returncode == 0, done.stderr
        assert verify_attestation(other, pushed, kind).returncode != 0
    assert client.attach_cosign(pushed, envelopes) == manifest  # nothing is added twice
    assert client.attach_cosign(pushed, []) == manifest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not about the image"),
        (b"", "is no DSSE envelope"),
        (b"[]", "is no DSSE envelope"),
        (b'{"payload": "e30=", "signatures": [1]}', "is no DSSE envelope"),
        (b'{"payload": "***", "signatures": [1]}', "is no DSSE envelope"),
    ],
)
def test_an_envelope_about_something_else_is_not_attached(
    client: Registry, pushed: Reference, tmp_path: Path, cosign: str, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "envelope.json"
    if content is None:
        provenance(path, make_key(tmp_path / "key"), "sha256:" + "0" * 64)
    else:
        path.write_bytes(content)
    with pytest.raises(AttestationError, match=reason) as caught:
        client.attach_cosign(pushed, [path])
    assert caught.value.where == str(path)
    assert tags(pushed) == {}


def test_credentials_come_from_the_docker_configuration_and_are_shown_nowhere(
    faulty_registry: Front, pushed: Reference, oras: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = "correct-horse-battery"
    front = faulty_registry(credentials_required("builder", password))
    there = Reference(front.address, pushed.repository, digest=pushed.digest)
    log, home = tmp_path / "log", tmp_path / "docker"
    home.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(home))
    runner = Watched()
    client = Registry(runner, log=log)
    with pytest.raises(RegistryError) as caught:
        client.digest_of(there)
    assert f"docker login {front.address}" in caught.value.remedy
    secret = base64.b64encode(f"builder:{password}".encode()).decode()
    (home / "config.json").write_text(json.dumps({"auths": {front.address: {"auth": secret}}}))
    client.pull(there, tmp_path / "pulled", platform=AMD64)
    client.push(tmp_path / "image", str(there.digest), there)
    shown = log.read_text() + repr(runner.seen) + str(caught.value)
    assert "oras cp" in shown
    assert password not in shown
    assert secret not in shown


def test_a_registry_that_is_down_is_tried_three_times(oras: str, tmp_path: Path) -> None:
    slept: list[float] = []
    client = Registry(LocalRunner(), log=None, sleep=slept.append)
    there = parse_reference("127.0.0.1:1/nobody/listens:v1")
    with pytest.raises(RegistryError, match="connection refused") as caught:
        client.digest_of(there)
    assert slept == [1.0, 2.0]
    assert "127.0.0.1:1" in caught.value.remedy
    assert caught.value.where == str(there)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(server_errors(1), id="500 once"),
        pytest.param(server_errors(1, matching="^PUT", status=503), id="503 once when writing"),
        pytest.param(connections_closed(2), id="closed twice"),
        pytest.param(connections_closed(1, matching="^PUT /v2/.*/manifests/"), id="closed once when writing"),
    ],
)
def test_a_passing_fault_is_survived(
    client: Registry, repository: Reference, faulty_registry: Front, tmp_path: Path, fault: Fault
) -> None:
    there = Reference(faulty_registry(fault).address, repository.repository)
    digest = make_image(tmp_path / "image", str(there))
    client.push(tmp_path / "image", digest, there)
    assert client.pull(there.at(digest), tmp_path / "pulled", platform=AMD64).digest == digest


def test_a_refused_manifest_is_an_error_and_not_repeated(
    client: Registry, repository: Reference, faulty_registry: Front, tmp_path: Path
) -> None:
    front = faulty_registry(manifests_refused())
    digest = make_image(tmp_path / "image", str(repository))
    with pytest.raises(RegistryError, match="manifest invalid") as caught:
        client.push(tmp_path / "image", digest, Reference(front.address, repository.repository))
    assert "why it refuses" in caught.value.remedy
    assert (
        len([request for request in front.requests if request.method == "PUT" and "/manifests/" in request.path]) == 1
    )
    assert client.digest_of(repository.at(digest)) is None


def test_a_truncated_blob_is_refused_and_a_later_pull_fetches_only_what_is_missing(
    client: Registry, repository: Reference, faulty_registry: Front, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "image")
    digest = layout.name(layout.image(str(repository), size=SIZE))
    client.push(layout.folder, digest, repository)
    image = read_image(layout.folder, digest)
    layer = image.layers[0].digest

    def truncated_layer(exchange: Exchange) -> None:
        if exchange.matches(f"^GET .*/blobs/{layer}"):
            blobs_truncated()(exchange)

    target = tmp_path / "pulled"
    there = Reference(faulty_registry(truncated_layer).address, repository.repository, digest=digest)
    with pytest.raises(RegistryError):
        client.pull(there, target, platform=AMD64)
    assert not target.exists()
    front = faulty_registry(no_fault)
    healed = Reference(front.address, repository.repository, digest=digest)
    check_blobs(client.pull(healed, target, platform=AMD64))
    fetched = [request.path.rpartition("/")[2] for request in front.requests if "/blobs/" in request.path]
    assert fetched == [layer]
    front.requests.clear()
    client.pull(healed, target, platform=AMD64)
    assert front.requests == []


@pytest.mark.parametrize("damage", ["layer", "config", "index.json", "other image"])
def test_a_damaged_copy_is_fetched_anew(client: Registry, pushed: Reference, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "pulled"
    image = client.pull(pushed, target, platform=AMD64)
    if damage == "other image":
        make_image(target / "more", "other")
        for path in sorted((target / "more" / "blobs" / "sha256").iterdir()):
            path.rename(target / "blobs" / "sha256" / path.name)
        blob_path(target, image.digest).unlink()
    else:
        paths = {"layer": image.blob(image.layers[0]), "config": image.blob(image.config)}
        paths.get(damage, target / damage).write_bytes(b"damaged")
    assert client.pull(pushed, target, platform=AMD64) == image
    check_blobs(image)


@pytest.mark.parametrize("listed", [b"{}", b'{"manifests": [{"digest": "x"}]}', b"<html>"])
def test_wrong_bytes_for_a_digest_are_refused(
    client: Registry, pushed: Reference, faulty_registry: Front, listed: bytes
) -> None:
    def liar(exchange: Exchange) -> None:
        if exchange.matches("^GET /v2/.*/manifests/sha256:"):
            exchange.handler.send(200, {"Content-Type": "application/json", "Content-Length": str(len(listed))})
            exchange.handler.wfile.write(listed)
            exchange.done = True

    there = Reference(faulty_registry(liar).address, pushed.repository, digest=pushed.digest)
    with pytest.raises(RegistryError):
        client.manifest(there)


def test_tags_are_locked_with_their_digests_and_a_date_that_stays(
    client: Registry, repository: Reference, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "bases")
    images = {name: layout.image(f"{repository} {name}", name) for name in ("amd64", "arm64")}
    single, index = layout.name(images["amd64"]), layout.name(layout.index(images))
    for digest, tag in ((single, "one"), (index, "many")):
        client.push(layout.folder, digest, repository)
        client.tag(repository.at(digest), tag)
    bases = {"runtime": str(repository.tagged("many")), "base": str(repository.tagged("one"))}

    def resolve(previous: ImageLock | None, now: str) -> ImageLock:
        return resolve_images(bases, previous, recipe="r", registry=client, now=now)

    lock = resolve(None, "2026-12-01T00:00:00Z")
    assert [image.name for image in lock.images] == ["base", "runtime"]
    base, runtime = lock.images
    assert (base.index, dict(base.platform)) == (None, {AMD64: single})
    assert runtime.index == index
    assert dict(runtime.platform) == {f"linux/{name}": image["digest"] for name, image in images.items()}
    assert {image.source for image in lock.images} == {RESOLVED}
    assert resolve(lock, "2027-01-01T00:00:00Z") == lock
    client.tag(repository.at(single), "many")
    moved = resolve(lock, "2027-01-01T00:00:00Z")
    assert moved.image("base") == base
    assert (moved.image("runtime").index, moved.image("runtime").resolved) == (None, "2027-01-01T00:00:00Z")
    bases["gone"] = str(repository.tagged("gone"))
    with pytest.raises(RegistryError, match="no such tag"):
        resolve(lock, "2027-01-01T00:00:00Z")
