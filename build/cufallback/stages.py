"""The stages of a build, in order. Each reads the plan and earlier stages and writes its own folder."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cufallback.errors import InspectionError, LockError
from cufallback.pipeline import Context, Outcome, Stage
from cufallback.plan import Locks, Step
from cufallback.recipe import GitSource, Recipe, parse_recipe
from cufallback.record import Record
from cufallback.resources import PYTHON_CACHES, lock_folder, probe_folder
from cufallback.store import tree_digest, write_json

LOCK_FILES = ("source.lock.toml", "build.txt", "runtime.txt")


def plan_steps(recipe: Recipe, locks: Locks) -> tuple[Step, ...]:
    """Return what the stages will do, as a reader or another machine would need it."""
    from cufallback.wheel.builder import BUILD_COMMAND, compiler_environment

    source = recipe.source
    fetch = f"check out {source.url} at {source.commit}" if isinstance(source, GitSource) else (
        f"download {source.package} {source.version} and check its sha256"
    )
    epoch = locks.source.epoch if locks.source else None
    environment = {**recipe.wheel.environment, **compiler_environment()}
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    steps = [Step("prefetch", fetch, network=True)]
    steps += [Step("prefetch", f"rewrite {rewrite.file}: {rewrite.why}", network=False) for rewrite in source.rewrite]
    steps += [
        Step("prefetch", f"contract: {contract.pattern} {contract.expect} in {contract.file}", network=False)
        for contract in source.contract
    ]
    steps += [
        Step("prefetch", "compare what the tree would fetch with the source lock", network=False),
        Step("prefetch", "fill the wheelhouse from the dependency locks", network=True),
        Step("wheels", "install the build lock into a fresh environment", network=False),
        Step("wheels", "build the main wheel", network=False, command=BUILD_COMMAND, environment=environment),
        Step(
            "wheels", "build the cuda-probe", network=False, command=BUILD_COMMAND, environment=_probe_environment(recipe)
        ),
        Step("wheels", "repack both byte for byte", network=False),
        Step("inspect", "read libraries, architectures, PTX and minimum driver from the wheels", network=False),
        Step("record", "write and check the record", network=False),
    ]
    return tuple(steps)


def _probe_environment(recipe: Recipe) -> dict[str, str]:
    return {"CUFALLBACK_PROBE_ARCHITECTURES": " ".join(recipe.cuda.architectures)}


def prefetch(context: Context) -> Outcome:
    """Fetch and verify everything that the build needs from outside; the last stage with network."""
    tree = context.folder / "source"
    source = _fetch_source(context, tree)
    wheelhouse = _fetch_distributions(context, tree)
    return Outcome({**source, **wheelhouse}, (tree, context.folder / "wheelhouse"))


def _fetch_source(context: Context, tree: Path) -> dict[str, Any]:
    from cufallback.download import Wanted, fetch
    from cufallback.source.checkout import checkout_git, extract_sdist
    from cufallback.source.contract import check_contracts, require_contracts
    from cufallback.source.edit import apply_cherry_picks, apply_rewrites
    from cufallback.source.harvest import harvest
    from cufallback.source.lock import require_locked

    source = context.plan.recipe.source
    lock = _pinned(context.plan.locks).source
    if isinstance(source, GitSource):
        checkout = checkout_git(source, target=tree, progress=context.progress)
        picks = apply_cherry_picks(tree, source.cherry_pick, url=source.url, progress=context.progress)
    else:
        wanted = Wanted(source.package, source.version, frozenset({source.sha256}), None)
        fetch([wanted], store=context.store, mirrors=context.mirrors, progress=context.progress)
        checkout = extract_sdist(context.store.path(source.sha256), source, target=tree)
        picks = ()
    if checkout.tree_sha256 != lock.tree_sha256:
        raise LockError(
            f"the source tree is {checkout.tree_sha256}, the source lock says {lock.tree_sha256}",
            remedy="run `nox -s lock` and review the difference",
            where=str(lock_folder(context.plan.recipe.name) / "source.lock.toml"),
        )
    changes = (*picks, *apply_rewrites(tree, source.rewrite))
    contracts = check_contracts(tree, source.contract)
    require_contracts(contracts)
    fetches = require_locked(harvest(tree), lock, source.unused)
    commit = None
    if isinstance(source, GitSource):
        commit = {"id": source.commit, "status": "passed", "source": "the object id of the fetched commit"}
    elif source.commit:
        commit = {"id": source.commit, "status": "quoted", "source": "the recipe; an sdist does not prove its commit"}
    return {
        "source": {
            "kind": checkout.kind,
            "origin": source.url if isinstance(source, GitSource) else source.package,
            "ref": source.ref if isinstance(source, GitSource) else source.version,
            "commit": commit,
            "archive_sha256": checkout.archive_sha256,
            "epoch": checkout.epoch,
            "tree_sha256": checkout.tree_sha256,
            "edited_tree_sha256": tree_digest(tree),
            "submodules": dict(checkout.submodules),
            "changes": [asdict(change) for change in changes],
            "contracts": [
                {
                    "file": result.file,
                    "pattern": result.pattern,
                    "expect": result.expect,
                    "status": "passed" if result.held else "failed",
                    "lines": list(result.lines),
                    "why": result.why,
                }
                for result in contracts
            ],
            "fetches": fetches,
        }
    }
