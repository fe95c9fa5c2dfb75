"""Changes that the recipe makes to the tree: cherry-picks and checked rewrites, each with its diff for the record."""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cufallback.errors import RewriteError
from cufallback.progress import Progress
from cufallback.recipe import CherryPick, Rewrite
from cufallback.redact import redact
from cufallback.source.gitrepo import GitFailure, Repository, require_full_id, utf8
from cufallback.source.matching import MatchFailure, first_lines, match_lines
from cufallback.source.tree import inside
from cufallback.store import workspace_errors, write_atomic
from cufallback.tomlplace import printable


@dataclass(frozen=True)
class Change:
    """One changed file.

    Args:
        file: path inside the tree.
        why: the recipe's reason.
        diff: unified diff, ``a/`` before, ``b/`` after.
        kind: ``rewrite`` or ``cherry-pick``.
        commit: the upstream commit of a cherry-pick.
    """

    file: str
    why: str
    diff: str
    kind: str
    commit: str | None = None


def apply_rewrites(tree: Path, rewrites: Sequence[Rewrite]) -> tuple[Change, ...]:
    """Apply the recipe's rewrites in order. All of them are checked before any file is written.

    Args:
        tree: the source tree.
        rewrites: each pattern is a Python regular expression in multi-line mode that must match ``count`` times; a
            later rewrite of the same file sees the result of the earlier one.

    Raises:
        RewriteError: a file is missing, no UTF-8 or outside the tree; a pattern matches more or less often,
            or cannot be matched in good time; a replacement changes nothing.
        WorkspaceError: a file cannot be written.
    """
    texts: dict[Path, str] = {}
    changes = []
    for number, rewrite in enumerate(rewrites):
        where = f"source.rewrite[{number}]: {rewrite.file}"
        path = _regular_file(tree, rewrite.file, where)
        before = texts[path] if path in texts else _read(path, where)
        after = _rewritten(before, rewrite, where)
        texts[path] = after
        changes.append(Change(rewrite.file, rewrite.why, unified_diff(rewrite.file, before, after), "rewrite"))
    for path, text in texts.items():
        mode = path.stat().st_mode
        write_atomic(path, text.encode())
        path.chmod(mode)
    return tuple(changes)


