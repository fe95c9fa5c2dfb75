"""What goes wrong while an image is made, and images and documents that lie: one clear error or the right check."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from build_rooms import Command, replace_file
from image_rooms import BEFORE_IMAGE, NOWHERE, STAGES, ImageBuild, data_copy, one_error
from registry_rooms import delete, make_image
from test_verify_forgeries import at, edit_json, failed, seal
from tests.services.base import BaseLayout

from cufallback.attest.check import check_provenance_of, check_sboms
from cufallback.attest.documents import IMAGE_SBOM, PROVENANCE
from cufallback.checks import Check
from cufallback.crosscheck import check_stages, rebuild_plan
from cufallback.errors import AttestationError, ExitCode
from cufallback.image.check import check_config
from cufallback.image.layout import read_image
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Registry
from cufallback.process import LocalRunner
from cufallback.record import RECORD, read_record
from cufallback.store import sha256_bytes

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.network]

OTHER = "ab" * 32


# An image is damaged


def test_a_damaged_image_is_noticed_and_not_laid_out(
    image_build: ImageBuild, engine: str, command: Command, tmp_path: Path
) -> None:
    words = image_build.elsewhere(tmp_path, *STAGES[:-1])
    layer = image_build.image.layers[-1]
    damaged = image_build.stage(tmp_path / "work", "image") / "image" / "blobs" / "sha256" / layer.hex
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    replace_file(damaged, bytes(content))
    code, _stdout, stderr = command.run(*words, **NOWHERE)
    assert code == ExitCode.IMAGE, stderr
    assert "image: its output changed on disk, redone\n" in stderr
    assert "the Docker engine went away during the build" in one_error(stderr)
    assert not damaged.exists()
    assert not list(tmp_path.rglob(RECORD))


# Base images


def damaged_base(base: BaseLayout, folder: Path) -> str:
    """Return the ``--base`` of a copy of the base whose layer has a flipped byte."""
    copy = Path(shutil.copytree(base.folder, folder / "base", copy_function=os.link))
    layer = max((copy / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    replace_file(layer, layer.read_bytes()[:-1] + b"\0")
    return f"base=oci-layout:{copy}@{base.digest}"


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        ("LAYOUT", ExitCode.USAGE, "not of the form NAME=oci-layout:DIR@sha256:DIGEST"),
        ("base=docker-image://debian@DIGEST", ExitCode.USAGE, "not of the form"),
        ("base=oci-layout:LAYOUT", ExitCode.USAGE, "not of the form"),
        ("bass=oci-layout:LAYOUT@DIGEST", ExitCode.USAGE, "'bass' is no base of recipe rehearsal"),
        ("base=oci-layout:/nowhere@DIGEST", ExitCode.IMAGE, "is no OCI image layout"),
        (f"base=oci-layout:LAYOUT@sha256:{OTHER}", ExitCode.IMAGE, f"instead of one image sha256:{OTHER}"),
        ("DAMAGED", ExitCode.IMAGE, "the layer has digest"),
    ],
)
def test_a_replaced_base_that_cannot_be_used(
    base_layout: BaseLayout, command: Command, tmp_path: Path, given: str, code: ExitCode, reason: str
) -> None:
    if given == "DAMAGED":
        given = damaged_base(base_layout, tmp_path)
    given = given.replace("LAYOUT", str(base_layout.folder)).replace("DIGEST", base_layout.digest)
    status, _stdout, stderr = command.run("plan", "--recipe", "rehearsal", "--work", tmp_path / "work", "--base", given)
    assert status == code, stderr
    assert reason in one_error(stderr)


@dataclass(frozen=True)
class Locked:
    """A copy of the recipe whose base image is a tag of the real registry."""

    base: Reference
    data: dict[str, str]
    lock: Path
    work: Path
    client: Registry

    def move(self, digest: str) -> None:
        """Let the tag name another image of the repository."""
        self.client.tag(self.base.at(digest), "1")


@pytest.fixture(scope="module")
def locked(
    image_build: ImageBuild, base_layout: BaseLayout, registry: str, oras: str, tmp_path_factory: pytest.TempPathFactory
) -> Locked:
    root, base = tmp_path_factory.mktemp("locked"), parse_reference(f"{registry}/library/python:1")
    client = Registry(LocalRunner(), log=None)
    client.push(base_layout.folder, base_layout.digest, base)
    client.tag(base.at(base_layout.digest), "1")
    data = data_copy(root, recipe=("docker.io/library/python:3.11-slim-bookworm", str(base)))
    lock = Path(data["CUFALLBACK_DATA"]) / "locks/rehearsal/images.lock.toml"
    return Locked(base, data, lock, image_build.copy_work(root / "work", *BEFORE_IMAGE), client)


def test_the_lock_follows_the_tag_only_when_asked(
    locked: Locked, base_layout: BaseLayout, command: Command, tmp_path: Path
) -> None:
    words = ("lock", "--images", "--recipe", "rehearsal", "--work", locked.work)
    code, stdout, stderr = command.run(*words, **locked.data)
    assert code == 0, stderr
    first = locked.lock.read_text()
    assert f'reference = "{locked.base}"' in first
    assert f'"linux/amd64" = "{base_layout.digest}"' in first
    assert command.run(*words, "--check", **locked.data)[0] == 0
    other = make_image(tmp_path / "other", "another python")
    locked.client.push(tmp_path / "other", other, locked.base)
    locked.move(other)
    try:
        code, stdout, _stderr = command.run(*words, "--check", **locked.data)
        assert code == ExitCode.LOCK_DRIFT
        assert f'-"linux/amd64" = "{base_layout.digest}"' in stdout
        assert f'+"linux/amd64" = "{other}"' in stdout
        assert locked.lock.read_text() == first, "--check writes nothing"
    finally:
        locked.move(base_layout.digest)
    code, _stdout, stderr = command.run(*words, **locked.data)
    assert code == 0, stderr
    assert locked.lock.read_text() == first, "nothing has changed, so neither has the date"


def test_a_base_that_is_gone_from_the_registry_is_said_and_the_rest_is_built(
    locked: Locked, base_layout: BaseLayout, command: Command, tmp_path: Path
) -> None:
    code, _stdout, stderr = command.run(
        "lock", "--images", "--work", locked.work, "--recipe", "rehearsal", **locked.data
    )
    assert code == 0, stderr
    delete(locked.base.at(base_layout.digest))
    words = ("build", "--recipe", "rehearsal", "--work", locked.work, "--dist", tmp_path)
    code, _stdout, stderr = command.run(*words, "--require-image", **locked.data)
    assert code == ExitCode.IMAGE
    assert re.search("no image can be built here: .*not found", one_error(stderr))
    code, _stdout, stderr = command.run(*words, "--until", "image", **locked.data)
    assert code == 0, stderr
    told = re.search(r"^image: not built: (.*); remedy: .+$", stderr, re.MULTILINE)
    assert told
    assert "not found" in told[1]


# Dockerfiles and what they make


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "FROM base AS dependencies",
            "FROM docker.io/library/debian:12 AS dependencies",
            "'docker.io/library/debian:12'",
        ),
        ("FROM base AS dependencies", "FROM python AS dependencies", "'python' is no stage above"),
        (
            'ENTRYPOINT ["vllm"',
            'COPY --from=ghcr.io/other/image:1 /x /x\nENTRYPOINT ["vllm"',
            "'ghcr.io/other/image:1'",
        ),
        ("# Images of locked wheels.", "# syntax=docker/dockerfile:1\n#", "fetches docker/dockerfile:1"),
        (" AS probe", " AS sonde", "has no stage 'probe'"),
    ],
)
def test_a_dockerfile_that_takes_what_nothing_pins(
    command: Command, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    data = data_copy(tmp_path, dockerfile=(old, new))
    code, _stdout, stderr = command.run("plan", "--recipe", "rehearsal", "--work", tmp_path / "work", **data)
    assert code == ExitCode.IMAGE, stderr
    error = one_error(stderr)
    assert reason in error
    assert "dockerfiles/cu129.Dockerfile" in error


def test_assertions_inside_the_image_name_all_that_is_wrong(
    image_build: ImageBuild, command: Command, tmp_path: Path
) -> None:
    site = "/opt/vllm/lib/python3.11/site-packages"
    spoiled = (
        f"RUN --network=none rm {site}/vllm/spinloop*.so && rm -r {site}/cuda_probe && rm -r {site}/regex-*.dist-info"
        f" && sed -i 's/^cuda.*/cuda = \"13.0\"/' {site}/torch/version.py\nUSER root\n"
    )
    data = data_copy(tmp_path, dockerfile=("USER 10001:10001\n", spoiled))
    code, _stdout, stderr = command.run(*image_build.elsewhere(tmp_path, *BEFORE_IMAGE), **data)
    assert code == ExitCode.IMAGE, stderr
    error = one_error(stderr)
    assert error.startswith("error: ")
    assert "the image is not what the plan says:" in error
    for line in (
        "user: runs as uid 0",
        "distributions: regex is absent instead of ",
        "torch.version.cuda: is 13.0, the recipe says None",
        "import vllm.spinloop: No module named 'vllm.spinloop'",
        "import cuda_probe: No module named 'cuda_probe'",
    ):
        assert f"\n  {line}" in error
    assert not list(tmp_path.rglob(RECORD))


# Images and documents that lie, with every digest brought in line


class Forged:
    """A copy of a build folder whose image is rewritten blob by blob."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / RECORD).read_bytes())

    def _put(self, content: bytes, old: str) -> str:
        blobs = self.folder / "image" / "blobs" / "sha256"
        (blobs / old.removeprefix("sha256:")).unlink()
        digest = sha256_bytes(content)
        (blobs / digest).write_bytes(content)
        return f"sha256:{digest}"

    def rewrite_config(self, edit: Callable[[Any], object]) -> None:
        """Edit the image's config and carry the new digests through manifest, index and record."""
        image, layout = self.record["image"], self.folder / "image"
        old = {"config": image["config"]["digest"], "manifest": image["manifest"]["digest"]}
        blobs = layout / "blobs" / "sha256"
        config = json.loads((blobs / old["config"].removeprefix("sha256:")).read_bytes())
        edit(config)
        content = json.dumps(config).encode()
        image["size"] -= image["config"]["size"] + image["manifest"]["size"]
        image["config"] |= {"digest": self._put(content, old["config"]), "size": len(content)}
        manifest = json.loads((blobs / old["manifest"].removeprefix("sha256:")).read_bytes())
        manifest["config"] |= {"digest": image["config"]["digest"], "size": len(content)}
        content = json.dumps(manifest).encode()
        image["manifest"] |= {"digest": self._put(content, old["manifest"]), "size": len(content)}
        image["size"] += image["config"]["size"] + image["manifest"]["size"]
        index = json.loads((layout / "index.json").read_bytes())
        index["manifests"][0] |= {"digest": image["manifest"]["digest"], "size": len(content)}
        replace_file(layout / "index.json", json.dumps(index).encode())
        image["index"] = f"sha256:{sha256_bytes((layout / 'index.json').read_bytes())}"
        for document in (IMAGE_SBOM, PROVENANCE):
            text = (self.folder / document).read_text()
            replace_file(
                self.folder / document,
                text.replace(old["manifest"].removeprefix("sha256:"), image["manifest"]["digest"][7:]).encode(),
            )
        edit_json(self.folder / RECORD, lambda record: record.update(image=image))


