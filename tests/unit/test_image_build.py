"""The image stage's work without an engine: its command, its contexts, the causes of a failure, the finished image.

``FakeBuildx`` stands for docker: it writes the layout that it is asked for, out of what the test gives it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image_rooms import DIGEST, image, image_plan, layer, top

from cufallback.errors import CommandError, ImageError, LockError
from cufallback.image import build
from cufallback.image.build import (
    BuiltImage,
    BuiltWheel,
    build_image,
    check_definition,
    expected_labels,
    image_command,
    index_digest,
    is_root,
    require_cuda,
)
from cufallback.plan import BuildPlan
from cufallback.process import Completed, RecordingRunner
from cufallback.progress import Silent
from cufallback.store import sha256_bytes, sha256_file

WHEEL = "vllm-0.27.1+cu129-py3-none-any.whl"
REPORT = [
    {"what": "user", "status": "passed", "why": "runs as uid 10001"},
    {"what": "import a", "status": "not_run", "why": "libcuda.so.1: no such file; the driver brings it"},
]
DRIVER = {"minimum_driver": {"driver": "575.51.03"}}


def after(argv: Sequence[str], option: str) -> list[str]:
    """Return the words that follow each ``option``."""
    return [argv[number + 1] for number, word in enumerate(argv) if word == option]


class FakeBuildx(RecordingRunner):
    """Writes an image with the labels and build arguments it is given; ``config`` and ``report`` change it.

    ``says`` makes it fail with that log instead; ``metadata`` is what it says of the image, {} the truth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.files: dict[str, bytes] = {build.CHECKS: json.dumps(REPORT).encode()}
        self.says: str | None = None
        self.metadata: bytes | None = b"{}"
        self.contexts: dict[str, dict[str, bytes]] = {}
        self.modes: dict[str, int] = {}
        self.shown: list[str] = []

    def run(self, argv: Sequence[str | Path], **options: Any) -> Completed:
        done = super().run(argv, env=options["env"])
        words = done.argv
        self.shown = [str(word) for word in options["shown"]]
        for name, _, folder in (text.partition("=") for text in after(words, "--build-context")):
            if "oci-layout" not in folder:
                paths = [path for path in Path(folder).rglob("*") if path.is_file()]
                self.contexts[name] = {path.name: path.read_bytes() for path in paths}
                self.modes |= {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
        self.contexts["definition"] = {path.name: path.read_bytes() for path in Path(words[-1]).iterdir()}
        if self.says is not None:
            options["log"].parent.mkdir(parents=True, exist_ok=True)
            options["log"].write_text(self.says)
            raise CommandError("docker exited with 1", remedy="read its output")
        (output,) = after(words, "--output")
        layout = Path(output.partition("dest=")[2].partition(",")[0])
        arguments = after(words, "--build-arg")
        config = {
            "User": "10001:10001",
            "Env": [text for text in arguments if text.startswith("NVIDIA_")],
            "Entrypoint": ["python"],
            "Labels": dict(text.split("=", 1) for text in after(words, "--label")),
        }
        found = image(layout, [layer(*self.files.items())], config={**config, **self.config})
        top(layout, found)
        (layout / "ingest").mkdir()
        (metadata,) = after(words, "--metadata-file")
        if self.metadata is not None:
            said = {"containerimage.digest": found["digest"], "containerimage.config.digest": "sha256:0"}
            Path(metadata).write_bytes(json.dumps(said).encode() if self.metadata == b"{}" else self.metadata)
        return done


@pytest.fixture(scope="module")
def plan() -> BuildPlan:
    return image_plan()


@dataclasses.dataclass
class Room:
    """A work folder with a wheelhouse and two wheels."""

    root: Path
    buildx: FakeBuildx
    wheels: list[BuiltWheel]

    @property
    def layout(self) -> Path:
        return self.root / "stage" / "image"

    def build(self, plan: BuildPlan, **options: Any) -> BuiltImage:
        given: dict[str, Any] = {
            "inspections": [DRIVER, {}],
            "wheelhouses": self.root / "wheelhouse",
            "bases": {"base": self.root / "bases" / "one"},
            "folder": self.layout,
            "log": self.root / "logs" / "image.log",
            "runner": self.buildx,
            "progress": Silent(),
        }
        return build_image(plan, self.wheels, **{**given, **options})


@pytest.fixture
def room(tmp_path: Path, plan: BuildPlan) -> Room:
    uv = next(item for item in plan.pinned().build.distributions if item.name == "uv")
    for which in ("build", "runtime"):
        (tmp_path / "wheelhouse" / which).mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "wheelhouse" / "build" / uv.filename, "w") as wheel:
        wheel.writestr(f"uv-{uv.version}.data/scripts/uvx", b"not this one")
        wheel.writestr(f"uv-{uv.version}.data/scripts/uv", b"\x7fELF uv")
    (tmp_path / "wheelhouse" / "runtime" / "numpy.whl").write_bytes(b"numpy")
    wheels = []
    for name in (WHEEL, "cuda_probe-1.0-py3-none-any.whl"):
        path = tmp_path / name
        path.write_bytes(name.encode())
        wheels.append(BuiltWheel(path, name.partition("-")[0], name.split("-")[1], sha256_file(path)))
    (tmp_path / "stage").mkdir()
    return Room(tmp_path, FakeBuildx(), wheels)


