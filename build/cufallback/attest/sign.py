"""Signatures of a build folder: one DSSE envelope for each statement, beside the record and no part of it.

Envelopes follow DSSE 1.0 (https://github.com/secure-systems-lab/dsse): what is signed is the payload's bytes and their
type, so nothing is ever serialised again.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.attest.documents import IMAGE_SBOM, PROVENANCE, wheel_sbom
from cufallback.attest.statement import (
    BOM_PREDICATE,
    LARGEST,
    Subject,
    is_time,
    parse_json,
    statement,
    subjects_of,
    verification,
)
from cufallback.checks import Check
from cufallback.errors import AttestationError, CufallbackError
from cufallback.record import RECORD, SIGNATURES, SUMS
from cufallback.store import canonical_json, open_regular, replaced_folder, sha256_bytes, write_atomic

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PROVENANCE_ENVELOPE = "provenance.dsse.json"
RECORD_ENVELOPE = "record.dsse.json"

_MOST_SIGNATURES = 32
_REMEDY = "do not use the folder; ask who sent it for the signatures again"


@dataclass(frozen=True)
class Envelope:
    """A parsed DSSE envelope: the signed bytes, and (key id, signature) of each who signed."""

    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Expected:
    """What must be signed: the payload of each envelope by file name, the document it comes from, and all subjects."""

    payloads: Mapping[str, bytes]
    documents: Mapping[str, str]
    subjects: tuple[Subject, ...]


def sign_bytes(payload: bytes, signer: Signer) -> bytes:
    """Return the DSSE envelope of an in-toto payload as canonical JSON, signed by ``signer``."""
    from securesystemslib.dsse import Envelope as Signed

    signed = Signed(payload, PAYLOAD_TYPE, {})
    signed.sign(signer)
    return canonical_json(signed.to_dict())


def open_envelope(content: bytes, *, where: str) -> Envelope:
    """Parse a DSSE envelope strictly; no signature is looked at yet.

    Args:
        content: the JSON document.
        where: what to call it in errors.

    Raises:
        AttestationError: it is larger than 64 MiB, not JSON, has other fields, another payload type, no strict base64
            or no signature.
    """

    def broken(reason: str) -> AttestationError:
        return AttestationError(reason, remedy=_REMEDY, where=where)

    data = parse_json(content, where=where)
    if data.keys() != {"payload", "payloadType", "signatures"}:
        raise broken("is no DSSE envelope: its fields are not payload, payloadType and signatures")
    if data["payloadType"] != PAYLOAD_TYPE:
        raise broken(f"the payload is of type {data['payloadType']!a}, not {PAYLOAD_TYPE}")
    rows = data["signatures"]
    if not isinstance(rows, list) or not rows:
        raise broken("carries no signature")
    if isinstance(rows, list) and len(rows) > _MOST_SIGNATURES:
        raise broken(f"has {len(rows)} signatures, more than {_MOST_SIGNATURES}")
    signatures: list[tuple[str, bytes]] = []
    for row in rows:
        # The key id may be absent, and cosign writes an empty one.
        if not isinstance(row, dict) or row.keys() | {"keyid"} != {"sig", "keyid"}:
            raise broken("a signature has other fields than sig and keyid")
        if not isinstance(row.get("keyid", ""), str):
            raise broken("a key id is no text")
        signatures.append((row.get("keyid", ""), _decoded(row["sig"], "a signature", where)))
    return Envelope(_decoded(data["payload"], "the payload", where), tuple(signatures))


def _decoded(text: Any, what: str, where: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except ValueError:
        content = None
    # Padding bits that no encoder sets would let one envelope have several spellings.
    if not content or base64.b64encode(content).decode() != text:
        raise AttestationError(f"{what} is not base64 of something", remedy=_REMEDY, where=where)
    return content


def verify_envelope(envelope: Envelope, key: Key, *, where: str) -> None:
    """Check that ``key`` signed the payload. Key ids are hints only: every signature may be the key's.

    Signatures by other keys may stand beside; one that claims this key's id and does not verify is refused.

    Raises:
        AttestationError: no signature is of this key, or one pretends to be.
    """
    from securesystemslib.dsse import Envelope as Signed
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    signed = Signed(envelope.payload, PAYLOAD_TYPE, {}).pae()
    good = 0
    for keyid, signature in envelope.signatures:
        try:
            key.verify_signature(Signature(key.keyid, signature.hex()), signed)
            good += 1
        except UnverifiedSignatureError:
            if keyid == key.keyid:
                reason = f"payload or signature was altered: the signature of key {keyid[:16]} does not fit"
                raise AttestationError(reason, remedy=_REMEDY, where=where) from None
    if not good:
        raise AttestationError(
            f"no signature is of the given key (id {key.keyid[:16]}): another key signed, or the payload was altered",
            remedy="give the public key of who signed; if you did, do not use the folder",
            where=where,
        )


def expected_statements(
    folder: Path, *, wheels: Sequence[Subject], image: Subject | None, verified_at: str | None = None
) -> Expected:
    """Return the statements that the documents of a build folder give, by the file name of their envelope.

    Args:
        folder: the build folder, with ``provenance.intoto.json``, ``sbom/``, ``record.json`` and ``SHA256SUMS``.
        wheels: file name and digest of each wheel, as it lies there.
        image: name and manifest digest of the image, as the provenance has it; None when none was built.
        verified_at: when the record was verified, in the form of :func:`cufallback.attest.statement.verification`;
            None: as the signed statement says.

    Raises:
        AttestationError: a document is missing or cannot be read.
    """
    payloads = {PROVENANCE_ENVELOPE: _document(folder / PROVENANCE)}
    documents = {PROVENANCE_ENVELOPE: PROVENANCE, RECORD_ENVELOPE: RECORD}
    described = [(wheel.name, wheel_sbom(wheel.name), wheel) for wheel in wheels]
    described += [("image", IMAGE_SBOM, image)] if image else []
    for name, document, subject in described:
        envelope = f"sbom-{name}.dsse.json"
        bom = parse_json(_document(folder / document), where=document)
        payloads[envelope] = statement([subject], BOM_PREDICATE, bom)
        documents[envelope] = document
    written = [Subject(name, sha256_bytes(_document(folder / name))) for name in (RECORD, SUMS)]
    payloads[RECORD_ENVELOPE] = verification(written, verified_at=verified_at or _stated_time(folder))
    return Expected(payloads, documents, (*wheels, *([image] if image else []), *written))


def sign_folder(
    folder: Path, signer: Signer, *, wheels: Sequence[Subject], image: Subject | None, verified_at: str
) -> tuple[Path, ...]:
    """Sign everything that a build folder states, all of it or nothing, and return the envelopes' paths.

    Signatures that are there already are replaced. The caller has verified the folder, as the statement about the
    record says.

    Args:
        folder: the build folder, with its record.
        signer: what :func:`cufallback.attest.keys.load_private_key` returned.
        wheels: as for :func:`expected_statements`.
        image: as for :func:`expected_statements`.
        verified_at: RFC 3339 time of that verification, UTC, to the second.

    Raises:
        AttestationError: a document to be signed is missing or cannot be read.
        WorkspaceError: the folder cannot be written.
    """
    expected = expected_statements(folder, wheels=wheels, image=image, verified_at=verified_at)
    with replaced_folder(folder / SIGNATURES) as fresh:
        for name, payload in expected.payloads.items():
            write_atomic(fresh / name, sign_bytes(payload, signer))
    return tuple(folder / SIGNATURES / name for name in sorted(expected.payloads))


def check_signatures(folder: Path, expected: Expected, key: Key | None) -> Iterator[Check]:
    """Check every envelope in ``signatures/`` against the documents on disk and, where one is given, the key.

    Args:
        folder: the build folder.
        expected: what :func:`expected_statements` returned for it.
        key: what :func:`cufallback.attest.keys.load_public_key` returned; None leaves the signatures unchecked, but not
            what they are made on.
    """
    place = folder / SIGNATURES
    if not place.is_symlink() and not place.exists() and key is None:
        yield Check(SIGNATURES, "not_run", "not signed")
        return
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        yield Check(SIGNATURES, "failed", "is no folder")
        return
    present = {entry.name for entry in place.iterdir()} if place.exists() else set()
    unchecked = 0
    for name in sorted(expected.payloads):
        what = f"signature {SIGNATURES}/{name}"
        if name not in present:
            yield Check(what, "failed", f"is missing: nobody signed {expected.documents[name]}")
            continue
        try:
            envelope = open_envelope(_document(place / name), where=name)
            if key is not None:
                verify_envelope(envelope, key, where=name)
            _require_same(envelope.payload, name, expected)
        except CufallbackError as error:
            yield Check(what, "failed", error.reason)
            continue
        if key is None:
            unchecked += 1
            continue
        others = len(envelope.signatures) - 1
        beside = f"; {others} more signature(s) beside it were not checked" if others else ""
        yield Check(what, "passed", f"by key {key.keyid[:16]}, on {expected.documents[name]} as it is here{beside}")
    if unchecked:
        yield Check(SIGNATURES, "not_run", f"{unchecked} documents are signed, but no key was given")
    for name in sorted(present - expected.payloads.keys()):
        yield Check(f"signature {SIGNATURES}/{name}", "failed", "belongs to no document of this build")


def is_about_signatures(check: Check) -> bool:
    """Say whether :func:`check_signatures` made a check, or could not go on with it."""
    return check.what == SIGNATURES or check.what.startswith(f"signature {SIGNATURES}/")


def _require_same(payload: bytes, name: str, expected: Expected) -> None:
    known = {subject.name: subject.sha256 for subject in expected.subjects}
    for subject in subjects_of(payload, where=name):
        if subject.name not in known:
            raise AttestationError(f"speaks of {subject.name!a}, which is not here", remedy=_REMEDY, where=name)
        if subject.sha256 != known[subject.name]:
            raise AttestationError(
                f"speaks of another {subject.name!a}: sha256 {subject.sha256!a}, here it is {known[subject.name]}",
                remedy=_REMEDY,
                where=name,
            )
    if payload != expected.payloads[name]:
        reason = f"what was signed is not {expected.documents[name]} as it is here"
        raise AttestationError(reason, remedy=_REMEDY, where=name)


def _document(path: Path) -> bytes:
    """Return a file's bytes. A link is not followed: the folder must hold what it shows."""
    try:
        if stat.S_ISLNK(path.lstat().st_mode):
            raise AttestationError("is a link, not a file", remedy=_REMEDY, where=str(path))
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                raise AttestationError(f"has {size} bytes, more than {LARGEST}", remedy=_REMEDY, where=str(path))
            return file.read(LARGEST)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise AttestationError(reason, remedy="build again: it is part of every build", where=str(path)) from error


def _stated_time(folder: Path) -> str:
    """Return the time that the signed statement about the record gives; a placeholder where it gives none."""
    try:
        envelope = open_envelope(_document(folder / SIGNATURES / RECORD_ENVELOPE), where=RECORD_ENVELOPE)
        time = parse_json(envelope.payload, where=RECORD_ENVELOPE)["predicate"]["timeCreated"]
    except (AttestationError, LookupError, TypeError):
        time = None  # the check of that envelope says what is wrong with it
    return time if is_time(time) else "never"
