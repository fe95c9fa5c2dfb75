"""The source lock: written and read back, compared by name, and every broken file one clear error."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cufallback.errors import HarvestError, LockError
from cufallback.progress import Silent
from cufallback.recipe import Unused
from cufallback.source.harvested import Harvested
from cufallback.source.lock import (
    SourceLock,
    compare,
    load_source_lock,
    lock_sources,
    render_source_lock,
    require_locked,
)
from cufallback.source.tree import Checkout

ID = "0123456789" * 4
OTHER = "abcdef0123" * 4
SHA = "a" * 64
WHY = "it is only a test"
TREE = Checkout("sdist", None, SHA, 1786406400, SHA)


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


PINNED = Harvested("pinned", "fetchcontent", "https://h/pinned", ID, ("cutlass", "fmt"), "PINNED_DIR", "a.cmake", 3)
TAGGED = Harvested("tagged", "fetchcontent", "https://no-such-host.invalid/t", "v1", ("*",), None, "b.cmake", 5)
VARIANT = replace(TAGGED, name="variant", when='DEVICE STREQUAL "rocm"', line=9)
CRATES = Harvested("rust/Cargo.lock", "crates", "https://h/index", "5 packages", (), None, "rust/Cargo.lock", 1, SHA)
FILE = Harvested("docker/Dockerfile:x.tgz", "download", "https://h/x-${ARCH}.tgz", "", (), None, "docker/Dockerfile", 7)


def locked(tmp_path: Path, *rows: Harvested, previous: SourceLock | None = None, unused: str = "") -> SourceLock:
    named = [Unused(name=unused, why=WHY)] if unused else []
    return lock_sources(
        rows, previous, recipe="r", checkout=TREE, unused=named, scratch=tmp_path / "scratch", progress=Silent()
    )


def with_pin(lock: SourceLock, name: str, **pin: str) -> SourceLock:
    sources = (replace(source, **pin) if source.name == name else source for source in lock.sources)
    return replace(lock, sources=tuple(sources))


def test_written_and_read_back(tmp_path: Path) -> None:
    odd = replace(FILE, name='quote " \\ \x7f\t 中', url="https://h/\u2028")
    lock = locked(tmp_path, PINNED, TAGGED, VARIANT, CRATES, FILE, odd)
    lock = with_pin(lock, TAGGED.name, commit=OTHER)
    path = tmp_path / "source.lock.toml"
    path.write_text(render_source_lock(lock), encoding="utf-8")
    assert load_source_lock(path, "r") == lock
    assert render_source_lock(load_source_lock(path, "r")) == render_source_lock(lock)


def test_nothing_to_say_about_a_fitting_lock(tmp_path: Path) -> None:
    rows = [PINNED, TAGGED, CRATES, FILE]
    lock = with_pin(locked(tmp_path, *rows), TAGGED.name, commit=OTHER)
    lock = with_pin(lock, FILE.name, sha256=SHA)
    assert compare(rows, lock, []) == ()
    require_locked(rows, lock, [])


CHANGES = {
    "url": replace(PINNED, url="https://h/fork"),
    "commit": replace(PINNED, ref=OTHER),
    "submodules": replace(PINNED, submodules=("*",)),
    "kind": replace(PINNED, kind="externalproject"),
    "a tag instead": replace(PINNED, ref="v1"),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_a_changed_request(tmp_path: Path, changed: Harvested) -> None:
    (difference,) = compare([changed], locked(tmp_path, PINNED), [])
    assert (difference.kind, difference.label, difference.asked_by) == ("changed", "pinned", "a.cmake:3")


def test_an_edited_commit_is_seen_although_upstream_pins_it(tmp_path: Path) -> None:
    edited = with_pin(locked(tmp_path, PINNED), "pinned", commit=OTHER)
    (difference,) = compare([PINNED], edited, [])
    assert difference.detail == f"commit is {ID}, locked is {OTHER}"


def test_a_changed_cargo_lock(tmp_path: Path) -> None:
    (difference,) = compare([replace(CRATES, sha256="b" * 64)], locked(tmp_path, CRATES), [])
    assert difference.kind == "changed"


def test_the_upstream_line_may_move(tmp_path: Path) -> None:
    assert compare([replace(PINNED, line=99)], locked(tmp_path, PINNED), []) == ()


def test_everything_wrong_is_listed_at_once_by_name_and_line(tmp_path: Path) -> None:
    lock = locked(tmp_path, PINNED, TAGGED, FILE, replace(PINNED, name="gone"))
    with pytest.raises(HarvestError) as caught:
        require_locked([replace(PINNED, ref=OTHER), TAGGED, FILE, replace(VARIANT, name="new")], lock, [])
    reason = caught.value.reason
    assert "in 5 sources" in reason
    assert "changed: pinned (a.cmake:3): ref is" in reason
    assert "mutable: tagged (b.cmake:5): v1 of https://no-such-host.invalid/t can change" in reason
    assert "mutable: docker/Dockerfile:x.tgz (docker/Dockerfile:7)" in reason
    assert 'unlocked: new when DEVICE STREQUAL "rocm" (b.cmake:9): asks for v1' in reason
    assert "vanished: gone (a.cmake:3)" in reason
    assert "cufallback lock --recipe r" in caught.value.remedy


def test_unused_sources_are_compared_all_the_same(tmp_path: Path) -> None:
    lock = locked(tmp_path, TAGGED, unused="*")
    unused = [Unused(name="*", why=WHY)]
    assert compare([TAGGED], SourceLock("r", (), SHA, TREE.epoch), unused)[0].kind == "unlocked"
    assert compare([replace(TAGGED, ref="v2")], lock, unused)[0].kind == "changed"
    assert compare([], lock, unused)[0].kind == "vanished"


@pytest.mark.parametrize("glob", ["*", "tag*", "*d"])
def test_unused_sources_need_no_pin(tmp_path: Path, glob: str) -> None:
    lock = locked(tmp_path, TAGGED, unused=glob)
    unused = [Unused(name=glob, why=WHY)]
    assert compare([TAGGED], lock, unused) == ()
    assert compare([TAGGED], lock, [])[0].kind == "mutable"


def test_one_variant_can_be_unused(tmp_path: Path) -> None:
    rows = [VARIANT, replace(VARIANT, when='NOT (DEVICE STREQUAL "rocm")')]
    differences = compare(rows, locked(tmp_path, *rows), [Unused(name="variant when DEVICE*", why=WHY)])
    assert [difference.label for difference in differences] == ['variant when NOT (DEVICE STREQUAL "rocm")']


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[str, str, str]:
    """(URL, commit of the annotated tag v1, head of main)."""
    path = tmp_path / "upstream"

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    path.mkdir()
    git("init", "--quiet", "--initial-branch=main")
    git("commit", "--quiet", "--allow-empty", "-m", "one")
    git("tag", "-a", "-m", "v1", "v1")
    tagged = git("rev-parse", "HEAD")
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    return f"file://{path}", tagged, git("rev-parse", "HEAD")


def test_refs_are_resolved_to_commits(tmp_path: Path, upstream: tuple[str, str, str]) -> None:
    url, tagged, head = upstream
    rows = [replace(TAGGED, url=url), replace(TAGGED, name="branch", url=url, ref="main")]
    assert [source.commit for source in locked(tmp_path, *rows).sources] == [tagged, head]


def test_a_known_pin_stays_and_a_new_request_gets_a_new_one(tmp_path: Path, upstream: tuple[str, str, str]) -> None:
    url, tagged, head = upstream
    row = replace(TAGGED, url=url)
    previous = with_pin(locked(tmp_path, row), "tagged", commit=OTHER)
    again = lock_sources(
        [row], previous, recipe="r", checkout=TREE, unused=[], scratch=tmp_path / "two", progress=Silent()
    )
    moved = lock_sources(
        [replace(row, ref="main")],
        previous,
        recipe="r",
        checkout=TREE,
        unused=[],
        scratch=tmp_path / "three",
        progress=Silent(),
    )
    assert [again.sources[0].commit, moved.sources[0].commit] == [OTHER, head]
    assert previous.sources[0].commit != tagged


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (TAGGED, "tagged: the repository cannot be fetched from"),
        (replace(TAGGED, ref="d4f41e4e93"), "has no tag or branch 'd4f41e4e93'"),
        (replace(TAGGED, ref=""), "has no tag or branch ''"),
        (replace(TAGGED, ref="v${X}"), "could not be resolved"),
    ],
)
def test_what_cannot_be_resolved_stays_empty_and_is_said(
    tmp_path: Path, upstream: tuple[str, str, str], row: Harvested, said: str
) -> None:
    heard = Heard()
    here = row if row is TAGGED else replace(row, url=upstream[0])
    lock = lock_sources([here], None, recipe="r", checkout=TREE, unused=[], scratch=tmp_path / "s", progress=heard)
    assert lock.sources[0].commit is None
    assert any(said in line for line in heard.lines)
    assert compare([here], lock, [])[0].kind == "mutable"


def test_a_dead_host_is_asked_once(tmp_path: Path) -> None:
    heard = Heard()
    rows = [TAGGED, replace(TAGGED, name="again")]
    lock_sources(rows, None, recipe="r", checkout=TREE, unused=[], scratch=tmp_path / "s", progress=heard)
    assert len(list((tmp_path / "s").iterdir())) == 1
    assert len(heard.lines) == 2


def test_unused_sources_are_not_asked_for(tmp_path: Path) -> None:
    locked(tmp_path, TAGGED, unused="*")
    assert not (tmp_path / "scratch").exists()


GOOD = f"""\
schema = 1
recipe = "r"
tree_sha256 = "{SHA}"
epoch = 1786406400

