"""Run stages in order: skip what is done and intact, redo what changed, survive any interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO

from cufallback.errors import BusyError, CufallbackError, WorkspaceError
from cufallback.plan import BuildPlan
from cufallback.process import Runner
from cufallback.progress import Progress
from cufallback.resources import PYTHON_CACHES
from cufallback.store import (
    Fingerprint,
    Store,
    canonical_json,
    discard,
    link_tree,
    open_regular,
    sha256_bytes,
    tree_digest,
    workspace_errors,
    write_json,
)

_FULL_DISK_BYTES = 32 * 2**20
# A state holds digests and a stage's part of the record: some KiB, a few MiB for wheels with much device code.
_MAXIMUM_STATE_BYTES = 256 * 2**20
STATE_FILE = "stage.json"
_PACKAGE = Path(__file__).resolve().parent

Clock = Callable[[], float]


@dataclass(frozen=True)
class StageState:
    """What a finished stage left behind; the content of its ``stage.json``.

    ``result`` is the stage's part of the record; ``outputs`` are relative to the stage's folder.
    """

    stage: str
    inputs: Mapping[str, str]
    outputs: tuple[Fingerprint, ...]
    result: Mapping[str, Any]
    started: float
    finished: float

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object; ``sha256`` is the digest of the rest of it."""
        content = {
            "stage": self.stage,
            "inputs": dict(self.inputs),
            "outputs": [vars(output) for output in self.outputs],
            "result": dict(self.result),
            "started": self.started,
            "finished": self.finished,
        }
        return {**content, "sha256": sha256_bytes(canonical_json(content))}

    def confirmed(self, folder: Path) -> StageState | None:
        """Return the state, with fresh file-system facts, when every output in ``folder`` is intact; else None."""
        outputs = [output.confirmed(folder / output.path) for output in self.outputs]
        intact = tuple(output for output in outputs if output is not None)
        return replace(self, outputs=intact) if len(intact) == len(outputs) else None

    @staticmethod
    def read(path: Path) -> StageState | None:
        """Return the state in ``path``, or None when there is none that is whole: written by this program, unedited."""
        try:
            if path.parent.is_symlink() or path.is_symlink():
                return None
            with open_regular(path) as file:
                data = json.loads(file.read(_MAXIMUM_STATE_BYTES))
            digest = data.pop("sha256")
            if digest != sha256_bytes(canonical_json(data)) or not _is_state(data):
                return None
            outputs = tuple(Fingerprint(**output) for output in data.pop("outputs"))
            return StageState(outputs=outputs, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, WorkspaceError):
            return None


def _is_state(data: dict[str, Any]) -> bool:
    """Say whether ``data`` has the keys and types of a state, and no others."""

    def texts(value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())

    outputs = data["outputs"]
    return (
        data.keys() == {"stage", "inputs", "outputs", "result", "started", "finished"}
        and isinstance(data["stage"], str)
        and texts(data["inputs"])
        and isinstance(outputs, list)
        and len(outputs) > 0
        and all(texts(output) and output.keys() == {"path", "sha256", "facts"} for output in outputs)
        and isinstance(data["result"], dict)
        and all(type(data[time]) in (int, float) for time in ("started", "finished"))
    )


@dataclass(frozen=True)
class Setting:
    """Something that a stage uses and that is no part of the plan; ``key`` is what a change of it is told by."""

    value: Any
    key: str


@dataclass(frozen=True)
class Context:
    """What a stage may use: the plan, its own empty folder, the folders and results of earlier stages.

    ``settings`` holds what this run or this machine adds to the plan, by the names that :attr:`Stage.reads` uses.
    """

    plan: BuildPlan
    root: Path
    folder: Path
    store: Store
    mirrors: Sequence[Path]
    runner: Runner
    progress: Progress
    clock: Clock
    dist: Path
    settings: Mapping[str, Setting]
    states: Mapping[str, StageState]

    def earlier(self, stage: str) -> Path:
        """Return the folder of an earlier stage."""
        return self.root / stage

    def result(self, stage: str) -> Mapping[str, Any]:
        """Return what an earlier stage contributes to the record."""
        return self.states[stage].result


