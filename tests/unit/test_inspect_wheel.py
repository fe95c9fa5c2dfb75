"""Inspection of wheels: what is read, what is judged, what is shown."""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from inspect_samples import CODE, GOOD, NAME, SAMPLE, A, failed, make_wheel, statuses
from packaging.requirements import Requirement

from cufallback.cuda.versions import Driver, Isa
from cufallback.errors import ExitCode
from cufallback.recipe import load_recipe
from cufallback.store import canonical_json
from cufallback.wheel import payload as payload_module
from cufallback.wheel.audit import Finding, expectation_for, expectation_of, probe_expectation_of
from cufallback.wheel.coverage import cuda_at_least, gpu_coverage, minimum_driver
from cufallback.wheel.fatbin import read_fatbins
from cufallback.wheel.inspect import Inspection, dotted_name, inspect_wheel, newest_version
from cufallback.wheel.metadata import cuda_major_of, read_metadata
from cufallback.wheel.report import run_inspect


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def inspection(wheel: Path) -> Inspection:
    return inspect_wheel(wheel)


# ------------------------------------------------------------------------------------------------------- what is read


def test_the_extension_is_described(inspection: Inspection) -> None:
    (part,) = inspection.extensions
    assert (part.name, part.kind, part.path, part.fault) == ("sample._C", "extension", CODE, "")
    assert part.needed == ("libcudart.so.12", "libc.so.6")
    assert part.cuda_libraries == (("libcudart.so.12", (12,)),)
    assert part.rpath == ("$ORIGIN/lib",)
    assert (part.glibc, part.glibcxx, part.torch) == ("2.17", "", "none")
    assert list(map(str, part.sass)) == ["9.0a", "10.0f", "10.3a"]
    assert part.ptx == ((A("8.0"), (8, 8)),)


def test_relocatable_code_is_counted_apart_and_covers_nothing(inspection: Inspection) -> None:
    (part,) = inspection.extensions
    kept = [(group.runnable, group.kind, str(group.architecture), group.codec) for group in part.code]
    assert (False, "ptx", "12.0", "none") in kept
    assert sum(group.count for group in part.code) == 6
    only = [entry for entry in part.entries if not entry.runnable]
    assert {gpu.how for gpu in gpu_coverage(only)} == {"none"}


@pytest.mark.parametrize(
    ("gpu", "how", "units", "sass"),
    [
        ("7.5", "none", (0, 0, 2), ""),
        ("8.0", "JIT", (0, 2, 0), ""),
        ("8.7", "JIT", (0, 2, 0), ""),
        ("9.0", "SASS and JIT", (1, 1, 0), "9.0a"),
        ("10.0", "SASS and JIT", (1, 1, 0), "10.0f"),
        ("10.3", "SASS and JIT", (1, 1, 0), "10.0f 10.3a"),
        ("12.0", "JIT", (0, 2, 0), ""),
    ],
)
def test_coverage_is_counted_by_translation_unit(
    inspection: Inspection, gpu: str, how: str, units: tuple[int, int, int], sass: str
) -> None:
    (found,) = [one for one in inspection.coverage if one.capability == A(gpu)]
    assert (found.how, found.units, " ".join(map(str, found.sass))) == (how, units, sass)


def test_the_minimum_driver_is_that_of_the_ptx_that_must_be_compiled(inspection: Inspection) -> None:
    assert inspection.minimum_driver.driver == Driver.parse("575.51.03")
    hard = {reason.what: reason for reason in inspection.minimum_driver.reasons if reason.hard}
    assert hard["libcudart.so.12"].driver == Driver.parse("525.60.13")
    assert "9.0, 10.0, 10.3" in hard["PTX 8.8"].why
    assert all(reason.source for reason in inspection.minimum_driver.reasons)


