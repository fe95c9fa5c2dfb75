"""Byte-stable wheels: what may differ without effect, what is refused, what is added."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cufallback.errors import CufallbackError, PayloadError, WorkspaceError
from cufallback.wheel.normalize import check_record, repack

EPOCH = 1_754_900_000
NAME = "demo-1.0-py3-none-any.whl"
INFO = "demo-1.0.dist-info"
FILES = {
    "demo/__init__.py": b"x = 1\n",
    "demo/lib.so": b"\x7fELF" * 100,
    "demo/\u00fcber, alles.txt": b"",
    f"{INFO}/METADATA": b"Name: demo\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n",
}


def record_of(files: Mapping[str, bytes]) -> bytes:
    text = io.StringIO()
    rows = [
        (name, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), len(data))
        for name, data in files.items()
    ]
    csv.writer(text, lineterminator="\n").writerows([*rows, (f"{INFO}/RECORD", "", "")])
    return text.getvalue().encode()


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes] = FILES,
    *,
    record: bytes | None = None,
    mode: Callable[[str], int] = lambda name: 0o755 if name.endswith(".so") else 0o644,
    when: tuple[int, int, int, int, int, int] = (2020, 2, 2, 2, 2, 2),
    compression: int = zipfile.ZIP_DEFLATED,
    name: str = NAME,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w", compression) as archive:
        for member, data in {**files, f"{INFO}/RECORD": record or record_of(files)}.items():
            entry = zipfile.ZipInfo(member, when)
            entry.compress_type = compression
            entry.external_attr = (stat.S_IFREG | mode(member)) << 16
            archive.writestr(entry, data)
    return folder / name


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    plain = write_wheel(tmp_path / "a")
    other = write_wheel(
        tmp_path / "b\u00fc c",
        dict(reversed(FILES.items())),
        mode=lambda name: 0o775 if name.endswith(".so") else 0o600,
        when=(2031, 1, 1, 0, 0, 0),
        compression=zipfile.ZIP_STORED,
    )
    assert plain.read_bytes() != other.read_bytes()
    first = repack(plain, tmp_path / "out1", epoch=EPOCH, extra_dist_info={})
    second = repack(other, tmp_path / "deep/out 2", epoch=EPOCH, extra_dist_info={})
    assert first.name == second.name == NAME
    assert first.read_bytes() == second.read_bytes()
    assert repack(first, tmp_path / "again", epoch=EPOCH, extra_dist_info={}).read_bytes() == first.read_bytes()


def test_the_layout_is_fixed(tmp_path: Path) -> None:
    path = repack(write_wheel(tmp_path), tmp_path / "out", epoch=EPOCH, extra_dist_info={})
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in FILES} == FILES
        rows = list(csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode())))
    names = [entry.filename for entry in entries]
    assert names == [*sorted(FILES), f"{INFO}/RECORD"]
    assert {entry.external_attr >> 16 for entry in entries} == {stat.S_IFREG | 0o644, stat.S_IFREG | 0o755}
    assert {entry.date_time for entry in entries} == {(2025, 8, 11, 8, 13, 20)}
    # Stored: deflate output is the zlib's choice, and this one property must hold on every machine.
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    assert [row[0] for row in rows] == names
    assert rows[-1][1:] == ["", ""]


@pytest.mark.parametrize(
    ("epoch", "moment"),
    [(0, (1980, 1, 1, 0, 0, 0)), (-5, (1980, 1, 1, 0, 0, 0)), (10**11, (2107, 12, 31, 23, 59, 58))],
)
def test_times_that_zip_cannot_hold_are_clamped(tmp_path: Path, epoch: int, moment: tuple[int, ...]) -> None:
    path = repack(write_wheel(tmp_path), tmp_path / "out", epoch=epoch, extra_dist_info={})
    assert {entry.date_time for entry in zipfile.ZipFile(path).infolist()} == {moment}


def test_extra_files_are_recorded(tmp_path: Path) -> None:
    extra = {"sboms/demo.cdx.json": b"{}\n"}
    path = repack(write_wheel(tmp_path), tmp_path / "out", epoch=EPOCH, extra_dist_info=extra)
    with zipfile.ZipFile(path) as archive:
        assert archive.read(f"{INFO}/sboms/demo.cdx.json") == b"{}\n"
        assert f"{INFO}/sboms/demo.cdx.json,sha256=" in archive.read(f"{INFO}/RECORD").decode()
    repack(path, tmp_path / "again", epoch=EPOCH, extra_dist_info={})  # and the record is right


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a//b", "./a", "a\\b", "c:/x", "a\nb", "", "METADATA", "RECORD", "RECORD.jws"]
)
def test_extra_files_with_a_bad_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PayloadError):
        repack(write_wheel(tmp_path), tmp_path / "out", epoch=EPOCH, extra_dist_info={name: b""})


def changed(**files: bytes) -> dict[str, bytes]:
    return {**FILES, **{name.replace("__", "/"): data for name, data in files.items()}}


UNSAFE = ["../evil.py", "/abs.py", "demo/../../x.py", "demo//x.py", "./x.py", "demo\\x.py", "C:/x.py", "demo/a\nb.py"]
WRONG = {
    "member missing from RECORD": lambda folder: write_wheel(folder, changed(extra=b"!"), record=record_of(FILES)),
    "RECORD names what is not there": lambda folder: write_wheel(folder, record=record_of(changed(gone=b"!"))),
    "other bytes than RECORD says": lambda folder: write_wheel(
        folder, {**FILES, "demo/__init__.py": b"x = 2\n"}, record=record_of(FILES)
    ),
    "RECORD twice": lambda folder: write_wheel(folder, record=record_of(FILES) + b"demo/__init__.py,,\n"),
    "RECORD is no CSV": lambda folder: write_wheel(folder, record=b'a,"b'),
    "RECORD with too few columns": lambda folder: write_wheel(folder, record=b"demo/__init__.py\n"),
    "RECORD not UTF-8": lambda folder: write_wheel(folder, record=b"\xff,,\n"),
    "signed": lambda folder: write_wheel(folder, {**FILES, f"{INFO}/RECORD.jws": b"{}"}),
    "two dist-info": lambda folder: write_wheel(folder, {**FILES, "other-1.dist-info/METADATA": b""}),
    "dist-info of another name": lambda folder: write_wheel(folder, name="other-1.0-py3-none-any.whl"),
    "no METADATA": lambda folder: write_wheel(folder, {k: v for k, v in FILES.items() if "METADATA" not in k}),
    "a link": lambda folder: write_wheel(folder, mode=lambda name: stat.S_IFLNK if name.endswith(".so") else 0o644),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_member_names_are_refused(tmp_path: Path, name: str) -> None:
    wheel = write_wheel(tmp_path, {**FILES, name: b"!"})
    with pytest.raises(PayloadError, match="unsafe member name"):
        repack(wheel, tmp_path / "out", epoch=EPOCH, extra_dist_info={})
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("fault", WRONG)
def test_wheels_that_contradict_themselves_are_refused(tmp_path: Path, fault: str) -> None:
    with pytest.raises(PayloadError) as caught:
        repack(WRONG[fault](tmp_path), tmp_path / "out", epoch=EPOCH, extra_dist_info={})
    assert caught.value.where is not None
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_members_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("demo/__init__.py", b"x = 2\n")
    with pytest.raises(PayloadError, match="twice"):
        repack(wheel, tmp_path / "out", epoch=EPOCH, extra_dist_info={})


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flip", "missing"])
def test_damaged_archives_are_refused(tmp_path: Path, damage: str) -> None:
    wheel = write_wheel(tmp_path)
    data = wheel.read_bytes()
    wheel.write_bytes(
        {
            "empty": b"",
            "text": b"not a zip",
            "cut": data[: len(data) // 2],
            "flip": data[:50] + bytes([data[50] ^ 0xFF]) + data[51:],
            "missing": b"",
        }[damage]
    )
    if damage == "missing":
        wheel.unlink()
    with pytest.raises(PayloadError):
        repack(wheel, tmp_path / "out", epoch=EPOCH, extra_dist_info={})
    assert list((tmp_path / "out").iterdir()) == []


def test_no_single_flipped_byte_escapes_as_another_error(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    data = wheel.read_bytes()
    for position in range(len(data)):
        wheel.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            path = repack(wheel, tmp_path / "out", epoch=EPOCH, extra_dist_info={})
        except CufallbackError:
            continue
        with zipfile.ZipFile(path) as archive:  # a flipped time or mode does no harm
            assert archive.testzip() is None
            assert len(archive.namelist()) == len(FILES) + 1


def test_an_output_that_is_a_file_is_a_workspace_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(WorkspaceError):
        repack(write_wheel(tmp_path), tmp_path / "out", epoch=EPOCH, extra_dist_info={})


def test_a_right_record_is_checked_in_place(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    before = wheel.read_bytes()
    wheel.chmod(0o400)
    check_record(wheel)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize("fault", WRONG)
def test_checking_in_place_refuses_what_repacking_refuses(tmp_path: Path, fault: str) -> None:
    wheel = WRONG[fault](tmp_path)
    with pytest.raises(PayloadError) as repacked:
        repack(wheel, tmp_path / "out", epoch=EPOCH, extra_dist_info={})
    with pytest.raises(PayloadError) as checked:
        check_record(wheel)
    assert str(checked.value) == str(repacked.value)


@pytest.mark.parametrize("content", [None, b"", b"not a zip"])
def test_what_is_no_wheel_is_not_checked(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / NAME
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(PayloadError):
        check_record(wheel)
