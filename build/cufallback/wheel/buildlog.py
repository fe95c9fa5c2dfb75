"""Which kernels a vLLM build says it builds or leaves out, and whether that is what the recipe expects.

vLLM's CMake decides per kernel family and toolkit; extensions are optional, so a build stays green without
them. Its STATUS lines are the only statement, and some families that are left out do not even get one.
The wordings are those of CMakeLists.txt and cmake/external_projects/*.cmake of vLLM 0.27.1 to 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_STATUS = re.compile(r"^-- (?:\[(?P<tag>\w+)\] )?(?P<text>.+)$")
_NAMES = {"QUTLASS": "QuTLASS"}  # the tag of its lines, and how it calls itself
_WORDINGS = (
    # Stubs first: the symbol exists and raises when it is called, so the kernel is not built.
    re.compile(r"^Building (?P<name>\S+) (?P<reason>unsupported stubs because .+)$"),
    re.compile(r"^Building (?P<name>.+?)(?: kernels)? for (?:HIP )?archs: (?P<archs>.+)$"),
    re.compile(r"^(?P<name>\S+) CUDA architectures: (?P<archs>.+)$"),
    re.compile(r"^Building (?P<name>hadacore)$"),
    re.compile(r"^Not building (?P<name>.+?)(?: kernels)? as (?P<reason>.+)$"),
    re.compile(r"^(?P<name>\S+) will not compile: (?P<reason>.+)$"),
    re.compile(r"^Skipping build: (?P<reason>.+)$"),
    re.compile(r"^(?P<reason>Only gfx1250), skipping (?P<name>skinny_gemms)$"),
)
# "Building scaled_mm_c3x_sm120", but "Not building scaled_mm_c3x_120": one family, upstream's slip.
_SLIP = re.compile(r"^(scaled_mm_c3x_)(\d+)$")


@dataclass(frozen=True)
class KernelReport:
    """What a build log says: families with their architectures, and families left out with upstream's reason.

    A family may stand in both: upstream reports some of them once per GPU generation.
    """

    built: tuple[tuple[str, tuple[str, ...]], ...]
    not_built: tuple[tuple[str, str], ...]


class ExpectedKernel(Protocol):
    """A ``[[cuda.kernel]]`` row of a recipe."""

    @property
    def name(self) -> str: ...

    @property
    def expect(self) -> Literal["built", "not built"]: ...

    @property
    def architectures(self) -> tuple[str, ...]: ...

    @property
    def why(self) -> str: ...


@dataclass(frozen=True)
class KernelFinding:
    """One judgement: the kernel family, its status and one sentence."""

    what: str
    status: Literal["passed", "failed", "warned"]
    why: str


def parse_build_log(lines: Iterable[str]) -> KernelReport:
    """Read the kernel families from the lines of a build log; both lists are sorted by name."""
    built: dict[str, list[str]] = {}
    not_built: dict[str, list[str]] = {}
    for line in lines:
        status = _STATUS.match(line.strip())
        if status is None:
            continue
        fields = _match(status["text"])
        if fields is None:
            continue
        name = fields.get("name") or _NAMES.get(status["tag"] or "", status["tag"] or "")
        if not name:
            continue
        name = _SLIP.sub(r"\1sm\2", name)
        if "reason" in fields:
            reasons = not_built.setdefault(name, [])
            if fields["reason"] not in reasons:
                reasons.append(fields["reason"])
        else:
            architectures = built.setdefault(name, [])
            architectures += [a for a in fields.get("archs", "").split(";") if a and a not in architectures]
    return KernelReport(
        tuple((name, tuple(architectures)) for name, architectures in sorted(built.items())),
        tuple((name, "; ".join(reasons)) for name, reasons in sorted(not_built.items())),
    )


def _match(text: str) -> dict[str, str] | None:
    for wording in _WORDINGS:
        found = wording.match(text)
        if found:
            return {key: value.strip() for key, value in found.groupdict().items() if value}
    return None


def judge_kernels(report: KernelReport, kernels: Sequence[ExpectedKernel]) -> tuple[KernelFinding, ...]:
    """Compare a report with the recipe's rows.

    Every row gets a finding. A family that the log never mentions is named as silently omitted: that fails a
    row that expects it and passes, with that remark, one that expects its absence. A family that upstream left
    out and no row speaks of is a warning.
    """
    built = dict(report.built)
    refused = dict(report.not_built)
    findings: list[KernelFinding] = []
    for row in kernels:
        absence = f"not built: {refused[row.name]}" if row.name in refused else "silently omitted: no line of the log"
        if row.expect == "not built":
            if row.name in built:
                findings.append(
                    KernelFinding(row.name, "failed", f"built for {_list(built[row.name])}, must not be: {row.why}")
                )
            else:
                findings.append(KernelFinding(row.name, "passed", f"{absence}, as expected: {row.why}"))
        elif row.name not in built:
            findings.append(KernelFinding(row.name, "failed", f"{absence}, must be built: {row.why}"))
        else:
            findings.append(_judge_architectures(row, built[row.name]))
    spoken_of = {row.name for row in kernels}
    findings += [
        KernelFinding(name, "warned", f"not built: {reason}; the recipe has no [[cuda.kernel]] row for it")
        for name, reason in report.not_built
        if name not in spoken_of and name not in built
    ]
    return tuple(findings)


def _judge_architectures(row: ExpectedKernel, found: tuple[str, ...]) -> KernelFinding:
    missing = [architecture for architecture in row.architectures if architecture not in found]
    if missing:
        return KernelFinding(
            row.name, "failed", f"built for {_list(found)}, {_list(missing)} missing of {_list(row.architectures)}"
        )
    extra = [architecture for architecture in found if architecture not in row.architectures]
    if row.architectures and extra:
        return KernelFinding(row.name, "warned", f"built for {_list(found)}, the recipe does not name {_list(extra)}")
    return KernelFinding(row.name, "passed", f"built for {_list(found)}")


def _list(architectures: Sequence[str]) -> str:
    return " ".join(architectures) or "no stated architecture"
