"""The source tree of a recipe: fetched and verified, then edited as the recipe says."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cufallback.download import Wanted, fetch
from cufallback.errors import SourceError
from cufallback.progress import Progress
from cufallback.recipe import GitSource, Recipe, SdistSource, WheelSource
from cufallback.source.checkout import checkout_git, extract_sdist
from cufallback.source.edit import Change, apply_cherry_picks, apply_rewrites
from cufallback.source.harvest import harvest
from cufallback.source.harvested import Harvested
from cufallback.source.tree import Checkout, inside
from cufallback.source.wheelfile import extract_wheel
from cufallback.store import Store
from cufallback.tomlplace import printable


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
    if isinstance(source, WheelSource):
        return extract_wheel(store.path(source.sha256), source, target=target)
    checkout = extract_sdist(store.path(source.sha256), source, target=target)
    try:
        require_named(target, source)
    except SourceError:
        shutil.rmtree(target)
        raise
    return checkout


def require_named(tree: Path, source: SdistSource) -> None:
    """Demand that an unpacked source distribution says of itself what the recipe calls it.

    Raises:
        SourceError: its PKG-INFO is missing or names another distribution or version.
    """
    remedy = "correct source.package and source.version, or source.sha256 if it is the digest of another archive"
    file = inside(tree, "PKG-INFO")
    if file is None or not file.is_file():
        raise SourceError("the source distribution has no PKG-INFO that names it", remedy=remedy, where="PKG-INFO")
    header = HeaderParser().parsestr(file.read_bytes().decode("utf-8", "replace"))
    name, version = str(header.get("Name", "")), str(header.get("Version", ""))
    if canonicalize_name(name) != canonicalize_name(source.package) or not _same(version, source.version):
        raise SourceError(
            f"the source distribution is {printable(name, 80) or 'nameless'} {printable(version, 80)}, "
            f"the recipe says {source.package} {source.version}",
            remedy=remedy,
            where="PKG-INFO",
        )


def _same(version: str, other: str) -> bool:
    try:
        return Version(version) == Version(other)
    except InvalidVersion:
        return False


def wanted_archive(source: SdistSource | WheelSource) -> Wanted:
    """Return the file of a wheel or of a source distribution, with the name that PEP 625 gives it."""
    if isinstance(source, WheelSource):
        return Wanted(source.package, source.version, source.file, source.sha256)
    filename = f"{canonicalize_name(source.package).replace('-', '_')}-{source.version}.tar.gz"
    return Wanted(source.package, source.version, filename, source.sha256)


def fetches_of(recipe: Recipe, tree: Path) -> tuple[Harvested, ...]:
    """Return every source that building the tree would fetch; none for a wheel, which is not built.

    Raises:
        HarvestError: a build file asks for something that cannot be told exactly.
    """
    return () if isinstance(recipe.source, WheelSource) else tuple(harvest(tree))


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
