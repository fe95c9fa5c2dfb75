"""The documents beside the artefacts: what is attested of a build, made from its plan and its stages' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cufallback.store import write_atomic

if TYPE_CHECKING:
    from cufallback.attest.sbom import Subject
    from cufallback.image.layout import Image
    from cufallback.plan import BuildPlan

SBOMS = "sbom"
IMAGE_SBOM = f"{SBOMS}/image.cdx.json"


def wheel_sbom(filename: str) -> str:
    """Return the path of a wheel's detached SBOM in a build folder."""
    return f"{SBOMS}/{filename}.cdx.json"


def wheel_subject(filename: str, sha256: str | None = None, *, number: int) -> Subject:
    """Return the SBOM's subject for one wheel of a build; the main wheel is number 0."""
    from packaging.utils import parse_wheel_filename

    from cufallback.attest.sbom import Subject

    name, version, _build, _tags = parse_wheel_filename(filename)
    kind: Literal["main", "cuda-probe"] = "main" if number == 0 else "cuda-probe"
    return Subject(name, str(version), filename, kind, sha256)


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
    from cufallback.attest.sbom import Base, ImageSubject, image_bom, wheel_bom
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
        bases = tuple(
            Base(base.name, base.reference if base.origin == "lock" else f"oci-layout:{base.name}", base.digest or "")
            for base in plan.bases
        )
        content = image_bom(
            ImageSubject(plan.recipe.name, image.digest, bases),
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
