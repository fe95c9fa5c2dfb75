"""Make the locks of a recipe anew: write them, or say how the committed ones have drifted."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cufallback.deps.lock import drift, make_locks
from cufallback.download import find_mirrors
from cufallback.errors import ExitCode, LockError, UsageError
from cufallback.image.lock import parse_image_lock, render_image_lock, resolve_images
from cufallback.image.registry import Registry
from cufallback.inputs import parse_locks, read_inputs
from cufallback.pipeline import only_one
from cufallback.plan import IMAGE_LOCK
from cufallback.process import LocalRunner
from cufallback.progress import Progress
from cufallback.recipe import Recipe, find_recipe, parse_recipe
from cufallback.resources import lock_folder
from cufallback.source.contract import check_contracts, require_contracts
from cufallback.source.fetch import edit_source, fetch_source, fetches_of
from cufallback.source.lock import lock_sources, render_source_lock, unused_reason
from cufallback.store import Store, require_writable, workspace_errors, write_atomic


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


def lock(name: str | None, *, work: Path, check: bool, opinion: bool, progress: Progress) -> LockReport:
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
    path = find_recipe(name)
    recipe, folder = parse_recipe(path), lock_folder(path)
    inputs = read_inputs(path, recipe)
    require_writable(work)
    room = work.resolve() / "lock" / recipe.name
    with workspace_errors(work), only_one(room, progress, wait=True):
        scratch = room / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        store = Store(work.resolve() / "store")
        texts, unpinned, differences = _resolve(recipe, inputs, folder, scratch, store, progress, opinion=opinion)
        if not check:
            for file, text in texts.items():
                if inputs.get(file) != text.encode():
                    write_atomic(folder / file, text.encode())
        shutil.rmtree(scratch)
    return LockReport(recipe.name, folder, differences, unpinned, written=not check)


def lock_images(name: str | None, *, work: Path, check: bool, now: str, progress: Progress) -> LockReport:
    """Resolve the tags of a recipe's base images to digests, and write or compare ``images.lock.toml`` alone.

    Args:
        name: recipe name, path of a recipe file, or None for the default recipe.
        work: folder for the log of the requests.
        check: write nothing.
        now: the date of new entries, RFC 3339.
        progress: where progress goes.

    Raises:
        CufallbackError: every failure, of the class that names its kind. Nothing is written then.
    """
    path = find_recipe(name)
    recipe, folder = parse_recipe(path), lock_folder(path)
    if recipe.image is None:
        raise UsageError(f"recipe {recipe.name} has no [image]", remedy="lock it without --images", where="--images")
    require_writable(work)
    inputs = read_inputs(path, recipe)
    text = inputs[IMAGE_LOCK].decode("utf-8", "replace") if IMAGE_LOCK in inputs else None
    try:
        previous = text and parse_image_lock(text, recipe.name, where=str(folder / IMAGE_LOCK))
    except LockError as error:  # written anew; what is lost are dates
        progress.say(f"the lock so far is refused: {error.where}: {error.reason}")
        previous = None
    registry = Registry(LocalRunner(), log=work / "lock" / recipe.name / "registry.log")
    with progress.bar("asking the registries", None):
        fresh = resolve_images(
            {base.name: base.reference for base in recipe.image.base},
            previous or None,
            recipe=recipe.name,
            registry=registry,
            now=now,
        )
    rendered = render_image_lock(fresh.images, recipe.name)
    differences = tuple(_text_drift(IMAGE_LOCK, text, rendered))
    if differences and not check:
        write_atomic(folder / IMAGE_LOCK, rendered.encode())
    return LockReport(recipe.name, folder, differences, (), written=not check)


def _resolve(
    recipe: Recipe,
    inputs: Mapping[str, bytes],
    folder: Path,
    scratch: Path,
    store: Store,
    progress: Progress,
    *,
    opinion: bool,
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Return the fresh lock files, the sources without a pin, and the differences from the committed files."""
    tree, mirrors = scratch / "source", find_mirrors()
    checkout = fetch_source(recipe, tree, store=store, mirrors=mirrors, progress=progress)
    edit_source(recipe, tree, progress=progress)
    require_contracts(check_contracts(tree, recipe.source.contract))
    committed, _refused = parse_locks(recipe, inputs, folder)
    unused = recipe.source.unused
    sources = lock_sources(
        fetches_of(recipe, tree),
        committed.source,
        recipe=recipe.name,
        checkout=checkout,
        unused=unused,
        scratch=scratch / "refs",
        progress=progress,
    )
    fresh = make_locks(
        recipe,
        tree,
        mirrors=mirrors,
        workdir=scratch,
        runner=LocalRunner(),
        progress=progress,
        opinion=opinion,
    )
    texts = {"source.lock.toml": render_source_lock(sources), **{f"{item.which}.txt": item.text for item in fresh}}
    old = {name: inputs[name].decode("utf-8", "replace") if name in inputs else None for name in texts}
    differences = [*_text_drift("source.lock.toml", old["source.lock.toml"], texts["source.lock.toml"])]
    for item in fresh:
        file = f"{item.which}.txt"
        differences += drift(item, old[file], recipe, where=file)
    unpinned = [item.label for item in sources.sources if not item.pinned and unused_reason(item, unused) is None]
    return texts, tuple(unpinned), tuple(differences)


def _text_drift(name: str, old: str | None, new: str) -> Iterator[str]:
    if old is None:
        yield f"{name}: missing"
        return
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield f"{name}: {line}"
