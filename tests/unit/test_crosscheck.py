"""Records against their inputs where the rehearsal shows nothing: Git sources, cherry-picks, kernel rows, overrides."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cufallback.checks import Check
from cufallback.crosscheck import check_builds, check_distributions, check_source
from cufallback.deps.lockfile import Lock, LockedDistribution
from cufallback.plan import BuildPlan, Locks
from cufallback.recipe import Recipe
from cufallback.record import Record
from cufallback.source.lock import LockedSource, SourceLock
from cufallback.steps import plan_steps
from cufallback.toolchain import Toolchain

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "kimi-k3-cu129.toml"
TREE, HASH, COMMIT, PICK = "1" * 64, "2" * 64, "3" * 40, "4" * 40
EPOCH = 1_754_900_000


@pytest.fixture(scope="module")
def plan() -> BuildPlan:
    """The production recipe with a cherry-pick, an override and an edit, and locks as small as they can be."""
    data = tomllib.loads(RECIPE.read_text())
    data["source"]["cherry_pick"] = [{"commit": PICK, "why": "a fix that came after the release"}]
    data["deps"]["override"] = [{"requirement": "numpy<3", "why": "the newest numpy does not load"}]
    data["deps"]["edit"] = [
        {"name": "torch", "replacement": "torch==2.13.0", "why": "only this torch has cu129 wheels"}
    ]
    recipe = Recipe.model_validate(data)
    locked = LockedSource(
        name="cutlass", kind="fetchcontent", url="https://github.com/nvidia/cutlass.git", ref="v4", commit=COMMIT,
        sha256=None, submodules=(), when="", asked_by="CMakeLists.txt:1",
    )  # fmt: skip
    item = LockedDistribution("demo", "1.0", "demo-1.0-py3-none-any.whl", HASH)
    build, runtime = (Lock(recipe.name, which, HASH, (item,)) for which in ("build", "runtime"))  # type: ignore[arg-type]
    locks = Locks(SourceLock(recipe.name, (locked,), TREE, EPOCH), build, runtime)
    toolchain = Toolchain("x86_64", "glibc 2.36", "3.12.1", "g++ 12", "gcc 12", "ld 2.40")
    return BuildPlan(recipe, {}, locks, toolchain, HASH, plan_steps(recipe, locks))


def record_of(plan: BuildPlan) -> dict[str, Any]:
    """Return the parts of an honest record of ``plan`` that are held against it."""
    recipe, steps = plan.recipe, [step for step in plan.steps if step.stage == "wheels" and step.command]
    source = recipe.source
    assert source.kind == "git"
    pick = {"kind": "cherry-pick", "commit": PICK, "why": source.cherry_pick[0].why, "diff": "diff --git a/x b/x\n"}
    texts = [("build", text) for text in recipe.deps.build.add] + [
        ("runtime", text) for text in recipe.deps.runtime.add
    ]
    rows = [(which, "", 0, "", text, "added by the recipe") for which, text in texts]
    rows += [
        (which, "", 0, "", "numpy<3", f"override: {recipe.deps.override[0].why}") for which in ("build", "runtime")
    ]
    rows += [("build", "cuda.txt", 1, "torch", "torch==2.13.0", recipe.deps.edit[0].why)]
    findings = [{"what": row.name, "status": "passed", "why": "so it is"} for row in recipe.cuda.kernel]
    jobs = {"MAX_JOBS": "2", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    if recipe.builder.jobs:
        jobs = dict.fromkeys(jobs, str(recipe.builder.jobs))
    return {
        "schema": 2,
        "cufallback": plan.to_json()["cufallback"],
        "build_id": plan.build_id,
        "wheels_id": plan.wheels_id,
        "bases": [],
        "image": None,
        "recipe": {"name": recipe.name, "status": recipe.recipe.status, "path": "inputs/x.toml", "sha256": HASH},
        "source": {
            "kind": "git",
            "origin": source.url,
            "ref": source.ref,
            "commit": {"id": source.commit, "status": "passed", "source": "Git's object id"},
            "archive_sha256": None,
            "epoch": EPOCH,
            "tree_sha256": TREE,
            "edited_tree_sha256": HASH,
            "submodules": {},
            "changes": [{**pick, "file": "a.py"}, {**pick, "file": "b.py"}],
            "crates": [],
            "contracts": [
                {**contract.model_dump(), "status": "passed", "lines": [1] if contract.expect == "present" else []}
                for contract in source.contract
            ],
            "fetches": [
                {
                    "name": "cutlass", "kind": "fetchcontent", "url": "https://github.com/nvidia/cutlass.git",
                    "ref": "v4", "commit": COMMIT, "sha256": None, "asked_by": "CMakeLists.txt:1", "unused": None,
                }
            ],
        },
        "toolchain": {},
        "cuda_probe_sha256": HASH,
        "distributions": [
            {
                "name": "demo", "version": "1.0", "filename": "demo-1.0-py3-none-any.whl", "sha256": HASH, "size": 1,
                "index": "default", "used_for": ["build", "runtime"],
            }
        ],
        "requirement_edits": [
            dict(zip(("used_for", "file", "line", "before", "after", "why"), row, strict=True)) for row in rows
        ],
        "subjects": [
            {
                "path": f"wheels/{name}.whl",
                "sha256": HASH,
                "size": 1,
                "command": list(step.command),
                "environment": {**jobs, **(step.environment or {})},
                "isolation": {"status": "passed", "statement": "network: isolated", "interfaces": list(SEEN)},
                "kernels": {"built": {}, "not_built": [], "findings": findings if name == "main" else []},
                "log": f"logs/{name}.log",
            }
            for name, step in zip(("main", "probe"), steps, strict=True)
        ],
        "inspection": [],
        "stages": [],
        "files": [],
    }  # fmt: skip


SEEN = ('before {"lo": [0, 0]}', 'after {"lo": [0, 0]}')


def failed(record: dict[str, Any], plan: BuildPlan) -> list[Check]:
    parsed = Record.model_validate(record)
    checks = [
        *check_source(parsed, plan),
        *check_distributions(parsed, plan),
        *check_builds(parsed, plan),
    ]
    return [check for check in checks if check.status == "failed"]


def test_an_honest_record_holds(plan: BuildPlan) -> None:
    assert failed(record_of(plan), plan) == []


FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "commit only quoted": (lambda record: record["source"]["commit"].update(status="quoted"), "source"),
    "an archive": (lambda record: record["source"].update(archive_sha256=HASH), "source"),
    "no pick": (lambda record: record["source"].update(changes=[]), "changes"),
    "another pick": (lambda record: record["source"]["changes"][1].update(commit="5" * 40), "changes"),
    "a pick without diff": (lambda record: record["source"]["changes"][1].update(diff=""), "changes"),
    "a change of another kind": (lambda record: record["source"]["changes"][1].update(kind="patch"), "changes"),
    "a kernel row less": (
        lambda record: record["subjects"][0]["kernels"]["findings"].pop(0),
        "kernel rows of wheels/main",
    ),
    "no kernel rows": (
        lambda record: record["subjects"][0]["kernels"].update(findings=[]),
        "kernel rows of wheels/main",
    ),
    "a failed kernel": (
        lambda record: record["subjects"][0]["kernels"]["findings"][0].update(status="failed"),
        "kernels of wheels/main",
    ),
    "no override": (lambda record: record["requirement_edits"].pop(-2), "requirements added"),
    "another override": (lambda record: record["requirement_edits"][-2].update(after="numpy"), "requirements added"),
    "no edit": (lambda record: record["requirement_edits"].pop(), "requirement edits"),
    "an edit for another reason": (
        lambda record: record["requirement_edits"][-1].update(why="so"),
        "requirement edits",
    ),
    "not isolated, called isolated": (
        lambda record: record["subjects"][1]["isolation"].update(interfaces=[]),
        "isolation of wheels/probe",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_record_is_named(plan: BuildPlan, name: str) -> None:
    edit, what = FORGERIES[name]
    record = record_of(plan)
    edit(record)
    assert [check.what.removesuffix(".whl") for check in failed(record, plan)] == [what]


def test_a_used_source_without_a_pin_is_named(plan: BuildPlan) -> None:
    lock = plan.pinned().source
    loose = dataclasses.replace(lock, sources=(dataclasses.replace(lock.sources[0], commit=None),))
    record = record_of(plan)
    record["source"]["fetches"][0]["commit"] = None
    found = failed(record, dataclasses.replace(plan, locks=dataclasses.replace(plan.locks, source=loose)))
    assert [(check.what, "cutlass" in check.why) for check in found] == [("source pins", True)]


def test_a_record_of_another_version_leaves_its_commands_unchecked(plan: BuildPlan) -> None:
    record = {**record_of(plan), "cufallback": "9.9.9"}
    record["subjects"][0]["command"] = ["make"]
    assert failed(record, plan) == []
    told = [check.what for check in check_builds(Record.model_validate(record), plan) if check.status == "not_run"]
    assert told == ["command of wheels/main.whl", "command of wheels/probe.whl"]