def test_code_without_ptx_to_compile_runs_from_the_floor_of_its_major_version_on(tmp_path: Path) -> None:
    # Make PTX of no known kind, so that SASS alone is left.
    data = bytearray(SAMPLE)
    for entry in read_fatbins(memoryview(SAMPLE)):
        if entry.kind == "ptx":
            at = SAMPLE.rindex(struct.pack("<HH", 1, 0x101), 0, entry.offset)
            struct.pack_into("<H", data, at, 77)
    found = inspect_wheel(make_wheel(tmp_path, {CODE: bytes(data)}))
    assert found.minimum_driver.driver == Driver.parse("525.60.13")
    assert any(not reason.hard and reason.what == "CUDA 12.9" for reason in found.minimum_driver.reasons)


@pytest.mark.parametrize(
    ("targets", "driver", "hard"),
    [
        (("9.0", "10.3"), "525.60.13", ["libcudart.so.12"]),
        (("9.0", "8.0"), "575.51.03", ["PTX 8.8", "libcudart.so.12"]),
        (("12.0",), "575.51.03", ["PTX 8.8", "libcudart.so.12"]),
        (None, "525.60.13", ["libcudart.so.12"]),
    ],
)
def test_ptx_counts_where_a_gpu_that_is_asked_for_has_no_sass(
    targets: tuple[str, ...] | None, driver: str, hard: list[str]
) -> None:
    unit = [entry for entry in read_fatbins(memoryview(SAMPLE)) if entry.container == 0]
    needs = minimum_driver(
        "x",
        unit,
        coverage=gpu_coverage(unit),
        libraries=[("libcudart.so.12", (12,))],
        targets=[A(target) for target in targets] if targets is not None else None,
    )
    assert needs.driver == Driver.parse(driver)
    assert sorted(reason.what for reason in needs.reasons if reason.hard) == hard
    assert any(reason.what == "PTX 8.8" for reason in needs.reasons), "it is worth knowing all the same"


def test_the_newest_evidence_of_the_toolkit_counts() -> None:
    entries = read_fatbins(memoryview(SAMPLE))
    assert cuda_at_least([entry for entry in entries if entry.kind == "ptx"]) == ((12, 9), "PTX 8.8")
    assert cuda_at_least([entry for entry in entries if str(entry.architecture) == "9.0a"]) is None
    assert cuda_at_least(entries) == ((12, 9), "sm_100f")


def test_stored_deflated_and_large_members_are_read_alike(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = inspect_wheel(make_wheel(tmp_path, method=zipfile.ZIP_STORED))
    monkeypatch.setattr(payload_module, "_IN_MEMORY", 0)
    through_a_file = inspect_wheel(wheel)
    monkeypatch.undo()
    assert stored.extensions == through_a_file.extensions == inspect_wheel(wheel, jobs=1).extensions


def test_json_is_the_same_wherever_the_wheel_lies(tmp_path: Path, wheel: Path) -> None:
    copy = tmp_path / NAME
    copy.write_bytes(wheel.read_bytes())
    ours = canonical_json(inspect_wheel(copy, expectation=GOOD).to_json())
    assert ours == canonical_json(inspect_wheel(wheel, expectation=GOOD).to_json())
    read = json.loads(ours)
    assert read["extensions"][0]["ptx"] == [{"isa": "8.8", "target": "8.0"}]
    assert str(tmp_path) not in ours.decode()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm/_C.abi3.so", "vllm._C"),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm.vllm_flash_attn._vllm_fa2_C"),
        ("a/_C.cpython-311-x86_64-linux-gnu.so", "a._C"),
        ("a-1.data/platlib/a/b.so", "a.b"),
        ("lib/libx.so.12", "lib.libx"),
        ("vllm/vllm-rs", "vllm.vllm-rs"),
    ],
)
def test_dotted_names(path: str, name: str) -> None:
    assert dotted_name(path) == name


def test_the_newest_symbol_version_is_by_number() -> None:
    assert (
        newest_version(["GLIBC_2.3.4", "GLIBC_2.17", "GLIBC_2.9", "GLIBC_PRIVATE", "GLIBCXX_3.4.29"], "GLIBC_")
        == "2.17"
    )
    assert newest_version(["GLIBC_PRIVATE"], "GLIBC_") == ""


