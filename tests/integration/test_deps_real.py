"""The real index and real wheels: a ban on what it serves, and the build wheelhouse at work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cufallback.deps.lock import make_locks
from cufallback.deps.lockfile import parse_lock, wanted
from cufallback.deps.wheelhouse import fill
from cufallback.download import find_mirrors
from cufallback.errors import PolicyError
from cufallback.process import LocalRunner
from cufallback.progress import Silent
from cufallback.recipe import Recipe, load_recipe
from cufallback.resources import data_root
from cufallback.store import Store
from cufallback.wheel.environment import find_interpreter, find_uv

pytestmark = pytest.mark.network


def test_cuda_13_from_the_real_index_is_banned_with_its_chain(tmp_path: Path) -> None:
    data = load_recipe("rehearsal").model_dump(by_alias=True)
    data["deps"] |= {"build": {"add": ["cuda-python==13.0.2", "cuda-toolkit[cudart]==13.0.2"]}, "index": []}
    given = Recipe.model_validate(data)
    with pytest.raises(PolicyError) as caught:
        make_locks(given, tmp_path, mirrors=(), workdir=tmp_path / "w", runner=LocalRunner(), progress=Silent())
    assert "→ cuda-toolkit)" in caught.value.reason
    assert "cuda-toolkit → nvidia-cuda-runtime)" in caught.value.reason


WORKS = """
import ctypes, importlib.metadata, pathlib, subprocess, sys, torch
print(torch.__version__, float(torch.ones(3).sum()))
cmake = pathlib.Path(sys.executable).with_name("cmake")
print(subprocess.run([cmake, "--version"], capture_output=True, text=True, check=True).stdout.split()[2])
nvrtc = next(pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
major, minor = ctypes.c_int(), ctypes.c_int()
assert ctypes.CDLL(str(nvrtc)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
print(major.value, minor.value, importlib.metadata.version("nvidia-cuda-nvrtc-cu12"))
"""


@pytest.mark.slow
def test_the_build_wheelhouse_installs_offline_and_works(tmp_path: Path, test_cache: Path) -> None:
    lock, folder = data_root() / "locks/rehearsal/build.txt", tmp_path / "house ä"
    rehearsal = load_recipe("rehearsal")
    locked = parse_lock(lock.read_text(), rehearsal, "build", where=str(lock))
    store = Store(test_cache / "store")
    fill(wanted(locked, rehearsal), folder=folder, store=store, mirrors=find_mirrors(), progress=Silent())
    uv, python = find_uv(), tmp_path / "env/bin/python"
    environment = {"PATH": "/usr/bin:/bin", "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    interpreter = find_interpreter(rehearsal.python.version, LocalRunner())
    subprocess.run([uv, "venv", "--quiet", "--no-config", "-p", interpreter, tmp_path / "env"], check=True)
    sync = [uv, "pip", "sync", "--quiet", "--offline", "--no-config", "--no-index", "--require-hashes"]
    subprocess.run([*sync, "--find-links", folder, "-p", python, lock], check=True, env=environment)
    done = subprocess.run([python, "-W", "ignore", "-c", WORKS], capture_output=True, text=True, check=True)
    pins = {item.name: item.version for item in locked.distributions}
    assert done.stdout.splitlines() == ["2.13.0+cpu 3.0", pins["cmake"], "12 9 12.9.86"]
    assert pins["nvidia-cuda-nvrtc-cu12"] == "12.9.86"
