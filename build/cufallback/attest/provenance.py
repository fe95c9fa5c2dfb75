"""SLSA provenance v1 in an in-toto statement: what was built, from which pins, by whom. See docs/provenance.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cufallback import __version__
from cufallback.attest.purls import oci_purl, python_purl
from cufallback.attest.statement import PROVENANCE_PREDICATE, Subject, parse_json, statement
from cufallback.attest.subjects import BaseImage
from cufallback.errors import AttestationError
from cufallback.plan import DEFINITION, IMAGE_LOCK, LOCK_FILES
from cufallback.record import timestamp
from cufallback.store import sha256_bytes

if TYPE_CHECKING:
    from cufallback.plan import BuildPlan

BUILD_TYPE = "urn:cufallback:build:v1"
LOCAL_BUILDER = "urn:cufallback:builder:local"

_REMEDY = "build again; a document is never edited by hand"
_DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}"), "gitCommit": re.compile(r"[0-9a-f]{40}")}


def _digest_set(values: dict[str, str]) -> dict[str, str]:
    if not values:
        msg = "must name at least one digest"
        raise ValueError(msg)
    for name, value in values.items():
        if name not in _DIGESTS or not _DIGESTS[name].fullmatch(value):
            msg = f"{name} {value!r}: known are sha256 with 64 and gitCommit with 40 hex digits"
            raise ValueError(msg)
    return values


def _uri(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", text) or urlsplit(text).password is not None:
        msg = f"not a URI without a password: {text!r}"
        raise ValueError(msg)
    return text


def _time(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z")
    if not text.endswith("Z"):
        msg = "must be a time in UTC that ends in Z"
        raise ValueError(msg)
    return text


DigestSet = Annotated[dict[str, str], AfterValidator(_digest_set)]
Uri = Annotated[str, AfterValidator(_uri)]
Time = Annotated[str, AfterValidator(_time)]
Name = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SubjectDescriptor(_Model):
    """One thing that was built."""

    name: Name
    digest: DigestSet


class Descriptor(_Model):
    """in-toto's ResourceDescriptor, as far as it is used here."""

    name: Name | None = None
    uri: Uri | None = None
    digest: DigestSet | None = None
    annotations: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Descriptor:
        if self.uri is None and self.digest is None:
            msg = "needs a uri or a digest"
            raise ValueError(msg)
        return self


class RecipeParameter(_Model):
    """The recipe that the caller chose."""

    name: Name
    sha256: Sha256


class SourceParameter(_Model):
    """The source that the recipe pins."""

    uri: Uri
    digest: DigestSet


class ExternalParameters(_Model):
    """Everything a caller chose: the recipe, and what it says of source, GPUs and interpreter."""

    recipe: RecipeParameter
    source: SourceParameter
    cudaToolkit: Name
    architectures: list[Name]
    python: Name


class BuildDefinition(_Model):
    """SLSA's buildDefinition."""

    buildType: Literal["urn:cufallback:build:v1"]
    externalParameters: ExternalParameters
    internalParameters: dict[str, Any]
    resolvedDependencies: Annotated[list[Descriptor], Field(min_length=1)]


class BuilderDescriptor(_Model):
    """Who built: the trust in a provenance is the trust in this."""

    id: Uri
    version: dict[str, str]


class Metadata(_Model):
    """One run of the build."""

    invocationId: Name
    startedOn: Time
    finishedOn: Time

    @model_validator(mode="after")
    def _runs_forward(self) -> Metadata:
        if self.finishedOn < self.startedOn:
            msg = "finishedOn is before startedOn"
            raise ValueError(msg)
        return self


class RunDetails(_Model):
    """SLSA's runDetails."""

    builder: BuilderDescriptor
    metadata: Metadata
    byproducts: list[Descriptor]


class Predicate(_Model):
    """SLSA provenance v1."""

    buildDefinition: BuildDefinition
    runDetails: RunDetails