def test_a_program_without_suffix_is_found_by_its_first_bytes(tmp_path: Path) -> None:
    found = inspect_wheel(make_wheel(tmp_path, {"sample/tool": SAMPLE, "sample/LICENSE": b"text", "sample/empty": b""}))
    assert [(part.name, part.kind) for part in found.extensions] == [("sample.tool", "program")]


def test_a_wheel_without_native_code_asks_for_nothing(tmp_path: Path) -> None:
    found = inspect_wheel(make_wheel(tmp_path, {"sample/__init__.py": b"x = 1\n"}))
    assert (found.extensions, found.coverage, found.minimum_driver.driver, found.failed) == ((), (), None, False)


# ------------------------------------------------------------------------------------------------------ requirements


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("nvidia-cublas-cu12==12.9.1.4", 12),
        ("nvidia-cuda-runtime-cu13", 13),
        ("nvidia-cutlass-dsl[cu13]==4.6.0", 13),
        ("humming-kernels[cu12]==0.1.10", 12),
        ("cupy-cuda13x<14.1.0", 13),
        ("cupy-cuda12x", 12),
        ("cuda-toolkit[cudart]==13.0.2", 13),
        ("cuda-toolkit==12.9.1", 12),
        ("cuda-python>=13", 13),
        ("cuda-bindings==12.9.4", 12),
        ("nvidia-cuda-runtime==13.0.96", 13),
        ("nvidia-cublas~=13.1", 13),
        ("nvidia-cuda-nvdisasm>=13.3,<14", None),
        ("nvidia-ml-py>=13.580", None),
        ("nvidia-cudnn-frontend>=1.19.1", None),
        ("nvidia-cutlass-dsl==4.6.0", None),
        ("cuda-python", None),
        ("torch==2.13.0", None),
        ("numba==0.65.0", None),
    ],
)
def test_the_cuda_of_a_requirement(line: str, major: int | None) -> None:
    found = cuda_major_of(Requirement(line))
    assert (found[0] if found else None) == major


@pytest.mark.parametrize(
    ("line", "toolkit", "status"),
    [
        ("nvidia-cutlass-dsl[cu13]==4.6.0", "12.9.1", "failed"),
        ("nvidia-cuda-runtime==13.0.96", "12.9.1", "failed"),
        ("nvidia-cuda-runtime-cu12==12.9.79", "12.9.1", "passed"),
        ("nvidia-cuda-runtime-cu12==12.9.79", "13.0.0", "failed"),
        ('nvidia-deepstream-videodecode-cu13>=9; extra == "video"', "12.9.1", "warned"),
    ],
)
def test_requirements_are_judged(tmp_path: Path, line: str, toolkit: str, status: str) -> None:
    found = inspect_wheel(make_wheel(tmp_path, requires=(line,)), expectation=replace(GOOD, toolkit=toolkit))
    assert statuses(found, "requirements")[0] == status
    if status == "failed":
        assert line in failed(found)["requirements"]


def test_requirements_on_torch_are_kept_and_unreadable_ones_named(tmp_path: Path) -> None:
    lines = ("torch==2.13.0", "not a requirement!!")
    found = inspect_wheel(make_wheel(tmp_path, requires=lines))
    assert found.metadata.torch == ("torch==2.13.0",)
    assert statuses(found, "metadata") == ["warned"]
    assert read_metadata("Name: x\n").cuda == ()


# ----------------------------------------------------------------------------------------------------------- judgement


