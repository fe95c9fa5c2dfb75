"""Drive one recipe: prepare its plan, build it, refresh its locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cufallback.download import Wanted, default_index, find_mirrors
from cufallback.errors import LockError, ToolchainError, UsageError
from cufallback.inputs import parse_locks, read_inputs
from cufallback.pipeline import Pipeline, Ran, fetches_nothing
from cufallback.plan import BuildPlan
from cufallback.process import LocalRunner, Runner
from cufallback.progress import Progress
from cufallback.recipe import GitSource, find_recipe, parse_recipe
from cufallback.resources import PYTHON_CACHES, lock_folder, probe_folder
from cufallback.store import EARLIEST_EPOCH, Store, require_writable, tree_digest
from cufallback.toolchain import Need, probe_machine, probe_network, probe_toolchain


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

    def summary(self, program: str) -> str:
        """Return a few lines for people; ``program`` is how this command was called."""
        lines = [f"recipe    {self.recipe}", f"build id  {self.build_id[:16]}"]
        done = [f"{ran.stage} {ran.seconds:.1f} s" for ran in self.ran if ran.action == "done"]
        skipped = [ran.stage for ran in self.ran if ran.action == "skipped"]
        if done:
            lines.append(f"done      {', '.join(done)}")
        if skipped:
            lines.append(f"skipped   {', '.join(skipped)} (unchanged)")
        if self.folder:
            lines.append(f"record    {self.folder / 'record.json'}")
            lines.append(f"check it  {program} verify {self.folder}")
        return "\n".join(lines)


def prepare(name: str | None, *, work: Path, runner: Runner | None = None) -> Prepared:
    """Load recipe and locks, probe this machine, make the plan. Starts nothing but version queries.

    Raises:
        RecipeError: the recipe is missing or invalid.
    """
    from cufallback.stages import STAGES, plan_steps

    runner = runner or LocalRunner()
    path = find_recipe(name)
    recipe = parse_recipe(path)
    inputs = read_inputs(path)
    locks, refused = parse_locks(recipe, inputs, lock_folder(path))
    toolchain, needs = probe_toolchain(recipe, runner)
    probe = tree_digest(probe_folder(), ignore=PYTHON_CACHES)
    plan = BuildPlan(recipe, inputs, locks, toolchain, probe, plan_steps(recipe, locks))
    lock_needs = tuple(
        Need(f"lock {file}", "present and intact", error.reason, "missing", error.remedy) for file, error in refused
    )
    fetched = plan.complete and fetches_nothing(plan, STAGES[0], work)
    network = () if fetched else probe_network(_servers(plan, Store(work / "store"), find_mirrors()))
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
    from cufallback.stages import STAGES

    names = [stage.name for stage in STAGES]
    if until is not None and until not in names:
        raise UsageError(f"there is no stage {until!r}", remedy=f"stages are {', '.join(names)}", where="--until")
    if clock() < EARLIEST_EPOCH:
        raise ToolchainError(
            "this machine's clock is before 1980, which neither wheels nor TLS can take",
            remedy="set the clock, then run again",
        )
    prepared = prepare(name, work=work)
    missing = [need for need in prepared.needs if need.state == "missing" and not need.what.startswith("lock ")]
    if prepared.refused is not None and all(need.what.startswith("network: ") for need in missing):
        # Without its locks nobody knows what a build has to fetch: the lock comes before the network.
        raise prepared.refused
    if missing:
        from cufallback.show import needs_text

        progress.say(needs_text(prepared))
        things = "one thing" if len(missing) == 1 else f"{len(missing)} things"
        raise ToolchainError(
            f"this machine lacks {things} that recipe {prepared.plan.recipe.name} needs; the table above names them",
            remedy="; ".join(dict.fromkeys(need.remedy for need in missing)),
        )
    plan = prepared.plan
    for folder in (work, dist):
        require_writable(folder)
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


def _servers(plan: BuildPlan, store: Store, mirrors: Sequence[Path]) -> dict[str, str]:
    """Return name and URL of each server that has a file which neither the store nor a mirror has."""
    from cufallback.deps.lockfile import wanted
    from cufallback.source.fetch import wanted_archive

    recipe = plan.recipe
    files: list[Wanted] = []
    for lock in (plan.locks.build, plan.locks.runtime):
        files += wanted(lock, recipe) if lock else ()
    servers = {}
    if isinstance(recipe.source, GitSource):
        servers[urlsplit(recipe.source.url).hostname or recipe.source.url] = recipe.source.url
    else:
        files.append(wanted_archive(recipe.source))
    if not plan.complete:
        servers |= {index.name: index.url for index in recipe.deps.index}
    names = {index.url: index.name for index in recipe.deps.index}
    for file in files:
        on_hand = store.has(file.sha256) or any((folder / file.filename).is_file() for folder in mirrors)
        if not on_hand:
            name = names[file.index_url] if file.index_url else "the default index"
            servers[name] = file.index_url or default_index()
    return servers