[[source]]
name = "lib"
kind = "fetchcontent"
url = "https://h/lib"
ref = "v1"
commit = "{ID}"
submodules = ["*"]
asked_by = "a.cmake:1"
"""

BAD: dict[str, tuple[str, str, str]] = {
    "no TOML": ("ref =", "ref", "not valid TOML"),
    "nested": ("schema = 1", f"x = {'[' * 5000}", "nested too deeply"),
    "long number": ("1786406400", "9" * 5000, "out of range"),
    "long hexadecimal number": ("schema = 1", f"schema = 0x{'f' * 5000}", "64 bits"),
    "schema true": ("schema = 1", "schema = true", "schema is True"),
    "byte-order mark": (GOOD, "\ufeff" + GOOD, "byte-order mark"),
    "other schema": ("schema = 1", "schema = 2", "schema is 2"),
    "other recipe": ('recipe = "r"', 'recipe = "q"', "lock of recipe 'q', not of 'r'"),
    "short tree digest": (SHA, SHA[1:], "tree_sha256 is no full sha256"),
    "no epoch": ("epoch = 1786406400\n", "", "epoch must be seconds"),
    "epoch before 1980": ("1786406400", "7", "epoch must be seconds"),
    "epoch no number": ("1786406400", "true", "epoch must be seconds"),
    "short commit": (ID, ID[:39], "is no full commit"),
    "no commit but a number": (f'"{ID}"', "7", "must be a text"),
    "missing url": ('url = "https://h/lib"\n', "", "url: is missing"),
    "unknown kind": ('"fetchcontent"', '"svn"', "must be one of"),
    "unknown key": ("ref =", "tag =", "ref: is missing"),
    "extra key": ("ref =", "tagg = 1\nref =", "unknown key"),
    "submodules no list": ('["*"]', '"*"', "must be a list"),
    "unknown top key": ("schema = 1", "schema = 1\nextra = 1", "unknown key 'extra'"),
}


@pytest.mark.parametrize(("old", "new", "said"), BAD.values(), ids=BAD)
def test_a_bad_lock_is_one_clear_error(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    path = tmp_path / "source.lock.toml"
    path.write_text(text)
    with pytest.raises(LockError) as caught:
        load_source_lock(path, "r")
    assert said in caught.value.reason
    assert str(path) in (caught.value.where or "")
    assert "cufallback lock --recipe r" in caught.value.remedy


def test_the_line_of_a_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "source.lock.toml"
    path.write_text(GOOD + GOOD[GOOD.index("[[") :].replace('"lib"', '"other"').replace(ID, "short"))
    with pytest.raises(LockError) as caught:
        load_source_lock(path, "r")
    assert caught.value.where == f"{path}:19"


def test_a_name_listed_twice(tmp_path: Path) -> None:
    path = tmp_path / "source.lock.toml"
    path.write_text(GOOD + GOOD[GOOD.index("[[") :])
    with pytest.raises(LockError, match="lib is listed twice"):
        load_source_lock(path, "r")


def test_a_missing_lock(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="no source lock"):
        load_source_lock(tmp_path / "nothing", "r")
