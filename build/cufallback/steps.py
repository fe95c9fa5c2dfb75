"""The steps of a plan: what the stages will do, said before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cufallback.plan import Locks, Step
from cufallback.recipe import GitSource, Recipe, WheelSource

if TYPE_CHECKING:
    from cufallback.image.bases import Base


def plan_steps(recipe: Recipe, locks: Locks, bases: Sequence[Base] = ()) -> tuple[Step, ...]:
    """Return what the stages will do, as a reader or another machine would need it."""
    from cufallback.wheel.builder import BUILD_COMMAND, compiler_environment

    source = recipe.source
    if isinstance(source, GitSource):
        fetch = f"check out {source.url} at {source.commit}"
    elif isinstance(source, WheelSource):
        fetch = f"download the wheel {source.file} and check its sha256"
    else:
        fetch = f"download the source distribution {source.package} {source.version} and check its sha256"

    epoch = locks.source.epoch if locks.source else None
    image: tuple[Step, ...] = ()
    if recipe.image is not None:
        from cufallback.image.build import image_command

        command = image_command(recipe, {base.name: base.digest for base in bases})
        image = (
            *(Step("image", f"have base image {base.reference} by digest", network=True) for base in bases),
            Step(
                "image",
                f"build the image {recipe.image.target} of {recipe.image.dockerfile}",
                network=False,
                command=command,
                environment={"SOURCE_DATE_EPOCH": str(epoch)},
            ),
        )
    main = Step(
        "wheels",
        "build the main wheel",
        network=False,
        command=BUILD_COMMAND,
        environment=compiler_environment(recipe.wheel.environment, epoch=epoch),
    )
    if isinstance(source, WheelSource):
        main = Step("wheels", f"take {source.file} as it was published", network=False)
    return (
        Step("prefetch", fetch, network=True),
        *(Step("prefetch", f"rewrite {rewrite.file}", network=False) for rewrite in source.rewrite),
        *(
            Step("prefetch", f"contract: {item.pattern} {item.expect} in {item.file}", network=False)
            for item in source.contract
        ),
        Step("prefetch", "hold what the tree would fetch to the source lock", network=False),
        Step("prefetch", "fill the wheelhouses from the dependency locks", network=True),
        Step("wheels", "install the build lock into a fresh environment", network=False),
        main,
        Step(
            "wheels",
            "build the cuda-probe",
            network=False,
            command=BUILD_COMMAND,
            environment=compiler_environment(probe_environment(recipe), epoch=epoch),
        ),
        Step("wheels", "repack what was built byte for byte", network=False),
        Step("inspect", "read libraries, architectures, PTX and minimum driver from the wheels", network=False),
        *image,
        Step("attest", "write an SBOM for each wheel and the image, and the provenance", network=False),
        Step("record", "write the record and verify it", network=False),
    )


def probe_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that the cuda-probe is built with."""
    from cufallback.cuda.questions import isa_of
    from cufallback.wheel.audit import PROBE_PTX

    return {
        "CUFALLBACK_PROBE_ARCHITECTURES": " ".join(recipe.cuda.architectures),
        "CUFALLBACK_PROBE_PTX": PROBE_PTX,
        "CUFALLBACK_PROBE_PTX_ISA": str(isa_of(recipe.cuda.toolkit)),
    }
