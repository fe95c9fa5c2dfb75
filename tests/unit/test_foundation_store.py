from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufallback.errors import IntegrityError, WorkspaceError
from cufallback.store import (
    Fingerprint,
    Store,
    canonical_json,
    discard,
    require_writable,
    sha256_bytes,
    sha256_file,
    tree_digest,
    tree_entries,
    workspace_errors,
    write_atomic,
    write_json,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine lets no file system be mounted")
    yield folder
    subprocess.run(["umount", folder], check=True)


# Digests and JSON


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == sha256_bytes(data) == sha(data)


def test_canonical_json_is_one_form() -> None:
    assert canonical_json({"b": [1, "ü"], "a": None}) == '{\n  "a": null,\n  "b": [\n    1,\n    "ü"\n  ]\n}\n'.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet="abü\N{LINE SEPARATOR}"), inner),
    max_leaves=12,
)


@given(json_values)
def test_canonical_json_reads_back_and_is_stable(value: object) -> None:
    once = canonical_json(value)
    assert json.loads(once) == value
    assert canonical_json(json.loads(once)) == once


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_numbers_that_json_does_not_have(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})


# Atomic writes and workspace faults


def test_a_write_replaces_whole_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new/folder/x"
    write_atomic(target, b"one")
    write_atomic(target, b"two")
    write_json(tmp_path / "x.json", {"a": 1})
    assert target.read_bytes() == b"two"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert names(tmp_path) == ["new", "new/folder", "new/folder/x", "x.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "x"
    write_atomic(target, b"old")
    with pytest.raises(TypeError):
        write_atomic(target, "text")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


@as_root
def test_a_full_disk_is_named_and_leaves_the_old_file(small_disk: Path) -> None:
    target = small_disk / "x"
    write_atomic(target, b"old")
    with pytest.raises(WorkspaceError, match="No space left on device") as caught:
        write_atomic(target, b"x" * 100_000)
    assert "run again: it resumes" in caught.value.remedy
    assert target.read_bytes() == b"old"
    assert names(small_disk) == ["x"]


@as_root
def test_a_read_only_folder_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(WorkspaceError, match="Read-only file system") as caught:
        write_atomic(small_disk / "x", b"")
    assert str(small_disk) in str(caught.value)


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file/x", tmp_path / "file/deeper/x"):
        with pytest.raises(WorkspaceError, match="a file is in its way"):
            write_atomic(target, b"")


def test_a_folder_in_the_way_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(WorkspaceError, match="a folder lies where a file must be written"):
        write_atomic(tmp_path / "folder", b"")
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
def test_faults_of_the_workspace_keep_their_text_and_place(number: int) -> None:
    with pytest.raises(WorkspaceError) as caught, workspace_errors(Path("/default")):
        raise OSError(number, "whatever", "/the/file")
    assert caught.value.reason == os.strerror(number)
    assert caught.value.where == "/the/file"


def a_long_name(folder: Path) -> Path:
    return folder / ("x" * 5000)


def a_long_path(folder: Path) -> Path:
    return folder.joinpath(*["xx"] * 1700)


def a_circle(folder: Path) -> Path:
    (folder / "circle").symlink_to("circle")
    return folder / "circle" / "x"


def a_proc_folder(_folder: Path) -> Path:
    return Path("/proc/self")


def below_a_proc_folder(_folder: Path) -> Path:
    return Path("/proc/self/x/y")


@pytest.mark.parametrize("place", [a_long_name, a_long_path, a_circle, a_proc_folder, below_a_proc_folder])
@pytest.mark.parametrize("use", [require_writable, lambda path: write_atomic(path / "file", b"")])
def test_a_folder_in_which_nothing_can_be_made_is_one_clear_error(
    tmp_path: Path, place: Callable[[Path], Path], use: Callable[[Path], None]
) -> None:
    with pytest.raises(WorkspaceError) as caught:
        use(place(tmp_path))
    assert "--work, --dist" in caught.value.remedy


def test_a_missing_file_is_no_fault_of_the_workspace_where_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), workspace_errors(tmp_path):
        (tmp_path / "gone").read_bytes()


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero"])
def test_what_is_no_regular_file_is_not_hashed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path(kind)
    with pytest.raises(WorkspaceError, match="no regular file") as caught:
        sha256_file(path)
    assert caught.value.where == str(path)


def test_discarding_never_follows_a_link(tmp_path: Path) -> None:
    make_tree(tmp_path / "kept")
    (tmp_path / "link").symlink_to("kept")
    make_tree(tmp_path / "folder")
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "file", "pipe", "gone"):
        discard(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept/a/b/file").is_file()


def test_other_faults_pass_unchanged() -> None:
    with pytest.raises(ConnectionResetError), workspace_errors(Path("x")):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


# Trees


def make_tree(root: Path) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_bytes(b"content")
    (root / "a.txt").write_bytes(b"")
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "link").symlink_to("a/b/file")
    (root / "folder-link").symlink_to("a")
    (root / "broken").symlink_to("nowhere")


