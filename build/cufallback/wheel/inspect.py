"""Read a wheel: its extensions, the device code in them, what they need, the GPUs and drivers they run with.

Everything comes from the bytes of the artefact, nothing from how it is said to have been built. A damaged part of a
readable wheel is a finding; only a file that is no wheel at all is an error.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from zipfile import ZipInfo

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from cufallback.cuda.questions import cuda_majors_of
from cufallback.cuda.versions import Architecture
from cufallback.errors import PayloadError
from cufallback.store import sha256_file
from cufallback.wheel.coverage import (
    GpuCoverage,
    MinimumDriver,
    combine_minimum,
    gpu_coverage,
    merge_coverage,
    minimum_driver,
)
from cufallback.wheel.elf import Elf, is_elf, read_elf
from cufallback.wheel.fatbin import Entry, read_fatbins
from cufallback.wheel.metadata import Metadata, read_metadata
from cufallback.wheel.payload import Payload

if TYPE_CHECKING:
    from cufallback.wheel.audit import Expectation, Finding

NativeKind = Literal["extension", "library", "program", "fatbin"]
TorchAbi = Literal["none", "linked only", "stable", "unstable"]

_IMPORTABLE = re.compile(r"\.(?:abi3|cpython-[\w-]+)\.so$")
_TORCH_LIBRARY = re.compile(r"^lib(?:torch|c10)(?:_\w+)?\.so")
# Mangled names that begin in namespace c10, at or torch, and torch's C shim, which is the stable ABI.
_TORCH_CXX = re.compile(r"^_Z\w*?(?:3c10|2at|5torch)[0-9CDEIKLNS]")
_TORCH_STABLE = re.compile(r"^(?:aoti_)?torch_")


@dataclass(frozen=True)
class CodeGroup:
    """Equal device code entries of one file, counted. ``version``: PTX ISA version, or cubin ABI version of SASS."""

    runnable: bool
    kind: str
    architecture: Architecture
    version: tuple[int, int]
    codec: str
    count: int
    stored_bytes: int


@dataclass(frozen=True)
class Extension:
    """One native file of a wheel.

    ``name`` is dotted as for import; two files may share it (one per Python version). ``fault`` says why the file
    could not be read, or "". ``glibc``, ``glibcxx`` and ``cxxabi`` are the newest symbol versions it asks for: the
    honest floor, because that is what the dynamic loader tests.
    """

    path: str
    name: str
    kind: NativeKind
    size: int
    fault: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    glibc: str
    glibcxx: str
    cxxabi: str
    cuda_libraries: tuple[tuple[str, tuple[int, ...]], ...]
    torch: TorchAbi
    code: tuple[CodeGroup, ...]
    entries: tuple[Entry, ...]
    coverage: tuple[GpuCoverage, ...]
    minimum_driver: MinimumDriver

    @property
    def sass(self) -> tuple[Architecture, ...]:
        """Architectures of its runnable SASS."""
        return tuple(sorted({group.architecture for group in self.code if group.runnable and group.kind == "sass"}))

    @property
    def ptx(self) -> tuple[tuple[Architecture, tuple[int, int]], ...]:
        """Targets and ISA versions of its runnable PTX."""
        found = {(group.architecture, group.version) for group in self.code if group.runnable and group.kind == "ptx"}
        return tuple(sorted(found))

    @property
    def has_device_code(self) -> bool:
        """Whether it holds code that a GPU can run."""
        return any(group.runnable for group in self.code)


@dataclass(frozen=True)
class Inspection:
    """Everything that was read from one wheel, and what is to be said of it."""

    file: str
    sha256: str
    size: int
    name: str
    version: str
    tags: tuple[str, ...]
    metadata: Metadata
    extensions: tuple[Extension, ...]
    duplicates: tuple[str, ...]
    coverage: tuple[GpuCoverage, ...]
    minimum_driver: MinimumDriver
    expected_extensions: tuple[str, ...]
    missing_extensions: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.status == "failed" for finding in self.findings)

    @property
    def cuda_majors(self) -> tuple[int, ...]:
        """CUDA major versions that its files need for certain, by the libraries they name."""
        return tuple(sorted({m[0] for part in self.extensions for _, m in part.cuda_libraries if len(m) == 1}))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, the same for the same wheel and expectation wherever it lies."""
        from cufallback.wheel.report import inspection_json

        return inspection_json(self)


def inspect_wheel(path: Path, *, expectation: Expectation | None = None, jobs: int | None = None) -> Inspection:
    """Read a wheel and compare it with what is expected.

    Args:
        path: the wheel.
        expectation: what it must be; None: only what holds for any wheel is judged.
        jobs: native files read at once; None: one per processor, four at most.

    Raises:
        PayloadError: not a wheel, or not readable as one.
        WorkspaceError: no room for the temporary file of a large extension.
    """
    from cufallback.wheel.audit import audit

    try:
        name, version, _build, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise PayloadError(
            f"is not named like a wheel ({error})", remedy="give the path of a .whl file", where=str(path)
        ) from error
    targets = expectation.gpus if expectation is not None and expectation.architectures else None
    with Payload(path) as payload:
        metadata = read_metadata(payload.text(_metadata_name(payload)))
        natives = payload.native()
        payload.check_sizes(natives)
        # Largest first, so that the last one to finish is a small one. The whole file's digest is taken beside them.
        order = sorted(natives, key=lambda info: -info.file_size)
        with ThreadPoolExecutor(max_workers=(jobs or min(4, os.cpu_count() or 1)) + 1) as pool:
            digest = pool.submit(sha256_file, path)
            extensions = list(pool.map(lambda info: _read_member(payload, info, targets), order))
        duplicates = payload.duplicates
    extensions.sort(key=lambda part: part.path)
    names = {part.name for part in extensions}
    expected = expectation.extensions if expectation is not None else ()
    inspection = Inspection(
        file=path.name,
        sha256=digest.result(),
        size=path.stat().st_size,
        name=name,
        version=str(version),
        tags=tuple(sorted(map(str, tags))),
        metadata=metadata,
        extensions=tuple(extensions),
        duplicates=duplicates,
        coverage=merge_coverage([part.coverage for part in extensions if part.has_device_code]),
        minimum_driver=combine_minimum(part.minimum_driver for part in extensions),
        expected_extensions=expected,
        missing_extensions=tuple(sorted(set(expected) - names)),
        findings=(),
    )
    return audit(inspection, expectation)


