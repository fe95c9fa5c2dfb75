"""What both kinds of source share: the result, the all-or-nothing target folder, the checks on a finished tree."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cufallback.errors import SourceError, WorkspaceError
from cufallback.store import tree_entries, workspace_errors


@dataclass(frozen=True)
class Checkout:
    """A verified source tree.

    Args:
        kind: ``git``, ``sdist`` or ``wheel``.
        commit: the commit id of a git source, 40 hex digits; None for an sdist.
        archive_sha256: the digest of the archive of an sdist or of the wheel; None for git.
        epoch: seconds since 1970 of the commit or of the newest archive member, never before 1980-01-01.
        tree_sha256: :func:`cufallback.store.tree_digest` of the tree as it was fetched, before any rewrite.
        submodules: (path inside the tree, commit id) of each submodule, sorted by path.
    """

    kind: str
    commit: str | None
    archive_sha256: str | None
    epoch: int
    tree_sha256: str
    submodules: tuple[tuple[str, str], ...] = ()


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``target``; what the caller leaves in its ``tree/`` becomes ``target`` at the end.

    On any failure the scratch folder is removed and ``target`` does not appear. One that was left by a killed
    process is removed at the next start.

    Raises:
        WorkspaceError: ``target`` is there already and not empty, or the disk is full or read-only.
    """
    scratch = target.with_name(f".{target.name}.partial")
    with workspace_errors(target):
        if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise WorkspaceError(
                "already exists and is not empty", remedy="remove it or choose another folder", where=str(target)
            )
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(mode=0o700)  # a repository in it knows its URL, which may carry a token
        try:
            tree = scratch / "tree"
            tree.mkdir()
            yield scratch
            tree.replace(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def normalise_modes(tree: Path) -> None:
    """Give every file of ``tree`` 0644 or 0755 and every folder 0755, whatever the umask was."""
    for folder, folders, files in os.walk(tree):
        for path in (Path(folder) / name for name in (*folders, *files)):
            mode = path.lstat().st_mode
            wanted = 0o755 if stat.S_ISDIR(mode) or mode & stat.S_IXUSR else 0o644
            if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) != wanted:
                path.chmod(wanted)
    tree.chmod(0o755)


def refuse_links_out(tree: Path, *, where: str) -> None:
    """Refuse a tree with a symbolic link that leads out of it, however many links it takes, or in a circle.

    Args:
        tree: a finished tree.
        where: what the error is about: the archive or the repository.

    Raises:
        SourceError: naming the first such link and its target.
    """
    root = os.path.realpath(tree)
    for mode, name, path in tree_entries(tree):
        if mode != "120000":
            continue
        if not _within(root, os.path.realpath(path)):
            raise SourceError(
                f"{name} is a link out of the tree, to {path.readlink()}",
                remedy="do not use this source: a link out of its own tree reads or writes files of the build host",
                where=where,
            )
        if _loops(path):
            raise SourceError(
                f"{name} is a link that leads back to itself", remedy="do not use this source", where=where
            )


def _loops(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def inside(tree: Path, name: str) -> Path | None:
    """Return the real path of ``name`` below ``tree``, or None when a link or ``..`` leads out of the tree."""
    root = os.path.realpath(tree)
    real = os.path.realpath(Path(root) / name)
    return Path(real) if _within(root, real) else None


def _within(root: str, path: str) -> bool:
    return path == root or path.startswith(root + os.sep)