class Statement(_Model):
    """in-toto Statement v1 that carries a SLSA provenance v1."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: Annotated[list[SubjectDescriptor], Field(min_length=1)]
    predicateType: Literal["https://slsa.dev/provenance/v1"]
    predicate: Predicate

    @model_validator(mode="after")
    def _names_each_once(self) -> Statement:
        names = [subject.name for subject in self.subject]
        if len(set(names)) != len(names):
            msg = "a subject is named twice"
            raise ValueError(msg)
        return self

    @property
    def subjects(self) -> dict[str, str]:
        """Name → SHA-256 of everything this speaks of."""
        return {subject.name: subject.digest.get("sha256", "") for subject in self.subject}


@dataclass(frozen=True)
class Builder:
    """Who builds. ``version`` maps components of the builder to their versions."""

    id: str
    version: Mapping[str, str]


@dataclass(frozen=True)
class ImageFacts:
    """What an image was built from and with.

    Args:
        bases: its base images.
        tools: versions of the engine and of BuildKit, by name.
    """

    bases: tuple[BaseImage, ...]
    tools: Mapping[str, str]


def builder_of(environ: Mapping[str, str]) -> Builder:
    """Return who builds in this environment.

    GitHub sets these variables on its runners (GitHub Actions documentation, "Default environment variables").
    Anyone can set them: what makes a hosted builder's id true is the platform's signature, not this document. When
    in doubt the weaker claim is made: without a workflow it is a local build, and a runner that is not said to be
    GitHub's own is a self-hosted one.
    """
    version = {"cufallback": __version__}
    workflow = environ.get("GITHUB_WORKFLOW_REF", "")
    server = environ.get("GITHUB_SERVER_URL", "")
    if environ.get("GITHUB_ACTIONS") != "true" or not workflow or not server.startswith("https://"):
        return Builder(LOCAL_BUILDER, version)
    identity = f"{server}/{quote(workflow, safe='/@+')}"
    if environ.get("RUNNER_ENVIRONMENT") != "github-hosted":
        identity += "#self-hosted"
    return Builder(identity, version)


def provenance(
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
    subjects: Sequence[tuple[str, str]],
    *,
    builder: Builder,
    started: float,
    finished: float,
    invocation: str,
    isolation: Mapping[str, str],
    image: ImageFacts | None,
    byproducts: Sequence[tuple[str, str]],
) -> bytes:
    """Return the provenance of a build as canonical JSON.

    Args:
        plan: a complete plan.
        prefetched: the result of the prefetch stage.
        subjects: name and SHA-256 of each wheel and of the image's manifest.
        builder: see :func:`builder_of`.
        started: seconds since 1970.
        finished: seconds since 1970.
        invocation: what identifies this run for its builder.
        isolation: name of each subject's build → how it was kept off the network.
        image: None when no image was built.
        byproducts: path and SHA-256 of logs, inspection and SBOMs.

    Raises:
        AttestationError: the document would not be valid, such as for a subject named twice.
        LockError: the plan is not complete.
    """
    recipe = plan.recipe
    source = _source(prefetched["source"], recipe.source_name)
    jobs = recipe.builder.jobs
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "recipe": {"name": recipe.name, "sha256": sha256_bytes(plan.inputs[f"{recipe.name}.toml"])},
                "source": {"uri": source["uri"], "digest": source["digest"]},
                "cudaToolkit": recipe.cuda.toolkit,
                "architectures": list(recipe.cuda.architectures),
                "python": recipe.python.version,
            },
            "internalParameters": {
                "buildId": plan.build_id,
                "jobs": "all processors" if jobs is None else str(jobs),
                "isolation": dict(isolation),
                "toolchain": plan.toolchain.to_json() if plan.toolchain else {},
                **({"image": dict(image.tools)} if image else {}),
            },
            "resolvedDependencies": [source, *_dependencies(plan, prefetched, image)],
        },
        "runDetails": {
            "builder": {"id": builder.id, "version": dict(builder.version)},
            "metadata": {
                "invocationId": invocation,
                "startedOn": timestamp(started),
                "finishedOn": timestamp(finished),
            },
            "byproducts": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(byproducts)],
        },
    }
    subject = [Subject(name, sha256) for name, sha256 in sorted(subjects)]
    content = statement(subject, PROVENANCE_PREDICATE, predicate)
    check_provenance(content, where="the new provenance")
    return content


def _source(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    if source["kind"] == "git":
        uri = _git_uri(source["origin"], source["ref"])
        return {"name": name, "uri": uri, "digest": {"gitCommit": source["commit"]["id"]}}
    uri = python_purl(source["origin"], source["ref"]).to_string()
    return {"name": name, "uri": uri, "digest": {"sha256": source["archive_sha256"]}}


def _git_uri(url: str, ref: str) -> str:
    # The path of a local repository may have spaces.
    url = url.replace(" ", "%20")
    return f"git+{url}@{quote(ref)}" if ref else f"git+{url}"


def _dependencies(plan: BuildPlan, prefetched: Mapping[str, Any], image: ImageFacts | None) -> list[dict[str, Any]]:
    """Return every pin but the source itself, in the order of the kinds in docs/provenance.md."""
    source = prefetched["source"]
    picks = dict.fromkeys(change["commit"] for change in source["changes"] if change["commit"])
    found = [
        {"name": "cherry-pick", "uri": _git_uri(source["origin"], commit), "digest": {"gitCommit": commit}}
        for commit in picks
    ]
    found += [
        {"name": f"submodule {path}", "digest": {"gitCommit": commit}}
        for path, commit in sorted(source["submodules"].items())
    ]
    found += _fetches(plan, source["fetches"])
    found += [_distribution(row) for row in prefetched["distributions"]]
    found += [
        {"name": f"locks/{plan.recipe.name}/{name}", "digest": {"sha256": sha256_bytes(content)}}
        for name, content in sorted(plan.inputs.items())
        if name in LOCK_FILES or (name == IMAGE_LOCK and image is not None)
    ]
    found.append(
        {
            "name": "build/cuda_probe",
            "digest": {"sha256": plan.probe_sha256},
            "annotations": {"digestOf": "the tree: one line `<git mode> <sha256> <path>` per file"},
        }
    )
    if image is not None:
        found += [
            {"name": f"{DEFINITION}{name}", "digest": {"sha256": sha256_bytes(content)}}
            for name, content in plan.definition.items()
        ]
        found += [_base(base) for base in image.bases]
    return found


def _fetches(plan: BuildPlan, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    submodules = {locked.label: locked.submodules for locked in plan.pinned().source.sources}
    found = []
    for row in rows:
        if row["unused"] is not None:
            continue
        if row["commit"]:
            pin = {"uri": _git_uri(row["url"], row["ref"]), "digest": {"gitCommit": row["commit"]}}
        else:
            pin = {"uri": row["url"].partition(" ")[0], "digest": {"sha256": row["sha256"]}}
        annotations: dict[str, Any] = {"askedBy": row["asked_by"]}
        if named := submodules.get(row["name"], ()):
            # The commit above records theirs.
            annotations["submodules"] = list(named)
        found.append({"name": row["name"], **pin, "annotations": annotations})
    return found


def _distribution(row: Mapping[str, Any]) -> dict[str, Any]:
    index = {} if row["index"] == "default" else {"repository_url": row["index"]}
    return {
        "name": row["filename"],
        "uri": python_purl(row["name"], row["version"], **index).to_string(),
        "digest": {"sha256": row["sha256"]},
        "annotations": {"usedFor": list(row["used_for"])},
    }


def _base(base: BaseImage) -> dict[str, Any]:
    return {
        "name": f"base {base.name}",
        "uri": oci_purl(base.reference, base.digest).to_string(),
        "digest": {"sha256": base.digest.removeprefix("sha256:")},
    }


def check_provenance(content: bytes, *, where: str) -> Statement:
    """Hold a provenance to the strict model: unknown keys are refused, as SLSA asks of a verifier.

    Args:
        content: the statement, without any envelope.
        where: what to call it in errors.

    Raises:
        AttestationError: naming the first fault and its place.
    """
    document = parse_json(content, where=where, remedy=_REMEDY)
    try:
        return Statement.model_validate(document)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "top"
        raise AttestationError(
            f"is no SLSA provenance of this build type: {fault['msg']}", remedy=_REMEDY, where=f"{where}: {place}"
        ) from error
