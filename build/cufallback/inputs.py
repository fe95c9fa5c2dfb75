"""The files that a plan is made from: a recipe and its locks, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cufallback.errors import LockError
from cufallback.plan import DEFINITION, IMAGE_LOCK, LOCK_FILES, Locks
from cufallback.recipe import Recipe
from cufallback.resources import definition_files, lock_folder

T = TypeVar("T")


def read_inputs(path: Path, recipe: Recipe) -> dict[str, bytes]:
    """Read the recipe, its locks and the files of dockerfiles/ once; a lock that is not there is left out."""
    files = {path.name: path, **{name: lock_folder(path) / name for name in LOCK_FILES}}
    if recipe.image is not None:
        files[IMAGE_LOCK] = lock_folder(path) / IMAGE_LOCK
        files |= {f"{DEFINITION}{name}": file for name, file in definition_files(path).items()}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def parse_locks(recipe: Recipe, inputs: Mapping[str, bytes], folder: Path) -> tuple[Locks, list[tuple[str, LockError]]]:
    """Return the locks, and name and fault of each that is missing or refused; the images' may be missing.

    Args:
        recipe: what they must be made for.
        inputs: their bytes by file name.
        folder: where they lie, for messages.
    """
    from cufallback.deps.lockfile import parse_lock
    from cufallback.image.lock import parse_image_lock
    from cufallback.source.lock import parse_source_lock

    refused: list[tuple[str, LockError]] = []

    def attempt(name: str, parse: Callable[[str, str], T]) -> T | None:
        where = str(folder / name)
        try:
            if name not in inputs:
                raise LockError(
                    "there is no such lock", remedy=f"run `nox -s lock -- --recipe {recipe.name}`", where=where
                )
            return parse(inputs[name].decode("utf-8", "replace"), where)
        except LockError as error:
            refused.append((name, error))
            return None

    locks = Locks(
        source=attempt("source.lock.toml", lambda text, where: parse_source_lock(text, recipe.name, where=where)),
        build=attempt("build.txt", lambda text, where: parse_lock(text, recipe, "build", where=where)),
        runtime=attempt("runtime.txt", lambda text, where: parse_lock(text, recipe, "runtime", where=where)),
        images=attempt(IMAGE_LOCK, lambda text, where: parse_image_lock(text, recipe.name, where=where))
        if IMAGE_LOCK in inputs
        else None,
    )
    return locks, refused