def test_entries_have_git_modes_and_are_sorted_by_the_bytes_of_their_path(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "ä").write_bytes(b"")
    assert [(mode, name) for mode, name, _path in tree_entries(tmp_path)] == [
        ("100644", "a.txt"),
        ("100644", "a/b/file"),
        ("120000", "broken"),
        ("120000", "folder-link"),
        ("120000", "link"),
        ("100755", "run"),
        ("100644", "ä"),
    ]


def test_tree_digest_is_defined_by_its_lines(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "l").symlink_to("x")
    lines = f"120000 {sha(b'x')} l\n100644 {sha(b'1')} x\n"
    assert tree_digest(tmp_path) == sha(lines.encode())


def test_copies_times_and_empty_folders_do_not_count(tmp_path: Path) -> None:
    make_tree(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    os.utime(tmp_path / "two/run", (1, 1))
    (tmp_path / "two/empty").mkdir()
    (tmp_path / "two/a.txt").chmod(0o600)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_git_at_the_top_does_not_count_but_below_it_does(tmp_path: Path, kind: str) -> None:
    make_tree(tmp_path)
    before = tree_digest(tmp_path)
    if kind == "folder":
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git/HEAD").write_bytes(b"ref")
    else:
        (tmp_path / ".git").write_bytes(b"gitdir: elsewhere")
    assert tree_digest(tmp_path) == before
    (tmp_path / "a/.git").write_bytes(b"gitdir: elsewhere")
    assert tree_digest(tmp_path) != before


def edit_byte(root: Path) -> None:
    (root / "a/b/file").write_bytes(b"Content")


def edit_mode(root: Path) -> None:
    (root / "a.txt").chmod(0o755)


def edit_name(root: Path) -> None:
    (root / "a.txt").rename(root / "b.txt")


def edit_link(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("run")


def edit_more(root: Path) -> None:
    (root / "a/more").write_bytes(b"")


def edit_less(root: Path) -> None:
    (root / "broken").unlink()


def edit_kind(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").write_bytes(b"a/b/file")


EDITS = [edit_byte, edit_mode, edit_name, edit_link, edit_more, edit_less, edit_kind]


@pytest.mark.parametrize("edit", EDITS)
def test_every_change_of_a_tree_changes_digest_and_fingerprint(tmp_path: Path, edit: object) -> None:
    make_tree(tmp_path / "tree")
    before = tree_digest(tmp_path / "tree")
    fingerprint = Fingerprint.of(tmp_path / "tree")
    assert fingerprint.confirmed(tmp_path / "tree")
    edit(tmp_path / "tree")  # type: ignore[operator]
    assert tree_digest(tmp_path / "tree") != before
    assert not fingerprint.confirmed(tmp_path / "tree")


def test_a_name_that_is_not_utf8_counts_too(tmp_path: Path) -> None:
    before = tree_digest(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"")
    assert tree_digest(tmp_path) != before


def test_a_folder_that_cannot_be_read_is_an_error_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "a").chmod(0)
    monkeypatch.chdir(tmp_path)  # a relative path, because pytest's own folders are closed to other users
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(PermissionError):
            tree_digest(Path())
    finally:
        os.seteuid(user)
        (tmp_path / "a").chmod(0o755)


def test_a_missing_tree_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tree_digest(tmp_path / "gone")


# The store


def test_a_file_moves_in_once_and_appears_where_it_is_placed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "new").write_bytes(b"data")
    stored = store.add(tmp_path / "new", sha256=sha(b"data"))
    assert stored == store.path(sha(b"data")) == tmp_path / "store" / sha(b"data")[:2] / sha(b"data")
    assert not (tmp_path / "new").exists()
    assert stat.S_IMODE(stored.stat().st_mode) == 0o444
    assert store.has(sha(b"data"))
    assert not store.has(sha(b"other"))
    store.place(sha(b"data"), tmp_path / "wheelhouse/x.whl")
    assert (tmp_path / "wheelhouse/x.whl").samefile(stored)
    assert names(tmp_path / "wheelhouse") == ["x.whl"]


def test_the_same_bytes_may_come_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"data")
        store.add(tmp_path / name, sha256=sha(b"data"))
    assert len([path for path in (tmp_path / "store").rglob("*") if path.is_file()]) == 1


def test_wrong_bytes_do_not_get_in_and_stay_for_inspection(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "bad").write_bytes(b"evil")
    with pytest.raises(IntegrityError, match=sha(b"evil")) as caught:
        store.add(tmp_path / "bad", sha256=sha(b"good"))
    assert sha(b"good") in caught.value.reason
    assert caught.value.where == str(tmp_path / "bad")
    assert (tmp_path / "bad").read_bytes() == b"evil"
    assert not store.has(sha(b"good"))


