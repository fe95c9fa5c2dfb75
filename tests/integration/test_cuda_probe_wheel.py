"""The cuda-probe built for real by NVRTC and nvFatbin 12.9, read back by NVIDIA's own tool, and run."""

from __future__ import annotations

import csv
import ctypes
import io
import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from wheel_rooms import EPOCH, NONE, PROBE, THIS, TOOLS, House, build, granted, house

from cufallback.errors import BuildError
from cufallback.process import LocalRunner
from cufallback.resources import probe_folder
from cufallback.wheel.environment import Environment, find_uv
from cufallback.wheel.isolate import Isolation
from cufallback.wheel.normalize import repack

__all__ = ["granted", "house"]
pytestmark = [pytest.mark.network, pytest.mark.slow]

NAME = "cufallback_cuda_probe-1.0.0+cu129-py3-none-manylinux_2_17_x86_64.whl"
VARIABLES = {"CUFALLBACK_PROBE_ARCHITECTURES": "9.0a 10.0a 10.3a", "CUFALLBACK_PROBE_PTX": "8.0"}


@pytest.fixture(scope="module")
def environment(house: Callable[..., House], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return house(PROBE).environment(tmp_path_factory.mktemp("e") / "env")


@pytest.fixture(scope="module")
def wheel(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("p")
    built = build(probe_folder(), environment, work, NONE, {**VARIABLES, "CUFALLBACK_PROBE_PTX_ISA": "8.8"})
    return repack(built.path, work / "repacked", epoch=EPOCH, extra_dist_info={})


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(zipfile.ZipFile(wheel).extract("cuda_probe/libcuda_probe.so", tmp_path_factory.mktemp("l")))


def test_it_is_the_same_from_anywhere(
    house: Callable[..., House], wheel: Path, granted: Isolation, tmp_path: Path
) -> None:
    work = tmp_path / "\u00fcber there, with spaces"
    built = build(probe_folder(), house(PROBE).environment(work / "an environment"), work, granted, VARIABLES)
    again = repack(built.path, work / "repacked", epoch=EPOCH, extra_dist_info={})
    assert again.read_bytes() == wheel.read_bytes()


def test_the_wheel_states_what_it_is(wheel: Path) -> None:
    assert wheel.name == NAME
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = "cufallback_cuda_probe-1.0.0+cu129.dist-info"
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        facts = json.loads(archive.read("cuda_probe/build.json"))
        rows = list(csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())))
    assert [name for name in names if not name.startswith("cufallback")] == [
        f"cuda_probe/{name}"
        for name in (
            *("__init__.py", "__main__.py", "build.json", "child.py", "diagnosis.py", "libcuda_probe.so", "py.typed"),
        )
    ]
    assert metadata.get_all("Requires-Dist") == ["nvidia-cuda-runtime-cu12==12.9.79"]
    assert facts == {
        "architectures": ["9.0a", "10.0a", "10.3a"],
        "nvrtc": "12.9.86",
        "ptx": {"isa": "8.8", "target": "8.0"},
        "runtime": "nvidia-cuda-runtime-cu12==12.9.79",
        "toolkit": "12.9",
        "version": "1.0.0+cu129",
    }
    assert len(rows) == len(names)


def test_nvidias_own_tool_lists_the_images(house: Callable[..., House], library: Path, tmp_path: Path) -> None:
    tools = house(TOOLS).environment(tmp_path / "tools")
    (cuobjdump,) = tools.folder.rglob("bin/cuobjdump")
    for option, expected in (("--list-elf", ["sm_90a", "sm_100a", "sm_103a"]), ("--list-ptx", ["sm_80"])):
        done = LocalRunner().run([cuobjdump, option, library])
        assert re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)", done.output) == expected, done.output
    ptx = LocalRunner().run([cuobjdump, "--dump-ptx", library]).output
    assert ".version 8.8" in ptx
    assert ".target sm_80" in ptx
    assert "cuda_probe_axpy" in ptx


def test_it_needs_the_runtime_of_the_toolkit_and_an_old_glibc(library: Path) -> None:
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        (runpath,) = (tag.runpath for tag in dynamic.iter_tags("DT_RUNPATH"))
        sections = {section.name for section in elf.iter_sections()}
    assert needed - {"libc.so.6"} == {"libcudart.so.12"}
    assert runpath == "$ORIGIN/../nvidia/cuda_runtime/lib"
    assert {".nv_fatbin", ".nvFatBinSegment"} <= sections
    assert ".note.gnu.build-id" not in sections


@pytest.fixture(scope="module")
def installed(wheel: Path, house: Callable[..., House], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the probe and the runtime that it requires."""
    folder = tmp_path_factory.mktemp("i") / "venv"
    uv = [find_uv(), "--no-config", "--offline"]
    LocalRunner().run([*uv, "venv", "--quiet", "--python", THIS, folder])
    LocalRunner().run(
        [
            *(*uv, "pip", "install", "--quiet", "--no-index", "--find-links", house(PROBE).wheelhouse),
            *("--python", folder / "bin/python", wheel),
        ]
    )
    return folder


def run_probe(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [folder / "bin/python", "-I", "-m", "cuda_probe", "--json"], capture_output=True, text=True, check=False
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (report["exit_code"], "")
    return report


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_it_runs_here_and_says_what_this_machine_lacks(installed: Path) -> None:
    report = run_probe(installed)
    assert report["runtime_version"] == 12090  # the real CUDA 12.9 runtime was loaded through our library
    if not has_driver():
        assert (report["status"], report["exit_code"]) == ("no_driver", 3)
    for gpu in report["gpus"]:
        assert gpu["ptx"]["status"] == "passed"


@pytest.mark.parametrize("image", ["sass", "ptx"])
def test_the_device_code_reports_a_missing_driver_by_number(installed: Path, image: str) -> None:
    if has_driver():
        pytest.skip("this machine has a driver")
    (child,) = installed.rglob("cuda_probe/child.py")
    done = LocalRunner().run([installed / "bin/python", "-I", child, "run", "0", image])
    assert json.loads(done.output) == {"code": 35, "stage": "cudaSetDevice", "jit_log": ""}


def test_without_the_runtime_it_names_the_library(installed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(installed, tmp_path / "venv", symlinks=True)
    shutil.rmtree(next(copy.rglob("site-packages/nvidia")))
    report = run_probe(copy)
    assert (report["status"], report["exit_code"]) == ("broken_install", 8)
    assert "libcudart.so.12" in report["reason"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CUFALLBACK_PROBE_ARCHITECTURES": "9.9a"}, "sm_99a"),
        ({"CUFALLBACK_PROBE_PTX": "1.1"}, "compute_11"),
        ({"CUFALLBACK_PROBE_PTX_ISA": "8.7"}, "emits PTX ISA 8.8, expected 8.7"),
    ],
)
def test_a_wrong_order_stops_the_build_with_a_reason(
    environment: Environment, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        build(probe_folder(), environment, tmp_path, NONE, variables)


def test_other_architectures_can_be_ordered(environment: Environment, tmp_path: Path) -> None:
    order = {"CUFALLBACK_PROBE_ARCHITECTURES": "8.0 10.0f", "CUFALLBACK_PROBE_PTX": "9.0"}
    built = build(probe_folder(), environment, tmp_path, NONE, order)
    facts = json.loads(zipfile.ZipFile(built.path).read("cuda_probe/build.json"))
    assert (facts["architectures"], facts["ptx"]["target"]) == (["8.0", "10.0f"], "9.0")
