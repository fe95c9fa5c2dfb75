"""Drive one recipe: prepare its plan, build it, refresh its locks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cufallback.download import Wanted, default_index, find_mirrors
from cufallback.errors import CufallbackError, ImageError, LockError, ToolchainError, UsageError
from cufallback.image.bases import Replacement, base_folder, fetch_bases, parse_replacements, resolve_bases
from cufallback.image.build import check_definition
from cufallback.image.engine import MINIMUM_ENGINE, Engine, NoEngine, find_engine
from cufallback.image.registry import Registry
from cufallback.image.tools import ImageTools, image_hindrance
from cufallback.inputs import parse_locks, read_inputs
from cufallback.pipeline import STATE_FILE, Pipeline, Ran, Setting, StageState, fetches_nothing
from cufallback.plan import BuildPlan
from cufallback.process import LocalRunner, Runner
from cufallback.progress import Progress
from cufallback.recipe import GitSource, find_recipe, parse_recipe
from cufallback.resources import PYTHON_CACHES, lock_folder, probe_folder
from cufallback.store import EARLIEST_EPOCH, Store, require_writable, tree_digest
from cufallback.toolchain import Need, probe_machine, probe_network, probe_toolchain


@dataclass(frozen=True)
class Prepared:
    """A plan, what it needs of this machine, the first lock that was refused, and what its image can be made with."""

    plan: BuildPlan
    needs: tuple[Need, ...]
    refused: LockError | None
    engine: Engine | NoEngine
    replaced: tuple[Replacement, ...] = ()

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
    image: str | None = None
    without_image: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "schema": 1,
            "recipe": self.recipe,
            "build_id": self.build_id,
            "folder": str(self.folder) if self.folder else None,
            "image": self.image,
            "without_image": self.without_image,
            "stages": [asdict(stage) for stage in self.ran],
        }

    def summary(self, program: str) -> str:
        """Return a few lines for people; ``program`` is how this command was called."""
        lines = [f"recipe    {self.recipe}", f"build id  {self.build_id[:16]}"]
        done = [
            f"{ran.stage} {ran.seconds:.1f} s"
            for ran in self.ran
            if ran.action == "done" and not (ran.stage == "image" and self.without_image)
        ]
        skipped = [ran.stage for ran in self.ran if ran.action == "skipped"]
        if done:
            lines.append(f"done      {', '.join(done)}")
        if skipped:
            lines.append(f"skipped   {', '.join(skipped)} (unchanged)")
        if self.image or self.without_image:
            lines.append(f"image     {self.image or f'not built: {self.without_image}'}")
        if self.folder:
            lines.append(f"record    {self.folder / 'record.json'}")
            lines.append(f"check it  {program} verify {self.folder}")
        return "\n".join(lines)


def prepare(
    name: str | None, *, work: Path, runner: Runner | None = None, replaced_bases: Sequence[str] = ()
) -> Prepared:
    """Load recipe and locks, probe this machine, make the plan. Starts nothing but version queries.

    Args:
        name: recipe name, path of a recipe file, or None for the default recipe.
        work: the work folder, for its disk and for what is there already.
        runner: starts the version queries.
        replaced_bases: values of ``--base``.

    Raises:
        RecipeError: the recipe is missing or invalid.
        ImageError: its Dockerfile takes something that nothing pins, or a replaced base is damaged.
        UsageError: a ``--base`` is not of its form.
    """
    from cufallback.stages import STAGES
    from cufallback.steps import plan_steps

    runner = runner or LocalRunner()
    path = find_recipe(name)
    recipe = parse_recipe(path)
    inputs = read_inputs(path, recipe)
    locks, refused = parse_locks(recipe, inputs, lock_folder(path))
    replaced = parse_replacements(replaced_bases, recipe)
    bases = resolve_bases(recipe, locks.images, replaced)
    toolchain, needs = probe_toolchain(recipe, runner)
    engine = find_engine(runner) if recipe.image else NoEngine("the recipe has no [image]", "")
    probe = tree_digest(probe_folder(), ignore=PYTHON_CACHES)
    plan = BuildPlan(recipe, inputs, locks, toolchain, probe, plan_steps(recipe, locks, bases), bases)
    check_definition(plan)
    lock_needs = tuple(
        Need(f"lock {file}", "present and intact", error.reason, "missing", error.remedy) for file, error in refused
    )
    fetched = plan.complete and fetches_nothing(plan, STAGES[0], work)
    network = () if fetched else probe_network(_servers(plan, Store(work / "store"), find_mirrors()))
    all_needs = (*needs, *probe_machine(recipe, work), *_image_needs(plan, engine, work, runner), *network, *lock_needs)
    return Prepared(plan, all_needs, refused[0][1] if refused else None, engine, replaced)


def _image_needs(plan: BuildPlan, engine: Engine | NoEngine, work: Path, runner: Runner) -> Iterator[Need]:
    """What the image needs; without it the wheels are built all the same."""
    if plan.recipe.image is None:
        return
    wanted = f"Docker Engine {MINIMUM_ENGINE} or newer with buildx"
    if isinstance(engine, NoEngine):
        yield Need("image engine", wanted, f"no image will be built: {engine.why}", "degraded", engine.remedy)
    else:
        yield Need("image engine", wanted, f"{engine.engine}, buildx {engine.buildx}", "ok")
    for base in plan.bases:
        what = f"base image {base.name}"
        if base.digest is None:
            remedy = f"run `nox -s lock -- --images --recipe {plan.recipe.name}`, or give --base"
            yield Need(what, base.reference, "no image will be built: not locked", "degraded", remedy)
        else:
            yield Need(what, base.reference, f"{base.origin}: {base.digest}", "ok")
    pulled = [base for base in plan.bases if base.digest and base.origin == "lock"]
    if any(not base_folder(work, base.digest or "").is_dir() for base in pulled):
        wanted = "1.2 or newer, to fetch base images"
        try:
            yield Need("oras", wanted, Registry(runner, log=None).version(), "ok")
        except ToolchainError as error:
            yield Need("oras", wanted, f"no image will be built: {error.reason}", "degraded", error.remedy)


def build(
    name: str | None,
    *,
    work: Path,
    dist: Path,
    progress: Progress,
    clock: Callable[[], float],
    until: str | None = None,
    wait: bool = True,
    replaced_bases: Sequence[str] = (),
    require_image: bool = False,
    use_cache: bool = True,
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
        replaced_bases: values of ``--base``: base images in place of the locked ones.
        require_image: fail where otherwise the image would be left out.
        use_cache: let the image's builder take steps from its cache.

    Raises:
        CufallbackError: every failure, of the class that names its kind.
    """
    from cufallback.attest.provenance import builder_of
    from cufallback.stages import STAGES

    names = [stage.name for stage in STAGES]
    if until is not None and until not in names:
        raise UsageError(f"there is no stage {until!r}", remedy=f"stages are {', '.join(names)}", where="--until")
    if clock() < EARLIEST_EPOCH:
        raise ToolchainError(
            "this machine's clock is before 1980, which neither wheels nor TLS can take",
            remedy="set the clock, then run again",
        )
    prepared = prepare(name, work=work, replaced_bases=replaced_bases)
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
    tools = _image_tools(prepared, work.resolve(), progress, use_cache=use_cache)
    hindrance = image_hindrance(plan, tools)
    if require_image and hindrance is not None:
        raise ImageError(f"no image can be built here: {hindrance[0]}", remedy=hindrance[1] or "give it an [image]")
    target = dist.resolve() / plan.recipe.name / plan.short_id
    builder = builder_of(os.environ)
    pipeline = Pipeline(
        plan=plan,
        stages=STAGES,
        work=work.resolve(),
        dist=target,
        mirrors=find_mirrors(),
        runner=LocalRunner(),
        progress=progress,
        clock=clock,
        settings={
            "image tools": Setting(tools, tools.key()),
            "builder": Setting(builder, f"{builder}"),
            "dist": Setting(target, str(target)),
        },
    )
    ran = pipeline.run(until=until, wait=wait)
    whole = ran[-1].stage == names[-1]
    folder = dist / plan.recipe.name / plan.short_id
    result: Mapping[str, Any] = {"image": None, "not_run": ""}
    if "image" in pipeline.states:
        result = pipeline.states["image"].result
    digest = result["image"] and result["image"]["manifest"]["digest"]
    why = result["not_run"] if plan.recipe.image else ""
    return Built(plan.recipe.name, plan.build_id, folder if whole else None, ran, digest, why)


def _image_tools(prepared: Prepared, work: Path, progress: Progress, *, use_cache: bool) -> ImageTools:
    """Fetch the base images, and keep an image that was built earlier although its engine has gone."""
    plan, engine = prepared.plan, prepared.engine
    folders: dict[str, Path | CufallbackError] = {}
    if isinstance(engine, NoEngine):
        known = StageState.read(work / "work" / plan.short_id / "image" / STATE_FILE)
        if known is not None and known.result.get("image"):
            progress.say(f"image: {engine.why}; the one that was built before is kept")
            engine = Engine(**known.result["image"]["engine"])
    if isinstance(engine, Engine):
        registry = Registry(LocalRunner(), log=work / "bases" / "registry.log")
        folders = fetch_bases(plan.bases, prepared.replaced, work=work, registry=registry, recipe=plan.recipe)
    return ImageTools(engine, folders, use_cache=use_cache)


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
