"""Hold the image of a build folder against its record, its plan and itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from cufallback.attest.debian import SYSTEM_FILES
from cufallback.checks import Check, agree
from cufallback.image.build import CHECKS, check_definition, expected_labels, is_root, require_cuda
from cufallback.image.layout import Image, find_files, read_image
from cufallback.image.lock import RESOLVED
from cufallback.plan import BuildPlan
from cufallback.record import Record

# Read in one pass, since layers have gigabytes: the report of the checks, the package lists, what Python finds.
DIST_INFO = re.compile(r"opt/vllm/lib/python[\d.]+/site-packages/[^/]+\.dist-info/METADATA")
_WANTED = re.compile(rf"{re.escape(CHECKS)}|{SYSTEM_FILES.pattern}|{DIST_INFO.pattern}")


def check_image(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """The image is the one of the record and what the plan says; what is installed in it is what the locks say."""
    for base in record.bases:
        if base.origin == "replaced":
            yield Check(
                f"base image {base.name}", "not_run", f"{base.digest} took the place of the locked {base.reference}"
            )
    found = record.image
    if found is None:
        if plan.recipe.image is not None:
            yield Check("image", "not_run", "none was built; the stage says why")
        return
    if plan.recipe.image is None:
        yield Check("image", "failed", "the recipe has none")
        return
    image = read_image(folder / found.path, found.manifest.digest, platform=plan.recipe.oci_platform)
    yield from check_config(image, record, plan)
    known = {file.path: file for file in record.files}
    check_definition(plan)
    yield Check("image definition", "passed", "the Dockerfile takes nothing that is not pinned")
    prefix = f"{found.path}/blobs/sha256/"
    misnamed = [path for path, file in known.items() if path.startswith(prefix) and path != prefix + file.sha256]
    yield Check("image blobs", "failed" if misnamed else "passed", f"not named by their digest: {misnamed or 'none'}")
    blobs = {image.manifest, image.config, *image.layers}
    places = {prefix + blob.hex for blob in blobs} | {f"{found.path}/{name}" for name in ("index.json", "oci-layout")}
    stray = sorted({path for path in known if path.startswith(f"{found.path}/")} - places)
    absent = sorted({prefix + blob.hex for blob in blobs} - known.keys())
    yield Check("image layout", "failed" if stray or absent else "passed", f"besides the image: {stray or 'nothing'}")
    index = known.get(f"{found.path}/index.json")
    yield agree("image index", f"sha256:{index.sha256}" if index else None, found.index, source="index.json")
    yield agree("image Dockerfile", f"inputs/dockerfiles/{plan.recipe.image.dockerfile}", found.dockerfile)
    if found.log not in known:
        yield Check(f"log {found.log}", "failed", "the image's log is not here")
    files = files_of(image)
    report = json.loads(files[CHECKS]) if CHECKS in files else None
    yield agree("image checks", report, [item.model_dump() for item in found.checks], source="the image's own report")
    made = ["user", "distributions", "torch.version.cuda", *(f"import {name}" for name in modules(plan))]
    yield agree("image checks made", made, [item.what for item in found.checks], source="the plan")
    yield check_installed(files, record)
    for locked in plan.locks.images.images if plan.locks.images else ():
        if locked.source != RESOLVED:
            yield Check(f"base image {locked.name}: digest", "not_run", locked.source)


def modules(plan: BuildPlan) -> list[str]:
    """Return what an image of the plan must have imported in itself."""
    return [str(name) for name in plan.image_expectation["modules"]]


def files_of(image: Image) -> dict[str, bytes]:
    """Return the files of an image that checks look at; read once, since its layers may have gigabytes."""
    return _files_in(image.folder, image.digest)


@lru_cache(maxsize=1)
def _files_in(folder: Path, digest: str) -> dict[str, bytes]:
    return find_files(read_image(folder, digest), _WANTED)


def metadata_of(files: Mapping[str, bytes]) -> dict[tuple[str, str], bytes]:
    """Return (normalised name, version) → METADATA of every distribution among the files of an image."""
    found: dict[tuple[str, str], bytes] = {}
    for path, content in files.items():
        if DIST_INFO.fullmatch(path):
            head = content.decode("utf-8", "replace").partition("\n\n")[0]
            fields = dict(line.partition(": ")[::2] for line in head.splitlines())
            found[canonicalize_name(fields.get("Name", "")), fields.get("Version", "")] = content
    return found


def check_config(image: Image, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Manifest, labels, user and entry point are those of record, plan and inspection."""
    found = record.image
    if found is None:
        return
    config: Mapping[str, Any] = image.execution
    shown = {
        "manifest": image.manifest.to_json(),
        "config": image.config.to_json(),
        "layers": [layer.to_json() for layer in image.layers],
        "size": image.size,
        "platform": image.platform,
        "user": config.get("User"),
        "entrypoint": config.get("Entrypoint"),
    }
    yield agree("image", shown, found.model_dump(include=set(shown)), source="the image")
    labels = expected_labels(plan, str(record.inspection[0]["version"]))
    yield agree("image labels", labels, found.labels)
    own = {name: image.labels.get(name) for name in labels}
    yield agree("image labels in its config", labels, own, document="the image")
    needs = require_cuda(record.inspection)
    yield agree("image driver requirement", needs, found.require_cuda, source="the inspection")
    stated = [text for text in config.get("Env") or [] if text.startswith("NVIDIA_REQUIRE_CUDA=")]
    yield agree("NVIDIA_REQUIRE_CUDA", [f"NVIDIA_REQUIRE_CUDA={needs}"], stated, document="the image")
    root = is_root(str(config.get("User") or ""))
    yield Check("image user", "failed" if root else "passed", f"is {config.get('User') or 'root'}")
    manifest = json.loads(image.blob(image.manifest).read_bytes())
    foreign = sorted(manifest.keys() - {"schemaVersion", "mediaType", "config", "layers", "annotations"})
    foreign += [name for row in (manifest["config"], *manifest["layers"]) for name in row if name in ("urls", "data")]
    yield Check("image manifest", "failed" if foreign else "passed", f"fields that a build does not write: {foreign}")
    index = json.loads((image.folder / "index.json").read_bytes())
    named = [entry.get("digest") for entry in index["manifests"]]
    yield agree("image index entries", [image.digest], named, document="index.json")
    yield Check(
        "image configuration",
        "not_run",
        "that this Dockerfile on this base gives these layers, variables and commands only a rebuild shows",
    )


def check_installed(files: Mapping[str, bytes], record: Record) -> Check:
    """The distributions that the image holds are the locked ones and the wheels, in their versions."""
    expected = sorted(
        [[item.name, item.version] for item in record.distributions if "runtime" in item.used_for]
        + [[canonicalize_name(str(wheel["name"])), str(wheel["version"])] for wheel in record.inspection]
    )
    return agree("image distributions", expected, sorted(map(list, metadata_of(files))), document="the image")
