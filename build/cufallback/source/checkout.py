"""Check out exactly the pinned commit: verified by its id, its ref, its ancestors and its submodules."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from cufallback.errors import SourceError
from cufallback.progress import Progress
from cufallback.recipe import Ancestor, GitSource
from cufallback.redact import redact
from cufallback.source.gitrepo import GitFailure, Ref, Repository, require_full_id
from cufallback.source.sdist import extract_sdist
from cufallback.source.tree import Checkout, normalise_modes, refuse_links_out, staged
from cufallback.store import EARLIEST_EPOCH, tree_digest

__all__ = ["Checkout", "checkout_git", "extract_sdist"]

_SUBMODULE_KEY = re.compile(r"^submodule\.(?P<name>.*)\.(?P<key>path|url)\n(?P<value>.*)$", re.DOTALL)


def checkout_git(source: GitSource, *, target: Path, progress: Progress) -> Checkout:
    """Fetch the pinned commit with its submodules into ``target``, without any ``.git``.

    The ref must exist. A tag must lead to the commit; a branch may have moved on, then the commit must be in its
    history. Each ancestor that the recipe names must be in the commit's history. History is fetched only when
    one of these questions needs it, and without file contents where the server can.

    Args:
        source: the recipe's source.
        target: folder to create; it appears whole or not at all.
        progress: where to say what is being fetched.

    Raises:
        SourceError: no git, no network, no such ref or commit, a moved tag, a missing ancestor.
        WorkspaceError: ``target`` exists or cannot be written.
    """
    where = redact(source.url)
    require_full_id(source.commit, where=where)
    with staged(target) as scratch:
        tree = scratch / "tree"
        repository = Repository(scratch / "git", tree=tree, url=source.url)
        ref = repository.resolve(source.ref)
        if ref.kind == "tag" and ref.commit != source.commit:
            raise SourceError(
                f"tag {source.ref} leads to {ref.commit}, the recipe pins {source.commit}",
                remedy="the tag was moved, or the recipe names the wrong one: compare both commits upstream, then "
                "correct source.ref or source.commit",
                where=where,
            )
        progress.say(f"fetching {where} at {source.ref} ({source.commit[:12]})")
        repository.fetch(source.commit, depth=1, ref=ref)
        _check_history(source, ref, scratch / "history", tree)
        try:
            epoch = int(repository.run("show", "--no-patch", "--format=%ct", source.commit))
            submodules = tuple(sorted(_populate(repository, source.commit, tree, scratch / "modules", progress)))
        except GitFailure as failure:
            raise SourceError(
                f"the fetched commit cannot be checked out: {failure.message}",
                remedy="run again; if it stays, the repository is damaged at this commit",
                where=where,
            ) from failure
        normalise_modes(tree)
        refuse_links_out(tree, where=where)
        return Checkout("git", source.commit, None, max(epoch, EARLIEST_EPOCH), tree_digest(tree), submodules)


def _check_history(source: GitSource, ref: Ref, folder: Path, tree: Path) -> None:
    """Check that the commit is in the branch's history and every named ancestor in the commit's."""
    where = redact(source.url)
    moved_on = ref.commit != source.commit
    for ancestor in source.ancestor:
        require_full_id(ancestor.commit, where=where)
    if not moved_on and all(ancestor.commit == source.commit for ancestor in source.ancestor):
        return
    history = Repository(folder, tree=tree, url=source.url)
    history.fetch(ref.commit, depth=None, ref=ref, history_only=True)
    if moved_on and not history.succeeds("merge-base", "--is-ancestor", source.commit, ref.commit):
        raise SourceError(
            f"commit {source.commit} is not in the history of branch {source.ref}, whose head is {ref.commit}",
            remedy="the branch was rewritten, or the recipe names the wrong one: correct source.ref or source.commit",
            where=where,
        )
    missing = [
        ancestor
        for ancestor in source.ancestor
        if not history.succeeds("merge-base", "--is-ancestor", ancestor.commit, source.commit)
    ]
    if missing:
        raise SourceError(_missing_ancestors(source, missing), remedy="pin a later commit", where=where)


def _missing_ancestors(source: GitSource, missing: list[Ancestor]) -> str:
    lines = "".join(f"\n  {ancestor.commit}: {ancestor.why}" for ancestor in missing)
    return f"commit {source.commit} does not contain what it must:{lines}"


def _populate(
    repository: Repository, commit: str, tree: Path, scratch: Path, progress: Progress, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Write the files of ``commit`` to ``tree``, then those of its submodules, and yield each submodule."""
    repository.run("checkout", "--quiet", "--force", "--detach", commit)
    links = _gitlinks(repository, commit)
    urls = _submodule_urls(repository, commit) if links else {}
    for number, (path, pinned) in enumerate(sorted(links.items())):
        name = prefix + path
        if path not in urls:
            raise SourceError(
                f"submodule {name} has no URL in .gitmodules",
                remedy="the repository is broken at this commit: pin another one",
                where=redact(repository.url or ""),
            )
        url = _absolute(urls[path], base=repository.url or "", name=name)
        progress.say(f"fetching submodule {name} from {redact(url)} ({pinned[:12]})")
        inner = tree / path
        inner.mkdir(parents=True, exist_ok=True)
        module = Repository(scratch / f"{number}" / "git", tree=inner, url=url)
        module.fetch(pinned, depth=1)
        yield name, pinned
        yield from _populate(module, pinned, inner, scratch / f"{number}" / "modules", progress, f"{name}/")


def _gitlinks(repository: Repository, commit: str) -> dict[str, str]:
    """Return path → recorded commit of the submodules of one commit."""
    links = {}
    for entry in repository.run("ls-tree", "-r", "-z", commit).split("\0"):
        if entry.startswith("160000 commit "):
            head, path = entry.split("\t", 1)
            links[path] = head.split(" ")[2]
    return links


def _submodule_urls(repository: Repository, commit: str) -> dict[str, str]:
    """Return path → URL as .gitmodules of that commit gives them."""
    try:
        listing = repository.run("config", "--blob", f"{commit}:.gitmodules", "-z", "--list")
    except GitFailure:
        return {}
    values: dict[str, dict[str, str]] = {}
    for entry in listing.split("\0"):
        match = _SUBMODULE_KEY.match(entry)
        if match:
            values.setdefault(match["name"], {})[match["key"]] = match["value"]
    return {value["path"]: value["url"] for value in values.values() if {"path", "url"} <= value.keys()}


def _absolute(url: str, *, base: str, name: str) -> str:
    """Return a submodule's URL, resolved against its parent's when it is relative."""
    if url.startswith(("./", "../")):
        scheme, rest = base.split("://", 1)
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}{posixpath.normpath(posixpath.join('/' + path, url))}"
    if url.startswith(("https://", "ssh://")) or (url.startswith("file://") and base.startswith("file://")):
        return url
    scp = re.fullmatch(r"(?P<user>[\w.-]+)@(?P<host>[\w.-]+):(?P<path>[^/].*)", url)
    if scp:
        return f"ssh://{scp['user']}@{scp['host']}/{scp['path']}"
    raise SourceError(
        f"submodule {name} comes over a protocol that is not allowed: {redact(url)}",
        remedy="only https and ssh are safe here; ask upstream to correct .gitmodules",
        where=redact(base),
    )
