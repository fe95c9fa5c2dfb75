"""Damaged and hostile wheels: a finding that names the member, or a clear error; never a crash or a long wait."""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspect_samples import CODE, GOOD, NAME, SAMPLE, failed, make_wheel

from cufallback.errors import PayloadError, WorkspaceError
from cufallback.wheel import payload
from cufallback.wheel.fatbin import read_fatbins
from cufallback.wheel.inspect import inspect_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (NAME, b"", "no readable zip"),
        (NAME, b"not a zip at all", "no readable zip"),
        (NAME, None, "cannot be read"),
        ("sample.zip", b"", "not named like a wheel"),
        ("sample-1.0.whl", b"", "not named like a wheel"),
    ],
)
def test_what_is_no_wheel_is_an_error(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(PayloadError, match=says) as caught:
        inspect_wheel(path)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["folder", "pipe", "/dev/zero", "circle", "nowhere"])
def test_what_is_no_regular_file_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / NAME
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "circle" else kind)
    with pytest.raises(PayloadError, match="cannot be read"):
        inspect_wheel(path)


def test_more_native_files_than_any_wheel_has_are_an_error(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {f"sample/_{index}.so": b"none" for index in range(2001)})
    with pytest.raises(PayloadError, match="2001 native files"):
        inspect_wheel(path)


def test_metadata_larger_than_any_wheels_are_an_error(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, requires=("sample",) * 60_000)
    with pytest.raises(PayloadError, match="METADATA cannot be read: it claims"):
        inspect_wheel(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_wheel_that_is_cut_off_is_an_error(tmp_path: Path, wheel: Path, share: float) -> None:
    data = wheel.read_bytes()
    (tmp_path / NAME).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(PayloadError, match="no readable zip"):
        inspect_wheel(tmp_path / NAME)


def test_a_zip_without_metadata_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        archive.writestr(CODE, SAMPLE)
    with pytest.raises(PayloadError, match="no METADATA"):
        inspect_wheel(tmp_path / NAME)


def test_metadata_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="METADATA cannot be read"):
        inspect_wheel(make_wheel(tmp_path, metadata=b"Name: \xff\xfe\n"))


def edit_directory(path: Path, member: str, **fields: int) -> None:
    """Change fields of a member's entry in the zip's directory, as a hostile archiver would."""
    offsets = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "packed": (20, "<I"), "size": (24, "<I")}
    offsets["header"] = (42, "<I")
    data = bytearray(path.read_bytes())
    at = data.rindex(member.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    for field, value in fields.items():
        place, form = offsets[field]
        struct.pack_into(form, data, at + place, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"flags": 1}, "encrypted"),
        ({"method": 99}, "method 99"),
        ({"method": 12}, "method 12"),
        ({"crc": 1}, "checksum"),
        ({"size": 100}, "more than the 100 bytes"),
        ({"size": 30_000_000}, "claims 30000000"),
        ({"size": 0xFFFFFFF0}, "bomb"),
        ({"packed": 50}, "inflates to"),
        ({"header": 1}, "outside the archive"),
    ],
)
def test_a_damaged_member_is_a_finding_that_names_it(tmp_path: Path, fields: dict[str, int], says: str) -> None:
    path = make_wheel(tmp_path)
    edit_directory(path, CODE, **fields)
    found = inspect_wheel(path)
    assert says in failed(found)["readable"]
    assert CODE in failed(found)["readable"]
    assert found.extensions[0].fault