def unified_diff(file: str, before: str, after: str) -> str:
    """Return the unified diff of two texts, with git's mark where a final newline is missing."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{file}", f"b/{file}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _regular_file(tree: Path, name: str, where: str) -> Path:
    path = inside(tree, name)
    if path is None:
        raise RewriteError(
            "the path leads out of the tree through a link",
            remedy="name the real file; nothing outside the tree is ever written",
            where=where,
        )
    if not path.is_file():
        raise RewriteError(
            "there is no such file in the tree",
            remedy="upstream moved or removed it: find its new name or drop the rewrite",
            where=where,
        )
    return path


def _read(path: Path, where: str) -> str:
    try:
        # Bytes, so that no newline is translated on the way in or out.
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RewriteError(
            f"the file is no UTF-8 text (byte {error.start})", remedy="only text files can be rewritten", where=where
        ) from error


def _rewritten(text: str, rewrite: Rewrite, where: str) -> str:
    try:
        matches = match_lines(rewrite.pattern, text)
    except MatchFailure as failure:
        raise RewriteError(
            f"the pattern {failure}: {printable(rewrite.pattern)}",
            remedy="make it simpler: no repetition inside a repetition",
            where=where,
        ) from failure
    if len(matches) != rewrite.count:
        found = f"{_times(len(matches))}, on line {first_lines(matches)}," if matches else "nowhere"
        remedy = (
            "make the pattern narrower, or set count after looking at each place"
            if len(matches) > rewrite.count
            else "upstream changed these lines: look whether the rewrite is still needed, then adapt the pattern"
        )
        raise RewriteError(
            f"the pattern matches {found} where the recipe says {_times(rewrite.count)}: {printable(rewrite.pattern)}",
            remedy=remedy,
            where=where,
        )
    after = re.sub(rewrite.pattern, rewrite.replacement, text, flags=re.MULTILINE)
    if after == text:
        raise RewriteError("the rewrite changes nothing", remedy="drop it, or correct its replacement", where=where)
    return after


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def apply_cherry_picks(tree: Path, picks: Sequence[CherryPick], *, url: str, progress: Progress) -> tuple[Change, ...]:
    """Apply upstream commits in order on top of the tree, each by a three-way merge per file.

    Of a merge commit the difference to its first parent is taken. All picks are merged before any file is written.

    Args:
        tree: the source tree; it needs no repository.
        picks: full commit ids with their reasons.
        url: the repository to fetch them from.
        progress: where to say what is being fetched.

    Raises:
        RewriteError: a pick conflicts, naming the files, or changes nothing.
        SourceError: a commit cannot be fetched.
        WorkspaceError: a file cannot be written.
    """
    if not picks:
        return ()
    for pick in picks:
        require_full_id(pick.commit, where=redact(url))
    with workspace_errors(tree):
        scratch = Path(tempfile.mkdtemp(prefix=f".{tree.name}.picks-", dir=tree.parent))
    try:
        repository = Repository(scratch / "git", tree=tree, url=url)
        changes: list[Change] = []
        touched: set[str] = set()
        for number, pick in enumerate(picks):
            progress.say(f"fetching {pick.commit[:12]} to cherry-pick it")
            repository.fetch(pick.commit, depth=2)
            where = f"source.cherry_pick[{number}]: {pick.commit}"
            try:
                changes += _merge(repository, pick, tree, touched, where, scratch)
            except GitFailure as failure:
                raise RewriteError(
                    f"the commit cannot be applied: {failure.message}",
                    remedy="check that it is an ordinary commit with a parent",
                    where=where,
                ) from failure
        _write_out(repository, tree, sorted(touched), scratch / "out")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return tuple(changes)


def _merge(
    repository: Repository, pick: CherryPick, tree: Path, touched: set[str], where: str, scratch: Path
) -> list[Change]:
    """Merge one pick into the repository's index, which holds only the files that picks touch."""
    names = repository.run(
        "diff-tree", "-r", "-z", "--no-renames", "--name-only", f"{pick.commit}^", pick.commit
    ).split("\0")
    files = [name for name in names if name]
    for name in files:
        if inside(tree, str(Path(name).parent)) is None:
            raise RewriteError(
                f"{name} leads out of the tree through a link", remedy="do not use this commit", where=where
            )
        path = tree / name
        if name not in touched and (path.is_symlink() or path.is_file()):
            repository.run("update-index", "--add", "--", name)
    touched.update(files)
    before = repository.run("write-tree")
    patch = scratch / f"{pick.commit}.patch"
    repository.run(
        "diff-tree", "-p", "-r", "--binary", "--full-index", "--no-renames", f"--output={patch}",
        f"{pick.commit}^", pick.commit,
    )  # fmt: skip
    try:
        repository.run("apply", "--3way", "--cached", str(patch))
    except GitFailure as failure:
        unmerged = {entry.split("\t", 1)[1] for entry in repository.run("ls-files", "-u", "-z").split("\0") if entry}
        named = [name for name in files if name in unmerged or _is_named(name, failure.message)]
        raise RewriteError(
            f"the commit does not fit the tree; it conflicts in {', '.join(named or files)}",
            remedy="cherry-pick the commits it builds on first, or carry the change as a source.rewrite",
            where=where,
        ) from failure
    after = repository.run("write-tree")
    changed = repository.run("diff-tree", "-r", "-z", "--no-renames", "--name-only", before, after).split("\0")
    changes = [
        Change(name, pick.why, _git_diff(repository, before, after, name), "cherry-pick", pick.commit)
        for name in changed
        if name
    ]
    if not changes:
        raise RewriteError(
            "the commit changes nothing: the tree has it already", remedy="drop it from the recipe", where=where
        )
    return changes


def _is_named(name: str, message: str) -> bool:
    """Say whether git's message reports trouble with the file."""
    word = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])")
    return any(word.search(part) and "cleanly" not in part for part in message.split("; "))


def _git_diff(repository: Repository, before: str, after: str, name: str) -> str:
    return utf8(repository.run("diff-tree", "-p", "-r", "--no-renames", before, after, "--", name)) + "\n"


def _write_out(repository: Repository, tree: Path, names: Sequence[str], out: Path) -> None:
    """Write the merged files to ``out`` first, then move each to its place, so that a full disk changes nothing."""
    with workspace_errors(tree):
        kept = {name for name in repository.run("ls-files", "-z").split("\0") if name}
        out.mkdir()
        if kept:
            repository.run("checkout-index", "--all", "--force", f"--prefix={out}/")
        for name in names:
            path = tree / name
            if name not in kept:
                path.unlink(missing_ok=True)
                continue
            merged = out / name
            if not merged.is_symlink():
                merged.chmod(0o755 if merged.stat().st_mode & 0o100 else 0o644)
            path.parent.mkdir(parents=True, exist_ok=True)
            merged.replace(path)
