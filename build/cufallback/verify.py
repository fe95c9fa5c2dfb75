"""Verify a build folder from disk alone: every byte, every cross-reference, and what was not checked."""

from __future__ import annotations

import json
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cufallback.errors import CufallbackError, PayloadError, RecipeError
from cufallback.record import INSPECTION, PLAN, PYLOCK, RECORD, SUMS, Record, checksum_lines, files_below, read_record
from cufallback.store import canonical_json, sha256_bytes, sha256_file


@dataclass(frozen=True)
class Check:
    """One thing looked at: what, how it stands, and why (for ``not_run``: why not)."""

    what: str
    status: Literal["passed", "failed", "not_run"]
    why: str


@dataclass(frozen=True)
class Verification:
    """Everything that was looked at in one build folder."""

    folder: str
    build_id: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(check.status == "failed" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the verification as a JSON object."""
        return {
            "schema": 1,
            "folder": self.folder,
            "build_id": self.build_id,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
        }


def verify(folder: Path) -> Verification:
    """Check a build folder with nothing but its own content.

    Raises:
        RecordError: there is no record that can be read; everything else is a failed check.
    """
    record = read_record(folder)
    checks = list(_files(folder, record))
    if any(check.status == "failed" for check in checks):
        # What the record says of other files is not worth reading on: it could lead anywhere.
        checks.append(Check("everything else", "not_run", "the files are not those of the record"))
        return Verification(str(folder), record.build_id, tuple(checks))
    for look in (_plan, _inputs, _subjects, _inspection, _pylock, _stages):
        checks.extend(look(folder, record))
    return Verification(str(folder), record.build_id, tuple(checks))


def _files(folder: Path, record: Record) -> Iterator[Check]:
    """Every file against the record and SHA256SUMS, and none besides."""
    entries = [(entry, entry.lstat().st_mode) for entry in sorted(folder.rglob("*"))]
    odd = [entry for entry, mode in entries if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode)]
    for entry in odd:
        yield Check(
            f"file {entry.relative_to(folder)}", "failed", "is no plain file; a build folder holds nothing else"
        )
    if odd:
        return
    listed = {file.path: file for file in record.files}
    try:
        present = {file.path: file for file in files_below(folder)}
    except OSError as error:
        yield Check(f"file {error.filename}", "failed", f"cannot be read: {error.strerror}")
        return
    for path in sorted(listed.keys() | present.keys()):
        if path not in present:
            yield Check(f"file {path}", "failed", "the record lists it, but it is not here")
        elif path not in listed:
            yield Check(f"file {path}", "failed", "it is here, but the record does not list it")
        elif present[path] != listed[path]:
            now, then = present[path].sha256, listed[path].sha256
            yield Check(f"file {path}", "failed", f"sha256 is {now}, the record says {then}")
        else:
            yield Check(f"file {path}", "passed", f"sha256 {present[path].sha256}")
    try:
        sums = (folder / SUMS).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        yield Check(f"file {SUMS}", "failed", f"cannot be read: {error.strerror}")
        return
    ours = sha256_file(folder / RECORD)
    if f"{ours}  {RECORD}\n" not in sums:
        yield Check(f"file {RECORD}", "failed", f"sha256 is {ours}, which {SUMS} does not say of it")
    elif sums != checksum_lines(record.files, ours):
        yield Check(f"file {SUMS}", "failed", "its lines are not those of the record's files")
    else:
        yield Check(f"file {RECORD}", "passed", f"sha256 {ours}")
        yield Check(f"file {SUMS}", "passed", "one line for each file, as the record lists them")


def _read(folder: Path, name: str, parse: Callable[[bytes], Any]) -> tuple[Any, Check | None]:
    try:
        return parse((folder / name).read_bytes()), None
    except OSError as error:
        return None, Check(name, "failed", f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        return None, Check(name, "failed", f"cannot be understood: {error}")


def _plan(folder: Path, record: Record) -> Iterator[Check]:
    """The plan hashes to the build id, and the folder carries its name."""
    plan, fault = _read(folder, PLAN, json.loads)
    if fault:
        yield fault
        return
    actual = sha256_bytes(canonical_json(plan))
    good = actual == record.build_id
    yield Check("build id", "passed" if good else "failed", f"{PLAN} hashes to {actual}")
    if folder.resolve().name == record.build_id[:16]:
        yield Check("folder name", "passed", "is the build id's first 16 digits")
    else:
        yield Check("folder name", "not_run", f"the folder was renamed from {record.build_id[:16]}")
    toolchain = isinstance(plan, dict) and plan.get("toolchain")
    same = toolchain == record.toolchain
    yield Check("toolchain", "passed" if same else "failed", f"{PLAN} and {RECORD} {'agree' if same else 'differ'}")


def _inputs(folder: Path, record: Record) -> Iterator[Check]:
    """Recipe and locks make this plan and no other; the record names the distributions and the tree that they pin."""
    from cufallback.inputs import parse_locks
    from cufallback.plan import LOCK_FILES, BuildPlan
    from cufallback.recipe import parse_recipe
    from cufallback.stages import plan_steps

    known = {file.path: file.sha256 for file in record.files}
    good = known.get(record.recipe.path) == record.recipe.sha256
    yield Check(
        "recipe", "passed" if good else "failed", f"{record.recipe.path} has the digest that the record gives it"
    )
    plan, fault = _read(folder, PLAN, json.loads)
    if fault or not isinstance(plan, dict):
        yield fault or Check("plan", "failed", f"{PLAN} is no object")
        return
    if not good:
        return
    try:
        recipe = parse_recipe(folder / record.recipe.path)
    except RecipeError as error:
        yield Check("recipe", "failed", error.reason)
        return
    inputs = {name: (folder / "inputs" / name).read_bytes() for name in LOCK_FILES if f"inputs/{name}" in known}
    locks, refused = parse_locks(recipe, inputs, folder / "inputs")
    for name, lock_error in refused:
        yield Check(f"lock {name}", "failed", lock_error.reason)
    if locks.source is None or locks.build is None or locks.runtime is None:
        return
    made = BuildPlan(recipe, inputs, locks, None, record.cuda_probe_sha256, plan_steps(recipe, locks)).to_json()
    # Commands and form come from the version that built; the rest must follow from the inputs whatever the version.
    for key in ("recipe", "source", "cuda", "python", "builder", "locks", "cuda_probe"):
        same = plan.get(key) == made[key]
        yield Check(f"plan: {key}", "passed" if same else "failed", f"{PLAN} and inputs/ {_agree(same)}")
    for lock in (locks.build, locks.runtime):
        pinned = sorted((item.name, item.version, item.sha256) for item in lock.distributions)
        listed = [item for item in record.distributions if lock.which in item.used_for]
        same = pinned == sorted((item.name, item.version, item.sha256) for item in listed)
        yield Check(f"lock {lock.which}.txt", "passed" if same else "failed", f"it and {RECORD} {_agree(same)}")
    same = (locks.source.tree_sha256, locks.source.epoch) == (record.source.tree_sha256, record.source.epoch)
    yield Check("lock source.lock.toml", "passed" if same else "failed", f"it and {RECORD} {_agree(same)}")


def _subjects(folder: Path, record: Record) -> Iterator[Check]:
    """Each subject is a listed file and each wheel a subject; each wheel's own RECORD holds."""
    from cufallback.wheel.normalize import repack

    known = {file.path: file for file in record.files}
    wheels = {path for path in known if path.endswith(".whl")}
    named = {subject.path for subject in record.subjects}
    for path in sorted(wheels ^ named):
        yield Check(f"subject {path}", "failed", "the record's subjects and the wheels on disk differ")
    for subject in record.subjects:
        file = known.get(subject.path)
        if file is None or (file.sha256, file.size) != (subject.sha256, subject.size):
            yield Check(f"subject {subject.path}", "failed", "the subject and the file list of the record differ")
            continue
        try:
            with tempfile.TemporaryDirectory() as scratch:
                # Repacking reads every member against the wheel's own RECORD.
                again = repack(folder / subject.path, Path(scratch), epoch=record.source.epoch, extra_dist_info={})
                same = sha256_file(again) == subject.sha256
        except CufallbackError as error:
            yield Check(f"subject {subject.path}", "failed", error.reason)
        else:
            why = (
                "its RECORD holds, and repacking it gives the same bytes" if same else "repacking it gives other bytes"
            )
            yield Check(f"subject {subject.path}", "passed" if same else "failed", why)
        if subject.log not in known:
            yield Check(f"log {subject.log}", "failed", "the build log is not here")
    contracts = record.source.contracts
    broken = [contract.file for contract in contracts if contract.status != "passed"]
    yield Check("contracts", "failed" if broken else "passed", f"{len(contracts)} recorded, broken: {broken or 'none'}")


def _inspection(folder: Path, record: Record) -> Iterator[Check]:
    """inspection.json equals the record's, inspecting the wheels again shows the same, and no finding failed."""
    from cufallback.recipe import parse_recipe
    from cufallback.stages import inspect_wheels

    document, fault = _read(folder, INSPECTION, json.loads)
    if fault:
        yield fault
        return
    same = document == record.inspection
    yield Check("inspection", "passed" if same else "failed", f"{INSPECTION} and {RECORD} {_agree(same)}")
    try:
        paths = [folder / subject.path for subject in record.subjects]
        again = inspect_wheels(paths, parse_recipe(folder / record.recipe.path))
    except (PayloadError, RecipeError, ValueError) as error:
        reason = error.reason if isinstance(error, CufallbackError) else str(error)
        yield Check("inspection repeated", "failed", reason)
        return
    same = _facts(again) == _facts(record.inspection)
    why = f"what the wheels show and the record {_agree(same)}"
    yield Check("inspection repeated", "passed" if same else "failed", why)
    for made, inspection in (("recorded", record.inspection), ("repeated", again)):
        failed = [
            f"{wheel.get('file')}: {finding.get('what')}: {finding.get('why')}"
            for wheel in inspection
            for finding in wheel.get("findings", [])
            if finding.get("status") == "failed"
        ]
        yield Check(f"findings {made}", "failed" if failed else "passed", "; ".join(failed) or "none failed")


def _facts(inspections: list[dict[str, Any]]) -> list[Any]:
    """Return what was read from each wheel without what was said of it, which a newer version may say otherwise."""
    wheel_keys = ("file", "sha256", "size", "name", "version", "tags")
    file_keys = ("path", "size", "needed", "rpath", "glibc", "sass", "ptx", "fault")
    return [
        {
            **{key: wheel.get(key) for key in wheel_keys},
            "extensions": [{key: file.get(key) for key in file_keys} for file in wheel.get("extensions", [])],
            "minimum_driver": wheel.get("minimum_driver", {}).get("driver"),
        }
        for wheel in inspections
    ]


def _agree(same: bool) -> str:
    return "agree" if same else "differ"


def _pylock(folder: Path, record: Record) -> Iterator[Check]:
    """The PEP 751 lock is valid and names the record's runtime distributions."""
    from packaging.pylock import Pylock, PylockValidationError

    data, fault = _read(folder, PYLOCK, lambda raw: tomllib.loads(raw.decode()))
    if fault:
        yield fault
        return
    try:
        lock = Pylock.from_dict(data)
    except PylockValidationError as error:
        yield Check(PYLOCK, "failed", f"not a valid PEP 751 lock: {error}")
        return
    locked = sorted((str(package.name), str(package.version)) for package in lock.packages)
    named = [(item.name, item.version) for item in record.distributions if "runtime" in item.used_for]
    named += [(wheel["name"], wheel["version"]) for wheel in record.inspection]
    same = locked == sorted(named)
    yield Check(PYLOCK, "passed" if same else "failed", f"a valid PEP 751 lock; it and the record {_agree(same)}")


def _stages(_folder: Path, record: Record) -> Iterator[Check]:
    """What the build itself did not do is said here too."""
    for stage in record.stages:
        if stage.status == "not_run":
            yield Check(f"stage {stage.name}", "not_run", stage.why)
    for subject in record.subjects:
        if subject.isolation.status != "passed":
            yield Check(f"isolation of {subject.path}", "not_run", f"{subject.isolation.statement}")
    if record.source.commit and record.source.commit.status == "quoted":
        yield Check("source commit", "not_run", f"quoted, not verified: {record.source.commit.source}")
    yield Check("signatures", "not_run", "this build carries none")