def test_the_command_names_no_folder_and_decides_about_bytes(plan: BuildPlan) -> None:
    command = image_command(plan.recipe, {"base": DIGEST})
    assert command == (
        "docker", "buildx", "build", "--file", "cu129.Dockerfile", "--target", "probe",
        "--platform", "linux/amd64", "--network", "none", "--provenance=false", "--sbom=false",
        "--build-arg", "PYTHON_VERSION=3.11",
        "--build-context", f"base=oci-layout:///BASE@{DIGEST}",
        "--build-context", "wheelhouse=WHEELHOUSE", "--build-context", "wheels=WHEELS",
        "--output", "type=oci,dest=IMAGE,tar=false,rewrite-timestamp=true,compression=zstd,oci-mediatypes=true",
    )  # fmt: skip
    assert "@DIGEST" in image_command(plan.recipe, {"base": None})[16]
    with pytest.raises(ImageError, match=r"has no \[image\]"):
        image_command(plan.recipe.model_copy(update={"image": None}), {})


def test_what_runs_is_the_plans_command_with_folders_in_place_of_names(plan: BuildPlan, room: Room) -> None:
    room.build(plan)
    (argv,) = room.buildx.calls
    scratch = room.root / "stage" / "scratch"
    assert after(argv, "--file") == [str(scratch / "definition" / "cu129.Dockerfile")]
    assert after(argv, "--build-context") == [
        f"base=oci-layout://{room.root}/bases/one@{DIGEST}",
        f"wheelhouse={scratch}/wheelhouse",
        f"wheels={scratch}/wheels",
    ]
    assert after(argv, "--output")[0].startswith(f"type=oci,dest={room.layout},tar=false,rewrite-timestamp=true,")
    assert after(argv, "--tag") == [f"cufallback/rehearsal:{plan.short_id}"]
    assert "--no-cache" not in argv
    assert argv[-1] == str(scratch / "definition")
    (environment,) = room.buildx.environments
    assert environment is not None
    assert environment["SOURCE_DATE_EPOCH"] == str(plan.pinned().source.epoch)
    step = next(step for step in plan.steps if step.command[:2] == ("docker", "buildx"))
    assert tuple(room.buildx.shown[: len(step.command)]) == step.command
    assert str(room.root) not in " ".join(room.buildx.shown)


def test_without_cache(plan: BuildPlan, room: Room) -> None:
    room.build(plan, use_cache=False)
    assert "--no-cache" in room.buildx.calls[0]


NAMES = ["IMAGE", "x=WHEELS", "a=BASE,b", "oci-layout:///BASE@x", "DEFINITION", r"back\1slash \g<0>"]


@pytest.mark.parametrize("text", NAMES)
def test_only_placeholders_are_replaced_whatever_a_label_says(plan: BuildPlan, room: Room, text: str) -> None:
    assert plan.recipe.image is not None
    image = plan.recipe.image.model_copy(update={"licenses": text})
    named = dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"image": image}))
    room.build(named)
    assert f"org.opencontainers.image.licenses={text}" in after(room.buildx.calls[0], "--label")


