"""locks/<recipe>/source.lock.toml: every outside source with the commit or digest that pins it, and the comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cufallback.errors import HarvestError, LockError, SourceError
from cufallback.progress import Progress
from cufallback.recipe import Unused
from cufallback.source.gitrepo import Repository
from cufallback.source.harvested import GIT_KINDS, Harvested, Labelled
from cufallback.source.tree import Checkout
from cufallback.store import EARLIEST_EPOCH
from cufallback.tomlplace import key_path, line_of, parse_toml, printable

SCHEMA_VERSION = 1

_HEADER = """\
# Every source outside the tree that upstream's build files would fetch, and what pins it.
# Written by `cufallback lock`; a change here is a change of what is built.
"""
_TEXTS = ("name", "kind", "url", "ref", "commit", "sha256", "when", "asked_by")
_REQUIRED = ("name", "kind", "url", "ref", "asked_by")
_KINDS = sorted(GIT_KINDS | {"crates", "download"})
_PIN = {"commit": re.compile(r"[0-9a-f]{40}"), "sha256": re.compile(r"[0-9a-f]{64}")}


@dataclass(frozen=True)
class LockedSource(Labelled):
    """One entry: what was asked for and the pin; see :class:`cufallback.source.harvested.Harvested`."""

    name: str
    kind: str
    url: str
    ref: str
    commit: str | None
    sha256: str | None
    submodules: tuple[str, ...]
    when: str
    asked_by: str

    @property
    def pinned(self) -> bool:
        """Whether a commit or a digest fixes the bytes."""
        return bool(self.commit if self.kind in GIT_KINDS else self.sha256)


@dataclass(frozen=True)
class SourceLock:
    """The source lock of one recipe.

    Args:
        recipe: its name.
        sources: what the edited tree would fetch.
        tree_sha256: :func:`cufallback.store.tree_digest` of the tree as it was fetched, before any edit.
        epoch: its SOURCE_DATE_EPOCH in seconds since 1970: commit time, or the newest member of an sdist.
    """

    recipe: str
    sources: tuple[LockedSource, ...]
    tree_sha256: str
    epoch: int


@dataclass(frozen=True)
class HarvestDifference:
    """One way in which tree and lock disagree.

    Args:
        kind: ``unlocked`` (the tree asks, the lock has no entry), ``changed`` (the entry is for another request),
            ``mutable`` (the entry has no commit or digest) or ``vanished`` (the tree asks no more).
        label: name of the source, with its condition.
        asked_by: upstream ``file:line``; for a vanished one as it was when locked.
        detail: what differs.
    """

    kind: str
    label: str
    asked_by: str
    detail: str


def lock_sources(
    harvested: Sequence[Harvested],
    previous: SourceLock | None,
    *,
    recipe: str,
    checkout: Checkout,
    unused: Sequence[Unused],
    scratch: Path,
    progress: Progress,
) -> SourceLock:
    """Return the lock for a harvest. A pin that the previous lock has for the same request stays.

    Tags and branches that have no pin yet are resolved with ``git ls-remote``. Where that is not possible the
    entry stays without a commit, which is reported and which :func:`require_locked` refuses. Sources that the
    recipe does not use are listed as they are.

    Args:
        harvested: what the tree asks for.
        previous: the lock so far, if any.
        recipe: the recipe's name.
        checkout: the verified tree as it was fetched.
        unused: the recipe's ``[[source.unused]]``.
        scratch: folder that does not exist yet, for the repository that asks; the caller removes it.
        progress: where to report.
    """
    known = {source.key: source for source in previous.sources} if previous else {}
    resolver = _Resolver(scratch, progress)
    sources = []
    for row in harvested:
        commit, sha256 = row.commit, row.sha256
        old = known.get(row.key)
        if old is not None and (old.kind, old.url, old.ref) == (row.kind, row.url, row.ref):
            commit, sha256 = commit or old.commit, sha256 or old.sha256
        if row.kind in GIT_KINDS and commit is None and unused_reason(row, unused) is None:
            commit = resolver.commit_of(row)
        sources.append(
            LockedSource(row.name, row.kind, row.url, row.ref, commit, sha256, row.submodules, row.when, row.asked_by)
        )
    return SourceLock(recipe, tuple(sources), checkout.tree_sha256, checkout.epoch)


class _Resolver:
    """Asks servers for the commit behind a ref; a server that cannot be reached is asked once."""

    def __init__(self, scratch: Path, progress: Progress) -> None:
        self._scratch = scratch
        self._progress = progress
        self._dead: set[str] = set()
        self._count = 0

    def commit_of(self, row: Harvested) -> str | None:
        host = urlsplit(row.url).netloc
        if host in self._dead or "${" in row.url + row.ref:
            self._progress.say(f"{row.label}: {row.ref or 'default branch'} of {row.url} could not be resolved")
            return None
        self._count += 1
        folder = self._scratch / str(self._count)
        try:
            folder.mkdir(parents=True)
            repository = Repository(folder / "git", tree=folder, url=row.url)
            refs = repository.list_refs(row.ref)
        except SourceError as error:
            self._dead.add(host)
            self._progress.say(f"{row.label}: {error.reason}")
            return None
        if not row.ref or not refs:
            self._progress.say(f"{row.label}: {row.url} has no tag or branch {row.ref!r}")
            return None
        self._progress.say(f"{row.label}: {row.ref} is {refs[0].commit}")
        return refs[0].commit


def unused_reason(row: Harvested | LockedSource, unused: Sequence[Unused]) -> str | None:
    """Return why the recipe says that this source is not used, or None when it is."""
    for entry in unused:
        if any(fnmatchcase(name, entry.name) for name in (row.name, row.label)):
            return entry.why
    return None


def compare(
    harvested: Sequence[Harvested], lock: SourceLock, unused: Sequence[Unused]
) -> tuple[HarvestDifference, ...]:
    """Return every difference between what the tree asks for and what the lock pins.

    Sources that an ``unused`` glob of the recipe names need an entry like all others, but no pin.
    """
    locked = {source.key: source for source in lock.sources}
    differences = []
    for row in harvested:
        entry = locked.pop(row.key, None)
        if entry is None:
            asks = f"asks for {row.ref or 'the default branch'} of {row.url}" if row.kind in GIT_KINDS else row.url
            differences.append(HarvestDifference("unlocked", row.label, row.asked_by, asks))
        elif changes := _changes(row, entry):
            differences.append(HarvestDifference("changed", row.label, row.asked_by, "; ".join(changes)))
        elif not entry.pinned and unused_reason(row, unused) is None:
            pin = "commit" if row.kind in GIT_KINDS else "sha256"
            what = f"{row.ref or 'the default branch'} of {row.url}" if row.kind in GIT_KINDS else row.url
            detail = f"{what} can change at any time, and the lock has no {pin}"
            differences.append(HarvestDifference("mutable", row.label, row.asked_by, detail))
    for entry in locked.values():
        detail = "is locked, but the tree asks for it no more"
        differences.append(HarvestDifference("vanished", entry.label, entry.asked_by, detail))
    return tuple(differences)


def _changes(row: Harvested, entry: LockedSource) -> list[str]:
    pairs = [
        ("kind", entry.kind, row.kind),
        ("url", entry.url, row.url),
        ("ref", entry.ref, row.ref),
        ("submodules", " ".join(entry.submodules), " ".join(row.submodules)),
    ]
    if row.commit is not None:
        pairs.append(("commit", entry.commit or "none", row.commit))
    if row.sha256 is not None:
        pairs.append(("sha256", entry.sha256 or "none", row.sha256))
    return [f"{what} is {new}, locked is {old}" for what, old, new in pairs if old != new]


def require_locked(harvested: Sequence[Harvested], lock: SourceLock, unused: Sequence[Unused]) -> None:
    """Demand that the lock pins exactly what the tree asks for.

    Raises:
        HarvestError: listing each difference by name, with the upstream file and line that asks for it.
    """
    differences = compare(harvested, lock, unused)
    if not differences:
        return
    listing = "".join(
        f"\n  {difference.kind}: {difference.label} ({difference.asked_by}): {difference.detail}"
        for difference in differences
    )
    number = "1 source" if len(differences) == 1 else f"{len(differences)} sources"
    raise HarvestError(
        f"the source lock of {lock.recipe} does not fit the tree in {number}:{listing}",
        remedy=f"look at the upstream lines, then run `cufallback lock --recipe {lock.recipe}` and review the change",
    )


def render_source_lock(lock: SourceLock) -> str:
    """Return the lock as TOML text; equal locks give equal text."""
    parts = [
        f"{_HEADER}schema = {SCHEMA_VERSION}\nrecipe = {_string(lock.recipe)}\n"
        f"tree_sha256 = {_string(lock.tree_sha256)}\nepoch = {lock.epoch}\n"
    ]
    for source in lock.sources:
        lines = ["[[source]]", f"name = {_string(source.name)}"]
        if source.when:
            lines.append(f"when = {_string(source.when)}")
        lines += [f"{key} = {_string(getattr(source, key))}" for key in ("kind", "url", "ref")]
        lines += [f"{key} = {_string(value)}" for key in _PIN if (value := getattr(source, key))]
        if source.submodules:
            lines.append(f"submodules = [{', '.join(map(_string, source.submodules))}]")
        lines.append(f"asked_by = {_string(source.asked_by)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for the delete character, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_source_lock(path: Path, recipe: str) -> SourceLock:
    """Read the source lock of a recipe.

    Args:
        path: the file.
        recipe: the name of the recipe it must be for.

    Raises:
        LockError: missing, unreadable, of another recipe or schema, or not of the right shape; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LockError("there is no source lock", remedy=_remedy(recipe), where=str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"cannot be read: {error}", remedy=_remedy(recipe), where=str(path)) from error
    return parse_source_lock(text, recipe, where=str(path))


