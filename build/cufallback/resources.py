"""Where recipes, locks, dockerfiles and the smoke suite are: a checkout's own files win over the installed ones."""

from __future__ import annotations

import os
from pathlib import Path

from cufallback.errors import RecipeError

PYTHON_CACHES = frozenset({"__pycache__"})

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """Return the folder that holds recipes/, locks/ and dockerfiles/.

    In this order: CUFALLBACK_DATA, the nearest checkout of this project at or above the current folder, the
    checkout this package is imported from, the data inside the installed wheel.

    Raises:
        RecipeError: CUFALLBACK_DATA names a folder without recipes/.
    """
    chosen = os.environ.get("CUFALLBACK_DATA")
    if chosen:
        if not (Path(chosen) / "recipes").is_dir():
            raise RecipeError(
                "CUFALLBACK_DATA names a folder without recipes/",
                remedy="unset it, or name a folder that holds recipes/ and locks/",
                where=chosen,
            )
        return Path(chosen)
    here = Path.cwd()
    for folder in (here, *here.parents, _PACKAGE.parent.parent):
        # Other projects have a recipes/ too; ours is the one beside this package's source.
        if (folder / "build/cufallback/resources.py").is_file() and (folder / "recipes").is_dir():
            return folder
    return _PACKAGE / "_data"


def recipe_files() -> dict[str, Path]:
    """Return recipe name → file of every recipe shipped."""
    return {path.stem: path for path in sorted((data_root() / "recipes").glob("*.toml"))}


def lock_folder(recipe_file: Path) -> Path:
    """Return ``../locks/<recipe>/`` of a recipe file, whether or not it exists."""
    return recipe_file.absolute().parent.parent / "locks" / recipe_file.stem


def definition_files(recipe_file: Path) -> dict[str, Path]:
    """Return the files of ``../dockerfiles/`` of a recipe file by their path in it; without it, of those shipped."""
    folder = recipe_file.absolute().parent.parent / "dockerfiles"
    if not folder.is_dir():
        folder = data_root() / "dockerfiles"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not PYTHON_CACHES & set(path.parts))
    return {path.relative_to(folder).as_posix(): path for path in files}


def probe_folder() -> Path:
    """Return the cuda-probe's project folder: beside this package in a checkout, inside it when installed."""
    beside = _PACKAGE.parent / "cuda_probe"
    return beside if (beside / "pyproject.toml").is_file() else _PACKAGE / "_data" / "cuda_probe"
