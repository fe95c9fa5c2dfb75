"""Safe extraction of a source distribution: nothing outside the folder, nothing special, nothing unbounded.

All checks are made here and none is left to tarfile: its ``data_filter`` came with Python 3.11.4, and Debian 12
has 3.11.2.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn

from cufallback.errors import IntegrityError, SourceError
from cufallback.recipe import SdistSource
from cufallback.source.tree import Checkout, refuse_links_out, staged
from cufallback.store import EARLIEST_EPOCH, tree_digest

MAX_BYTES = 4 << 30
"""Bound on the unpacked size. vLLM 0.33.0's source distribution unpacks to 0.2 GB."""
MAX_MEMBERS = 200_000
"""Bound on the number of members. vLLM 0.33.0's source distribution has 9,629."""

_LATEST_EPOCH = 4354819198  # 2107-12-31 23:59:58 UTC, the last time that a zip archive can carry
_CHUNK = 1 << 20
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def extract_sdist(
    archive: Path,
    source: SdistSource,
    *,
    target: Path,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
) -> Checkout:
    """Verify the archive's digest and extract it, without its top-level folder, to ``target``.

    Files get the modes 0644 or 0755. Links inside the tree are kept, hard links become copies.

    Args:
        archive: the downloaded ``.tar.gz``.
        source: the recipe's source, with the sha256 that the archive must have.
        target: folder to create; it appears whole or not at all.
        max_bytes: bound on the unpacked size in bytes.
        max_members: bound on the number of members.

    Raises:
        IntegrityError: the archive has another digest.
        SourceError: the archive cannot be read or a member is unsafe; the member is named.
        WorkspaceError: ``target`` exists or cannot be written.
    """
    where = str(archive)
    try:
        file = archive.open("rb")
    except OSError as error:
        raise SourceError(
            f"cannot be read: {error.strerror}", remedy="fetch the source distribution again", where=where
        ) from error
    with file:
        # One open file for hashing and extraction: the bytes that were checked are the bytes that are used.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            raise IntegrityError(
                f"sha256 is {digest}, the recipe pins {source.sha256}",
                remedy=f"inspect the file; nothing of it was used. Download {source.package} {source.version} again, "
                "or correct source.sha256 if the recipe is wrong",
                where=where,
            )
        file.seek(0)
        with staged(target) as scratch:
            tree = scratch / "tree"
            extraction = _Extraction(tree, where, max_bytes, max_members)
            extraction.run(file)
            refuse_links_out(tree, where=where)
            return Checkout("sdist", None, digest, extraction.epoch, tree_digest(tree))


class _BoundedStream(io.RawIOBase):
    """The unpacked bytes, forward only. Refuses to hand out more than a bound, in all and at once.

    The second bound is what stops a tar header that claims gigabytes: tarfile reads such a header into memory.
    """

    def __init__(self, packed: IO[bytes], *, limit: int, refuse: _Extraction) -> None:
        self._unpacked = gzip.GzipFile(fileobj=packed, mode="rb")
        self._position = 0
        self._limit = limit
        self._refuse = refuse

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        if size < 0 or size > 4 * _CHUNK:
            self._refuse.fail("a header claims to be larger than 4 MiB")
        data = self._unpacked.read(size)
        self._position += len(data)
        if self._position > self._limit:
            self._refuse.fail(f"it unpacks to more than {self._limit:,} bytes")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self._position:
            self._refuse.fail("a header points backwards")
        while self._position < offset:
            if not self.read(min(_CHUNK, offset - self._position)):
                break
        return self._position


