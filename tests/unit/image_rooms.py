"""OCI layouts as small as they can be, made by hand; the rehearsal's plan with an image; a record of such a build."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from cufallback.image.bases import Base
from cufallback.inputs import parse_locks, read_inputs
from cufallback.plan import BuildPlan
from cufallback.recipe import parse_recipe
from cufallback.steps import plan_steps
from cufallback.store import sha256_bytes
from cufallback.toolchain import Toolchain

CHECKOUT = Path(__file__).resolve().parents[2]
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER = "application/vnd.docker."
DIGEST = f"sha256:{'d' * 64}"

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    LAYER: lambda data: data,
    f"{LAYER}+gzip": lambda data: gzip.compress(data, mtime=0),
    f"{LAYER}+zstd": zstandard.compress,
    f"{DOCKER}image.rootfs.diff.tar.gzip": lambda data: gzip.compress(data, mtime=0),
    f"{DOCKER}image.rootfs.diff.tar.zstd": zstandard.compress,
}

Member = tuple[str, bytes | str | None]  # a file's content, a link's target, None for a folder


def blob(layout: Path, content: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    """Write a blob of a layout and return its descriptor."""
    digest = sha256_bytes(content)
    path = layout / "blobs" / "sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content), **more}


def document(layout: Path, value: Any, media_type: str, **more: Any) -> dict[str, Any]:
    """Write a JSON blob of a layout and return its descriptor."""
    return blob(layout, json.dumps(value).encode(), media_type, **more)


def top(layout: Path, *descriptors: Mapping[str, Any]) -> None:
    """Write ``oci-layout`` and ``index.json``."""
    layout.mkdir(parents=True, exist_ok=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": descriptors}))


def configuration(config: Any = None, platform: str = "linux/amd64") -> dict[str, Any]:
    """Return the config document of an image."""
    system, _, machine = platform.partition("/")
    found = {"os": system, "architecture": machine, "rootfs": {"type": "layers", "diff_ids": []}}
    return {**found, "config": {} if config is None else config}


def image(
    layout: Path,
    layers: Sequence[bytes] = (),
    *,
    config: Any = None,
    platform: str = "linux/amd64",
    media_type: str = f"{LAYER}+gzip",
    manifest_type: str = MANIFEST,
) -> dict[str, Any]:
    """Write the blobs of an image whose layers are these tar archives; return its manifest's descriptor."""
    rows = [blob(layout, PACKERS[media_type](layer), media_type) for layer in layers]
    stated = document(layout, configuration(config, platform), CONFIG)
    value = {"schemaVersion": 2, "mediaType": manifest_type, "config": stated, "layers": rows}
    return document(layout, value, manifest_type)


def layer(*members: Member, hard: bool = False) -> bytes:
    """Return a tar archive; ``hard`` makes links hard ones."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = (tarfile.LNKTYPE if hard else tarfile.SYMTYPE), content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def image_plan(origin: str = "replaced", **changed: Any) -> BuildPlan:
    """The rehearsal's plan with its base image, on a machine with a toolchain of its own."""
    path = CHECKOUT / "recipes" / "rehearsal.toml"
    recipe = parse_recipe(path)
    inputs = read_inputs(path, recipe)
    locks, refused = parse_locks(recipe, inputs, CHECKOUT / "locks" / "rehearsal")
    assert not refused
    assert recipe.image is not None
    bases = tuple(Base(base.name, base.reference, DIGEST, origin) for base in recipe.image.base)  # type: ignore[arg-type]
    toolchain = Toolchain("x86_64", "glibc 2.36", "3.11.7", "g++ 12", "gcc 12", "ld 2.40")
    parts = {"toolchain": toolchain, "probe_sha256": "ab" * 32, "steps": plan_steps(recipe, locks, bases)}
    return BuildPlan(recipe, inputs, locks, **{**parts, "bases": bases, **changed})
