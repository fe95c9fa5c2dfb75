"""What this machine has to build an image with, and what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cufallback.errors import CufallbackError
from cufallback.image.engine import Engine, NoEngine
from cufallback.store import canonical_json

if TYPE_CHECKING:
    from cufallback.plan import BuildPlan


@dataclass(frozen=True)
class ImageTools:
    """The engine, and the OCI layout of each base image, or why there is none."""

    engine: Engine | NoEngine
    bases: Mapping[str, Path | CufallbackError]
    use_cache: bool = True

    def key(self) -> str:
        """Return what tells whether another run would make something else."""
        engine = self.engine.to_json() if isinstance(self.engine, Engine) else None
        missing = sorted(name for name, folder in self.bases.items() if not isinstance(folder, Path))
        return canonical_json({"engine": engine, "missing": missing}).decode()


def image_hindrance(plan: BuildPlan, tools: ImageTools) -> tuple[str, str] | None:
    """Return why the image of ``plan`` cannot be built here and what to do about it, or None."""
    if plan.recipe.image is None:
        return "the recipe has no [image]", ""
    for folder in tools.bases.values():
        if isinstance(folder, CufallbackError):
            return folder.reason, folder.remedy
    if isinstance(tools.engine, NoEngine):
        return tools.engine.why, tools.engine.remedy
    return None
