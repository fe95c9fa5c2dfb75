"""What a build log says about kernels, and how that is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from cufallback.wheel.buildlog import KernelReport, judge_kernels, parse_build_log

BUILT = [
    ("-- Building Machete kernels for archs: 9.0a", ("Machete", ("9.0a",))),
    ("-- Building SM10x/11x NVFP4/MXFP4 for archs: 10.0a;10.3a", ("SM10x/11x NVFP4/MXFP4", ("10.0a", "10.3a"))),
    ("-- Building fused KDA decode for archs: 9.0a;10.0f", ("fused KDA decode", ("9.0a", "10.0f"))),
    ("-- Building fused KDA decode for HIP archs: gfx942", ("fused KDA decode", ("gfx942",))),
    ("-- Building Marlin MOE kernels for archs: 8.0+PTX;12.0a", ("Marlin MOE", ("8.0+PTX", "12.0a"))),
    ("-- Building hadacore", ("hadacore", ())),
    ("-- FlashKDA CUDA architectures: 9.0a;10.0a;10.3a", ("FlashKDA", ("9.0a", "10.0a", "10.3a"))),
]
NOT_BUILT = [
    (
        "-- Not building CUTLASS MLA as no compatible archs were found.",
        "CUTLASS MLA",
        "no compatible archs were found.",
    ),
    ("-- Not building grouped_mm_c3x kernels as CUDA Compiler version is not >= 12.3", "grouped_mm_c3x", "not >= 12.3"),
    ("-- Not building scaled_mm_c3x_120 as no compatible archs found", "scaled_mm_c3x_sm120", "no compatible archs"),
    (
        "-- FlashMLA will not compile: unsupported CUDA architecture 8.9",
        "FlashMLA",
        "unsupported CUDA architecture 8.9",
    ),
    ("-- [QUTLASS] Skipping build: no supported arch (12.0f / 10.0f) found", "QuTLASS", "no supported arch"),
    ("-- Building mxfp4_experts_quant unsupported stubs because CUDA is old", "mxfp4_experts_quant", "stubs because"),
]
NOISE = [
    "[3/87] Building CXX object CMakeFiles/spinloop.dir/csrc/spinloop.cpp.o",
    "-- CUDA supported target architectures: 9.0;10.0",
    "-- CUDA target architectures: 9.0;10.0",
    "-- FlashKDA is available at /src/.deps/flashkda-src",
    "-- DeepGEMM _C will be built for: /usr/bin/python3",
    "Building wheel for vllm",
    "* Building wheel...",
]


@pytest.mark.parametrize(("line", "entry"), BUILT)
def test_built_kernels_are_read_with_their_architectures(line: str, entry: tuple[str, tuple[str, ...]]) -> None:
    assert parse_build_log([line]) == KernelReport((entry,), ())


@pytest.mark.parametrize(("line", "name", "reason"), NOT_BUILT)
def test_kernels_left_out_are_read_with_upstreams_reason(line: str, name: str, reason: str) -> None:
    report = parse_build_log([line])
    assert report.built == ()
    ((found, why),) = report.not_built
    assert found == name
    assert reason in why


@pytest.mark.parametrize("line", NOISE)
def test_other_lines_name_no_kernel(line: str) -> None:
    assert parse_build_log([line]) == KernelReport((), ())


def test_two_reports_of_one_family_are_joined() -> None:
    report = parse_build_log(
        [
            "-- Building grouped_mm_c3x for archs: 9.0a",
            "-- Building grouped_mm_c3x for archs: 10.0a;9.0a",
            "-- Not building moe_data as A",
            "-- Not building moe_data as B",
            "-- Not building moe_data as A",
        ]
    )
    assert report == KernelReport((("grouped_mm_c3x", ("9.0a", "10.0a")),), (("moe_data", "A; B"),))


@dataclass(frozen=True)
class Row:
    name: str
    expect: Literal["built", "not built"]
    architectures: tuple[str, ...] = ()
    why: str = "the reason of the recipe"


REPORT = KernelReport(
    (("FlashKDA", ("9.0a", "10.0a")), ("hadacore", ())), (("FlashMLA", "unsupported"), ("AllSpark", "no archs"))
)


@pytest.mark.parametrize(
    ("row", "status", "words"),
    [
        (Row("FlashKDA", "built"), "passed", "built for 9.0a 10.0a"),
        (Row("FlashKDA", "built", ("9.0a", "10.0a")), "passed", "built for 9.0a 10.0a"),
        (Row("FlashKDA", "built", ("9.0a",)), "warned", "does not name 10.0a"),
        (Row("FlashKDA", "built", ("9.0a", "10.0a", "10.3a")), "failed", "10.3a missing"),
        (Row("FlashKDA", "not built"), "failed", "must not be"),
        (Row("FlashMLA", "built"), "failed", "not built: unsupported"),
        (Row("FlashMLA", "not built"), "passed", "not built: unsupported"),
        (Row("fused KDA decode", "built"), "failed", "silently omitted"),
        (Row("fused KDA decode", "not built"), "passed", "silently omitted"),
        (Row("hadacore", "built", ("8.0",)), "failed", "8.0 missing"),
    ],
)
def test_each_row_is_judged(row: Row, status: str, words: str) -> None:
    finding = judge_kernels(REPORT, [row])[0]
    assert (finding.what, finding.status) == (row.name, status)
    assert words in finding.why


def test_a_family_left_out_that_no_row_speaks_of_is_a_warning() -> None:
    findings = judge_kernels(REPORT, [Row("FlashMLA", "not built")])
    assert [(finding.what, finding.status) for finding in findings] == [("FlashMLA", "passed"), ("AllSpark", "warned")]
