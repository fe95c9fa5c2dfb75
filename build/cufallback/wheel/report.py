"""Show inspections: as JSON, as tables for one wheel, and several wheels side by side."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.errors import ExitCode
from cufallback.store import canonical_json
from cufallback.wheel.audit import expectation_for
from cufallback.wheel.coverage import GpuCoverage, MinimumDriver
from cufallback.wheel.inspect import Extension, Inspection, inspect_wheel

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cufallback.recipe import Recipe

JSON_SCHEMA_VERSION = 1
_SIGNS = {"passed": "ok", "failed": "FAILED", "warned": "warning", "not_run": "not run"}
_COLOURS = {"passed": "green", "failed": "red", "warned": "yellow", "not_run": "dim"}


@dataclass(frozen=True)
class Shown:
    """What a command prints on stdout, and its exit code."""

    text: str
    exit_code: ExitCode


def run_inspect(
    paths: Sequence[Path],
    *,
    recipe: Recipe | None = None,
    json_output: bool = False,
    width: int = 120,
    colour: bool = False,
) -> Shown:
    """Inspect wheels and say how it went; the whole of ``cufallback inspect``.

    Args:
        paths: wheels. Several are also put side by side.
        recipe: what they are compared with, the cuda-probe as such; None: nothing.
        json_output: JSON instead of tables: a list with one object for each wheel.
        width: columns of the tables.
        colour: whether the text may carry terminal colours.

    Raises:
        PayloadError: one of them is no wheel.
    """
    inspections = [
        inspect_wheel(path, expectation=expectation_for(path, recipe) if recipe is not None else None) for path in paths
    ]
    code = ExitCode.INSPECTION_FAILED if any(one.failed for one in inspections) else ExitCode.OK
    if json_output:
        return Shown(canonical_json([one.to_json() for one in inspections]).decode(), code)
    parts = [format_inspection(one, width=width, colour=colour) for one in inspections]
    if len(inspections) > 1:
        parts.append(format_comparison(inspections, width=width, colour=colour))
    return Shown("\n".join(parts), code)


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as plain values with stable keys and order."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "file": inspection.file,
        "sha256": inspection.sha256,
        "size": inspection.size,
        "name": inspection.name,
        "version": inspection.version,
        "tags": list(inspection.tags),
        "cuda_majors": list(inspection.cuda_majors),
        "requirements": {
            "python": inspection.metadata.requires_python,
            "torch": list(inspection.metadata.torch),
            "cuda": [
                {"requirement": entry.requirement, "cuda": entry.major, "extra": entry.extra, "why": entry.why}
                for entry in inspection.metadata.cuda
            ],
        },
        "extensions": [_extension_json(part) for part in inspection.extensions],
        "expected_extensions": list(inspection.expected_extensions),
        "missing_extensions": list(inspection.missing_extensions),
        "gpus": [_coverage_json(gpu) for gpu in inspection.coverage],
        "minimum_driver": _minimum_json(inspection.minimum_driver),
        "findings": [{"status": f.status, "what": f.what, "why": f.why} for f in inspection.findings],
    }


def _extension_json(part: Extension) -> dict[str, Any]:
    return {
        "path": part.path,
        "name": part.name,
        "kind": part.kind,
        "size": part.size,
        "fault": part.fault,
        "needed": list(part.needed),
        "rpath": list(part.rpath),
        "glibc": part.glibc,
        "glibcxx": part.glibcxx,
        "cxxabi": part.cxxabi,
        "cuda_libraries": [{"name": name, "cuda": list(majors)} for name, majors in part.cuda_libraries],
        "torch_abi": part.torch,
        "sass": [str(target) for target in part.sass],
        "ptx": [{"target": str(target), "isa": _dotted(version)} for target, version in part.ptx],
        "code": [
            {
                "runnable": group.runnable,
                "kind": group.kind,
                "architecture": str(group.architecture),
                "version": _dotted(group.version),
                "codec": group.codec,
                "count": group.count,
                "stored_bytes": group.stored_bytes,
            }
            for group in part.code
        ],
        "gpus": [_coverage_json(gpu) for gpu in part.coverage] if part.has_device_code else [],
        "minimum_driver": _minimum_json(part.minimum_driver),
    }


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _coverage_json(gpu: GpuCoverage) -> dict[str, Any]:
    return {
        "capability": str(gpu.capability),
        "examples": list(gpu.examples),
        "how": gpu.how,
        "units": {"sass": gpu.units[0], "jit": gpu.units[1], "none": gpu.units[2]},
        "sass": [str(target) for target in gpu.sass],
        "jit": [{"target": str(target), "isa": str(isa)} for target, isa in gpu.jit],
    }


def _minimum_json(minimum: MinimumDriver) -> dict[str, Any]:
    return {
        "driver": str(minimum.driver) if minimum.driver is not None else None,
        "reasons": [
            {
                "hard": reason.hard,
                "driver": str(reason.driver) if reason.driver is not None else None,
                "what": reason.what,
                "why": reason.why,
                "source": reason.source,
                "files": list(reason.files),
            }
            for reason in minimum.reasons
        ],
    }


def _render(parts: Sequence[RenderableType], width: int, colour: bool) -> str:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, no_color=not colour, highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def format_inspection(inspection: Inspection, *, width: int = 120, colour: bool = False) -> str:
    """Return tables of one inspection: extensions, GPUs, drivers, findings."""
    from rich.table import Table
    from rich.text import Text

    extensions = Table(title="Native files", title_justify="left")
    for head in ("file", "CUDA libraries", "SASS", "PTX (ISA)", "torch ABI", "glibc", "driver from"):
        extensions.add_column(head, overflow="fold")
    for part in inspection.extensions:
        extensions.add_row(
            Text(part.path + (f"\n{part.fault}" if part.fault else "")),
            " ".join(name for name, _ in part.cuda_libraries),
            " ".join(map(str, part.sass)),
            " ".join(f"{target} ({_dotted(version)})" for target, version in part.ptx),
            part.torch,
            part.glibc,
            str(part.minimum_driver.driver or ""),
        )
    gpus = Table(title="GPUs", title_justify="left")
    for head in ("capability", "for example", "runs by", "translation units: SASS / JIT / none", "PTX to compile"):
        gpus.add_column(head, overflow="fold")
    for gpu in inspection.coverage:
        jit = " ".join(f"{target} (ISA {isa})" for target, isa in gpu.jit)
        gpus.add_row(str(gpu.capability), ", ".join(gpu.examples), gpu.how, " / ".join(map(str, gpu.units)), jit)
    drivers = Table(title=f"Minimum driver: {inspection.minimum_driver.driver or 'none'}", title_justify="left")
    for head in ("driver", "", "for", "why"):
        drivers.add_column(head, overflow="fold")
    for reason in inspection.minimum_driver.reasons:
        weight = "needed" if reason.hard else "to know"
        why = f"{reason.why}: {', '.join(reason.files)}"
        drivers.add_row(str(reason.driver or "unknown"), weight, reason.what, Text(why))
    findings = Table(title="Findings", title_justify="left")
    for head in ("", "about", "why"):
        findings.add_column(head, overflow="fold")
    for finding in inspection.findings:
        sign = Text(_SIGNS[finding.status], style=_COLOURS[finding.status])
        findings.add_row(sign, finding.what, Text(finding.why))
    head = f"{inspection.file}\n{inspection.size / 1e6:.1f} MB, sha256 {inspection.sha256}"
    parts: list[RenderableType] = [Text(head)]
    parts += [table for table in (extensions, gpus, drivers, findings) if table.row_count]
    return _render(parts, width, colour)


_ROWS: tuple[tuple[str, Callable[[Inspection], str]], ...] = (
    ("size, MB", lambda one: f"{one.size / 1e6:.1f}"),
    ("CUDA of its libraries", lambda one: " ".join(map(str, one.cuda_majors))),
    ("native files", lambda one: str(len(one.extensions))),
    ("with device code", lambda one: str(sum(part.has_device_code for part in one.extensions))),
    ("SASS", lambda one: " ".join(map(str, sorted({t for part in one.extensions for t in part.sass})))),
    (
        "PTX (ISA)",
        lambda one: " ".join(
            f"{target} ({_dotted(version)})" for target, version in sorted({p for x in one.extensions for p in x.ptx})
        ),
    ),
    ("torch", lambda one: "\n".join(one.metadata.torch)),
    ("CUDA requirements", lambda one: "\n".join(r.requirement for r in one.metadata.cuda if not r.extra)),
    ("minimum driver", lambda one: str(one.minimum_driver.driver or "none")),
    ("missing extensions", lambda one: "\n".join(one.missing_extensions)),
    ("failed", lambda one: "\n".join(f.why for f in one.findings if f.status == "failed")),
)


def format_comparison(inspections: Sequence[Inspection], *, width: int = 120, colour: bool = False) -> str:
    """Return a table that puts several wheels side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Side by side", title_justify="left", show_lines=True)
    table.add_column("", overflow="fold")
    for one in inspections:
        table.add_column(f"{one.name} {one.version}", overflow="fold")
    for name, value in _ROWS:
        table.add_row(name, *(Text(value(one)) for one in inspections))
    for index, gpu in enumerate(next((one.coverage for one in inspections if one.coverage), ())):
        shown = (one.coverage[index].how if one.coverage else "none" for one in inspections)
        table.add_row(f"GPU {gpu.capability}, {gpu.examples[0]}", *shown)
    return _render([table], width, colour)
