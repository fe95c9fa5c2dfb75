"""What attestations speak of: the built wheels and the built image with its bases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WheelSubject:
    """A built wheel. ``sha256`` is None while the document is written that goes into it."""

    name: str
    version: str
    filename: str
    kind: Literal["main", "cuda-probe"]
    sha256: str | None = None


@dataclass(frozen=True)
class BaseImage:
    """A base image.

    Args:
        name: what the recipe calls it.
        reference: registry, repository and tag; or ``oci-layout:`` and a folder, which no document tells.
        digest: ``sha256:`` and 64 hex digits.
    """

    name: str
    reference: str
    digest: str


@dataclass(frozen=True)
class ImageSubject:
    """A built image. ``name`` is its repository, ``bases[0]`` what its last stage starts from."""

    name: str
    digest: str
    bases: tuple[BaseImage, ...]
