"""The build id: every input that touches bytes changes it, and nothing else does."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cufallback.build import Prepared, prepare
from cufallback.process import RecordingRunner
from cufallback.wheel.environment import find_uv

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = ("rehearsal", "kimi-k3-cu129", "kimi-k3-0.27-cu129")
LOCKS = ("source.lock.toml", "build.txt", "runtime.txt")
ANSWERS = {
    "uv --version": "uv 0.13.9",
    "git --version": "git version 2.39.5",
    "g++ --version": "g++ (Debian 12.2.0-14) 12.2.0\nCopyright",
    "gcc --version": "gcc (Debian 12.2.0-14) 12.2.0",
    "ld --version": "GNU ld (GNU Binutils) 2.40",
    "python --version": "Python 3.11.7",
    "python -I": '["3.11", "/usr", "/usr/bin/python3.11", "/usr/include/python3.11"]',
}


class Machine(RecordingRunner):
    """A machine whose tools answer as ``answers`` says; a tool without an answer is not installed."""

    def __init__(self, **changed: str) -> None:
        self.answers = ANSWERS | {
            name.replace("_", " --").replace("gxx", "g++"): text for name, text in changed.items()
        }

        def answer(words: tuple[str, ...]) -> tuple[int, str]:
            program = "python" if "python" in Path(words[0]).name else Path(words[0]).name
            text = self.answers.get(f"{program} {words[1]}", "")
            return (0, text) if text else (127, "")

        super().__init__(answer)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes and locks of a checkout, to be edited."""
    root = tmp_path / "data"
    for folder in ("recipes", "locks", "dockerfiles"):
        shutil.copytree(CHECKOUT / folder, root / folder)
    monkeypatch.setenv("CUFALLBACK_DATA", str(root))
    # A proxy keeps the plan from trying the network: these tests need none.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("cufallback.wheel.environment.find_headers", lambda *_: (Path("Python.h"), True))
    return root


@pytest.fixture
def plan(data: Path, tmp_path: Path) -> Callable[..., Prepared]:
    def make(recipe: str = "rehearsal", runner: RecordingRunner | None = None) -> Prepared:
        return prepare(recipe, work=tmp_path / "work", runner=runner or Machine())

    return make


def build_id(prepared: Prepared) -> str:
    assert prepared.plan.complete, prepared.needs
    return prepared.plan.build_id


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_id_is_the_same_at_every_call(plan: Callable[..., Prepared]) -> None:
    first = build_id(plan())
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert build_id(plan()) == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('toolkit = "12.9.1"', 'toolkit = "12.9.0"'),
        ('["9.0a", "10.0a", "10.3a"]', '["9.0a", "10.0a"]'),
        ("and hasattr(torch.ops._C,", "and  hasattr(torch.ops._C,"),
        ('VLLM_TARGET_DEVICE = "tpu"', 'VLLM_TARGET_DEVICE = "cpu"'),
        ('VLLM_TARGET_DEVICE = "tpu"', 'VLLM_TARGET_DEVICE = "tpu"\nCFLAGS = "-O1"'),
        ('commit = "6e448d0', 'commit = "7e448d0'),
    ],
)
def test_a_recipe_field_that_touches_what_is_made_changes_the_id(
    plan: Callable[..., Prepared], data: Path, old: str, new: str
) -> None:
    before = plan().plan.build_id
    edit(data / "recipes/rehearsal.toml", old, new)
    assert plan().plan.build_id != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('summary = "The', 'summary = "This is the'),
        ('why = "without the guard', 'why = "in other words, without the guard'),
        ('why = "the toolkit of', 'why = "as said, the toolkit of'),
        ("minimum_disk_gib = 6", "minimum_disk_gib = 7"),
        ("minimum_memory_gib = 4", "minimum_memory_gib = 5"),
        ("[builder]", "[builder]\njobs = 7"),
        ("[wheel]\n", "# a comment\n[wheel]\n"),
        ("maximum_driver_branch = 575", "maximum_driver_branch = 580"),
        ('expect = "present"\nwhy = "the tree must know', 'expect = "absent"\nwhy = "the tree must know'),
        ("size_limit_mib = 100", "size_limit_mib = 101"),
        ('versions = ">=13"', 'versions = ">=14"'),
    ],
)
def test_prose_place_and_what_only_judges_do_not(plan: Callable[..., Prepared], data: Path, old: str, new: str) -> None:
    before = build_id(plan())
    edit(data / "recipes/rehearsal.toml", old, new)
    assert build_id(plan()) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("recipes/rehearsal.toml", '["vllm.fs_io_C", "vllm.spinloop"]', '["vllm.spinloop"]'),
        ("recipes/rehearsal.toml", 'target = "probe"', 'target = "server"'),
        ("recipes/rehearsal.toml", 'licenses = "Apache-2.0"', 'licenses = "MIT"'),
        ("recipes/rehearsal.toml", "python:3.11-slim-bookworm", "python:3.11-slim-trixie"),
        ("dockerfiles/cu129.Dockerfile", "EXPOSE 8000", "EXPOSE 8001"),
        ("dockerfiles/check_image.py", "import json", "import json  # "),
    ],
)
def test_what_only_the_image_uses_changes_the_id_and_leaves_the_wheels(
    plan: Callable[..., Prepared], data: Path, file: str, old: str, new: str
) -> None:
    before = plan().plan
    edit(data / file, old, new)
    after = plan().plan
    assert after.build_id != before.build_id
    assert after.wheels_id == before.wheels_id


