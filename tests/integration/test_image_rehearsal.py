"""The rehearsal's image from end to end: one digest everywhere, what runs in it, what is said of it, and again."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from build_rooms import Command, Rehearsal
from image_rooms import (
    BEFORE_IMAGE,
    NOWHERE,
    STAGES,
    ImageBuild,
    PushedBuild,
    docker,
    layer_pieces,
    mortal_engine,
    one_error,
    open_file,
)
from registry_rooms import get
from test_sbom_syft import scan, unexplained
from tests.services.base import BaseLayout
from tests.services.engine import PrivateEngine

from cufallback.attest.bom import check_bom
from cufallback.attest.documents import IMAGE_SBOM, PROVENANCE
from cufallback.attest.sbom import EMBEDDED_NAME
from cufallback.errors import ExitCode
from cufallback.image.engine import Engine, find_engine
from cufallback.process import LocalRunner
from cufallback.store import sha256_bytes

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.network]


# What is done, what is taken over, what is kept


def test_what_only_the_image_changes_redoes_only_the_image(image_build: ImageBuild, rehearsal: Rehearsal) -> None:
    for stage in BEFORE_IMAGE:
        assert f"{stage}: taken over from build {rehearsal.folder.name}, whose inputs are the same\n" in (
            image_build.stderr
        )
    assert re.findall(r"^(\w+): done in", image_build.stderr, re.MULTILINE) == ["image", "attest", "record"]
    assert image_build.folder.name != rehearsal.folder.name
    for wheel in (rehearsal.folder / "wheels").iterdir():
        assert (image_build.folder / "wheels" / wheel.name).read_bytes() == wheel.read_bytes()
    assert f"image     {image_build.digest}\n" in image_build.stdout


def test_the_second_run_skips_everything(image_build: ImageBuild, command: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in image_build.folder.rglob("*")}
    code, _stdout, stderr = command.run(*image_build.options, "--require-image")
    assert code == 0
    assert stderr.splitlines() == [f"{stage}: unchanged, skipped" for stage in STAGES]
    assert {path: path.stat().st_mtime_ns for path in image_build.folder.rglob("*")} == before


def test_the_engine_may_be_gone_once_the_image_is_there(image_build: ImageBuild, command: Command) -> None:
    code, stdout, stderr = command.run(*image_build.options, "--require-image", **NOWHERE)
    assert code == 0, stderr
    assert stderr.startswith("image: no Docker engine answers; the one that was built before is kept\n")
    assert "image: unchanged, skipped\n" in stderr
    assert image_build.digest in stdout


def test_without_an_engine_all_but_the_image_is_built(
    image_build: ImageBuild, command: Command, tmp_path: Path
) -> None:
    words = image_build.elsewhere(tmp_path, *BEFORE_IMAGE)
    code, _stdout, stderr = command.run(*words, "--require-image", **NOWHERE)
    assert code == ExitCode.IMAGE
    assert one_error(stderr) == (
        "error: no image can be built here: no Docker engine answers\n"
        "  remedy: start Docker, or point DOCKER_HOST at an engine"
    )
    assert not list(tmp_path.rglob("record.json"))
    code, stdout, stderr = command.run(*words, **NOWHERE)
    assert code == 0, stderr
    assert "image     not built: no Docker engine answers; start Docker" in stdout
    (folder,) = (tmp_path / "dist").glob("*/*")
    (stage,) = (row for row in json.loads((folder / "record.json").read_bytes())["stages"] if row["name"] == "image")
    why = "no Docker engine answers; start Docker, or point DOCKER_HOST at an engine"
    assert (stage["status"], stage["why"]) == ("not_run", why)
    assert not (folder / "image").exists()
    assert not (folder / IMAGE_SBOM).exists()


# One digest everywhere


@pytest.fixture(scope="module")
def loaded(
    image_build: ImageBuild, engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """The image as an archive, and what ``docker load`` called it."""
    archive = BaseLayout(image_build.folder / "image", image_build.digest).archive(
        tmp_path_factory.mktemp("archive") / "image.tar"
    )
    name = docker("load", "--quiet", "--input", archive).removeprefix("Loaded image: ").strip()
    yield archive, name
    docker("rmi", "--force", name)


def test_every_client_finds_the_recorded_digest(
    loaded: tuple[Path, str], image_build: ImageBuild, pushed_build: PushedBuild, registry: str, skopeo: str, oras: str
) -> None:
    (archive, called), name, digest = loaded, f"{registry}/digests", image_build.digest
    assert called == f"cufallback/rehearsal:{image_build.folder.name}"
    for words in (
        (oras, "cp", "--no-tty", "--from-oci-layout", "--to-plain-http", f"{archive}@{digest}", f"{name}/oras:1"),
        (
            *(skopeo, "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"),
            *(f"oci-archive:{archive}:docker.io/{called}", f"docker://{name}/skopeo:1"),
        ),
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    docker("tag", called, f"{name}/docker:1")
    docker("push", "--quiet", f"{name}/docker:1")
    docker("rmi", f"{name}/docker:1")
    places = [f"digests/{client}/manifests/1" for client in ("oras", "skopeo", "docker")]
    for path in (*places, "rehearsal/image/manifests/v1"):
        assert f"sha256:{sha256_bytes(get(registry, path))}" == digest, path


@pytest.fixture(scope="module")
def pulled(pushed_build: PushedBuild, loaded: tuple[Path, str]) -> Iterator[str]:
    """The image in the engine, pulled from the registry by digest; its layers are those that were loaded."""
    reference = str(pushed_build.reference)
    docker("pull", "--quiet", reference)
    yield reference
    docker("rmi", reference)


CONFINED = ("run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
NO_DRIVER = 3  # the probe's exit status; this machine has none


def test_pulled_by_digest_and_confined_it_tells_what_the_host_lacks(pulled: str) -> None:
    told = json.loads(docker(*CONFINED, pulled, "--json", status=NO_DRIVER))
    assert (told["status"], told["exit_code"]) == ("no_driver", NO_DRIVER)
    assert "libcuda.so.1" in told["reason"]
    code = "import os, socket; print(os.getuid(), os.getgid(), [name for _, name in socket.if_nameindex()])"
    assert docker(*CONFINED, "--entrypoint=python", pulled, "-c", code).split(maxsplit=2)[:2] == ["10001", "10001"]
    docker(*CONFINED, "--entrypoint=touch", pulled, "/opt/vllm/x", status=1)


def test_the_image_says_what_it_is(pulled: str, image_build: ImageBuild) -> None:
    inspected = json.loads(docker("inspect", pulled))[0]
    assert pulled in inspected["RepoDigests"]
    config, record = inspected["Config"], image_build.record
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["python", "-m", "cuda_probe"]
    assert "Healthcheck" not in config, "the probe serves nothing"
    (needed,) = {driver for wheel in record.inspection if (driver := wheel["minimum_driver"]["driver"])}
    assert needed == "575.51.03"
    assert f"NVIDIA_REQUIRE_CUDA=driver>={needed}" in config["Env"]
    prefix = "org.opencontainers.image."
    labels = {name.removeprefix(prefix): value for name, value in config["Labels"].items()}
    expected = {
        "title": "rehearsal",
        "version": record.inspection[0]["version"],
        "created": "2026-08-11T10:44:27Z",
        "revision": "6e448d0ea9bf3d88d898b65449ca6dc2aec170ac",
        "source": "https://github.com/vllm-project/vllm",
        "licenses": "Apache-2.0",
        "base.digest": image_build.base.rpartition("@")[2],
        "cufallback.build-id": record.build_id,
        "cufallback.recipe": "rehearsal",
    }
    assert expected.items() <= labels.items()
    assert "base.name" not in labels, "what took the place of the locked base has a name on this machine only"


def test_the_record_names_engine_and_checks(image_build: ImageBuild) -> None:
    image, engine = image_build.record.image, find_engine(LocalRunner())
    assert image is not None
    assert isinstance(engine, Engine)
    assert image.engine == engine.to_json()
    assert re.match(r"\d+\.\d+", image.engine["engine"])
    assert re.match(r"v?\d+\.\d+", image.engine["buildkit"])
    checks = {check.what: check.status for check in image.checks}
    assert checks == dict.fromkeys(
        (
            *("user", "distributions", "torch.version.cuda"),
            *("import vllm.fs_io_C", "import vllm.spinloop", "import cuda_probe"),
        ),
        "passed",
    )


# The same again, by another engine, with secrets about

TOKEN, PASSWORD = "hf_NeverWrittenAnywhere0123456789abcd", "never-written-anywhere"
AUTH = base64.b64encode(f"robot:{PASSWORD}".encode()).decode()
SECRETS = [word.encode() for word in (TOKEN, PASSWORD, AUTH)]


@dataclass(frozen=True)
class Second:
    """Another build of the same: how its first attempt ended, what the second said and made."""

    work: Path
    folder: Path
    code: int
    died: str
    said: str


@pytest.fixture(scope="module")
def second(image_build: ImageBuild, engine: str, test_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Second:
    """Build everything in other folders by a new engine without a cache; it dies once in the middle of it."""
    root = tmp_path_factory.mktemp("second")
    (root / "docker").mkdir()
    (root / "docker" / "config.json").write_text(json.dumps({"auths": {"registry.example": {"auth": AUTH}}}))
    secrets = {"HF_TOKEN": TOKEN, "REGISTRY_PASSWORD": PASSWORD, "DOCKER_CONFIG": str(root / "docker")}
    words = ("build", "--recipe", "rehearsal", "--work", root / "work", "--dist", root / "dist")
    words = (*words, "--base", image_build.base, "--require-image", "--no-cache")
    with (
        tempfile.TemporaryDirectory(prefix="engine-") as run,
        PrivateEngine(Path(run), test_cache / "second-engine", network=False).shared() as host,
        contextlib.closing(Command(root)) as command,
    ):
        with mortal_engine(host) as front:
            begun = command.start(*words, **{**secrets, "DOCKER_HOST": front.host})
            begun.says("image: [dependencies 1/2] RUN")
            front.die()
            died = begun.wait()
        assert not (root / "dist" / "rehearsal").exists(), "nothing half-finished is laid out"
        code, stdout, stderr = command.run(*words, **{**secrets, "DOCKER_HOST": host})
    assert code == 0, stderr
    (folder,) = (root / "dist" / "rehearsal").iterdir()
    return Second(root / "work", folder, died, begun.stderr, stdout + stderr)


def test_an_engine_that_dies_is_one_clear_error_and_the_next_run_goes_on(second: Second) -> None:
    assert second.code == ExitCode.IMAGE
    error = one_error(second.died)
    assert "the Docker engine went away during the build" in error
    assert "start it again" in error
    for stage in BEFORE_IMAGE:
        assert f"{stage}: done in" in second.died
        assert f"{stage}: unchanged, skipped\n" in second.said


def test_a_second_build_gives_the_same_wheels_and_the_same_image(image_build: ImageBuild, second: Second) -> None:
    ours, theirs = (json.loads((folder / "record.json").read_bytes()) for folder in (image_build.folder, second.folder))
    assert [wheel["sha256"] for wheel in theirs["subjects"]] == [wheel["sha256"] for wheel in ours["subjects"]]
    assert theirs["image"] == ours["image"]
    assert theirs["build_id"] == ours["build_id"]
    for sbom in sorted((image_build.folder / "sbom").iterdir()):
        assert (second.folder / "sbom" / sbom.name).read_bytes() == sbom.read_bytes()


def test_no_secret_reaches_a_file_a_layer_or_a_log(image_build: ImageBuild, second: Second) -> None:
    assert not [word for word in SECRETS if word.decode() in second.died + second.said]
    files = [path for path in second.folder.rglob("*") if path.is_file()]
    files += [path for path in second.work.glob("work/*/*/**/*.log") if path.is_file()]
    files += second.work.glob("work/*/*/stage.json")
    assert len(files) > 30
    found = [(path, word) for path in files for piece in open_file(path) for word in SECRETS if word in piece]
    # The second build's layers have the bytes of the first's.
    layers = layer_pieces(image_build.image)
    found += [(digest, word) for digest, pieces in layers for piece in pieces for word in SECRETS if word in piece]
    assert found == []


# What is said of it, read by others


def test_every_sbom_is_valid_and_the_embedded_one_is_in_the_wheels_record(image_build: ImageBuild) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    texts = {path.name: path.read_text("utf-8") for path in (image_build.folder / "sbom").iterdir()}
    assert len(texts) == 3
    for path in (image_build.folder / "wheels").iterdir():
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(f".dist-info/sboms/{EMBEDDED_NAME}"))
            content = wheel.read(name)
            rows = csv.reader(wheel.read(f"{name.partition('/')[0]}/RECORD").decode().splitlines())
            (row,) = (row for row in rows if row[0] == name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert row == [name, f"sha256={digest}", str(len(content))]
        texts[f"{path.name}: {name}"] = content.decode("utf-8")
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert {name: error for name, text in texts.items() if (error := validator.validate_str(text))} == {}
    numbers = {json.loads(text)["serialNumber"] for text in texts.values()}
    assert len(numbers) == len(texts) == 5


def test_syft_finds_nothing_in_the_image_that_the_sbom_does_not_explain(image_build: ImageBuild) -> None:
    syft = scan(f"oci-dir:{image_build.folder / 'image'}")
    ours = check_bom((image_build.folder / IMAGE_SBOM).read_bytes(), where=IMAGE_SBOM)
    assert unexplained(syft, ours) == []
    assert {"torch", "vllm", "cufallback-cuda-probe", "libc6"} <= {row["name"] for row in syft["artifacts"]}


def test_the_provenance_is_what_in_toto_s_own_model_takes(image_build: ImageBuild) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

    message = json_format.Parse((image_build.folder / PROVENANCE).read_bytes(), StatementMessage())
    Statement.copy_from_pb(message).validate()
    subjects = {subject.name: subject.digest["sha256"] for subject in message.subject}
    wheels = {Path(wheel.path).name: wheel.sha256 for wheel in image_build.record.subjects}
    assert subjects == {**wheels, "cufallback/rehearsal": image_build.digest.removeprefix("sha256:")}
    written = json.loads((image_build.folder / PROVENANCE).read_bytes())["predicate"]
    predicate = json_format.ParseDict(written, Provenance())
    assert predicate.run_details.builder.id
    digests = {
        item.digest["sha256"] for item in predicate.build_definition.resolved_dependencies if item.digest["sha256"]
    }
    assert image_build.base.rpartition("sha256:")[2] in digests
    assert {item.sha256 for item in image_build.record.distributions} <= digests
