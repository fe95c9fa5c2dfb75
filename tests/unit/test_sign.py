"""Signatures of a build folder: what is signed, and every way in which a signature can lie."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from tests.unit.sign_rooms import VERIFIED_AT, WHEELS, Build, passes, write_build, write_key

from cufallback.attest import sign
from cufallback.attest.keys import load_private_key, load_public_key
from cufallback.attest.sign import check_signatures, open_envelope, sign_bytes, verify_envelope
from cufallback.attest.statement import Subject, statement
from cufallback.checks import Check
from cufallback.errors import AttestationError
from cufallback.store import canonical_json, sha256_file

SBOM_ENVELOPE = f"sbom-{WHEELS[0]}.dsse.json"
NAMES = {"provenance.dsse.json", "record.dsse.json", "sbom-image.dsse.json"} | {
    f"sbom-{wheel}.dsse.json" for wheel in WHEELS
}


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """``keys("ours")`` is a private and a public key's file."""
    folder = tmp_path_factory.mktemp("keys")
    made = {name: write_key(folder, name) for name in ("ours", "theirs")}
    return made.__getitem__


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return write_build(tmp_path / "build")


@pytest.fixture
def signed(build: Build, keys: Callable[[str], tuple[Path, Path]]) -> Build:
    build.sign(keys("ours")[0])
    return build


def checks(build: Build, public: Path | None) -> dict[str, Check]:
    key = load_public_key(public) if public else None
    found = list(check_signatures(build.folder, build.expected(), key))
    return {check.what.rpartition("/")[2]: check for check in found}


def envelope(build: Build, name: str) -> Any:
    return json.loads((build.folder / "signatures" / name).read_bytes())


def payload(build: Build, name: str) -> bytes:
    return base64.b64decode(envelope(build, name)["payload"])


# What is signed


def test_every_statement_is_signed_and_verifies(signed: Build, keys: Callable[[str], tuple[Path, Path]]) -> None:
    found = checks(signed, keys("ours")[1])
    assert found.keys() == NAMES
    assert {check.status for check in found.values()} == {"passed"}
    assert {path.name for path in (signed.folder / "signatures").iterdir()} == NAMES


def test_signing_returns_the_paths_it_wrote(build: Build, keys: Callable[[str], tuple[Path, Path]]) -> None:
    written = build.sign(keys("ours")[0])
    assert sorted(written) == sorted((build.folder / "signatures").iterdir())


def test_the_provenance_is_signed_as_the_very_bytes_of_its_file(
    build: Build, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    path = build.folder / "provenance.intoto.json"
    path.write_bytes(json.dumps(json.loads(path.read_bytes()), indent=7).encode())
    build.sign(keys("ours")[0])
    assert payload(build, "provenance.dsse.json") == path.read_bytes()
    assert passes(build, keys("ours")[1])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_payload_is_a_statement_that_in_totos_own_model_takes(signed: Build, name: str) -> None:
    data = json.loads(payload(signed, name))
    assert data.keys() == {"_type", "subject", "predicateType", "predicate"}
    subjects = [ResourceDescriptor(**row).pb for row in data["subject"]]
    model = Statement(subjects, data["predicateType"], data["predicate"])
    model.validate()
    assert model.pb.type == data["_type"]


def test_an_sbom_is_said_of_its_own_wheel(signed: Build) -> None:
    data = json.loads(payload(signed, SBOM_ENVELOPE))
    wheel = signed.folder / "wheels" / WHEELS[0]
    assert data["subject"] == [{"name": WHEELS[0], "digest": {"sha256": sha256_file(wheel)}}]
    assert data["predicateType"] == "https://cyclonedx.org/bom"
    assert data["predicate"] == json.loads((signed.folder / "sbom" / f"{WHEELS[0]}.cdx.json").read_bytes())


def test_the_record_carries_a_simple_verification_result(signed: Build) -> None:
    data = json.loads(payload(signed, "record.dsse.json"))
    assert [subject["name"] for subject in data["subject"]] == ["record.json", "SHA256SUMS"]
    assert data["predicateType"] == "https://in-toto.io/attestation/svr/v0.2"
    assert data["predicate"].keys() == {"verifier", "timeCreated", "properties"}
    assert data["predicate"]["timeCreated"] == VERIFIED_AT
    assert data["predicate"]["verifier"]["policies"] == []


def test_signing_again_replaces_everything(signed: Build, keys: Callable[[str], tuple[Path, Path]]) -> None:
    (signed.folder / "signatures" / "stray").write_text("")
    signed.sign(keys("theirs")[0], verified_at="2027-01-01T00:00:00Z")
    assert passes(signed, keys("theirs")[1])
    assert not passes(signed, keys("ours")[1])


@pytest.mark.parametrize("missing", ["provenance.intoto.json", "sbom/image.cdx.json", "record.json", "SHA256SUMS"])
def test_what_cannot_be_signed_leaves_the_old_signatures_alone(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], missing: str
) -> None:
    before = {path: path.read_bytes() for path in (signed.folder / "signatures").iterdir()}
    (signed.folder / missing).unlink()
    with pytest.raises(AttestationError):
        signed.sign(keys("theirs")[0])
    assert {path: path.read_bytes() for path in (signed.folder / "signatures").iterdir()} == before


