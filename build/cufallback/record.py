"""The build record: one strict model for writing and reading, and the folder that carries it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cufallback import __version__
from cufallback.errors import RecordError
from cufallback.store import canonical_json, sha256_file, write_atomic, write_json

if TYPE_CHECKING:
    from cufallback.plan import BuildPlan

RECORD = "record.json"
PLAN = "plan.json"
INSPECTION = "inspection.json"
PYLOCK = "pylock.toml"
SUMS = "SHA256SUMS"
# Folders that come after the record and are no part of it: each file there says itself what it is about.
SIGNATURES = "signatures"
ACCEPTANCE = "acceptance"
ADDED = (SIGNATURES, ACCEPTANCE)
STATEMENT_SUFFIX = ".intoto.json"


def is_inner_path(text: str) -> bool:
    """Whether ``text`` is a relative path as records have it: printable, ``/`` between its parts, no way out."""
    return text.isprintable() and "\\" not in text and not {"", ".", ".."} & set(text.split("/"))


def _inner_path(text: str) -> str:
    if not is_inner_path(text):
        msg = f"must be a plain relative path inside the folder, with / between its parts: {text!a}"
        raise ValueError(msg)
    return text


InnerPath = Annotated[str, AfterValidator(_inner_path)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class File(_Model):
    """One file of the folder, its path relative to it."""

    path: InnerPath
    sha256: Hex
    size: Size


class RecipeRef(_Model):
    """The recipe that was built; the file itself lies at ``path``."""

    name: str
    status: Literal["production", "experimental", "rehearsal"]
    path: InnerPath
    sha256: Hex


class Commit(_Model):
    """The source commit: ``passed`` when Git verified it, ``quoted`` when only the recipe says so."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    status: Literal["passed", "quoted"]
    source: str


class Change(_Model):
    """One checked change to the source: a rewrite or a cherry-pick, with its unified diff."""

    kind: str
    commit: str | None
    file: str
    why: str
    diff: str


class Contract(_Model):
    """One contract of the recipe and how the edited tree stood to it."""

    file: str
    pattern: str
    expect: Literal["present", "absent"]
    status: Literal["passed", "failed"]
    lines: list[int]
    why: str


class Fetched(_Model):
    """A source that upstream's build files would fetch: its pin, or why this build does not fetch it."""

    name: str
    kind: str
    url: str
    ref: str
    commit: str | None
    sha256: str | None
    asked_by: str
    unused: str | None


class Crate(_Model):
    """A Rust crate of a used Cargo.lock, with cargo's checksum of its archive."""

    lock: InnerPath
    name: str
    version: str
    sha256: Hex


class Source(_Model):
    """Where the code comes from and what was done to it."""

    kind: Literal["git", "sdist", "wheel"]
    origin: str
    ref: str
    commit: Commit | None
    archive_sha256: Hex | None
    epoch: int
    tree_sha256: Hex
    edited_tree_sha256: Hex
    submodules: dict[str, str]
    changes: list[Change]
    contracts: list[Contract]
    fetches: list[Fetched]
    crates: list[Crate]


class Distribution(_Model):
    """A locked distribution of the build or the runtime."""

    name: str
    version: str
    filename: str
    sha256: Hex
    size: Size
    index: str
    used_for: list[Literal["build", "runtime"]]


class RequirementEdit(_Model):
    """One edit of upstream's requirements, or one override, with its reason."""

    used_for: Literal["build", "runtime"]
    file: str
    line: int
    before: str
    after: str
    why: str


class Isolation(_Model):
    """How far the build was cut off from the network, and what /proc/net/dev showed inside before and after.

    ``not_run`` for a published wheel, which nothing was built for.
    """

    status: Literal["passed", "warned", "not_run"]
    statement: str
    interfaces: list[str]


class Kernels(_Model):
    """What the build log says of kernel families."""

    built: dict[str, list[str]]
    not_built: list[list[str]]
    findings: list[dict[str, Any]]


class Wheel(_Model):
    """A subject of the build."""

    path: InnerPath
    sha256: Hex
    size: Size
    command: list[str]
    environment: dict[str, str]
    isolation: Isolation
    kernels: Kernels
    log: InnerPath


class Base(_Model):
    """A base image of the plan. ``origin`` is ``replaced`` when ``--base`` put another one in the lock's place."""

    name: str
    reference: str
    digest: Digest | None
    origin: Literal["lock", "replaced"]


class Blob(_Model):
    """A descriptor of the OCI image specification."""

    media_type: str
    digest: Digest
    size: Size


class ImageCheck(_Model):
    """One assertion that was made inside the image while it was built."""

    what: str
    status: Literal["passed", "not_run"]
    why: str


class Image(_Model):
    """The container image: ``manifest.digest`` is what a registry calls it, ``index`` the digest of ``index.json``."""

    path: InnerPath
    platform: str
    size: Size
    manifest: Blob
    config: Blob
    layers: list[Blob]
    index: Digest
    dockerfile: InnerPath
    labels: dict[str, str]
    require_cuda: str
    user: str
    entrypoint: list[str]
    engine: dict[str, str]
    checks: list[ImageCheck]
    log: InnerPath


class StageEntry(_Model):
    """How a stage ended. ``not_run`` says why; times are RFC 3339, UTC."""

    name: str
    status: Literal["passed", "not_run"]
    why: str
    started: str | None
    finished: str | None
    seconds: float | None