@pytest.mark.parametrize("name", [r"back\1slash", r"\g<0>", "a=BASE", "xIMAGE", "WHEELS", "blank in it"])
def test_folders_of_any_name_take_the_place_of_names(plan: BuildPlan, room: Room, name: str) -> None:
    room.build(plan, bases={"base": room.root / name})
    assert after(room.buildx.calls[0], "--build-context")[0] == f"base=oci-layout://{room.root / name}@{DIGEST}"


def test_the_contexts_hold_what_the_dockerfile_installs(plan: BuildPlan, room: Room) -> None:
    room.build(plan)
    wheelhouse, wheels = room.buildx.contexts["wheelhouse"], room.buildx.contexts["wheels"]
    assert wheelhouse == {"uv": b"\x7fELF uv", "numpy.whl": b"numpy", "runtime.txt": plan.inputs["runtime.txt"]}
    assert room.buildx.modes["uv"] == 0o755
    assert set(wheels) == {WHEEL, "cuda_probe-1.0-py3-none-any.whl", "built.txt", "expectation.json"}
    assert wheels["built.txt"].decode() == (
        f"vllm==0.27.1+cu129 --hash=sha256:{sha256_bytes(wheels[WHEEL])}\n"
        f"cuda_probe==1.0 --hash=sha256:{sha256_bytes(wheels['cuda_probe-1.0-py3-none-any.whl'])}\n"
    )
    assert room.buildx.contexts["definition"] == plan.definition
    expected = json.loads(wheels["expectation.json"])
    runtime = plan.pinned().runtime.distributions
    assert expected["distributions"] == {item.name: item.version for item in runtime} | {
        "vllm": "0.27.1+cu129",
        "cuda-probe": "1.0",
    }
    assert expected["modules"] == ["vllm.fs_io_C", "vllm.spinloop", "cuda_probe"]
    assert expected["torch_cuda"] is None


def test_a_recipe_with_device_code_expects_its_toolkit_in_torch(plan: BuildPlan, room: Room) -> None:
    wheel = plan.recipe.wheel.model_copy(update={"device_code": True})
    room.build(dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"wheel": wheel})))
    assert json.loads(room.buildx.contexts["wheels"]["expectation.json"])["torch_cuda"] == "12.9"


def test_a_finished_image_is_all_that_is_left(plan: BuildPlan, room: Room) -> None:
    built = room.build(plan)
    assert sorted(path.name for path in (room.root / "stage").iterdir()) == ["image"]
    assert not (room.layout / "ingest").exists()
    assert built.checks == REPORT
    assert built.require_cuda == "driver>=575.51.03"
    assert built.image.labels == built.labels == expected_labels(plan, "0.27.1+cu129")
    blobs = sorted(path.stat().st_size for path in (room.layout / "blobs" / "sha256").iterdir())
    assert built.image.size == sum(blobs)
    assert index_digest(built.image) == f"sha256:{sha256_file(room.layout / 'index.json')}"


def test_a_build_lock_without_uv_is_one_clear_error(plan: BuildPlan, room: Room) -> None:
    lock = plan.pinned().build
    without = dataclasses.replace(lock, distributions=tuple(item for item in lock.distributions if item.name != "uv"))
    with pytest.raises(LockError, match="the build lock has no uv") as raised:
        room.build(dataclasses.replace(plan, locks=dataclasses.replace(plan.locks, build=without)))
    assert "deps.build.add" in raised.value.remedy
    assert raised.value.where == "locks/rehearsal/build.txt"
    assert room.buildx.calls == []


