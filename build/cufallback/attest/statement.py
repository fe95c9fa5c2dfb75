"""in-toto Statements: what is signed about which files.

Fields are those of the in-toto Attestation Framework's Statement v1; the predicates are SLSA provenance v1, CycloneDX
BOM, and Simple Verification Result (SVR) 0.2, all of https://github.com/in-toto/attestation (spec/predicates).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cufallback.errors import AttestationError
from cufallback.store import canonical_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE_PREDICATE = "https://slsa.dev/provenance/v1"
BOM_PREDICATE = "https://cyclonedx.org/bom"
VERIFICATION_PREDICATE = "https://in-toto.io/attestation/svr/v0.2"

# Who verified. The number goes up when other things are verified.
VERIFIER_ID = "urn:cufallback:verify:1"
# Scoped by the verifier, as the predicate's specification recommends.
VERIFIED_PROPERTIES = tuple(f"CUFALLBACK_{what}" for what in ("RECORD_VERIFIED",))

LARGEST = 64 << 20  # bytes of one document or envelope; the SBOM of a large image has a few million

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_REMEDY = "do not use it; ask who sent it for another one"


@dataclass(frozen=True)
class Subject:
    """What a statement is about: a name and the SHA-256 of the bytes (of an image: of its manifest), 64 hex digits."""

    name: str
    sha256: str


def statement(subjects: Sequence[Subject], predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """Return an in-toto Statement v1 as canonical JSON.

    Args:
        subjects: what it is about, at least one.
        predicate_type: URI of the predicate's kind.
        predicate: what is said.

    Raises:
        AttestationError: the predicate holds what JSON in UTF-8 cannot.
    """
    value = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject.name, "digest": {"sha256": subject.sha256}} for subject in subjects],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    try:
        return canonical_json(value)
    except ValueError as error:
        about = ", ".join(subject.name for subject in subjects)
        raise AttestationError(f"a statement cannot be written: {error}", remedy=_REMEDY, where=about) from None


def verification(subjects: Sequence[Subject], *, verified_at: str) -> bytes:
    """Return the statement that the subjects were verified by this program: a Simple Verification Result.

    Args:
        subjects: record and checksum list.
        verified_at: RFC 3339 time in UTC, to the second, as :func:`cufallback.record.timestamp` writes it.
    """
    predicate = {
        # No policy is a file of its own: what is verified is what this program verifies.
        "verifier": {"id": VERIFIER_ID, "policies": []},
        "timeCreated": verified_at,
        "properties": list(VERIFIED_PROPERTIES),
    }
    return statement(subjects, VERIFICATION_PREDICATE, predicate)


def is_time(text: object) -> bool:
    """Say whether ``text`` is a time of the form that :func:`verification` takes."""
    return isinstance(text, str) and _TIME.fullmatch(text) is not None


def parse_json(content: bytes, *, where: str, remedy: str = _REMEDY) -> dict[str, Any]:
    """Return the JSON object in a document, read so that no two readers see two things.

    Args:
        content: of the document.
        where: what to call it in errors.
        remedy: what to do about one that cannot be read.

    Raises:
        AttestationError: it is larger than :data:`LARGEST`, no UTF-8, no JSON object, or an object in it has a key
            twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return found

    def no_number(text: str) -> None:
        raise ValueError(f"{text} is no number of JSON")

    if len(content) > LARGEST:
        raise AttestationError(f"has more than {LARGEST} bytes", remedy=remedy, where=where)
    try:
        data = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise AttestationError(f"is not JSON: {reason}", remedy=remedy, where=where) from None
    if not isinstance(data, dict):
        raise AttestationError("is not a JSON object", remedy=remedy, where=where)
    return data


def subjects_of(payload: bytes, *, where: str) -> Iterator[Subject]:
    """Yield the subjects of a statement.

    Raises:
        AttestationError: it is no Statement v1, or a subject has no name or no SHA-256.
    """
    data = parse_json(payload, where=where)
    rows = data.get("subject")
    if data.get("_type") != STATEMENT_TYPE or not isinstance(rows, list) or not rows:
        raise AttestationError("is no in-toto Statement v1 with a subject", remedy=_REMEDY, where=where)
    for row in rows:
        digest = row.get("digest") if isinstance(row, dict) else None
        if not isinstance(digest, dict) or not isinstance(row.get("name"), str) or "sha256" not in digest:
            raise AttestationError("has a subject without name or sha256", remedy=_REMEDY, where=where)
        yield Subject(row["name"], str(digest["sha256"]))
