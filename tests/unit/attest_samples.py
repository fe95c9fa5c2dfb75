"""A complete plan and what its prefetch stage leaves, made from the committed rehearsal recipe and locks alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from cufallback.inputs import parse_locks, read_inputs
from cufallback.plan import BuildPlan
from cufallback.recipe import parse_recipe
from cufallback.source.lock import unused_reason
from cufallback.steps import plan_steps
from cufallback.toolchain import Toolchain

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLCHAIN = Toolchain(
    machine="x86_64",
    libc="glibc 2.36",
    python="3.11.7",
    compiler="g++ (Debian 12.2.0-14+deb12u1) 12.2.0",
    c_compiler="gcc (Debian 12.2.0-14+deb12u1) 12.2.0",
    linker="GNU ld (GNU Binutils for Debian) 2.40",
)
COMMIT = "6e448d0ea9bf3d88d898b65449ca6dc2aec170ac"
PICK = "41ba11b841000000000000000000000000000000"
CHANGE = {"file": "a.py", "why": "a reason to read", "diff": "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"}


def sample_plan(**changed: Any) -> BuildPlan:
    """The rehearsal plan on a machine with the toolchain above."""
    path = CHECKOUT / "recipes" / "rehearsal.toml"
    recipe, inputs = parse_recipe(path), read_inputs(path, parse_recipe(path))
    locks, refused = parse_locks(recipe, inputs, CHECKOUT / "locks" / "rehearsal")
    assert not refused
    parts = {"toolchain": TOOLCHAIN, "probe_sha256": "ab" * 32, "steps": plan_steps(recipe, locks), **changed}
    return BuildPlan(recipe, inputs, locks, **parts)


def sample_prefetched(plan: BuildPlan) -> dict[str, Any]:
    """The prefetch stage's result for the rehearsal."""
    locks, source = plan.pinned(), plan.recipe.source
    assert source.kind == "sdist"
    rows: dict[str, dict[str, Any]] = {}
    for lock in (locks.build, locks.runtime):
        for item in lock.distributions:
            row = {"name": item.name, "version": item.version, "filename": item.filename, "sha256": item.sha256}
            index = "https://download.pytorch.org/whl/cpu" if item.name == "torch" else "default"
            row = rows.setdefault(item.sha256, {**row, "size": 1, "index": index, "used_for": []})
            row["used_for"].append(lock.which)
    return {
        "source": {
            "kind": "sdist",
            "origin": source.package,
            "ref": source.version,
            "commit": {"id": source.commit, "status": "quoted", "source": "the recipe"},
            "archive_sha256": source.sha256,
            "epoch": locks.source.epoch,
            "tree_sha256": locks.source.tree_sha256,
            "edited_tree_sha256": "cd" * 32,
            "submodules": {},
            "changes": [{**CHANGE, "kind": "rewrite", "commit": None}],
            "crates": [],
            "contracts": [],
            "fetches": [
                {
                    **{key: getattr(item, key) for key in ("kind", "url", "ref", "commit", "sha256", "asked_by")},
                    "name": item.label,
                    "unused": unused_reason(item, source.unused),
                }
                for item in locks.source.sources
            ],
        },
        "distributions": list(rows.values()),
        "requirement_edits": [],
    }


def production_like(prefetched: dict[str, Any]) -> dict[str, Any]:
    """The same from a Git commit with a cherry-pick, where every pinned source is used."""
    changed = copy.deepcopy(prefetched)
    source = changed["source"]
    source |= {
        "kind": "git",
        "origin": "https://github.com/vllm-project/vllm.git",
        "ref": "v0.27.1",
        "commit": {"id": COMMIT, "status": "passed", "source": "Git's object id"},
        "archive_sha256": None,
        "submodules": {"third_party/thing": "12" * 20},
    }
    source["changes"].append({**CHANGE, "file": "b.py", "diff": "+b\n", "kind": "cherry-pick", "commit": PICK})
    for row in source["fetches"]:
        if row["commit"] or row["sha256"]:
            row["unused"] = None
    source["fetches"].append(
        {
            "name": "tools/x.sh:x.tar.gz",
            "kind": "download",
            "url": "https://example.org/x.tar.gz",
            "ref": "",
            "commit": None,
            "sha256": "34" * 32,
            "asked_by": "tools/x.sh:1",
            "unused": None,
        }
    )
    return changed
