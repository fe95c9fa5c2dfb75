"""Open a wheel that anyone may have made, and look into its members without unpacking it to disk.

A stored member is read in place. A deflated one is inflated into memory, or into an unnamed temporary file when it is
large, and never beyond the size that its directory entry declares. CRCs are checked. Nothing is written elsewhere.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Self

from cufallback.errors import PayloadError, WorkspaceError
from cufallback.store import open_regular
from cufallback.wheel.elf import is_elf
from cufallback.wheel.fatbin import is_fatbin

_MIB = 1 << 20
_IN_MEMORY = 128 * _MIB
_CHUNK = 4 * _MIB
# The largest real native file known is below 2 GiB; real device code deflates 5 to 1, zeros 1000 to 1.
_MAXIMUM_MEMBER = 8 << 30
_MAXIMUM_TOTAL = 32 << 30
# vLLM's METADATA has some 20 kB, and its wheel some twenty native files.
_MAXIMUM_TEXT = 1 * _MIB
_MAXIMUM_NATIVES = 2000
_SUSPICIOUS_SIZE = 64 * _MIB
_SUSPICIOUS_RATIO = 200

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NATIVE_NAME = re.compile(r"\.so(\.\d+)*$|\.fatbin$")
# What zipfile raises on damaged archives, beside BadZipFile: struct.error, ValueError (and with it UnicodeError),
# NotImplementedError for features of other archivers, and OverflowError for absurd offsets.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, NotImplementedError, OverflowError, EOFError)


class MemberError(ValueError):
    """A member that cannot be read, and why."""


@dataclass
class Payload:
    """An open wheel. Use as a context manager. Members may be viewed from several threads at once."""

    path: Path
    members: tuple[zipfile.ZipInfo, ...] = ()
    _file: IO[bytes] | None = field(default=None, repr=False)
    _map: mmap.mmap | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        """Open the wheel and read its directory.

        Raises:
            PayloadError: no such file, or not a zip archive.
        """
        try:
            self._file = open_regular(self.path)
        except (OSError, WorkspaceError) as error:
            why = error.strerror if isinstance(error, OSError) else error.reason
            raise PayloadError(
                f"cannot be read: {why}", remedy="give the path of a .whl file", where=str(self.path)
            ) from error
        try:
            with zipfile.ZipFile(self._file) as archive:
                self.members = tuple(archive.infolist())
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except _DAMAGED as error:
            self._file.close()
            raise PayloadError(
                f"is no readable zip archive ({error})",
                remedy="download or build the wheel again: it is cut off, damaged or something else",
                where=str(self.path),
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the wheel."""
        if self._map is not None:
            _close(self._map)
        if self._file is not None:
            self._file.close()

    @property
    def duplicates(self) -> tuple[str, ...]:
        """Names that more than one member has: which one an installer takes is its own choice."""
        counts = Counter(info.filename for info in self.members)
        return tuple(sorted(name for name, count in counts.items() if count > 1))

    def text(self, name: str) -> str:
        """Return a small text member.

        Raises:
            PayloadError: it is missing, too large, encrypted, damaged or not UTF-8.
        """
        found = [info for info in self.members if info.filename == name]
        try:
            if not found:
                raise MemberError("it is missing")
            if found[0].file_size > _MAXIMUM_TEXT:
                raise MemberError(f"it claims {found[0].file_size} bytes")
            with self.view(found[0]) as data:
                return bytes(data).decode("utf-8")
        except ValueError as error:
            raise PayloadError(
                f"{name} cannot be read: {error}",
                remedy="this is no wheel, or a damaged one: download or build it again",
                where=str(self.path),
            ) from error

    def native(self) -> tuple[zipfile.ZipInfo, ...]:
        """Return the members that may hold machine code: by name, or by their first bytes when they have no suffix."""
        return tuple(
            info
            for info in self.members
            if not info.filename.endswith("/") and (_NATIVE_NAME.search(info.filename) or self._looks_native(info))
        )

    def _looks_native(self, info: zipfile.ZipInfo) -> bool:
        if PurePosixPath(info.filename).suffix or not info.file_size:
            return False
        try:
            raw = self._raw(info)
            head = (
                raw[:4]
                if info.compress_type == zipfile.ZIP_STORED
                else zlib.decompressobj(-15).decompress(raw[:4096], 4)
            )
        except _DAMAGED:
            return False
        return is_elf(head) or is_fatbin(head)

    def check_sizes(self, infos: tuple[zipfile.ZipInfo, ...]) -> None:
        """Refuse a wheel whose native members are more, or claim more, than any real wheel holds.

        Raises:
            PayloadError: they are too many, or claim too much together.
        """
        if len(infos) > _MAXIMUM_NATIVES:
            raise PayloadError(
                f"it has {len(infos)} native files, more than {_MAXIMUM_NATIVES}",
                remedy="do not install it; no real wheel has so many",
                where=str(self.path),
            )
        total = sum(info.file_size for info in infos)
        if total > _MAXIMUM_TOTAL:
            raise PayloadError(
                f"its native files claim {total} bytes together, more than {_MAXIMUM_TOTAL}",
                remedy="do not install it; no real wheel is of that size",
                where=str(self.path),
            )

    def _raw(self, info: zipfile.ZipInfo) -> memoryview:
        """Return a member's bytes as they lie in the archive."""
        if self._map is None:
            raise MemberError("the wheel is closed")
        if info.flag_bits & 0x1:
            raise MemberError("it is encrypted")
        # zipfile lets a damaged end record shift all offsets, even below zero.
        if not 0 <= info.header_offset <= len(self._map) - _LOCAL_HEADER.size:
            raise MemberError("its header lies outside the archive")
        signature, name, extra = _LOCAL_HEADER.unpack_from(self._map, info.header_offset)
        start = info.header_offset + _LOCAL_HEADER.size + name + extra
        if signature != b"PK\x03\x04" or start + info.compress_size > len(self._map):
            raise MemberError("its data lie outside the archive")
        return memoryview(self._map)[start : start + info.compress_size]

    @contextlib.contextmanager
    def view(self, info: zipfile.ZipInfo) -> Iterator[memoryview]:
        """Give a member's contents as a buffer, valid inside the ``with`` block.

        Raises:
            MemberError: encrypted, damaged (CRC), of an unknown compression, or a decompression bomb.
            WorkspaceError: no room for the temporary file of a large member.
        """
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(self._raw(info))
            if info.compress_type == zipfile.ZIP_STORED:
                if info.compress_size != info.file_size:
                    raise MemberError("its sizes contradict each other")
                if zlib.crc32(raw) != info.CRC:
                    raise MemberError("its checksum (CRC) is wrong")
                yield raw
                return
            if info.compress_type != zipfile.ZIP_DEFLATED:
                raise MemberError(f"it is compressed by method {info.compress_type}, which wheels do not use")
            suspicious = info.file_size > _SUSPICIOUS_SIZE and info.file_size > _SUSPICIOUS_RATIO * info.compress_size
            if info.file_size > _MAXIMUM_MEMBER or suspicious:
                raise MemberError(
                    f"it claims to inflate from {info.compress_size} to {info.file_size} bytes: a decompression bomb"
                )
            if not info.file_size:
                yield memoryview(b"")
                return
            inflated = stack.enter_context(self._inflate(raw, info))
            yield stack.enter_context(memoryview(inflated))

    @contextlib.contextmanager
    def _inflate(self, raw: memoryview, info: zipfile.ZipInfo) -> Iterator[mmap.mmap]:
        if info.file_size <= _IN_MEMORY:
            memory = mmap.mmap(-1, info.file_size)
            try:
                for block in _blocks(raw, info):
                    memory.write(block)
                yield memory
            finally:
                _close(memory)
            return
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="cufallback-inspect-"))
                for block in _blocks(raw, info):
                    file.write(block)
                file.flush()
            except OSError as error:
                raise WorkspaceError(
                    f"{info.filename} cannot be inflated into a temporary file: {error.strerror}",
                    remedy=f"set TMPDIR to a writable folder with {info.file_size / 1e6:.0f} MB free",
                    where=tempfile.gettempdir(),
                ) from error
            mapped = mmap.mmap(file.fileno(), info.file_size, access=mmap.ACCESS_READ)
            try:
                yield mapped
            finally:
                _close(mapped)


def _close(mapped: mmap.mmap) -> None:
    """Unmap; a traceback of a finding may still hold a view of it, and then the last such view unmaps."""
    with contextlib.suppress(BufferError):
        mapped.close()


def _blocks(raw: memoryview, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Inflate in blocks, to exactly the declared size and checksum."""
    engine = zlib.decompressobj(-15)
    done, crc = 0, 0
    try:
        for at in range(0, len(raw), _CHUNK):
            pending: bytes | memoryview = raw[at : at + _CHUNK]
            while pending and not engine.eof:
                block = engine.decompress(pending, _CHUNK)
                pending = engine.unconsumed_tail
                done, crc = done + len(block), zlib.crc32(block, crc)
                if done > info.file_size:
                    raise MemberError(f"it inflates to more than the {info.file_size} bytes it claims")
                yield block
        tail = engine.flush()
    except zlib.error as error:
        raise MemberError(f"its compressed data are damaged ({error})") from error
    done, crc = done + len(tail), zlib.crc32(tail, crc)
    if done != info.file_size:
        raise MemberError(f"it inflates to {done} bytes and claims {info.file_size}")
    if tail:
        yield tail
    if crc != info.CRC:
        raise MemberError("its checksum (CRC) is wrong")
