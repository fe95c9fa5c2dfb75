"""CUDA device code inside a file, listed without any CUDA tool and without decompressing it.

nvcc and nvFatbin put device code as *containers* into two ELF sections: ``.nv_fatbin`` (linked, runnable code) and
``__nv_relfatbin`` (relocatable code of -rdc builds; it stays behind in linked libraries and runs nowhere by itself).
A container is one translation unit's code for several targets; its entries are SASS (cubin), PTX or LTO-IR. The
layout was found by comparing with cuobjdump, entry by entry, and is little-endian:

container, 16 bytes: magic 0xBA55ED50, u16 version 1, u16 header size 16, u64 size of the entries after it
entry: header (64 bytes fixed, then options and name), then the payload padded to 8 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cufallback.cuda.versions import Architecture, Suffix
from cufallback.wheel.elf import ElfError, is_elf, read_sections, section_body

Kind = Literal["sass", "ptx", "lto-ir", "unknown"]
Codec = Literal["none", "lz4", "zstd"]

RUNNABLE = ".nv_fatbin"
RELOCATABLE = "__nv_relfatbin"

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
# kind, -, header size, padded size, compressed size, options offset, minor, major, architecture, name offset,
# name length, flags, -, uncompressed size
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_PAIR = struct.Struct("<II")
_KINDS: dict[int, Kind] = {1: "ptx", 2: "sass", 8: "lto-ir"}
_LZ4, _ZSTD, _SPECIFIC, _FAMILY = 0x2000, 0x8000, 0x100000, 0x200000

# The fullest real file seen has 1498 entries; zeros between containers are alignment, so few.
_MAXIMUM_ENTRIES = 200_000
_MAXIMUM_PADDING = 64


class FatbinError(ValueError):
    """Device code that cannot be listed, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of device code.

    ``container`` numbers the containers of a file: entries of one container are the same code for several targets.
    ``version`` is the PTX ISA version of PTX, and the cubin ABI version (1.7, 1.8) of SASS. Sizes are in bytes.
    """

    section: str
    container: int
    kind: Kind
    architecture: Architecture
    version: tuple[int, int]
    codec: Codec
    flags: int
    offset: int
    stored_size: int
    size: int
    name: str
    options: str

    @property
    def runnable(self) -> bool:
        """Whether this is linked code that a driver can load."""
        return self.section != RELOCATABLE


def is_fatbin(head: bytes | memoryview) -> bool:
    """Say whether bytes begin like a bare fatbin container."""
    return bytes(head[:4]) == struct.pack("<I", _MAGIC)


def read_fatbins(data: memoryview) -> tuple[Entry, ...]:
    """List the device code of an ELF file or of a bare container.

    Raises:
        FatbinError: damaged device code.
        ElfError: neither a container nor a readable ELF file.
    """
    if is_fatbin(data):
        return tuple(_entries(data, "file", 0, first=0))
    if not is_elf(data):
        raise ElfError("neither an ELF file nor a fatbin container")
    found: list[Entry] = []
    for section in read_sections(data):
        if section.name in (RUNNABLE, RELOCATABLE):
            body = section_body(data, section)
            first = found[-1].container + 1 if found else 0
            found.extend(_entries(body, section.name, section.offset, first=first))
    return tuple(found)


def _entries(body: memoryview, section: str, base: int, *, first: int) -> Iterator[Entry]:
    """Yield the entries of the containers in ``body``, which lies at file offset ``base``."""
    at, container, padding, count = 0, first, 0, 0
    while at + _CONTAINER.size <= len(body):
        magic, version, header_size, size = _CONTAINER.unpack_from(body, at)
        if magic == 0 and padding < _MAXIMUM_PADDING:
            at, padding = at + 8, padding + 8
            continue
        if magic != _MAGIC:
            raise FatbinError(f"{section}+{at:#x}: no container begins here (magic {magic:#x})")
        start, stop = at + header_size, at + header_size + size
        if version != 1 or header_size < _CONTAINER.size or stop > len(body):
            raise FatbinError(f"{section}+{at:#x}: the container's header is damaged")
        while start < stop:
            entry, following = _entry(body, start, stop, section=section, container=container, base=base)
            count += 1
            if count > _MAXIMUM_ENTRIES:
                raise FatbinError(f"{section} claims more than {_MAXIMUM_ENTRIES} entries")
            yield entry
            start = following
        at, container, padding = stop, container + 1, 0
    if at < len(body) and any(body[at:]):
        raise FatbinError(f"{section}+{at:#x}: {len(body) - at} bytes are left over")


def _entry(body: memoryview, at: int, stop: int, *, section: str, container: int, base: int) -> tuple[Entry, int]:
    """Return the entry at ``at`` and the offset of the next one."""
    if at + _ENTRY.size > stop:
        raise FatbinError(f"{section}+{at:#x}: an entry is cut off")
    (
        code,
        _constant,
        header_size,
        padded_size,
        compressed_size,
        options_at,
        minor,
        major,
        number,
        name_at,
        name_length,
        flags,
        _reserved,
        full_size,
    ) = _ENTRY.unpack_from(body, at)
    following = at + header_size + padded_size
    if header_size < _ENTRY.size or following > stop or compressed_size > padded_size:
        raise FatbinError(f"{section}+{at:#x}: the entry's header is damaged")
    codec: Codec = "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else "none"
    suffix: Suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
    kind = _KINDS.get(code, "unknown")
    options = ""
    if kind != "sass" and options_at and options_at + _PAIR.size <= header_size:
        offset, length = _PAIR.unpack_from(body, at + options_at)
        options = _text(body, at, header_size, offset, length)
    entry = Entry(
        section=section,
        container=container,
        kind=kind,
        architecture=Architecture.of_number(number, suffix),
        version=(major, minor),
        codec=codec,
        flags=flags,
        offset=base + at + header_size,
        stored_size=compressed_size or padded_size,
        size=full_size or padded_size,
        name=_text(body, at, header_size, name_at, name_length),
        options=options,
    )
    return entry, following


def _text(body: memoryview, entry: int, header_size: int, offset: int, length: int) -> str:
    """Return a text in an entry's header; nothing when there is none or it lies outside the header."""
    if not offset or not length or offset + length > header_size:
        return ""
    return bytes(body[entry + offset : entry + offset + length]).split(b"\0")[0].decode("utf-8", "backslashreplace")
