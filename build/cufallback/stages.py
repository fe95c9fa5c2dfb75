"""The stages of a build, in order. Each reads the plan and earlier stages and writes its own folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.errors import InspectionError, LockError, RecordError
from cufallback.image.engine import Engine
from cufallback.image.tools import ImageTools, image_hindrance
from cufallback.pipeline import Context, Outcome, Stage
from cufallback.recipe import GitSource, Kernel, WheelSource
from cufallback.resources import PYTHON_CACHES, probe_folder
from cufallback.steps import probe_environment
from cufallback.store import link_tree, replaced_folder, sha256_file, tree_digest, write_atomic, write_json

if TYPE_CHECKING:
    from cufallback.wheel.environment import Environment


def prefetch(context: Context) -> Outcome:
    """Fetch and verify everything that the build needs from outside; the last stage with network."""
    tree = context.folder / "source"
    source = _fetch_source(context, tree)
    distributions = _fetch_distributions(context)
    edits = _check_requirements(context, tree)
    result = {"source": source, "distributions": distributions, "requirement_edits": edits}
    return Outcome(result, (tree, *(context.folder / "wheelhouse" / which for which in ("build", "runtime"))))


def _fetch_source(context: Context, tree: Path) -> dict[str, Any]:
    from cufallback.source.cargo import registry_crates
    from cufallback.source.contract import check_contracts, require_contracts
    from cufallback.source.fetch import edit_source, fetch_source, fetches_of
    from cufallback.source.lock import require_locked, unused_reason

    recipe, lock = context.plan.recipe, context.plan.pinned().source
    source, progress = recipe.source, context.progress
    checkout = fetch_source(recipe, tree, store=context.store, mirrors=context.mirrors, progress=progress)
    if (checkout.tree_sha256, checkout.epoch) != (lock.tree_sha256, lock.epoch):
        raise LockError(
            f"the source tree has sha256 {checkout.tree_sha256} and epoch {checkout.epoch}, "
            f"the lock says {lock.tree_sha256} and {lock.epoch}",
            remedy="run `nox -s lock` and review the difference",
            where=f"locks/{recipe.name}/source.lock.toml",
        )
    changes = edit_source(recipe, tree, progress=progress)
    contracts = check_contracts(tree, source.contract)
    require_contracts(contracts)
    require_locked(fetches_of(recipe, tree), lock, source.unused)
    _require_allowed(context)
    git = isinstance(source, GitSource)
    return {
        "kind": checkout.kind,
        "origin": source.url if isinstance(source, GitSource) else source.package,
        "ref": source.ref if isinstance(source, GitSource) else source.version,
        "commit": source.commit
        and {
            "id": source.commit,
            "status": "passed" if git else "quoted",
            "source": "Git's object id" if git else "the recipe; an archive does not prove the commit it was made from",
        },
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
        "fetches": [
            {
                "name": locked.label,
                "kind": locked.kind,
                "url": locked.url,
                "ref": locked.ref,
                "commit": locked.commit,
                "sha256": locked.sha256,
                "asked_by": locked.asked_by,
                "unused": unused_reason(locked, source.unused),
            }
            for locked in lock.sources
        ],
        "crates": [
            {"lock": locked.label, **asdict(crate)}
            for locked in lock.sources
            if locked.kind == "crates" and unused_reason(locked, source.unused) is None
            for crate in registry_crates((tree / locked.label).read_bytes())
        ],
    }


def _require_allowed(context: Context) -> None:
    """Hold the locks to the recipe's bans: one may be younger than the lock."""
    from cufallback.deps.policy import Resolved, require_allowed

    recipe, locks = context.plan.recipe, context.plan.pinned()
    for lock in (locks.build, locks.runtime):
        closure = [Resolved(item.name, item.version) for item in lock.distributions]
        where = f"locks/{recipe.name}/{lock.which}.txt"
        for allowed in require_allowed(closure, recipe.deps.ban, where=where):
            context.progress.say(f"{allowed.name} {allowed.version} passes by exception: {allowed.why}")


