"""``python -m cuda_probe`` as a user runs it, against a fake driver and a fake device library.

The fakes are two small C libraries that answer as told by FAKE_* variables; the command, its child processes and
everything between them is real. No GPU is simulated: the fake library computes on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cuda_probe
from cuda_probe.diagnosis import STATUSES

FAKE_DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *get(const char *name, const char *other) { const char *v = getenv(name); return v ? v : other; }
int cuDriverGetVersion(int *v) { *v = atoi(get("FAKE_VERSION", "12090")); return 0; }
int cuInit(unsigned f) {
  if (!strcmp(get("FAKE_INIT", ""), "crash")) abort();
  puts("chatter, not JSON");
  return atoi(get("FAKE_INIT", "0"));
}
int cuDeviceGetCount(int *n) { *n = atoi(get("FAKE_GPUS", "1")); return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *t, int n, int d) { snprintf(t, n, "Fake GPU %d", d); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  int major, minor;
  sscanf(get("FAKE_CAPABILITY", "9.0"), "%d.%d", &major, &minor);
  *v = a == 75 ? major : minor;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = (size_t)80 << 30; return 0; }
int cuGetErrorName(int c, const char **t) { *t = "CUDA_ERROR_FAKE"; return 0; }
"""
FAKE_LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuda_probe_runtime_version(void) { if (getenv("FAKE_LIBRARY_CRASH")) abort(); return 12090; }
int cuda_probe_run(int device, int use_ptx, float a, const float *x, float *y, unsigned n, char *log, unsigned size,
                   const char **stage) {
  if (!getenv("CUDA_CACHE_DISABLE") || getenv("CUDA_FORCE_PTX_JIT")) return 4712;
  const char *what = getenv(use_ptx ? "FAKE_PTX" : "FAKE_SASS");
  *stage = "load the image";
  if (what && !strcmp(what, "crash")) *(volatile int *)0 = 1;
  if (what && !strcmp(what, "hang")) sleep(600);
  if (what && atoi(what)) { snprintf(log, size, "the compiler's words"); return atoi(what); }
  for (unsigned i = 0; i < n; i++) y[i] += a * x[i];
  if (what && !strcmp(what, "wrong")) y[7] += 1;
  *stage = "done";
  return 0;
}
"""
BUILD = {
    "version": "1.0.0+cu129",
    "toolkit": "12.9",
    "nvrtc": "12.9.86",
    "architectures": ["9.0a", "10.0a"],
    "ptx": {"target": "8.0", "isa": "8.8"},
    "runtime": "nvidia-cuda-runtime-cu12==12.9.79",
}
Probe = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as installed, with the fake library, and the fake driver beside it."""
    top = tmp_path_factory.mktemp("site")
    source = Path(next(iter(cuda_probe.__path__)))
    (top / "cuda_probe").mkdir()
    for name in ("__init__.py", "__main__.py", "child.py", "diagnosis.py"):
        shutil.copy(source / name, top / "cuda_probe" / name)
    (top / "cuda_probe/build.json").write_text(json.dumps(BUILD))
    (top / "driver").mkdir()
    for target, text in (("driver/libcuda.so.1", FAKE_DRIVER), ("cuda_probe/libcuda_probe.so", FAKE_LIBRARY)):
        (top / "fake.c").write_text(text)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", top / target, top / "fake.c"], check=True)
    return top


