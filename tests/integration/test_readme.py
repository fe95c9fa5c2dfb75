"""Every command that README and docs show is run: here, or where COVERED says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# The commands of docs/verify.md run in test_verify_docs.py.
PAGES = sorted({*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")} - {CHECKOUT / "docs/verify.md"})

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

# Command → why nothing here can run it.
NOT_RUN = {
    'docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v "$HOME/.cache/huggingface:/hf" -e HF_HOME=/hf '
    "-e VLLM_ENABLE_CUDA_COMPATIBILITY=1 vllm/vllm-openai:v0.28.0 MODEL": "a GPU with an older driver, and 10 GB",
    'docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v "$HOME/.cache/huggingface:/hf" -e HF_HOME=/hf '
    "vllm/vllm-openai:v0.28.0-cu129 MODEL": "a GPU with an older driver, and 10 GB",
}

# Commands that the tests below run, each by a test that names it.
RUN_HERE = {
    "python3 -m venv probe",
    "probe/bin/pip install wheels/cufallback_cuda_probe-*.whl",
    "probe/bin/pip install --no-index --find-links wheelhouse wheels/cufallback_cuda_probe-*.whl",
    "probe/bin/python -m cuda_probe",
    "probe/bin/python -m cuda_probe --json",
    "cp -r dist/rehearsal/BUILD-ID runtime",
    "cp -rL .cufallback/*/BUILD-ID/prefetch/wheelhouse/runtime runtime/wheelhouse",
    "uv venv --python 3.11 runtime/env",
    "uv pip install --python runtime/env --offline --no-index -r runtime/pylock.toml",
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
        lines = re.sub(r"\\\n\s*", "", body).splitlines()
        found += [line.removeprefix("$ ") for line in lines if kind != "console" or line.startswith("$ ")]
    return found


JQ = [command for page in PAGES for command in commands(page) if command.startswith("jq ")]


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
    shown = {command for page in PAGES for command in commands(page)} - set(JQ)
    assert shown == COVERED.keys() | NOT_RUN.keys() | RUN_HERE
    own = Path(__file__).read_text()
    for command in RUN_HERE:
        assert len(re.findall(rf'[" ]{re.escape(command)}"', own)) > 1, f"no test here runs {command}"


@pytest.mark.parametrize("command", COVERED)
def test_what_runs_a_command_elsewhere_is_still_there(command: str) -> None:
    file, words = COVERED[command]
    assert words in (CHECKOUT / file).read_text()


def test_recipe_list(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback recipe list", tmp_path)
    status = tomllib.loads((CHECKOUT / "recipes/kimi-k3-cu129.toml").read_text())["recipe"]["status"]
    assert re.search(rf"^\* kimi-k3-cu129 +{status}", text, re.MULTILINE)
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


def test_the_pytest_words_of_the_contributing_page_select_tests() -> None:
    (words,) = re.findall(r"nox -s tests -- (.+?)`", (CHECKOUT / "CONTRIBUTING.md").read_text())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words.split()]
    assert subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=False).returncode == 0


# What the pages show of a finished build. `.ci/run` makes one before it comes to these tests.


@pytest.fixture
def build() -> Path:
    """The newest rehearsal in this checkout's dist/."""
    found = sorted(CHECKOUT.glob("dist/rehearsal/*/record.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail("continuous integration builds the rehearsal before the tests")
        pytest.skip("no build in dist/: run `nox -s build-cu129 -- --recipe rehearsal` first")
    return found[-1].parent


def shell(command: str, cwd: Path, *, expect: int = 0) -> str:
    """Run a shown command by a shell, with this environment's programs first; return its stdout."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", JQ)
def test_jq_finds_something_in_a_real_record(build: Path, command: str) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    text = shell(command, build)
    assert text.strip() not in ("", "null", "{}", "[]")
    if "-r" not in command.split():  # one object or a stream of them: each name that is asked for has a value
        asked = re.search(r"\{([\w, ]+)\}", command)
        first, _ = json.JSONDecoder().raw_decode(text)
        assert not asked or (set(asked[1].split(", ")) == first.keys() and None not in first.values())
    else:
        assert "null:" not in text
        assert not text.startswith("null ")


def test_there_is_an_expression_for_each_part_of_the_record_that_readers_look_for() -> None:
    text = "\n".join(JQ)
    for part in ("commit", "tree_sha256", ".diff", ".contracts", ".distributions", ".toolchain", ".extensions"):
        assert part in text
    for part in ("cufallback-cuda-probe", "minimum_driver.reasons", ".stages"):
        assert part in text


def probe_room(build: Path, tmp_path: Path) -> None:
    """Lay a build's wheels and its runtime wheelhouse out as docs/cuda-probe.md says, with a fresh environment."""
    (tmp_path / "wheels").symlink_to(build / "wheels")
    (tmp_path / "wheelhouse").symlink_to(CHECKOUT / ".cufallback/work" / build.name / "prefetch/wheelhouse/runtime")
    shell("python3 -m venv probe", tmp_path)


def run_probe(tmp_path: Path) -> None:
    """Run the installed probe both ways; without a driver it ends with 3, with one as it finds."""
    done = subprocess.run(
        [tmp_path / "probe/bin/python", "-m", "cuda_probe", "--json"], capture_output=True, check=False
    )
    report = json.loads(done.stdout)
    if report["kernel_driver"] is None:
        assert report["status"] == "no_driver"
        assert report["exit_code"] == done.returncode == 3
    assert "CUDA 12.9" in shell("probe/bin/python -m cuda_probe", tmp_path, expect=done.returncode)
    again = json.loads(shell("probe/bin/python -m cuda_probe --json", tmp_path, expect=done.returncode))
    assert again["exit_code"] == done.returncode


@pytest.mark.slow
def test_the_cuda_probe_installs_without_an_index(build: Path, tmp_path: Path) -> None:
    probe_room(build, tmp_path)
    shell("probe/bin/pip install --no-index --find-links wheelhouse wheels/cufallback_cuda_probe-*.whl", tmp_path)
    run_probe(tmp_path)


@pytest.mark.slow
@pytest.mark.network
def test_the_cuda_probe_installs_from_the_index(build: Path, tmp_path: Path) -> None:
    probe_room(build, tmp_path)
    shell("probe/bin/pip install wheels/cufallback_cuda_probe-*.whl", tmp_path)
    run_probe(tmp_path)


@pytest.mark.slow
def test_the_runtime_installs_from_pylock(build: Path, tmp_path: Path) -> None:
    for name in ("dist", ".cufallback"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    for command in (
        "cp -r dist/rehearsal/BUILD-ID runtime",
        "cp -rL .cufallback/*/BUILD-ID/prefetch/wheelhouse/runtime runtime/wheelhouse",
        "uv venv --python 3.11 runtime/env",
        "uv pip install --python runtime/env --offline --no-index -r runtime/pylock.toml",
    ):
        shell(command.replace("BUILD-ID", build.name), tmp_path)
    listed = shell("uv pip list --python runtime/env --format json", tmp_path)
    assert {"vllm", "cufallback-cuda-probe", "nvidia-cuda-runtime-cu12"} <= {
        item["name"] for item in json.loads(listed)
    }
