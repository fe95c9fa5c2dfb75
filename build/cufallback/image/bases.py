"""Base images: which digest each name of the Dockerfile stands for, and the OCI layout it is taken from.

A base always comes as an OCI layout, whether it was pulled or given: BuildKit carries annotations of the way a base
came over into the result, so that two ways would give two digests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cufallback.errors import CufallbackError, ImageError, LockError, UsageError
from cufallback.image.layout import check_blobs, is_digest, read_image

if TYPE_CHECKING:
    from cufallback.image.lock import ImageLock
    from cufallback.image.registry import Registry
    from cufallback.recipe import Recipe

_ARGUMENT = re.compile(r"(?P<name>[a-z][a-z0-9-]*)=oci-layout:(?://)?(?P<folder>.+)@(?P<digest>sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Base:
    """One base image: ``digest`` is its manifest's for the recipe's platform, None where no lock has it.

    ``origin``: ``lock``, or ``replaced`` when the user gave another one for this build.
    """

    name: str
    reference: str
    digest: str | None
    origin: Literal["lock", "replaced"]

    def to_json(self) -> dict[str, Any]:
        """Return it as plan and record hold it."""
        return {"name": self.name, "reference": self.reference, "digest": self.digest, "origin": self.origin}


@dataclass(frozen=True)
class Replacement:
    """``--base NAME=oci-layout:DIR@sha256:…``: an image on disk in place of the locked one."""

    name: str
    folder: Path
    digest: str


def parse_replacements(arguments: Sequence[str], recipe: Recipe) -> tuple[Replacement, ...]:
    """Read ``--base`` arguments and check that each names a base of the recipe and a whole image on disk.

    Raises:
        UsageError: not of that form, or no such base.
        ImageError: no such image in that layout, one for another platform, or one of its blobs is damaged.
    """
    known = [base.name for base in recipe.image.base] if recipe.image else []
    found: dict[str, Replacement] = {}
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument)
        if match is None:
            raise UsageError(
                f"not of the form NAME=oci-layout:DIR@sha256:DIGEST: {argument!r}",
                remedy="give the name from [[image.base]], the folder of an OCI layout and the image's digest",
                where="--base",
            )
        name, digest = match["name"], match["digest"]
        if name not in known or name in found:
            why = "stands here twice" if name in found else f"is no base of recipe {recipe.name}"
            raise UsageError(f"{name!r} {why}", remedy=f"its bases: {', '.join(known) or 'none'}", where="--base")
        image = read_image(Path(match["folder"]), digest, platform=recipe.oci_platform)
        if image.platform != recipe.oci_platform:
            raise ImageError(
                f"is for {image.platform}, not for {recipe.oci_platform}",
                remedy="give the image for the recipe's platform",
                where=f"--base {name}",
            )
        check_blobs(image)
        found[name] = Replacement(name, Path(match["folder"]).resolve(), image.digest)
    return tuple(found.values())


def resolve_bases(recipe: Recipe, lock: ImageLock | None, replaced: Sequence[Replacement]) -> tuple[Base, ...]:
    """Return each base of the recipe with its digest: the replacement's, else the lock's for the platform.

    Raises:
        LockError: the lock has no such base, has it for another tag, or not for the platform.
    """
    if recipe.image is None:
        return ()
    given = {item.name: item.digest for item in replaced}
    bases = []
    for base in recipe.image.base:
        digest = None
        if base.name not in given and lock is not None:
            entry = lock.image(base.name)
            if str(entry.reference) != base.reference:
                raise LockError(
                    f"the lock is for {entry.reference}, the recipe says {base.reference}",
                    remedy=f"run `nox -s lock -- --images --recipe {recipe.name}` and review the difference",
                    where=f"locks/{recipe.name}/images.lock.toml: {base.name}",
                )
            digest = entry.digest(recipe.oci_platform)
        elif base.name in given:
            digest = given[base.name]
        bases.append(Base(base.name, base.reference, digest, "replaced" if base.name in given else "lock"))
    return tuple(bases)


def base_folder(work: Path, digest: str) -> Path:
    """Return where the layout of a pulled base lies or would lie."""
    return work / "bases" / digest.removeprefix("sha256:")


def fetch_bases(
    bases: Sequence[Base], replaced: Sequence[Replacement], *, work: Path, registry: Registry, recipe: Recipe
) -> dict[str, Path | CufallbackError]:
    """Make every base available as a layout; return its folder by name, or why it cannot be had.

    Args:
        bases: the plan's.
        replaced: what the user gave; nothing is fetched for these.
        work: keeps what was pulled.
        registry: pulls the others.
        recipe: whose platform is wanted.
    """
    from cufallback.image.reference import parse_reference

    folders: dict[str, Path | CufallbackError] = {item.name: item.folder for item in replaced}
    for base in bases:
        if base.name in folders:
            continue
        if not is_digest(base.digest) or base.digest is None:
            folders[base.name] = ImageError(
                f"base image {base.name} ({base.reference}) is not locked",
                remedy=f"run `nox -s lock -- --images --recipe {recipe.name}`, or give --base",
            )
            continue
        folder = base_folder(work, base.digest)
        try:
            if not folder.is_dir():
                registry.pull(parse_reference(base.reference).at(base.digest), folder, platform=recipe.oci_platform)
            folders[base.name] = folder
        except CufallbackError as error:
            folders[base.name] = error
    return folders
