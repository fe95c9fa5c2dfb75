"""A small build folder with everything that is signed, and keys made by openssl."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cufallback.attest.keys import load_private_key, load_public_key
from cufallback.attest.sign import Expected, expected_statements, sign_folder
from cufallback.attest.statement import PROVENANCE_PREDICATE, Subject, statement
from cufallback.store import canonical_json, sha256_bytes, sha256_file

VERIFIED_AT = "2026-12-01T00:00:00Z"
WHEELS = ("demo-1.0+cu129-py3-none-any.whl", "demo_probe-2.0-py3-none-any.whl")


@dataclass(frozen=True)
class Build:
    """A folder laid out like a build's, and the subjects of what is signed there."""

    folder: Path
    wheels: tuple[Subject, ...]
    image: Subject

    def expected(self) -> Expected:
        return expected_statements(self.folder, wheels=self.wheels, image=self.image)

    def sign(self, key: Path, verified_at: str = VERIFIED_AT) -> tuple[Path, ...]:
        signer = load_private_key(key, environ={})
        return sign_folder(self.folder, signer, wheels=self.wheels, image=self.image, verified_at=verified_at)


def blob(layout: Path, content: bytes, media_type: str) -> dict[str, Any]:
    """Write a blob of an OCI layout and return its descriptor."""
    digest = sha256_bytes(content)
    path = layout / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def write_image(layout: Path, content: bytes) -> str:
    """Write an OCI layout with one image of one layer; return the hex digits of its manifest's digest."""
    layer = blob(layout, content, "application/vnd.oci.image.layer.v1.tar")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(layout, json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [layer],
    }
    top = blob(layout, json.dumps(manifest).encode(), manifest["mediaType"])
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
    return str(top["digest"]).removeprefix("sha256:")


def write_build(folder: Path, layer: bytes = b"\0" * 1024) -> Build:
    """Write two wheels, an image, their SBOMs, the provenance, the record and the checksums."""
    (folder / "wheels").mkdir(parents=True)
    for name in WHEELS:
        (folder / "wheels" / name).write_bytes(f"the bytes of {name}".encode())
    wheels = tuple(Subject(name, sha256_file(folder / "wheels" / name)) for name in WHEELS)
    image = Subject("image", write_image(folder / "image", layer))
    (folder / "sbom").mkdir()
    for subject in (*wheels, image):
        kind = "container" if subject is image else "library"
        hashes = [{"alg": "SHA-256", "content": subject.sha256}]
        bom = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": {"type": kind, "name": subject.name, "bom-ref": subject.name, "hashes": hashes}},
            "components": [],
            "compositions": [{"aggregate": "complete", "assemblies": [subject.name]}],
        }
        (folder / "sbom" / f"{subject.name}.cdx.json").write_bytes(canonical_json(bom))
    provenance = statement(
        (*wheels, image),
        PROVENANCE_PREDICATE,
        {
            "buildDefinition": {
                "buildType": "https://example.com/build/v1",
                "externalParameters": {"recipe": "rehearsal"},
                "resolvedDependencies": [
                    {"uri": "git+https://example.com/demo@v1.0", "digest": {"gitCommit": "1" * 40}}
                ],
            },
            "runDetails": {"builder": {"id": "https://example.com/builder/local"}},
        },
    )
    (folder / "provenance.intoto.json").write_bytes(provenance)
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [{"path": path, "sha256": sha256_file(folder / path)} for path in paths]
    subjects = [
        {"path": f"wheels/{wheel.name}", "sha256": wheel.sha256, "isolation": {"status": "passed"}} for wheel in wheels
    ]
    stages = [{"name": "wheels", "status": "passed", "why": ""}, {"name": "accept", "status": "not_run", "why": "x"}]
    record = {"schema": 1, "build_id": "0" * 64, "subjects": subjects, "stages": stages, "files": files}
    (folder / "record.json").write_bytes(canonical_json(record))
    lines = [f"{file['sha256']}  {file['path']}\n" for file in files]
    lines.append(f"{sha256_file(folder / 'record.json')}  record.json\n")
    (folder / "SHA256SUMS").write_text("".join(sorted(lines, key=lambda line: line[66:])))
    return Build(folder, wheels, image)


def openssl(*arguments: str | Path) -> None:
    """Run openssl; it must succeed."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def write_key(folder: Path, name: str = "cosign") -> tuple[Path, Path]:
    """Make a key pair as docs/verify.md says; return the private and the public key's file."""
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def passes(build: Build, public: Path) -> bool:
    """Say whether every signature of a build is there, by that key, on what lies there."""
    from cufallback.attest.sign import check_signatures

    checks = list(check_signatures(build.folder, build.expected(), load_public_key(public)))
    return bool(checks) and all(check.status == "passed" for check in checks)
