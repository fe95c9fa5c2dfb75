"""A small build folder with an image, in the form of records; nothing in it was built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.image_rooms import DIGEST, image, layer, top

from cufallback.record import RECORD, SUMS, Record, checksum_lines, files_below
from cufallback.store import canonical_json, sha256_file, write_atomic, write_json

HEX, COMMIT, BUILD_ID = "2" * 64, "3" * 40, "1f" * 32
WHEELS = ("vllm-0.27.1+cu129-py3-none-any.whl", "cuda_probe-1.0-py3-none-any.whl")
REFERENCE = "docker.io/library/python:3.11-slim-bookworm"


def record_json(folder: Path, *, with_image: bool = True) -> dict[str, Any]:
    """Lay out a build folder's files and return the record of them."""
    for name in WHEELS:
        write_atomic(folder / "wheels" / name, f"the bytes of {name}".encode())
        write_atomic(folder / "logs" / f"{name}.log", b"built\n")
    write_atomic(folder / "plan.json", b"{}\n")
    found = None
    if with_image:
        made = image(folder / "image", [layer(("a", b"1"))])
        top(folder / "image", made)
        blob = {"media_type": made["mediaType"], "digest": made["digest"], "size": made["size"]}
        found = {
            "path": "image", "platform": "linux/amd64", "size": 3 << 20, "manifest": blob, "config": blob,
            "layers": [blob, blob], "index": DIGEST, "dockerfile": "inputs/dockerfiles/x.Dockerfile", "labels": {},
            "require_cuda": "driver>=575.51.03", "user": "10001:10001", "entrypoint": ["python"],
            "engine": {"engine": "26.1.5"}, "log": "logs/image.log",
            "checks": [
                {"what": "user", "status": "passed", "why": "so"}, {"what": "x", "status": "not_run", "why": "y"},
            ],
        }  # fmt: skip
    subjects = [
        {
            "path": f"wheels/{name}", "sha256": HEX, "size": 5 << 20, "command": ["build"], "environment": {},
            "isolation": {"status": "passed", "statement": "isolated", "interfaces": []},
            "kernels": {"built": {}, "not_built": [], "findings": []}, "log": f"logs/{name}.log",
        }
        for name in WHEELS
    ]  # fmt: skip
    passed = {"what": "glibc", "status": "passed", "why": "so"}
    return {
        "schema": 2,
        "cufallback": "1.0",
        "build_id": BUILD_ID,
        "wheels_id": HEX,
        "recipe": {"name": "rehearsal", "status": "rehearsal", "path": "inputs/rehearsal.toml", "sha256": HEX},
        "source": {
            "kind": "sdist", "origin": "vllm", "ref": "0.27.1",
            "commit": {"id": COMMIT, "status": "quoted", "source": "the recipe"}, "archive_sha256": HEX, "epoch": 1,
            "tree_sha256": HEX, "edited_tree_sha256": HEX, "submodules": {},
            "contracts": [], "crates": [], "fetches": [],
            "changes": [{"kind": "rewrite", "commit": None, "file": "a.py", "why": "so", "diff": ""}],
        },
        "toolchain": {},
        "cuda_probe_sha256": HEX,
        "distributions": [
            {
                "name": "numpy", "version": "2.3", "filename": "numpy.whl", "sha256": HEX, "size": 1,
                "index": "default", "used_for": ["runtime"],
            }
        ],
        "requirement_edits": [],
        "subjects": subjects,
        "inspection": [
            {"file": WHEELS[0], "minimum_driver": None, "findings": [passed, passed, {**passed, "status": "warned"}]},
            {"file": WHEELS[1], "minimum_driver": {"driver": "575.51.03"}, "findings": []},
        ],
        "bases": [{"name": "base", "reference": REFERENCE, "digest": DIGEST, "origin": "lock"}],
        "image": found,
        "stages": [
            {"name": "wheels", "status": "passed", "why": "", "started": "t", "finished": "t", "seconds": 61.5},
            {
                "name": "image", "status": "passed" if found else "not_run", "why": "" if found else "no engine",
                "started": None, "finished": None, "seconds": 2.0 if found else None,
            },
        ],
        "files": [],
    }  # fmt: skip


def write_build(folder: Path, **options: bool) -> Record:
    """Write such a folder with its record and checksums."""
    return write_record_of(folder, record_json(folder, **options))


def write_record_of(folder: Path, value: dict[str, Any]) -> Record:
    """Write a record of the files that lie in a folder, and the checksums."""
    record = Record.model_validate({**value, "files": [file.model_dump() for file in files_below(folder)]})
    write_json(folder / RECORD, record.to_json())
    write_atomic(folder / SUMS, checksum_lines(record.files, sha256_file(folder / RECORD)).encode())
    assert (folder / RECORD).read_bytes() == canonical_json(record.to_json())
    return record
