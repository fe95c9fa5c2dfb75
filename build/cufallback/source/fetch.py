"""The source tree of a recipe: fetched and verified, then edited as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from cufallback.download import Wanted, fetch
from cufallback.progress import Progress
from cufallback.recipe import GitSource, Recipe, SdistSource
from cufallback.source.checkout import checkout_git, extract_sdist
from cufallback.source.edit import Change, apply_cherry_picks, apply_rewrites
from cufallback.source.tree import Checkout
from cufallback.store import Store


def fetch_source(
    recipe: Recipe, target: Path, *, store: Store, mirrors: Sequence[Path], progress: Progress
) -> Checkout:
    """Bring the pinned source of ``recipe`` to ``target``.

    Args:
        recipe: names a Git commit or a source distribution.
        target: folder to create; it appears whole or not at all.
        store: keeps the archive of a source distribution.
        mirrors: find-links folders, tried before the index.
        progress: shows what is fetched.

    Raises:
        SourceError, IntegrityError, DownloadError: the source is not what the recipe pins, or cannot be had.
    """
    source = recipe.source
    if isinstance(source, GitSource):
        return checkout_git(source, target=target, progress=progress)
    fetch([wanted_archive(source)], store=store, mirrors=mirrors, progress=progress)
    return extract_sdist(store.path(source.sha256), source, target=target)


def wanted_archive(source: SdistSource) -> Wanted:
    """Return the file of a source distribution, with the name that PEP 625 gives it."""
    filename = f"{canonicalize_name(source.package).replace('-', '_')}-{source.version}.tar.gz"
    return Wanted(source.package, source.version, filename, source.sha256)


def edit_source(recipe: Recipe, tree: Path, *, progress: Progress) -> tuple[Change, ...]:
    """Apply the recipe's cherry-picks, then its rewrites, to a fetched tree.

    Raises:
        RewriteError: one does not fit; nothing of its kind was written.
        SourceError: the commit of a cherry-pick cannot be fetched.
    """
    source = recipe.source
    picks: tuple[Change, ...] = ()
    if isinstance(source, GitSource):
        picks = apply_cherry_picks(tree, source.cherry_pick, url=source.url, progress=progress)
    return (*picks, *apply_rewrites(tree, source.rewrite))
