"""The inspection of real artefacts: against cuobjdump, ptxas and pyelftools, on wheels of the package index.

Files are pinned by hash and kept in CUFALLBACK_TEST_CACHE (default ~/.cache/cufallback-tests).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from pypi_simple import PyPISimple

from cufallback.cuda.facts import facts
from cufallback.cuda.questions import architectures_of, isa_of
from cufallback.cuda.versions import Architecture, Driver
from cufallback.recipe import load_recipe
from cufallback.wheel.audit import Expectation, expectation_of
from cufallback.wheel.elf import read_elf
from cufallback.wheel.fatbin import RUNNABLE, read_fatbins
from cufallback.wheel.inspect import Inspection, inspect_wheel

pytestmark = [pytest.mark.network, pytest.mark.slow]

CACHE = Path(os.environ.get("CUFALLBACK_TEST_CACHE", Path.home() / ".cache" / "cufallback-tests")).expanduser()
SAMPLES = Path(__file__).parents[1] / "data" / "inspect"

# distribution -> version, sha256 of its x86_64 wheel
PINS = {
    "bitsandbytes": ("0.50.2", "55348a9a4a21bfd99cf8c7b32fe67b4030ae5c2a05738e03c1747f65fa6ec283"),
    "vllm": ("0.27.1", "98e9fc2a1ed8549a733c9d1b242e2002b82367da9e29e37801761438cb3a2670"),
    "nvidia-cuda-cuobjdump": ("13.2.86", "d332c2ffe78e703ca0a3894be927f83124244e2acf0d792b8c12b4362d44d837"),
    "nvidia-cuda-nvdisasm": ("13.2.86", "53606e719ecae07a2335f95902d5a1393a0cc1c317499ee7ffcf628a44385f2c"),
    "nvidia-cuda-nvrtc-cu12": ("12.9.86", "210cf05005a447e29214e9ce50851e83fc5f4358df8b453155d5e1918094dcb4"),
    "nvidia-nvfatbin-cu12": ("12.9.82", "16cbfbd12287508212f22f42dff6ff51cf9b528b906f57f615b080da16dea1ea"),
    "nvidia-cuda-runtime-cu12": ("12.9.79", "25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3"),
    "nvidia-cuda-nvcc-cu12": ("12.9.86", "5d6a0d32fdc7ea39917c20065614ae93add6f577d840233237ff08e9a38f58f0"),
    "nvidia-cuda-nvcc": ("13.0.88", "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"),
}


def fetch(key: str) -> Path:
    """Return the pinned wheel from the cache, downloading it once."""
    version, sha256 = PINS[key]
    project = key.split("==")[0]
    held = [path for path in (CACHE / sha256).glob("*.whl") if hashlib.sha256(path.read_bytes()).hexdigest() == sha256]
    if held:
        return held[0]
    with PyPISimple() as index:
        page = index.get_project_page(project)
        (package,) = [
            file for file in page.packages if file.version == version and file.digests.get("sha256") == sha256
        ]
        target = CACHE / sha256 / package.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            part = Path(folder) / package.filename
            index.download_package(package, part)
            part.replace(target)
    return target


def unpack(wheel: Path, folder: Path, pattern: str) -> list[Path]:
    """Unpack the members that match, flat names kept apart by their paths."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(pattern, name)]
        archive.extractall(folder, names)
    for name in names:
        (folder / name).chmod(0o755)
    return [folder / name for name in names]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of cuobjdump and nvdisasm 13.2.86."""
    folder = tmp_path_factory.mktemp("tools")
    found = [
        *unpack(fetch("nvidia-cuda-cuobjdump"), folder, r"bin/cuobjdump$"),
        *unpack(fetch("nvidia-cuda-nvdisasm"), folder, r"bin/nvdisasm$"),
    ]
    assert len({path.parent for path in found}) == 1
    return found[0].parent


def cuobjdump(tools: Path, library: Path) -> tuple[list[str], list[str]] | None:
    """Return the oracle's lists, (SASS, PTX) as sm_NN in order; None when it fails on a file of its own accord."""
    lists: list[list[str]] = []
    for option in ("--list-elf", "--list-ptx"):
        command = [tools / "cuobjdump", "-all", option, library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and "does not contain device code" not in done.stdout + done.stderr:
            return None
        lists.append(re.findall(r"\.(sm_\d+[af]?)\.(?:cubin|ptx)$", done.stdout, re.MULTILINE))
    return lists[0], lists[1]


def ours(library: Path) -> tuple[list[str], list[str]]:
    """Return our list as cuobjdump -all would write it: .nv_fatbin first, and SASS without its f."""
    entries = read_fatbins(memoryview(library.read_bytes()))
    shown = sorted(entries, key=lambda entry: entry.section != RUNNABLE)
    sass = [entry.architecture.sm.removesuffix("f") for entry in shown if entry.kind == "sass"]
    return sass, [entry.architecture.sm for entry in shown if entry.kind == "ptx"]


def compare(tools: Path, libraries: list[Path], *, oracle_fails_on: frozenset[str] = frozenset()) -> int:
    """Compare entry by entry, in order; return how many entries were compared."""
    compared = 0
    failures: set[str] = set()
    for library in libraries:
        oracle = cuobjdump(tools, library)
        if oracle is None:
            failures.add(library.name)
            continue
        assert ours(library) == oracle, library.name
        compared += len(oracle[0]) + len(oracle[1])
    assert failures <= oracle_fails_on
    return compared


def test_the_committed_sample_agrees_with_cuobjdump(tools: Path) -> None:
    assert compare(tools, [SAMPLES / "sample_cu129.so"]) == 6


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder ``nvidia`` of an unpacked NVRTC, nvFatbin and cudart 12.9."""
    folder = tmp_path_factory.mktemp("toolkit")
    for project in ("nvidia-cuda-nvrtc-cu12", "nvidia-nvfatbin-cu12", "nvidia-cuda-runtime-cu12"):
        unpack(fetch(project), folder, r"\.so(\.[\d.]+)?$")
    return folder / "nvidia"


def test_a_library_built_afresh_by_nvrtc_and_nvfatbin_agrees_with_cuobjdump(
    tools: Path, toolkit: Path, tmp_path: Path
) -> None:
    library = tmp_path / "fresh.so"
    subprocess.run([sys.executable, SAMPLES / "make_sample.py", library, toolkit], check=True, capture_output=True)
    assert compare(tools, [library]) == 6
    committed = read_fatbins(memoryview((SAMPLES / "sample_cu129.so").read_bytes()))
    fresh = read_fatbins(memoryview(library.read_bytes()))
    # The host part depends on the machine's gcc, the device code does not.
    assert [(e.kind, e.architecture, e.version, e.size) for e in fresh] == [
        (e.kind, e.architecture, e.version, e.size) for e in committed
    ]


@pytest.fixture(scope="module")
def bitsandbytes() -> Path:
    return fetch("bitsandbytes")


def test_bitsandbytes_for_seven_toolkits_agrees_with_cuobjdump(tools: Path, bitsandbytes: Path, tmp_path: Path) -> None:
    libraries = unpack(bitsandbytes, tmp_path, r"_cuda\d+\.so$")
    assert len(libraries) == 7
    # cuobjdump 13.2.86 gives up on this file ("Invalid ELF"); all its entries begin with an ELF header.
    compared = compare(tools, libraries, oracle_fails_on=frozenset({"libbitsandbytes_cuda121.so"}))
    assert compared == 5 * 55 + 62


def test_bitsandbytes_is_told_apart_by_toolkit(bitsandbytes: Path) -> None:
    found = inspect_wheel(bitsandbytes)
    drivers = {part.name.removeprefix("bitsandbytes.lib"): part.minimum_driver.driver for part in found.extensions}
    assert drivers["bitsandbytes_cuda128"] == Driver.parse("525.60.13")
    assert drivers["bitsandbytes_cuda132"] == Driver.parse("580.65.06")
    assert drivers["bitsandbytes_cpu"] is None
    assert found.cuda_majors == (11, 12, 13)
    last = next(part for part in found.extensions if part.name.endswith("cuda132"))
    relocatable = {
        (str(group.architecture), group.version) for group in last.code if not group.runnable and group.kind == "ptx"
    }
    assert (("12.0", (9, 2)) in relocatable, last.ptx) == (True, ()), "PTX in __nv_relfatbin runs nowhere"


def test_elf_facts_of_real_libraries_agree_with_pyelftools(bitsandbytes: Path, tmp_path: Path) -> None:
    for library in unpack(bitsandbytes, tmp_path, r"\.so$"):
        found = read_elf(memoryview(library.read_bytes()))
        with library.open("rb") as file:
            elf = ELFFile(file)
            tags = list(elf.get_section_by_name(".dynamic").iter_tags())
            needs = next(section for section in elf.iter_sections() if isinstance(section, GNUVerNeedSection))
            versions = {(need.name, aux.name) for need, auxiliaries in needs.iter_versions() for aux in auxiliaries}
            symbols = elf.get_section_by_name(".dynsym").iter_symbols()
            undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name}
        assert found.needed == tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")
        paths = [
            tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath
            for tag in tags
            if "PATH" in str(tag.entry.d_tag)
        ]
        assert [*found.rpath, *found.runpath] == [part for path in paths for part in path.split(":")]
        assert set(found.versions) == versions
        assert found.undefined == undefined


@pytest.fixture(scope="module")
def vllm_wheel() -> Path:
    return fetch("vllm")


@pytest.fixture(scope="module")
def vllm(vllm_wheel: Path) -> Inspection:
    return inspect_wheel(vllm_wheel, expectation=expectation_of(load_recipe("kimi-k3-0.27-cu129")))


def test_the_published_vllm_wheel_agrees_with_cuobjdump(tools: Path, vllm_wheel: Path, tmp_path: Path) -> None:
    small = r"vllm/(_flashkda_C|_flashmla_C|_flashmla_extension_C|_qutlass_C|_moe_C_stable_libtorch)\.abi3\.so$"
    assert compare(tools, unpack(vllm_wheel, tmp_path, small)) == 3 + 44 + 4 + 6 + 120


def test_the_published_vllm_wheel_has_eight_extensions_with_device_code(vllm: Inspection) -> None:
    assert {part.name for part in vllm.extensions if part.has_device_code} == {
        "vllm._C_stable_libtorch",
        "vllm._flashkda_C",
        "vllm._flashmla_C",
        "vllm._flashmla_extension_C",
        "vllm._moe_C_stable_libtorch",
        "vllm._qutlass_C",
        "vllm.vllm_flash_attn._vllm_fa2_C",
        "vllm.vllm_flash_attn._vllm_fa3_C",
    }
    abi = {part.name: part.torch for part in vllm.extensions}
    assert (abi["vllm._C_stable_libtorch"], abi["vllm._flashkda_C"]) == ("stable", "unstable")
    assert "vllm.vllm-rs" in abi
    flashkda = next(part for part in vllm.extensions if part.name == "vllm._flashkda_C")
    assert list(map(str, flashkda.sass)) == ["9.0a", "10.0f", "12.0f"]


def test_the_published_vllm_wheel_is_no_cuda_12_9_wheel_and_each_reason_is_named(vllm: Inspection) -> None:
    failed = [(finding.what, finding.why) for finding in vllm.findings if finding.status == "failed"]
    assert any(what == "cuda runtime" and "libcudart.so.13" in why for what, why in failed)
    for requirement in ("nvidia-cutlass-dsl[cu13]==4.6.0", "humming-kernels[cu13]==0.1.10"):
        assert any(what == "requirements" and requirement in why for what, why in failed)
    assert any(what == "driver ceiling" and "580.65.06" in why and "branch 575" in why for what, why in failed)
    assert vllm.minimum_driver.driver == Driver.parse("580.65.06")
    # Marlin's path: on Hopper and Blackwell these kernels exist as PTX for sm_80 alone.
    jit = [reason for reason in vllm.minimum_driver.reasons if reason.hard and reason.what == "PTX 9.0"]
    assert any(reason.files == ("vllm._moe_C_stable_libtorch",) and "PTX for 8.0" in reason.why for reason in jit)


@pytest.mark.timeout(60)
def test_the_published_vllm_wheel_passes_as_the_cuda_13_wheel_it_is(vllm_wheel: Path) -> None:
    expectation = Expectation(
        toolkit="13.0.2",
        architectures=(Architecture.parse("9.0a"), Architecture.parse("10.0f")),
        maximum_driver_branch=580,
        extensions=("vllm._C_stable_libtorch",),
    )
    found = inspect_wheel(vllm_wheel, expectation=expectation)
    assert [finding for finding in found.findings if finding.status == "failed"] == []


@pytest.mark.parametrize(("project", "cuda"), [("nvidia-cuda-nvcc-cu12", "12.9"), ("nvidia-cuda-nvcc", "13.0")])
def test_the_fact_tables_say_what_ptxas_says_of_itself(project: str, cuda: str, tmp_path: Path) -> None:
    (ptxas,) = unpack(fetch(project), tmp_path, r"bin/ptxas$")
    (tmp_path / "x.ptx").write_text(".version 99.9\n.target sm_90\n")
    answer = subprocess.run([ptxas, tmp_path / "x.ptx"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert f"current version is '{isa_of(cuda)}'" in answer.stdout + answer.stderr
    listed = subprocess.run([ptxas, "--help"], capture_output=True, text=True, check=True).stdout
    built = architectures_of(cuda)
    assert set(re.findall(r"'(sm_\d+[af]?)'", listed)) == {
        target.sm for target in (*built.plain, *built.specific, *built.family)
    }
    seen = next(row.source.seen for row in facts().ptx if row.cuda == tuple(map(int, cuda.split("."))))
    assert seen == PINS[project][0]
