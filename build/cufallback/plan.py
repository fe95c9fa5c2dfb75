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
    from cufallback.recipe import Recipe
    from cufallback.source.lock import SourceLock
    from cufallback.toolchain import Toolchain

SCHEMA_VERSION = 1
LOCK_FILES = ("source.lock.toml", "build.txt", "runtime.txt")

# Where a build runs and what people read, never what is made: these keys are no part of the build id.
_PLACE = {"jobs", "nvcc_threads", "minimum_disk_gib", "minimum_memory_gib"}
_PROSE = {"why", "summary", "status", "default", "end_of_line"}


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
    """The locks of one recipe as they lie in ``locks/<recipe>/``; None where one is missing or refused."""

    source: SourceLock | None
    build: Lock | None
    runtime: Lock | None


@dataclass(frozen=True)
class PinnedLocks:
    """The locks of a complete plan."""

    source: SourceLock
    build: Lock
    runtime: Lock


@dataclass(frozen=True)
class BuildPlan:
    """Every byte-affecting input of a build, and the steps that follow from it.

    ``inputs`` holds the recipe's and the locks' bytes by file name, as they were read once: stages and record
    use these, so that an edit during a build cannot get into it.
    """

    recipe: Recipe
    inputs: Mapping[str, bytes]
    locks: Locks
    toolchain: Toolchain | None
    probe_sha256: str
    steps: tuple[Step, ...]

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

    @property
    def short_id(self) -> str:
        """The 16 hex digits that name folders and are shown to people."""
        return self.build_id[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the JSON object whose canonical form is hashed."""
        recipe = _without(self.recipe.model_dump(mode="json", by_alias=True), _PLACE | _PROSE)
        locks = {name: sha256_bytes(self.inputs[name]) if name in self.inputs else None for name in LOCK_FILES}
        return {
            "schema": SCHEMA_VERSION,
            "cufallback": __version__,
            "recipe": recipe,
            "locks": locks,
            "distributions": {
                "build": _pins(self.locks.build),
                "runtime": _pins(self.locks.runtime),
            },
            "cuda_probe": self.probe_sha256,
            "toolchain": self.toolchain and self.toolchain.to_json(),
            "steps": [step.to_json() for step in self.steps],
        }


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, keys) for key, inner in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(inner, keys) for inner in value]
    return value


def _pins(lock: Lock | None) -> list[dict[str, Any]] | None:
    if lock is None:
        return None
    return [{"name": item.name, "version": item.version, "sha256": item.sha256} for item in lock.distributions]
