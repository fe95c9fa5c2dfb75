"""A finished build and the outside: its archive, hostile archives, which build is meant, what is never signed."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.record_samples import BUILD_ID, record_json, write_build, write_record_of
from tests.unit.sign_rooms import write_key

from cufallback.errors import AttestationError, ImageError, KeyFileError, RecordError, UsageError, WorkspaceError
from cufallback.progress import Silent
from cufallback.publish import extract_archive, find_build, push_build, sign_build, write_archive
from cufallback.record import RECORD, SUMS, read_record
from cufallback.summary import summary


@pytest.fixture
def build(tmp_path: Path) -> Path:
    folder = tmp_path / "dist" / "rehearsal" / BUILD_ID[:16]
    write_build(folder)
    return folder


def archive_of(folder: Path, path: Path) -> Path:
    write_archive(folder, read_record(folder), path)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_holds_everything_but_the_images_blobs(build: Path, tmp_path: Path) -> None:
    extract_archive(archive_of(build, tmp_path / "a.tar"), tmp_path / "out", where="x")
    expected = {name: content for name, content in contents(build).items() if not name.startswith("image/blobs/")}
    assert contents(tmp_path / "out") == expected
    assert {RECORD, SUMS, "plan.json", "image/index.json", "image/oci-layout"} <= set(expected)


def test_equal_folders_give_equal_archives(build: Path, tmp_path: Path) -> None:
    first = archive_of(build, tmp_path / "a.tar").read_bytes()
    other = tmp_path / "elsewhere"
    write_build(other)
    for path in other.rglob("*"):
        os.utime(path, (1, 2))
        path.chmod(0o700)
    assert archive_of(other, tmp_path / "b.tar").read_bytes() == first
    with tarfile.open(tmp_path / "a.tar") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    facts = {(member.uid, member.gid, member.uname, member.gname, member.mode) for member in members}
    assert facts == {(0, 0, "", "", 0o644)}
    assert len({member.mtime for member in members}) == 1


def test_signatures_and_strangers_are_not_in_the_archive(build: Path, tmp_path: Path) -> None:
    first = archive_of(build, tmp_path / "a.tar").read_bytes()
    (build / "signatures").mkdir()
    (build / "signatures" / "record.dsse.json").write_text("{}")
    (build / "stranger").write_text("x")
    assert archive_of(build, tmp_path / "b.tar").read_bytes() == first


def tar(
    *members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, link: str = "", tar_format: int = tarfile.PAX_FORMAT
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def sparse() -> bytes:
    """A file of a few bytes here that is one of a tebibyte where it is unpacked."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("huge")
        content = b"1\n0\n4\n".ljust(512, b"\0") + b"abcd"
        member.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.realsize": str(1 << 40),
            "GNU.sparse.name": "huge",
        }
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


NAMES = [
    "../out",
    "/etc/x",
    "a/../../x",
    "a//b",
    "./a",
    "a/.",
    "..",
    ".",
    "a\\b",
    "a\nb",
    "a\x1b[0m",
    "a\udcff",
    "a\u202eb",
]
KINDS = {
    "symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "character device": tarfile.CHRTYPE,
    "block device": tarfile.BLKTYPE, "pipe": tarfile.FIFOTYPE, "folder": tarfile.DIRTYPE,
}  # fmt: skip
IN = "inputs/dockerfiles/"