def _fetch_distributions(context: Context) -> list[dict[str, Any]]:
    from cufallback.deps.lockfile import wanted
    from cufallback.deps.wheelhouse import fill

    locks = context.plan.pinned()
    rows: dict[str, dict[str, Any]] = {}
    for lock in (locks.build, locks.runtime):
        fetched = fill(
            wanted(lock, context.plan.recipe),
            folder=context.folder / "wheelhouse" / lock.which,
            store=context.store,
            mirrors=context.mirrors,
            progress=context.progress,
        )
        for item in fetched:
            row = {
                "name": item.wanted.name,
                "version": item.wanted.version,
                "filename": item.wanted.filename,
                "sha256": item.wanted.sha256,
                "size": item.size,
                # The default index is the user's own setting, perhaps with a secret in it: it is not named.
                "index": item.wanted.index_url or "default",
                "used_for": [],
            }
            rows.setdefault(item.wanted.sha256, row)["used_for"].append(lock.which)
    return sorted(rows.values(), key=lambda row: (row["name"], row["version"]))


def _check_requirements(context: Context, tree: Path) -> list[dict[str, Any]]:
    """Demand that the locks were resolved from these very requirements; return the edits for the record."""
    from cufallback.deps.surgery import operate
    from cufallback.deps.target import target_of

    recipe, locks = context.plan.recipe, context.plan.pinned()
    operated = operate(tree, recipe.deps, target_of(recipe))
    for lock in (locks.build, locks.runtime):
        if lock.inputs != operated[lock.which].sha256:
            raise LockError(
                "the lock was resolved from other requirements than the tree and the recipe have now",
                remedy="run `nox -s lock` and review the difference",
                where=f"locks/{recipe.name}/{lock.which}.txt",
            )
    return [{"used_for": which, **asdict(edit)} for which, made in operated.items() for edit in made.edits]


def wheels(context: Context) -> Outcome:
    """Build the main wheel and the cuda-probe without network, and repack them byte for byte."""
    from cufallback.wheel.environment import create_environment

    recipe, scratch, logs = context.plan.recipe, context.folder / "scratch", context.folder / "logs"
    lock = scratch / "build.txt"
    write_atomic(lock, context.plan.inputs["build.txt"])
    with context.progress.bar("installing the build environment", None):
        environment = create_environment(
            scratch / "environment",
            wheelhouse=context.earlier("prefetch") / "wheelhouse" / "build",
            lock=lock,
            python=recipe.python.version,
            runner=context.runner,
            log=logs / "environment.log",
        )
    probe = scratch / "cuda-probe"
    shutil.copytree(probe_folder(), probe, ignore=shutil.ignore_patterns(*PYTHON_CACHES))
    tree = context.earlier("prefetch") / "source"
    subjects = [
        _take(context, recipe.source)
        if isinstance(recipe.source, WheelSource)
        else _build(context, environment, tree, "main", recipe.wheel.environment, recipe.cuda.kernel),
        _build(context, environment, probe, "cuda-probe", probe_environment(recipe), ()),
    ]
    shutil.rmtree(scratch)
    return Outcome({"subjects": subjects}, (context.folder / "wheels", logs))


def _take(context: Context, source: WheelSource) -> dict[str, Any]:
    """Take a published wheel as it is."""
    target, log = context.folder / "wheels" / source.file, context.folder / "logs" / "main.log"
    context.store.place(source.sha256, target)
    statement = "taken as it was published; nothing was built"
    write_atomic(log, f"{source.file}, sha256 {source.sha256}: {statement}\n".encode())
    return {
        "path": f"wheels/{target.name}",
        "sha256": source.sha256,
        "size": target.stat().st_size,
        "command": [],
        "environment": {},
        "isolation": {"status": "not_run", "statement": statement, "interfaces": []},
        "kernels": {"built": {}, "not_built": [], "findings": []},
        "log": f"logs/{log.name}",
    }


