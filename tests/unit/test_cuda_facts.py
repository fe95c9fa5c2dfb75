"""CUDA fact tables against the figures that public sources give, and the questions over them."""

from __future__ import annotations

import pytest

from cufallback.cuda.facts import facts
from cufallback.cuda.questions import (
    architectures_of,
    can_run,
    covers,
    cuda_majors_of,
    gpus_covered,
    isa_of,
    jit_ceiling,
    major_floor,
    minimum_driver_for_ptx,
    toolkit_release,
)
from cufallback.cuda.versions import Architecture, Driver, Isa
from cufallback.errors import UsageError

A = Architecture.parse


@pytest.mark.parametrize(
    ("toolkit", "driver"),
    [
        ("12.9.0", "575.51.03"),
        ("12.9.1", "575.57.08"),
        ("13.0.0", "580.65.06"),
        ("13.0.1", "580.82.07"),
        ("13.0.2", "580.95.05"),
        ("13.1.0", "590.44.01"),
        ("13.2.0", "595.45.04"),
        ("12.0.0", "525.60.13"),
        ("12.4.1", "550.54.15"),
        ("12.8.1", "570.124.06"),
    ],
)
def test_a_toolkit_ships_with_its_driver(toolkit: str, driver: str) -> None:
    assert toolkit_release(toolkit).driver == Driver.parse(driver)
    assert can_run(driver, toolkit).support == "native"


@pytest.mark.parametrize(("major", "branch"), [(12, 525), (13, 580)])
def test_the_floor_of_a_major_version(major: int, branch: int) -> None:
    assert major_floor(major).driver.branch == branch


@pytest.mark.parametrize(
    ("cuda", "isa"),
    [
        *[(f"12.{minor}", f"8.{isa}") for minor, isa in enumerate((0, 1, 2, 3, 4, 5, 5, 6, 7, 8))],
        ("13.0", "9.0"),
        ("13.1", "9.1"),
        ("13.2", "9.2"),
    ],
)
def test_ptx_version_of_a_cuda_version(cuda: str, isa: str) -> None:
    assert str(isa_of(cuda)) == isa


@pytest.mark.parametrize(
    ("branch", "cuda"),
    [
        (525, (12, 0)),
        (530, (12, 1)),
        (535, (12, 2)),
        (545, (12, 3)),
        (550, (12, 4)),
        (555, (12, 5)),
        (560, (12, 6)),
        (565, (12, 7)),
        (570, (12, 8)),
        (575, (12, 9)),
        (580, (13, 0)),
        (590, (13, 1)),
        (595, (13, 2)),
    ],
)
def test_a_branch_serves_its_cuda_version(branch: int, cuda: tuple[int, int]) -> None:
    assert next(row.cuda for row in facts().branches if row.branch == branch) == cuda
    assert jit_ceiling(str(branch)) == isa_of(f"{cuda[0]}.{cuda[1]}")


def test_kinds_of_the_branches_that_matter() -> None:
    kinds = {row.branch: row.kind for row in facts().branches}
    assert (kinds[535], kinds[580], kinds[575]) == ("long term support", "long term support", "new feature")


@pytest.mark.parametrize(
    ("driver", "toolkit", "data_centre", "support", "says"),
    [
        ("575.57.08", "12.9.1", None, "native", "575.57.08"),
        ("575", "12.9.1", None, "native", "575"),
        ("580.126.20", "12.9.1", None, "native", "580.126.20"),
        ("575.51.03", "12.9.1", None, "minor version compatible", "PTX 8.8 too"),
        ("570.124.06", "12.9.1", None, "minor version compatible", "error 222"),
        ("535.104.05", "12.9.1", True, "minor version compatible", "cuda-compat-12-9"),
        ("535.104.05", "12.9.1", False, "minor version compatible", "error 222"),
        ("525.60.13", "12.9.1", None, "minor version compatible", "525.60.13"),
        ("525.60.12", "12.9.1", None, "no", "error 35"),
        ("575.57.08", "13.0.0", True, "forward compatibility only", "cuda-compat-13-0"),
        ("575.57.08", "13.0.0", None, "forward compatibility only", "if the GPUs are data-centre"),
        ("575.57.08", "13.0.0", False, "no", "error 804"),
        ("570.148.08", "13.0.0", True, "forward compatibility only", "cuda-compat-13-0"),
        ("560.35.05", "13.0.0", True, "no", "560"),
        ("580.65.06", "13.2.0", None, "minor version compatible", "PTX 9.2"),
        ("620.10", "13.2", None, "native", "620.10"),
        ("470.256.02", "12.0", None, "no", "error 35"),
    ],
)
def test_can_run(driver: str, toolkit: str, data_centre: bool | None, support: str, says: str) -> None:
    answer = can_run(driver, toolkit, data_centre_gpu=data_centre)
    assert answer.support == support
    assert says in answer.reason
    assert answer.source.url.startswith("https://")
    assert answer.runs == (support in ("native", "minor version compatible"))


