"""locks/<recipe>/images.lock.toml: every base image with its tag and the digests that pin it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from cufallback.errors import LockError, RegistryError, UsageError
from cufallback.image.layout import is_digest
from cufallback.image.reference import DOCKER_HUB, Reference, parse_reference
from cufallback.image.registry import Registry, index_platforms, platform_name
from cufallback.tomlplace import key_path, line_of, parse_toml, printable

SCHEMA_VERSION: Final = 1
RESOLVED: Final = "resolved from the registry"
QUOTED: Final = "quoted: "

_HEADER = """\
# Every image that the Dockerfile starts from: the tag that was asked for and the digests that pin it.
# Written by `cufallback lock --images`; a change here is a change of what is built.
"""
_REQUIRED = ("name", "reference", "platform", "resolved", "source")
_KEYS = ("name", "reference", "index", "platform", "resolved", "source")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PLATFORM = re.compile(r"linux/[a-z0-9]+(?:/[a-z0-9]+)?")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:Z|[+-][0-9]{2}:[0-9]{2})")


@dataclass(frozen=True)
class LockedImage:
    """One base image.

    Args:
        name: of the build context in the Dockerfile.
        reference: with a tag and without a digest.
        index: the digest that the tag named, when it is that of an index; None when the tag names one image.
        platform: platform, such as ``linux/amd64``, → digest of its manifest.
        resolved: when, as an RFC 3339 date-time.
        source: ``resolved from the registry``, or ``quoted: `` and where the digests were read.
    """

    name: str
    reference: Reference
    index: str | None
    platform: Mapping[str, str]
    resolved: str
    source: str

    def digest(self, platform: str) -> str:
        """Return the digest of the manifest for a platform.

        Raises:
            LockError: the image has none for it.
        """
        if platform not in self.platform:
            raise LockError(
                f"the image {self.name} is locked for {', '.join(self.platform)}, not for {platform}",
                remedy="choose an image that exists for this platform, then lock again",
            )
        return self.platform[platform]


@dataclass(frozen=True)
class ImageLock:
    """The base images of one recipe."""

    recipe: str
    images: tuple[LockedImage, ...]

    def image(self, name: str) -> LockedImage:
        """Return the entry of a base.

        Raises:
            LockError: the lock has none of that name.
        """
        for image in self.images:
            if image.name == name:
                return image
        known = ", ".join(image.name for image in self.images) or "none"
        raise LockError(f"the image lock has no image {name!r}, only {known}", remedy=_remedy(self.recipe))


def render_image_lock(images: Sequence[LockedImage], recipe: str) -> str:
    """Return the lock as TOML text; equal entries give equal text."""
    parts = [f"{_HEADER}schema = {SCHEMA_VERSION}\nrecipe = {_string(recipe)}\n"]
    for image in images:
        lines = ["[[image]]", f"name = {_string(image.name)}", f"reference = {_string(str(image.reference))}"]
        if image.index is not None:
            lines.append(f"index = {_string(image.index)}")
        lines += [f"resolved = {_string(image.resolved)}", f"source = {_string(image.source)}", "[image.platform]"]
        lines += [f"{_string(name)} = {_string(digest)}" for name, digest in sorted(image.platform.items())]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for the delete character, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _remedy(recipe: str) -> str:
    return f"run `cufallback lock --images --recipe {recipe}` to write it anew, and review the change"


def parse_image_lock(text: str, recipe: str, *, where: str) -> ImageLock:
    """Read the text of an image lock.

    Args:
        text: TOML.
        recipe: the name of the recipe it must be for.
        where: the file's name, for errors.

    Raises:
        LockError: no TOML, of another recipe or schema, or not of the right shape; with the line.
    """
    remedy = _remedy(recipe)
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise LockError(str(error), remedy=remedy, where=where) from error

    def fault(reason: str, *location: str | int) -> LockError:
        return LockError(printable(reason), remedy=remedy, where=f"{where}:{line_of(text, location)}")

    if type(data.get("schema")) is not int or data["schema"] != SCHEMA_VERSION:
        raise fault(f"schema is {data.get('schema')!r}, this program reads {SCHEMA_VERSION}", "schema")
    if data.get("recipe") != recipe:
        raise fault(f"this is the lock of recipe {data.get('recipe')!r}, not of {recipe!r}", "recipe")
    unknown = sorted(data.keys() - {"schema", "recipe", "image"})
    if unknown:
        raise fault(f"unknown key {unknown[0]!r}", unknown[0])
    entries = data.get("image", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise fault("image must be a list of tables", "image")
    images: list[LockedImage] = []
    for number, entry in enumerate(entries):
        problem = _problem(entry)
        if problem is not None:
            keys, reason = problem
            location: tuple[str | int, ...] = ("image", number, *keys)
            raise fault(f"{key_path(location)}: {reason}", *location)
        if entry["name"] in {other.name for other in images}:
            raise fault(f"image[{number}]: {entry['name']} is listed twice", "image", number, "name")
        images.append(
            LockedImage(
                entry["name"],
                parse_reference(entry["reference"]),
                entry.get("index"),
                entry["platform"],
                entry["resolved"],
                entry["source"],
            )
        )
    return ImageLock(recipe, tuple(images))


def _problem(entry: dict[str, Any]) -> tuple[tuple[str, ...], str] | None:
    """Return (keys, reason) of the first fault of an entry."""
    for key in entry:
        if key not in _KEYS:
            return (key,), f"unknown key; valid keys are {', '.join(_KEYS)}"
    for key in _REQUIRED:
        if key not in entry:
            return (key,), "is missing"
    for key in ("name", "reference", "resolved", "source"):
        if not isinstance(entry[key], str):
            return (key,), "must be a text"
    if not _NAME.fullmatch(entry["name"]):
        return ("name",), "must be of a-z, 0-9, dot, hyphen and underscore"
    if "index" in entry and not is_digest(entry["index"]):
        return ("index",), f"is no digest, sha256: and 64 hex digits: {entry['index']!r}"
    platform = entry["platform"]
    if not isinstance(platform, dict) or not platform:
        return ("platform",), "must be a table with a digest for each platform"
    for name, digest in platform.items():
        if not _PLATFORM.fullmatch(name):
            return ("platform", name), "is no platform such as linux/amd64"
        if not is_digest(digest):
            return ("platform", name), f"is no digest, sha256: and 64 hex digits: {digest!r}"
    if "index" not in entry and len(platform) != 1:
        return ("platform",), "has several platforms, which only an index can have"
    if not _is_time(entry["resolved"]):
        return ("resolved",), f"is no RFC 3339 date-time such as 2026-12-01T00:00:00Z: {entry['resolved']!r}"
    if entry["source"] != RESOLVED and not entry["source"].removeprefix(QUOTED).strip():
        return ("source",), f"names no source after {QUOTED!r}"
    if entry["source"] != RESOLVED and not entry["source"].startswith(QUOTED):
        return ("source",), f"must be {RESOLVED!r} or begin with {QUOTED!r}"
    return _reference_problem(entry["reference"])


def _is_time(text: str) -> bool:
    try:
        return _TIME.fullmatch(text) is not None and datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def _reference_problem(text: str) -> tuple[tuple[str, ...], str] | None:
    try:
        reference = parse_reference(text)
    except UsageError as error:
        return ("reference",), error.reason
    if reference.tag is None or reference.digest is not None:
        return ("reference",), "must have a tag and no digest"
    if str(reference) != text:
        return ("reference",), f"must be written as {reference}"
    return None


def resolve_images(
    bases: Mapping[str, str], previous: ImageLock | None, *, recipe: str, registry: Registry, now: str
) -> ImageLock:
    """Return the lock of the base images with the digests that their tags name now.

    An entry whose digests are unchanged stays as it is, with its date.

    Args:
        bases: name of the build context → reference with a tag, as in a Dockerfile.
        previous: the lock so far, if any.
        recipe: the recipe's name.
        registry: asked for each.
        now: the date of new entries, RFC 3339.

    Raises:
        UsageError: a reference is malformed, has no tag or has a digest.
        RegistryError: a tag does not exist, or a registry could not be asked.
        ImageError: what the tag names is no image or index.
    """
    known = {image.name: image for image in previous.images} if previous is not None else {}
    images = []
    for name, text in sorted(bases.items()):
        reference = parse_reference(text, DOCKER_HUB)
        if reference.tag is None or reference.digest is not None:
            raise UsageError(
                "a base image is named by a tag; its digest belongs in the lock",
                remedy="write NAME:TAG",
                where=str(reference),
            )
        image = _resolve(name, reference, registry, now)
        old = known.get(name)
        unchanged = old is not None and (old.reference, old.index, dict(old.platform), old.source) == (
            image.reference,
            image.index,
            image.platform,
            image.source,
        )
        images.append(old if old is not None and unchanged else image)
    return ImageLock(recipe, tuple(images))


def _resolve(name: str, reference: Reference, registry: Registry, now: str) -> LockedImage:
    found = registry.digest_of(reference)
    if found is None:
        raise RegistryError(
            "the registry has no such tag", remedy="correct the name and tag of the base image", where=str(reference)
        )
    pinned = reference.at(found.digest)
    content = registry.manifest(pinned)
    platforms = index_platforms(content, where=str(reference))
    if platforms is not None:
        if not platforms:
            raise RegistryError("the index holds no image for Linux", remedy="name another image", where=str(reference))
        return LockedImage(name, reference, found.digest, platforms, now, RESOLVED)
    platform = platform_name(registry.configuration(pinned, content))
    return LockedImage(name, reference, None, {platform: found.digest}, now, RESOLVED)