class Record(_Model):
    """Everything a reader needs to verify, rebuild and decide on one build."""

    schema_: Annotated[Literal[2], Field(alias="schema")]
    cufallback: str
    build_id: Hex
    wheels_id: Hex
    recipe: RecipeRef
    source: Source
    toolchain: dict[str, str]
    cuda_probe_sha256: Hex
    distributions: list[Distribution]
    requirement_edits: list[RequirementEdit]
    subjects: list[Wheel]
    inspection: list[dict[str, Any]]
    bases: list[Base]
    image: Image | None
    stages: list[StageEntry]
    files: list[File]

    def to_json(self) -> dict[str, Any]:
        """Return the record as the JSON object that is written."""
        return self.model_dump(mode="json", by_alias=True)


_PLACES = re.compile(
    r"(?:plan|inspection)\.json|pylock\.toml|provenance\.intoto\.json|wheels/[^/]+\.whl|logs/[^/]+\.log"
    r"|inputs/[^/]+\.(?:toml|txt)|inputs/dockerfiles/.+|sbom/[^/]+\.cdx\.json"
    r"|image/(?:index\.json|oci-layout|blobs/sha256/[0-9a-f]{64})"
)


def is_place(path: str) -> bool:
    """Whether a build writes files at ``path`` in its folder, record and checksums aside."""
    return _PLACES.fullmatch(path) is not None


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 as an RFC 3339 time in UTC, to the second."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def printable(text: str) -> str:
    """Return ``text`` with everything that a terminal would not simply print written as an escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def files_below(folder: Path) -> list[File]:
    """Hash every file of a build folder but the record, the checksum list and what was added later, sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        File(path=path.relative_to(folder).as_posix(), sha256=sha256_file(path), size=path.stat().st_size)
        for path in paths
        if path.relative_to(folder).as_posix() not in (RECORD, SUMS) and path.relative_to(folder).parts[0] not in ADDED
    ]


def checksum_lines(files: Iterable[File], record_sha256: str) -> str:
    """Return SHA256SUMS as ``sha256sum -c`` reads it, the record included."""
    entries = [(file.path, file.sha256) for file in files] + [(RECORD, record_sha256)]
    return "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(entries))


def write_record(
    folder: Path, *, plan: BuildPlan, results: Mapping[str, Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]
) -> Record:
    """Write plan, inputs, inspection, lock, record and checksums beside the wheels and logs that lie in ``folder``.

    Args:
        folder: the build folder, with ``wheels/`` and ``logs/``.
        plan: what was built.
        results: what each stage contributed, by stage name.
        stages: one :class:`StageEntry` each, as a JSON object.
    """
    from cufallback.deps.pylock import Entry, render_pylock

    recipe, prefetched, built = plan.recipe, results["prefetch"], results["wheels"]["subjects"]
    inspection = results["inspect"]["inspection"]
    recipe_path = f"inputs/{recipe.name}.toml"
    for name, content in plan.inputs.items():
        write_atomic(folder / "inputs" / name, content)
    write_json(folder / PLAN, plan.to_json())
    write_json(folder / INSPECTION, inspection)
    entries = [
        Entry(item["name"], item["version"], f"wheelhouse/{item['filename']}", item["sha256"], item["size"])
        for item in prefetched["distributions"]
        if "runtime" in item["used_for"]
    ]
    entries += [
        Entry(wheel["name"], wheel["version"], subject["path"], subject["sha256"], subject["size"])
        for wheel, subject in zip(inspection, built, strict=True)
    ]
    write_atomic(folder / PYLOCK, render_pylock(entries, recipe).encode())
    record = Record.model_validate(
        {
            "schema": 2,
            "cufallback": __version__,
            "build_id": plan.build_id,
            "wheels_id": plan.wheels_id,
            "recipe": {
                "name": recipe.name,
                "status": recipe.recipe.status,
                "path": recipe_path,
                "sha256": sha256_file(folder / recipe_path),
            },
            "toolchain": plan.toolchain.to_json() if plan.toolchain else {},
            "cuda_probe_sha256": plan.probe_sha256,
            **prefetched,
            "subjects": built,
            "inspection": inspection,
            "bases": [base.to_json() for base in plan.bases],
            "image": results["image"]["image"],
            "stages": list(stages),
            "files": [file.model_dump() for file in files_below(folder)],
        }
    )
    write_json(folder / RECORD, record.to_json())
    write_atomic(folder / SUMS, checksum_lines(record.files, sha256_file(folder / RECORD)).encode())
    return record


def read_record(folder: Path) -> Record:
    """Read and validate ``record.json`` of a build folder.

    Raises:
        RecordError: no record, no JSON, or not a record of this format; with the key path of each fault.
    """
    path = folder / RECORD
    remedy = "give the folder that `cufallback build` printed, dist/<recipe>/<build id>/, unaltered"
    if not path.is_file():  # a pipe of that name would be waited for
        raise RecordError("there is no record here", remedy=remedy, where=str(path))
    try:
        content = path.read_bytes()
        data = json.loads(content)
        # Only one spelling counts: other readers could take another one of two equal keys.
        canonical = canonical_json(data) == content
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror}", remedy=remedy, where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON: {error}", remedy=remedy, where=str(path)) from error
    try:
        record = Record.model_validate(data)
    except ValidationError as error:
        faults = printable(
            "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
        )
        raise RecordError(f"is not a record of this format: {faults}", remedy=remedy, where=str(path)) from error
    if not canonical:
        raise RecordError("is not in the one JSON form that records have", remedy=remedy, where=str(path))
    return record
