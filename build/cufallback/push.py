"""Bring an image and its documents into a registry: everything by digest first, read back, and only then the tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cufallback.errors import RegistryError, TagError, UsageError
from cufallback.image.layout import check_blobs, read_image
from cufallback.image.reference import Reference
from cufallback.image.registry import Registry
from cufallback.progress import Progress

SBOM_TYPE: Final = "application/vnd.cyclonedx+json"
IN_TOTO_TYPE: Final = "application/vnd.in-toto+json"
BUILD_TYPE: Final = "application/vnd.cufallback.build.v1"
BUILD_MEDIA_TYPE: Final = "application/vnd.cufallback.build.v1.tar"


@dataclass(frozen=True)
class Document:
    """One file to attach. Types are media types; annotations are those of the referrer's manifest."""

    path: Path
    artifact_type: str
    media_type: str
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PushedDocument:
    """One attached document: its file name, the digest of its referrer manifest, and whether that was there before."""

    name: str
    artifact_type: str
    digest: str
    already_there: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return dict(vars(self))


@dataclass(frozen=True)
class Pushed:
    """What a registry holds after a push.

    Args:
        reference: the image, by digest.
        tag: that names it now, or None when none was asked for.
        image_already_there: the registry had the image before.
        documents: in the order in which they were given.
        cosign_digest: of the manifest with the envelopes for cosign, or None without envelopes.
    """

    reference: Reference
    tag: str | None
    image_already_there: bool
    documents: tuple[PushedDocument, ...]
    cosign_digest: str | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "reference": str(self.reference),
            "tag": self.tag,
            "image_already_there": self.image_already_there,
            "documents": [document.to_json() for document in self.documents],
            "cosign_digest": self.cosign_digest,
        }


def push_image(
    layout: Path,
    digest: str,
    *,
    to: Reference,
    documents: Sequence[Document],
    envelopes: Sequence[Path],
    move_tag: bool,
    registry: Registry,
    progress: Progress,
) -> Pushed:
    """Push an image with its documents and return what the registry holds then. Running it again changes nothing.

    A failure leaves no tag: what was pushed is there by digest only, and the next run goes on from it. (Registries
    without the referrers API and cosign keep documents under tags ``sha256-<hex>`` and ``sha256-<hex>.att``.)

    Args:
        layout: the OCI layout that holds the image.
        digest: of the image's manifest.
        to: registry and repository, with the tag that shall name the image, if any.
        documents: attached as OCI 1.1 referrers.
        envelopes: DSSE envelopes that ``cosign verify-attestation`` shall find.
        move_tag: take the tag from the image that it names now.
        registry: the client.
        progress: told each finished step.

    Raises:
        ImageError: the layout does not hold the image whole.
        TagError: the tag names another image; nothing was pushed, or everything but the tag when it appeared
            in the meantime.
        RegistryError: the registry refused, could not be reached, or does not hold afterwards what was sent.
        AttestationError: an envelope is not about this image.
    """
    if to.digest not in (None, digest):
        raise UsageError(f"names {to.digest}, but the image is {digest}", remedy="leave the digest out", where=str(to))
    image = read_image(layout, digest)
    check_blobs(image)
    target = to.at(digest)
    _require_free_tag(registry, to, digest, move_tag=move_tag)

    already_there = registry.digest_of(target) is not None
    with progress.bar(f"push {target}", None):
        # Also when the manifest is there: an earlier registry fault may have left it without a layer.
        registry.push(layout, digest, target)
    before = {referrer.digest for referrer in registry.referrers(target)}
    attached = []
    for document in documents:
        manifest = registry.attach(
            target,
            document.path,
            artifact_type=document.artifact_type,
            media_type=document.media_type,
            annotations=document.annotations,
        )
        attached.append(PushedDocument(document.path.name, document.artifact_type, manifest, manifest in before))
        progress.say(f"attached {document.path.name}: {manifest}")
    cosign_digest = registry.attach_cosign(target, envelopes) if envelopes else None

    _read_back(registry, target, attached)
    if to.tag is not None:
        _set_tag(registry, to, digest, move_tag=move_tag)
        progress.say(f"tagged {to.tagged(to.tag)}: {digest}")
    return Pushed(target, to.tag, already_there, tuple(attached), cosign_digest)


def _require_free_tag(registry: Registry, to: Reference, digest: str, *, move_tag: bool) -> str | None:
    """Return the digest that the tag names now, if any, after refusing to take it from another image."""
    if to.tag is None:
        return None
    current = registry.digest_of(to.tagged(to.tag))
    if current is None:
        return None
    if current.digest != digest and not move_tag:
        raise TagError(
            f"the tag names {current.digest}, not {digest}",
            remedy="push under another tag, or say --move-tag when nobody relies on what the tag names now",
            where=str(to.tagged(to.tag)),
        )
    return current.digest


def _read_back(registry: Registry, target: Reference, attached: Sequence[PushedDocument]) -> None:
    registry.manifest(target)  # held to its digest
    listed = {referrer.digest for referrer in registry.referrers(target)}
    for document in attached:
        if document.digest not in listed:
            raise RegistryError(
                f"the registry does not list {document.name} ({document.digest}) as a referrer after the push",
                remedy="run again: it goes on from here; no tag was set",
                where=str(target),
            )


def _set_tag(registry: Registry, to: Reference, digest: str, *, move_tag: bool) -> None:
    assert to.tag is not None  # noqa: S101 - the caller asked
    tagged = to.tagged(to.tag)
    if _require_free_tag(registry, to, digest, move_tag=move_tag) == digest:
        return
    registry.tag(to.at(digest), to.tag)
    now = registry.digest_of(tagged)
    if now is None or now.digest != digest:
        raise RegistryError(
            f"the tag names {now.digest if now else 'nothing'} right after it was set to {digest}",
            remedy="see who else pushes to this tag, then run again",
            where=str(tagged),
        )