def nested_headers(count: int) -> bytes:
    """Extended headers without end, each of which tarfile reads by calling itself."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 12
    one = header.tobuf(tarfile.USTAR_FORMAT) + b"12 path=abc\n".ljust(512, b"\0")
    return one * count + tar(("a", b"1"))


HOSTILE: dict[str, tuple[bytes, str]] = {
    **{f"name {name!a}": (tar((name, b"1")), "no plain file") for name in NAMES},
    **{kind: (tar(("a", b""), kind=code, link="/etc/passwd"), "no plain file") for kind, code in KINDS.items()},
    "a sparse file": (sparse(), "no plain file"),
    "a name twice": (tar((f"{IN}a", b"1"), (f"{IN}a", b"2")), "a' twice"),
    "a name twice, far apart": (tar((f"{IN}a/b", b"1"), (f"{IN}c", b""), (f"{IN}a/b", b"1")), "a/b' twice"),
    "a file below a file": (tar((f"{IN}a", b"1"), (f"{IN}a/b", b"2")), "a/b' twice"),
    "a file over a folder": (tar((f"{IN}a/b/c", b"1"), (f"{IN}a", b"2")), "a' twice"),
    "a script": (tar(("install.sh", b"1")), "no file of a build"),
    "a file in the place of a folder": (tar(("image", b"1")), "no file of a build"),
    "a signature": (tar(("signatures/record.dsse.json", b"1")), "no file of a build"),
    "headers upon headers": (nested_headers(3000), "no tar archive"),
    "no archive": (b"this is no archive" * 99, "no tar archive"),
    "nothing": (b"", "no tar archive"),
    "a packed archive": (b"\x1f\x8b\x08" + bytes(999), "no tar archive"),
    "cut in a file": (tar((f"{IN}a", b"1" * 2000))[:1500], "no tar archive"),
    "cut in the first header": (tar(("a", b"1"))[:300], "no tar archive"),
    "a damaged header": (tar(("a", b"1")).replace(b"0000644", b"0000645", 1), "no tar archive"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_leaves_its_folder(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    archive = tmp_path / "a.tar"
    archive.write_bytes(content)
    with pytest.raises(AttestationError, match=reason) as raised:
        extract_archive(archive, tmp_path / "room" / "out", where="the archive")
    assert raised.value.where == "the archive"
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert [path for path in tmp_path.rglob("*") if "out" not in path.parts and path.is_file()] == [archive]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 10**6),
    byte=st.integers(0, 255),
    tar_format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_an_archive_with_one_other_byte_is_unpacked_or_refused(
    tmp_path: Path, at: int, byte: int, tar_format: int
) -> None:
    content = bytearray(tar(("ä" * 120, b"1"), ("b", b"2"), tar_format=tar_format))
    content[at % len(content)] = byte
    archive = tmp_path / "a.tar"
    archive.write_bytes(content)
    with contextlib.suppress(AttestationError, WorkspaceError):  # and no other
        extract_archive(archive, tmp_path / "out", where="x")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.tar", "out"}


def test_the_build_that_is_meant(build: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    assert find_build(None, dist) == build
    assert find_build(tmp_path / "named", dist) == tmp_path / "named"
    write_build(dist / "rehearsal" / "0", with_image=False)
    assert find_build(None, dist) == build, "one without an image cannot be pushed"
    write_build(dist / "other" / "0")
    with pytest.raises(UsageError, match="2 builds with an image") as raised:
        find_build(None, dist)
    assert str(build) in raised.value.reason
    assert "--build DIR" in raised.value.remedy


@pytest.mark.parametrize(
    "make", [lambda dist: None, lambda dist: dist.mkdir(), lambda dist: write_build(dist / "r" / "0", with_image=False)]
)
def test_no_build_to_push(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "dist")
    with pytest.raises(UsageError, match=r"there is no build with an image in"):
        find_build(None, tmp_path / "dist")


def _alter(folder: Path) -> None:
    (folder / "plan.json").write_text("[]\n")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file altered": (_alter, "file plan.json"),
    "a file missing": (lambda folder: (folder / "plan.json").unlink(), "file plan.json"),
    "a stranger": (lambda folder: (folder / "stranger").write_text("x"), "file stranger"),
    "a stranger whose name speaks of signatures": (
        lambda folder: (folder / "signatures.txt").write_text("x"),
        "file signatures.txt",
    ),
    "a link among the signatures": (
        lambda folder: (folder / "signatures").symlink_to("/etc"),
        "file signatures",
    ),
    "a link": (lambda folder: (folder / "link").symlink_to("plan.json"), "file link"),
    "another checksum": (lambda folder: (folder / SUMS).write_text("\n"), "file record.json"),
    "only the inputs missing": (lambda folder: None, "inputs"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("what", ["sign", "push"])
def test_a_folder_that_does_not_verify_is_neither_signed_nor_pushed(
    build: Path, tmp_path: Path, name: str, what: str
) -> None:
    """A synthetic folder: even as it is written it fails, since nothing of a recipe lies in it."""
    change, fault = FAULTS[name]
    change(build)
    private, _public = write_key(tmp_path)
    attempts: dict[str, Callable[[], object]] = {
        "sign": lambda: sign_build(build, private, clock=lambda: 0.0, ask=None),
        "push": lambda: push_build(build, "127.0.0.1:1/a/b:1", move_tag=False, plain_http=None, progress=Silent()),
    }
    with pytest.raises(RecordError, match="the build folder does not verify: ") as raised:
        attempts[what]()
    if name != "only the inputs missing":
        assert fault in raised.value.reason
    assert "cufallback verify" in raised.value.remedy
    assert not (build / "signatures").is_dir() or name == "a link among the signatures"


def test_neither_key_nor_record(build: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        sign_build(build, tmp_path / "no key", clock=lambda: 0.0, ask=None)
    private, _public = write_key(tmp_path)
    with pytest.raises(RecordError, match="no record here"):
        sign_build(tmp_path, private, clock=lambda: 0.0, ask=None)
    with pytest.raises(UsageError):
        push_build(build, "no reference at all", move_tag=False, plain_http=None, progress=Silent())


def test_a_summary_says_what_the_record_holds(build: Path) -> None:
    found = summary(build)
    assert (found["recipe"], found["build_id"], found["distributions"]) == ("rehearsal", BUILD_ID, 1)
    assert found["source"]["commit"]["status"] == "quoted"
    assert [wheel["minimum_driver"] for wheel in found["wheels"]] == [None, "575.51.03"]
    assert found["wheels"][0]["findings"] == {"passed": 2, "warned": 1}
    assert (found["image"]["layers"], found["image"]["checks"]) == (2, {"passed": 1, "not_run": 1})
    assert (found["signatures"], found["signed_record"]) == ([], False)
    (build / "signatures").mkdir()
    (build / "signatures" / "record.dsse.json").write_text("{}")
    assert summary(build)["signatures"] == ["record.dsse.json"]
    assert summary(build)["signed_record"]


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "an inspection less": lambda record: record["inspection"].pop(),
    "an inspection more": lambda record: record["inspection"].append({}),
    "a driver of another kind": lambda record: record["inspection"][0].update(minimum_driver="575"),
    "a driver in a list": lambda record: record["inspection"][0].update(minimum_driver=[1]),
    "findings of another kind": lambda record: record["inspection"][0].update(findings=7),
    "a finding of another kind": lambda record: record["inspection"][0].update(findings=["x"]),
    "a finding without status": lambda record: record["inspection"][0].update(findings=[{}]),
    "no findings": lambda record: record["inspection"][0].update(findings=None),
}


@pytest.mark.parametrize("name", ODD)
def test_a_record_of_odd_inspections_is_one_clear_error(tmp_path: Path, name: str) -> None:
    value = record_json(tmp_path)
    ODD[name](value)
    write_record_of(tmp_path, value)
    with pytest.raises(RecordError, match="inspections are not those of its wheels"):
        summary(tmp_path)


def test_a_build_without_an_image_is_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cufallback import publish

    record = write_build(tmp_path / "build", with_image=False)
    monkeypatch.setattr(publish, "_verified", lambda _folder: record)
    with pytest.raises(ImageError, match="has no image"):
        push_build(tmp_path / "build", "127.0.0.1:1/a/b", move_tag=False, plain_http=None, progress=Silent())
