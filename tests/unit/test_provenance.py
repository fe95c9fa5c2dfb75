"""Provenance: every pin is in it, outside models take it, and no changed field goes unnoticed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement as OutsideStatement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

sys.path.insert(0, str(Path(__file__).parent))

from attest_samples import CHECKOUT, COMMIT, PICK, production_like, sample_plan, sample_prefetched

from cufallback.attest.provenance import (
    LOCAL_BUILDER,
    ImageFacts,
    builder_of,
    check_provenance,
    provenance,
)
from cufallback.attest.subjects import BaseImage
from cufallback.errors import AttestationError
from cufallback.store import canonical_json, sha256_bytes

PLAN = sample_plan()
PREFETCHED = sample_prefetched(PLAN)
PRODUCTION = production_like(PREFETCHED)
SUBJECTS = (("vllm.whl", "11" * 32), ("image", "22" * 32))
IMAGE = ImageFacts(
    (
        BaseImage("runtime", "docker.io/library/debian:12", f"sha256:{'78' * 32}"),
        BaseImage("builder", "oci-layout:/srv/me/base", f"sha256:{'79' * 32}"),
    ),
    {"engine": "26.1.5", "buildkit": "0.13.1"},
)
HOSTED = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_WORKFLOW_REF": "owner/repo/.github/workflows/release.yml@refs/tags/v1",
    "RUNNER_ENVIRONMENT": "github-hosted",
}


def made(prefetched: dict[str, Any] = PREFETCHED, image: ImageFacts | None = IMAGE, **changed: Any) -> bytes:
    options: dict[str, Any] = {
        "builder": builder_of({}),
        "started": 1_800_000_000.7,
        "finished": 1_800_000_060.2,
        "invocation": "run-1",
        "isolation": {"main": "no network interface but loopback"},
        "byproducts": [("logs/main.log", "44" * 32), ("inspection.json", "55" * 32)],
        **changed,
    }
    return provenance(PLAN, prefetched, options.pop("subjects", SUBJECTS), image=image, **options)


def dependencies(content: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(content)["predicate"]["buildDefinition"]["resolvedDependencies"]
    return found


def outside(content: bytes) -> None:
    """What in-toto's own models say, strictly."""
    statement = json_format.Parse(content, StatementMessage(), ignore_unknown_fields=False)
    OutsideStatement.copy_from_pb(statement).validate()
    json_format.ParseDict(json.loads(content)["predicate"], Provenance(), ignore_unknown_fields=False)


@pytest.mark.parametrize("prefetched", [PREFETCHED, PRODUCTION], ids=["archive", "commit"])
@pytest.mark.parametrize("image", [None, IMAGE], ids=["wheels", "image"])
def test_in_totos_models_take_it_and_two_calls_give_the_same_bytes(
    prefetched: dict[str, Any], image: ImageFacts | None
) -> None:
    content = made(prefetched, image)
    assert content == made(prefetched, image) == canonical_json(json.loads(content))
    outside(content)
    assert check_provenance(content, where="p").subjects == dict(SUBJECTS)


def test_every_pin_is_a_resolved_dependency() -> None:
    digests = {value for row in dependencies(made(PRODUCTION)) for value in row["digest"].values()}
    source = PRODUCTION["source"]
    expected = {COMMIT, PICK, PLAN.probe_sha256, "78" * 32, "79" * 32, *source["submodules"].values()}
    expected |= {row["sha256"] for row in PRODUCTION["distributions"]}
    used = [row for row in source["fetches"] if row["unused"] is None]
    expected |= {row["commit"] or row["sha256"] for row in used}
    for name in ("source.lock.toml", "build.txt", "runtime.txt"):
        expected.add(sha256_bytes((CHECKOUT / "locks" / "rehearsal" / name).read_bytes()))
    expected |= {sha256_bytes(path.read_bytes()) for path in (CHECKOUT / "dockerfiles").iterdir() if path.is_file()}
    assert len(used) > 10
    assert digests == expected