def test_no_forward_compatibility_is_promised_to_a_host_without_data_centre_gpus() -> None:
    assert "cuda-compat" not in can_run("535.104.05", "12.9.1", data_centre_gpu=False).reason


@pytest.mark.parametrize(
    ("isa", "driver"),
    [
        ("8.8", "575.51.03"),
        ("8.7", "570.26"),
        ("8.5", "555.42.02"),
        ("8.0", "525.60.13"),
        ("9.0", "580.65.06"),
        ("9.2", "595.45.04"),
    ],
)
def test_minimum_driver_for_ptx(isa: str, driver: str) -> None:
    floor = minimum_driver_for_ptx(isa)
    assert floor is not None
    assert floor.driver == Driver.parse(driver)
    assert jit_ceiling(driver) == Isa.parse(isa)


def test_ptx_of_a_driver_without_a_toolkit_is_read_from_the_first_release_of_its_branch_on() -> None:
    floor = minimum_driver_for_ptx("8.6")
    assert floor is not None
    assert Driver.parse("560.35.05") < floor.driver <= Driver.parse("565.57.01")


def test_ptx_older_than_the_tables_asks_for_nothing_and_newer_is_refused() -> None:
    assert minimum_driver_for_ptx("7.8") is None
    with pytest.raises(UsageError, match="newer than the tables"):
        minimum_driver_for_ptx("9.9")


def test_a_driver_older_than_its_branch_s_toolkit_compiles_what_the_branch_before_did() -> None:
    assert (str(jit_ceiling("575.51.02")), str(jit_ceiling("575.51.03"))) == ("8.7", "8.8")
    assert jit_ceiling("470.256.02") is None


@pytest.mark.parametrize(
    ("toolkit", "builds", "lacks"),
    [
        ("12.9.1", "5.0 9.0a 10.0a 10.0f 10.1a 10.3 10.3a 10.3f 12.0f 12.1 12.1a", "11.0 8.8 9.0f"),
        ("12.8.1", "9.0a 10.0 10.0a 12.0a", "10.3 10.3a 12.1 10.0f"),
        ("12.6.3", "9.0 9.0a 8.9", "10.0 12.0"),
        ("13.0.0", "7.5 8.8 10.3a 11.0a 11.0f 12.1f", "7.0 10.1 10.1a"),
        ("13.2.0", "9.0a 10.3f", "5.0"),
    ],
)
def test_architectures_of_a_toolkit(toolkit: str, builds: str, lacks: str) -> None:
    built = architectures_of(toolkit)
    assert [target for target in builds.split() if A(target) not in built] == []
    assert [target for target in lacks.split() if A(target) in built] == []


@pytest.mark.parametrize(
    ("target", "kind", "runs_on", "not_on"),
    [
        ("8.0", "sass", "8.0 8.6 8.9", "7.5 9.0 8.7"),
        ("8.6", "sass", "8.6 8.9", "8.0"),
        ("8.7", "sass", "8.7", "8.9"),
        ("9.0a", "sass", "9.0", "10.0"),
        ("10.0", "sass", "10.0 10.3", "12.0 11.0"),
        ("10.0a", "sass", "10.0", "10.3"),
        ("10.0f", "sass", "10.0 10.3", "11.0 12.0"),
        ("10.3f", "sass", "10.3", "10.0"),
        ("12.0f", "sass", "12.0 12.1", "10.0"),
        ("12.1", "sass", "12.1", "12.0"),
        ("8.0", "ptx", "8.0 8.7 9.0 10.3 12.1", "7.5"),
        ("10.3", "ptx", "10.3 11.0 12.0", "10.0 9.0"),
        ("9.0a", "ptx", "9.0", "10.0 8.9"),
        ("12.0f", "ptx", "12.0 12.1", "10.0"),
    ],
)
def test_where_code_runs(target: str, kind: str, runs_on: str, not_on: str) -> None:
    code = "ptx" if kind == "ptx" else "sass"
    assert [gpu for gpu in runs_on.split() if not covers(A(target), A(gpu), kind=code)] == []
    assert [gpu for gpu in not_on.split() if covers(A(target), A(gpu), kind=code)] == []


def test_products_are_named_for_what_a_family_target_covers() -> None:
    products = [product for gpu in gpus_covered(A("10.0f")) for product in gpu.examples]
    assert {"B200", "B300", "GB300"} <= set(products)