def test_a_wheel_as_expected_passes(wheel: Path) -> None:
    found = inspect_wheel(wheel, expectation=GOOD)
    assert failed(found) == {}
    assert {finding.status for finding in found.findings} == {"passed"}


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ({"toolkit": "13.0.0"}, "cuda runtime", "libcudart.so.12 is not of CUDA 13"),
        ({"toolkit": "12.8.1", "architectures": ()}, "device code", "CUDA 12.9 or newer makes, not 12.8.1"),
        ({"toolkit": "12.8.1"}, "architectures", "CUDA 12.8.1 builds no 10.3a"),
        ({"architectures": (A("12.0a"),)}, "architectures", "no extension has code for 12.0a"),
        ({"ptx": ((A("9.0"), Isa(8, 8)),)}, "ptx", "PTX 8.8 for 9.0 is not there; there is: 8.0 (ISA 8.8)"),
        ({"maximum_driver_branch": 570}, "driver ceiling", "sample._C need driver 575.51.03 for PTX 8.8"),
        ({"extensions": ("sample._C", "sample._flashkda_C")}, "extensions", "sample._flashkda_C is missing"),
        ({"size_limit": 100}, "size", "the limit is 0 MiB"),
    ],
)
def test_each_fault_has_its_own_finding(wheel: Path, change: dict[str, object], what: str, says: str) -> None:
    found = inspect_wheel(wheel, expectation=replace(GOOD, **change))  # type: ignore[arg-type]
    assert says in failed(found)[what]
    assert found.failed


def test_family_code_in_place_of_specific_code_is_a_warning(wheel: Path) -> None:
    found = inspect_wheel(wheel, expectation=replace(GOOD, architectures=(A("10.0a"),)))
    (finding,) = [one for one in found.findings if one.what == "architectures"]
    assert finding == Finding("warned", "architectures", "there is no 10.0a; GPUs of 10.0 run 10.0f instead")


def test_missing_and_expected_extensions_are_listed(wheel: Path) -> None:
    found = inspect_wheel(wheel, expectation=replace(GOOD, extensions=("sample._C", "sample._b", "sample._a")))
    assert found.missing_extensions == ("sample._a", "sample._b")
    assert found.to_json()["expected_extensions"] == ["sample._C", "sample._b", "sample._a"]


def test_ptx_newer_than_every_known_driver_breaks_the_ceiling(tmp_path: Path) -> None:
    data = bytearray(SAMPLE)
    for entry in read_fatbins(memoryview(SAMPLE)):
        if entry.kind == "ptx":
            at = SAMPLE.rindex(struct.pack("<HH", 1, 0x101), 0, entry.offset)
            struct.pack_into("<HH", data, at + 24, 9, 99)
    found = inspect_wheel(make_wheel(tmp_path, {CODE: bytes(data)}), expectation=GOOD)
    assert "a driver that is not known" in failed(found)["driver ceiling"]


@pytest.mark.parametrize(
    ("tag", "status"),
    [("manylinux_2_28", ["passed"]), ("manylinux_2_12", ["failed"]), ("manylinux1", ["failed"]), ("linux", [])],
)
def test_the_tag_s_glibc_promise_is_checked(tmp_path: Path, tag: str, status: list[str]) -> None:
    found = inspect_wheel(make_wheel(tmp_path, name=f"sample-1.0-cp311-cp311-{tag}_x86_64.whl"))
    assert statuses(found, "glibc") == status


def test_a_library_path_of_the_build_machine_is_a_warning(tmp_path: Path) -> None:
    moved = SAMPLE.replace(b"$ORIGIN/lib\0", b"/opt/cu/lib\0")
    found = inspect_wheel(make_wheel(tmp_path, {CODE: moved}))
    assert statuses(found, "rpath") == ["warned"]


def test_files_of_two_cuda_major_versions_are_pointed_out(tmp_path: Path) -> None:
    other = SAMPLE.replace(b"libcudart.so.12", b"libcudart.so.13")
    found = inspect_wheel(make_wheel(tmp_path, {CODE: SAMPLE, "sample/_D.abi3.so": other}))
    assert found.cuda_majors == (12, 13)
    assert statuses(found, "cuda runtime") == ["warned"]


def test_metadata_of_another_wheel_are_a_finding(tmp_path: Path) -> None:
    found = inspect_wheel(make_wheel(tmp_path, metadata=b"Name: sample\nVersion: 2.0\n"))
    assert "sample 2.0" in failed(found)["metadata"]
    same = inspect_wheel(make_wheel(tmp_path, metadata=b"Name: Sample\nVersion: v1.0\n"))
    assert not same.failed, "the same name and version in another spelling"


