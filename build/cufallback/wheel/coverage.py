"""Which GPUs device code runs on, and the oldest driver it runs with, each with its reasons.

Every container of a file is one translation unit's code for several targets. On a given GPU the driver takes SASS that
fits; where a container has none, it compiles the container's PTX; where it has neither, the kernels of that unit do
not exist on that GPU (normal: upstream compiles many kernels for some architectures only). So the need to compile PTX,
and with it the driver that can, is a matter of each container and each GPU, not of the file as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cufallback.cuda.facts import Gpu, facts
from cufallback.cuda.questions import covers, major_floor, minimum_driver_for_ptx
from cufallback.cuda.versions import Architecture, Driver, Isa
from cufallback.errors import UsageError
from cufallback.wheel.fatbin import Entry

How = Literal["SASS", "SASS and JIT", "JIT", "none"]


@dataclass(frozen=True)
class GpuCoverage:
    """How the device code of one file, or of a wheel, runs on GPUs of one compute capability.

    ``units`` counts containers: with fitting SASS, with PTX alone, with no code for this GPU.
    ``jit`` lists the PTX that has to be compiled: (target, PTX ISA version).
    """

    capability: Architecture
    examples: tuple[str, ...]
    how: How
    units: tuple[int, int, int]
    sass: tuple[Architecture, ...]
    jit: tuple[tuple[Architecture, Isa], ...]


@dataclass(frozen=True)
class Reason:
    """Something that asks for a driver.

    ``hard``: with an older driver the code fails on the GPUs it was made for. Otherwise the driver is worth knowing,
    but an older one runs the code too. ``driver`` is None where the tables have no figure. ``files`` names the
    extensions it holds for.
    """

    hard: bool
    driver: Driver | None
    what: str
    why: str
    source: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class MinimumDriver:
    """The oldest driver that meets every hard reason; None when nothing asks for one."""

    driver: Driver | None
    reasons: tuple[Reason, ...]


def gpu_coverage(entries: Sequence[Entry]) -> tuple[GpuCoverage, ...]:
    """Return the coverage of every known GPU by the runnable code of one file."""
    units: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.runnable:
            units.setdefault(entry.container, []).append(entry)
    return tuple(_on(gpu, list(units.values())) for gpu in facts().gpus)


def _on(gpu: Gpu, units: Sequence[Sequence[Entry]]) -> GpuCoverage:
    by_sass, by_jit, absent = 0, 0, 0
    sass: set[Architecture] = set()
    jit: set[tuple[Architecture, Isa]] = set()
    for unit in units:
        fitting = {e.architecture for e in unit if e.kind == "sass" and covers(e.architecture, gpu.capability)}
        if fitting:
            by_sass += 1
            sass |= fitting
            continue
        ptx = [e for e in unit if e.kind == "ptx" and covers(e.architecture, gpu.capability, kind="ptx")]
        if not ptx:
            absent += 1
            continue
        by_jit += 1
        newest = max(ptx, key=lambda entry: entry.architecture)
        jit.add((newest.architecture, Isa(*newest.version)))
    how: How = "SASS and JIT" if by_sass and by_jit else "SASS" if by_sass else "JIT" if by_jit else "none"
    return GpuCoverage(
        gpu.capability, gpu.examples, how, (by_sass, by_jit, absent), tuple(sorted(sass)), tuple(sorted(jit))
    )


def merge_coverage(parts: Iterable[Sequence[GpuCoverage]]) -> tuple[GpuCoverage, ...]:
    """Add up the coverage of several files."""
    merged: list[GpuCoverage] = []
    for group in zip(*parts, strict=True):
        units = tuple(sum(part.units[index] for part in group) for index in range(3))
        by_sass, by_jit, absent = units
        how: How = "SASS and JIT" if by_sass and by_jit else "SASS" if by_sass else "JIT" if by_jit else "none"
        merged.append(
            GpuCoverage(
                group[0].capability,
                group[0].examples,
                how,
                (by_sass, by_jit, absent),
                tuple(sorted({target for part in group for target in part.sass})),
                tuple(sorted({ptx for part in group for ptx in part.jit})),
            )
        )
    return tuple(merged)


def targets_of(coverage: Sequence[GpuCoverage]) -> tuple[Architecture, ...]:
    """Return the GPUs that code was made for: those with fitting SASS; for code that is PTX alone, all it reaches."""
    native = tuple(gpu.capability for gpu in coverage if gpu.how in ("SASS", "SASS and JIT"))
    return native or tuple(gpu.capability for gpu in coverage if gpu.how == "JIT")


def cuda_at_least(entries: Sequence[Entry]) -> tuple[tuple[int, int], str] | None:
    """Return the oldest CUDA version that can have made this code, and what in it says so; None without evidence.

    A lower bound: code names its PTX version and targets, not its toolkit.
    """
    evidence: list[tuple[tuple[int, int], str]] = []
    for entry in entries:
        target = entry.architecture
        if entry.kind == "ptx":
            isa = Isa(*entry.version)
            evidence += [(row.cuda, f"PTX {isa}") for row in facts().ptx if row.isa == isa][:1]
        if entry.kind == "sass" and entry.version >= (1, 8) and target.major < 10:
            evidence.append(((13, 0), f"{target.sm} in cubin ABI {entry.version[0]}.{entry.version[1]}"))
        builders = [
            toolkit
            for row in facts().architectures
            for toolkit in row.toolkits
            if target in (*row.plain, *row.specific, *row.family)
        ]
        if builders and min(builders) > facts().architectures[0].toolkits[0]:
            evidence.append((min(builders), target.sm))
    return max(evidence, key=lambda found: found[0]) if evidence else None


def minimum_driver(
    name: str,
    entries: Sequence[Entry],
    *,
    coverage: Sequence[GpuCoverage],
    libraries: Sequence[tuple[str, tuple[int, ...]]],
    targets: Sequence[Architecture] | None = None,
) -> MinimumDriver:
    """Return the oldest driver that one file runs with.

    Args:
        name: the extension, for the reasons.
        entries: its device code.
        coverage: what :func:`gpu_coverage` says of it.
        libraries: CUDA libraries in its NEEDED, each with the CUDA major versions that ship it.
        targets: GPUs it must run on; None: those it has SASS for.
    """
    wanted = tuple(targets) if targets is not None else targets_of(coverage)
    reasons = [*_runtime_reasons(name, entries, libraries), *_jit_reasons(name, coverage, wanted)]
    oldest = cuda_at_least(entries)
    if oldest is not None:
        reasons += _toolkit_reasons(name, oldest[0])
    return MinimumDriver(_newest(reasons), tuple(reasons))


def combine_minimum(parts: Iterable[MinimumDriver]) -> MinimumDriver:
    """Return what a wheel needs as a whole: each reason once, with its files; hard ones first, newest driver first."""
    files: dict[Reason, list[str]] = {}
    for part in parts:
        for reason in part.reasons:
            files.setdefault(replace(reason, files=()), []).extend(reason.files)
    reasons = [replace(reason, files=tuple(sorted(set(names)))) for reason, names in files.items()]
    reasons.sort(key=lambda reason: (not reason.hard, _descending(reason.driver), reason.what, reason.why))
    return MinimumDriver(_newest(reasons), tuple(reasons))


def _descending(driver: Driver | None) -> tuple[int, ...]:
    """A sort key: unknown drivers first, then newest first."""
    return () if driver is None else tuple(-part for part in (driver.branch, *(driver.release or ())))


def _newest(reasons: Iterable[Reason]) -> Driver | None:
    return max((reason.driver for reason in reasons if reason.hard and reason.driver is not None), default=None)


def _runtime_reasons(
    name: str, entries: Sequence[Entry], libraries: Sequence[tuple[str, tuple[int, ...]]]
) -> list[Reason]:
    """The floor that the CUDA runtime itself sets: it refuses older drivers with error 35."""
    certain = [(library, majors[0]) for library, majors in libraries if len(majors) == 1]
    if certain:
        library, major = max(certain, key=lambda found: found[1])
        floor = major_floor(major)
        why = f"the CUDA {major} runtime starts on no driver older than {floor.driver} (error 35)"
        return [Reason(True, floor.driver, library, why, str(floor.source), (name,))]
    oldest = cuda_at_least(entries) if any(entry.runnable for entry in entries) else None
    if oldest is None:
        return []
    (major, minor), evidence = oldest
    floor = major_floor(major)
    why = (
        f"no CUDA runtime library is named, so it is linked in or comes with the caller; the code holds {evidence}, "
        f"which CUDA {major}.{minor} or newer makes, and CUDA {major} runs on no driver older than {floor.driver}"
    )
    return [Reason(True, floor.driver, f"CUDA {major} code", why, str(floor.source), (name,))]


def _jit_reasons(name: str, coverage: Sequence[GpuCoverage], targets: Sequence[Architecture]) -> list[Reason]:
    """The driver that compiles the PTX that has no SASS beside it: error 222 with an older one."""
    needs: dict[tuple[bool, Isa], list[GpuCoverage]] = {}
    for gpu in coverage:
        if gpu.jit:
            newest = max(isa for _, isa in gpu.jit)
            needs.setdefault((gpu.capability in targets, newest), []).append(gpu)
    reasons: list[Reason] = []
    for (hard, isa), gpus in sorted(needs.items(), key=lambda need: (not need[0][0], need[0][1])):
        sources = sorted({target for gpu in gpus for target, version in gpu.jit if version == isa})
        why = (
            f"on GPUs of {', '.join(str(gpu.capability) for gpu in gpus)}, up to {max(gpu.units[1] for gpu in gpus)} "
            f"of {sum(gpus[0].units)} translation units exist only as PTX for {', '.join(map(str, sources))}, "
            f"which the driver compiles"
        )
        try:
            floor = minimum_driver_for_ptx(isa)
        except UsageError:
            unknown = f"{why}; the tables know no driver that reads PTX {isa}"
            reasons.append(Reason(hard, None, f"PTX {isa}", unknown, "", (name,)))
            continue
        if floor is not None:
            text = f"{why}; one older than {floor.driver} refuses PTX {isa} (error 222)"
            reasons.append(Reason(hard, floor.driver, f"PTX {isa}", text, str(floor.source), (name,)))
    return reasons


def _toolkit_reasons(name: str, cuda: tuple[int, int]) -> list[Reason]:
    """The driver that came with the toolkit: worth knowing when it is newer than what the code needs."""
    major, minor = cuda
    shipped = next((row for row in facts().toolkits if row.release[:2] == cuda), None)
    if shipped is None or shipped.driver <= major_floor(major).driver:
        return []
    why = (
        f"CUDA {major}.{minor} or newer made the code, and {shipped.driver} is the driver of {shipped.name}; older "
        f"drivers of CUDA {major}.x run its SASS, without the features that are new in {major}.{minor}"
    )
    return [Reason(False, shipped.driver, f"CUDA {major}.{minor}", why, str(shipped.source), (name,))]
