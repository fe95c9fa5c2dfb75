"""Where recipes, locks, dockerfiles and the smoke suite are: a checkout's own files win over the installed ones."""

from __future__ import annotations

import os
from pathlib import Path

PYTHON_CACHES = frozenset({"__pycache__"})

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """Return the folder that holds recipes/, locks/ and dockerfiles/.

    In this order: CUFALLBACK_DATA, the nearest folder at or above the current one that has ``recipes/`` and
    ``noxfile.py`` (a checkout), the checkout this package is imported from, the data inside the installed wheel.
    """
    chosen = os.environ.get("CUFALLBACK_DATA")
    if chosen:
        return Path(chosen)
    here = Path.cwd()
    for folder in (here, *here.parents, _PACKAGE.parent.parent):
        if (folder / "noxfile.py").is_file() and (folder / "recipes").is_dir():
            return folder
    return _PACKAGE / "_data"


def recipe_files() -> dict[str, Path]:
    """Return recipe name → file of every recipe shipped."""
    return {path.stem: path for path in sorted((data_root() / "recipes").glob("*.toml"))}


def lock_folder(recipe: str) -> Path:
    """Return ``locks/<recipe>/``, whether or not it exists."""
    return data_root() / "locks" / recipe


def probe_folder() -> Path:
    """Return the cuda-probe's project folder: beside this package in a checkout, inside it when installed."""
    beside = _PACKAGE.parent / "cuda_probe"
    return beside if (beside / "pyproject.toml").is_file() else _PACKAGE / "_data" / "cuda_probe"