@pytest.fixture
def forged(image_build: ImageBuild, tmp_path: Path) -> Forged:
    return Forged(image_build.copy_folder(tmp_path))


def disagreements(forged: Forged) -> dict[str, str]:
    """Bring the digests in line; return the failed checks of image and documents but those that read whole layers."""
    seal(forged.folder)
    record = read_record(forged.folder)
    plan = rebuild_plan(forged.folder, record)
    checks = list(check_stages(record))
    if record.image is not None:
        image = read_image(forged.folder / record.image.path, record.image.manifest.digest)
        checks += check_config(image, record, plan)
    try:
        checks += check_sboms(forged.folder, record, plan)
        checks += check_provenance_of(forged.folder, record, plan)
    except AttestationError as error:
        checks.append(Check(str(error.where), "failed", error.reason))
    return {check.what: check.why for check in checks if check.status == "failed"}


def test_a_forger_who_changes_nothing_changes_nothing(forged: Forged) -> None:
    assert disagreements(forged) == {}


def test_verify_makes_these_checks_and_reads_the_report_in_the_layers(forged: Forged) -> None:
    forged.rewrite_config(at("config", "Labels", "cufallback.build-id", to=OTHER))
    edit_json(forged.folder / RECORD, at("image", "checks", 0, "why", to="runs as uid 10002"))
    edit_json(forged.folder / IMAGE_SBOM, _dangling)
    edit_json(forged.folder / PROVENANCE, at("subject", 0, "digest", "sha256", to=OTHER))
    seal(forged.folder)
    found = failed(forged.folder)
    assert {"image labels in its config", "image checks", "SBOMs", f"{PROVENANCE}: subjects"} <= found.keys()
    assert "10002" in found["image checks"]