def test_a_damaged_stored_member_is_a_finding(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, method=zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[data.index(SAMPLE) + 5000] ^= 1
    path.write_bytes(data)
    assert "checksum" in failed(inspect_wheel(path))["readable"]
    edit_directory(path, CODE, size=10)
    assert "contradict" in failed(inspect_wheel(path))["readable"]


def test_a_shifted_directory_is_an_error(tmp_path: Path) -> None:
    path = make_wheel(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x05\x06")
    struct.pack_into("<I", data, at + 16, struct.unpack_from("<I", data, at + 16)[0] + 200_000)
    path.write_bytes(data)
    with pytest.raises(PayloadError):
        inspect_wheel(path)


def test_encrypted_metadata_are_an_error(tmp_path: Path) -> None:
    path = make_wheel(tmp_path)
    edit_directory(path, "sample-1.0.dist-info/METADATA", flags=1)
    with pytest.raises(PayloadError, match="encrypted"):
        inspect_wheel(path)


@pytest.mark.timeout(60)
def test_a_real_decompression_bomb_is_refused_without_inflating_it(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {CODE: bytes(200 << 20)})
    assert path.stat().st_size < 1 << 20
    assert "bomb" in failed(inspect_wheel(path))["readable"]


def test_a_wheel_that_claims_more_than_any_wheel_holds_is_an_error(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, {f"sample/_{index}.so": b"x" for index in range(9)})
    for index in range(9):
        edit_directory(path, f"sample/_{index}.so", size=0xFFFFFFF0)
    with pytest.raises(PayloadError, match="claim"):
        inspect_wheel(path)


@pytest.mark.parametrize("data", [b"#!/bin/sh\n" * 10, b"\x7fELF", SAMPLE[:5000], SAMPLE[:4] + b"\x01" + SAMPLE[5:]])
def test_a_library_that_is_none_is_a_finding(tmp_path: Path, data: bytes) -> None:
    found = inspect_wheel(make_wheel(tmp_path, {CODE: SAMPLE, "sample/broken.so": data}))
    assert "sample/broken.so" in failed(found)["readable"]
    assert [part.name for part in found.extensions if not part.fault] == ["sample._C"]


def test_damaged_device_code_is_a_finding(tmp_path: Path) -> None:
    first = min(entry.offset for entry in read_fatbins(memoryview(SAMPLE)))
    data = bytearray(SAMPLE)
    data[SAMPLE.rindex(struct.pack("<I", 0xBA55ED50), 0, first)] ^= 1
    assert "no container begins here" in failed(inspect_wheel(make_wheel(tmp_path, {CODE: bytes(data)})))["readable"]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "//x.so", "\\x.so", "a\nb.so"])
def test_odd_member_names_are_read_like_any_other(tmp_path: Path, name: str) -> None:
    path = make_wheel(tmp_path, {"x" * (len(name) or 1): SAMPLE})
    path.write_bytes(path.read_bytes().replace(b"x" * len(name), name.encode()) if name else path.read_bytes())
    if not name:
        # An empty name: the directory entry's length of the name is 0, and its byte becomes part of the extra field.
        data = bytearray(path.read_bytes())
        struct.pack_into("<HH", data, data.index(b"PK\x01\x02") + 28, 0, 1)
        path.write_bytes(data)
    inspect_wheel(path).to_json()


def test_two_members_of_one_name_are_a_finding(tmp_path: Path) -> None:
    path = make_wheel(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(CODE, SAMPLE)
    assert CODE in failed(inspect_wheel(path))["archive"]


def test_a_bare_fatbin_is_listed(tmp_path: Path) -> None:
    start = SAMPLE.index(struct.pack("<I", 0xBA55ED50))
    size = 16 + struct.unpack_from("<Q", SAMPLE, start + 8)[0]
    found = inspect_wheel(make_wheel(tmp_path, {"sample/kernels.fatbin": SAMPLE[start : start + size]}))
    assert [(part.kind, len(part.entries)) for part in found.extensions] == [("fatbin", 4)]
    hard = [reason.what for reason in found.minimum_driver.reasons if reason.hard]
    assert hard == ["CUDA 12 code"], "nothing names a runtime, so the code itself tells the CUDA major version"


@settings(max_examples=250, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_wheel_ends_in_findings_or_an_error(
    data: st.DataObject, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = wheel.read_bytes()
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    # Most changes go to the zip's structures at the end and to the local headers, the rest anywhere.
    places = st.one_of(
        st.integers(len(whole) - 400, len(whole) - 1), st.integers(0, 80), st.integers(0, len(whole) - 1)
    )
    changed = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        changed[at] = value
    path = folder / NAME
    path.write_bytes(changed)
    try:
        inspect_wheel(path, expectation=GOOD).to_json()
    except PayloadError as error:
        assert error.remedy  # noqa: PT017 - a clear error is one of the two right ends


def test_no_room_for_a_large_member_is_said_with_the_way_out(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "_IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkspaceError, match="cannot be inflated") as caught:
        inspect_wheel(wheel)
    assert "TMPDIR" in caught.value.remedy
