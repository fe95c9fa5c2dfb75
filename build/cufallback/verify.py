"""Verify a build folder from disk alone: every byte, every cross-reference, and what was not checked."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.checks import Check, agree, same_version
from cufallback.crosscheck import (
    check_builds,
    check_distributions,
    check_identity,
    check_plan,
    check_source,
    check_stages,
    rebuild_plan,
)
from cufallback.errors import CufallbackError
from cufallback.plan import BuildPlan
from cufallback.record import (
    INSPECTION,
    PLAN,
    PYLOCK,
    RECORD,
    SUMS,
    Record,
    checksum_lines,
    files_below,
    is_inner_path,
    is_place,
    printable,
    read_record,
)
from cufallback.store import canonical_json, sha256_bytes, sha256_file

if TYPE_CHECKING:
    from securesystemslib.signer import Key

# What reading hostile content can raise; each becomes a failed check.
_HOSTILE = (
    *(CufallbackError, OSError, ValueError, TypeError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError, MemoryError),
)


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


def verify(folder: Path, key: Key | None = None) -> Verification:
    """Check a build folder with nothing but its own content and, for signatures, a public key.

    Args:
        folder: of the build.
        key: what :func:`cufallback.attest.keys.load_public_key` returned; None: signatures are not checked.

    Raises:
        RecordError: there is no record that can be read; everything else is a failed check.
    """
    record = read_record(folder)
    checks = [*_guarded("files", lambda: _files(folder, record))]
    if any(check.status == "failed" for check in checks):
        # What the record says of other files is not worth reading on: it could lead anywhere.
        checks.append(Check("everything else", "not_run", "the files are not those of the record"))
    else:
        looks: dict[str, Callable[[], Iterable[Check]]] = {
            "subjects": lambda: _subjects(folder, record),
            "inputs": lambda: _inputs(folder, record, key),
            "stages": lambda: check_stages(record),
            "claims": lambda: _not_checked(record),
        }
        for what, look in looks.items():
            checks += _guarded(what, look)
    told = tuple(Check(printable(check.what), check.status, printable(check.why)) for check in checks)
    return Verification(str(folder), record.build_id, told)


def _guarded(what: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the checks that ``look`` makes; where it cannot go on, the last one is failed and says why."""
    checks: list[Check] = []
    try:
        for check in look():
            checks.append(check)  # one by one, since those before an error count too
    except _HOSTILE as error:
        place = f"{error.where}: " if isinstance(error, CufallbackError) and error.where else ""
        reason = error.reason if isinstance(error, CufallbackError) else f"{type(error).__name__}: {error}"
        checks.append(Check(what, "failed", f"cannot be understood: {place}{reason}"))
    return checks


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
    unsafe = [name for entry, _mode in entries if not is_inner_path(name := entry.relative_to(folder).as_posix())]
    for name in unsafe:
        # No record can list it: such names lead astray in terminals and checksum lists.
        yield Check(f"file {printable(name)}", "failed", "it is here, but the record does not list it")
    if unsafe:
        return
    listed = {file.path: file for file in record.files}
    if len(listed) != len(record.files):
        yield Check("files", "failed", f"{RECORD} lists a path twice")
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
        elif not is_place(path):
            yield Check(f"file {path}", "failed", "no build writes a file there")
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


def _json(folder: Path, name: str) -> Any:
    """Return the JSON of a file that must have the one form in which it is written."""
    content = (folder / name).read_bytes()
    value = json.loads(content)
    if canonical_json(value) != content:
        msg = f"{name} is not in the one JSON form that a build writes"
        raise ValueError(msg)
    return value


def _inputs(folder: Path, record: Record, key: Key | None) -> Iterator[Check]:
    """Everything that follows from recipe, locks and plan, and the plan from these."""
    from cufallback.attest.check import check_acceptance, check_provenance_of, check_sboms, check_signed
    from cufallback.image.check import check_image

    plan = rebuild_plan(folder, record)
    yield from _guarded("recipe", lambda: check_identity(record, plan))
    yield from _guarded("plan", lambda: _plan(folder, record, plan))
    yield from _guarded("source", lambda: check_source(record, plan))
    yield from _guarded("distributions", lambda: check_distributions(record, plan))
    yield from _guarded("builds", lambda: check_builds(record, plan))
    yield from _guarded("inspection", lambda: _inspection(folder, record, plan))
    yield from _guarded(PYLOCK, lambda: _pylock(folder, record, plan))
    yield from _guarded("image", lambda: check_image(folder, record, plan))
    yield from _guarded("SBOMs", lambda: check_sboms(folder, record, plan))
    yield from _guarded("provenance", lambda: check_provenance_of(folder, record, plan))
    yield from _guarded("acceptance", lambda: check_acceptance(folder, record, plan))
    yield from _guarded("signatures", lambda: check_signed(folder, record, plan, key))


