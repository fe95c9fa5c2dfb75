"""Files by content: digests, atomic writes, the content-addressed store, intact-or-not of stage outputs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cufallback.errors import IntegrityError, WorkspaceError

# 1980-01-01T00:00:00Z, the earliest time that a zip archive, and so a wheel, can hold.
EARLIEST_EPOCH = 315532800


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as 64 hex digits.

    Raises:
        WorkspaceError: it is a pipe, a device or a folder: reading it might never end.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; a link is followed. Nothing else is waited for or read.

    Raises:
        WorkspaceError: it is a pipe, a device or a folder.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise WorkspaceError("is no regular file", remedy="remove it, then run again", where=str(path))
    return open(handle, "rb")  # noqa: PTH123 - a handle, which the caller closes


def canonical_json(value: Any) -> bytes:
    """Serialise to the one JSON form used everywhere: sorted keys, two spaces, UTF-8, final newline.

    Raises:
        ValueError: a number that JSON does not have (infinite, not a number).
    """
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


@contextlib.contextmanager
def workspace_errors(path: Path, *, creating: bool = False) -> Iterator[None]:
    """Turn full disks, read-only folders and missing rights under ``path`` into a :class:`WorkspaceError`.

    Args:
        path: what the error is about when it names no file itself.
        creating: the block only makes files and folders. There "no such file" means that the file system takes no
            new ones (as ``/proc``); elsewhere it may be any file, so it is left alone.
    """
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free disk space or choose another work folder (--work, --dist), then run again: it resumes",
            errno.EDQUOT: "free disk quota or choose another work folder (--work, --dist), then run again: it resumes",
            errno.EROFS: "choose a writable folder (--work, --dist)",
            errno.EACCES: "choose a folder you may write (--work, --dist) or correct its rights",
            errno.EPERM: "choose a folder you may write (--work, --dist) or correct its rights",
            errno.ENOTDIR: "choose another folder (--work, --dist): a file is in its way",
            errno.EEXIST: "choose another folder (--work, --dist): a file is in its way",
            errno.EISDIR: "choose another folder (--work, --dist): a folder lies where a file must be written",
            errno.ENAMETOOLONG: "choose a folder with a shorter path (--work, --dist)",
            errno.ELOOP: "choose another folder (--work, --dist): a link in its path leads back to itself",
        }
        if creating:
            elsewhere = "choose another folder (--work, --dist): nothing can be created in this one"
            remedies |= dict.fromkeys((errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP), elsewhere)
        # shutil.copytree collects what went wrong into one error that has words and no number.
        number = error.errno or next((known for known in remedies if os.strerror(known) in str(error)), None)
        if number is None or number not in remedies:
            raise
        where = str(error.filename or path)
        raise WorkspaceError(os.strerror(number), remedy=remedies[number], where=where) from error


def require_writable(folder: Path) -> None:
    """Fail now, not after hours, when ``folder`` cannot be made or written.

    Raises:
        WorkspaceError: it cannot.
    """
    with workspace_errors(folder, creating=True):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".writable.")
        os.close(handle)
        Path(name).unlink()


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old file or the whole new one, never a part.

    Raises:
        WorkspaceError: the folder is read-only, full or not ours.
    """
    with workspace_errors(path, creating=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as canonical JSON."""
    write_atomic(path, canonical_json(value))


def tree_entries(root: Path, *, ignore: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, Path]]:
    """Yield (git mode, POSIX path relative to ``root``, path) of every file and link below ``root``, sorted by path.

    ``.git`` at the top and folders with a name in ``ignore`` are left out. Modes are git's: 100644, 100755, 120000.
    """
    found: list[tuple[str, str, Path]] = []
    for folder, folders, files in os.walk(root, onerror=_raise):
        if Path(folder) == root:
            # A folder in a clone, a file in a worktree or submodule.
            for names in (folders, files):
                if ".git" in names:
                    names.remove(".git")
        if ignore:
            folders[:] = [name for name in folders if name not in ignore]
        for name in [*files, *(name for name in folders if (Path(folder) / name).is_symlink())]:
            path = Path(folder) / name
            mode = path.lstat().st_mode
            kind = "120000" if stat.S_ISLNK(mode) else "100755" if mode & stat.S_IXUSR else "100644"
            found.append((kind, path.relative_to(root).as_posix(), path))
    return iter(sorted(found, key=lambda entry: entry[1].encode("utf-8", "surrogateescape")))


def _raise(error: OSError) -> None:
    """Without this os.walk leaves out what it cannot read, and a digest over less would pass for the whole."""
    raise error


def tree_digest(root: Path, *, ignore: frozenset[str] = frozenset()) -> str:
    """Return the SHA-256 over one line ``<git mode> <sha256> <path>\\n`` per file, sorted by path's bytes.

    A link's content is its target. Times, owners and empty folders do not count, so a checkout, an
    extracted archive and a copy of either agree.
    """
    digest = hashlib.sha256()
    for mode, name, path in tree_entries(root, ignore=ignore):
        content = sha256_bytes(os.fsencode(path.readlink())) if mode == "120000" else sha256_file(path)
        digest.update(f"{mode} {content} ".encode() + name.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def link_tree(source: Path, target: Path) -> None:
    """Make ``target`` a folder with the same files as ``source``: hard links where the file system allows, else copies.

    Raises:
        WorkspaceError: the target cannot be written.
    """

    with workspace_errors(target):
        shutil.copytree(source, target, symlinks=True, copy_function=link_or_copy)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make the file ``source`` appear at ``target`` too: a hard link where the file system allows, else a copy."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def discard(path: Path) -> None:
    """Remove whatever lies at ``path``, if anything: a folder with all it holds, but of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``target`` when the block ends well; else nothing changes.

    Another process that does the same in the same parent folder waits: the parent itself is the lock, so that no
    lock file lies among what is published.

    Raises:
        WorkspaceError: the parent folder cannot be written.
    """
    partial, old = (target.with_name(f".{target.name}.{what}") for what in ("partial", "old"))
    with contextlib.ExitStack() as stack, workspace_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, parent)
        fcntl.flock(parent, fcntl.LOCK_EX)
        for leftover in (partial, old):
            discard(leftover)
        partial.mkdir(parents=True)
        try:
            yield partial
            if target.exists():
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class Store:
    """Content-addressed files under ``root``: ``<root>/<2 hex>/<64 hex>``, read-only, written once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Return where the file of that digest lies or would lie."""
        return self.root / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Say whether a file of that digest is here. Its bytes are checked when it is used, not here.

        Raises:
            WorkspaceError: a folder lies where the file belongs, or the path is longer than the system takes.
        """
        stored = self.path(sha256)
        with workspace_errors(stored):
            if stored.is_dir():
                raise WorkspaceError(
                    "a folder lies where a stored file belongs", remedy="remove it, then run again", where=str(stored)
                )
            return stored.is_file()

    def intact(self, sha256: str) -> bool:
        """Say whether the file is here with the right bytes. A damaged one is dropped, so that it is fetched anew.

        Raises:
            WorkspaceError: as :meth:`has`.
        """
        stored = self.path(sha256)
        if not self.has(sha256):
            return False
        if sha256_file(stored) == sha256:
            return True
        stored.unlink()
        return False

    def add(self, source: Path, *, sha256: str) -> Path:
        """Move ``source`` into the store after checking its digest.

        Raises:
            IntegrityError: the bytes have another digest; ``source`` stays where it is.
            WorkspaceError: the store cannot be written.
        """
        actual = sha256_file(source)
        if actual != sha256:
            raise IntegrityError(
                f"sha256 is {actual}, expected {sha256}",
                remedy="inspect the file; nothing of it was used",
                where=str(source),
            )
        target = self.path(sha256)
        self.has(sha256)  # refuses a folder in its place
        with workspace_errors(self.root):
            target.parent.mkdir(parents=True, exist_ok=True)
            source.chmod(0o444)
            if source.stat().st_dev == target.parent.stat().st_dev:
                source.replace(target)
            else:
                _copy_atomic(source, target)
                target.chmod(0o444)
                source.unlink()
        return target

    def place(self, sha256: str, target: Path) -> None:
        """Make the stored file appear at ``target``: a hard link where the file system allows, else a copy.

        Raises:
            IntegrityError: the stored file is missing or its bytes were damaged; a damaged one is dropped.
        """
        stored = self.path(sha256)
        if not self.intact(sha256):
            raise IntegrityError(
                "the stored file is missing, or was damaged and has been dropped",
                remedy="run again: it is fetched anew",
                where=str(stored),
            )
        with workspace_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                os.link(stored, temporary)
            except OSError:
                _copy_atomic(stored, target)
            else:
                temporary.replace(target)
                # A rename between two links of one file does nothing and leaves both.
                temporary.unlink(missing_ok=True)


def _copy_atomic(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@dataclass(frozen=True)
class Fingerprint:
    """A file's or tree's digest, and the cheap file-system facts that let the next look skip the hashing."""

    path: str
    sha256: str
    facts: str

    @staticmethod
    def of(path: Path) -> Fingerprint:
        """Hash ``path`` (a file or a folder) now."""
        # Facts first: what changes while it is being hashed then no longer fits its facts, and is hashed again.
        facts = _facts(path)
        return Fingerprint(str(path), tree_digest(path) if path.is_dir() else sha256_file(path), facts)

    def confirmed(self, path: Path) -> Fingerprint | None:
        """Return the fingerprint when ``path`` still has this digest, else None.

        Hashes only when size, times or inode moved, as they do when another build links the same stored file; the
        returned one then has the new facts, so that the next look is cheap again. What cannot be read is not confirmed.
        """
        try:
            if _facts(path) == self.facts:
                return self
            now = Fingerprint.of(path)
        except (OSError, ValueError, WorkspaceError):
            return None
        return replace(now, path=self.path) if now.sha256 == self.sha256 else None


def _facts(path: Path) -> str:
    """Size, mtime, ctime and inode (ctime cannot be set from user space), of a file or of a whole tree.

    Looked at twice in every build, for ten thousands of files: hence text in place of Path objects.
    """

    def line(item: str | Path) -> str:
        facts = os.lstat(item)
        return f"{facts.st_mode} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"

    if not path.is_dir():
        return line(path)
    digest, top = hashlib.sha256(), os.fspath(path)
    for folder, folders, files in os.walk(top, onerror=_raise):
        if folder == top:  # as in tree_entries
            folders[:], files = ([name for name in names if name != ".git"] for names in (folders, files))
        folders.sort()
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*files, *links]):
            item = f"{folder}/{name}"
            digest.update(f"{item[len(top) :]} {line(item)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
