"""Hold a record against the inputs that lie beside it: what follows from recipe and locks is derived anew."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from cufallback import __version__
from cufallback.checks import Check, agree, same_version
from cufallback.deps.lockfile import parse_lock, wanted
from cufallback.deps.policy import Resolved, require_allowed
from cufallback.image.bases import Replacement, resolve_bases
from cufallback.image.lock import parse_image_lock
from cufallback.plan import DEFINITION, IMAGE_LOCK, LOCK_FILES, BuildPlan, Locks, Step
from cufallback.recipe import GitSource, WheelSource, parse_recipe
from cufallback.record import PLAN, RECORD, Change, Isolation, Record, StageEntry, Wheel
from cufallback.source.lock import parse_source_lock, unused_reason
from cufallback.toolchain import Toolchain

# What the building machine decides: how many jobs it runs, and where its interpreter keeps its headers.
_JOBS = ("CMAKE_BUILD_PARALLEL_LEVEL", "MAX_JOBS")
_FLAGS = ("CFLAGS", "CXXFLAGS")
_HEADER_MAP = re.compile(r"-ffile-prefix-map=PYTHON_HEADERS=\S+ ?")
_INTERFACES = re.compile(r"(before|after) (\{.+\})")


def rebuild_plan(folder: Path, record: Record) -> BuildPlan:
    """Return the plan that recipe and locks below ``inputs/`` give with the record's toolchain and probe digest.

    Raises:
        CufallbackError: recipe or lock cannot be read or is for something else.
        ValueError: a lock is no UTF-8 text.
        TypeError: the record's toolchain has other fields than a toolchain.
    """
    from cufallback.steps import plan_steps

    recipe = parse_recipe(folder / record.recipe.path)
    fixed = {f"{recipe.name}.toml", *LOCK_FILES} | ({IMAGE_LOCK} if recipe.image else set())
    names = [
        name
        for name in (file.path.removeprefix("inputs/") for file in record.files if file.path.startswith("inputs/"))
        if name in fixed or (name.startswith(DEFINITION) and recipe.image)
    ]
    contents = {name: (folder / "inputs" / name).read_bytes() for name in names}
    texts = {name: contents[name].decode() for name in (*LOCK_FILES, IMAGE_LOCK) if name in contents}
    source = parse_source_lock(texts["source.lock.toml"], recipe.name, where="inputs/source.lock.toml")
    build = parse_lock(texts["build.txt"], recipe, "build", where="inputs/build.txt")
    runtime = parse_lock(texts["runtime.txt"], recipe, "runtime", where="inputs/runtime.txt")
    images = None
    if IMAGE_LOCK in texts:
        images = parse_image_lock(texts[IMAGE_LOCK], recipe.name, where=f"inputs/{IMAGE_LOCK}")
    locks = Locks(source, build, runtime, images)
    toolchain = Toolchain(**record.toolchain)
    replaced = [
        Replacement(base.name, folder, base.digest)
        for base in record.bases
        if base.origin == "replaced" and base.digest is not None
    ]
    bases = resolve_bases(recipe, images, replaced)
    probe, steps = record.cuda_probe_sha256, plan_steps(recipe, locks, bases)
    return BuildPlan(recipe, contents, locks, toolchain, probe, steps, bases)


def check_identity(record: Record, plan: BuildPlan) -> Iterator[Check]:
    """The record names the recipe that lies beside it."""
    recipe = plan.recipe
    found = {"name": record.recipe.name, "status": record.recipe.status, "path": record.recipe.path}
    yield agree(
        "recipe", {"name": recipe.name, "status": recipe.recipe.status, "path": f"inputs/{recipe.name}.toml"}, found
    )
    known = {file.path: file.sha256 for file in record.files}
    yield agree("wheels id", plan.wheels_id, record.wheels_id)
    yield agree("recipe digest", known.get(record.recipe.path), record.recipe.sha256)
    here = sorted(path for path in known if path.startswith("inputs/"))
    yield agree("inputs", sorted(f"inputs/{name}" for name in plan.inputs), here)


def check_plan(written: Any, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """plan.json, parsed, is the plan that inputs, toolchain and probe digest give."""
    expected = {**plan.to_json(), "cufallback": record.cufallback}
    if not same_version(record):
        expected |= {key: written[key] for key in ("commands",) if key in written}
        yield _other_version("plan commands", record)
    yield agree("plan", expected, written, document=PLAN)


def _other_version(what: str, record: Record) -> Check:
    return Check(what, "not_run", f"cufallback {record.cufallback} wrote this, and {__version__} may do otherwise")


def check_source(record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Source, contracts, changes and fetches are those of recipe and source lock."""
    source, lock, found = plan.recipe.source, plan.pinned().source, record.source
    git = isinstance(source, GitSource)
    expected = {
        "kind": source.kind,
        "origin": source.url if isinstance(source, GitSource) else source.package,
        "ref": source.ref if isinstance(source, GitSource) else source.version,
        "commit": source.commit and {"id": source.commit, "status": "passed" if git else "quoted"},
        "archive_sha256": None if isinstance(source, GitSource) else source.sha256,
        "epoch": lock.epoch,
        "tree_sha256": lock.tree_sha256,
    }
    shown = found.model_dump(include=set(expected))
    shown["commit"] = found.commit and {"id": found.commit.id, "status": found.commit.status}
    yield agree("source", expected, shown)
    yield agree(
        "contracts",
        [
            {**contract.model_dump(), "status": "passed", "matches": contract.expect == "present"}
            for contract in source.contract
        ],
        [{**contract.model_dump(exclude={"lines"}), "matches": bool(contract.lines)} for contract in found.contracts],
    )
    picks = source.cherry_pick if isinstance(source, GitSource) else ()
    yield agree(
        "changes",
        [
            *({"kind": "cherry-pick", "commit": pick.commit, "why": pick.why, "diff": True} for pick in picks),
            *(
                {"kind": "rewrite", "file": rewrite.file, "commit": None, "why": rewrite.why, "diff": True}
                for rewrite in source.rewrite
            ),
        ],
        _changes(found.changes),
    )
    yield agree(
        "fetches",
        [
            {
                **{key: getattr(locked, key) for key in ("kind", "url", "ref", "commit", "sha256", "asked_by")},
                "name": locked.label,
                "unused": unused_reason(locked, source.unused),
            }
            for locked in lock.sources
        ],
        [fetched.model_dump() for fetched in found.fetches],
    )
    locks = {
        locked.label
        for locked in lock.sources
        if locked.kind == "crates" and unused_reason(locked, source.unused) is None
    }
    yield agree("Cargo.locks with crates", sorted(locks), sorted({crate.lock for crate in found.crates}))
    if locks:
        yield Check("crates", "not_run", "they are listed from each Cargo.lock, which is not in this folder")
    open_ends = [
        locked.label for locked in lock.sources if not locked.pinned and unused_reason(locked, source.unused) is None
    ]
    yield Check("source pins", "failed" if open_ends else "passed", f"used, but not pinned: {open_ends or 'none'}")
    if found.changes:
        yield Check("edited tree", "not_run", "the source is not in this folder, so its digest cannot be taken again")