def _plan(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """The plan hashes to the build id, follows from the inputs, and the folder carries its name."""
    written = _json(folder, PLAN)
    yield agree("build id", sha256_bytes(canonical_json(written)), record.build_id, source=f"the digest of {PLAN}")
    if folder.resolve().name == record.build_id[:16]:
        yield Check("folder name", "passed", "is the build id's first 16 digits")
    else:
        yield Check("folder name", "not_run", f"the folder was renamed from {record.build_id[:16]}")
    yield from check_plan(written, record, plan)


def _subjects(folder: Path, record: Record) -> Iterator[Check]:
    """Each subject is a listed file and each wheel a subject; each wheel's own RECORD holds."""
    from cufallback.wheel.normalize import check_record

    known = {file.path: file for file in record.files}
    wheels = {path for path in known if path.endswith(".whl")}
    named = [subject.path for subject in record.subjects]
    for path in sorted({*wheels.symmetric_difference(named), *(path for path in named if named.count(path) > 1)}):
        yield Check(f"subject {path}", "failed", "the record's subjects and the wheels on disk differ")
    for subject in record.subjects:
        what, file = f"subject {subject.path}", known.get(subject.path)
        if file is None or (file.sha256, file.size) != (subject.sha256, subject.size):
            yield Check(what, "failed", "the subject and the file list of the record differ")
            continue
        try:
            check_record(folder / subject.path)
        except CufallbackError as error:
            yield Check(what, "failed", error.reason)
        else:
            yield Check(what, "passed", "each member is what the wheel's own RECORD says")
        if subject.log not in known:
            yield Check(f"log {subject.log}", "failed", "the build log is not here")


def _inspection(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """inspection.json equals the record's, inspecting the wheels again shows the same, and no finding failed."""
    from cufallback.wheel.audit import inspect_for

    yield agree("inspection", _json(folder, INSPECTION), record.inspection, source=INSPECTION)
    again = inspect_for([folder / subject.path for subject in record.subjects], plan.recipe)
    if same_version(record):
        yield agree("inspection repeated", again, record.inspection, source="the wheels")
    else:
        yield agree("inspection repeated", _facts(again), _facts(record.inspection), source="the wheels")
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


def _pylock(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """The PEP 751 lock is valid and holds the record's runtime distributions and wheels, and nothing else."""
    from packaging.pylock import Pylock, PylockValidationError
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    data = tomllib.loads((folder / PYLOCK).read_bytes().decode())
    try:
        Pylock.from_dict(data)
    except PylockValidationError as error:
        yield Check(PYLOCK, "failed", f"not a valid PEP 751 lock: {error}")
        return
    listed = [
        (item.name, item.version, f"wheelhouse/{item.filename}", item.sha256, item.size)
        for item in record.distributions
        if "runtime" in item.used_for
    ]
    listed += [
        (wheel["name"], wheel["version"], subject.path, subject.sha256, subject.size)
        for wheel, subject in zip(record.inspection, record.subjects, strict=True)
    ]
    rows = sorted((canonicalize_name(name), str(Version(version)), *wheel) for name, version, *wheel in listed)
    packages = [
        {"name": name, "version": version, "wheels": [{"path": path, "size": size, "hashes": {"sha256": sha256}}]}
        for name, version, path, sha256, size in rows
    ]
    yield agree(PYLOCK, packages, data["packages"], source=RECORD, document=PYLOCK)
    yield agree("python", f"=={plan.recipe.python.version}.*", data["requires-python"], document=PYLOCK)


def _not_checked(record: Record) -> Iterator[Check]:
    """What nobody has verified is said here too."""
    if record.source.commit and record.source.commit.status == "quoted":
        yield Check("source commit", "not_run", f"quoted, not verified: {record.source.commit.source}")
