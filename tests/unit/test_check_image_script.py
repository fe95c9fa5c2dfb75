"""dockerfiles/check_image.py as the image runs it: a Python with some packages and nothing of ours.

The packages lie in a folder of the test and are as small as can be; ``torch`` among them is a fake that only has a
version.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "dockerfiles" / "check_image.py"
# The program that the image starts, but for the user: it is somebody here even when the tests run as root.
SOMEBODY = """
import os, runpy, sys
os.getuid = lambda: 10001
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DRIVERLESS = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')"


@dataclasses.dataclass
class Site:
    """A folder of packages, and the program run with it as its only one."""

    root: Path

    @property
    def report(self) -> Path:
        return self.root / "checks.json"

    def install(self, name: str, version: str, *, code: str | None = None, metadata: str | None = None) -> None:
        """Lay out a distribution and, with ``code``, the module of its name."""
        site = self.root / "site"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(metadata if metadata is not None else f"Name: {name}\nVersion: {version}\n")
        if code is not None:
            (site / f"{name.replace('-', '_')}.py").write_text(code)

    def check(self, expectation: dict[str, Any], *, wrapper: Sequence[str] = ("-c", SOMEBODY)) -> tuple[int, str]:
        """Run the program; return its exit status and output."""
        whole = {"distributions": {}, "torch_cuda": None, "modules": [], **expectation}
        (self.root / "expectation.json").write_text(json.dumps(whole))
        argv = [sys.executable, "-S", *wrapper, SCRIPT, self.root / "expectation.json", self.report]
        environment = {
            "PYTHONPATH": str(self.root / "site"),
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "site").mkdir()
    return Site(tmp_path)


def statuses(site: Site) -> dict[str, str]:
    return {check["what"]: check["status"] for check in json.loads(site.report.read_bytes())}


def test_an_image_that_is_what_the_plan_says(site: Site) -> None:
    site.install("vllm", "1.0+cu129", code="")
    site.install("Odd_Name.Here", "2", code="")
    site.install("torch", "2", code="class version: cuda = '12.9'")
    site.install("cuda-probe", "3", code="")
    names = {"vllm": "1.0+cu129", "odd-name-here": "2", "torch": "2", "cuda-probe": "3"}
    status, output = site.check({"distributions": names, "torch_cuda": "12.9", "modules": ["vllm", "cuda_probe"]})
    assert status == 0, output
    assert set(statuses(site).values()) == {"passed"}
    assert list(statuses(site)) == ["user", "distributions", "torch.version.cuda", "import vllm", "import cuda_probe"]
    assert all(set(check) == {"what", "status", "why"} for check in json.loads(site.report.read_bytes()))
    assert "passed: distributions: the 4 of the locks" in output
    first = site.report.read_bytes()
    site.check({"distributions": names, "torch_cuda": "12.9", "modules": ["vllm", "cuda_probe"]})
    assert site.report.read_bytes() == first