def _metadata_name(payload: Payload) -> str:
    """Return the member that holds METADATA: of the .dist-info folder that the wheel's own name leads to."""
    wanted = payload.path.name.split("-")
    for info in payload.members:
        folder, _, rest = info.filename.partition("/")
        stem = folder.removesuffix(".dist-info")
        if (
            rest == "METADATA"
            and stem != folder
            and canonicalize_name(stem.split("-")[0]) == canonicalize_name(wanted[0])
        ):
            return info.filename
    raise PayloadError(
        "has no METADATA of its own name",
        remedy="this is no wheel: build or download it again",
        where=str(payload.path),
    )


def _read_member(payload: Payload, info: ZipInfo, targets: Sequence[Architecture] | None) -> Extension:
    try:
        with payload.view(info) as data:
            elf = read_elf(data) if is_elf(data) else None
            entries = read_fatbins(data)
    except ValueError as error:
        return _extension(info, None, (), targets, fault=str(error))
    return _extension(info, elf, entries, targets, fault="")


def _extension(
    info: ZipInfo, elf: Elf | None, entries: tuple[Entry, ...], targets: Sequence[Architecture] | None, *, fault: str
) -> Extension:
    name = dotted_name(info.filename)
    needed = elf.needed if elf is not None else ()
    libraries = tuple((library, majors) for library in needed if (majors := cuda_majors_of(library)))
    coverage = gpu_coverage(entries)
    symbols = [version for _, version in elf.versions] if elf is not None else []
    return Extension(
        path=info.filename,
        name=name,
        kind=_kind(info.filename),
        size=info.file_size,
        fault=fault,
        needed=needed,
        rpath=(*elf.rpath, *elf.runpath) if elf is not None else (),
        glibc=newest_version(symbols, "GLIBC_"),
        glibcxx=newest_version(symbols, "GLIBCXX_"),
        cxxabi=newest_version(symbols, "CXXABI_"),
        cuda_libraries=libraries,
        torch=_torch_abi(elf),
        code=_groups(entries),
        entries=entries,
        coverage=coverage,
        minimum_driver=minimum_driver(name, entries, coverage=coverage, libraries=libraries, targets=targets),
    )


def dotted_name(path: str) -> str:
    """Return the import name of a native file: ``vllm/_C.abi3.so`` → ``vllm._C``."""
    parts = list(PurePosixPath(path).parts) or [path]
    if len(parts) > 2 and parts[0].endswith(".data"):
        parts = parts[2:]
    parts[-1] = parts[-1].split(".")[0] or parts[-1]
    return ".".join(parts)


def newest_version(symbols: Sequence[str], prefix: str) -> str:
    """Return the newest numeric symbol version with a prefix: GLIBC_2.3.4 and GLIBC_2.17 → 2.17; "" for none."""
    found = [
        tuple(int(part) for part in symbol.removeprefix(prefix).split("."))
        for symbol in symbols
        if re.fullmatch(rf"{prefix}\d+(\.\d+)*", symbol)
    ]
    return ".".join(map(str, max(found))) if found else ""


def _kind(path: str) -> NativeKind:
    name = PurePosixPath(path).name
    if name.endswith(".fatbin"):
        return "fatbin"
    if ".so" not in name:
        return "program"
    return "library" if name.startswith("lib") and not _IMPORTABLE.search(name) else "extension"


def _groups(entries: Sequence[Entry]) -> tuple[CodeGroup, ...]:
    keys = [(e.runnable, e.kind, e.architecture, e.version, e.codec) for e in entries]
    sizes: Counter[tuple[bool, str, Architecture, tuple[int, int], str]] = Counter()
    for key, entry in zip(keys, entries, strict=True):
        sizes[key] += entry.stored_size
    counts = Counter(keys)
    return tuple(CodeGroup(*key, counts[key], sizes[key]) for key in sorted(counts, key=lambda k: (not k[0], *k[1:])))


def _torch_abi(elf: Elf | None) -> TorchAbi:
    """Say how a file uses torch: by its C++ symbols (bound to one release), by the C shim alone, or not at all."""
    if elf is None:
        return "none"
    if any(_TORCH_CXX.match(symbol) for symbol in elf.undefined):
        return "unstable"
    if any(_TORCH_STABLE.match(symbol) for symbol in elf.undefined):
        return "stable"
    return "linked only" if any(_TORCH_LIBRARY.match(library) for library in elf.needed) else "none"
