"""Real vLLM: the same wheel from two places, and byte-stable after the repack."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from wheel_rooms import EPOCH, NONE, House, build, granted, house

from cufallback.process import LocalRunner
from cufallback.wheel.environment import find_interpreter
from cufallback.wheel.isolate import Isolation
from cufallback.wheel.normalize import repack

__all__ = ["granted", "house"]
pytestmark = [pytest.mark.network, pytest.mark.slow]

# PyTorch's own index has this build for several Pythons, the mirror of a closed network often for one.
PYTHON = "3.11"
TARGET = {"VLLM_TARGET_DEVICE": "tpu"}  # its extensions need neither a CUDA torch nor GitHub


def test_vllm_is_the_same_from_anywhere(
    extracted: Callable[[str], Path], house: Callable[..., House], granted: Isolation, tmp_path: Path
) -> None:
    tree = extracted("0.27.1")
    find_interpreter(PYTHON, LocalRunner())
    lines = [line.partition("#")[0].strip() for line in (tree / "requirements/build/cpu.txt").read_text().splitlines()]
    rooms = house((*(line for line in lines if line), "build==1.6.1"), PYTHON)

    short = tmp_path / "a"
    first = build(tree, rooms.environment(short / "e"), short, granted, TARGET)

    long = tmp_path / "another folder with a long name, sp\u00e4ces and \u00fcmlauts"
    environment = rooms.environment(long / "the environment")
    second = build(tree, environment, long, granted, TARGET)
    assert second.path.read_bytes() == first.path.read_bytes()

    # CMake resolves links; only a project that uses it shows whether the fixed folder holds any that matter.
    third = build(tree, environment, long, NONE, TARGET)
    assert third.path.read_bytes() == first.path.read_bytes()

    one = repack(first.path, short / "repacked", epoch=EPOCH, extra_dist_info={})
    two = repack(third.path, long / "repacked", epoch=EPOCH, extra_dist_info={})
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert sorted(libraries) == ["vllm/fs_io_C.abi3.so", "vllm/spinloop.abi3.so"]
    for data in libraries.values():
        assert bytes(tmp_path) not in data
        assert bytes(environment.base_prefix) + b"/" not in data or str(environment.base_prefix) == "/usr"
        assert b".note.gnu.build-id" not in data
