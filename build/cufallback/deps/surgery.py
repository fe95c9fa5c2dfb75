"""Requirements surgery: read upstream's requirement files, change what the recipe says, record every change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from cufallback.deps.target import Target
from cufallback.errors import LockError
from cufallback.recipe import Deps, Edit, Requirements
from cufallback.store import canonical_json, sha256_bytes

_INDEX_OPTIONS = ("--extra-index-url", "--index-url", "--find-links", "-i ", "-f ", "--pre", "--prefer-binary")


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
                f"no requirement file of this tree names {edit.name}",
                remedy="remove the edit from the recipe, or correct its name",
                where=f"deps.edit name = {edit.name!r}",
            )
    return made


def _operate(tree: Path, requirements: Requirements, deps: Deps, target: Target, used: set[Edit]) -> Operated:
    lines: list[str] = []
    edits: list[AppliedEdit] = []
    for file in requirements.files:
        for line in _read(tree, file, ()):
            kept, applied = _apply(line, deps.edit, target, used)
            lines.extend([kept] if kept else [])
            edits.extend([applied] if applied else [])
    lines.extend(requirements.add)
    edits.extend(AppliedEdit("", 0, "", text, "added by the recipe") for text in requirements.add)
    overrides = tuple(override.requirement for override in deps.override)
    edits.extend(
        AppliedEdit("", 0, "", override.requirement, f"override: {override.why}") for override in deps.override
    )
    return Operated(tuple(dict.fromkeys(lines)), overrides, tuple(edits))


def _read(tree: Path, file: str, seen: Sequence[str]) -> Iterator[_Line]:
    if file in seen:
        raise LockError("the file includes itself", remedy="correct the tree", where=file)
    path = tree / file
    try:
        inside = path.resolve(strict=True).is_relative_to(tree.resolve())
        text = path.read_text(encoding="utf-8") if inside else ""
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(
            "the requirements file cannot be read", remedy="correct deps.build.files or deps.runtime.files", where=file
        ) from error
    if not inside:
        raise LockError("the requirements file lies outside the tree", remedy="correct the recipe", where=file)
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        first = first or number
        stripped = raw.split(" #")[0].strip() if not raw.lstrip().startswith("#") else ""
        pending += stripped
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        words, start = pending.strip(), first
        pending, first = "", 0
        if not words:
            continue
        option, _, rest = words.partition(" ")
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if option in ("-c", "--constraint"):
                raise LockError(
                    "constraint files are not supported", remedy="add them as edits", where=f"{file}:{start}"
                )
            inner = (Path(file).parent / rest.strip()).as_posix()
            yield from _read(tree, inner, (*seen, file))
        else:
            yield _Line(file, start, words)


def _apply(line: _Line, edits: Sequence[Edit], target: Target, used: set[Edit]) -> tuple[str, AppliedEdit | None]:
    """Return the requirement to keep ("" for none) and the change, if there was one."""
    where = f"{line.file}:{line.line}"
    change = AppliedEdit(line.file, line.line, line.text, "", "")
    if line.text.startswith("-"):
        if line.text.startswith(_INDEX_OPTIONS):
            return "", replace(change, why="each package has exactly one index, which the recipe names")
        raise LockError(
            f"option {line.text!r} is not supported", remedy="this line needs a new kind of edit", where=where
        )
    try:
        requirement = Requirement(line.text)
    except InvalidRequirement as error:
        raise LockError(
            f"not a PEP 508 requirement: {line.text!r}", remedy="correct the tree with a rewrite", where=where
        ) from error
    if requirement.marker is not None:
        if not requirement.marker.evaluate(target.markers()):
            return "", replace(change, why=f"its marker does not hold for Python {target.python} on {target.platform}")
        requirement.marker = None
    text = str(requirement)
    for edit in edits:
        if canonicalize_name(requirement.name) != canonicalize_name(edit.name):
            continue
        if edit.requirement is not None and Requirement(edit.requirement) != requirement:
            raise LockError(
                f"the line is {text!r}, the recipe's edit expects {edit.requirement!r}",
                remedy="look at what upstream changed, then correct deps.edit in the recipe",
                where=where,
            )
        used.add(edit)
        after = str(Requirement(edit.replacement)) if edit.replacement else ""
        return after, replace(change, after=after, why=edit.why)
    return text, None