@pytest.mark.parametrize("name", LOCKS)
def test_each_lock_is_part_of_the_id(plan: Callable[..., Prepared], data: Path, name: str) -> None:
    before = build_id(plan())
    path = data / "locks/rehearsal" / name
    if name == "source.lock.toml":
        edit(path, "epoch = 1", "epoch = 2")
        assert build_id(plan()) != before
    else:
        # A lock carries a digest of itself, so an edit by hand is refused before it could become another build.
        edit(path, "--hash=sha256:", "--hash=sha256:0")
        prepared = plan()
        assert not prepared.plan.complete
        assert prepared.refused is not None


@pytest.mark.parametrize(
    ("tool", "version"),
    [
        ("gxx_version", "g++ (Debian 12.2.0-15) 12.2.1"),
        ("gcc_version", "gcc (Debian 12.2.0-15) 12.2.1"),
        ("ld_version", "GNU ld 2.41"),
        ("python_version", "Python 3.11.8"),
    ],
)
def test_the_toolchain_is_part_of_the_id(plan: Callable[..., Prepared], tool: str, version: str) -> None:
    assert build_id(plan(runner=Machine(**{tool: version}))) != build_id(plan())


@pytest.mark.parametrize("tool", ["uv_version", "git_version"])
def test_tools_that_touch_no_byte_are_not(plan: Callable[..., Prepared], tool: str) -> None:
    name = tool.partition("_")[0]
    assert build_id(plan(runner=Machine(**{tool: f"{name} 9.9.9"}))) == build_id(plan())


def test_the_source_of_the_cuda_probe_is_part_of_the_id(
    plan: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build_id(plan())
    probe = tmp_path / "probe"
    shutil.copytree(CHECKOUT / "build/cuda_probe", probe, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("cufallback.build.probe_folder", lambda: probe)
    assert build_id(plan()) == before
    (probe / "new.py").touch()
    assert build_id(plan()) != before


@pytest.mark.parametrize("cpus", [{0}, set(range(64))])
def test_the_processors_of_this_host_are_not(
    plan: Callable[..., Prepared], cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cpus)
    after = plan()
    assert build_id(after) == build_id(before)
    assert "MAX_JOBS" not in json.dumps(after.to_json())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_starts_nothing_but_version_queries(plan: Callable[..., Prepared], recipe: str) -> None:
    machine = Machine()
    plan(recipe, machine)
    assert machine.calls
    for words in machine.calls:
        asked = words[1:] == ("--version",)
        described = words[1:3] == ("-I", "-c") and "sys.version_info" in words[3]
        found = Path(words[0]).name == "uv" and words[1:3] == ("python", "find") and "--offline" in words
        docker = words[1:] in (("buildx", "version"), ("buildx", "inspect")) or words[1:3] == ("context", "inspect")
        tried = words[0] == "unshare" and '"argv": ["true"]' in words[-1]
        assert asked or described or found or tried or docker, words


def test_a_plan_writes_nothing(plan: Callable[..., Prepared], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("tool", "output", "found"),
    [
        ("gxx_version", "", "not found"),
        ("ld_version", "", "not found"),
        ("gcc_version", "", "not found"),
        ("gcc_version", "gcc (GCC) 8.5.0 20210514", "8.5.0"),
        ("uv_version", "", "not found"),
        ("gxx_version", "g++ (GCC) 10.2.1", "10.2.1"),
        ("gxx_version", "g++ (GCC) 11.2.9", "11.2.9"),
        ("uv_version", "uv 0.8.24", "0.8.24"),
    ],
)
def test_a_missing_or_old_tool_is_named_with_what_is_wanted(
    plan: Callable[..., Prepared], tool: str, output: str, found: str
) -> None:
    missing = [need for need in plan(runner=Machine(**{tool: output})).needs if need.state == "missing"]
    (need,) = missing
    assert (need.what, need.found) == (tool.partition("_")[0].replace("gxx", "g++"), found)
    assert need.wanted
    assert need.remedy


def test_production_recipes_need_git_of_an_age(plan: Callable[..., Prepared]) -> None:
    for output, found in (("", "not found"), ("git version 2.17.1", "2.17.1")):
        needs = {need.what: need for need in plan("kimi-k3-cu129", Machine(git_version=output)).needs}
        assert (needs["git"].state, needs["git"].found) == ("missing", found)
    assert "git" not in {need.what for need in plan("rehearsal").needs}, "an sdist needs no git"


@pytest.mark.parametrize("name", LOCKS)
def test_a_missing_lock_is_named_with_its_remedy(plan: Callable[..., Prepared], data: Path, name: str) -> None:
    (data / "locks/rehearsal" / name).unlink()
    prepared = plan()
    (need,) = (need for need in prepared.needs if need.what == f"lock {name}")
    assert need.state == "missing"
    assert "nox -s lock -- --recipe rehearsal" in need.remedy
    assert prepared.to_json()["build_id"] is None


def test_uv_beside_the_interpreter_is_found_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "fake-bin"
    fake.mkdir()
    for name in ("python", "uv"):
        (fake / name).write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", str(fake / "python"))
    assert find_uv() == fake / "uv"
