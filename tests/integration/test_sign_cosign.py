"""Debian's cosign reads what we sign, refuses what it must, and signs what we read; all of it without a network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.sign_rooms import WHEELS, Build, write_build, write_key

from cufallback.attest.keys import load_private_key, load_public_key
from cufallback.attest.sign import open_envelope, verify_envelope
from cufallback.errors import AttestationError, KeyFileError

pytestmark = pytest.mark.services

Cosign = Callable[..., subprocess.CompletedProcess[str]]
SVR = "https://in-toto.io/attestation/svr/v0.2"


@pytest.fixture(scope="session")
def cosign() -> str:
    found = shutil.which("cosign")
    if found is None:
        pytest.skip("there is no cosign; Debian 13 has one")
    return found


@pytest.fixture
def run(cosign: str, tmp_path: Path) -> Cosign:
    """``run("verify-blob-attestation", …)`` starts cosign in a network namespace that has no network."""

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", cosign, *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COSIGN_PASSWORD": "words"},
            capture_output=True,
            text=True,
            check=False,
        )

    return start


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_key(tmp_path / "key")


@pytest.fixture
def signed(tmp_path: Path, pair: tuple[Path, Path]) -> Build:
    build = write_build(tmp_path / "build")
    build.sign(pair[0])
    return build


def verified(run: Cosign, public: Path, kind: str, envelope: Path, file: Path) -> str:
    """Return what cosign says of a file and an envelope: ``Verified OK`` or its error."""
    done = run(
        *("verify-blob-attestation", "--key", public, "--insecure-ignore-tlog=true", "--type", kind),
        *("--signature", envelope, file),
    )
    says = done.stderr.strip().splitlines()[-1]
    assert (done.returncode == 0) == (says == "Verified OK"), done.stderr
    return says


def manifest(build: Build) -> str:
    return f"image/blobs/sha256/{build.image.sha256}"


# name → (predicate type for cosign, envelope, file it is about)
ENVELOPES: dict[str, tuple[str, str, Callable[[Build], str]]] = {
    "provenance of a wheel": ("slsaprovenance1", "provenance", lambda build: f"wheels/{WHEELS[0]}"),
    "provenance of the other": ("slsaprovenance1", "provenance", lambda build: f"wheels/{WHEELS[1]}"),
    "provenance of the image": ("slsaprovenance1", "provenance", manifest),
    "SBOM of a wheel": ("cyclonedx", f"sbom-{WHEELS[0]}", lambda build: f"wheels/{WHEELS[0]}"),
    "SBOM of the image": ("cyclonedx", "sbom-image", manifest),
    "record": (SVR, "record", lambda build: "record.json"),
    "checksums": (SVR, "record", lambda build: "SHA256SUMS"),
}


def parts(build: Build, name: str) -> tuple[str, Path, Path]:
    kind, envelope, file = ENVELOPES[name]
    return kind, build.folder / "signatures" / f"{envelope}.dsse.json", build.folder / file(build)


@pytest.mark.parametrize("name", ENVELOPES)
def test_cosign_verifies_what_we_sign(run: Cosign, signed: Build, pair: tuple[Path, Path], name: str) -> None:
    assert verified(run, pair[1], *parts(signed, name)) == "Verified OK"


@pytest.mark.parametrize("name", ENVELOPES)
def test_cosign_refuses_an_altered_file(run: Cosign, signed: Build, pair: tuple[Path, Path], name: str) -> None:
    kind, envelope, file = parts(signed, name)
    file.write_bytes(file.read_bytes() + b" ")
    assert "no matching subject digest" in verified(run, pair[1], kind, envelope, file)


@pytest.mark.parametrize("name", ENVELOPES)
def test_cosign_refuses_an_altered_payload(run: Cosign, signed: Build, pair: tuple[Path, Path], name: str) -> None:
    kind, envelope, file = parts(signed, name)
    data = json.loads(envelope.read_bytes())
    payload = base64.b64decode(data["payload"])
    data["payload"] = base64.b64encode(payload.replace(b'"_type"', b' "_type"')).decode()
    envelope.write_text(json.dumps(data))
    assert "accepted signatures do not match threshold" in verified(run, pair[1], kind, envelope, file)


def test_cosign_refuses_another_key(run: Cosign, signed: Build, tmp_path: Path) -> None:
    _private, public = write_key(tmp_path / "other")
    assert "accepted signatures do not match" in verified(run, public, *parts(signed, "provenance of a wheel"))


def test_cosign_refuses_another_kind_of_statement(run: Cosign, signed: Build, pair: tuple[Path, Path]) -> None:
    _kind, envelope, file = parts(signed, "SBOM of a wheel")
    assert "invalid predicate type" in verified(run, pair[1], "slsaprovenance1", envelope, file)


def test_cosign_refuses_the_envelope_of_another_wheel(run: Cosign, signed: Build, pair: tuple[Path, Path]) -> None:
    kind, envelope, _file = parts(signed, "SBOM of a wheel")
    other = signed.folder / "wheels" / WHEELS[1]
    assert "no matching subject digest" in verified(run, pair[1], kind, envelope, other)


@pytest.fixture
def theirs(run: Cosign, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return private key, public key and an envelope, all made by cosign."""
    (tmp_path / "blob").write_text("bytes")
    (tmp_path / "predicate").write_text('{"bomFormat": "CycloneDX"}')
    assert run("generate-key-pair").returncode == 0
    made = run(
        *("attest-blob", "--yes", "--key", "cosign.key", "--tlog-upload=false", "--type", "cyclonedx"),
        *("--predicate", "predicate", "--output-signature", "theirs.dsse.json", "blob"),
    )
    assert made.returncode == 0, made.stderr
    return tmp_path / "cosign.key", tmp_path / "cosign.pub", tmp_path / "theirs.dsse.json"


def test_we_verify_what_cosign_signs(theirs: tuple[Path, Path, Path], pair: tuple[Path, Path]) -> None:
    _private, public, path = theirs
    envelope = open_envelope(path.read_bytes(), where=path.name)
    verify_envelope(envelope, load_public_key(public), where=path.name)
    assert json.loads(envelope.payload)["predicateType"] == "https://cyclonedx.org/bom"
    with pytest.raises(AttestationError, match="another key signed"):
        verify_envelope(envelope, load_public_key(pair[1]), where=path.name)


def test_we_refuse_what_cosign_signed_and_somebody_altered(theirs: tuple[Path, Path, Path]) -> None:
    _private, public, path = theirs
    data = json.loads(path.read_bytes())
    data["payload"] = base64.b64encode(b" " + base64.b64decode(data["payload"])).decode()
    envelope = open_envelope(json.dumps(data).encode(), where=path.name)
    with pytest.raises(AttestationError, match="the payload was altered"):
        verify_envelope(envelope, load_public_key(public), where=path.name)


def test_cosigns_own_private_key_is_named_with_a_way_out(theirs: tuple[Path, Path, Path]) -> None:
    with pytest.raises(KeyFileError, match="cosign's own encrypted format") as caught:
        load_private_key(theirs[0], environ={})
    assert "openssl genpkey" in caught.value.remedy
