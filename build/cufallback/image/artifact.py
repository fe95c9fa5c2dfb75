"""Documents as OCI artifacts: the manifest of a referrer, and the manifest in which cosign keeps attestations.

Both are laid out as small OCI layouts from where they are copied into a registry. Nothing in them but the arguments:
no time, no random part, so equal documents give equal digests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cufallback.errors import AttestationError
from cufallback.image.layout import MANIFEST_TYPES, Descriptor, blob_path
from cufallback.store import link_or_copy, sha256_bytes, sha256_file, write_atomic, write_json

MANIFEST_TYPE: Final = MANIFEST_TYPES[0]
CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
DSSE_TYPE: Final = "application/vnd.dsse.envelope.v1+json"
# OCI image specification 1.1, "Guidance for an Empty Descriptor": two bytes that stand for no config.
_EMPTY: Final = b"{}"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
TITLE: Final = "org.opencontainers.image.title"
_REMEDY: Final = "sign the documents of this image again, then push"


def write_referrer(
    layout: Path,
    *,
    subject: Descriptor,
    file: Path,
    artifact_type: str,
    media_type: str,
    annotations: Mapping[str, str],
) -> str:
    """Lay out one document that refers to an image; return the digest of its manifest.

    Args:
        layout: folder for the OCI layout.
        subject: the image's manifest or index.
        file: the document, of any size; its name is the title under which ``oras pull`` writes it.
        artifact_type: what kind of document refers to the image.
        media_type: of the document.
        annotations: of the manifest.
    """
    document = Descriptor(media_type, f"sha256:{sha256_file(file)}", file.stat().st_size)
    blob_path(layout, document.digest).parent.mkdir(parents=True, exist_ok=True)
    link_or_copy(file, blob_path(layout, document.digest))
    layer = {**oci_descriptor(document), "annotations": {TITLE: file.name}}
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": oci_descriptor(_put(layout, _EMPTY_TYPE, _EMPTY)),
        "layers": [layer],
        "subject": oci_descriptor(subject),
    }
    if annotations:
        manifest["annotations"] = dict(annotations)
    return _finish(layout, manifest)


def write_cosign(
    layout: Path, subject_digest: str, envelopes: Sequence[Path], present: Sequence[Mapping[str, Any]]
) -> str | None:
    """Lay out the manifest in which cosign looks for attestations; return its digest, None when nothing is new.

    One layer for each envelope, as cosign 2.5.0 writes them. Layers that are in the registry already stay as they
    are; their bytes are not needed here.

    Args:
        layout: folder for the OCI layout.
        subject_digest: the image's digest.
        envelopes: DSSE envelopes of in-toto statements about that image.
        present: the layers of the manifest that the registry has, as it has them.

    Raises:
        AttestationError: an envelope is malformed, or its statement is not about that image.
    """
    layers = [dict(layer) for layer in present]
    for path in envelopes:
        content = path.read_bytes()
        predicate_type = _predicate_type(content, subject_digest, where=str(path))
        layer = oci_descriptor(_put(layout, DSSE_TYPE, content))
        if all(other.get("digest") != layer["digest"] for other in layers):
            annotations = {"dev.cosignproject.cosign/signature": "", "predicateType": predicate_type}
            layers.append({**layer, "annotations": annotations})
    if len(layers) == len(present):
        return None
    never = "0001-01-01T00:00:00Z"
    config = {
        "architecture": "",
        "created": never,
        "history": [{"created": never}] * len(layers),
        "os": "",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        "config": {},
    }
    return _finish(
        layout,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": oci_descriptor(_put(layout, CONFIG_TYPE, _compact(config))),
            "layers": layers,
        },
    )


def _predicate_type(envelope: bytes, subject_digest: str, *, where: str) -> str:
    """Return the predicate type of the statement in a DSSE envelope after looking at its subject."""
    try:
        data = json.loads(envelope)
        statement = json.loads(base64.b64decode(data["payload"], validate=True))
        predicate_type = statement["predicateType"]
        subjects = [f"sha256:{subject['digest'].get('sha256')}" for subject in statement["subject"]]
        if not isinstance(predicate_type, str) or not data["signatures"]:
            raise ValueError("it has no predicate type or no signature")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AttestationError(
            f"is no DSSE envelope of an in-toto statement: {error}", remedy=_REMEDY, where=where
        ) from error
    if subject_digest not in subjects:
        raise AttestationError(
            f"its statement is about {', '.join(subjects)}, not about the image {subject_digest}",
            remedy=_REMEDY,
            where=where,
        )
    return predicate_type


def oci_descriptor(descriptor: Descriptor) -> dict[str, Any]:
    """Return a descriptor as manifests hold it."""
    return {"mediaType": descriptor.media_type, "digest": descriptor.digest, "size": descriptor.size}


def name_in_index(layout: Path, descriptor: Descriptor) -> None:
    """Make a layout's index.json name exactly one manifest."""
    write_json(layout / "index.json", {"schemaVersion": 2, "manifests": [oci_descriptor(descriptor)]})


def is_named(layout: Path, digest: str) -> bool:
    """Say whether a layout's index.json names the digest at its top."""
    try:
        data = json.loads((layout / "index.json").read_bytes())
        return any(entry["digest"] == digest for entry in data["manifests"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _put(layout: Path, media_type: str, content: bytes) -> Descriptor:
    descriptor = Descriptor(media_type, f"sha256:{sha256_bytes(content)}", len(content))
    write_atomic(blob_path(layout, descriptor.digest), content)
    return descriptor


def _finish(layout: Path, manifest: Mapping[str, Any]) -> str:
    descriptor = _put(layout, MANIFEST_TYPE, _compact(manifest))
    write_json(layout / "oci-layout", {"imageLayoutVersion": "1.0.0"})
    name_in_index(layout, descriptor)
    return descriptor.digest


def _compact(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
