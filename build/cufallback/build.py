"""Drive one recipe: prepare its plan, build it, refresh its locks."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cufallback.download import Wanted, default_index, find_mirrors
from cufallback.errors import ExitCode, LockError, ToolchainError, UsageError
from cufallback.pipeline import STATE_FILE, Pipeline, Ran
from cufallback.plan import LOCK_FILES, BuildPlan, Locks
from cufallback.process import LocalRunner, Runner
from cufallback.progress import Progress
from cufallback.recipe import GitSource, Recipe, find_recipe, parse_recipe
from cufallback.resources import PYTHON_CACHES, lock_folder, probe_folder
from cufallback.store import Store, tree_digest, workspace_errors, write_atomic
from cufallback.toolchain import Need, probe_machine, probe_network, probe_toolchain, require

_YEAR_1980 = 315532800

T = TypeVar("T")


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


@dataclass(frozen=True)
class LockReport:
    """How the locks of a recipe stand to a fresh resolution; ``unpinned`` names sources that no commit pins."""

    recipe: str
    folder: Path
    differences: tuple[str, ...]
    unpinned: tuple[str, ...]
    written: bool

    @property
    def exit_code(self) -> ExitCode:
        """Drift is a finding when the locks were only checked."""
        return ExitCode.LOCK_DRIFT if self.differences and not self.written else ExitCode.OK

    def text(self) -> str:
        """Return a few lines for people."""
        lines = list(self.differences)
        if self.differences:
            lines.append(f"{'written to' if self.written else 'drifted:'} {self.folder}")
        else:
            lines.append(f"the locks of {self.recipe} are current")
        lines += [f"not pinned: {name} (a tag or branch that could not be resolved here)" for name in self.unpinned]
        return "\n".join(lines)


def prepare(name: str | None, *, work: Path, runner: Runner | None = None) -> Prepared:
    """Load recipe and locks, probe this machine, make the plan. Starts nothing but version queries.

    Raises:
        RecipeError: the recipe is missing or invalid.
    """
    from cufallback.stages import plan_steps

    runner = runner or LocalRunner()
    path = find_recipe(name)
    recipe = parse_recipe(path)
    inputs = _read_inputs(path)
    locks, refused = _parse_locks(recipe, inputs, lock_folder(path))
    toolchain, needs = probe_toolchain(recipe, runner)
    probe = tree_digest(probe_folder(), ignore=PYTHON_CACHES)
    plan = BuildPlan(recipe, inputs, locks, toolchain, probe, plan_steps(recipe, locks))
    lock_needs = tuple(
        Need(f"lock {file}", "present and intact", error.reason, "missing", error.remedy) for file, error in refused
    )
    fetched = plan.complete and (work / "work" / plan.short_id / "prefetch" / STATE_FILE).is_file()
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


def _read_inputs(path: Path) -> dict[str, bytes]:
    """Read the recipe and its locks once; a lock that is not there is left out."""
    files = {path.name: path, **{name: lock_folder(path) / name for name in LOCK_FILES}}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def _parse_locks(
    recipe: Recipe, inputs: Mapping[str, bytes], folder: Path
) -> tuple[Locks, list[tuple[str, LockError]]]:
    from cufallback.deps.lockfile import parse_lock
    from cufallback.source.lock import parse_source_lock

    refused: list[tuple[str, LockError]] = []

    def attempt(name: str, parse: Callable[[str, str], T]) -> T | None:
        where = str(folder / name)
        try:
            if name not in inputs:
                raise LockError(
                    "there is no such lock", remedy=f"run `nox -s lock -- --recipe {recipe.name}`", where=where
                )
            return parse(inputs[name].decode("utf-8", "replace"), where)
        except LockError as error:
            refused.append((name, error))
            return None

    locks = Locks(
        source=attempt("source.lock.toml", lambda text, where: parse_source_lock(text, recipe.name, where=where)),
        build=attempt("build.txt", lambda text, where: parse_lock(text, recipe, "build", where=where)),
        runtime=attempt("runtime.txt", lambda text, where: parse_lock(text, recipe, "runtime", where=where)),
    )
    return locks, refused


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


def _writable(folder: Path) -> None:
    """Fail now, not after hours, when ``folder`` cannot be written."""
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".writable.")
        os.close(handle)
        Path(name).unlink()


def lock(
    name: str | None, *, work: Path, check: bool, opinion: bool, progress: Progress, runner: Runner | None = None
) -> LockReport:
    """Resolve a recipe's locks anew; write them, or only compare them with the committed ones.

    Args:
        name: recipe name, path of a recipe file, or None for the default recipe.
        work: folder for the store, the source tree and the logs of the resolution.
        check: write nothing.
        opinion: resolve with pip-tools too, and demand that it agrees.
        progress: where progress goes.

    Raises:
        CufallbackError: every failure, of the class that names its kind. Nothing is written then.
    """
    from cufallback.deps.lock import drift, make_locks
    from cufallback.source.contract import check_contracts, require_contracts
    from cufallback.source.fetch import edit_source, fetch_source
    from cufallback.source.harvest import harvest
    from cufallback.source.lock import lock_sources, render_source_lock, unused_reason

    path = find_recipe(name)
    recipe, folder, mirrors = parse_recipe(path), lock_folder(path), find_mirrors()
    inputs = _read_inputs(path)
    scratch = work.resolve() / "lock" / recipe.name
    _writable(work)
    with workspace_errors(scratch):
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
    tree = scratch / "source"
    store = Store(work.resolve() / "store")
    checkout = fetch_source(recipe, tree, store=store, mirrors=mirrors, progress=progress)
    edit_source(recipe, tree, progress=progress)
    require_contracts(check_contracts(tree, recipe.source.contract))
    locks, _refused = _parse_locks(recipe, inputs, folder)
    sources = lock_sources(
        harvest(tree),
        locks.source,
        recipe=recipe.name,
        checkout=checkout,
        unused=recipe.source.unused,
        scratch=scratch / "refs",
        progress=progress,
    )
    fresh = make_locks(
        recipe,
        tree,
        mirrors=mirrors,
        workdir=scratch,
        runner=runner or LocalRunner(),
        progress=progress,
        opinion=opinion,
    )
    texts = {"source.lock.toml": render_source_lock(sources), **{f"{item.which}.txt": item.text for item in fresh}}
    committed = {name: inputs[name].decode("utf-8", "replace") if name in inputs else None for name in texts}
    differences = [*_text_drift("source.lock.toml", committed["source.lock.toml"], texts["source.lock.toml"])]
    for item in fresh:
        file = f"{item.which}.txt"
        differences += drift(item, committed[file], recipe, where=file)
    if not check:
        for file, text in texts.items():
            if committed[file] != text:
                write_atomic(folder / file, text.encode())
    shutil.rmtree(scratch)
    unpinned = tuple(
        source.label
        for source in sources.sources
        if not source.pinned and unused_reason(source, recipe.source.unused) is None
    )
    return LockReport(recipe.name, folder, tuple(differences), unpinned, written=not check)


def _text_drift(name: str, old: str | None, new: str) -> Iterator[str]:
    if old is None:
        yield f"{name}: missing"
        return
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield f"{name}: {line}"