def test_placing_replaces_what_is_there_and_places_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "new").write_bytes(b"data")
    store.add(tmp_path / "new", sha256=sha(b"data"))
    target = tmp_path / "out/x"
    target.parent.mkdir()
    target.write_bytes(b"old")
    for _ in range(2):
        store.place(sha(b"data"), target)
        assert target.read_bytes() == b"data"
        assert names(target.parent) == ["x"]


def test_a_damaged_stored_file_is_found_dropped_and_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "new").write_bytes(b"data")
    stored = store.add(tmp_path / "new", sha256=sha(b"data"))
    stored.chmod(0o644)
    stored.write_bytes(b"dat")
    with pytest.raises(IntegrityError, match="damaged") as caught:
        store.place(sha(b"data"), tmp_path / "x")
    assert caught.value.where == str(stored)
    assert not store.has(sha(b"data"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(IntegrityError, match="missing"):
        store.place(sha(b"data"), tmp_path / "x")


def test_a_folder_in_place_of_a_stored_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "new").write_bytes(b"data")
    stored = store.path(sha(b"data"))
    (stored / "within").mkdir(parents=True)
    for use in (
        lambda: store.has(sha(b"data")),
        lambda: store.intact(sha(b"data")),
        lambda: store.add(tmp_path / "new", sha256=sha(b"data")),
        lambda: store.place(sha(b"data"), tmp_path / "x"),
    ):
        with pytest.raises(WorkspaceError, match="a folder lies where a stored file belongs") as caught:
            use()
        assert caught.value.where == str(stored)
        assert "remove it" in caught.value.remedy
    assert (tmp_path / "new").read_bytes() == b"data"


@pytest.mark.parametrize("kind", ["pipe", "circle"])
def test_what_is_no_file_in_place_of_a_stored_file_is_replaced(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "new").write_bytes(b"data")
    stored = store.path(sha(b"data"))
    stored.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(stored)
    else:
        stored.symlink_to(stored.name)
    assert not store.intact(sha(b"data"))
    assert store.add(tmp_path / "new", sha256=sha(b"data")).read_bytes() == b"data"


def test_a_store_whose_path_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="too long"):
        Store(a_long_name(tmp_path)).has(sha(b""))


@as_root
def test_between_file_systems_files_are_copied_whole_or_not_at_all(tmp_path: Path, small_disk: Path) -> None:
    store = Store(tmp_path / "store")
    for data in (b"fits", b"x" * 200_000):
        (tmp_path / "new").write_bytes(data)
        store.add(tmp_path / "new", sha256=sha(data))
    store.place(sha(b"fits"), small_disk / "fits")
    assert (small_disk / "fits").read_bytes() == b"fits"
    with pytest.raises(WorkspaceError, match="No space left"):
        store.place(sha(b"x" * 200_000), small_disk / "large")
    assert names(small_disk) == ["fits"]


@as_root
def test_a_store_on_a_full_disk_keeps_the_file_outside_and_nothing_inside(tmp_path: Path, small_disk: Path) -> None:
    store = Store(small_disk / "store")
    (tmp_path / "new").write_bytes(b"x" * 200_000)
    with pytest.raises(WorkspaceError, match="No space left"):
        store.add(tmp_path / "new", sha256=sha(b"x" * 200_000))
    assert (tmp_path / "new").stat().st_size == 200_000
    assert not [path for path in small_disk.rglob("*") if path.is_file()]


# Fingerprints


def test_fingerprint_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    fingerprint = Fingerprint.of(path)
    assert fingerprint.sha256 == sha(b"one")
    path.touch()
    assert fingerprint.confirmed(path), "other times, same bytes"
    path.write_bytes(b"two")
    assert not fingerprint.confirmed(path)
    path.unlink()
    assert not fingerprint.confirmed(path)


def test_fingerprint_sees_a_change_whose_time_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    before = path.stat()
    fingerprint = Fingerprint.of(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not fingerprint.confirmed(path)


def test_fingerprint_hashes_only_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    fingerprint = Fingerprint.of(path)
    hashed: list[Path] = []
    monkeypatch.setattr("cufallback.store.sha256_file", lambda path: hashed.append(path) or "")
    assert fingerprint.confirmed(path)
    assert not hashed
    path.touch()
    assert not fingerprint.confirmed(path)
    assert hashed == [path]


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")

    def change_after_hashing(file: Path) -> str:
        digest = sha256_file(file)
        file.write_bytes(b"changed")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr("cufallback.store.sha256_file", change_after_hashing)
        fingerprint = Fingerprint.of(path)
    assert not fingerprint.confirmed(path)
