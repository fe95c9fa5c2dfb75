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
    fetch = (
        f"check out {source.url} at {source.commit}"
        if isinstance(source, GitSource)
        else (f"download {source.package} {source.version} and check its sha256")
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
            "wheels",
            "build the cuda-probe",
            network=False,
            command=BUILD_COMMAND,
            environment=_probe_environment(recipe),
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


def wheels(context: Context) -> Outcome:
    """Build the main wheel and the cuda-probe without network, and repack them byte for byte."""
    from cufallback.wheel.builder import BuildRequest, build_wheel
    from cufallback.wheel.buildlog import judge_kernels
    from cufallback.wheel.environment import create_environment, find_interpreter
    from cufallback.wheel.normalize import repack

    recipe, prefetched = context.plan.recipe, context.earlier("prefetch")
    epoch = context.result("prefetch")["source"]["epoch"]
    scratch = context.folder / "scratch"
    environment = create_environment(
        scratch / "environment",
        wheelhouse=prefetched / "wheelhouse" / "build",
        lock=lock_folder(recipe.name) / "build.txt",
        python=find_interpreter(recipe.python.version, context.runner),
        runner=context.runner,
        log=context.folder / "logs" / "environment.log",
    )
    probe = scratch / "cuda-probe"
    shutil.copytree(probe_folder(), probe, ignore=shutil.ignore_patterns(*PYTHON_CACHES))
    jobs = {
        "main": (prefetched / "source", dict(recipe.wheel.environment), recipe.cuda.kernel),
        "cuda-probe": (probe, _probe_environment(recipe), ()),
    }
    built = []
    for name, (source, variables, kernels) in jobs.items():
        log = context.folder / "logs" / f"{name}.log"
        request = BuildRequest(
            source=source,
            environment=environment,
            output=scratch / "built" / name,
            build_environment=variables,
            epoch=epoch,
            jobs=recipe.builder.jobs,
            log=log,
            scratch=scratch / "build",
        )
        result = build_wheel(request, context.runner, context.progress)
        wheel = repack(result.path, context.folder / "wheels", epoch=epoch, extra_dist_info={})
        findings = judge_kernels(result.kernels, kernels)
        built.append(
            {
                "path": f"wheels/{wheel.name}",
                "sha256": sha256_file(wheel),
                "size": wheel.stat().st_size,
                "command": list(result.command),
                "environment": dict(result.environment),
                "isolation": _isolation(result.isolation),
                "kernels": {
                    "built": {name: list(targets) for name, targets in result.kernels.built},
                    "not_built": dict(result.kernels.not_built),
                    "findings": [asdict(finding) for finding in findings],
                },
                "log": f"logs/{log.name}",
            }
        )
    shutil.rmtree(scratch)
    return Outcome({"subjects": built}, (context.folder / "wheels", context.folder / "logs"))


def inspect(context: Context) -> Outcome:
    """Read from the wheels what they really are and hold it against the recipe."""
    subjects = context.result("wheels")["subjects"]
    paths = [context.earlier("wheels") / subject["path"] for subject in subjects]
    inspections = _inspect(paths, context.plan.recipe)
    findings = [
        (wheel["file"], finding)
        for wheel, subject in zip(inspections, subjects, strict=True)
        for finding in [*wheel["findings"], *subject["kernels"]["findings"]]
    ]
    failed = [
        f"{wheel}: {finding['what']}: {finding['why']}" for wheel, finding in findings if finding["status"] == "failed"
    ]
    if failed:
        raise InspectionError(
            "the wheels are not what the recipe demands:\n  " + "\n  ".join(failed),
            remedy="read the build log, then correct the recipe or the build",
            where=str(context.earlier("wheels") / "logs" / "main.log"),
        )
    document = context.folder / INSPECTION
    write_json(document, inspections)
    return Outcome({"inspection": inspections}, (document,))


def inspect_subjects(folder: Path, record: Record) -> list[dict[str, Any]]:
    """Inspect the wheels of a build folder by the recipe that lies in it; what ``inspect`` wrote should come out.

    Raises:
        PayloadError: a wheel cannot be read.
        RecipeError: the recipe in the folder cannot be read.
    """
    return _inspect([folder / subject.path for subject in record.subjects], parse_recipe(folder / record.recipe.path))


def _inspect(paths: Sequence[Path], recipe: Recipe) -> list[dict[str, Any]]:
    from cufallback.wheel.audit import expectation_of, probe_expectation_of
    from cufallback.wheel.inspect import inspect_wheel

    main, probe = paths
    return [
        inspect_wheel(main, expectation=expectation_of(recipe)).to_json(),
        inspect_wheel(probe, expectation=probe_expectation_of(recipe)).to_json(),
    ]


def record(context: Context) -> Outcome:
    """Lay out ``dist/<recipe>/<build id>/`` whole or not at all, and write its record."""
    from cufallback.deps.pylock import render_pylock

    plan, recipe = context.plan, context.plan.recipe
    with replaced_folder(context.dist) as folder:
        for name in ("wheels", "logs"):
            shutil.copytree(context.earlier("wheels") / name, folder / name)
        inputs = folder / "inputs"
        inputs.mkdir()
        shutil.copyfile(context.recipe_file, inputs / f"{recipe.name}.toml")
        for name in LOCK_FILES:
            shutil.copyfile(lock_folder(recipe.name) / name, inputs / name)
        write_json(folder / PLAN, plan.to_json())
        write_json(folder / INSPECTION, context.result("inspect")["inspection"])
        write_atomic(folder / PYLOCK, render_pylock().encode())
        made = Record.model_validate({})
        write_json(folder / RECORD, made.to_json())
        sums = checksum_lines(made.files, sha256_file(folder / RECORD))
        write_atomic(folder / SUMS, sums.encode())
    verification = verify(context.dist)
    return Outcome({"folder": str(context.dist)}, (context.dist,))


def _pinned(locks: Locks) -> Any: ...
