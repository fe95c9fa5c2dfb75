"""Every command that README and docs show is run: here, or where COVERED says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])

# Command → the file that runs it, and the words there that do.
COVERED = {
    "python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s build-cu129 -- --recipe rehearsal": (
        ".ci/run",
        "python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s build-cu129 -- --recipe rehearsal",
    ),
    "python3 -m venv .venv && .venv/bin/pip install nox uv": (
        ".ci/run",
        "python3 -m venv .venv && .venv/bin/pip install nox uv",
    ),
    ".venv/bin/nox": ("tests/unit/test_noxfile.py", "def test_bare_nox_checks_and_never_builds"),
    ".venv/bin/nox -s tests": (".ci/run", ".venv/bin/nox -s tests"),
    ".venv/bin/nox -s verify -- dist/rehearsal/*/": (".ci/run", ".venv/bin/nox -s verify -- dist/rehearsal/*/"),
}

# Commands that the tests below run, each by a test that names it.
RUN_HERE = {
    ".venv/bin/pip install .",
    ".venv/bin/cufallback recipe list",
    ".venv/bin/cufallback plan --recipe rehearsal",
    ".venv/bin/cufallback recipe show kimi-k3-cu129",
    ".venv/bin/cufallback inspect vllm-0.28.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl",
    ".venv/bin/cufallback source harvest vllm-source-tree",
    ".venv/bin/nox -s lock -- --recipe rehearsal",
    ".venv/bin/nox -s lock -- --recipe rehearsal --check",
}


def commands(page: Path) -> list[str]:
    """Return the command lines of a page's sh and console blocks."""
    found: list[str] = []
    blocks = re.findall(r"^```(sh|console|bash)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for kind, body in blocks:
        lines = body.splitlines()
        found += [line.removeprefix("$ ") for line in lines if kind != "console" or line.startswith("$ ")]
    return found


def cufallback(command: str, cwd: Path, **environment: str) -> str:
    """Run a README's cufallback or nox command with this environment's interpreter; return its stdout."""
    assert command in RUN_HERE
    words = re.sub(r"^\.venv/bin/(?:cufallback|nox -s (?=lock))", "", command).replace("lock -- ", "lock ").split()
    done = subprocess.run(
        [sys.executable, "-m", "cufallback", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "build"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_shown_is_run_somewhere() -> None:
    shown = {command for page in PAGES for command in commands(page)}
    assert shown == COVERED.keys() | RUN_HERE
    own = Path(__file__).read_text()
    for command in RUN_HERE:
        assert len(re.findall(rf'[" ]{re.escape(command)}"', own)) > 1, f"no test here runs {command}"


@pytest.mark.parametrize("command", COVERED)
def test_what_runs_a_command_elsewhere_is_still_there(command: str) -> None:
    file, words = COVERED[command]
    assert words in (CHECKOUT / file).read_text()


def test_recipe_list(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback recipe list", tmp_path)
    assert re.search(r"^\* kimi-k3-cu129 +production", text, re.MULTILINE)
    assert re.search(r"^  rehearsal +rehearsal", text, re.MULTILINE)


def test_recipe_show(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback recipe show kimi-k3-cu129", tmp_path)
    assert "2cf0a6915ce544dc493a0990f2ea38d81601128a" in text


def test_plan(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback plan --recipe rehearsal", tmp_path)
    assert "prefetch" in text
    assert "vllm 0.27.1" in text
    assert not (tmp_path / "dist").exists(), "a plan runs nothing"


def test_inspect(tmp_path: Path) -> None:
    command = ".venv/bin/cufallback inspect vllm-0.28.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(tmp_path / command.split()[-1], "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr(
            "vllm-0.28.0+cu129.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0+cu129\n"
        )
        wheel.writestr(
            "vllm-0.28.0+cu129.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
        )
        wheel.writestr("vllm-0.28.0+cu129.dist-info/RECORD", "")
    assert "vllm" in cufallback(command, tmp_path)


@pytest.mark.network
def test_source_harvest(tmp_path: Path, extracted: Callable[[str], Path]) -> None:
    (tmp_path / "vllm-source-tree").symlink_to(extracted("0.27.1"))
    text = cufallback(".venv/bin/cufallback source harvest vllm-source-tree", tmp_path)
    for name in ("cutlass", "deepgemm", "flashkda", "flashmla", "vllm-flash-attn", "harmony"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert re.search(r"^flashmla .* a8f794d1251c", text, re.MULTILINE), "the commit that 0.27.1 asks for"


@pytest.mark.slow
@pytest.mark.network
def test_lock(tmp_path: Path) -> None:
    for folder in ("recipes", "locks"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    committed = (tmp_path / "locks/rehearsal/build.txt").read_bytes()
    data = {"CUFALLBACK_DATA": str(tmp_path)}
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal --check", tmp_path, **data)
    (tmp_path / "locks/rehearsal/build.txt").unlink()
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal", tmp_path, **data)
    assert (tmp_path / "locks/rehearsal/build.txt").read_bytes() == committed


@pytest.mark.slow
@pytest.mark.network
def test_pip_install(tmp_path: Path) -> None:
    clone, command = tmp_path / "clone", ".venv/bin/pip install ."
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, clone / name)
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=clone, check=True)
    subprocess.run([*command.split(), "--quiet"], cwd=clone, check=True)
    done = subprocess.run([clone / ".venv/bin/cufallback", "--version"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.startswith(b"cufallback ")
    assert not list((clone / "build").rglob("lib")), "a build of the wheel leaves nothing in the import root"
