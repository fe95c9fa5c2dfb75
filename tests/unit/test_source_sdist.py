"""extract_sdist: what a source distribution may hold, and that a refused one leaves nothing behind."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cufallback.errors import IntegrityError, SourceError, WorkspaceError
from cufallback.recipe import SdistSource
from cufallback.source.checkout import Checkout, extract_sdist
from cufallback.source.fetch import require_named
from cufallback.store import sha256_file

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, data: bytes = b"x", *, mode: int = 0o644, mtime: float = 1_000_000_000) -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), mode, mtime
    return info, data


def special(name: str, kind: bytes, linkname: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, linkname, 0o755
    return info, b""


def folder(name: str) -> Member:
    return special(name, tarfile.DIRTYPE)


def symlink(name: str, to: str) -> Member:
    return special(name, tarfile.SYMTYPE, to)


def hardlink(name: str, to: str) -> Member:
    return special(name, tarfile.LNKTYPE, to)


def write(path: Path, *members: Member) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def source(archive: Path, **changes: str) -> SdistSource:
    values = {"package": "p", "version": "1", "sha256": sha256_file(archive), "why": "it is only a test"}
    return SdistSource(kind="sdist", **(values | changes))


def extract(archive: Path, target: Path, **bounds: int) -> Checkout:
    return extract_sdist(archive, source(archive), target=target, **bounds)


def test_a_sound_archive_loses_its_top_folder_and_gets_normal_modes(tmp_path: Path) -> None:
    archive = write(
        tmp_path / "p.tar.gz",
        folder("p-1/"),
        file("p-1/run", b"#!", mode=0o4775),
        file("p-1/sub/data", b"data", mode=0o600),
        symlink("p-1/sub/link", "../run"),
        hardlink("p-1/again", "p-1/run"),
    )
    old = os.umask(0o077)
    try:
        extract(archive, tmp_path / "t")
    finally:
        os.umask(old)

    tree = tmp_path / "t"
    assert {path.relative_to(tree).as_posix(): oct(path.lstat().st_mode & 0o7777) for path in tree.rglob("*")} == {
        "run": "0o755",
        "again": "0o755",
        "sub": "0o755",
        "sub/data": "0o644",
        "sub/link": "0o777",
    }
    assert (tree / "again").read_bytes() == b"#!"
    assert (tree / "again").stat().st_nlink == 1, "a hard link becomes a copy"
    assert (tree / "sub/link").readlink() == Path("../run")


@pytest.mark.parametrize(
    ("times", "epoch"),
    [((1_500_000_000, 1_700_000_000.9, 5), 1_700_000_000), ((0,), 315_532_800), ((-5,), 315_532_800)],
    ids=["newest", "1970", "before 1970"],
)
def test_the_epoch_is_the_newest_member_but_never_before_1980(
    tmp_path: Path, times: tuple[float, ...], epoch: int
) -> None:
    members = [file(f"p/{number}", mtime=time) for number, time in enumerate(times)]
    assert extract(write(tmp_path / "p.tar.gz", *members), tmp_path / "t").epoch == epoch


BAD_MEMBERS = {
    "parent": (file("p/../../evil"), "p/../../evil"),
    "inner parent": (file("p/a/../../evil"), "p/a/../../evil"),
    "absolute": (file("/etc/evil"), "/etc/evil"),
    "beside": (file("evil"), "evil"),
    "other top": (file("q/evil"), "q/evil"),
    "link up": (symlink("p/l", "../evil"), "p/l"),
    "link far up": (symlink("p/a/l", "../../evil"), "p/a/l"),
    "absolute link": (symlink("p/l", "/etc/passwd"), "p/l"),
    "hard link out": (hardlink("p/l", "../evil"), "p/l"),
    "hard link absolute": (hardlink("p/l", "/etc/passwd"), "p/l"),
    "hard link to nothing": (hardlink("p/l", "p/nothing"), "p/l"),
    "link to nothing": (symlink("p/l", ""), "p/l"),
    "fifo": (special("p/f", tarfile.FIFOTYPE), "p/f"),
    "character device": (special("p/f", tarfile.CHRTYPE), "p/f"),
    "block device": (special("p/f", tarfile.BLKTYPE), "p/f"),
    "twice": (file("p/ok"), "p/ok"),
    "twice, spelled differently": (file("p/./sub//ok"), "p/./sub//ok"),
    "folder over a file": (folder("p/ok"), "p/ok"),
    "file over a folder": (file("p/sub"), "p/sub"),
    "below a file": (file("p/ok/x"), "p/ok/x"),
    "own repository": (file("p/.git/config"), "p/.git/config"),
    "after 2107": (file("p/late", mtime=5e9), "p/late"),
}


@pytest.mark.parametrize(("bad", "named"), BAD_MEMBERS.values(), ids=BAD_MEMBERS)
def test_an_unsafe_member_is_named_and_nothing_is_left(
    tmp_path: Path, bad: Member, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data_filter", "FilterError"):  # Python 3.11.2, which Debian 12 has, is without them
        monkeypatch.delattr(tarfile, name, raising=False)
    archive = write(tmp_path / "p.tar.gz", file("p/ok"), file("p/sub/ok"), bad)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(SourceError) as caught:
        extract(archive, work / "t")
    assert repr(named) in caught.value.reason
    assert caught.value.where == str(archive)
    assert list(work.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"p.tar.gz", "work"}


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="one is a link that leads back to itself"):
        extract(write(tmp_path / "p.tar.gz", symlink("p/one", "two"), symlink("p/two", "one")), tmp_path / "t")


@pytest.mark.parametrize("key", ["path", "linkpath"])
def test_a_nul_character_is_refused(tmp_path: Path, key: str) -> None:
    info, data = symlink("p/l", "x")
    info.pax_headers = {key: "p/a\0b"}
    with pytest.raises(SourceError, match="NUL"):
        extract(write(tmp_path / "p.tar.gz", (info, data)), tmp_path / "t")


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    info, data = file("p/x", b"")
    info.pax_headers = {"size": "-5"}
    with pytest.raises(SourceError, match="claims a size of -5 bytes"):
        extract(write(tmp_path / "p.tar.gz", (info, data)), tmp_path / "t")


@pytest.mark.parametrize("time", ["nan", "inf", "1e400"])
def test_an_impossible_time_is_refused(tmp_path: Path, time: str) -> None:
    info, data = file("p/x")
    info.pax_headers = {"mtime": time}
    with pytest.raises(SourceError, match="impossible time"):
        extract(write(tmp_path / "p.tar.gz", (info, data)), tmp_path / "t")


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", folder("p/real"), symlink("p/l", "real"), file("p/l/x"))
    with pytest.raises(SourceError, match=r"'p/l/x': would be written through 'l', which is a link"):
        extract(archive, tmp_path / "t")


def test_links_that_lead_out_together_are_refused(tmp_path: Path) -> None:
    # Each looks harmless as text: d/e/x is the top, and "d/e/x/.." is d/e. On disk it is the folder above the tree.
    archive = write(
        tmp_path / "p.tar.gz", folder("p/d"), folder("p/d/e"), symlink("p/d/e/x", "../.."), symlink("p/y", "d/e/x/..")
    )
    with pytest.raises(SourceError):
        extract(archive, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_another_digest_names_both(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/x"))
    wrong = "0" * 64
    with pytest.raises(IntegrityError) as caught:
        extract_sdist(archive, source(archive, sha256=wrong), target=tmp_path / "t")
    assert wrong in caught.value.reason
    assert sha256_file(archive) in caught.value.reason
    assert not (tmp_path / "t").exists()


def test_too_many_bytes(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/a", bytes(600)), file("p/b", bytes(600)))
    with pytest.raises(SourceError, match=r"'p/b': it unpacks to more than 1,000 bytes"):
        extract(archive, tmp_path / "t", max_bytes=1000)


def test_too_many_members(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", *(file(f"p/{number}") for number in range(5)))
    with pytest.raises(SourceError, match="more than 4 members"):
        extract(archive, tmp_path / "t", max_members=4)


def test_a_header_bomb_is_not_read_into_memory(tmp_path: Path) -> None:
    info, data = file("p/x")
    info.pax_headers = {"comment": "A" * (64 << 20)}
    with pytest.raises(SourceError, match="4 MiB"):
        extract(write(tmp_path / "p.tar.gz", (info, data)), tmp_path / "t")


def test_zeros_without_end_are_not_unpacked(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/x"))
    with archive.open("ab") as end:
        end.write(gzip.compress(bytes(8 << 20)))
    with pytest.raises(SourceError, match="unpacks to more than"):
        extract(archive, tmp_path / "t", max_bytes=1000, max_members=10)


def plain(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "no gzip": b"PK\x03\x04 this is a zip",
    "no tar": gzip.compress(b"hello" * 1000),
    "no members": gzip.compress(bytes(10240)),
    "cut gzip": gzip.compress(plain(file("p/x", os.urandom(5000))))[:-200],
    "cut tar": gzip.compress(plain(file("p/x", bytes(5000)))[:2000]),
    "bad header in the middle": gzip.compress(
        plain(file("p/x"))[:1024] + b"\xff" * 512 + plain(file("p/y")),
    ),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_archive_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "p.tar.gz"
    archive.write_bytes(data)
    with pytest.raises(SourceError):
        extract(archive, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["p.tar.gz"]


def test_a_missing_archive(tmp_path: Path) -> None:
    present = write(tmp_path / "p.tar.gz", file("p/x"))
    with pytest.raises(SourceError, match="cannot be read"):
        extract_sdist(tmp_path / "nothing", source(present), target=tmp_path / "t")


def test_a_target_in_use_is_left_alone(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/x"))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").write_text("mine")
    with pytest.raises(WorkspaceError, match="not empty"):
        extract(archive, tmp_path / "t")
    assert (tmp_path / "t" / "mine").read_text() == "mine"


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/x"))
    (tmp_path / ".t.partial" / "tree").mkdir(parents=True)
    (tmp_path / ".t.partial" / "tree" / "stale").touch()
    extract(archive, tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.tar.gz", "t"]
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["x"]


def test_spaces_and_other_scripts_in_the_path(tmp_path: Path) -> None:
    archive = write(tmp_path / "p.tar.gz", file("p/中文 ü"))
    extract(archive, tmp_path / "ein Ordner ü" / "树")
    assert (tmp_path / "ein Ordner ü" / "树" / "中文 ü").read_bytes() == b"x"


NAMES = st.lists(st.sampled_from(["p", "a", "b", "..", ".", "", "/", ".git"]), min_size=1, max_size=5).map("/".join)
MEMBERS = st.one_of(
    NAMES.map(file),
    NAMES.map(folder),
    st.tuples(NAMES, NAMES).map(lambda pair: symlink(*pair)),
    st.tuples(NAMES, NAMES).map(lambda pair: hardlink(*pair)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=st.lists(MEMBERS, min_size=1, max_size=6))
def test_whatever_the_members_nothing_outside_changes(
    tmp_path_factory: pytest.TempPathFactory, members: list[Member]
) -> None:
    outer = tmp_path_factory.mktemp("outer")
    (outer / "in").mkdir()
    (outer / "secret").write_text("secret")
    archive = write(outer / "p.tar.gz", *members)
    before = snapshot(outer, without=outer / "in")
    target = outer / "in" / "t"
    try:
        extract(archive, target)
    except SourceError:
        assert list((outer / "in").iterdir()) == []
    else:
        root = target.resolve()
        assert all(path.resolve().is_relative_to(root) for path in target.rglob("*"))
    assert snapshot(outer, without=outer / "in") == before


def snapshot(root: Path, *, without: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
        if not path.is_relative_to(without)
    }


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        ("Name: P\nVersion: 1.0\n", True),
        ("Name: q\nVersion: 1\n", False),
        ("Name: p\nVersion: 2\n", False),
        ("Name: p\n", False),
        ("Name: p\nVersion: \x1b[2J\n", False),
        (None, False),
    ],
)
def test_a_source_distribution_must_be_the_one_it_is_called(tmp_path: Path, header: str | None, fits: bool) -> None:
    wanted = SdistSource(kind="sdist", package="p", version="1", sha256="0" * 64, why="it is only a test")
    if header is not None:
        (tmp_path / "PKG-INFO").write_text(header)
    if fits:
        require_named(tmp_path, wanted)
        return
    with pytest.raises(SourceError) as caught:
        require_named(tmp_path, wanted)
    assert "\x1b" not in str(caught.value)