CONFIGS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "a version": (
        at("config", "Labels", "org.opencontainers.image.version", to="9.9"),
        "image labels in its config",
        "version",
    ),
    "a build id": (at("config", "Labels", "cufallback.build-id", to=OTHER), "image labels in its config", "build-id"),
    "root": (at("config", "User", to="0"), "image user", "is 0"),
    "an entry point": (at("config", "Entrypoint", to=["sh"]), "image", "entrypoint"),
    "a driver": (
        lambda config: config["config"].update(
            Env=[re.sub(r"(driver>=).*", r"\g<1>525.0", text) for text in config["config"]["Env"]]
        ),
        "NVIDIA_REQUIRE_CUDA",
        "525",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_image_that_lies(forged: Forged, name: str) -> None:
    edit, check, why = CONFIGS[name]
    forged.rewrite_config(edit)
    found = disagreements(forged)
    assert check in found, found
    assert why in found[check]


@pytest.mark.parametrize("name", ["install.sh", "wheels/vllm.tar.gz", "image/manifest.json", "logs/run.sh"])
def test_a_file_that_no_build_writes(forged: Forged, name: str) -> None:
    """Listed in the record with its true digest, and still nothing that a build leaves."""
    (forged.folder / name).write_bytes(b"echo evil\n")
    seal(forged.folder)
    assert failed(forged.folder).get(f"file {name}") == "no build writes a file there"


def _dangling(bom: Any) -> None:
    bom["dependencies"][0]["dependsOn"].append("nowhere")


def _without_packages(bom: Any) -> None:
    """An SBOM that hides the system: valid, connected, and about the right image."""
    gone = {row["bom-ref"] for row in bom["components"] if row["bom-ref"].startswith("deb:")}
    assert len(gone) > 50
    bom["components"] = [row for row in bom["components"] if row["bom-ref"] not in gone]
    bom["dependencies"] = [row for row in bom["dependencies"] if row["ref"] not in gone]
    for row in bom["dependencies"]:
        row["dependsOn"] = [ref for ref in row.get("dependsOn", []) if ref not in gone]
    for row in bom["compositions"]:
        row["assemblies"] = [ref for ref in row.get("assemblies", []) if ref not in gone]


def _of_one_licence(bom: Any) -> None:
    for row in bom["components"]:
        if "licenses" in row:
            row["licenses"] = [{"license": {"id": "MIT", "acknowledgement": "declared"}}]


DOCUMENTS: dict[str, tuple[str, Callable[[Any], object], str, str]] = {
    "an engine": (RECORD, at("image", "engine", "engine", to="99.0"), f"{PROVENANCE}: contents", "99.0"),
    "no image": (RECORD, at("image", to=None), "stages", "not_run"),
    "a reference that leads nowhere": (IMAGE_SBOM, _dangling, f"{IMAGE_SBOM}: dependencies.0.dependsOn.1", "nowhere"),
    "an SBOM of another image": (
        IMAGE_SBOM,
        at("metadata", "component", "hashes", 0, "content", to=OTHER),
        f"{IMAGE_SBOM}: subject",
        OTHER,
    ),
    "an SBOM that hides packages": (IMAGE_SBOM, _without_packages, IMAGE_SBOM, "components"),
    "an SBOM with other licences": (IMAGE_SBOM, _of_one_licence, IMAGE_SBOM, "licenses"),
    "an SBOM of another version": (IMAGE_SBOM, at("components", 0, "version", to="9.9.9"), IMAGE_SBOM, "9.9.9"),
    "a provenance of another image": (
        PROVENANCE,
        at("subject", 0, "digest", "sha256", to=OTHER),
        f"{PROVENANCE}: subjects",
        OTHER,
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_lies(forged: Forged, name: str) -> None:
    document, edit, check, why = DOCUMENTS[name]
    edit_json(forged.folder / document, edit)
    found = disagreements(forged)
    assert check in found, found
    assert why in found[check]
