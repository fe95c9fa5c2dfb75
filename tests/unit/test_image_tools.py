"""What stands in the way of an image, and when another run would make something else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.image_rooms import image_plan

from cufallback.errors import CufallbackError, RegistryError
from cufallback.image.engine import Engine, NoEngine
from cufallback.image.tools import ImageTools, image_hindrance

ENGINE = Engine("docker", "26.1.5", "1.7.24", "0.13.1", "v0.13")
NONE = NoEngine("no Docker engine answers", "start Docker")
DOWN = RegistryError("the registry does not answer", remedy="run again")
HERE = Path("/somewhere")


@pytest.mark.parametrize(
    ("tools", "hindrance"),
    [
        (ImageTools(ENGINE, {"base": HERE}), None),
        (ImageTools(NONE, {"base": HERE}), (NONE.why, NONE.remedy)),
        (ImageTools(NONE, {}), (NONE.why, NONE.remedy)),
        (ImageTools(ENGINE, {"base": DOWN}), (DOWN.reason, DOWN.remedy)),
        (ImageTools(ENGINE, {"first": HERE, "base": DOWN}), (DOWN.reason, DOWN.remedy)),
    ],
)
def test_what_stands_in_the_way(tools: ImageTools, hindrance: tuple[str, str] | None) -> None:
    assert image_hindrance(image_plan(), tools) == hindrance


def test_a_recipe_without_an_image_is_no_fault_of_the_machine() -> None:
    plan = image_plan()
    without = dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"image": None}))
    assert image_hindrance(without, ImageTools(NONE, {})) == ("the recipe has no [image]", "")


OTHERS: dict[str, ImageTools] = {
    "another engine": ImageTools(dataclasses.replace(ENGINE, engine="28.5.2"), {"base": HERE}),
    "another BuildKit": ImageTools(dataclasses.replace(ENGINE, buildkit="v0.16"), {"base": HERE}),
    "no engine": ImageTools(NONE, {"base": HERE}),
    "no base": ImageTools(ENGINE, {"base": DOWN}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_makes_another_image_possible_has_another_key(name: str) -> None:
    assert OTHERS[name].key() != ImageTools(ENGINE, {"base": HERE}).key()


def test_where_a_base_lies_and_the_use_of_a_cache_change_nothing() -> None:
    errors: dict[str, Path | CufallbackError] = {"base": Path("/elsewhere")}
    assert ImageTools(ENGINE, errors, use_cache=False).key() == ImageTools(ENGINE, {"base": HERE}).key()
    assert "elsewhere" not in ImageTools(ENGINE, errors).key()
