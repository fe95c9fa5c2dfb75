"""The image of a build folder against its record, its plan and itself: an honest one passes, each lie is named."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image_rooms import LAYER, MANIFEST, blob, image, image_plan, layer, top
from tests.unit.record_samples import record_json

from cufallback.checks import Check
from cufallback.image.build import CHECKS, expected_labels, index_digest, require_cuda
from cufallback.image.check import check_image
from cufallback.image.layout import read_image
from cufallback.plan import BuildPlan
from cufallback.record import Record, files_below
from cufallback.store import write_atomic

SITE = "opt/vllm/lib/python3.11/site-packages"
MADE = (
    "user",
    "distributions",
    "torch.version.cuda",
    "import vllm.fs_io_C",
    "import vllm.spinloop",
    "import cuda_probe",
)
REPORT = [{"what": what, "status": "passed", "why": "as it should be"} for what in MADE]
NAMES = {"numpy": "2.3", "vllm": "0.27.1+cu129", "cuda-probe": "1.0"}


def metadata(name: str, version: str) -> bytes:
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: not this\nVersion: 9\n".encode()


@dataclasses.dataclass
class Case:
    """What a test may change before the folder is written, and the record afterwards."""

    config: dict[str, Any]
    files: dict[str, bytes]
    more: list[bytes] = dataclasses.field(default_factory=list)


def honest(plan: BuildPlan, inspection: list[dict[str, Any]]) -> Case:
    installed = {
        f"{SITE}/{name.replace('-', '_')}-{version}.dist-info/METADATA": metadata(name, version)
        for name, version in NAMES.items()
    }
    needs = require_cuda(inspection)
    config = {
        "User": "10001:10001",
        "Env": ["PATH=/opt/vllm/bin", f"NVIDIA_REQUIRE_CUDA={needs}"],
        "Entrypoint": ["python", "-m", "cuda_probe"],
        "Labels": expected_labels(plan, "0.27.1+cu129"),
    }
    return Case(config, {CHECKS: json.dumps(REPORT).encode(), "etc/os-release": b"ID=demo\n", **installed})


class Room:
    """A build folder, written from a case; ``value`` is its record before it is parsed."""

    def __init__(self, folder: Path, plan: BuildPlan) -> None:
        self.folder, self.plan = folder, plan
        self.value = record_json(folder, with_image=False)
        for inspection, (name, version) in zip(self.value["inspection"], list(NAMES.items())[1:], strict=True):
            inspection.update(name=name, version=version)
        self.value["bases"] = [base.to_json() for base in plan.bases]
        self.case = honest(plan, self.value["inspection"])

    def write(self) -> None:
        """Lay out the image and say in the record what it is."""
        layout = self.folder / "image"
        shutil.rmtree(layout, ignore_errors=True)
        made = image(layout, [layer(*self.case.files.items()), *self.case.more], config=self.case.config)
        top(layout, made)
        found = read_image(layout)
        write_atomic(self.folder / "logs" / "image.log", b"built\n")
        labels = expected_labels(self.plan, "0.27.1+cu129")
        self.value["image"] = {
            "path": "image", "platform": found.platform, "size": found.size, "manifest": found.manifest.to_json(),
            "config": found.config.to_json(), "layers": [item.to_json() for item in found.layers],
            "index": index_digest(found), "dockerfile": "inputs/dockerfiles/cu129.Dockerfile", "labels": labels,
            "require_cuda": require_cuda(self.value["inspection"]), "user": "10001:10001",
            "entrypoint": ["python", "-m", "cuda_probe"], "engine": {}, "checks": REPORT, "log": "logs/image.log",
        }  # fmt: skip

    def checks(self) -> list[Check]:
        """Check the folder as it is now, with a record that lists all of its files."""
        value = {**self.value, "files": [file.model_dump() for file in files_below(self.folder)]}
        return list(check_image(self.folder, Record.model_validate(value), self.plan))

    def failed(self) -> list[str]:
        return [check.what for check in self.checks() if check.status == "failed"]


@pytest.fixture(scope="module")
def plan() -> BuildPlan:
    return image_plan("lock")


@pytest.fixture
def room(tmp_path: Path, plan: BuildPlan) -> Room:
    return Room(tmp_path / "build", plan)


def test_an_honest_image_passes(room: Room) -> None:
    room.write()
    checks = room.checks()
    assert [(check.what, check.status) for check in checks if check.status != "passed"] == [
        ("image configuration", "not_run")
    ]
    assert len(checks) >= 15


LIES: dict[str, tuple[Callable[[Case], object], list[str]]] = {
    "a label less": (lambda case: case.config["Labels"].pop("cufallback.recipe"), ["image labels in its config"]),
    "another label": (
        lambda case: case.config["Labels"].update({"cufallback.build-id": "0" * 64}),
        ["image labels in its config"],
    ),
    "no labels": (lambda case: case.config.update(Labels=None), ["image labels in its config"]),
    "no driver": (lambda case: case.config.update(Env=[]), ["NVIDIA_REQUIRE_CUDA"]),
    "no environment": (lambda case: case.config.update(Env=None), ["NVIDIA_REQUIRE_CUDA"]),
    "an older driver": (
        lambda case: case.config.update(Env=["NVIDIA_REQUIRE_CUDA=driver>=535"]),
        ["NVIDIA_REQUIRE_CUDA"],
    ),
    "two drivers": (
        lambda case: case.config["Env"].append("NVIDIA_REQUIRE_CUDA=driver>=535"),
        ["NVIDIA_REQUIRE_CUDA"],
    ),
    "another entry point": (lambda case: case.config.update(Entrypoint=["sh"]), ["image"]),
    "no entry point": (lambda case: case.config.update(Entrypoint=None), ["image"]),
    "another user": (lambda case: case.config.update(User="10002"), ["image"]),
    "no user": (lambda case: case.config.pop("User"), ["image", "image user"]),
    "no config at all": (
        lambda case: case.config.clear(),
        ["image", "image labels in its config", "NVIDIA_REQUIRE_CUDA", "image user"],
    ),
    "another report": (lambda case: case.files.update({CHECKS: b"[]"}), ["image checks"]),
    "no report": (lambda case: case.files.pop(CHECKS), ["image checks"]),
    "a report removed above": (
        lambda case: case.more.append(layer(("opt/vllm/.wh.cufallback-checks.json", b""))),
        ["image checks"],
    ),
    "a distribution more": (
        lambda case: case.files.update({f"{SITE}/x-1.dist-info/METADATA": metadata("x", "1")}),
        ["image distributions"],
    ),
    "a distribution less": (
        lambda case: case.files.pop(f"{SITE}/numpy-2.3.dist-info/METADATA"),
        ["image distributions"],
    ),
    "another version": (
        lambda case: case.files.update({f"{SITE}/numpy-2.3.dist-info/METADATA": metadata("numpy", "2.4")}),
        ["image distributions"],
    ),
    "a distribution twice": (
        lambda case: case.files.update({f"{SITE}/numpy-2.2.dist-info/METADATA": metadata("numpy", "2.2")}),
        ["image distributions"],
    ),
    "a distribution removed above": (
        lambda case: case.more.append(layer((f"{SITE}/.wh.numpy-2.3.dist-info", b""))),
        ["image distributions"],
    ),
    "a distribution hidden by an opaque folder": (
        lambda case: case.more.append(layer((f"{SITE}/.wh..wh..opq", b""))),
        ["image distributions"],
    ),
    "metadata of nothing": (
        lambda case: case.files.update({f"{SITE}/x-1.dist-info/METADATA": b"\xff\0"}),
        ["image distributions"],
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_an_image_that_lies_is_named(room: Room, name: str) -> None:
    change, expected = LIES[name]
    change(room.case)
    room.write()
    assert room.failed() == expected


@pytest.mark.parametrize("user", ["", "0", "root", "0:0", "root:10001", "00", "+0", ":1"])
def test_root_in_any_spelling_is_named(room: Room, user: str) -> None:
    room.case.config["User"] = user
    room.write()
    assert room.failed() == ["image", "image user"]


@pytest.mark.parametrize("name", ["Numpy", "NumPy", "numpy"])
def test_a_name_in_any_spelling_is_the_same_distribution(room: Room, name: str) -> None:
    room.case.files[f"{SITE}/numpy-2.3.dist-info/METADATA"] = metadata(name, "2.3")
    room.write()
    assert room.failed() == []


CLAIMS: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "size": (lambda found: found.update(size=1), ["image"]),
    "platform": (lambda found: found.update(platform="linux/arm64"), ["image"]),
    "user": (lambda found: found.update(user="1"), ["image"]),
    "entry point": (lambda found: found.update(entrypoint=[]), ["image"]),
    "a layer less": (lambda found: found["layers"].pop(), ["image"]),
    "another config": (lambda found: found["config"].update(size=1), ["image"]),
    "labels": (lambda found: found["labels"].pop("cufallback.recipe"), ["image labels"]),
    "driver": (lambda found: found.update(require_cuda="driver>=535"), ["image driver requirement"]),
    "index": (lambda found: found.update(index=f"sha256:{'0' * 64}"), ["image index"]),
    "Dockerfile": (lambda found: found.update(dockerfile="inputs/dockerfiles/other"), ["image Dockerfile"]),
    "log": (lambda found: found.update(log="logs/none.log"), ["log logs/none.log"]),
    "checks": (lambda found: found.update(checks=[]), ["image checks", "image checks made"]),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_record_that_lies_is_named(room: Room, name: str) -> None:
    change, expected = CLAIMS[name]
    room.write()
    room.value["image"] = copy.deepcopy(room.value["image"])
    change(room.value["image"])
    assert room.failed() == expected


def test_a_driver_that_the_inspection_does_not_ask_for(room: Room) -> None:
    room.write()
    room.value["inspection"][0]["minimum_driver"] = {"driver": "580.65.06"}
    assert room.failed() == ["image driver requirement", "NVIDIA_REQUIRE_CUDA"]


def test_a_blob_that_no_descriptor_leads_to_is_named(room: Room) -> None:
    room.write()
    stray = blob(room.folder / "image", b"stray", LAYER)
    (check,) = [check for check in room.checks() if check.status == "failed"]
    assert check.what == "image layout"
    assert stray["digest"][7:] in check.why


def test_a_blob_under_another_name_is_named(room: Room) -> None:
    room.write()
    (room.folder / "image" / "blobs" / "sha256" / ("0" * 64)).write_bytes(b"x")
    assert room.failed() == ["image blobs", "image layout"]


def test_an_index_that_leads_to_another_image_too(room: Room) -> None:
    room.write()
    layout = room.folder / "image"
    first = {"mediaType": MANIFEST, "digest": read_image(layout).digest, "size": read_image(layout).manifest.size}
    top(layout, first, image(layout, []))
    assert room.failed() == ["image index entries", "image layout", "image index"]


def test_a_build_without_an_image(room: Room) -> None:
    room.value["image"] = None
    assert [(check.what, check.status) for check in room.checks()] == [("image", "not_run")]
    without = dataclasses.replace(room.plan, recipe=room.plan.recipe.model_copy(update={"image": None}))
    room.plan = without
    assert room.checks() == []


def test_an_image_that_the_recipe_does_not_have(room: Room) -> None:
    room.write()
    room.plan = dataclasses.replace(room.plan, recipe=room.plan.recipe.model_copy(update={"image": None}))
    assert room.failed() == ["image"]


def test_a_replaced_base_is_told(tmp_path: Path) -> None:
    room = Room(tmp_path / "build", image_plan("replaced"))
    room.write()
    assert room.failed() == []
    told, _configuration = [check for check in room.checks() if check.status == "not_run"]
    assert told.what == "base image base"
    assert "took the place of the locked docker.io/library/python:3.11-slim-bookworm" in told.why
