"""Pushing an image with its documents to a real registry: in one order, again without a change, never with a tag
that is not earned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from registry_rooms import make_image, make_key, provenance, tags, verify_attestation
from tests.services.faulty_registry import (
    Exchange,
    Fault,
    FaultyRegistry,
    connections_closed,
    manifests_refused,
    server_errors,
)

from cufallback.errors import AttestationError, ImageError, RegistryError, TagError, UsageError
from cufallback.image.artifact import DSSE_TYPE
from cufallback.image.layout import blob_path, read_image
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Registry
from cufallback.process import LocalRunner
from cufallback.progress import Progress, Silent
from cufallback.push import BUILD_TYPE, SBOM_TYPE, Document, Pushed, push_image
from cufallback.store import sha256_bytes

pytestmark = pytest.mark.services

Front = Callable[[Fault], FaultyRegistry]


@dataclass
class Room:
    """An image on disk with its documents, and a repository of the test's own."""

    folder: Path
    repository: Reference
    digest: str
    documents: list[Document]
    envelopes: list[Path]
    registry: Registry

    def push(self, tag: str | None = "v1", *, move_tag: bool = False, progress: Progress | None = None) -> Pushed:
        to = self.repository if tag is None else self.repository.tagged(tag)
        return push_image(
            self.folder / "image",
            self.digest,
            to=to,
            documents=self.documents,
            envelopes=self.envelopes,
            move_tag=move_tag,
            registry=self.registry,
            progress=progress or Silent(),
        )

    def behind(self, front: FaultyRegistry) -> Room:
        """The same, reached through a front."""
        there = Reference(front.address, self.repository.repository)
        return Room(self.folder, there, self.digest, self.documents, self.envelopes, self.registry)

    def other_image(self, text: str) -> str:
        """Push another image to the repository, by digest."""
        digest = make_image(self.folder / text, f"{text} {self.repository}")
        self.registry.push(self.folder / text, digest, self.repository)
        return digest

    def shown(self) -> dict[str, str]:
        """The tags that a person gave, and their digests."""
        return {name: digest for name, digest in tags(self.repository).items() if not name.startswith("sha256-")}


@pytest.fixture
def room(registry: str, oras: str, tmp_path: Path) -> Room:
    repository = parse_reference(f"{registry}/tests/{sha256_bytes(str(tmp_path).encode())[:16]}")
    digest = make_image(tmp_path / "image", str(repository), size=100_000)
    documents = []
    for name, kind in (("image.cdx.json", SBOM_TYPE), ("build.tar", BUILD_TYPE), ("envelope.json", DSSE_TYPE)):
        (tmp_path / name).write_text(f'{{"document": "{name}"}}\n')
        documents.append(Document(tmp_path / name, kind, kind))
    client = Registry(LocalRunner(), log=tmp_path / "log", sleep=lambda _seconds: None)
    return Room(tmp_path, repository, digest, documents, [], client)


@pytest.fixture
def signed(room: Room, cosign: str, tmp_path: Path) -> Room:
    """The room, with a signed provenance."""
    room.envelopes = [provenance(tmp_path / "provenance.json", make_key(tmp_path / "key"), room.digest)]
    return room


def test_a_push_brings_all_of_it_and_a_second_changes_nothing(signed: Room, tmp_path: Path) -> None:
    pushed = signed.push()
    assert pushed.reference == signed.repository.at(signed.digest)
    assert signed.shown() == {"v1": signed.digest}
    found = {referrer.digest: referrer.artifact_type for referrer in signed.registry.referrers(pushed.reference)}
    assert found == {document.digest: document.artifact_type for document in pushed.documents}
    for document, source in zip(pushed.documents, signed.documents, strict=True):
        assert signed.registry.fetch(pushed.reference, document.digest) == source.path.read_bytes()
    assert not pushed.image_already_there
    assert not any(document.already_there for document in pushed.documents)
    state = tags(signed.repository)
    again = signed.push()
    assert tags(signed.repository) == state
    assert again.image_already_there
    assert all(document.already_there for document in again.documents)
    assert again.to_json()["reference"] == f"{signed.repository.named}@{signed.digest}"
    assert again.to_json()["documents"][0]["name"] == "image.cdx.json"
    key = make_key(tmp_path / "other")
    assert verify_attestation(key, pushed.reference, "slsaprovenance1").returncode != 0


