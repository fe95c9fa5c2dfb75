from __future__ import annotations

from pathlib import Path

import pytest

import cufallback
from cufallback.errors import RecipeError
from cufallback.resources import data_root, lock_folder, recipe_files

CHECKOUT = Path(__file__).resolve().parents[2]


def make_checkout(folder: Path) -> Path:
    (folder / "build/cufallback").mkdir(parents=True)
    (folder / "build/cufallback/resources.py").write_text("")
    (folder / "recipes").mkdir()
    (folder / "recipes/mine.toml").write_text("")
    return folder


def test_this_package_comes_from_this_checkout() -> None:
    assert Path(cufallback.__file__).is_relative_to(CHECKOUT / "build")


def test_elsewhere_the_checkout_of_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_root() == CHECKOUT
    assert lock_folder(recipe_files()["rehearsal"]) == CHECKOUT / "locks/rehearsal"
    assert {"rehearsal", "kimi-k3-cu129", "kimi-k3-0.27-cu129"} <= recipe_files().keys()


def test_the_locks_of_a_recipe_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(tmp_path)
    monkeypatch.chdir(checkout)
    assert lock_folder(Path("recipes/mine.toml")) == checkout / "locks/mine"


def test_the_checkout_around_the_current_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(tmp_path / "other checkout")
    below = checkout / "docs/deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert data_root() == checkout
    assert recipe_files() == {"mine": checkout / "recipes/mine.toml"}


def test_another_project_with_recipes_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "noxfile.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert data_root() == CHECKOUT


def test_the_variable_wins_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = make_checkout(tmp_path / "chosen")
    monkeypatch.chdir(make_checkout(tmp_path / "current"))
    monkeypatch.setenv("CUFALLBACK_DATA", str(chosen))
    assert data_root() == chosen


def test_a_variable_that_names_no_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFALLBACK_DATA", str(tmp_path))
    with pytest.raises(RecipeError, match="CUFALLBACK_DATA") as caught:
        recipe_files()
    assert caught.value.where == str(tmp_path)
