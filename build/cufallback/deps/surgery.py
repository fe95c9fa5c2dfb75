"""Requirements surgery: read upstream's requirement files, change what the recipe says, record every change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from cufallback.deps.target import Target
from cufallback.errors import LockError
from cufallback.recipe import Deps, Edit, Requirements
from cufallback.store import canonical_json, sha256_bytes

_INDEX_OPTIONS = frozenset({"--extra-index-url", "--find-links", "--index-url", "-f", "-i"})
_OPTION = re.compile(r"(?P<name>--[a-z-]+|-[a-zA-Z])[\s=]*(?P<value>.*)")
_COMMENT = re.compile(r"(?:^|\s)#.*$")


@dataclass(frozen=True)
class AppliedEdit:
    """One change to upstream's requirements; ``after`` is empty for a dropped line, ``line`` counts from 1."""

    file: str
    line: int
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class Operated:
    """What is resolved: requirement lines without comments or options, the overrides, and how they came about."""

    lines: tuple[str, ...]
    overrides: tuple[str, ...]
    edits: tuple[AppliedEdit, ...]

    @property
    def sha256(self) -> str:
        """Digest of what goes into the resolution."""
        return sha256_bytes(canonical_json({"lines": list(self.lines), "overrides": list(self.overrides)}))


@dataclass(frozen=True)
class _Line:
    file: str
    line: int
    text: str
    is_index: bool = False


def operate(tree: Path, deps: Deps, target: Target) -> dict[str, Operated]:
    """Return the operated requirements of the build and of the runtime.

    Args:
        tree: the edited source tree.
        deps: the recipe's ``[deps]``.
        target: decides markers.

    Raises:
        LockError: a file or line cannot be read, or an edit of the recipe matches no line or another line than
            it expects; with file and line.
    """
    used: set[Edit] = set()
    made = {
        which: _operate(tree, requirements, deps, target, used)
        for which, requirements in (("build", deps.build), ("runtime", deps.runtime))
    }
    for edit in deps.edit:
        if edit not in used:
            raise LockError(
                f"no requirement that holds for the target names {edit.name}",
                remedy="remove the edit from the recipe, or correct its name",
                where=f"deps.edit name = {edit.name!r}",
            )
    return made


def _operate(tree: Path, requirements: Requirements, deps: Deps, target: Target, used: set[Edit]) -> Operated:
    lines: list[str] = []
    edits: list[AppliedEdit] = []
    for file in requirements.files:
        for line in _read(tree, file, "deps.build.files or deps.runtime.files", ()):
            kept, applied = _apply(line, deps.edit, target, used)
            lines.extend([kept] if kept else [])
            edits.extend([applied] if applied else [])
    lines.extend(requirements.add)
    edits.extend(AppliedEdit("", 0, "", text, "added by the recipe") for text in requirements.add)
    overrides = tuple(override.requirement for override in deps.override)
    edits.extend(
        AppliedEdit("", 0, "", override.requirement, f"override: {override.why}") for override in deps.override
    )
    # A file that two others include is read twice.
    return Operated(tuple(dict.fromkeys(lines)), overrides, tuple(dict.fromkeys(edits)))


def _read(tree: Path, file: str, named_at: str, including: Sequence[str]) -> Iterator[_Line]:
    """Yield the requirements and options of a file and of those it includes, as pip's file format has them.

    ``named_at`` says what names the file, ``including`` holds the real paths of the files that lead to it.
    """
    try:
        path = os.path.realpath(tree / file, strict=True)
        inside = Path(path).is_relative_to(os.path.realpath(tree))
        text = Path(path).read_text(encoding="utf-8") if inside else ""
    except (OSError, ValueError) as error:
        raise LockError(
            f"the requirements file {file} cannot be read", remedy=f"correct {named_at}", where=named_at
        ) from error
    if not inside:
        raise LockError(
            f"the requirements file {file} lies outside the tree", remedy=f"correct {named_at}", where=named_at
        )
    if path in including:
        raise LockError(f"{file} includes itself", remedy="correct the tree with a rewrite", where=named_at)
    for number, words in _logical_lines(text):
        where = f"{file}:{number}"
        option = _OPTION.match(words)
        if not option:
            yield _Line(file, number, words)
        elif option["name"] in ("-r", "--requirement"):
            inner = (Path(file).parent / option["value"]).as_posix()
            yield from _read(tree, inner, where, (*including, path))
        elif option["name"] in _INDEX_OPTIONS:
            yield _Line(file, number, words, is_index=True)
        else:
            raise LockError(
                f"the option {option['name']} is not supported",
                remedy="take the line out with a rewrite; what a constraint file says belongs into deps.edit",
                where=where,
            )


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) with continuations joined and then comments removed, as pip does."""
    pending, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        first = first or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending += line[:-1]
            continue
        # pip lets a comment line end a continuation
        joined = pending + (f" {line}" if line.lstrip().startswith("#") else line)
        words = _COMMENT.sub("", joined).strip()
        if words:
            yield first, words
        pending, first = "", 0


def _apply(line: _Line, edits: Sequence[Edit], target: Target, used: set[Edit]) -> tuple[str, AppliedEdit | None]:
    """Return the requirement to keep ("" for none) and the change, if there was one."""
    where = f"{line.file}:{line.line}"
    change = AppliedEdit(line.file, line.line, line.text, "", "")
    if line.is_index:
        return "", replace(change, why="each package has exactly one index, which the recipe names")
    try:
        requirement = Requirement(line.text)
    except InvalidRequirement as error:
        raise LockError(
            f"not a PEP 508 requirement: {line.text!r}", remedy="correct the tree with a rewrite", where=where
        ) from error
    if requirement.marker is not None and not requirement.marker.evaluate(target.markers()):
        return "", replace(change, why=f"its marker does not hold for Python {target.python} on {target.platform}")
    for edit in edits:
        if canonicalize_name(requirement.name) != canonicalize_name(edit.name):
            continue
        if edit.requirement is not None and Requirement(edit.requirement) != requirement:
            raise LockError(
                f"the line is {line.text!r}, the recipe's edit expects {edit.requirement!r}",
                remedy="look at what upstream changed, then correct deps.edit in the recipe",
                where=where,
            )
        used.add(edit)
        after = str(Requirement(edit.replacement)) if edit.replacement else ""
        return after, replace(change, after=after, why=edit.why)
    if requirement.url is not None:
        raise LockError(
            f"{requirement.name} comes from a URL, not from an index",
            remedy="choose a release of it with an edit in the recipe",
            where=where,
        )
    requirement.marker = None
    return str(requirement), None
