"""What an ELF file says of itself: sections, NEEDED, RPATH, symbol versions, undefined symbols.

Reads a buffer in place, every access bounded, because the input is anybody's: a general ELF library walks lazily by
the file's own counts, and a flipped byte makes such a walk last for hours. The tests compare with pyelftools.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF"

_SHT_STRTAB, _SHT_DYNAMIC, _SHT_NOBITS, _SHT_DYNSYM, _SHT_VERNEED = 3, 6, 8, 11, 0x6FFFFFFE
_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 14, 15, 29
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")

# Bounds far above what real files have (libtorch_cuda.so: about 200 000 dynamic symbols), far below what hurts.
_MAXIMUM_SECTIONS = 100_000
_MAXIMUM_SYMBOLS = 4_000_000
_MAXIMUM_DYNAMIC = 10_000
_MAXIMUM_NAME = 65_536


class ElfError(ValueError):
    """The bytes are not an ELF file that can be read, and why."""


@dataclass(frozen=True)
class Section:
    """A section: name, type, place in the file in bytes, and the section it links to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Elf:
    """What was read. ``versions`` holds (library, version) pairs such as ("libc.so.6", "GLIBC_2.28")."""

    machine: int
    sections: tuple[Section, ...]
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    undefined: frozenset[str]


def is_elf(head: bytes | memoryview) -> bool:
    """Say whether bytes begin like an ELF file."""
    return bytes(head[:4]) == MAGIC


def read_sections(data: memoryview) -> tuple[Section, ...]:
    """Return the section table.

    Raises:
        ElfError: no 64-bit little-endian ELF file, no section table, or one that reaches out of the file.
    """
    if not is_elf(data) or len(data) < 64:
        raise ElfError("not an ELF file" if not is_elf(data) else "the ELF header is cut off")
    if data[4] != 2 or data[5] != 1:
        raise ElfError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if not table:
        raise ElfError("it has no section table, so its contents cannot be listed")
    if entry_size != _SECTION.size or table + _SECTION.size > len(data):
        raise ElfError("the section table lies outside the file")
    if count == 0 or names_index == 0xFFFF:
        # Extended numbering: the true numbers are in section 0.
        first = _SECTION.unpack_from(data, table)
        count = count or first[5]
        names_index = first[6] if names_index == 0xFFFF else names_index
    if count > _MAXIMUM_SECTIONS or table + count * _SECTION.size > len(data) or names_index >= count:
        raise ElfError("the section table lies outside the file")
    rows = [_SECTION.unpack_from(data, table + index * _SECTION.size) for index in range(count)]
    names = rows[names_index]
    return tuple(Section(_string(data, names[4], names[5], row[0]), row[1], row[4], row[5], row[6]) for row in rows)


def read_elf(data: memoryview) -> Elf:
    """Read the file.

    Raises:
        ElfError: not a readable ELF file; the message says what is wrong.
    """
    try:
        return _read(data)
    except (struct.error, IndexError, OverflowError) as error:
        raise ElfError(f"the ELF structure is damaged ({error})") from error


def _read(data: memoryview) -> Elf:
    sections = read_sections(data)
    tags: dict[int, list[str]] = {_DT_NEEDED: [], _DT_SONAME: [], _DT_RPATH: [], _DT_RUNPATH: []}
    versions: list[tuple[str, str]] = []
    undefined: set[str] = set()
    for section in sections:
        if section.kind not in (_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED):
            continue
        body = section_body(data, section)
        if section.link >= len(sections):
            raise ElfError(f"{section.name} has no string table")
        strings = sections[section.link]
        if section.kind == _SHT_DYNAMIC:
            for tag, value in _dynamic(body):
                if tag in tags:
                    tags[tag].append(_string(data, strings.offset, strings.size, value))
        elif section.kind == _SHT_DYNSYM:
            undefined.update(_undefined(body, bytes(section_body(data, strings))))
        else:
            versions.extend(
                (
                    _string(data, strings.offset, strings.size, library),
                    _string(data, strings.offset, strings.size, name),
                )
                for library, name in _versions(body)
            )
    return Elf(
        machine=int(struct.unpack_from("<H", data, 18)[0]),
        sections=sections,
        soname=next(iter(tags[_DT_SONAME]), ""),
        needed=tuple(tags[_DT_NEEDED]),
        rpath=_paths(tags[_DT_RPATH]),
        runpath=_paths(tags[_DT_RUNPATH]),
        versions=tuple(sorted(set(versions))),
        undefined=frozenset(undefined),
    )


def section_body(data: memoryview, section: Section) -> memoryview:
    """Return a section's bytes, without copying.

    Raises:
        ElfError: the section reaches beyond the file.
    """
    if section.kind == _SHT_NOBITS:
        return data[:0]
    if section.offset + section.size > len(data):
        raise ElfError(f"section {section.name} reaches beyond the end of the file")
    return data[section.offset : section.offset + section.size]


def _string(data: memoryview, table: int, size: int, offset: int) -> str:
    if offset >= size or table + size > len(data):
        raise ElfError("a name lies outside its string table")
    raw = bytes(data[table + offset : min(table + size, table + offset + _MAXIMUM_NAME)])
    end = raw.find(b"\0")
    if end < 0:
        raise ElfError("a name has no end")
    return raw[:end].decode("utf-8", "backslashreplace")


def _paths(values: list[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(":") if part)


def _dynamic(body: memoryview) -> Iterator[tuple[int, int]]:
    for index in range(min(len(body) // _DYNAMIC.size, _MAXIMUM_DYNAMIC)):
        tag, value = _DYNAMIC.unpack_from(body, index * _DYNAMIC.size)
        if tag == 0:
            return
        yield tag, value


def _undefined(body: memoryview, strings: bytes) -> Iterator[str]:
    count = len(body) // _SYMBOL.size
    if count > _MAXIMUM_SYMBOLS:
        raise ElfError(f"{count} dynamic symbols are more than any real library has")
    for name, _info, _other, index, _value, _size in _SYMBOL.iter_unpack(body[: count * _SYMBOL.size]):
        if index == 0 and name:
            end = strings.find(b"\0", name, name + _MAXIMUM_NAME)
            if end < 0:
                raise ElfError("a symbol's name lies outside its string table")
            yield strings[name:end].decode("utf-8", "backslashreplace")


def _versions(body: memoryview) -> Iterator[tuple[int, int]]:
    """Yield (library, version) as string offsets. Offsets only move forward, so the walk ends."""
    at = 0
    while True:
        _version, count, library, aux, following = _VERNEED.unpack_from(body, at)
        here = at + aux
        for _ in range(count):
            _hash, _flags, _other, name, step = _VERNAUX.unpack_from(body, here)
            yield library, name
            if not step:
                break
            here += step
        if not following:
            return
        at += following