@pytest.mark.parametrize(
    ("library", "majors"),
    [
        ("libcudart.so.12", (12,)),
        ("libcudart.so.13", (13,)),
        ("libcudart.so.11.0", (11,)),
        ("libcublasLt.so.12", (12,)),
        ("libnvrtc.so.13", (13,)),
        ("libnvrtc-builtins.so.12.9", (12,)),
        ("libcufft.so.11", (12,)),
        ("libcufft.so.12", (13,)),
        ("libcusparse.so.12", (12, 13)),
        ("libcuda.so.1", ()),
        ("libc.so.6", ()),
    ],
)
def test_a_library_name_tells_the_cuda_major_version(library: str, majors: tuple[int, ...]) -> None:
    assert cuda_majors_of(library) == majors


@pytest.mark.parametrize(
    "junk", ["", "12.9", "575.", "r575", "575.57.08.1", "575,57", "latest", "5750.1", "575.57 beta"]
)
def test_junk_is_no_driver_version(junk: str) -> None:
    with pytest.raises(UsageError, match="is not a driver version") as caught:
        Driver.parse(junk)
    assert "nvidia-smi" in caught.value.remedy


def test_drivers_compare_by_number_and_a_branch_is_its_newest_release() -> None:
    texts = [
        "525.60.13",
        "535.54.03",
        "535.104.05",
        "570.26",
        "570.124.06",
        "575.51.03",
        "575.57.08",
        "575",
        "580.65.06",
    ]
    drivers = [Driver.parse(text) for text in texts]
    assert drivers == sorted(drivers)
    assert len(set(drivers)) == len(drivers)
    assert Driver.parse("575.57.08") == Driver.parse(" 575.57.8 ")


@pytest.mark.parametrize("text", ["9.0a", "90a", "sm_90a", "compute_90a"])
def test_an_architecture_is_read_in_all_its_spellings(text: str) -> None:
    assert A(text) == Architecture(9, 0, "a")
    assert (str(A(text)), A(text).sm) == ("9.0a", "sm_90a")


@pytest.mark.parametrize("junk", ["", "9", "9.0x", "sm90", "10.33", "native"])
def test_junk_is_no_architecture(junk: str) -> None:
    with pytest.raises(UsageError, match="is not a CUDA architecture"):
        A(junk)


def test_architectures_sort_by_number() -> None:
    assert sorted(map(A, ["10.0", "9.0a", "12.0f", "9.0", "10.3a"])) == list(
        map(A, ["9.0", "9.0a", "10.0", "10.3a", "12.0f"])
    )


@pytest.mark.parametrize("junk", ["12.7", "12.7.0", "11.8", "14.0", "12", "cu129", "12.9.1.2.3"])
def test_a_toolkit_outside_the_tables_is_refused(junk: str) -> None:
    with pytest.raises(UsageError, match="not a CUDA toolkit in the tables"):
        can_run("575.57.08", junk)


@pytest.mark.parametrize(("asked", "row"), [("12.9", "12.9.0"), ("12.9.2", "12.9.1"), ("13.0.3", "13.0.2")])
def test_an_update_without_a_row_takes_the_one_before_and_says_so(asked: str, row: str) -> None:
    assert toolkit_release(asked).name == row


def test_every_row_has_a_source_and_only_what_was_run_or_read_is_called_verified() -> None:
    tables = facts()
    rows = [
        *tables.toolkits,
        *tables.majors,
        *tables.ptx,
        *tables.architectures,
        *tables.branches,
        *tables.forward,
        *tables.gpus,
        *tables.libraries,
    ]
    assert all(row.source.title and row.source.url.startswith("https://") for row in rows)
    assert {row.source.status for row in tables.toolkits} == {"quoted"}
    assert [row.isa for row in tables.ptx if row.source.status == "verified" and not row.source.seen] == []


def test_tables_are_in_order_so_that_first_and_newest_mean_what_they_say() -> None:
    tables = facts()
    assert [row.release for row in tables.toolkits] == sorted(row.release for row in tables.toolkits)
    assert [row.driver for row in tables.toolkits] == sorted(row.driver for row in tables.toolkits)
    assert [row.branch for row in tables.branches] == sorted(row.branch for row in tables.branches)
    assert [row.isa for row in tables.ptx] == sorted(row.isa for row in tables.ptx)


def test_every_toolkit_line_has_a_ptx_version_architectures_and_a_branch() -> None:
    tables = facts()
    for row in tables.toolkits:
        assert isa_of(row.name)
        assert architectures_of(row.name).plain
        assert row.driver.branch in {branch.branch for branch in tables.branches}