def _build(
    context: Context,
    environment: Environment,
    source: Path,
    name: str,
    variables: Mapping[str, str],
    kernels: Sequence[Kernel],
) -> dict[str, Any]:
    from cufallback.attest.documents import wheel_subject
    from cufallback.attest.sbom import EMBEDDED_NAME, wheel_bom
    from cufallback.wheel.builder import BuildRequest, build_wheel
    from cufallback.wheel.buildlog import judge_kernels
    from cufallback.wheel.normalize import repack

    scratch, log = context.folder / "scratch", context.folder / "logs" / f"{name}.log"
    title = context.plan.recipe.source_name if name == "main" else name
    epoch = context.plan.pinned().source.epoch
    request = BuildRequest(
        source=source,
        environment=environment,
        output=scratch / "built" / name,
        build_environment=variables,
        epoch=epoch,
        jobs=context.plan.recipe.builder.jobs,
        log=log,
        scratch=scratch / "build",
        title=title,
    )
    built = build_wheel(request, context.runner, context.progress)
    subject = wheel_subject(built.path.name, number=0 if name == "main" else 1)
    sbom = wheel_bom(subject, context.plan, context.result("prefetch"), identity=context.plan.wheels_id)
    wheel = repack(built.path, context.folder / "wheels", epoch=epoch, extra_dist_info={f"sboms/{EMBEDDED_NAME}": sbom})
    isolated = built.isolation.kind != "none"
    return {
        "path": f"wheels/{wheel.name}",
        "sha256": sha256_file(wheel),
        "size": wheel.stat().st_size,
        "command": list(built.command),
        # Where this machine keeps its interpreter is mapped away from the bytes; it is nobody's business here either.
        "environment": {
            variable: value.replace(str(environment.headers), "PYTHON_HEADERS")
            for variable, value in built.environment.items()
        },
        "isolation": {
            "status": "passed" if isolated else "warned",
            "statement": built.isolation.statement,
            "interfaces": list(built.isolation.interfaces),
        },
        "kernels": {
            "built": {family: list(targets) for family, targets in built.kernels.built},
            "not_built": [list(row) for row in built.kernels.not_built],
            "findings": [asdict(finding) for finding in judge_kernels(built.kernels, kernels)],
        },
        "log": f"logs/{log.name}",
    }


