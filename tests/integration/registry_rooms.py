"""For tests of registries: tiny images made by hand, signed statements about them, and a look past our own client."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cufallback.image.reference import Reference
from cufallback.store import sha256_bytes

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


class Layout:
    """An OCI layout that grows; ``top`` is what its index.json names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.top: list[dict[str, Any]] = []

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        digest = sha256_bytes(content)
        path = self.folder / "blobs" / "sha256" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def image(self, text: str, architecture: str = "amd64", *, size: int = 0) -> dict[str, Any]:
        """Add an image with one layer: a file with ``text``, followed by ``size`` bytes that do not compress."""
        noise = b"".join(hashlib.sha256(f"{text}{n}".encode()).digest() for n in range(size // 32))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo("content")
            member.size = len(text.encode()) + len(noise)
            archive.addfile(member, io.BytesIO(text.encode() + noise))
        layer = self.blob(packed.getvalue(), "application/vnd.oci.image.layer.v1.tar")
        config = {"architecture": architecture, "os": "linux", "config": {"Labels": {"text": text}}}
        config["rootfs"] = {"type": "layers", "diff_ids": [layer["digest"]]}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [layer],
        }
        return self.blob(json.dumps(manifest).encode(), MANIFEST)

    def index(self, images: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Add an index of images by architecture."""
        rows = [
            {**image, "platform": {"os": "linux", "architecture": architecture}}
            for architecture, image in images.items()
        ]
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}
        return self.blob(json.dumps(document).encode(), INDEX)

    def name(self, descriptor: Mapping[str, Any]) -> str:
        """Name it in index.json and return its digest."""
        self.top.append(dict(descriptor))
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.top}))
        return str(descriptor["digest"])


def make_image(folder: Path, text: str, *, size: int = 0) -> str:
    """Make a layout with one image and return the image's digest."""
    layout = Layout(folder)
    return layout.name(layout.image(text, size=size))


@dataclass(frozen=True)
class Key:
    """A key pair that cosign made."""

    private: Path
    public: Path


def cosign(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Debian's cosign, offline, with the empty password of test keys."""
    environment = os.environ | {"COSIGN_PASSWORD": ""}
    return subprocess.run(["cosign", *arguments], env=environment, capture_output=True, text=True, check=False)


def make_key(folder: Path) -> Key:
    """Let cosign make a key pair."""
    folder.mkdir(parents=True, exist_ok=True)
    done = cosign("generate-key-pair", "--output-key-prefix", folder / "test")
    assert done.returncode == 0, done.stderr
    return Key(folder / "test.key", folder / "test.pub")


def signed_statement(path: Path, key: Key, digest: str, predicate_type: str, predicate: Any) -> Path:
    """Write a DSSE envelope of an in-toto statement about an image; the signature is cosign's over the DSSE PAE."""
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "image", "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    payload_type, payload = "application/vnd.in-toto+json", json.dumps(statement).encode()
    encoded = path.with_suffix(".pae")
    encoded.write_bytes(f"DSSEv1 {len(payload_type)} {payload_type} {len(payload)} ".encode() + payload)
    done = cosign("sign-blob", "--yes", "--key", key.private, "--tlog-upload=false", encoded)
    assert done.returncode == 0, done.stderr
    signatures = [{"keyid": "", "sig": done.stdout.strip()}]
    envelope = {
        "payloadType": payload_type,
        "payload": base64.b64encode(payload).decode(),
        "signatures": signatures,
    }
    path.write_text(json.dumps(envelope))
    return path


PROVENANCE = "https://slsa.dev/provenance/v1"


def provenance(path: Path, key: Key, digest: str) -> Path:
    """Write a signed SLSA provenance about an image, as small as can be."""
    build = {"buildType": "https://build.example/1", "externalParameters": {}, "resolvedDependencies": []}
    run = {"builder": {"id": "https://builder.example/1"}, "metadata": {"invocationId": path.stem}}
    return signed_statement(path, key, digest, PROVENANCE, {"buildDefinition": build, "runDetails": run})


def verify_attestation(key: Key, reference: Reference, kind: str) -> subprocess.CompletedProcess[str]:
    """Let cosign look for a signed statement of a kind on an image."""
    offline = ("--insecure-ignore-tlog=true", "--allow-http-registry")
    return cosign("verify-attestation", "--key", key.public, *offline, "--type", kind, str(reference))


def get(registry: str, path: str) -> bytes:
    """Return what the registry answers to GET /v2/PATH, without any client of ours."""
    accept = f"{MANIFEST}, {INDEX}"
    request = urllib.request.Request(f"http://{registry}/v2/{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def delete(reference: Reference) -> None:
    """Take the manifest that ``reference`` names by digest out of the registry, and its tags with it."""
    path = f"{reference.repository}/manifests/{reference.digest}"
    request = urllib.request.Request(f"http://{reference.registry}/v2/{path}", method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 202


def tags(reference: Reference) -> dict[str, str]:
    """Return tag → digest of everything that has a tag in a repository; empty when there is no repository."""
    names: Sequence[str] = []
    with contextlib.suppress(urllib.error.HTTPError):
        names = json.loads(get(reference.registry, f"{reference.repository}/tags/list"))["tags"] or []
    manifest = f"{reference.repository}/manifests"
    return {name: f"sha256:{sha256_bytes(get(reference.registry, f'{manifest}/{name}'))}" for name in sorted(names)}
