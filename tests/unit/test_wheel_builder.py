"""What a build is given of variables, and what is said while it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cufallback.errors import RecipeError
from cufallback.progress import Silent
from cufallback.recipe import parse_recipe
from cufallback.resources import recipe_files
from cufallback.wheel.builder import BuildRequest, _Steps, build_variables, compiler_environment
from cufallback.wheel.environment import Environment

HERE = Environment(*(Path("/none") for _ in range(5)))


def request(variables: dict[str, str], epoch: int) -> BuildRequest:
    nowhere = Path("/none")
    return BuildRequest(nowhere, HERE, nowhere, variables, epoch, 1, nowhere, nowhere)


@pytest.mark.parametrize(("epoch", "said"), [(1_754_900_000, "1754900000"), (5, "315532800")])
def test_the_epoch_is_the_locks_in_plan_and_build(epoch: int, said: str) -> None:
    variables = {"SOURCE_DATE_EPOCH": "7", "A": "b"}
    planned, built = compiler_environment(variables, epoch=epoch), build_variables(request(variables, epoch))
    assert (planned["SOURCE_DATE_EPOCH"], planned["A"]) == (said, "b")
    assert planned.items() - {("CFLAGS", ""), ("CXXFLAGS", "")} <= built.items()


def test_without_a_lock_no_epoch_is_claimed() -> None:
    assert "SOURCE_DATE_EPOCH" not in compiler_environment({"SOURCE_DATE_EPOCH": "7"})


def test_a_recipe_that_sets_the_epoch_is_refused(tmp_path: Path) -> None:
    text = recipe_files()["rehearsal"].read_text()
    path = tmp_path / "rehearsal.toml"
    path.write_text(text.replace("[wheel.environment]\n", '[wheel.environment]\nSOURCE_DATE_EPOCH = "7"\n'))
    with pytest.raises(RecipeError, match="the source lock pins"):
        parse_recipe(path)


def test_before_and_after_ninja_something_is_shown_too() -> None:
    shown: list[str] = []

    class Seen(Silent):
        @contextlib.contextmanager
        def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Callable[[float], None]]:
            shown.append(f"{title} {total}")
            yield lambda _amount: None
            shown.append("end")

    with _Steps(Seen(), "build main") as steps:
        for line in ("-- Configuring", "[1/2] Building CXX", "a warning", "[2/2] Linking", "adding 'x'", "adding 'y'"):
            steps.see(line)
    assert shown[:2] == ["build main None", "end"]
    assert shown[2:] == ["build main 2", "end", "build main: installing and packing None", "end"]