DISTRIBUTIONS: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "one too many": ({"a": "1", "nvidia-cublas-cu13": "13"}, {"a": "1"}, "nvidia-cublas-cu13 is 13 instead of absent"),
    "one missing": ({}, {"a": "1"}, "a is absent instead of 1"),
    "another version": ({"a": "1.0"}, {"a": "1"}, "a is 1.0 instead of 1"),
    "another build": ({"torch": "2+cu130"}, {"torch": "2+cu129"}, "torch is 2+cu130 instead of 2+cu129"),
    "two faults": (
        {"a": "1", "b": "2"},
        {"a": "2", "c": "1"},
        "a is 1 instead of 2; b is 2 instead of absent; c is absent",
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_other_distributions_than_the_locked_ones(site: Site, name: str) -> None:
    there, expected, why = DISTRIBUTIONS[name]
    for distribution, version in there.items():
        site.install(distribution, version, code="class version: cuda = None")
    status, output = site.check({"distributions": expected})
    assert status == 1
    assert f"failed: distributions: {why}" in output
    assert not site.report.exists()


def test_a_distribution_in_two_versions_is_a_fault(site: Site) -> None:
    site.install("a", "1")
    site.install("a", "2")
    for version in ("1", "2"):
        status, output = site.check({"distributions": {"a": version}})
        assert (status, "a is 1 and 2 instead of" in output) == (1, True)


@pytest.mark.parametrize("metadata", ["", "Version: 1\n", "Summary: nothing else\n", "\n\nName: a\n"])
def test_a_distribution_without_a_name_is_a_fault(site: Site, metadata: str) -> None:
    site.install("a", "1", metadata=metadata)
    status, output = site.check({"distributions": {"a": "1"}})
    assert status == 1
    assert "nameless is" in output
    assert not site.report.exists()


@pytest.mark.parametrize(
    ("code", "cuda", "status", "why"),
    [
        ("class version: cuda = '12.9'", "12.9", 0, "is 12.9, the recipe says 12.9"),
        ("class version: cuda = None", None, 0, "is None, the recipe says None"),
        ("class version: cuda = '13.0'", "12.9", 1, "is 13.0, the recipe says 12.9"),
        ("class version: cuda = None", "12.9", 1, "is None, the recipe says 12.9"),
        ("class version: cuda = '12.9'", None, 1, "is 12.9, the recipe says None"),
        ("class version: pass", "12.9", 1, "AttributeError"),
        ("", "12.9", 1, "AttributeError"),
        ("raise OSError('libcudart.so.12: broken')", "12.9", 1, "OSError: libcudart.so.12: broken"),
        (DRIVERLESS, "12.9", 1, "ImportError: libcuda.so.1"),
        ("raise SystemExit(0)", "12.9", 1, "SystemExit: 0"),
    ],
)
def test_the_cuda_of_torch(site: Site, code: str, cuda: str | None, status: int, why: str) -> None:
    site.install("torch", "2", code=code)
    found, output = site.check({"distributions": {"torch": "2"}, "torch_cuda": cuda})
    assert found == status
    assert f"{'failed' if status else 'passed'}: torch.version.cuda: {why}" in output
    assert site.report.exists() == (status == 0)


def test_without_torch_its_cuda_is_not_run(site: Site) -> None:
    status, output = site.check({"torch_cuda": "12.9"})
    assert status == 0
    assert statuses(site)["torch.version.cuda"] == "not_run"
    assert "this image holds no torch" in output


BROKEN = {
    "absent": (None, "No module named 'extension'"),
    "a missing library": ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    "a driver's library elsewhere": ("raise ImportError('needs libcuda.so.1')", "needs libcuda.so.1"),
    "a symbol": ("raise ImportError('undefined symbol: x')", "undefined symbol: x"),
    "an error of its own": ("1 / 0", "ZeroDivisionError: division by zero"),
    "a syntax error": ("def", "SyntaxError"),
    "an end": ("import sys; sys.exit(0)", "SystemExit: 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_imported_is_named(site: Site, name: str) -> None:
    code, why = BROKEN[name]
    if code is not None:
        site.install("extension", "1", code=code)
    site.install("good", "1", code="")
    expected = {"good": "1", **({"extension": "1"} if code is not None else {})}
    status, output = site.check({"distributions": expected, "modules": ["extension", "good"]})
    assert status == 1
    (line,) = [line for line in output.splitlines() if line.startswith("failed:")]
    assert line.startswith("failed: import extension: ")
    assert why in line
    assert "passed: import good: imported" in output, "every check is made before the program ends"
    assert not site.report.exists()


@pytest.mark.parametrize("library", ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"])
def test_an_extension_that_lacks_only_the_driver_is_not_run_and_no_fault(site: Site, library: str) -> None:
    site.install("extension", "1", code=DRIVERLESS.replace("libcuda.so.1", library))
    status, output = site.check({"distributions": {"extension": "1"}, "modules": ["extension"]})
    assert status == 0, output
    assert statuses(site)["import extension"] == "not_run"
    assert f"not_run: import extension: {library}" in output
    assert "the driver brings it" in output


def test_a_real_extension_without_its_driver_library(site: Site) -> None:
    """The dynamic linker's own words, from a library that needs one that is nowhere."""
    source = site.root / "empty.c"
    source.write_text("void unused(void) {}\n")
    subprocess.run(["cc", "-shared", "-o", site.root / "libcuda.so.1", source, "-Wl,-soname,libcuda.so.1"], check=True)
    target = site.root / "site" / "real.so"
    subprocess.run(
        ["cc", "-shared", "-o", target, "-Wl,--no-as-needed", site.root / "libcuda.so.1", source], check=True
    )
    (site.root / "libcuda.so.1").unlink()
    status, output = site.check({"modules": ["real"]})
    assert status == 0, output
    assert "not_run: import real: libcuda.so.1: cannot open shared object file" in output


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be root")
def test_root_is_refused(site: Site) -> None:
    status, output = site.check({}, wrapper=())
    assert (status, "failed: user: runs as uid 0" in output) == (1, True)
    assert not site.report.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root is refused")
def test_somebody_else_needs_no_wrapper(site: Site) -> None:
    assert site.check({}, wrapper=())[0] == 0


def test_the_failed_lines_are_those_that_the_image_stage_looks_for(site: Site) -> None:
    from cufallback.errors import CommandError
    from cufallback.image.build import _failure

    status, output = site.check({"distributions": {"a": "1"}, "modules": ["b"]})
    assert status == 1
    log = site.root / "image.log"
    log.write_text("".join(f"#9 0.{number} {line}\n" for number, line in enumerate(output.splitlines())))
    error = _failure(CommandError("docker exited with 1", remedy="read"), log)
    assert "distributions: a is absent instead of 1" in error.reason
    assert "import b: No module named 'b'" in error.reason


def test_the_program_needs_nothing_but_python() -> None:
    lines = [line.split() for line in SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert {words[1].partition(".")[0] for words in lines} <= set(sys.stdlib_module_names)