FAILURES: dict[str, tuple[str, str]] = {
    "assertions inside": (
        "#9 0.1 passed: user: runs as uid 10001\n#9 0.3 failed: distributions: torch is 1 instead of 2\n"
        "#9 0.4 failed: import a: no module\n#9 0.3 failed: distributions: torch is 1 instead of 2\nEOF\n",
        "is not what the plan says:\n  distributions: torch is 1 instead of 2\n  import a: no module",
    ),
    "engine gone": ("#5 [base 1/2]\nERROR: failed to receive status: error reading from server: EOF\n", "went away"),
    "engine closed": ("#5 1.2 going on\nERROR: failed to receive status: rpc error: desc = EOF\n", "went away"),
    "engine down": ("ERROR: Cannot connect to the Docker daemon at unix:///x. Is it running?\n", "went away"),
    "engine refuses": ("ERROR: dial tcp 127.0.0.1:2375: connect: connection refused\n", "went away"),
    "a step": ("#7 0.2 error: no such wheel\nERROR: failed to solve: exit code: 2\n", "docker exited with 1"),
    "a step that speaks of eof": (
        "#7 0.2 typeof x\n#7 0.3 unexpected EOF\nERROR: exit code: 2\n",
        "docker exited with 1",
    ),
    "a step without network": ("#7 0.2 urlopen: Connection refused\nERROR: exit code: 1\n", "docker exited with 1"),
    "nothing said": ("", "docker exited with 1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_build_names_its_cause(plan: BuildPlan, room: Room, name: str) -> None:
    room.buildx.says, reason = FAILURES[name]
    with pytest.raises(ImageError) as raised:
        room.build(plan)
    assert reason in raised.value.reason
    assert raised.value.where == str(room.root / "logs" / "image.log")
    assert raised.value.remedy
    assert not room.layout.exists()


@pytest.mark.parametrize("metadata", [None, b"", b"[]", b"{", b'{"other": 1}', b"null", b"\xff"])
def test_buildx_that_does_not_say_what_it_built(plan: BuildPlan, room: Room, metadata: bytes | None) -> None:
    room.buildx.metadata = metadata
    with pytest.raises(ImageError, match="does not say which image it built"):
        room.build(plan)


@pytest.mark.parametrize("digest", [DIGEST, "sha256:x", "../x", "", 7, None])
def test_buildx_that_speaks_of_another_image(plan: BuildPlan, room: Room, digest: Any) -> None:
    room.buildx.metadata = json.dumps({"containerimage.digest": digest}).encode()
    with pytest.raises(ImageError, match="instead of one image"):
        room.build(plan)


LIES: dict[str, tuple[Callable[[FakeBuildx], object], str]] = {
    "no label": (lambda fake: fake.config.update(Labels=None), "label cufallback.build-id is None"),
    "another build id": (
        lambda fake: fake.config.update(Labels={"cufallback.build-id": "0" * 64}),
        f"label cufallback.build-id is '{'0' * 64}'",
    ),
    "no config": (lambda fake: fake.config.update(Labels={}, Env=None, User=None), "its user is 'root'"),
    "no driver": (lambda fake: fake.config.update(Env=[]), "does not carry NVIDIA_REQUIRE_CUDA=driver>=575.51.03"),
    "another driver": (
        lambda fake: fake.config.update(Env=["NVIDIA_REQUIRE_CUDA=driver>=535"]),
        "does not carry NVIDIA_REQUIRE_CUDA=driver>=575.51.03",
    ),
    "no report": (lambda fake: fake.files.clear(), f"it holds no /{build.CHECKS}"),
    "a report elsewhere": (
        lambda fake: fake.files.update({f"x/{build.CHECKS}": fake.files.pop(build.CHECKS)}),
        "holds no",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_an_image_that_is_not_what_was_asked_for(plan: BuildPlan, room: Room, name: str) -> None:
    change, reason = LIES[name]
    change(room.buildx)
    with pytest.raises(ImageError) as raised:
        room.build(plan)
    assert "the image is not what the plan says" in raised.value.reason
    assert reason in raised.value.reason


@pytest.mark.parametrize("key", list(expected_labels(image_plan(), "1")))
def test_each_label_that_lies_is_named(plan: BuildPlan, room: Room, key: str) -> None:
    room.buildx.config["Labels"] = {**expected_labels(plan, "0.27.1+cu129"), key: "a lie"}
    with pytest.raises(ImageError) as raised:
        room.build(plan)
    assert raised.value.reason == f"the image is not what the plan says: label {key} is 'a lie'"


ROOT = ["", "0", "root", "0:0", "root:root", "0:10001", ":0", "00", "+0", "-0", "000:7", "root:", "0:"]


@pytest.mark.parametrize("user", ROOT)
def test_root_in_any_spelling_is_refused(plan: BuildPlan, room: Room, user: str) -> None:
    room.buildx.config["User"] = user
    with pytest.raises(ImageError, match="its user is"):
        room.build(plan)


@pytest.mark.parametrize("user", ["10001", "10001:0", "vllm", "1", "010", "rooty", "0x1", "nobody:root"])
def test_other_users_are_not_root(user: str) -> None:
    assert not is_root(user)


GOOD = {"what": "a", "status": "passed", "why": "b"}
REPORTS: list[Any] = [
    7, None, "x", {}, [7], [None], [{}], [{**GOOD, "status": "failed"}], [{**GOOD, "status": "x"}],
    [{**GOOD, "why": 7}], [{**GOOD, "more": "x"}], [{"what": "a", "status": "passed"}], {"a": GOOD},
]  # fmt: skip


@pytest.mark.parametrize("report", [b"", b"{", b"\xff", b"[" * 100_000, *(json.dumps(row).encode() for row in REPORTS)])
def test_a_malformed_report_is_one_clear_error(plan: BuildPlan, room: Room, report: bytes) -> None:
    room.buildx.files[build.CHECKS] = report
    with pytest.raises(ImageError, match="is malformed"):
        room.build(plan)


@pytest.mark.parametrize(
    ("drivers", "needs"),
    [
        ([], ""),
        ([None, None], ""),
        (["575.51.03"], "driver>=575.51.03"),
        (["575.51.03", "575.57.08"], "driver>=575.57.08"),
        (["575.57.08", None, "570.26"], "driver>=575.57.08"),
        (["570.124.06", "570.26"], "driver>=570.124.06"),
    ],
)
def test_the_newest_driver_that_a_wheel_needs_counts(drivers: list[str | None], needs: str) -> None:
    assert require_cuda([{"minimum_driver": {"driver": driver}} for driver in drivers]) == needs
    assert require_cuda([{"minimum_driver": driver and {"driver": driver}} for driver in drivers]) == needs


def test_an_image_that_needs_no_driver_says_nothing_of_one(plan: BuildPlan, room: Room) -> None:
    assert room.build(plan, inspections=[{}, {"minimum_driver": None}]).require_cuda == ""
    assert "NVIDIA_REQUIRE_CUDA=" in after(room.buildx.calls[0], "--build-arg")


def test_labels_name_the_base_only_as_the_lock_has_it() -> None:
    prefix = "org.opencontainers.image."
    replaced, from_lock = expected_labels(image_plan(), "1.0"), expected_labels(image_plan("lock"), "1.0")
    assert f"{prefix}base.name" not in replaced
    assert from_lock[f"{prefix}base.name"] == "docker.io/library/python:3.11-slim-bookworm"
    assert replaced[f"{prefix}base.digest"] == from_lock[f"{prefix}base.digest"] == DIGEST
    assert from_lock[f"{prefix}source"] == "https://github.com/vllm-project/vllm"
    assert from_lock[f"{prefix}revision"] == "6e448d0ea9bf3d88d898b65449ca6dc2aec170ac"
    assert from_lock[f"{prefix}created"].endswith("Z")
    assert set(from_lock) - set(replaced) == {f"{prefix}base.name"}


def test_the_definition_must_be_there_and_pinned(plan: BuildPlan) -> None:
    check_definition(plan)
    check_definition(dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"image": None})))
    name = "dockerfiles/cu129.Dockerfile"
    without = {key: value for key, value in plan.inputs.items() if key != name}
    with pytest.raises(ImageError, match="no such Dockerfile") as raised:
        check_definition(dataclasses.replace(plan, inputs=without))
    assert raised.value.where == name
    evil = {**plan.inputs, name: plan.inputs[name].replace(b"FROM base", b"FROM evil")}
    with pytest.raises(ImageError, match="'evil' is no stage above"):
        check_definition(dataclasses.replace(plan, inputs=evil))
    with pytest.raises(ImageError):
        check_definition(dataclasses.replace(plan, inputs={**plan.inputs, name: os.urandom(99)}))
