"""The ELF and fatbin readers: the right answer on real code, a clear refusal and no hang on anything else."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hypothesis import given, settings
from hypothesis import strategies as st

from cufallback.cuda.versions import Architecture
from cufallback.wheel.elf import ElfError, read_elf, read_sections
from cufallback.wheel.fatbin import RELOCATABLE, RUNNABLE, Entry, FatbinError, is_fatbin, read_fatbins

SAMPLE = Path(__file__).parents[1] / "data" / "inspect" / "sample_cu129.so"
BYTES = SAMPLE.read_bytes()

MAGIC = struct.pack("<I", 0xBA55ED50)


def entry(
    *,
    kind: int = 2,
    arch: int = 90,
    version: tuple[int, int] = (1, 7),
    flags: int = 0x11,
    payload: bytes = b"12345678",
    extra: bytes = b"",
    options_at: int = 0,
    name: tuple[int, int] = (0, 0),
    compressed: int = 0,
    size: int = 0,
) -> bytes:
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64 + len(extra), len(payload), compressed, options_at,
                       version[1], version[0], arch, name[0], name[1], flags, 0, size)  # fmt: skip
    return head + extra + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def read(data: bytes) -> tuple[Entry, ...]:
    return read_fatbins(memoryview(data))


def test_the_sample_is_listed_whole_and_in_order() -> None:
    listed = [(e.section, e.container, e.kind, str(e.architecture), e.version, e.codec, e.name) for e in read(BYTES)]
    assert listed == [
        (RUNNABLE, 0, "sass", "9.0a", (1, 7), "none", "sample"),
        (RUNNABLE, 0, "sass", "10.0f", (1, 8), "none", "sample"),
        (RUNNABLE, 0, "sass", "10.3a", (1, 8), "none", "sample"),
        (RUNNABLE, 0, "ptx", "8.0", (8, 8), "none", "sample"),
        (RUNNABLE, 1, "ptx", "8.0", (8, 8), "lz4", "sample"),
        (RELOCATABLE, 2, "ptx", "12.0", (8, 8), "none", "sample"),
    ]


def test_the_payload_is_where_the_entry_says() -> None:
    for found in read(BYTES):
        payload = BYTES[found.offset : found.offset + found.stored_size]
        if found.codec == "none":
            assert payload.startswith(b"\x7fELF") if found.kind == "sass" else b".version 8.8" in payload
        else:
            assert found.stored_size < found.size


def test_ptx_says_the_same_target_and_version_as_its_header() -> None:
    plain = next(e for e in read(BYTES) if e.kind == "ptx" and e.codec == "none")
    text = BYTES[plain.offset : plain.offset + plain.size].decode("ascii", "replace")
    assert (".version 8.8" in text, ".target sm_80" in text) == (True, True)


def test_elf_facts_agree_with_pyelftools() -> None:
    ours = read_elf(memoryview(BYTES))
    with SAMPLE.open("rb") as file:
        theirs = ELFFile(file)
        dynamic = theirs.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        needed = tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))
        versions = theirs.get_section_by_name(".gnu.version_r")
        assert isinstance(versions, GNUVerNeedSection)
        wanted = {(need.name, aux.name) for need, auxiliaries in versions.iter_versions() for aux in auxiliaries}
        symbols = {s.name for s in theirs.get_section_by_name(".dynsym").iter_symbols() if s["st_shndx"] == "SHN_UNDEF"}
        names = [section.name for section in theirs.iter_sections()]
    assert ours.needed == needed == ("libcudart.so.12", "libc.so.6")
    assert set(ours.versions) == wanted
    assert ours.undefined == symbols - {""} == {"cudaGetDeviceCount", "clock_gettime"}
    assert ours.runpath == ("$ORIGIN/lib",)
    assert [section.name for section in ours.sections] == names


@pytest.mark.parametrize(
    ("flags", "arch", "shown"),
    [
        (0x11, 90, "9.0"),
        (0x100011, 103, "10.3a"),
        (0x200011, 120, "12.0f"),
        (0x11, 75, "7.5"),
        (0x100011, 110, "11.0a"),
    ],
)
def test_the_suffix_comes_from_the_flags(flags: int, arch: int, shown: str) -> None:
    (found,) = read(container(entry(flags=flags, arch=arch)))
    assert found.architecture == Architecture.parse(shown)


@pytest.mark.parametrize(("flags", "codec"), [(0x11, "none"), (0x2011, "lz4"), (0x8011, "zstd")])
def test_the_codec_comes_from_the_flags(flags: int, codec: str) -> None:
    (found,) = read(container(entry(flags=flags, compressed=5, size=99)))
    assert (found.codec, found.stored_size, found.size) == (codec, 5, 99)


@pytest.mark.parametrize(("number", "kind"), [(1, "ptx"), (2, "sass"), (8, "lto-ir"), (77, "unknown")])
def test_kinds(number: int, kind: str) -> None:
    assert read(container(entry(kind=number)))[0].kind == kind


def test_options_and_name_are_read_from_the_header() -> None:
    extra = struct.pack("<II", 72, 16) + b"-maxrregcount=96" + b"unit.cu\0"
    (found,) = read(container(entry(kind=1, extra=extra, options_at=64, name=(88, 8))))
    assert (found.options, found.name) == ("-maxrregcount=96", "unit.cu")


def test_a_name_outside_the_header_is_no_name() -> None:
    (found,) = read(container(entry(name=(60, 0xFFFFFFF0))))
    assert found.name == ""


def test_containers_are_numbered_and_alignment_between_them_is_skipped() -> None:
    data = container(entry(), entry(arch=80)) + bytes(8) + container(entry(arch=75))
    assert [e.container for e in read(data)] == [0, 0, 1]
    assert is_fatbin(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (MAGIC + struct.pack("<HHQ", 1, 16, 1 << 40), "container's header"),
        (MAGIC + struct.pack("<HHQ", 9, 16, 0), "container's header"),
        (MAGIC + struct.pack("<HHQ", 1, 3, 0), "container's header"),
        (container(entry())[:-20] + bytes(20), ""),
        (container(entry()) + b"garbage!garbage!", "no container begins here"),
        (container(entry()) + b"tail", "left over"),
        (container(entry()) + bytes(4096) + container(entry()), "no container begins here"),
        (container(entry(compressed=4096)), "entry's header"),
        (container(entry()[:40]), "cut off"),
    ],
)
def test_damaged_device_code_is_refused_with_its_place(data: bytes, says: str) -> None:
    if not says:
        assert read(data)
        return
    with pytest.raises(FatbinError, match=says):
        read(data)


@pytest.mark.timeout(30)
def test_a_claim_of_endless_entries_ends() -> None:
    with pytest.raises(FatbinError, match="more than 200000 entries"):
        read(container(*[entry(payload=b"")] * 200_001))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "neither an ELF file nor a fatbin"),
        (b"text, not code", "neither an ELF file nor a fatbin"),
        (b"\x7fELF", "cut off"),
        (BYTES[:63], "cut off"),
        (BYTES[:4] + b"\x01" + BYTES[5:], "64-bit"),
        (BYTES[:5] + b"\x02" + BYTES[6:], "little-endian"),
        (BYTES[:0x28] + bytes(8) + BYTES[0x30:], "no section table"),
        (BYTES[:0x28] + b"\xff" * 8 + BYTES[0x30:], "outside the file"),
        (BYTES[:0x3C] + b"\xfe\xff" + BYTES[0x3E:], "outside the file"),
        (BYTES[:-500], "outside the file"),
    ],
)
def test_what_is_no_readable_elf_is_refused_with_its_reason(data: bytes, says: str) -> None:
    with pytest.raises(ElfError, match=says):
        read(data)


def test_extended_section_numbering_is_read() -> None:
    table = struct.unpack_from("<Q", BYTES, 0x28)[0]
    count, names = struct.unpack_from("<HH", BYTES, 0x3C)
    data = bytearray(BYTES)
    struct.pack_into("<HH", data, 0x3C, 0, 0xFFFF)
    struct.pack_into("<Q", data, table + 32, count)
    struct.pack_into("<I", data, table + 40, names)
    assert read_sections(memoryview(data))[1:] == read_sections(memoryview(BYTES))[1:]
    assert read(bytes(data)) == read(BYTES)


def test_a_section_without_contents_in_the_file_is_empty() -> None:
    table = struct.unpack_from("<Q", BYTES, 0x28)[0]
    index = [section.name for section in read_sections(memoryview(BYTES))].index(RUNNABLE)
    data = bytearray(BYTES)
    struct.pack_into("<I", data, table + 64 * index + 4, 8)
    assert {e.section for e in read(bytes(data))} == {RELOCATABLE}


def test_a_string_table_full_of_one_endless_name_is_refused_quickly() -> None:
    sections = {section.name: section for section in read_sections(memoryview(BYTES))}
    data = bytearray(BYTES)
    strings = sections[".dynstr"]
    data[strings.offset : strings.offset + strings.size] = b"x" * strings.size
    with pytest.raises(ElfError, match="name"):
        read_elf(memoryview(data))


def both(data: bytes) -> None:
    """Read damaged bytes with both readers: an answer or a ValueError, nothing else."""
    for reader in (read_elf, read_fatbins):
        try:
            reader(memoryview(data))
        except ValueError as error:
            assert str(error)  # noqa: PT017 - any ValueError will do, a mute one will not


@settings(max_examples=300, deadline=2000)
@given(st.integers(0, len(BYTES)))
def test_any_truncation_ends_in_an_answer_or_a_refusal(length: int) -> None:
    both(BYTES[:length])


@settings(max_examples=600, deadline=2000)
@given(st.lists(st.tuples(st.integers(0, len(BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_change_ends_in_an_answer_or_a_refusal(changes: list[tuple[int, int]]) -> None:
    data = bytearray(BYTES)
    for at, value in changes:
        data[at] = value
    both(bytes(data))


# Offsets of what steers the readers: the ELF header, the section table, the fatbin headers, the dynamic section.
STEERING = sorted(
    {
        *range(64),
        *range(struct.unpack_from("<Q", BYTES, 0x28)[0], len(BYTES)),
        *(
            at
            for section in read_sections(memoryview(BYTES))
            if section.name in (RUNNABLE, RELOCATABLE, ".dynamic", ".gnu.version_r", ".dynsym")
            for at in range(section.offset, section.offset + min(section.size, 200))
        ),
    }
)


@settings(max_examples=1500, deadline=2000)
@given(
    st.lists(st.tuples(st.sampled_from(STEERING), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])), min_size=1, max_size=4)
)
def test_any_change_of_a_header_ends_in_an_answer_or_a_refusal(changes: list[tuple[int, int]]) -> None:
    data = bytearray(BYTES)
    for at, value in changes:
        data[at] = value
    both(bytes(data))


@settings(max_examples=300, deadline=2000)
@given(st.binary(max_size=400))
def test_bytes_after_the_magic_end_in_an_answer_or_a_refusal(tail: bytes) -> None:
    both(MAGIC + tail)
    both(b"\x7fELF\x02\x01" + tail)
