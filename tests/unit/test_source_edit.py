"""apply_rewrites: exactly as often as the recipe says, all or nothing, never outside the tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cufallback.errors import RewriteError
from cufallback.recipe import Rewrite
from cufallback.source.edit import apply_rewrites
from cufallback.store import tree_digest

WHY = "it is only a test"
TEXT = "one\ntwo\none more\nlast"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "a tree"
    folder.mkdir()
    (folder / "f.txt").write_text(TEXT)
    (folder / "g.txt").write_text("g\n")
    return folder


def rewrite(pattern: str, replacement: str, *, count: int = 1, file: str = "f.txt") -> Rewrite:
    return Rewrite(file=file, pattern=pattern, replacement=replacement, count=count, why=WHY)


def test_the_diff_applies_with_patch(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "f.txt").write_text(TEXT)
    (change,) = apply_rewrites(tree, [rewrite(r"^(?P<word>last)$", r"\g<word> line")])
    assert (change.file, change.why, change.kind, change.commit) == ("f.txt", WHY, "rewrite", None)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=change.diff, text=True, check=True)
    assert (copy / "f.txt").read_text() == (tree / "f.txt").read_text() == TEXT + " line"


def test_a_later_rewrite_sees_the_earlier_one(tree: Path) -> None:
    first, second = apply_rewrites(tree, [rewrite("^two$", "three"), rewrite("^three$", "four")])
    assert (tree / "f.txt").read_text() == TEXT.replace("two", "four")
    assert "+three" in first.diff
    assert "-three" in second.diff


@pytest.mark.parametrize(
    ("pattern", "count", "said"),
    [
        ("^zero$", 1, "matches nowhere where the recipe says once"),
        ("^one", 1, "matches 2 times, on line 1, 3, where the recipe says once"),
        ("^one", 3, "matches 2 times, on line 1, 3, where the recipe says 3 times"),
        ("^two$", 2, "matches once, on line 2, where the recipe says 2 times"),
    ],
)
def test_the_count_must_be_exact(tree: Path, pattern: str, count: int, said: str) -> None:
    before = tree_digest(tree)
    with pytest.raises(RewriteError) as caught:
        apply_rewrites(tree, [rewrite("g", "h", file="g.txt"), rewrite(pattern, "x", count=count)])
    assert said in caught.value.reason
    assert caught.value.where == "source.rewrite[1]: f.txt"
    assert caught.value.remedy
    assert tree_digest(tree) == before, "the first rewrite must not have been written"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (rewrite("two", "two"), "changes nothing"),
        (rewrite("x", "y", file="nothing.txt"), "no such file"),
        (rewrite("x", "y", file="folder"), "no such file"),
        (rewrite("x", "y", file="binary"), "no UTF-8"),
        (rewrite("x", "y", file="outside"), "out of the tree"),
        (rewrite("x", "y", file="up/secret"), "out of the tree"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.file,
)
def test_what_cannot_be_rewritten(tree: Path, tmp_path: Path, bad: Rewrite, said: str) -> None:
    (tmp_path / "secret").write_text("x")
    (tree / "folder").mkdir()
    (tree / "binary").write_bytes(b"x\xff")
    (tree / "outside").symlink_to("../secret")
    (tree / "up").symlink_to("..")
    before = tree_digest(tree)
    with pytest.raises(RewriteError, match=said):
        apply_rewrites(tree, [bad])
    assert tree_digest(tree) == before
    assert (tmp_path / "secret").read_text() == "x"


def test_a_link_inside_the_tree_stays_a_link(tree: Path) -> None:
    (tree / "link").symlink_to("f.txt")
    apply_rewrites(tree, [rewrite("two", "2", file="link")])
    assert (tree / "link").is_symlink()
    assert (tree / "f.txt").read_text() == TEXT.replace("two", "2")


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_newlines_and_mode_stay(tree: Path, mode: int) -> None:
    (tree / "f.txt").write_bytes(b"one\r\ntwo\r\n")
    (tree / "f.txt").chmod(mode)
    apply_rewrites(tree, [rewrite("two", "zwei ü")])
    assert (tree / "f.txt").read_bytes() == "one\r\nzwei ü\r\n".encode()
    assert (tree / "f.txt").stat().st_mode & 0o777 == mode