@pytest.mark.parametrize(
    ("prefetched", "uri", "digest"),
    [
        (PREFETCHED, "pkg:pypi/vllm@0.27.1", {"sha256": PREFETCHED["source"]["archive_sha256"]}),
        (PRODUCTION, "git+https://github.com/vllm-project/vllm.git@v0.27.1", {"gitCommit": COMMIT}),
        (PREFETCHED, "pkg:pypi/torch@2.13.0%2Bcpu?repository_url=https://download.pytorch.org/whl/cpu", None),
        (PRODUCTION, "https://example.org/x.tar.gz", {"sha256": "34" * 32}),
        (PREFETCHED, "pkg:oci/debian@sha256:" + "78" * 32 + "?repository_url=docker.io/library/debian&tag=12", None),
        (PREFETCHED, "pkg:oci/base@sha256:" + "79" * 32, {"sha256": "79" * 32}),
    ],
)
def test_a_pin_has_the_uri_of_its_kind(prefetched: dict[str, Any], uri: str, digest: dict[str, str] | None) -> None:
    rows = {row.get("uri"): row for row in dependencies(made(prefetched))}
    assert uri in rows
    assert digest is None or rows[uri]["digest"] == digest


def test_sources_that_are_not_used_are_no_dependencies() -> None:
    assert not any("github.com" in row.get("uri", "") for row in dependencies(made()))


def test_a_local_repository_may_have_a_space_in_its_path() -> None:
    source = {**PRODUCTION["source"], "origin": "file:///my sources/vllm"}
    first, pick, *_others = dependencies(made({**PRODUCTION, "source": source}))
    assert first["uri"] == "git+file:///my%20sources/vllm@v0.27.1"
    assert pick["uri"] == f"git+file:///my%20sources/vllm@{PICK}"


def test_external_parameters_are_what_a_caller_chose() -> None:
    assert json.loads(made())["predicate"]["buildDefinition"]["externalParameters"] == {
        "recipe": {"name": "rehearsal", "sha256": sha256_bytes(PLAN.inputs["rehearsal.toml"])},
        "source": {"uri": "pkg:pypi/vllm@0.27.1", "digest": {"sha256": PREFETCHED["source"]["archive_sha256"]}},
        "cudaToolkit": "12.9.1",
        "architectures": ["9.0a", "10.0a", "10.3a"],
        "python": "3.11",
    }


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, LOCAL_BUILDER),
        ({"CI": "true"}, LOCAL_BUILDER),
        ({"GITHUB_ACTIONS": "true"}, LOCAL_BUILDER),
        (HOSTED | {"GITHUB_ACTIONS": "false"}, LOCAL_BUILDER),
        (HOSTED, "https://github.com/owner/repo/.github/workflows/release.yml@refs/tags/v1"),
        (
            HOSTED | {"RUNNER_ENVIRONMENT": "self-hosted"},
            "https://github.com/owner/repo/.github/workflows/release.yml@refs/tags/v1#self-hosted",
        ),
        (
            {name: value for name, value in HOSTED.items() if name != "RUNNER_ENVIRONMENT"},
            "https://github.com/owner/repo/.github/workflows/release.yml@refs/tags/v1#self-hosted",
        ),
        (
            HOSTED | {"GITHUB_WORKFLOW_REF": "o/r/.github/workflows/a b.yml@refs/heads/#self-hosted"},
            "https://github.com/o/r/.github/workflows/a%20b.yml@refs/heads/%23self-hosted",
        ),
    ],
)
def test_a_builder_makes_no_stronger_claim_than_its_environment(environment: dict[str, str], identity: str) -> None:
    builder = builder_of(environment)
    assert builder.id == identity
    check_provenance(made(builder=builder), where="p")