def test_cosign_verifies_what_was_pushed(room: Room, cosign: str, tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    room.envelopes = [provenance(tmp_path / "provenance.json", key, room.digest)]
    pushed = room.push()
    assert pushed.cosign_digest is not None
    done = verify_attestation(key, pushed.reference, "slsaprovenance1")
    assert done.returncode == 0, done.stderr


def test_without_a_tag_there_is_none(room: Room) -> None:
    assert room.push(None).tag is None
    assert room.shown() == {}


def test_a_tag_of_another_image_is_left_alone_until_it_may_move(room: Room) -> None:
    other = room.other_image("other")
    room.registry.tag(room.repository.at(other), "v1")
    with pytest.raises(TagError) as caught:
        room.push()
    assert other in caught.value.reason
    assert room.digest in caught.value.reason
    assert "--move-tag" in caught.value.remedy
    assert tags(room.repository) == {"v1": other}
    assert room.registry.digest_of(room.repository.at(room.digest)) is None, "nothing may be pushed before the refusal"
    assert room.push(move_tag=True).tag == "v1"
    assert room.shown() == {"v1": room.digest}


def test_a_tag_that_appears_in_the_meantime_is_left_alone(room: Room) -> None:
    other = room.other_image("other")

    class Interloper(Silent):
        def say(self, text: str) -> None:
            room.registry.tag(room.repository.at(other), "v1")

    with pytest.raises(TagError, match=other):
        room.push(progress=Interloper())
    assert room.shown() == {"v1": other}


def _hide_list(exchange: Exchange) -> None:
    if exchange.matches(r"^(GET|HEAD) .*/manifests/sha256-[0-9a-f]{64}$"):
        exchange.answer(404, "MANIFEST_UNKNOWN")


def _refuse_list(exchange: Exchange) -> None:
    if exchange.matches(r"^PUT .*/manifests/sha256-[0-9a-f]{64}$"):
        exchange.answer(400, "MANIFEST_INVALID")


def _refuse_cosign(exchange: Exchange) -> None:
    if exchange.matches(r"^PUT .*/manifests/sha256-[0-9a-f]{64}\.att$"):
        exchange.answer(403, "DENIED")


def _refuse_uploads(exchange: Exchange) -> None:
    if exchange.matches(r"^POST .*/blobs/uploads/"):
        exchange.answer(403, "DENIED")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(manifests_refused(), "manifest invalid", id="manifests refused"),
        pytest.param(connections_closed(matching="^PUT"), "EOF", id="closed when writing"),
        pytest.param(connections_closed(matching=r"^PUT .*/manifests/sha256-"), "EOF", id="closed at the list"),
        pytest.param(server_errors(99, matching=r"^PUT .*/blobs/uploads/"), "unknown", id="500 at every blob"),
        pytest.param(_refuse_uploads, "denied", id="uploads forbidden"),
        pytest.param(_refuse_list, "manifest invalid", id="list of referrers refused"),
        pytest.param(_hide_list, "does not list", id="list of referrers lost"),
        pytest.param(_refuse_cosign, "denied", id="attestations forbidden"),
    ],
)
def test_a_failed_push_leaves_no_tag_and_the_next_goes_on(
    signed: Room, faulty_registry: Front, fault: Fault, reason: str
) -> None:
    with pytest.raises(RegistryError, match=reason):
        signed.behind(faulty_registry(fault)).push()
    assert signed.shown() == {}
    pushed = signed.push()
    assert signed.shown() == {"v1": signed.digest}
    assert len(signed.registry.referrers(pushed.reference)) == len(signed.documents)


def test_an_image_that_is_not_whole_is_not_pushed(room: Room) -> None:
    layer = read_image(room.folder / "image", room.digest).layers[0]
    blob_path(room.folder / "image", layer.digest).write_bytes(b"truncated")
    with pytest.raises(ImageError):
        room.push()
    assert room.registry.digest_of(room.repository.at(room.digest)) is None


def test_an_envelope_about_another_image_leaves_no_tag(room: Room, cosign: str, tmp_path: Path) -> None:
    room.envelopes = [provenance(tmp_path / "provenance.json", make_key(tmp_path / "key"), "sha256:" + "0" * 64)]
    with pytest.raises(AttestationError):
        room.push()
    assert room.shown() == {}


def test_a_digest_that_is_not_the_images_is_refused(room: Room) -> None:
    room.repository = room.repository.at("sha256:" + "0" * 64)
    with pytest.raises(UsageError, match="but the image is") as caught:
        room.push(None)
    assert caught.value.where == str(room.repository)