def _remedy(recipe: str) -> str:
    return f"run `cufallback lock --recipe {recipe}` to write it anew, and review the change"


def parse_source_lock(text: str, recipe: str, *, where: str) -> SourceLock:
    """Read the text of a source lock; see :func:`load_source_lock`."""
    remedy = _remedy(recipe)
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise LockError(str(error), remedy=remedy, where=where) from error

    def fault(reason: str, *location: str | int) -> LockError:
        return LockError(printable(reason), remedy=remedy, where=f"{where}:{line_of(text, location)}")

    if type(data.get("schema")) is not int or data["schema"] != SCHEMA_VERSION:
        raise fault(f"schema is {data.get('schema')!r}, this program reads {SCHEMA_VERSION}", "schema")
    if data.get("recipe") != recipe:
        raise fault(f"this is the lock of recipe {data.get('recipe')!r}, not of {recipe!r}", "recipe")
    tree_sha256, epoch = data.get("tree_sha256"), data.get("epoch")
    if not isinstance(tree_sha256, str) or not _PIN["sha256"].fullmatch(tree_sha256):
        raise fault(f"tree_sha256 is no full sha256: {tree_sha256!r}", "tree_sha256")
    if type(epoch) is not int or epoch < EARLIEST_EPOCH:
        raise fault(f"epoch must be seconds since 1970, from {EARLIEST_EPOCH} (1980) on: {epoch!r}", "epoch")
    unknown = sorted(data.keys() - {"schema", "recipe", "tree_sha256", "epoch", "source"})
    if unknown:
        raise fault(f"unknown key {unknown[0]!r}", unknown[0])
    entries = data.get("source", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise fault("source must be a list of tables", "source")
    sources: list[LockedSource] = []
    for number, entry in enumerate(entries):
        problem = _problem(entry)
        if problem is not None:
            key, reason = problem
            raise fault(f"{key_path(('source', number, key))}: {reason}", "source", number, key)
        source = LockedSource(
            submodules=tuple(entry.get("submodules", ())),
            commit=entry.get("commit"),
            sha256=entry.get("sha256"),
            when=entry.get("when", ""),
            **{key: entry[key] for key in _REQUIRED},
        )
        if source.key in {other.key for other in sources}:
            raise fault(f"source[{number}]: {source.name} is listed twice", "source", number)
        sources.append(source)
    return SourceLock(recipe, tuple(sources), tree_sha256, epoch)


def _problem(entry: dict[str, Any]) -> tuple[str, str] | None:
    """Return (key, reason) of the first fault of an entry."""
    for key in _REQUIRED:
        if key not in entry:
            return key, "is missing"
    for key, value in entry.items():
        if key == "submodules":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                return key, "must be a list of texts"
        elif key not in _TEXTS:
            return key, f"unknown key; valid keys are {', '.join((*_TEXTS, 'submodules'))}"
        elif not isinstance(value, str):
            return key, "must be a text"
        elif key in _PIN and not _PIN[key].fullmatch(value):
            return key, f"is no full {key}: {value!r}"
    if entry["kind"] not in _KINDS:
        return "kind", f"must be one of {', '.join(_KINDS)}"
    return None
