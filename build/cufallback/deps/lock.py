"""Make the two dependency locks of a recipe, and say how they differ from the committed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from cufallback.deps.compile import Resolution, resolve, second_opinion
from cufallback.deps.lockfile import LockedDistribution, Which, explicit_indexes, parse_lock, render_lock
from cufallback.deps.policy import Resolved, require_allowed
from cufallback.deps.surgery import Operated, operate
from cufallback.deps.target import target_of, wheels_in
from cufallback.download import index_session, project_files
from cufallback.errors import LockError
from cufallback.process import Runner
from cufallback.progress import Progress
from cufallback.recipe import Recipe, WheelSource
from cufallback.store import sha256_file, workspace_errors

_NAMES: tuple[Which, ...] = ("build", "runtime")


@dataclass(frozen=True)
class FreshLock:
    """A lock as it comes out of a fresh resolution."""

    which: Which
    text: str
    distributions: tuple[LockedDistribution, ...]


def make_locks(
    recipe: Recipe,
    tree: Path,
    *,
    mirrors: Sequence[Path],
    workdir: Path,
    runner: Runner,
    progress: Progress,
    opinion: bool = False,
) -> tuple[FreshLock, ...]:
    """Resolve the build and the runtime requirements of an edited source tree.

    Args:
        recipe: the recipe.
        tree: its source tree, edited.
        mirrors: find-links folders.
        workdir: folder for the generated projects and the logs; what lies there is overwritten.
        runner: starts uv and pip-tools.
        progress: where to say what goes on.
        opinion: also resolve with pip-tools and demand the same versions and hashes.

    Raises:
        LockError: no resolution, an edit that does not fit, or a differing second opinion.
        PolicyError: a banned distribution in a closure.
        DownloadError: an index cannot be asked.
    """
    operated = operate(tree, recipe.deps, target_of(recipe))
    made = []
    for which in _NAMES:
        scratch = workdir / which
        with workspace_errors(scratch):
            scratch.mkdir(parents=True, exist_ok=True)
        progress.say(f"resolving the {which} requirements with uv")
        resolution = resolve(operated[which], recipe, mirrors=mirrors, workdir=scratch, runner=runner)
        for allowed in require_allowed(resolution.closure, recipe.deps.ban, where=f"{recipe.name}, {which}"):
            progress.say(f"{allowed.name} {allowed.version} passes by exception: {allowed.why}")
        if opinion:
            _second(operated[which], resolution, recipe, scratch, runner, progress)
        distributions = tuple(
            item
            for item in _one_file_each(resolution, recipe, mirrors)
            if which == "build" or not _is_main(item, recipe)
        )
        text = render_lock(distributions, recipe=recipe, which=which, inputs=operated[which].sha256)
        made.append(FreshLock(which, text, distributions))
    return tuple(made)


def _is_main(item: LockedDistribution, recipe: Recipe) -> bool:
    """Say whether a distribution is the published wheel that the recipe is about, which is no dependency of itself."""
    return isinstance(recipe.source, WheelSource) and item.name == recipe.source.package


def _second(
    operated: Operated, resolution: Resolution, recipe: Recipe, scratch: Path, runner: Runner, progress: Progress
) -> None:
    progress.say("resolving what comes from the default index with pip-tools")
    differences = second_opinion(operated, resolution, recipe, workdir=scratch, runner=runner)
    if differences:
        raise LockError(
            "uv and pip-tools do not agree:\n  " + "\n  ".join(differences),
            remedy="pin what differs in the recipe, or find out which index changed between the two",
            where=f"recipe {recipe.name}",
        )


def _one_file_each(resolution: Resolution, recipe: Recipe, mirrors: Sequence[Path]) -> tuple[LockedDistribution, ...]:
    """Choose the one wheel of each distribution that the target installs.

    The resolver lists the files of every platform. A lock of exactly one file each says what is built with, and
    it is the same whether an index or a mirror of some of its files was asked.
    """
    target = target_of(recipe)
    index = explicit_indexes(recipe)
    with index_session() as session, ThreadPoolExecutor(max_workers=8) as pool:

        def choose(item: Resolved) -> LockedDistribution:
            def best(digests: Mapping[str, str]) -> LockedDistribution | None:
                fitting = (name for name, digest in digests.items() if digest in resolution.hashes[item.name])
                chosen = target.best(fitting)
                return LockedDistribution(item.name, item.version, chosen, digests[chosen]) if chosen else None

            url = index.get(item.name)
            mirrored = best(_in_mirrors(item, mirrors)) if url else None
            if mirrored:
                return mirrored
            offered = {
                file.filename: file.digests.get("sha256", "")
                for file in project_files(session, item.name, url)
                if file.version is not None and _same(file.version, item.version)
            }
            locked = best(offered)
            if locked is None and not any(offered.values()):
                raise LockError(
                    f"the index gives no sha256 for {item.name} {item.version}",
                    remedy="take it from an index that does, with deps.index in the recipe",
                    where=f"recipe {recipe.name}",
                )
            if locked is None:
                raise LockError(
                    f"{item.name} {item.version} has no wheel for Python {target.python} on {target.platform}",
                    remedy="choose another version with an edit or override in the recipe: sources are not built here",
                    where=f"recipe {recipe.name}",
                )
            return locked

        return tuple(pool.map(choose, resolution.closure))


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return False


def _in_mirrors(item: Resolved, mirrors: Sequence[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in mirrors:
        for path in wheels_in(folder, item.name, item.version):
            found.setdefault(path.name, sha256_file(path))
    return found


def drift(fresh: FreshLock, committed: str | None, recipe: Recipe, *, where: str) -> tuple[str, ...]:
    """Return how a committed lock differs from a fresh one, one line for each difference a reader can act on.

    Args:
        fresh: the fresh lock.
        committed: text of the committed lock, None when there is none.
        recipe: the recipe.
        where: path of the committed lock, for the lines.
    """
    if committed == fresh.text:
        return ()
    if committed is None:
        return (f"{where}: missing",)
    try:
        lock = parse_lock(committed, recipe, fresh.which, where=where)
    except LockError as error:
        return (f"{error.where}: {error.reason}",)
    old = {item.name: item for item in lock.distributions}
    new = {item.name: item for item in fresh.distributions}
    lines = [f"{where}: + {name} {new[name].version}" for name in sorted(new.keys() - old.keys())]
    lines += [f"{where}: - {name} {old[name].version}" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if before.version != after.version:
            lines.append(f"{where}: {name} {before.version} → {after.version}")
        elif before != after:
            lines.append(
                f"{where}: {name} {before.version}: {before.filename} {before.sha256[:12]} → "
                f"{after.filename} {after.sha256[:12]}"
            )
    return tuple(lines or [f"{where}: the requirements changed, and the distributions did not"])