def inspect(context: Context) -> Outcome:
    """Read from the wheels what they really are and hold it against the recipe."""
    from cufallback.record import INSPECTION
    from cufallback.wheel.audit import inspect_for

    subjects = context.result("wheels")["subjects"]
    wheels = [context.earlier("wheels") / subject["path"] for subject in subjects]
    inspections = inspect_for(wheels, context.plan.recipe)
    failed = [
        f"{wheel['file']}: {finding['what']}: {finding['why']}"
        for wheel, subject in zip(inspections, subjects, strict=True)
        for finding in (*wheel["findings"], *subject["kernels"]["findings"])
        if finding["status"] == "failed"
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


def image(context: Context) -> Outcome:
    """Build the image into an OCI layout, where this machine and the locks allow; else say why not."""
    from cufallback.image.build import BuiltWheel, build_image, index_digest

    recipe, report = context.plan.recipe, context.folder / "image.json"
    hindrance = image_hindrance(context.plan, context.settings["image tools"].value)
    if hindrance is not None:
        why, remedy = hindrance
        context.progress.say(f"image: not built: {why}; remedy: {remedy}")
        result: dict[str, Any] = {"image": None, "not_run": f"{why}; {remedy}" if remedy else why}
        write_json(report, result)
        return Outcome(result, (report,))
    tools: ImageTools = context.settings["image tools"].value
    subjects, inspections = context.result("wheels")["subjects"], context.result("inspect")["inspection"]
    layout, log = context.folder / "image", context.folder / "logs" / "image.log"
    built = build_image(
        context.plan,
        [
            BuiltWheel(context.earlier("wheels") / subject["path"], item["name"], item["version"], subject["sha256"])
            for subject, item in zip(subjects, inspections, strict=True)
        ],
        inspections=inspections,
        wheelhouses=context.earlier("prefetch") / "wheelhouse",
        bases={name: folder for name, folder in tools.bases.items() if isinstance(folder, Path)},
        folder=layout,
        log=log,
        runner=context.runner,
        progress=context.progress,
        use_cache=tools.use_cache,
    )
    found, config = built.image, built.image.configuration["config"]
    result = {
        "image": {
            "path": "image",
            "platform": found.platform,
            "size": found.size,
            "manifest": found.manifest.to_json(),
            "config": found.config.to_json(),
            "layers": [layer.to_json() for layer in found.layers],
            "index": index_digest(found),
            "dockerfile": f"inputs/dockerfiles/{recipe.image.dockerfile if recipe.image else ''}",
            "labels": built.labels,
            "require_cuda": built.require_cuda,
            "user": config["User"],
            "entrypoint": config["Entrypoint"],
            "engine": tools.engine.to_json() if isinstance(tools.engine, Engine) else {},
            "checks": built.checks,
            "log": f"logs/{log.name}",
        },
        "not_run": "",
    }
    write_json(report, result)
    return Outcome(result, (report, layout, log.parent))


def attest(context: Context) -> Outcome:
    """Write the SBOM of each wheel and of the image, and the provenance of all."""
    from cufallback.attest.documents import PROVENANCE, SBOMS, write_provenance, write_sboms
    from cufallback.image.layout import read_image
    from cufallback.record import INSPECTION

    image = context.result("image")["image"]
    sboms = write_sboms(
        context.folder,
        context.plan,
        context.result("prefetch"),
        context.result("wheels")["subjects"],
        image=read_image(context.earlier("image") / "image", image["manifest"]["digest"]) if image else None,
        wheelhouse=context.earlier("prefetch") / "wheelhouse" / "runtime",
    )
    logs = sorted(log for stage in ("wheels", "image") for log in (context.earlier(stage) / "logs").glob("*"))
    byproducts = [
        *((f"logs/{log.name}", sha256_file(log)) for log in logs),
        *((f"{SBOMS}/{sbom.name}", sha256_file(sbom)) for sbom in sboms),
        (INSPECTION, sha256_file(context.earlier("inspect") / INSPECTION)),
    ]
    document = context.folder / PROVENANCE
    write_provenance(document, context, byproducts)
    return Outcome({}, (context.folder / SBOMS, document))


def record(context: Context) -> Outcome:
    """Lay out ``dist/<recipe>/<build id>/`` whole or not at all, and verify it."""
    from cufallback.attest.documents import PROVENANCE, SBOMS
    from cufallback.record import write_record
    from cufallback.verify import verify

    with replaced_folder(context.dist) as folder:
        for name in ("wheels", "logs"):
            shutil.copytree(context.earlier("wheels") / name, folder / name)
        shutil.copytree(context.earlier("attest") / SBOMS, folder / SBOMS)
        shutil.copyfile(context.earlier("attest") / PROVENANCE, folder / PROVENANCE)
        if context.result("image")["image"]:
            link_tree(context.earlier("image") / "image", folder / "image")  # linked: it has gigabytes
            shutil.copytree(context.earlier("image") / "logs", folder / "logs", dirs_exist_ok=True)
        write_record(
            folder,
            plan=context.plan,
            results={name: state.result for name, state in context.states.items()},
            stages=_stage_entries(context),
        )
        verification = verify(folder)
        if not verification.passed:
            faults = "; ".join(
                f"{check.what}: {check.why}" for check in verification.checks if check.status == "failed"
            )
            raise RecordError(f"the new record does not verify: {faults}", remedy="run again", where=str(folder))
    return Outcome({}, (context.dist,))


def _stage_entries(context: Context) -> list[dict[str, Any]]:
    """Return how each stage ended so far; this one, which writes the record, is the last and not in it."""
    from cufallback.record import timestamp

    entries: list[dict[str, Any]] = []
    for state in context.states.values():
        why = state.result.get("not_run", "")
        entry = {"name": state.stage, "status": "not_run" if why else "passed", "why": why}
        times = (timestamp(state.started), timestamp(state.finished), round(state.finished - state.started, 1))
        entries.append(
            entry | dict(zip(("started", "finished", "seconds"), (None,) * 3 if why else times, strict=True))
        )
    return entries


STAGES: tuple[Stage, ...] = (
    Stage("prefetch", "fetch and verify sources and distributions", prefetch),
    Stage("wheels", "build without network", wheels, judges=False),
    Stage("inspect", "read what the wheels really are", inspect),
    Stage("image", "build the container image", image, of_image=True, reads=("image tools",)),
    Stage("attest", "write SBOMs and provenance", attest, of_image=True, reads=("builder",)),
    Stage("record", "write and verify the record", record, of_image=True, reads=("dist",)),
)
