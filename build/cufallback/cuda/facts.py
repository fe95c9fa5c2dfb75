"""The fact tables of facts.toml as typed rows."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cufallback.cuda.versions import Architecture, Driver, Isa

Status = Literal["verified", "quoted"]


@dataclass(frozen=True)
class Source:
    """Where a fact comes from, and whether it was seen (verified) or taken from the document (quoted)."""

    title: str
    url: str
    status: Status
    seen: str = ""

    def __str__(self) -> str:
        detail = f" {self.seen}" if self.seen else ""
        return f"{self.title}{detail} ({self.url}; {self.status})"


@dataclass(frozen=True)
class Toolkit:
    """A toolkit release and the driver it ships with."""

    release: tuple[int, int, int]
    driver: Driver
    source: Source

    @property
    def name(self) -> str:
        """The release as text: 12.9.1."""
        return ".".join(map(str, self.release))


@dataclass(frozen=True)
class Branch:
    """A driver branch, the CUDA version of its driver, and its kind ("" where no source says)."""

    branch: int
    cuda: tuple[int, int]
    kind: str
    source: Source


@dataclass(frozen=True)
class PtxRow:
    """A CUDA version and the PTX ISA version that its compiler writes and its driver compiles."""

    cuda: tuple[int, int]
    isa: Isa
    source: Source


@dataclass(frozen=True)
class ToolkitArchitectures:
    """What the ptxas of some toolkits assembles."""

    toolkits: tuple[tuple[int, int], ...]
    plain: tuple[Architecture, ...]
    specific: tuple[Architecture, ...]
    family: tuple[Architecture, ...]
    source: Source


@dataclass(frozen=True)
class MajorFloor:
    """The oldest driver on which the runtime of a CUDA major version starts."""

    major: int
    driver: Driver
    source: Source


@dataclass(frozen=True)
class Forward:
    """Driver branches that a forward-compatibility package of a CUDA major version can lift."""

    major: int
    branches: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Gpu:
    """A compute capability and products that have it."""

    capability: Architecture
    architecture: str
    examples: tuple[str, ...]
    integrated: bool
    data_centre: bool
    source: Source


@dataclass(frozen=True)
class Library:
    """A shared library name (glob) and the CUDA major versions that ship it under that name."""

    pattern: str
    majors: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Facts:
    """All tables."""

    toolkits: tuple[Toolkit, ...]
    majors: tuple[MajorFloor, ...]
    ptx: tuple[PtxRow, ...]
    architectures: tuple[ToolkitArchitectures, ...]
    branches: tuple[Branch, ...]
    forward: tuple[Forward, ...]
    families: dict[Architecture, tuple[Architecture, ...]]
    family_source: Source
    gpus: tuple[Gpu, ...]
    libraries: tuple[Library, ...]


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _triple(text: str) -> tuple[int, int, int]:
    major, minor, patch = text.split(".")
    return int(major), int(minor), int(patch)


def _architectures(names: list[str]) -> tuple[Architecture, ...]:
    return tuple(Architecture.parse(name) for name in names)


@functools.cache
def facts() -> Facts:
    """Load the tables once."""
    data: dict[str, Any] = tomllib.loads((Path(__file__).parent / "facts.toml").read_text(encoding="utf-8"))
    sources: dict[str, dict[str, str]] = data["source"]

    def source(row: dict[str, Any]) -> Source:
        named = sources[row["source"]]
        return Source(named["title"], named["url"], row["status"], row.get("seen", ""))

    return Facts(
        toolkits=tuple(Toolkit(_triple(r["release"]), Driver.parse(r["driver"]), source(r)) for r in data["toolkit"]),
        majors=tuple(MajorFloor(r["major"], Driver.parse(r["driver"]), source(r)) for r in data["major"]),
        ptx=tuple(PtxRow(_pair(r["cuda"]), Isa.parse(r["isa"]), source(r)) for r in data["ptx"]),
        architectures=tuple(
            ToolkitArchitectures(
                tuple(_pair(name) for name in r["toolkits"]),
                _architectures(r["plain"]),
                _architectures(r["specific"]),
                _architectures(r["family"]),
                source(r),
            )
            for r in data["architectures"]
        ),
        branches=tuple(Branch(r["branch"], _pair(r["cuda"]), r["kind"], source(r)) for r in data["branch"]),
        forward=tuple(Forward(r["major"], tuple(r["branches"]), source(r)) for r in data["forward"]),
        families={Architecture.parse(r["target"]): _architectures(r["runs_on"]) for r in data["family"]},
        family_source=source(data["family"][0]),
        gpus=tuple(
            Gpu(
                Architecture.parse(r["capability"]),
                r["architecture"],
                tuple(r["examples"]),
                r["integrated"],
                r["data_centre"],
                source(r),
            )
            for r in data["gpu"]
        ),
        libraries=tuple(Library(r["pattern"], tuple(r["majors"]), source(r)) for r in data["library"]),
    )
