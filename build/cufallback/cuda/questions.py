"""Pure questions over the fact tables: can this driver run that, what does a toolkit build, where does code run."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Literal

from cufallback.cuda.facts import Gpu, Source, Toolkit, facts
from cufallback.cuda.versions import Architecture, Driver, Isa
from cufallback.errors import UsageError

Support = Literal["native", "minor version compatible", "forward compatibility only", "no"]
CodeKind = Literal["sass", "ptx"]

_TOOLKIT = re.compile(r"(\d{1,2})\.(\d{1,2})(?:\.(\d{1,2})(?:\.\d+)?)?")


@dataclass(frozen=True)
class Answer:
    """How a driver runs a toolkit: the way, why, what limits it, and where that is written."""

    support: Support
    reason: str
    source: Source

    @property
    def runs(self) -> bool:
        """Whether it runs with the installed driver alone."""
        return self.support in ("native", "minor version compatible")


@dataclass(frozen=True)
class Built:
    """The architectures that a toolkit builds."""

    plain: tuple[Architecture, ...]
    specific: tuple[Architecture, ...]
    family: tuple[Architecture, ...]
    source: Source

    def __contains__(self, architecture: Architecture) -> bool:
        return architecture in (*self.plain, *self.specific, *self.family)


def toolkit_release(text: str) -> Toolkit:
    """Return the row of a toolkit release: ``12.9.1``, or ``12.9`` for its first release.

    An update that has no row of its own (12.9.2, 13.0.3) gets the newest earlier update of the same minor version:
    its figure is a lower bound and the row's name says which release it is of.

    Raises:
        UsageError: not a toolkit version, or one outside the tables.
    """
    match = _TOOLKIT.fullmatch(text.strip())
    rows = facts().toolkits
    if match is not None:
        wanted = (int(match[1]), int(match[2]), int(match[3] or 0))
        same = [row for row in rows if row.release[:2] == wanted[:2] and row.release <= wanted]
        if same:
            return same[-1]
    raise UsageError(
        f"{text!r} is not a CUDA toolkit in the tables",
        remedy=f"the tables hold {rows[0].name} to {rows[-1].name} (there was no 12.7)",
    )


def can_run(driver: Driver | str, toolkit: str, *, data_centre_gpu: bool | None = None) -> Answer:
    """Say how a driver runs code of a toolkit.

    Args:
        driver: the installed driver, or a branch (which stands for its newest release).
        toolkit: the toolkit the code was built with, such as 12.9.1.
        data_centre_gpu: whether the GPUs are data-centre ones (A100, H100, B200, not GeForce); None: not known.

    Raises:
        UsageError: not a driver or toolkit version.
    """
    installed = Driver.parse(driver) if isinstance(driver, str) else driver
    row = toolkit_release(toolkit)
    major, minor, _ = row.release
    if installed >= row.driver:
        return Answer("native", f"driver {installed} is not older than {row.driver}, CUDA {row.name}'s own", row.source)
    floor = major_floor(major)
    package = f"cuda-compat-{major}-{minor}"
    lift = next((lift for lift in facts().forward if lift.major == major and installed.branch in lift.branches), None)
    if installed >= floor.driver:
        isa, ceiling = isa_of(f"{major}.{minor}"), jit_ceiling(installed)
        limit = f"it compiles PTX {isa} too"
        if ceiling is None or ceiling < isa:
            limit = f"code that exists as PTX {isa} alone fails (error 222): this driver compiles up to {ceiling}"
            if lift is not None and data_centre_gpu is not False:
                limit += f"; {package} lifts that on data-centre GPUs"
        return Answer(
            "minor version compatible",
            f"driver {installed} is older than {row.driver}, CUDA {row.name}'s own, but not older than {floor.driver}, "
            f"the floor of CUDA {major}.x; {limit}",
            floor.source,
        )
    too_old = f"driver {installed} is older than {floor.driver}, the floor of CUDA {major}.x (error 35)"
    if lift is None:
        known = f"branch {installed.branch} is not one that {package} is known to lift"
        return Answer("no", f"{too_old}, and {known}", floor.source)
    if data_centre_gpu is False:
        only = f"{package} works on data-centre GPUs only (error 804 elsewhere)"
        return Answer("no", f"{too_old}, and {only}", lift.source)
    where = "" if data_centre_gpu else " if the GPUs are data-centre ones (error 804 elsewhere)"
    return Answer("forward compatibility only", f"{too_old}; {package} can lift its branch{where}", lift.source)


@dataclass(frozen=True)
class Floor:
    """A driver that something needs, and where that is written."""

    driver: Driver
    source: Source


def major_floor(major: int) -> Floor:
    """Return the oldest driver on which the runtime of a CUDA major version starts.

    Raises:
        UsageError: a major version outside the tables.
    """
    for row in facts().majors:
        if row.major == major:
            return Floor(row.driver, row.source)
    known = ", ".join(str(row.major) for row in facts().majors)
    raise UsageError(f"CUDA {major} is not in the tables", remedy=f"known major versions: {known}")


def architectures_of(toolkit: str) -> Built:
    """Return the architectures that a toolkit assembles.

    Raises:
        UsageError: not a toolkit version in the tables.
    """
    wanted = toolkit_release(toolkit).release[:2]
    for row in facts().architectures:
        if wanted in row.toolkits:
            return Built(row.plain, row.specific, row.family, row.source)
    raise UsageError(f"no architectures are recorded for CUDA {toolkit}", remedy="add a row to facts.toml")


def isa_of(cuda: str) -> Isa:
    """Return the PTX ISA version of a CUDA version (``12.9`` or ``12.9.1`` → 8.8).

    Raises:
        UsageError: a CUDA version outside the tables.
    """
    match = _TOOLKIT.fullmatch(cuda.strip())
    if match is not None:
        for row in facts().ptx:
            if row.cuda == (int(match[1]), int(match[2])):
                return row.isa
    raise UsageError(
        f"the PTX version of CUDA {cuda!r} is not in the tables", remedy="give a version from 12.0 to 13.2"
    )


def cuda_of_driver(driver: Driver) -> tuple[int, int] | None:
    """Return the CUDA version a driver serves, at least; None for one older than the tables.

    A driver newer than the tables serves at least the newest version in them.
    """
    found = None
    for row in facts().branches:
        if row.branch <= driver.branch:
            found = row.cuda
    for toolkit in facts().toolkits:
        if driver.branch == toolkit.driver.branch and driver < toolkit.driver and toolkit.release[2] == 0:
            # An early release of a branch, older than the driver of the branch's own toolkit.
            earlier = [row.cuda for row in facts().branches if row.branch < driver.branch]
            found = earlier[-1] if earlier else None
    return found


def jit_ceiling(driver: Driver | str) -> Isa | None:
    """Return the newest PTX ISA version the driver compiles (at least); None for a driver older than the tables.

    Raises:
        UsageError: not a driver version.
    """
    installed = Driver.parse(driver) if isinstance(driver, str) else driver
    cuda = cuda_of_driver(installed)
    return isa_of(f"{cuda[0]}.{cuda[1]}") if cuda is not None else None


def minimum_driver_for_ptx(isa: Isa | str) -> Floor | None:
    """Return the oldest driver that compiles PTX of a version; None for versions older than the tables (before 8.0).

    Raises:
        UsageError: not a PTX ISA version, or newer than the tables.
    """
    wanted = Isa.parse(isa) if isinstance(isa, str) else isa
    rows = facts().ptx
    if wanted < rows[0].isa:
        return None
    for row in rows:
        if row.isa < wanted:
            continue
        toolkits = [toolkit for toolkit in facts().toolkits if toolkit.release[:2] == row.cuda]
        if toolkits:
            return Floor(toolkits[0].driver, toolkits[0].source)
        branch = next(branch for branch in facts().branches if branch.cuda == row.cuda)
        return Floor(Driver.first_of(branch.branch), branch.source)
    raise UsageError(
        f"PTX {wanted} is newer than the tables", remedy=f"the newest version in the tables is {rows[-1].isa}"
    )


def covers(target: Architecture, gpu: Architecture, *, kind: CodeKind = "sass") -> bool:
    """Say whether code for ``target`` runs on a GPU of compute capability ``gpu``.

    SASS: same major version and the GPU's minor version not lower; PTX: any GPU not older than the target. With ``a``
    the GPU must be exactly that one; with ``f`` it must be of that family. On integrated GPUs (Jetson) SASS must be
    of exactly that capability.

    Source: CUDA C++ Programming Guide, Binary Compatibility, PTX Compatibility, Family-Specific Features.
    """
    if target.suffix == "a":
        return target.capability == gpu
    if target.suffix == "f":
        return gpu in facts().families.get(target, (target.capability,))
    if kind == "ptx":
        return gpu >= target
    if target == gpu:
        return True
    integrated = {row.capability for row in facts().gpus if row.integrated}
    if target in integrated or gpu in integrated:
        return False
    return target.major == gpu.major and gpu.minor >= target.minor


def gpus_covered(target: Architecture, *, kind: CodeKind = "sass") -> tuple[Gpu, ...]:
    """Return the known GPUs that code for ``target`` runs on."""
    return tuple(gpu for gpu in facts().gpus if covers(target, gpu.capability, kind=kind))


def cuda_majors_of(library: str) -> tuple[int, ...]:
    """Return the CUDA major versions that ship a library of this name; empty for names that are not a toolkit's."""
    return tuple(
        sorted(
            {major for row in facts().libraries if fnmatch.fnmatchcase(library, row.pattern) for major in row.majors}
        )
    )