def test_a_failure_in_the_middle_leaves_nothing(
    build: Build, keys: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = sign.sign_bytes, []

    def third_fails(*arguments: Any) -> bytes:
        calls.append(arguments)
        if len(calls) == 3:
            raise AttestationError("no more", remedy="none")
        return real(*arguments)

    monkeypatch.setattr(sign, "sign_bytes", third_fails)
    before = sorted(build.folder.iterdir())
    with pytest.raises(AttestationError):
        build.sign(keys("ours")[0])
    assert sorted(build.folder.iterdir()) == before


@pytest.mark.parametrize("bom", [b"[]", b"{", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": NaN}', b'{"a": "\\ud800"}'])
def test_a_bom_that_is_no_plain_json_object_is_not_signed(
    build: Build, keys: Callable[[str], tuple[Path, Path]], bom: bytes
) -> None:
    (build.folder / "sbom/image.cdx.json").write_bytes(bom)
    with pytest.raises(AttestationError):
        build.sign(keys("ours")[0])
    assert not (build.folder / "signatures").exists()


# Without a key


def test_a_folder_that_nobody_signed(build: Build, keys: Callable[[str], tuple[Path, Path]]) -> None:
    assert checks(build, None) == {"signatures": Check("signatures", "not_run", "not signed")}
    found = checks(build, keys("ours")[1])
    assert found.keys() == NAMES
    assert all(check.status == "failed" and "is missing" in check.why for check in found.values())


def test_signatures_without_a_key_are_not_checked_and_say_so(signed: Build) -> None:
    why = f"{len(NAMES)} documents are signed, but no key was given"
    assert checks(signed, None) == {"signatures": Check("signatures", "not_run", why)}


# Faults

Alter = Callable[[dict[str, Any]], object]


def flipped(text: str) -> str:
    content = bytearray(base64.b64decode(text))
    content[len(content) // 2] ^= 1
    return base64.b64encode(bytes(content)).decode()


def reworded(data: dict[str, Any], before: bytes, after: bytes) -> None:
    content = base64.b64decode(data["payload"])
    assert before in content
    data["payload"] = base64.b64encode(content.replace(before, after)).decode()


ENVELOPE_FAULTS: dict[str, tuple[Alter, str]] = {
    "payload altered": (lambda data: reworded(data, b'"version": 1', b'"version": 2'), "was altered"),
    "payload flipped": (lambda data: data.update(payload=flipped(data["payload"])), "was altered"),
    "payload empty": (lambda data: data.update(payload=""), "not base64"),
    "payload no text": (lambda data: data.update(payload=1), "not base64"),
    "payload bad base64": (lambda data: data.update(payload="!" + data["payload"]), "not base64"),
    "payload url base64": (lambda data: data.update(payload="-_-_" + data["payload"]), "not base64"),
    "payload with newline": (lambda data: data.update(payload=data["payload"] + "\n"), "not base64"),
    "payload without padding": (lambda data: data.update(payload="YQ"), "not base64"),
    "payload loose padding": (lambda data: data.update(payload="YR=="), "not base64"),
    "type other": (lambda data: data.update(payloadType="application/json"), "application/json"),
    "type a list": (lambda data: data.update(payloadType=[]), "[]"),
    "field missing": (lambda data: data.pop("payloadType"), "its fields are not"),
    "field unknown": (lambda data: data.update(extra=1), "its fields are not"),
    "no signature": (lambda data: data.update(signatures=[]), "carries no signature"),
    "signatures an object": (lambda data: data.update(signatures={}), "carries no signature"),
    "signature a string": (lambda data: data.update(signatures=["x"]), "other fields"),
    "signature unknown field": (lambda data: data["signatures"][0].update(cert="x"), "other fields"),
    "signature missing": (lambda data: data["signatures"][0].pop("sig"), "other fields"),
    "signature no base64": (lambda data: data["signatures"][0].update(sig="é"), "not base64"),
    "signature empty": (lambda data: data["signatures"][0].update(sig=""), "not base64"),
    "signature flipped": (
        lambda data: data["signatures"][0].update(sig=flipped(data["signatures"][0]["sig"])),
        "alter",
    ),
    "signature no DER": (lambda data: data["signatures"][0].update(sig="QUJD"), "was altered"),
    "signature without id": (
        lambda data: data.update(signatures=[{"sig": flipped(data["signatures"][0]["sig"])}]),
        "no signature is of the given key",
    ),
    "key id a number": (lambda data: data["signatures"][0].update(keyid=1), "key id"),
    "two, ours bad": (
        lambda data: data["signatures"].append({**data["signatures"][0], "sig": flipped(data["signatures"][0]["sig"])}),
        "was altered",
    ),
}


@pytest.mark.parametrize("kind", ENVELOPE_FAULTS)
def test_an_altered_envelope_fails_and_only_it(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    alter, words = ENVELOPE_FAULTS[kind]
    data = envelope(signed, SBOM_ENVELOPE)
    alter(data)
    (signed.folder / "signatures" / SBOM_ENVELOPE).write_text(json.dumps(data))
    found = checks(signed, keys("ours")[1])
    assert (found[SBOM_ENVELOPE].status, words in found[SBOM_ENVELOPE].why) == ("failed", True), found[SBOM_ENVELOPE]
    assert {check.status for name, check in found.items() if name != SBOM_ENVELOPE} == {"passed"}


def cut(path: Path, _build: Build) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def swapped(path: Path, build: Build) -> None:
    shutil.copy(build.folder / f"signatures/sbom-{WHEELS[1]}.dsse.json", path)


def large(path: Path, _build: Build) -> None:
    os.truncate(path, 100 << 20)


def linked(path: Path, _build: Build) -> None:
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def piped(path: Path, _build: Build) -> None:
    path.unlink()
    os.mkfifo(path)


def foldered(path: Path, _build: Build) -> None:
    path.unlink()
    path.mkdir()


def said_twice(path: Path, _build: Build) -> None:
    path.write_bytes(path.read_bytes().replace(b'"payloadType"', b'"payloadType": "other",\n  "payloadType"'))


FILE_FAULTS: dict[str, tuple[Callable[[Path, Build], object], str]] = {
    "missing": (lambda path, _build: path.unlink(), "is missing"),
    "truncated": (cut, "is not JSON"),
    "empty": (lambda path, _build: path.write_bytes(b""), "is not JSON"),
    "binary": (lambda path, _build: path.write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "a list": (lambda path, _build: path.write_bytes(b"[]"), "not a JSON object"),
    "deep": (lambda path, _build: path.write_bytes(b'{"payload":' + b"[" * 1_000_000), "nested too deeply"),
    "large number": (lambda path, _build: path.write_bytes(b'{"payload":' + b"1" * 100_000 + b"}"), "is not JSON"),
    "a key twice": (said_twice, "twice"),
    "100 MB": (large, "bytes, more than"),
    "a link": (linked, "is a link"),
    "a pipe": (piped, "no regular file"),
    "a folder": (foldered, "no regular file"),
    "of another wheel": (swapped, f"speaks of another '{WHEELS[0]}'"),
}


@pytest.mark.parametrize("with_key", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize("kind", FILE_FAULTS)
def test_a_bad_file_in_the_place_of_an_envelope_fails_and_only_it(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], kind: str, with_key: bool
) -> None:
    spoil, words = FILE_FAULTS[kind]
    spoil(signed.folder / "signatures" / SBOM_ENVELOPE, signed)
    found = checks(signed, keys("ours")[1] if with_key else None)
    status, why = found[SBOM_ENVELOPE].status, found[SBOM_ENVELOPE].why
    assert status == "failed"
    assert words in why or (kind == "of another wheel" and f"is not sbom/{WHEELS[0]}.cdx.json" in why)
    assert {check.status for name, check in found.items() if name != SBOM_ENVELOPE} == {
        "passed" if with_key else "not_run"
    }


def test_another_key_fails_every_signature(signed: Build, keys: Callable[[str], tuple[Path, Path]]) -> None:
    found = checks(signed, keys("theirs")[1])
    assert {check.status for check in found.values()} == {"failed"}
    assert all("another key signed" in check.why for check in found.values())


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_else_lies_among_the_signatures_fails(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    path = signed.folder / "signatures" / "another.dsse.json"
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("record.dsse.json")}[kind]()
    found = checks(signed, keys("ours")[1])
    assert found[path.name].status == "failed"
    assert "belongs to no document" in found[path.name].why


@pytest.mark.parametrize("kind", ["file", "link"])
def test_signatures_must_be_a_folder(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    place = signed.folder / "signatures"
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved") if kind == "link" else place.touch()
    for key in (keys("ours")[1], None):
        assert checks(signed, key) == {"signatures": Check("signatures", "failed", "is no folder")}


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ("provenance.intoto.json", "provenance.dsse.json"),
        (f"sbom/{WHEELS[0]}.cdx.json", SBOM_ENVELOPE),
        ("sbom/image.cdx.json", "sbom-image.dsse.json"),
        ("record.json", "record.dsse.json"),
        ("SHA256SUMS", "record.dsse.json"),
    ],
)
@pytest.mark.parametrize("with_key", [True, False], ids=["key", "no key"])
def test_a_document_that_was_changed_after_signing_fails(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], document: str, name: str, with_key: bool
) -> None:
    path = signed.folder / document
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1) if document != "record.json" else b"{}")
    found = checks(signed, keys("ours")[1] if with_key else None)
    assert [key for key, check in found.items() if check.status == "failed"] == [name]


SUBJECT_FAULTS: dict[str, tuple[Callable[[Build], list[Subject]], str]] = {
    "not on disk": (lambda build: [*build.wheels, Subject("ghost.whl", "0" * 64)], "'ghost.whl', which is not here"),
    "another digest": (lambda build: [Subject(WHEELS[0], "0" * 64)], f"another '{WHEELS[0]}'"),
    "renamed": (lambda build: [Subject("x.whl", build.wheels[0].sha256)], "'x.whl', which is not here"),
}


@pytest.mark.parametrize("kind", SUBJECT_FAULTS)
def test_a_signed_provenance_of_other_subjects_fails(
    build: Build, keys: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    subjects, words = SUBJECT_FAULTS[kind]
    lie = statement(subjects(build), "https://slsa.dev/provenance/v1", {})
    (build.folder / "provenance.intoto.json").write_bytes(lie)
    build.sign(keys("ours")[0])
    found = checks(build, keys("ours")[1])["provenance.dsse.json"]
    assert found.status == "failed"
    assert words in found.why


@pytest.mark.parametrize(
    "content",
    [
        {"_type": "https://in-toto.io/Statement/v0.1", "subject": [{"name": "a", "digest": {"sha256": "0"}}]},
        {"_type": "https://in-toto.io/Statement/v1", "subject": []},
        {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "a", "digest": {"md5": "0"}}]},
        {"_type": "https://in-toto.io/Statement/v1", "subject": [{"digest": {"sha256": "0"}}]},
        {"_type": "https://in-toto.io/Statement/v1", "subject": ["a"]},
        [],
    ],
)
def test_a_signed_provenance_that_is_no_statement_fails(
    build: Build, keys: Callable[[str], tuple[Path, Path]], content: Any
) -> None:
    (build.folder / "provenance.intoto.json").write_bytes(canonical_json(content))
    build.sign(keys("ours")[0])
    assert checks(build, keys("ours")[1])["provenance.dsse.json"].status == "failed"


@pytest.mark.parametrize("time", ["yesterday", "2026-12-01T00:00:00+01:00", 5, None, ""])
def test_a_verification_without_a_proper_time_fails(
    signed: Build, keys: Callable[[str], tuple[Path, Path]], time: Any
) -> None:
    data = json.loads(payload(signed, "record.dsse.json"))
    data["predicate"]["timeCreated"] = time
    lie = sign_bytes(canonical_json(data), load_private_key(keys("ours")[0], environ={}))
    (signed.folder / "signatures/record.dsse.json").write_bytes(lie)
    assert checks(signed, keys("ours")[1])["record.dsse.json"].status == "failed"


def test_signatures_by_two_keys_verify_with_either_and_the_other_is_told(
    signed: Build, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    path = signed.folder / "signatures" / SBOM_ENVELOPE
    both = envelope(signed, SBOM_ENVELOPE)
    second = sign_bytes(payload(signed, SBOM_ENVELOPE), load_private_key(keys("theirs")[0], environ={}))
    both["signatures"] += json.loads(second)["signatures"]
    path.write_text(json.dumps(both))
    for name in ("ours", "theirs"):
        check = checks(signed, keys(name)[1])[SBOM_ENVELOPE]
        assert (check.status, "1 more signature(s)" in check.why) == ("passed", True)


def test_a_signature_without_key_id_counts_as_dsse_says(keys: Callable[[str], tuple[Path, Path]]) -> None:
    data = json.loads(sign_bytes(b"{}", load_private_key(keys("ours")[0], environ={})))
    for row in ({"sig": data["signatures"][0]["sig"]}, {"sig": data["signatures"][0]["sig"], "keyid": ""}):
        opened = open_envelope(json.dumps({**data, "signatures": [row]}).encode(), where="here")
        verify_envelope(opened, load_public_key(keys("ours")[1]), where="here")
        with pytest.raises(AttestationError):
            verify_envelope(opened, load_public_key(keys("theirs")[1]), where="here")


def test_an_envelope_given_as_bytes_is_bounded_too() -> None:
    with pytest.raises(AttestationError, match="more than"):
        open_envelope(b" " * ((64 << 20) + 1), where="here")