@pytest.fixture
def probe(site: Path) -> Probe:
    """``probe(FAKE_X=…, driver=True, timeout=…)``: run the command; give report and human text."""

    def run(
        *, driver: bool = True, timeout: str = "60", folder: Path = site, **fakes: str
    ) -> tuple[dict[str, Any], str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | fakes
        environment["LD_LIBRARY_PATH"] = str(site / "driver") if driver else ""
        outputs = []
        for form in (["--json"], []):
            done = subprocess.run(
                [sys.executable, "-m", "cuda_probe", "--timeout", timeout, *form],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stderr == ""
            outputs.append((done.returncode, done.stdout))
        report: dict[str, Any] = json.loads(outputs[0][1])
        assert outputs[0][0] == outputs[1][0] == report["exit_code"] == STATUSES[report["status"]][0]
        return report, outputs[1][1]

    return run


def test_a_gpu_that_runs_both_images_passes(probe: Probe) -> None:
    report, text = probe(FAKE_GPUS="2", CUDA_FORCE_PTX_JIT="1")
    assert report["status"] == "passed"
    assert [gpu["name"] for gpu in report["gpus"]] == ["Fake GPU 0", "Fake GPU 1"]
    assert [(gpu["sass"]["status"], gpu["ptx"]["status"]) for gpu in report["gpus"]] == [("passed", "passed")] * 2
    assert report["gpus"][0]["sass"]["image"] == "SASS 9.0a"
    assert (report["driver_version"], report["runtime_version"]) == (12090, 12090)
    assert report["driver_library"].endswith("driver/libcuda.so.1")
    assert "GPU 1: Fake GPU 1, 9.0, 81920 MiB" in text
    assert "passed: code of CUDA 12.9 runs on 2 GPU(s)" in text
    assert "remedy" not in text


@pytest.mark.parametrize(
    ("fakes", "status", "words"),
    [
        ({"FAKE_INIT": "100"}, "no_gpu", "no GPU"),
        ({"FAKE_GPUS": "0"}, "no_gpu", "no GPU"),
        ({"FAKE_INIT": "803"}, "driver_mismatch", "different driver versions"),
        ({"FAKE_INIT": "804"}, "driver_mismatch", "forward compatibility"),
        ({"FAKE_INIT": "802"}, "driver_mismatch", "fabric"),
        ({"FAKE_INIT": "4711"}, "failed", "CUDA error 4711 (CUDA_ERROR_FAKE)"),
        ({"FAKE_INIT": "crash"}, "failed", "killed by signal 6"),
        ({"FAKE_VERSION": "11080"}, "driver_too_old", "too old for the CUDA 12.9 runtime"),
        ({"FAKE_PTX": "222"}, "driver_too_old", "cannot compile PTX"),
        ({"FAKE_SASS": "209"}, "failed", "no kernel image"),
        ({"FAKE_SASS": "wrong"}, "failed", "1 wrong numbers: element 7"),
        ({"FAKE_SASS": "crash"}, "failed", "killed by signal 11"),
        ({"FAKE_LIBRARY_CRASH": "1"}, "broken_install", "killed by signal 6"),
    ],
)
def test_each_fault_has_its_status_sentence_and_remedy(
    probe: Probe, fakes: dict[str, str], status: str, words: str
) -> None:
    report, text = probe(**fakes)
    assert report["status"] == status
    assert words in report["reason"]
    assert f"{status}: {report['reason']}\nremedy: {report['remedy']}\n" in text


def test_sass_and_ptx_are_proved_apart(probe: Probe) -> None:
    report, text = probe(FAKE_PTX="222")
    (gpu,) = report["gpus"]
    assert gpu["sass"]["status"] == "passed"
    assert (gpu["ptx"]["status"], gpu["ptx"]["code"], gpu["ptx"]["stage"]) == ("failed", 222, "load the image")
    assert gpu["ptx"]["jit_log"] == "the compiler's words"
    assert "the compiler's words" in text


def test_a_gpu_without_fitting_sass_is_proved_by_ptx(probe: Probe) -> None:
    report, _text = probe(FAKE_CAPABILITY="8.6")
    (gpu,) = report["gpus"]
    assert gpu["sass"] == {"status": "not_run", "why": "no SASS for compute capability 8.6 in this build"}
    assert (gpu["ptx"]["status"], report["status"]) == ("passed", "passed")


def test_a_gpu_older_than_the_ptx_can_run_nothing(probe: Probe) -> None:
    report, _text = probe(FAKE_CAPABILITY="7.5")
    assert (report["gpus"][0]["sass"]["status"], report["gpus"][0]["ptx"]["status"]) == ("not_run", "not_run")
    assert (report["status"], "no kernel image" in report["reason"]) == ("failed", True)


@pytest.mark.timeout(60)
def test_a_hang_ends_at_the_timeout(probe: Probe) -> None:
    report, _text = probe(FAKE_PTX="hang", timeout="2")
    assert report["gpus"][0]["ptx"]["why"] == "the process died: no answer within 2 s"
    assert report["gpus"][0]["sass"]["status"] == "passed"


def test_without_a_driver_it_says_which_library_is_missing(probe: Probe) -> None:
    try:
        import ctypes

        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a driver")
    except OSError:
        pass
    report, text = probe(driver=False)
    assert report["status"] == "no_driver"
    assert "libcuda.so.1" in report["reason"]
    assert "container toolkit" in text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("build.json", "build.json is missing"),
        ("libcuda_probe.so", "libcuda_probe.so"),
        ("truncated", "file too short"),
    ],
)
def test_a_broken_installation_is_named(probe: Probe, site: Path, tmp_path: Path, damage: str, words: str) -> None:
    shutil.copytree(site, tmp_path / "site")
    if damage == "truncated":
        (tmp_path / "site/cuda_probe/libcuda_probe.so").write_bytes(b"\x7fELF")
    else:
        (tmp_path / "site/cuda_probe" / damage).unlink()
    report, _text = probe(folder=tmp_path / "site")
    assert report["status"] == "broken_install"
    assert words in report["reason"]


def test_the_help_lists_every_exit_code(site: Path) -> None:
    command = [sys.executable, "-m", "cuda_probe", "--help"]
    text = subprocess.run(command, cwd=site, capture_output=True, text=True, check=True).stdout
    for status, (code, meaning) in STATUSES.items():
        assert f"{code}  {status}" in text
        assert meaning in text