@dataclass(frozen=True)
class Outcome:
    """What a stage returns: its part of the record and the paths it stands for."""

    result: Mapping[str, Any]
    outputs: Sequence[Path]


@dataclass(frozen=True)
class Stage:
    """One stage: a name, what it does in a few words, and the function that does it.

    A change of what it reads means another run. ``of_image``: it reads the image's part of the plan too. ``judges``: it
    reads more of the recipe than what affects bytes, such as contracts, bans and expectations. ``reads``: names of
    settings.
    """

    name: str
    summary: str
    run: Callable[[Context], Outcome]
    of_image: bool = False
    judges: bool = True
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """How one stage went in this run."""

    stage: str
    action: Literal["done", "skipped"]
    seconds: float


@dataclass
class Pipeline:
    """A build of one plan in ``work/<build id>/``."""

    plan: BuildPlan
    stages: Sequence[Stage]
    work: Path
    dist: Path
    mirrors: Sequence[Path]
    runner: Runner
    progress: Progress
    clock: Clock
    settings: Mapping[str, Setting] = field(default_factory=dict)
    states: dict[str, StageState] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of this build."""
        return _root(self.plan, self.work)

    def run(self, *, until: str | None = None, wait: bool = True) -> tuple[Ran, ...]:
        """Run every stage up to and with ``until``; return what was done and what was skipped.

        Raises:
            BusyError: another process builds the same id and ``wait`` is false.
            WorkspaceError: the folder is read-only or full.
            CufallbackError: whatever a stage raises.
        """
        with workspace_errors(self.work), only_one(self.root, self.progress, wait=wait):
            ran = []
            for stage in self.stages:
                ran.append(self._run(stage))
                if stage.name == until:
                    break
            return tuple(ran)

    def _run(self, stage: Stage) -> Ran:
        folder, started = self.root / stage.name, self.clock()
        inputs = _inputs(self.plan, stage, self.settings)
        for name, state in self.states.items():
            inputs[name] = sha256_bytes(canonical_json([output.sha256 for output in state.outputs]))
        known = StageState.read(folder / STATE_FILE)
        if known is not None and known.inputs == inputs:
            confirmed = known.confirmed(folder)
            if confirmed is not None:
                if confirmed != known:
                    write_json(folder / STATE_FILE, confirmed.to_json())
                self.states[stage.name] = confirmed
                self.progress.say(f"{stage.name}: unchanged, skipped")
                return Ran(stage.name, "skipped", self.clock() - started)
            self.progress.say(f"{stage.name}: its output changed on disk, redone")
        self.progress.say(f"{stage.name}: {stage.summary}")
        # The state goes first: from here until it is written again, the folder counts as unfinished.
        if not folder.is_symlink() and folder.is_dir():
            discard(folder / STATE_FILE)
        discard(folder)
        adopted = None if stage.reads else self._adopt(stage, inputs, folder)
        if adopted is not None:
            return adopted
        folder.mkdir(parents=True)
        context = Context(
            self.plan,
            self.root,
            folder,
            Store(self.work / "store"),
            self.mirrors,
            self.runner,
            self.progress,
            self.clock,
            self.dist,
            self.settings,
            dict(self.states),
        )
        with _full_disk_named(self.work):
            outcome = stage.run(context)
        finished = self.clock()
        outputs = tuple(
            Fingerprint(os.path.relpath(path, folder), fingerprint.sha256, fingerprint.facts)
            for path in outcome.outputs
            for fingerprint in (Fingerprint.of(path),)
        )
        state = StageState(stage.name, inputs, outputs, outcome.result, started, finished)
        write_json(folder / STATE_FILE, state.to_json())
        self.states[stage.name] = state
        self.progress.say(f"{stage.name}: done in {finished - started:.1f} s")
        return Ran(stage.name, "done", finished - started)

    def _adopt(self, stage: Stage, inputs: Mapping[str, str], folder: Path) -> Ran | None:
        """Take over what another build made of the very same inputs, as when only a base image differs."""
        started = self.clock()
        for other in sorted(self.root.parent.glob(f"*/{stage.name}/{STATE_FILE}")):
            known = StageState.read(other)
            if known is None or known.inputs != inputs or known.confirmed(other.parent) is None:
                continue
            try:
                link_tree(other.parent, folder)
            except (OSError, shutil.Error):  # the other build may be cleaning up just now
                discard(folder)
                continue
            confirmed = known.confirmed(folder)
            if confirmed is None:
                discard(folder)
                continue
            write_json(folder / STATE_FILE, confirmed.to_json())
            self.states[stage.name] = confirmed
            self.progress.say(
                f"{stage.name}: taken over from build {other.parent.parent.name}, whose inputs are the same"
            )
            return Ran(stage.name, "skipped", self.clock() - started)
        return None


def fetches_nothing(plan: BuildPlan, first: Stage, work: Path) -> bool:
    """Say whether ``first``, the stage with network, has been done for this plan and its outputs are intact."""
    folder = _root(plan, work) / first.name
    known = StageState.read(folder / STATE_FILE)
    return known is not None and known.inputs == _inputs(plan, first, {}) and known.confirmed(folder) is not None


def _root(plan: BuildPlan, work: Path) -> Path:
    return work / "work" / plan.short_id


def _inputs(plan: BuildPlan, stage: Stage, settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the digests of what ``stage`` reads besides the outputs of earlier stages."""
    inputs = {"plan": plan.build_id if stage.of_image else plan.wheels_id, "code": code_digest()}
    if stage.judges:
        names = [name for name in sorted(plan.inputs) if stage.of_image or name not in plan.image_inputs]
        inputs["recipe and locks"] = sha256_bytes(b"".join(plan.inputs[name] for name in names))
    return inputs | {name: settings[name].key for name in stage.reads}


