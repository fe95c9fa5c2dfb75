"""What a wheel's metadata ask for: name, version, requirements, and which of these belong to a CUDA major version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.parser import Parser

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_SUFFIX = re.compile(r"-cu(?:da)?(1[1-9])\d?x?$")
_EXTRA = re.compile(r"^cu(?:da)?[-_]?(1[1-9])\d?$")
# Distributions of which the version number is the CUDA version, beside NVIDIA's unsuffixed ones.
_CUDA_VERSIONED = frozenset({"cuda-toolkit", "cuda-python", "cuda-bindings"})
# Their version follows CUDA or the driver, but no process loads a CUDA library from them.
_NO_LIBRARY = frozenset({"nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump", "nvidia-ml-py"})


@dataclass(frozen=True)
class CudaRequirement:
    """A requirement that brings in libraries of a CUDA major version.

    ``extra`` is the wheel's own extra that asks for it, "" when it is always asked for.
    """

    requirement: str
    major: int
    extra: str
    why: str


@dataclass(frozen=True)
class Metadata:
    """The parts of METADATA that matter here; ``torch`` holds the requirements on torch."""

    name: str
    version: str
    requires_python: str
    torch: tuple[str, ...]
    cuda: tuple[CudaRequirement, ...]
    unreadable: tuple[str, ...]


def read_metadata(text: str) -> Metadata:
    """Read a METADATA file. Requirements that are no PEP 508 requirements come back as ``unreadable``."""
    fields = Parser().parsestr(text, headersonly=True)
    torch: list[str] = []
    cuda: list[CudaRequirement] = []
    unreadable: list[str] = []
    for line in fields.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(str(line))
        except InvalidRequirement:
            unreadable.append(str(line))
            continue
        if canonicalize_name(requirement.name) == "torch":
            torch.append(str(requirement))
        found = cuda_major_of(requirement)
        if found is not None:
            cuda.append(CudaRequirement(str(requirement), found[0], _extra_of(requirement), found[1]))
    return Metadata(
        name=str(fields.get("Name", "")),
        version=str(fields.get("Version", "")),
        requires_python=str(fields.get("Requires-Python", "")),
        torch=tuple(torch),
        cuda=tuple(sorted(cuda, key=lambda entry: (entry.extra, entry.requirement))),
        unreadable=tuple(unreadable),
    )


def cuda_major_of(requirement: Requirement) -> tuple[int, str] | None:
    """Return the CUDA major version a requirement brings in, and what says so; None when it brings none.

    A suffix (``-cu13``, ``-cuda12x``) or an extra (``[cu13]``) says it, or, for NVIDIA's unsuffixed distributions and
    the CUDA Python ones, the version they are pinned to.
    """
    name = canonicalize_name(requirement.name)
    suffix = _SUFFIX.search(name)
    if suffix:
        return int(suffix[1]), f"the name ends with {suffix[0]}"
    for extra in sorted(requirement.extras):
        match = _EXTRA.match(extra)
        if match:
            return int(match[1]), f"the extra {extra} adds CUDA {match[1]} libraries"
    if name in _NO_LIBRARY or not (name in _CUDA_VERSIONED or name.startswith("nvidia-")):
        return None
    lowest = _lowest(requirement)
    if lowest is None or lowest.major not in (11, 12, 13):
        return None
    if name in _CUDA_VERSIONED or lowest.major >= 13:
        # Before CUDA 13, NVIDIA's unsuffixed names were placeholders or have version numbers of their own.
        return lowest.major, f"the version asked for, {lowest} or newer, is CUDA {lowest.major}"
    return None


def _lowest(requirement: Requirement) -> Version | None:
    """Return the oldest version a requirement admits, as far as one of its bounds says it."""
    bounds: list[Version] = []
    for specifier in requirement.specifier:
        if specifier.operator in ("==", ">=", "~=", ">", "==="):
            try:
                bounds.append(Version(specifier.version.removesuffix(".*")))
            except InvalidVersion:
                continue
    return max(bounds, default=None)


def _extra_of(requirement: Requirement) -> str:
    match = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", str(requirement.marker or ""))
    return match[1] if match else ""