def _changes(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return the changes with one row for each cherry-pick, which may change several files."""
    rows: list[dict[str, Any]] = []
    for change in changes:
        row: dict[str, Any] = {"kind": change.kind, "commit": change.commit, "why": change.why}
        if change.kind == "cherry-pick":
            row["diff"] = bool(change.diff.strip())
            if rows and rows[-1] == row:
                continue
        else:
            row |= {"file": change.file, "diff": change.diff.startswith(f"--- a/{change.file}\n+++ b/{change.file}\n")}
        rows.append(row)
    return rows


def check_distributions(record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Distributions are the union of both locks, and the recipe's requirement edits are all there."""
    locks = (plan.pinned().build, plan.pinned().runtime)
    rows: dict[str, dict[str, Any]] = {}
    for lock in locks:
        for item in wanted(lock, plan.recipe):
            row = {key: getattr(item, key) for key in ("name", "version", "filename", "sha256")}
            row |= {"index": item.index_url or "default", "used_for": []}
            rows.setdefault(item.sha256, row)["used_for"].append(lock.which)
    yield agree(
        "distributions",
        sorted(rows.values(), key=lambda row: (row["name"], row["version"])),
        [item.model_dump(exclude={"size"}) for item in record.distributions],
    )
    deps, edits = plan.recipe.deps, record.requirement_edits
    for lock in locks:
        closure = [Resolved(item.name, item.version) for item in lock.distributions]
        require_allowed(closure, deps.ban, where=f"inputs/{lock.which}.txt")
    yield Check("bans", "passed", "the locks hold nothing that the recipe bans")
    added = {
        (which, text)
        for which, requirements in (("build", deps.build), ("runtime", deps.runtime))
        for text in (*requirements.add, *(override.requirement for override in deps.override))
    }
    yield agree(
        "requirements added",
        sorted(map(list, added)),
        sorted([edit.used_for, edit.after] for edit in edits if not edit.file),
    )
    made = {(edit.after, edit.why) for edit in edits if edit.file}
    absent = [
        edit.name
        for edit in deps.edit
        if (str(Requirement(edit.replacement)) if edit.replacement else "", edit.why) not in made
    ]
    absent += [
        override.requirement
        for override in deps.override
        if not any(edit.after == override.requirement and edit.why.endswith(override.why) for edit in edits)
    ]
    why = f"edits of the recipe that {RECORD} does not have: {absent or 'none'}"
    yield Check("requirement edits", "failed" if absent else "passed", why)


def check_builds(record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Each subject was built as the plan says, isolated as the record says, with the kernels the recipe demands."""
    steps = [step for step in plan.steps if step.command and step.stage == "wheels"]
    if isinstance(plan.recipe.source, WheelSource) and record.subjects:
        yield _taken(plan.recipe.source, record.subjects[0])
        steps.insert(0, Step("wheels", "taken", network=False))
    if len(steps) != len(record.subjects):
        yield Check("subjects", "failed", f"the plan builds {len(steps)} wheels, {RECORD} has {len(record.subjects)}")
        return
    for number, (step, subject) in enumerate(zip(steps, record.subjects, strict=True)):
        if not step.command:
            continue
        if same_version(record):
            yield agree(f"command of {subject.path}", list(step.command), subject.command, source="the plan")
            yield _environment(step.environment or {}, subject, plan.recipe.builder.jobs)
        else:
            yield _other_version(f"command of {subject.path}", record)
        yield _isolation(subject.path, subject.isolation)
        findings = subject.kernels.findings
        failed = [f"{finding.get('what')}" for finding in findings if finding.get("status") not in ("passed", "warned")]
        yield Check(f"kernels of {subject.path}", "failed" if failed else "passed", f"failed: {failed or 'none'}")
        rows = plan.recipe.cuda.kernel if number == 0 else ()
        yield agree(
            f"kernel rows of {subject.path}",
            [row.name for row in rows],
            # Families that the recipe does not speak of follow, as warnings.
            [finding.get("what") for finding in findings][: len(rows)],
        )


def _taken(source: WheelSource, subject: Wheel) -> Check:
    """A published wheel is the one of the recipe, and nothing is said of a build."""
    found = [subject.path, subject.sha256, subject.command, subject.environment, subject.isolation.status]
    return agree("main wheel", [f"wheels/{source.file}", source.sha256, [], {}, "not_run"], found)


def _environment(expected: Mapping[str, str], subject: Wheel, jobs: int | None) -> Check:
    """Compare with the plan's variables; what the building machine decides may only have its form."""
    found = dict(subject.environment)
    wanted_jobs = {name: str(jobs) if jobs else found.get(name) for name in _JOBS}
    for name in _FLAGS:
        rest = _HEADER_MAP.sub("", found.pop(name, ""), count=1)
        if rest:
            found[name] = rest
    numbers = all(re.fullmatch(r"[1-9]\d{0,5}", found.get(name, "")) for name in _JOBS)
    full = {**wanted_jobs, **expected} if numbers else {**dict.fromkeys(_JOBS, "a number"), **expected}
    return agree(f"environment of {subject.path}", full, found, source="the plan")


def _isolation(path: str, isolation: Isolation) -> Check:
    what = f"isolation of {path}"
    if isolation.status != "passed":
        return Check(what, "not_run", isolation.statement)
    seen = [match for line in isolation.interfaces if (match := _INTERFACES.fullmatch(line))]
    shown = [match[1] for match in seen if isinstance(json.loads(match[2]), dict)]
    good = shown == ["before", "after"] and len(isolation.interfaces) == len(shown)
    proof = "the network interfaces before and after the build are" + ("" if good else " not")
    return Check(what, "passed" if good else "failed", f"{proof} recorded: {isolation.statement}")


def check_stages(record: Record) -> Iterator[Check]:
    """Every stage of this version is there, in order; what ran has times, and what did not says why."""
    from cufallback.stages import STAGES

    if same_version(record):
        expected = [
            [stage.name, "not_run" if stage.name == "image" and record.image is None else "passed"]
            for stage in STAGES[:-1]
        ]
        yield agree("stages", expected, [[stage.name, stage.status] for stage in record.stages], source="this version")
    else:
        yield _other_version("stages", record)
    for stage in record.stages:
        if not _well_told(stage):
            why = "needs times when it passed and a reason when it did not run"
            yield Check(f"stage {stage.name}", "failed", why)
        elif stage.status == "not_run":
            yield Check(f"stage {stage.name}", "not_run", stage.why)


def _well_told(stage: StageEntry) -> bool:
    if stage.status == "not_run":
        return bool(stage.why) and (stage.started, stage.finished, stage.seconds) == (None, None, None)
    if stage.started is None or stage.finished is None or stage.seconds is None or stage.seconds < 0:
        return False
    started, finished = (datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z") for text in (stage.started, stage.finished))
    return started <= finished