Change = Callable[[dict[str, Any]], object]
# Name → change, and whether in-toto's models see it too: some rules are SLSA's words or this build type's own.
FAULTS: dict[str, tuple[Change, bool]] = {
    "unknown key": (lambda d: d.update(extra=1), True),
    "another type": (lambda d: d.update(_type="https://in-toto.io/Statement/v0.1"), True),
    "another predicate type": (lambda d: d.update(predicateType="https://slsa.dev/provenance/v0.2"), False),
    "no subject": (lambda d: d.update(subject=[]), True),
    "no predicate": (lambda d: d.pop("predicate"), True),
    "subject without digest": (lambda d: d["subject"][0].pop("digest"), True),
    "subject with an empty digest": (lambda d: d["subject"][0].update(digest={}), True),
    "digest that is none": (lambda d: d["subject"][0].update(digest={"sha256": "xyz"}), False),
    "digest in capitals": (lambda d: d["subject"][0].update(digest={"sha256": "AB" * 32}), False),
    "digest of another kind": (lambda d: d["subject"][0].update(digest={"md5": "11" * 16}), False),
    "subject twice": (lambda d: d["subject"].append(d["subject"][0]), False),
    "key of a predicate": (lambda d: d["predicate"].update(extra={}), True),
    "key of a definition": (lambda d: d["predicate"]["buildDefinition"].update(extra={}), True),
    "key of a parameter": (
        lambda d: d["predicate"]["buildDefinition"]["externalParameters"].update(extra="1"),
        False,
    ),
    "parameter missing": (lambda d: d["predicate"]["buildDefinition"]["externalParameters"].pop("python"), False),
    "another build type": (lambda d: d["predicate"]["buildDefinition"].update(buildType="urn:x"), False),
    "dependency that says nothing": (
        lambda d: d["predicate"]["buildDefinition"]["resolvedDependencies"].append({"name": "x"}),
        False,
    ),
    "password in a uri": (
        lambda d: d["predicate"]["buildDefinition"]["resolvedDependencies"].append({"uri": "git+https://a:b@x/y"}),
        False,
    ),
    "no dependency": (lambda d: d["predicate"]["buildDefinition"].update(resolvedDependencies=[]), False),
    "number for a name": (lambda d: d["subject"][0].update(name=1), True),
    "no builder": (lambda d: d["predicate"]["runDetails"].pop("builder"), False),
    "key of a builder": (lambda d: d["predicate"]["runDetails"]["builder"].update(extra="x"), True),
    "time that is none": (
        lambda d: d["predicate"]["runDetails"]["metadata"].update(startedOn="yesterday"),
        True,
    ),
    "time without zone": (
        lambda d: d["predicate"]["runDetails"]["metadata"].update(startedOn="2027-01-15T08:00:00"),
        True,
    ),
    "end before start": (
        lambda d: d["predicate"]["runDetails"]["metadata"].update(finishedOn="1999-01-01T00:00:00Z"),
        False,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_changed_field_is_named_with_its_place(name: str) -> None:
    change, seen_outside = FAULTS[name]
    document = json.loads(made())
    change(document)
    content = canonical_json(document)
    with pytest.raises(AttestationError) as caught:
        check_provenance(content, where="provenance.intoto.json")
    assert str(caught.value.where).startswith("provenance.intoto.json: ")
    if seen_outside:
        with pytest.raises((json_format.ParseError, ValueError)):
            outside(content)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(AttestationError):
        check_provenance(content, where="p")


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"_type": ', b'"_type": "x",\n  "_type": '), (b'"jobs": "all processors"', b'"jobs": NaN')],
    ids=["key twice", "no number of JSON"],
)
def test_what_readers_may_take_in_different_ways_is_refused(old: bytes, new: bytes) -> None:
    content = made()
    assert content.count(old) == 1
    with pytest.raises(AttestationError):
        check_provenance(content.replace(old, new), where="p")


@pytest.mark.parametrize(
    "changed", [{"subjects": ()}, {"subjects": SUBJECTS * 2}, {"finished": 0.0}], ids=["none", "twice", "backwards"]
)
def test_no_provenance_is_written_that_would_be_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(AttestationError):
        made(**changed)