class _Extraction:
    """One pass over one archive."""

    def __init__(self, tree: Path, where: str, max_bytes: int, max_members: int) -> None:
        self.tree = tree
        self.where = where
        self.max_bytes = max_bytes
        self.max_members = max_members
        self.epoch = EARLIEST_EPOCH
        self.member: str | None = None
        self._top: str | None = None
        self._kinds: dict[str, str] = {}  # path inside the tree → "folder", "file" or "link"

    def fail(self, reason: str) -> NoReturn:
        """Refuse the archive, naming the member at hand."""
        about = f"member {self.member!r}: " if self.member is not None else ""
        raise SourceError(
            f"{about}{reason}",
            remedy="do not use this archive: no source distribution of a sound project looks like this",
            where=self.where,
        )

    def run(self, packed: IO[bytes]) -> None:
        """Extract every member."""
        # Headers and padding come on top of the members' sizes: 4 KiB each is plenty.
        stream = _BoundedStream(packed, limit=self.max_bytes + self.max_members * 4096, refuse=self)
        try:
            with tarfile.TarFile(fileobj=stream, mode="r", errorlevel=2) as tar:
                unpacked = 0
                for count, member in enumerate(_members(tar), start=1):
                    self.member = member.name
                    unpacked += member.size
                    if count > self.max_members:
                        self.fail(f"it has more than {self.max_members:,} members")
                    if unpacked > self.max_bytes:
                        self.fail(f"it unpacks to more than {self.max_bytes:,} bytes")
                    self._extract(tar, member)
                # tarfile takes an unreadable header for the end of the archive; a real end is zeros only.
                while rest := stream.read(_CHUNK):
                    if rest.strip(b"\0"):
                        self.fail("is followed by a header that cannot be read")
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, UnicodeError) as error:
            self.fail(f"not a readable .tar.gz archive: {error}")
        self.member = None
        if not self._kinds:
            self.fail("it holds no files")

    def _extract(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        for text in (member.name, member.linkname):
            if "\0" in text:
                self.fail("has a NUL character in its name or link")
        if member.size < 0:
            self.fail(f"claims a size of {member.size} bytes")
        name = self._place(member)
        self._note_time(member)
        if not name:
            return
        path = self.tree / name
        if member.isdir():
            if self._kinds.get(name) not in (None, "folder"):
                self.fail("is in the archive twice")
            self._folder(name)
            return
        if name in self._kinds:
            self.fail("is in the archive twice")
        self._folder(str(PurePosixPath(name).parent))
        if member.issym():
            self._kinds[name] = "link"
            self._check_link(name, member.linkname)
            path.symlink_to(member.linkname)
        elif member.islnk():
            self._copy_hard_link(member, path)
            self._kinds[name] = "file"
        elif member.isreg() and not member.issparse():
            self._kinds[name] = "file"
            self._write(tar, member, path)
        else:
            self.fail("is neither a file, a folder nor a link")

    def _place(self, member: tarfile.TarInfo) -> str:
        """Return the member's path inside the tree, "" for the top-level folder itself."""
        inner = self._strip(member.name)
        if inner == "" and not member.isdir():
            self.fail("lies beside the one top-level folder that a source distribution has")
        if inner == ".git" or inner.startswith(".git/"):
            self.fail("is a Git repository's own data, which no tree digest covers")
        return inner

    def _strip(self, name: str) -> str:
        """Return ``name`` without the archive's top-level folder."""
        if name.startswith("/"):
            self.fail("has an absolute path")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            self.fail("leads out of the folder with '..'")
        if not parts:
            return ""
        if self._top is None:
            self._top = parts[0]
        if parts[0] != self._top:
            self.fail(f"lies outside the archive's top-level folder {self._top!r}")
        return "/".join(parts[1:])

    def _note_time(self, member: tarfile.TarInfo) -> None:
        try:
            time = int(member.mtime)
        except (ValueError, OverflowError):
            self.fail(f"has an impossible time, {member.mtime}")
        if time > _LATEST_EPOCH:
            self.fail(f"has a time after the year 2107, {time}, which no wheel can carry")
        self.epoch = max(self.epoch, time)

    def _folder(self, name: str) -> None:
        """Create ``name`` and its parents; a link or file in their place is refused, never followed."""
        kind = self._kinds.get(name)
        if name == "." or kind == "folder":
            return
        if kind is not None:
            self.fail(f"would be written through {name!r}, which is a {kind}")
        self._folder(str(PurePosixPath(name).parent))
        (self.tree / name).mkdir(mode=0o755)
        (self.tree / name).chmod(0o755)
        self._kinds[name] = "folder"

    def _check_link(self, name: str, link: str) -> None:
        if not link:
            self.fail("is a link to nothing")
        if link.startswith("/"):
            self.fail(f"is a link to the absolute path {link!r}")
        if os.path.normpath(PurePosixPath(name).parent / link).split("/")[0] == "..":
            self.fail(f"is a link out of the tree, to {link!r}")

    def _copy_hard_link(self, member: tarfile.TarInfo, path: Path) -> None:
        origin = self._strip(member.linkname)
        if self._kinds.get(origin) != "file":
            self.fail(f"is a hard link to {member.linkname!r}, which is no earlier file of the archive")
        source = self.tree / origin
        with source.open("rb") as file, self._create(path, source.stat().st_mode) as copy:
            while chunk := file.read(_CHUNK):
                copy.write(chunk)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        stream = tar.fileobj
        assert stream is not None  # noqa: S101 - it is the stream that run() passed
        stream.seek(member.offset_data)
        left = member.size
        with self._create(path, member.mode or 0) as file:
            while left:
                chunk = stream.read(min(left, _CHUNK))
                if not chunk:
                    self.fail("ends before its size: the archive is cut off")
                file.write(chunk)
                left -= len(chunk)

    @staticmethod
    def _create(path: Path, mode: int) -> IO[bytes]:
        """Open a new file whose mode is 0755 or 0644, whatever the umask is."""
        wanted = 0o755 if mode & 0o100 else 0o644
        handle = os.open(path, _WRITE, wanted)
        os.fchmod(handle, wanted)
        return os.fdopen(handle, "wb")


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield members one by one without keeping them, so that memory stays flat."""
    while (member := tar.next()) is not None:
        yield member
        tar.members.clear()  # type: ignore[attr-defined]  # the typeshed does not know it
