"""From recipe, locks and toolchain to a build plan with an id. Pure: no clock, no network, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cufallback import __version__
from cufallback.errors import LockError
from cufallback.store import canonical_json, sha256_bytes

if TYPE_CHECKING:
    from cufallback.deps.lockfile import Lock
    from cufallback.image.bases import Base
    from cufallback.image.lock import ImageLock
    from cufallback.recipe import Recipe
    from cufallback.source.lock import SourceLock
    from cufallback.toolchain import Toolchain

SCHEMA_VERSION = 2
LOCK_FILES = ("source.lock.toml", "build.txt", "runtime.txt")
IMAGE_LOCK = "images.lock.toml"
# Where the files of dockerfiles/ stand among the inputs.
DEFINITION = "dockerfiles/"


@dataclass(frozen=True)
class Step:
    """One thing a stage will do, for the reader of the plan."""

    stage: str
    title: str
    network: bool
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {
            "stage": self.stage,
            "title": self.title,
            "network": self.network,
            "command": list(self.command),
            "environment": dict(self.environment or {}),
        }


@dataclass(frozen=True)
class Locks:
    """The locks of one recipe as they lie in ``locks/<recipe>/``; None where one is missing or refused.

    Wheels need the first three. Without ``images`` they are built and the image is not.
    """

    source: SourceLock | None
    build: Lock | None
    runtime: Lock | None
    images: ImageLock | None = None


@dataclass(frozen=True)
class PinnedLocks:
    """The locks of a complete plan."""

    source: SourceLock
    build: Lock
    runtime: Lock


@dataclass(frozen=True)
class BuildPlan:
    """Every byte-affecting input of a build, and the steps that follow from it.

    ``inputs`` holds the bytes of the recipe, the locks and the files of dockerfiles/ by name, as they were read once:
    stages and record use these, so that an edit during a build cannot get into it. ``bases`` are the base images as
    this build takes them, from the lock or replaced.
    """

    recipe: Recipe
    inputs: Mapping[str, bytes]
    locks: Locks
    toolchain: Toolchain | None
    probe_sha256: str
    steps: tuple[Step, ...]
    bases: tuple[Base, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every input is pinned, so that the plan can be built and has a build id."""
        return None not in (self.locks.source, self.locks.build, self.locks.runtime, self.toolchain)

    def pinned(self) -> PinnedLocks:
        """Return the locks of a complete plan.

        Raises:
            LockError: a lock is missing.
        """
        source, build, runtime = self.locks.source, self.locks.build, self.locks.runtime
        if source is None or build is None or runtime is None:
            raise LockError("a lock is missing", remedy="run `nox -s lock`", where=f"locks/{self.recipe.name}/")
        return PinnedLocks(source, build, runtime)

    @cached_property
    def build_id(self) -> str:
        """SHA-256 of the plan's canonical JSON, 64 hex digits."""
        return sha256_bytes(canonical_json(self.to_json()))

    @cached_property
    def wheels_id(self) -> str:
        """The build id without what only the image uses, 64 hex digits: equal ones mean equal wheels."""
        plan = self.to_json()
        del plan["image"]
        plan["commands"] = [command for command in plan["commands"] if command["stage"] != "image"]
        return sha256_bytes(canonical_json(plan))

    @property
    def image_inputs(self) -> frozenset[str]:
        """The names of the inputs that only the image uses."""
        return frozenset(name for name in self.inputs if name == IMAGE_LOCK or name.startswith(DEFINITION))

    @property
    def image_expectation(self) -> dict[str, Any]:
        """What the image asserts of itself besides its distributions; its report of that lies in it."""
        cuda = self.recipe.cuda.toolkit.rpartition(".")[0]
        return {
            "torch_cuda": cuda if self.recipe.wheel.device_code else None,
            "modules": [*self.recipe.wheel.expected_extensions, "cuda_probe"],
        }

    @property
    def definition(self) -> dict[str, bytes]:
        """The files of dockerfiles/ by name, as they were read."""
        return {
            name.removeprefix(DEFINITION): content
            for name, content in sorted(self.inputs.items())
            if name.startswith(DEFINITION)
        }

    @property
    def image_name(self) -> str:
        """What engine and documents call the image, whatever registry it goes to."""
        return f"cufallback/{self.recipe.name}"

    @property
    def short_id(self) -> str:
        """The 16 hex digits that name folders and are shown to people."""
        return self.build_id[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the JSON object whose canonical form is hashed: what affects bytes and nothing else.

        Left out on purpose: where it runs (jobs, disk, memory), what people read (reasons, titles, statuses) and what
        only judges the result (contracts, bans, expectations, limits); these redo the stages that read them.
        """
        return {
            "schema": SCHEMA_VERSION,
            "cufallback": __version__,
            "recipe": self.recipe.name,
            "source": _source(self.recipe),
            "cuda": {"toolkit": self.recipe.cuda.toolkit, "architectures": list(self.recipe.cuda.architectures)},
            "python": self.recipe.python.model_dump(mode="json"),
            "builder": self.recipe.builder.image,
            "locks": {
                "source": _source_pins(self.locks.source, self.recipe),
                "build": _pins(self.locks.build),
                "runtime": _pins(self.locks.runtime),
            },
            "cuda_probe": self.probe_sha256,
            "toolchain": self.toolchain and self.toolchain.to_json(),
            "image": self._image(),
            "commands": [
                {"stage": step.stage, "command": list(step.command), "environment": dict(step.environment or {})}
                for step in self.steps
                if step.command
            ],
        }

    def _image(self) -> dict[str, Any] | None:
        image = self.recipe.image
        if image is None:
            return None
        return {
            **image.model_dump(mode="json", exclude={"base"}),
            "platform": self.recipe.oci_platform,
            "definition": {name: sha256_bytes(content) for name, content in self.definition.items()},
            "bases": [base.to_json() for base in self.bases],
            "expectation": self.image_expectation,
        }


def _source(recipe: Recipe) -> dict[str, Any]:
    source = recipe.source
    keys = {"kind", "url", "commit", "package", "version", "file", "sha256"} & type(source).model_fields.keys()
    picks = [pick.commit for pick in source.cherry_pick] if source.kind == "git" else []
    rewrites = [rewrite.model_dump(mode="json", exclude={"why"}) for rewrite in source.rewrite]
    return {**source.model_dump(mode="json", include=keys), "cherry_pick": picks, "rewrite": rewrites}


def _source_pins(lock: SourceLock | None, recipe: Recipe) -> dict[str, Any] | None:
    from cufallback.source.lock import unused_reason

    if lock is None:
        return None
    pins = [
        {
            "name": item.label,
            "url": item.url,
            "commit": item.commit,
            "sha256": item.sha256,
            "used": unused_reason(item, recipe.source.unused) is None,  # the SBOM inside the wheel lists these
        }
        for item in lock.sources
        if item.pinned
    ]
    return {"tree_sha256": lock.tree_sha256, "epoch": lock.epoch, "pins": pins}


def _pins(lock: Lock | None) -> list[dict[str, Any]] | None:
    if lock is None:
        return None
    return [{"name": item.name, "version": item.version, "sha256": item.sha256} for item in lock.distributions]