def test_the_recipes_say_what_their_wheels_must_be() -> None:
    production = expectation_of(load_recipe("kimi-k3-cu129"))
    assert production.gpus == (A("9.0"), A("10.0"), A("10.3"))
    assert (production.toolkit, production.maximum_driver_branch) == ("12.9.1", 575)
    assert "vllm._flashkda_C" in production.extensions
    rehearsal = load_recipe("rehearsal")
    assert not rehearsal.wheel.device_code
    assert expectation_of(rehearsal).architectures == ()
    # Whatever the target is called: what the wheel carries is the recipe's to say.
    carries = rehearsal.model_copy(update={"wheel": rehearsal.wheel.model_copy(update={"device_code": True})})
    assert len(expectation_of(carries).architectures) == 3
    probe = probe_expectation_of(rehearsal, ptx=((A("8.0"), Isa(8, 8)),), extensions=("cuda_probe",))
    assert list(map(str, probe.architectures)) == ["9.0a", "10.0a", "10.3a"]


# ------------------------------------------------------------------------------------------------------------- report


def test_the_cuda_probe_is_judged_as_what_it_is(tmp_path: Path) -> None:
    recipe = load_recipe("kimi-k3-cu129")
    name = "cufallback_cuda_probe-1.0.0+cu129-py3-none-manylinux_2_17_x86_64.whl"
    probe = expectation_for(tmp_path / name, recipe)
    assert (probe.ptx, probe.extensions) == (((A("8.0"), Isa(8, 8)),), ("cuda_probe.libcuda_probe",))
    assert expectation_for("cufallback-cuda-probe", recipe) == probe
    assert expectation_for("vllm-0.30.0-cp38-abi3-linux_x86_64.whl", recipe) == expectation_of(recipe)
    metadata = {"cufallback_cuda_probe-1.0.0+cu129.dist-info/METADATA": b"Name: cufallback-cuda-probe\nVersion: 1\n"}
    wheel = make_wheel(tmp_path, {CODE: SAMPLE, **metadata}, name=name)
    shown = run_inspect([wheel], recipe=recipe).text
    assert "cuda_probe.libcuda_probe is missing" in shown
    assert "_flashkda_C" not in shown


def test_json_is_a_list_however_many_the_wheels(wheel: Path) -> None:
    one = run_inspect([wheel], json_output=True)
    two = run_inspect([wheel, wheel], json_output=True)
    assert one.exit_code == two.exit_code == ExitCode.OK
    assert json.loads(two.text) == json.loads(one.text) * 2
    assert [value["name"] for value in json.loads(one.text)] == ["sample"]


def test_a_wheel_that_is_not_what_the_recipe_says_ends_with_its_own_exit_code(wheel: Path) -> None:
    shown = run_inspect([wheel], recipe=load_recipe("kimi-k3-cu129"))
    assert shown.exit_code == ExitCode.INSPECTION_FAILED
    assert "vllm._flashkda_C is missing" in shown.text


def test_the_tables_show_what_matters(wheel: Path) -> None:
    text = run_inspect([wheel], width=160).text
    for shown in ("libcudart.so.12", "9.0a 10.0f 10.3a", "8.0 (8.8)", "575.51.03", "B300", "SASS and JIT", "not run"):
        assert shown in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 160


def test_colour_is_only_there_when_asked_for(wheel: Path) -> None:
    assert "\x1b[" in run_inspect([wheel], colour=True).text


def test_several_wheels_stand_side_by_side(tmp_path: Path, wheel: Path) -> None:
    other = make_wheel(tmp_path, {CODE: SAMPLE.replace(b"libcudart.so.12", b"libcudart.so.13")})
    text = run_inspect([wheel, other], width=160).text
    table = text[text.index("Side by side") :]
    row = next(line for line in table.splitlines() if "minimum driver" in line)
    assert ("575.51.03" in row, "580.65.06" in row) == (True, True)


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    text = run_inspect([make_wheel(tmp_path, {"sample/[red]x[/red].so": b"junk"})], width=160).text
    assert "[red]x[/red]" in text
