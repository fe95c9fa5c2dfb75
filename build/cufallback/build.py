"""Drive one recipe: prepare its plan, build it, refresh its locks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cufallback.errors import CufallbackError, ExitCode, LockError, RecipeError, ToolchainError
from cufallback.pipeline import Pipeline, Ran
from cufallback.plan import BuildPlan, Locks
from cufallback.process import LocalRunner, Runner
from cufallback.progress import Progress
from cufallback.recipe import GitSource, Recipe, load_recipe
from cufallback.resources import PYTHON_CACHES, lock_folder, probe_folder
from cufallback.store import tree_digest, workspace_errors
from cufallback.toolchain import Need, probe_machine, probe_network, probe_toolchain, require

_YEAR_1980 = 315532800


@dataclass(frozen=True)
class Prepared:
    """A plan, what it needs of this machine, and the first lock that was refused."""

    plan: BuildPlan
    needs: tuple[Need, ...]
    refused: LockError | None

    def to_json(self) -> dict[str, Any]:
        """Return plan and needs as a JSON object."""
        complete = self.plan.complete
        return {
            "schema": 1,
            "complete": complete,
            "build_id": self.plan.build_id if complete else None,
            "plan": self.plan.to_json(),
            "needs": [asdict(need) for need in self.needs],
        }


@dataclass(frozen=True)
class Built:
    """What one run of ``build`` did."""

    recipe: str
    build_id: str
    folder: Path | None
    ran: tuple[Ran, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "schema": 1,
            "recipe": self.recipe,
            "build_id": self.build_id,
            "folder": str(self.folder) if self.folder else None,
            "stages": [asdict(stage) for stage in self.ran],
        }

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [f"recipe    {self.recipe}", f"build id  {self.build_id[:16]}"]
        done = [f"{ran.stage} {ran.seconds:.1f} s" for ran in self.ran if ran.action == "done"]
        skipped = [ran.stage for ran in self.ran if ran.action == "skipped"]
        if done:
            lines.append(f"done      {', '.join(done)}")
        if skipped:
            lines.append(f"skipped   {', '.join(skipped)} (unchanged)")
        if self.folder:
            lines.append(f"record    {self.folder / 'record.json'}")
            lines.append(f"check it  cufallback verify {self.folder}")
        return "\n".join(lines)


def prepare(name: str | None, *, work: Path, runner: Runner | None = None) -> Prepared:
    """Load recipe and locks, probe this machine, make the plan. Starts nothing but version queries.

    Raises:
        RecipeError: the recipe is missing or invalid.
    """
    from cufallback.stages import plan_steps

    runner = runner or LocalRunner()
    recipe = load_recipe(name)
    locks, refused = _load_locks(recipe)
    toolchain, needs = probe_toolchain(recipe, runner)
    plan = BuildPlan(
        recipe, locks, toolchain, tree_digest(probe_folder(), ignore=PYTHON_CACHES), plan_steps(recipe, locks)
    )
    lock_needs = tuple(
        Need(f"lock {file}", "present and intact", error.reason, "missing", error.remedy) for file, error in refused
    )
    network = probe_network(_urls(recipe)) if not _fetched(plan, work) else ()
    all_needs = (*needs, *probe_machine(recipe, work), *network, *lock_needs)
    return Prepared(plan, all_needs, refused[0][1] if refused else None)


def build(
    name: str | None,
    *,
    work: Path,
    dist: Path,
    progress: Progress,
    clock: Callable[[], float],
    until: str | None = None,
    wait: bool = True,
) -> Built:
    """Build a recipe, resuming what an earlier run of the same build id left.

    Args:
        name: recipe name, path of a recipe file, or None for the default recipe.
        work: folder for the store and for unfinished builds.
        dist: folder that receives ``<recipe>/<build id>/``.
        progress: where progress goes.
        clock: seconds since 1970.
        until: name of the last stage to run; None runs all.
        wait: wait for another process that builds the same id.

    Raises:
        CufallbackError: every failure, of the class that names its kind.
    """
    from cufallback.deps.wheelhouse import find_mirrors
    from cufallback.stages import STAGES

    names = [stage.name for stage in STAGES]
    if until is not None and until not in names:
        raise RecipeError(f"there is no stage {until!r}", remedy=f"stages are {', '.join(names)}", where="--until")
    if clock() < _YEAR_1980:
        raise ToolchainError(
            "this machine's clock is before 1980, which neither wheels nor TLS can take",
            remedy="set the clock, then run again",
        )
    prepared = prepare(name, work=work)
    missing = [need for need in prepared.needs if need.state == "missing" and not need.what.startswith("lock ")]
    if missing:
        from cufallback.show import needs_text

        progress.say(needs_text(prepared))
        require(missing)
    if prepared.refused is not None:
        raise prepared.refused
    plan = prepared.plan
    for folder in (work, dist):
        _writable(folder)
    pipeline = Pipeline(
        plan=plan,
        stages=STAGES,
        work=work.resolve(),
        dist=dist.resolve() / plan.recipe.name / plan.short_id,
        mirrors=find_mirrors(),
        runner=LocalRunner(),
        progress=progress,
        clock=clock,
    )
    ran = pipeline.run(until=until, wait=wait)
    whole = ran[-1].stage == names[-1]
    folder = dist / plan.recipe.name / plan.short_id
    return Built(plan.recipe.name, plan.build_id, folder if whole else None, ran)


def _load_locks(recipe: Recipe) -> tuple[Locks, list[tuple[str, LockError]]]:
    from cufallback.deps.lockfile import load_lock
    from cufallback.source.lock import load_source_lock

    folder = lock_folder(recipe.name)
    refused: list[tuple[str, LockError]] = []

    def attempt(file: str, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except LockError as error:
            refused.append((file, error))
            return None

    locks = Locks(
        source=attempt("source.lock.toml", lambda: load_source_lock(folder / "source.lock.toml", recipe)),
        build=attempt("build.txt", lambda: load_lock(folder / "build.txt", recipe, "build")),
        runtime=attempt("runtime.txt", lambda: load_lock(folder / "runtime.txt", recipe, "runtime")),
    )
    return locks, refused


def _urls(recipe: Recipe) -> list[str]:
    from cufallback.download import default_index

    urls = [default_index(), *(index.url for index in recipe.deps.index)]
    if isinstance(recipe.source, GitSource):
        urls.append(recipe.source.url)
    return urls


def _fetched(plan: BuildPlan, work: Path) -> bool:
    """Say whether this plan's prefetch has finished before, so that the network is not needed any more."""
    return plan.complete and (work / "work" / plan.short_id / "prefetch" / "stage.json").is_file()


def _writable(folder: Path) -> None:
    """Fail now, not after hours, when ``folder`` cannot be written."""
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".writable.")
        os.close(handle)
        Path(name).unlink()
