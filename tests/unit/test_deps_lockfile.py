"""The dependency lock: written, read back, and refused for every way in which it is not the one it must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufallback.deps.lockfile import Lock, LockedDistribution, parse_lock, render_lock, wanted
from cufallback.errors import LockError
from cufallback.recipe import Recipe, load_recipe
from cufallback.resources import data_root

RECIPE = load_recipe("rehearsal")
COMMITTED = {which: (data_root() / f"locks/rehearsal/{which}.txt").read_text() for which in ("build", "runtime")}
TORCH = LockedDistribution("torch", "2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "a" * 64)
SMALL = LockedDistribution("a-b", "1.0", "A.b-1.0-py3-none-any.whl", "b" * 64)
TEXT = render_lock([TORCH, SMALL], recipe=RECIPE, which="build", inputs="c" * 64)


def parse(text: str, recipe: Recipe = RECIPE) -> Lock:
    return parse_lock(text, recipe, "build", where="build.txt")


def test_what_is_written_reads_back_ordered_by_name() -> None:
    assert parse(TEXT) == Lock("rehearsal", "build", "c" * 64, (SMALL, TORCH))
    assert render_lock([SMALL, TORCH], recipe=RECIPE, which="build", inputs="c" * 64) == TEXT


def test_each_file_has_the_one_index_of_its_package() -> None:
    of = {item.name: item.index_url for item in wanted(parse(TEXT), RECIPE)}
    assert of == {"a-b": None, "torch": "https://download.pytorch.org/whl/cpu"}


def line_of(start: str) -> int:
    return next(number for number, line in enumerate(TEXT.split("\n"), 1) if line.startswith(start))


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


HASH = f"    --hash=sha256:{'a' * 64}\n"


@pytest.mark.parametrize(
    ("change", "reason", "line"),
    [
        (lambda _text: "", "not a dependency lock", 1),
        (lambda _text: "torch==2.13.0\n", "not a dependency lock", 1),
        (lambda text: text.replace("\n", "\r\n"), "not a dependency lock", 1),
        (lambda text: "\ufeff" + text, "not a dependency lock", 1),
        (lambda text: text[: text.index("# python")], "the header lacks 'python'", line_of("# python")),
        (lambda text: text[: text.index("\n# A.b")], "names no distribution", 10),
        (swap("# schema: 1\n", "# schema: 2\n"), "the lock is for schema 2", 2),
        (swap("# recipe: rehearsal\n", "# recipe: other\n"), "the lock is for recipe other", 3),
        (swap("# which: build\n", "# which: runtime\n"), "the lock is for which runtime", 4),
        (swap("# python: 3.11\n", "# python: 3.12\n"), "the lock is for python 3.12", 5),
        (swap("x86_64-", "aarch64-"), "the lock is for platform aarch64", 6),
        (swap("2026-11-30", "2026-12-01"), "the lock is for exclude-newer 2026-12-01", 7),
        (swap("# inputs: sha256:c", "# inputs: sha256:d"), "edited", 9),
        (swap(HASH, ""), "torch has no sha256 hash", line_of("torch==") + 1),
        (swap(HASH, f"    --hash=md5:{'a' * 32}\n"), "torch has no sha256 hash", line_of("torch==") + 1),
        (swap("sha256:aaaa", "sha256:daaa"), "edited", 9),
        (swap("torch==2.13.0+cpu", "torch==2.13.0"), "is no wheel of torch 2.13.0", line_of("# torch")),
        (swap("torch==2.13.0+cpu", "torch>=2.13.0"), "an exact pin", line_of("torch==")),
        (swap("torch==2.13.0+cpu", "torch @ https://example.com/t.whl"), "an exact pin", line_of("torch==")),
        (swap("torch==2.13.0+cpu", "torch==https://example.com/t"), "is no wheel of torch", line_of("# torch")),
        (swap("# torch-", "# other-"), "is no wheel of torch", line_of("# torch")),
        (swap("# torch-2.13.0+cpu", "# https://example.com/torch-2.13.0+cpu"), "is no wheel", line_of("# torch")),
        (swap("# torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "# torch"), "file name", line_of("# torch")),
        (swap("# torch", "--index-url https://example.com\n# torch"), "file name", line_of("# torch")),
        (lambda text: text + text[text.index("# torch") :], "torch stands here twice", line_of("torch==") + 3),
        (lambda text: text + "\n", "edited", 9),
        (lambda text: text[:-1], "edited", 9),
    ],
)
def test_refusals_name_the_line(change: Callable[[str], str], reason: str, line: int) -> None:
    with pytest.raises(LockError, match=reason) as caught:
        parse(change(TEXT))
    assert caught.value.where == f"build.txt:{line}"
    assert "nox -s lock" in caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": RECIPE.recipe.model_copy(update={"name": "other"})},
        {"python": RECIPE.python.model_copy(update={"version": "3.12"})},
        {"python": RECIPE.python.model_copy(update={"platform": "aarch64-manylinux_2_28"})},
        {"deps": RECIPE.deps.model_copy(update={"exclude_newer": "2026-12-01T00:00:00Z"})},
    ],
)
def test_lock_does_not_pass_for_a_changed_recipe(change: dict[str, object]) -> None:
    with pytest.raises(LockError, match="the recipe says"):
        parse(TEXT, RECIPE.model_copy(update=change))


def test_version_is_compared_as_a_version() -> None:
    item = LockedDistribution("a", "1.0", "a-1.0.0-py3-none-any.whl", "d" * 64)
    assert parse(render_lock([item], recipe=RECIPE, which="build", inputs="")).distributions == (item,)


@pytest.mark.parametrize("which", ["build", "runtime"])
def test_committed_locks_are_whole(which: str) -> None:
    lock = parse_lock(COMMITTED[which], RECIPE, which, where=which)  # type: ignore[arg-type]
    assert render_lock(lock.distributions, recipe=RECIPE, which=lock.which, inputs=lock.inputs) == COMMITTED[which]


@given(data=st.data(), which=st.sampled_from(["build", "runtime"]))
def test_any_edit_of_one_character_is_refused(data: st.DataObject, which: str) -> None:
    text = COMMITTED[which]
    at = data.draw(st.integers(0, len(text) - 1), label="at")
    character = data.draw(
        st.one_of(st.characters(codec="utf-8"), st.sampled_from("0123456789abcdef \n\r#")), label="new"
    )
    kind = data.draw(st.sampled_from(["replace", "insert", "delete"]), label="kind")
    edited = {
        "replace": text[:at] + character + text[at + 1 :],
        "insert": text[:at] + character + text[at:],
        "delete": text[:at] + text[at + 1 :],
    }[kind]
    if edited != text:
        with pytest.raises(LockError) as caught:
            parse_lock(edited, RECIPE, which, where="lock")  # type: ignore[arg-type]
        assert caught.value.where is not None
        assert caught.value.where.startswith("lock:")


def test_committed_locks_name_no_host() -> None:
    for path in sorted(Path(data_root() / "locks").glob("*/*.txt")):
        if path.parent.name != "cufallback":
            assert "://" not in path.read_text()
