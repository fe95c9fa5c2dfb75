"""The documents beside the artefacts: what is attested of a build, made from its plan and its stages' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cufallback.store import write_atomic

if TYPE_CHECKING:
    from cufallback.attest.provenance import ImageFacts
    from cufallback.attest.subjects import BaseImage, WheelSubject
    from cufallback.image.layout import Image
    from cufallback.pipeline import Context
    from cufallback.plan import BuildPlan

PROVENANCE = "provenance.intoto.json"
SBOMS = "sbom"
IMAGE_SBOM = f"{SBOMS}/image.cdx.json"


def wheel_sbom(filename: str) -> str:
    """Return the path of a wheel's detached SBOM in a build folder."""
    return f"{SBOMS}/{filename}.cdx.json"


def wheel_subject(filename: str, sha256: str | None = None, *, number: int) -> WheelSubject:
    """Return the SBOM's subject for one wheel of a build; the main wheel is number 0."""
    from packaging.utils import parse_wheel_filename

    from cufallback.attest.subjects import WheelSubject

    name, version, _build, _tags = parse_wheel_filename(filename)
    kind: Literal["main", "cuda-probe"] = "main" if number == 0 else "cuda-probe"
    return WheelSubject(name, str(version), filename, kind, sha256)


def base_images(plan: BuildPlan) -> tuple[BaseImage, ...]:
    """Return the base images of a plan as documents name them; where a replaced one lay is not told."""
    from cufallback.attest.subjects import BaseImage

    return tuple(
        BaseImage(base.name, base.reference if base.origin == "lock" else f"oci-layout:{base.name}", base.digest or "")
        for base in plan.bases
    )


def write_sboms(
    folder: Path,
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
    wheels: Sequence[Mapping[str, Any]],
    *,
    image: Image | None,
    wheelhouse: Path,
) -> list[Path]:
    """Write the detached SBOM of each wheel and, where there is one, of the image; return their paths.

    Args:
        folder: receives ``sbom/``.
        plan: a complete plan.
        prefetched: the result of the prefetch stage.
        wheels: ``subjects`` of the wheels stage.
        image: the built image.
        wheelhouse: the runtime's wheels, whose metadata name their licences.
    """
    from cufallback.attest.debian import SYSTEM_FILES, read_system
    from cufallback.attest.licences import licence_of
    from cufallback.attest.sbom import image_bom, wheel_bom
    from cufallback.attest.subjects import ImageSubject
    from cufallback.image.layout import find_files

    subjects = [
        wheel_subject(Path(wheel["path"]).name, wheel["sha256"], number=number) for number, wheel in enumerate(wheels)
    ]
    written = []
    for subject in subjects:
        written.append(folder / wheel_sbom(subject.filename))
        write_atomic(written[-1], wheel_bom(subject, plan, prefetched, identity=plan.wheels_id))
    if image is not None:
        packages, distro = read_system(find_files(image, SYSTEM_FILES))
        content = image_bom(
            ImageSubject(plan.image_name, image.digest, base_images(plan)),
            plan,
            prefetched,
            subjects,
            packages,
            distro,
            {path.name: licence_of(path) for path in sorted(wheelhouse.glob("*.whl"))},
        )
        written.append(folder / IMAGE_SBOM)
        write_atomic(written[-1], content)
    return written


def image_facts(plan: BuildPlan, engine: Mapping[str, str]) -> ImageFacts:
    """Return what the provenance says of an image: its bases, and the versions of the engine."""
    from cufallback.attest.provenance import ImageFacts

    return ImageFacts(base_images(plan), engine)


def write_provenance(path: Path, context: Context, byproducts: Sequence[tuple[str, str]]) -> None:
    """Write the provenance of a build: its subjects are the wheels and, where there is one, the image's manifest.

    Args:
        path: of the new file.
        context: of the attest stage.
        byproducts: path in the build folder and SHA-256 of logs, inspection and SBOMs.
    """
    from cufallback.attest.provenance import provenance

    plan, image = context.plan, context.result("image")["image"]
    wheels = context.result("wheels")["subjects"]
    subjects = [(Path(wheel["path"]).name, wheel["sha256"]) for wheel in wheels]
    if image is not None:
        subjects.append((plan.image_name, image["manifest"]["digest"].removeprefix("sha256:")))
    started = context.states["prefetch"].started
    content = provenance(
        plan,
        context.result("prefetch"),
        subjects,
        builder=context.settings["builder"].value,
        started=started,
        finished=max(started, context.clock()),
        invocation=f"{plan.short_id}-{int(started)}",
        isolation={Path(wheel["path"]).name: wheel["isolation"]["statement"] for wheel in wheels},
        image=image_facts(plan, image["engine"]) if image is not None else None,
        byproducts=byproducts,
    )
    write_atomic(path, content)
