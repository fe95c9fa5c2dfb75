"""The rehearsal's locks against the real index: current, drifting, and the same files by pip's own download."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cufallback.deps.compile import resolve, second_opinion
from cufallback.deps.lockfile import parse_lock, wanted
from cufallback.deps.surgery import Operated
from cufallback.deps.wheelhouse import fill
from cufallback.download import default_index, find_mirrors
from cufallback.process import LocalRunner
from cufallback.progress import Silent
from cufallback.recipe import load_recipe
from cufallback.resources import data_root
from cufallback.store import Store, sha256_file

pytestmark = [pytest.mark.network]

RECIPE = load_recipe("rehearsal")
needs_its_python = pytest.mark.skipif(
    f"{sys.version_info.major}.{sys.version_info.minor}" != RECIPE.python.version, reason="pip resolves for its Python"
)


def check(recipe: Path, test_cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cufallback", "lock", "--recipe", str(recipe), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(data_root() / "build"), "NO_COLOR": "1"}
    return subprocess.run(
        [*command, "--work", str(test_cache)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_committed_locks_are_current_and_a_changed_one_is_drift(tmp_path: Path, test_cache: Path) -> None:
    for folder in ("recipes", "locks"):
        shutil.copytree(data_root() / folder, tmp_path / folder)
    recipe, lock = tmp_path / "recipes" / "rehearsal.toml", tmp_path / "locks" / "rehearsal" / "runtime.txt"
    done = check(recipe, test_cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the locks of rehearsal are current" in done.stdout
    changed = lock.read_text().replace("--hash=sha256:0c", "--hash=sha256:0d")
    lock.write_text(changed)
    done = check(recipe, test_cache)
    assert done.returncode == 40, done.stdout + done.stderr
    assert "runtime.txt:9: the lock was edited" in done.stdout
    assert lock.read_text() == changed


@needs_its_python
def test_pip_downloads_the_same_files(tmp_path: Path) -> None:
    path = data_root() / "locks/rehearsal/runtime.txt"
    lock = parse_lock(path.read_text(), RECIPE, "runtime", where=str(path))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    fill(
        wanted(lock, RECIPE),
        folder=ours,
        store=Store(tmp_path / "store"),
        mirrors=find_mirrors(),
        progress=Silent(),
    )
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    LocalRunner().run([*command, "--quiet", "--index-url", default_index(), "-d", theirs, "-r", path])
    assert {file.name: sha256_file(file) for file in ours.iterdir()} == {
        file.name: sha256_file(file) for file in theirs.iterdir()
    }


@needs_its_python
def test_pip_tools_agrees_with_uv(tmp_path: Path) -> None:
    made = Operated(("jinja2>=3.1", "cuda-toolkit[cudart]==12.9.1", "torch==2.13.0+cpu"), ("markupsafe<3",), ())
    resolution = resolve(made, RECIPE, mirrors=find_mirrors(), workdir=tmp_path, runner=LocalRunner())
    assert {"cuda-toolkit", "nvidia-cuda-runtime-cu12", "torch"} <= {item.name for item in resolution.closure}
    assert second_opinion(made, resolution, RECIPE, workdir=tmp_path, runner=LocalRunner()) == ()
    asked = (tmp_path / "second.in").read_text()
    assert asked == "cuda-toolkit[cudart]==12.9.1\n"  # jinja2 needs what is overridden, torch has its own index
    falsified = type(resolution)(
        tuple(item for item in resolution.closure if item.name != "nvidia-cuda-runtime-cu12"),
        {**resolution.hashes, "cuda-toolkit": frozenset()},
    )
    assert second_opinion(made, falsified, RECIPE, workdir=tmp_path, runner=LocalRunner()) == (
        "cuda-toolkit 12.9.1: the hash sets differ",
        "nvidia-cuda-runtime-cu12: pip-tools has 12.9.79, uv does not have it",
    )
