"""Compare an inspected wheel with what it must be, finding by finding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.utils import canonicalize_name, canonicalize_version

from cufallback.cuda.questions import architectures_of, covers, isa_of, toolkit_release
from cufallback.cuda.versions import Architecture, Driver, Isa
from cufallback.wheel.coverage import cuda_at_least
from cufallback.wheel.inspect import Extension, Inspection, inspect_wheel

if TYPE_CHECKING:
    from cufallback.recipe import Recipe

PROBE_NAME = "cufallback-cuda-probe"
# The PTX of the cuda-probe takes the JIT path that vLLM's Marlin kernels take on newer GPUs: compute_80.
PROBE_PTX = "8.0"
PROBE_EXTENSIONS = ("cuda_probe.libcuda_probe",)

FindingStatus = Literal["passed", "failed", "warned", "not_run"]


@dataclass(frozen=True)
class Finding:
    """One statement about a wheel: what was looked at, and why it has this status."""

    status: FindingStatus
    what: str
    why: str


@dataclass(frozen=True)
class Expectation:
    """What a wheel must be.

    Args:
        toolkit: CUDA toolkit release, such as 12.9.1.
        architectures: SASS that must be there; empty: the wheel is to carry no device code, and none is asked for.
        ptx: (target, PTX ISA version) that must be there.
        maximum_driver_branch: the newest driver branch of the hosts, such as 575.
        extensions: dotted names that must be there.
        size_limit: bytes; None: any size.
    """

    toolkit: str
    architectures: tuple[Architecture, ...] = ()
    ptx: tuple[tuple[Architecture, Isa], ...] = ()
    maximum_driver_branch: int | None = None
    extensions: tuple[str, ...] = ()
    size_limit: int | None = None

    @property
    def gpus(self) -> tuple[Architecture, ...]:
        """The compute capabilities that the architectures are for."""
        return tuple(sorted({target.capability for target in self.architectures}))


def expectation_of(recipe: Recipe) -> Expectation:
    """Return what the main wheel of a recipe must be."""
    cuda = recipe.wheel.device_code
    return Expectation(
        toolkit=recipe.cuda.toolkit,
        architectures=tuple(map(Architecture.parse, recipe.cuda.architectures)) if cuda else (),
        maximum_driver_branch=recipe.cuda.maximum_driver_branch,
        extensions=recipe.wheel.expected_extensions,
        size_limit=recipe.wheel.size_limit_mib << 20,
    )


def probe_expectation_of(
    recipe: Recipe, *, ptx: tuple[tuple[Architecture, Isa], ...] = (), extensions: tuple[str, ...] = ()
) -> Expectation:
    """Return what the cuda-probe wheel of a recipe must be: the recipe's architectures, whatever the main wheel is for.

    Args:
        recipe: the recipe.
        ptx: PTX that it must carry beside the SASS.
        extensions: dotted names of its libraries.
    """
    return Expectation(
        toolkit=recipe.cuda.toolkit,
        architectures=tuple(map(Architecture.parse, recipe.cuda.architectures)),
        ptx=ptx,
        maximum_driver_branch=recipe.cuda.maximum_driver_branch,
        extensions=extensions,
    )


def expectation_for(wheel: Path | str, recipe: Recipe) -> Expectation:
    """Return what a wheel of a recipe's build must be: the cuda-probe by its name, anything else the main wheel.

    Args:
        wheel: file name or path of the wheel, or a distribution's name.
        recipe: the recipe.
    """
    # A wheel's file name has "_" for every "-" of the distribution's name.
    name = Path(wheel).name
    if PROBE_NAME not in (canonicalize_name(name), canonicalize_name(name.partition("-")[0])):
        return expectation_of(recipe)
    isa = isa_of(recipe.cuda.toolkit.rpartition(".")[0])
    return probe_expectation_of(recipe, ptx=((Architecture.parse(PROBE_PTX), isa),), extensions=PROBE_EXTENSIONS)


def inspect_for(wheels: Sequence[Path], recipe: Recipe) -> list[dict[str, Any]]:
    """Inspect the wheels of a recipe's build, each against what it must be; return the content of inspection.json.

    Raises:
        PayloadError: a wheel cannot be read.
    """
    return [inspect_wheel(wheel, expectation=expectation_for(wheel, recipe)).to_json() for wheel in wheels]


def audit(inspection: Inspection, expectation: Expectation | None) -> Inspection:
    """Return the inspection with its findings: those of any wheel, then those of the expectation."""
    findings = [*_general(inspection)]
    if expectation is None:
        findings.append(
            Finding("not_run", "expectation", "no recipe was named, so nothing says what this wheel should be")
        )
    else:
        findings += [
            *_libraries(inspection, expectation),
            *_code(inspection, expectation),
            *_requirements(inspection, expectation),
            *_architectures(inspection, expectation),
            *_ptx(inspection, expectation),
            *_ceiling(inspection, expectation),
            *_inventory(inspection, expectation),
        ]
    return replace(inspection, findings=tuple(findings))


def _names(parts: Sequence[Extension]) -> str:
    return ", ".join(dict.fromkeys(part.name for part in parts))


def _general(inspection: Inspection) -> Iterator[Finding]:
    faulty = [part for part in inspection.extensions if part.fault]
    for part in faulty:
        yield Finding("failed", "readable", f"{part.path}: {part.fault}")
    if not faulty:
        yield Finding("passed", "readable", f"all {len(inspection.extensions)} native files were read whole")
    for name in inspection.duplicates:
        yield Finding(
            "failed", "archive", f"two members are named {name}: which one is installed is the installer's choice"
        )
    metadata = inspection.metadata
    said = (canonicalize_name(metadata.name), canonicalize_version(metadata.version, strip_trailing_zero=False))
    if said != (inspection.name, inspection.version):
        why = f"METADATA says {metadata.name} {metadata.version}, the file name {inspection.name} {inspection.version}"
        yield Finding("failed", "metadata", why)
    for line in metadata.unreadable:
        yield Finding("warned", "metadata", f"not a requirement by PEP 508: {line}")
    absolute = {part.name: [p for p in part.rpath if not p.startswith("$ORIGIN")] for part in inspection.extensions}
    for name, paths in absolute.items():
        if paths:
            why = f"{name} looks for libraries in {', '.join(paths)} of the machine it runs on"
            yield Finding("warned", "rpath", why)
    yield from _glibc(inspection)
    if len(inspection.cuda_majors) > 1:
        majors = " and ".join(map(str, inspection.cuda_majors))
        why = f"files for CUDA {majors} lie side by side; the minimum driver is that of the file that gets loaded"
        yield Finding("warned", "cuda runtime", why)


def _glibc(inspection: Inspection) -> Iterator[Finding]:
    floors = [int(match[1]) for tag in inspection.tags if (match := re.search(r"manylinux_2_(\d+)_", tag))]
    legacy = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
    floors += [floor for name, floor in legacy.items() if any(f"{name}_" in tag for tag in inspection.tags)]
    if not floors:
        return
    promised = (2, min(floors))
    beyond = [
        part
        for part in inspection.extensions
        if part.glibc and tuple(map(int, part.glibc.split("."))) > (*promised, 999)
    ]
    for part in beyond:
        why = f"{part.name} needs glibc {part.glibc}; the wheel's tag promises {promised[0]}.{promised[1]}"
        yield Finding("failed", "glibc", why)
    if not beyond:
        yield Finding("passed", "glibc", f"no file needs a glibc newer than the tag's {promised[0]}.{promised[1]}")


def _libraries(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    major = toolkit_release(expectation.toolkit).release[0]
    wrong: dict[str, list[Extension]] = {}
    right: set[str] = set()
    for part in inspection.extensions:
        for library, majors in part.cuda_libraries:
            if major in majors:
                right.add(library)
            else:
                wrong.setdefault(library, []).append(part)
    for library, parts in sorted(wrong.items()):
        why = f"{library} is not of CUDA {major}, and is needed by {_names(parts)}"
        yield Finding("failed", "cuda runtime", why)
    if not wrong:
        named = f"what is needed of CUDA is of CUDA {major}: {', '.join(sorted(right))}"
        yield Finding("passed", "cuda runtime", named if right else "no file needs a CUDA library by name")


def _code(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    wanted = toolkit_release(expectation.toolkit).release[:2]
    newer = 0
    for part in inspection.extensions:
        oldest = cuda_at_least(part.entries)
        if oldest is not None and oldest[0] > wanted:
            newer += 1
            (major, minor), evidence = oldest
            why = f"{part.name} holds {evidence}, which CUDA {major}.{minor} or newer makes, not {expectation.toolkit}"
            yield Finding("failed", "device code", why)
    if not newer and any(part.entries for part in inspection.extensions):
        yield Finding("passed", "device code", f"nothing in it is newer than CUDA {expectation.toolkit}")


def _requirements(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    major = toolkit_release(expectation.toolkit).release[0]
    wrong = [entry for entry in inspection.metadata.cuda if entry.major != major]
    for entry in wrong:
        if entry.extra:
            why = f"the extra {entry.extra} asks for {entry.requirement}: {entry.why}"
            yield Finding("warned", "requirements", why)
        else:
            yield Finding("failed", "requirements", f"{entry.requirement} is of CUDA {entry.major}: {entry.why}")
    if not any(not entry.extra for entry in wrong):
        yield Finding("passed", "requirements", f"no requirement brings in another CUDA than {major}")


def _architectures(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    if not expectation.architectures:
        yield Finding("not_run", "architectures", "the recipe says that this wheel carries no device code")
        return
    present = {target for part in inspection.extensions for target in part.sass}
    built = architectures_of(expectation.toolkit)
    for target in expectation.architectures:
        if target not in built:
            yield Finding("failed", "architectures", f"CUDA {expectation.toolkit} builds no {target}")
            continue
        instead = sorted(other for other in present if covers(other, target.capability))
        if target in present:
            holders = [part for part in inspection.extensions if target in part.sass]
            yield Finding("passed", "architectures", f"{target} is in {_names(holders)}")
        elif instead:
            why = f"there is no {target}; GPUs of {target.capability} run {', '.join(map(str, instead))} instead"
            yield Finding("warned", "architectures", why)
        else:
            yield Finding("failed", "architectures", f"no extension has code for {target} (error 209 on such a GPU)")
        if instead or target in present:
            without = [
                part
                for part in inspection.extensions
                if part.has_device_code
                and any(gpu.capability == target.capability and gpu.how == "none" for gpu in part.coverage)
            ]
            if without:
                why = f"{_names(without)} has no code at all for GPUs of {target.capability}"
                yield Finding("warned", "architectures", why)


def _ptx(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    present = {(target, Isa(*version)) for part in inspection.extensions for target, version in part.ptx}
    for target, isa in expectation.ptx:
        found = "is" if (target, isa) in present else "is not"
        have = ", ".join(f"{other} (ISA {version})" for other, version in sorted(present)) or "none"
        status: FindingStatus = "passed" if (target, isa) in present else "failed"
        yield Finding(status, "ptx", f"PTX {isa} for {target} {found} there; there is: {have}")


def _ceiling(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    if expectation.maximum_driver_branch is None:
        return
    ceiling = Driver.parse(str(expectation.maximum_driver_branch))
    hard = [reason for reason in inspection.minimum_driver.reasons if reason.hard]
    broken = [reason for reason in hard if reason.driver is None or reason.driver > ceiling]
    for reason in broken:
        needs = f"driver {reason.driver}" if reason.driver is not None else "a driver that is not known"
        why = f"{', '.join(reason.files)} need {needs} for {reason.what}, above branch {ceiling}: {reason.why}"
        yield Finding("failed", "driver ceiling", why)
    if not broken:
        lowest = inspection.minimum_driver.driver
        why = f"runs from driver {lowest} on" if lowest is not None else "asks for no driver"
        yield Finding("passed", "driver ceiling", f"{why}; hosts have up to branch {ceiling}")
    for reason in inspection.minimum_driver.reasons:
        if not reason.hard and reason.what.startswith("PTX") and reason.driver is not None and reason.driver > ceiling:
            yield Finding("warned", "driver ceiling", f"beyond what was asked for: {reason.why}")


def _inventory(inspection: Inspection, expectation: Expectation) -> Iterator[Finding]:
    for name in inspection.missing_extensions:
        yield Finding("failed", "extensions", f"{name} is missing")
    if expectation.extensions and not inspection.missing_extensions:
        yield Finding("passed", "extensions", f"all {len(expectation.extensions)} expected extensions are there")
    if expectation.size_limit is not None:
        mib = 1 << 20
        status: FindingStatus = "passed" if inspection.size <= expectation.size_limit else "failed"
        why = f"{inspection.size / mib:.1f} MiB; the limit is {expectation.size_limit / mib:.0f} MiB"
        yield Finding(status, "size", why)
