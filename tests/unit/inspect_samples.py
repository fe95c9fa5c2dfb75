"""Wheels for the tests of inspection, made from the committed sample library."""

from __future__ import annotations

import zipfile
from pathlib import Path

from cufallback.cuda.versions import Architecture, Isa
from cufallback.wheel.audit import Expectation
from cufallback.wheel.inspect import Inspection

SAMPLE = (Path(__file__).parents[1] / "data" / "inspect" / "sample_cu129.so").read_bytes()
NAME = "sample-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
CODE = "sample/_C.abi3.so"

A = Architecture.parse
GOOD = Expectation(
    toolkit="12.9.1",
    architectures=(A("9.0a"), A("10.3a")),
    ptx=((A("8.0"), Isa(8, 8)),),
    maximum_driver_branch=575,
    extensions=("sample._C",),
    size_limit=1 << 20,
)


def make_wheel(
    folder: Path,
    members: dict[str, bytes] | None = None,
    *,
    name: str = NAME,
    requires: tuple[str, ...] = (),
    method: int = zipfile.ZIP_DEFLATED,
    metadata: bytes | None = None,
) -> Path:
    """Write a wheel that carries the sample library, or ``members``."""
    lines = ["Metadata-Version: 2.4", "Name: sample", "Version: 1.0", *(f"Requires-Dist: {line}" for line in requires)]
    path = folder / name
    with zipfile.ZipFile(path, "w", method) as archive:
        for member, data in (members if members is not None else {CODE: SAMPLE, "sample/__init__.py": b""}).items():
            archive.writestr(member, data)
        archive.writestr("sample-1.0.dist-info/METADATA", metadata or ("\n".join(lines) + "\n").encode())
    return path


def failed(inspection: Inspection) -> dict[str, str]:
    return {finding.what: finding.why for finding in inspection.findings if finding.status == "failed"}


def statuses(inspection: Inspection, what: str) -> list[str]:
    return [finding.status for finding in inspection.findings if finding.what == what]
