"""Sign, push, verify from the registry: what a release manager does with a build, and what must stop him."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build_rooms import Command, replace_file
from image_rooms import ImageBuild, Keys, PushedBuild, one_error
from registry_rooms import cosign as run_cosign
from registry_rooms import make_image, tags
from tests.services.faulty_registry import Fault, FaultyRegistry, connections_closed
from tests.unit.sign_rooms import openssl, write_key

from cufallback.attest.documents import IMAGE_SBOM
from cufallback.attest.keys import load_public_key
from cufallback.attest.sign import open_envelope, verify_envelope
from cufallback.attest.statement import Subject, statement
from cufallback.errors import ExitCode
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Registry
from cufallback.process import LocalRunner
from cufallback.publish import write_archive
from cufallback.push import BUILD_MEDIA_TYPE, BUILD_TYPE
from cufallback.record import read_record

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.network]

Front = Callable[[Fault], FaultyRegistry]
DOCUMENTS = {
    "image.cdx.json": "application/vnd.cyclonedx+json",
    "provenance.intoto.json": "application/vnd.in-toto+json",
    "build.tar": "application/vnd.cufallback.build.v1",
}


@pytest.fixture
def client(oras: str) -> Registry:
    return Registry(LocalRunner(), log=None, sleep=lambda _seconds: None)


@pytest.fixture
def folder(signed_build: ImageBuild, tmp_path: Path) -> Path:
    """A copy of the signed build, to be altered."""
    return signed_build.copy_folder(tmp_path)


def shown(reference: Reference) -> dict[str, str]:
    """The tags that a person gave, and their digests."""
    return {name: digest for name, digest in tags(reference).items() if not name.startswith("sha256-")}


# What was pushed


def test_all_that_is_said_of_the_image_is_attached(pushed_build: PushedBuild, signed_build: ImageBuild) -> None:
    told = pushed_build.told["documents"]
    assert isinstance(told, list)
    found = {row["name"]: row["artifact_type"] for row in told}
    signatures = sorted(path.name for path in (signed_build.folder / "signatures").iterdir())
    assert len(signatures) == 5
    assert found == DOCUMENTS | dict.fromkeys(signatures, "application/vnd.dsse.envelope.v1+json")
    assert pushed_build.reference.digest == signed_build.digest
    assert shown(pushed_build.reference)["v1"] == signed_build.digest


def test_it_verifies_from_the_registry_by_tag_with_the_key(
    pushed_build: PushedBuild, signed_build: ImageBuild, keys: Keys, command: Command
) -> None:
    code, stdout, stderr = command.run("verify", f"{pushed_build.name}:v1", "--key", keys.public, "--json")
    assert code == 0, stdout + stderr
    (told,) = json.loads(stdout)
    statuses = {row["what"]: row["status"] for row in told["checks"]}
    assert told["build_id"] == signed_build.record.build_id
    assert set(statuses.values()) == {"passed", "not_run"}
    for name in ("provenance", "record", "sbom-image"):
        assert statuses[f"signature signatures/{name}.dsse.json"] == "passed"
    assert statuses["image"] == statuses["attached sbom/image.cdx.json"] == "passed"
    not_run = {what for what, status in statuses.items() if status == "not_run"}
    quoted = {"source commit", "provenance.intoto.json: builder"}
    assert not_run == {"edited tree", "base image base", "image configuration", *quoted}


def test_by_digest_another_key_proves_nothing(pushed_build: PushedBuild, command: Command, tmp_path: Path) -> None:
    _private, public = write_key(tmp_path, "other")
    code, stdout, _stderr = command.run("verify", pushed_build.reference, "--key", public, "--json")
    assert code == ExitCode.VERIFY_FAILED
    (told,) = json.loads(stdout)
    failed = [row["what"] for row in told["checks"] if row["status"] == "failed"]
    assert len(failed) == 5
    assert all(what.startswith("signature ") for what in failed)


@pytest.mark.parametrize("kind", ["slsaprovenance1", "cyclonedx"])
def test_cosign_finds_and_verifies_the_attestations(
    pushed_build: PushedBuild, keys: Keys, cosign: str, tmp_path: Path, kind: str
) -> None:
    offline = ("--insecure-ignore-tlog=true", "--allow-http-registry")
    words = ("verify-attestation", *offline, "--type", kind, str(pushed_build.reference), "--key")
    done = run_cosign(*words, keys.public)
    assert done.returncode == 0, done.stderr
    assert run_cosign(*words, write_key(tmp_path, "other")[1]).returncode != 0


def test_a_second_push_attaches_nothing_anew_and_moves_a_tag_only_on_demand(
    pushed_build: PushedBuild, signed_build: ImageBuild, client: Registry, command: Command, tmp_path: Path
) -> None:
    repository = parse_reference(pushed_build.name)
    other = make_image(tmp_path / "other", "other")
    client.push(tmp_path / "other", other, repository)
    client.tag(repository.at(other), "taken")
    before = tags(repository)
    words = ("push", "--build", signed_build.folder, f"{repository}:taken", "--json")
    code, _stdout, stderr = command.run(*words)
    assert code == ExitCode.TAG
    error = one_error(stderr)
    assert other in error
    assert "--move-tag" in error
    assert tags(repository) == before
    code, stdout, stderr = command.run(*words, "--move-tag")
    assert code == 0, stderr
    told = json.loads(stdout)
    assert told["image_already_there"]
    assert {row["already_there"] for row in told["documents"]} == {True}
    assert tags(repository) == {**before, "taken": signed_build.digest}, "the list of referrers is the same too"
    assert len(client.referrers(pushed_build.reference)) == len(told["documents"])


def test_a_registry_that_dies_in_between_is_left_without_a_tag_and_the_next_push_goes_on(
    signed_build: ImageBuild, registry: str, faulty_registry: Front, client: Registry, command: Command
) -> None:
    front = faulty_registry(connections_closed(matching=r"^PUT .*/manifests/"))
    code, _stdout, stderr = command.run("push", "--build", signed_build.folder, f"{front.address}/resumed:v1")
    assert code == ExitCode.REGISTRY, stderr
    one_error(stderr)
    repository = parse_reference(f"{registry}/resumed")
    assert tags(repository) == {}
    watch = faulty_registry(lambda _exchange: None)
    code, _stdout, stderr = command.run("push", "--build", signed_build.folder, f"{watch.address}/resumed:v1")
    assert code == 0, stderr
    assert shown(repository) == {"v1": signed_build.digest}
    sent = [request.line for request in watch.requests if request.line.startswith("PUT") and "/blobs/" in request.line]
    layers = {layer.hex for layer in signed_build.image.layers}
    assert not [line for line in sent if any(layer in line for layer in layers)], "the layers were there already"


def test_an_acceptance_result_goes_with_the_image_and_one_about_another_does_not(
    folder: Path, signed_build: ImageBuild, registry: str, command: Command
) -> None:
    """The form of a result: an in-toto test result about the image."""
    place = folder / "acceptance" / "smoke.intoto.json"
    place.parent.mkdir()
    digest = signed_build.digest.removeprefix("sha256:")
    kind, result = "https://in-toto.io/attestation/test-result/v0.1", {"result": "PASSED", "configuration": []}
    place.write_bytes(statement([Subject("the image", digest)], kind, result))
    code, stdout, stderr = command.run("push", "--build", folder, f"{registry}/accepted", "--json")
    assert code == 0, stderr
    told = json.loads(stdout)
    assert {row["name"] for row in told["documents"]} >= {"smoke.intoto.json", "provenance.intoto.json"}
    code, stdout, stderr = command.run("verify", told["reference"], "--json")
    assert code == 0, stdout + stderr
    statuses = {row["what"]: row["status"] for row in json.loads(stdout)[0]["checks"]}
    assert statuses["acceptance/smoke.intoto.json"] == statuses["attached provenance.intoto.json"] == "passed"
    place.write_bytes(statement([Subject("the image", "0" * 64)], kind, result))
    code, _stdout, stderr = command.run("push", "--build", folder, f"{registry}/refused")
    assert code == ExitCode.RECORD
    assert "acceptance/smoke.intoto.json" in one_error(stderr)
    assert tags(parse_reference(f"{registry}/refused")) == {}


def test_a_folder_with_a_broken_signature_is_not_pushed(folder: Path, registry: str, command: Command) -> None:
    replace_file(folder / "signatures/provenance.dsse.json", b"{}\n")
    code, _stdout, stderr = command.run("push", "--build", folder, f"{registry}/broken")
    assert code == ExitCode.RECORD
    assert "signatures/provenance.dsse.json" in one_error(stderr)
    assert tags(parse_reference(f"{registry}/broken")) == {}


# What is not pushed, and what does not verify


def exchange_sbom(folder: Path) -> None:
    replace_file(folder / IMAGE_SBOM, b"{}\n")


def take_signature(folder: Path) -> None:
    (folder / "signatures/sbom-image.dsse.json").unlink()


def take_all_signatures(folder: Path) -> None:
    shutil.rmtree(folder / "signatures")


def alter_payload(folder: Path) -> None:
    path = folder / "signatures/record.dsse.json"
    envelope = json.loads(path.read_bytes())
    other = json.loads((folder / "signatures/provenance.dsse.json").read_bytes())
    replace_file(path, json.dumps({**envelope, "payload": other["payload"]}).encode())


@pytest.mark.parametrize(
    ("alter", "failed"),
    [
        (exchange_sbom, "file sbom/image.cdx.json"),
        (take_signature, "signature signatures/sbom-image.dsse.json"),
        (take_all_signatures, "signature signatures/record.dsse.json"),
        (alter_payload, "signature signatures/record.dsse.json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_is_not_as_it_was_signed(
    folder: Path, keys: Keys, capsys: pytest.CaptureFixture[str], alter: Callable[[Path], object], failed: str
) -> None:
    from cufallback.__main__ import main

    alter(folder)
    assert main(["verify", str(folder), "--key", str(keys.public), "--json"]) == ExitCode.VERIFY_FAILED
    (told,) = json.loads(capsys.readouterr().out)
    assert failed in {row["what"] for row in told["checks"] if row["status"] == "failed"}


def test_a_folder_that_does_not_verify_is_neither_pushed_nor_signed(
    folder: Path, registry: str, keys: Keys, faulty_registry: Front, command: Command
) -> None:
    exchange_sbom(folder)
    front = faulty_registry(lambda _exchange: None)
    for words in (("push", "--build", folder, f"{front.address}/refused:v1"), ("sign", folder, "--key", keys.private)):
        code, _stdout, stderr = command.run(*words)
        assert code == ExitCode.RECORD
        assert "does not verify: file sbom/image.cdx.json" in one_error(stderr)
    assert front.requests == [], "nothing may be sent"


def test_a_build_without_an_image_is_not_pushed(rehearsal: ImageBuild, registry: str, command: Command) -> None:
    code, _stdout, stderr = command.run("push", "--build", rehearsal.folder, f"{registry}/none:v1")
    assert code == ExitCode.IMAGE
    assert "this build has no image" in one_error(stderr)


def test_the_record_of_another_image_does_not_pass_for_this_ones(
    signed_build: ImageBuild, registry: str, client: Registry, command: Command, tmp_path: Path
) -> None:
    there = parse_reference(f"{registry}/borrowed").at(make_image(tmp_path / "image", "not what the record is of"))
    client.push(tmp_path / "image", str(there.digest), there)
    code, _stdout, stderr = command.run("verify", there)
    assert code == ExitCode.REGISTRY
    assert "no build record is attached" in one_error(stderr)
    archive = tmp_path / "build.tar"
    write_archive(signed_build.folder, read_record(signed_build.folder), archive)

    def attach() -> None:
        client.attach(there, archive, artifact_type=BUILD_TYPE, media_type=BUILD_MEDIA_TYPE, annotations={})

    attach()
    code, stdout, stderr = command.run("verify", there, "--json")
    assert code == ExitCode.VERIFY_FAILED, stderr
    failed = {row["what"]: row["why"] for row in json.loads(stdout)[0]["checks"] if row["status"] == "failed"}
    assert failed["image"] == f"{there.digest}; the record is of {signed_build.digest}"
    assert {"attached sbom/image.cdx.json", "attached provenance.intoto.json"} <= failed.keys()
    archive.write_bytes(archive.read_bytes() + bytes(512))
    attach()
    code, stdout, stderr = command.run("verify", there)
    assert code == ExitCode.VERIFY_FAILED, "two false ones are no better"


def test_two_builds_of_one_image_both_verify(
    signed_build: ImageBuild, registry: str, keys: Keys, client: Registry, command: Command, tmp_path: Path
) -> None:
    """A build that is repeated gives the same image, another record, and signatures of the same names."""
    words = signed_build.elsewhere(tmp_path, "prefetch", "wheels", "inspect", "image")
    code, stdout, stderr = command.run(*words, "--json")
    assert code == 0, stderr
    again = Path(json.loads(stdout)["folder"])
    assert (again / "record.json").read_bytes() != (signed_build.folder / "record.json").read_bytes()
    code, _stdout, stderr = command.run("sign", again, "--key", keys.private)
    assert code == 0, stderr
    for folder in (signed_build.folder, again):
        code, _stdout, stderr = command.run("push", "--build", folder, f"{registry}/twice:v1")
        assert code == 0, stderr
    there = parse_reference(f"{registry}/twice").at(signed_build.digest)
    assert [item.artifact_type for item in client.referrers(there)].count(BUILD_TYPE) == 2
    code, stdout, _stderr = command.run("verify", there, "--key", keys.public)
    assert code == 0, stdout


def test_a_false_sbom_beside_the_true_one_is_told(
    signed_build: ImageBuild, registry: str, client: Registry, command: Command, tmp_path: Path
) -> None:
    code, _stdout, stderr = command.run("push", "--build", signed_build.folder, f"{registry}/beside")
    assert code == 0, stderr
    there = parse_reference(f"{registry}/beside").at(signed_build.digest)
    (tmp_path / "image.cdx.json").write_text("{}")
    kind = DOCUMENTS["image.cdx.json"]
    client.attach(there, tmp_path / "image.cdx.json", artifact_type=kind, media_type=kind, annotations={})
    code, stdout, _stderr = command.run("verify", there, "--json")
    assert code == ExitCode.VERIFY_FAILED
    failed = [row["what"] for row in json.loads(stdout)[0]["checks"] if row["status"] == "failed"]
    assert failed == ["attached sbom/image.cdx.json"]


def test_a_key_with_a_password_signs_when_the_environment_has_it(
    folder: Path, keys: Keys, command: Command, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", keys.private, "-aes256", "-passout", "pass:right", "-out", locked)
    locked.chmod(0o600)
    before = (folder / "signatures/record.dsse.json").read_bytes()
    code, _stdout, stderr = command.run("sign", folder, "--key", locked, CUFALLBACK_SIGNING_PASSWORD="wrong")
    assert code == ExitCode.KEY
    assert "right" not in one_error(stderr)
    code, _stdout, stderr = command.run("sign", folder, CUFALLBACK_SIGNING_KEY=locked.read_text())
    assert code == ExitCode.KEY
    assert "there is no password" in one_error(stderr)
    assert (folder / "signatures/record.dsse.json").read_bytes() == before
    code, stdout, stderr = command.run(
        "sign", folder, CUFALLBACK_SIGNING_KEY=locked.read_text(), CUFALLBACK_SIGNING_PASSWORD="right"
    )
    assert code == 0, stderr
    assert len(stdout.splitlines()) == 5
    signed = (folder / "signatures/record.dsse.json").read_bytes()
    assert signed != before
    verify_envelope(open_envelope(signed, where="record"), load_public_key(keys.public), where="record")