@cache
def code_digest(package: Path = _PACKAGE) -> str:
    """Return the digest of this package's own source: changed code redoes the stages, though not the build id.

    Without the data that an installed package carries: recipes, locks, Dockerfiles and the cuda-probe are inputs of
    their own, and a checkout and an installation of the same code must not redo each other's builds.
    """
    return tree_digest(package, ignore=PYTHON_CACHES | {"_data"})


@contextlib.contextmanager
def only_one(root: Path, progress: Progress, *, wait: bool) -> Iterator[None]:
    """Hold the lock file of ``root``; the kernel frees it when the holder ends, however it ends.

    Raises:
        BusyError: another process holds it and ``wait`` is false.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / "lock"
    with _open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(100).strip() or "another process"
            if not wait:
                raise BusyError(
                    f"{holder} is working in the same folder",
                    remedy="let it finish, or run without --no-wait",
                    where=str(path),
                ) from None
            progress.say(f"{holder} is working in the same folder; waiting for it to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _open_lock(path: Path) -> TextIO:
    remedy = "remove it, then run again"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode):
            raise
        raise WorkspaceError("the lock is no regular file", remedy=remedy, where=str(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise WorkspaceError("the lock is no regular file", remedy=remedy, where=str(path))
    return os.fdopen(handle, "r+", errors="replace")


@contextlib.contextmanager
def _full_disk_named(work: Path) -> Iterator[None]:
    """Name a full disk as the cause when a program that met it could only say that it failed."""
    try:
        yield
    except CufallbackError as error:
        if isinstance(error, WorkspaceError) or shutil.disk_usage(work).free > _FULL_DISK_BYTES:
            raise
        raise WorkspaceError(
            f"the disk is full ({error.reason})",
            remedy="free disk space or choose another work folder (--work), then run again: it resumes",
            where=str(work),
        ) from error
