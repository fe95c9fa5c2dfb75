"""What the client makes of oras's answers when oras, its version or the registry are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cufallback.errors import ImageError, RegistryError, UsageError
from cufallback.image.reference import parse_reference
from cufallback.image.registry import Registry, index_platforms
from cufallback.process import RecordingRunner
from cufallback.store import sha256_bytes

A, B, C = (f"sha256:{digit * 64}" for digit in "abc")
REFERENCE = parse_reference(f"registry.example/team/app@{A}")
INDEX = "application/vnd.oci.image.index.v1+json"


def fake_oras(text: str, *, content: bytes = b"") -> RecordingRunner:
    """Prints ``text``, and writes ``content`` where ``--output`` says."""

    def answer(argv: tuple[str, ...]) -> tuple[int, str]:
        if argv == ("oras", "version"):
            return 0, "Version: 1.2.0\n"
        if "--output" in argv:
            Path(argv[argv.index("--output") + 1]).write_bytes(content)
        return 0, text

    return RecordingRunner(answer)


def client(text: str, *, content: bytes = b"") -> Registry:
    return Registry(fake_oras(text, content=content), log=None)


def test_bytes_with_another_digest_are_refused_even_when_oras_took_them() -> None:
    with pytest.raises(RegistryError, match="sent bytes with digest"):
        client("", content=b"{}").manifest(REFERENCE)
    with pytest.raises(RegistryError, match="sent bytes with digest"):
        client("", content=b"{}").blob(REFERENCE, B)


def test_a_document_goes_to_a_file_and_is_held_to_its_digest(tmp_path: Path) -> None:
    manifest = json.dumps({"layers": [{"digest": B}]}).encode()
    digest = f"sha256:{sha256_bytes(manifest)}"
    with pytest.raises(RegistryError, match="sent bytes with digest") as caught:
        client("", content=manifest).save(REFERENCE, digest, tmp_path / "document")
    assert str(caught.value.where).endswith(B)


@pytest.mark.parametrize("key", ["manifests", "referrers"])  # oras 1.2, oras 1.3
def test_referrers_are_read_as_either_oras_lists_them(key: str) -> None:
    rows = [{"digest": digest, "artifactType": kind} for digest, kind in ((C, "x"), (B, "x"), (A, "b"))]
    found = client("Warning: something\n" + json.dumps({key: rows}, indent=2)).referrers(REFERENCE)
    assert [(referrer.artifact_type, referrer.digest) for referrer in found] == [("b", A), ("x", B), ("x", C)]


@pytest.mark.parametrize("text", ["", "oops", '{"manifests": [{}]}', '{"manifests": [{"digest": "sha256:1"}]}'])
def test_odd_lists_of_referrers(text: str) -> None:
    with pytest.raises(RegistryError):
        client(text).referrers(REFERENCE)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"mediaType": INDEX, "digest": A},
        {"mediaType": INDEX, "digest": "latest", "size": 2},
        {"mediaType": INDEX, "digest": B, "size": 2},  # another one than was asked for
        {"digest": A, "size": 2},
    ],
)
def test_odd_descriptors(answer: dict[str, Any]) -> None:
    with pytest.raises(RegistryError):
        client(json.dumps(answer)).digest_of(REFERENCE)


@pytest.mark.parametrize(
    "layers",
    [None, {}, [], [{"digest": "x"}], [{"digest": A}, {"digest": B}]],
    ids=lambda value: json.dumps(value)[:20],
)
def test_a_referrer_has_one_document(layers: Any) -> None:
    content = json.dumps({"layers": layers}).encode()
    digest = f"sha256:{sha256_bytes(content)}"
    with pytest.raises(RegistryError):
        client("", content=content).fetch(REFERENCE, digest)


@pytest.mark.parametrize(
    ("text", "plain_http", "flags"),
    [
        ("127.0.0.1:5000/a:1", None, True),
        ("registry.example/a:1", None, False),
        ("registry.example/a:1", True, True),
        ("127.0.0.1:5000/a:1", False, False),
    ],
)
def test_plain_http_only_on_this_machine_or_when_said(text: str, plain_http: bool | None, flags: bool) -> None:
    runner = fake_oras(json.dumps({"mediaType": INDEX, "digest": A, "size": 1}))
    Registry(runner, log=None, plain_http=plain_http).digest_of(parse_reference(text))
    assert ("--plain-http" in runner.calls[-1]) is flags


@pytest.mark.parametrize("text", ["registry.example/a", "registry.example/a:1"])
def test_what_needs_a_digest_gets_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no digest"):
        client("").pull(parse_reference(text), tmp_path / "x", platform="linux/amd64")
    assert list(tmp_path.iterdir()) == []


def row(digest: str, *, os: str = "linux", **platform: str) -> dict[str, Any]:
    return {"digest": digest, "platform": {"os": os, **platform}}


def index(*rows: Any) -> bytes:
    return json.dumps({"mediaType": INDEX, "manifests": rows}).encode()


def test_platforms_of_an_index() -> None:
    content = index(
        row(A, architecture="amd64"),
        row(B, architecture="arm64", variant="v8"),
        row(C, architecture="arm", variant="v7"),
        row(A, architecture="unknown", os="unknown"),  # an attestation of BuildKit
        row(B, architecture="amd64", os="windows"),
        {"digest": C},
    )
    assert index_platforms(content, where="x") == {"linux/amd64": A, "linux/arm64": B, "linux/arm/v7": C}
    assert index_platforms(b'{"layers": []}', where="x") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        index(row(A, architecture="amd64"), row(B, architecture="amd64")),
        index(row("latest", architecture="amd64")),
    ],
    ids=["empty", "list", "deep", "twice", "no digest"],
)
def test_odd_indexes(content: bytes) -> None:
    with pytest.raises(ImageError):
        index_platforms(content, where="x")
