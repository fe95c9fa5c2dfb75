"""What a Dockerfile takes from outside itself: every such name must be pinned."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from cufallback.errors import ImageError

_STAGE = re.compile(r"FROM\s+(?:--\S+\s+)*(?P<image>\S+)(?:\s+AS\s+(?P<name>\S+))?\s*", re.IGNORECASE)
_FROM_OPTION = re.compile(r"--from=(\S+)|--mount=\S*?\bfrom=([^\s,]+)")
_DIRECTIVE = re.compile(r"#\s*syntax\s*=\s*(\S+)", re.IGNORECASE)


def stages(text: str) -> tuple[str, ...]:
    """Return the names of a Dockerfile's stages, in order."""
    found = (_STAGE.fullmatch(line) for _number, line in _instructions(text))
    return tuple(match["name"] for match in found if match and match["name"])


def check_dockerfile(text: str, *, pinned: Collection[str], target: str, where: str) -> None:
    """Demand that a Dockerfile takes images from nowhere but ``pinned`` and has the stage ``target``.

    Args:
        text: the Dockerfile.
        pinned: names of base images and contexts that the caller provides.
        target: the stage that is exported.
        where: its path, for messages.

    Raises:
        ImageError: another image behind FROM, ``COPY --from`` or a mount; a ``syntax`` line, which would make
            BuildKit fetch its frontend by tag; no such stage.
    """
    known: set[str] = {"scratch", *pinned}
    for number, line in _instructions(text):
        place = f"{where}:{number}"
        directive = _DIRECTIVE.match(line)
        if directive:
            raise ImageError(
                f"the syntax line fetches {directive[1]}, which no lock pins", remedy="remove it", where=place
            )
        stage = _STAGE.fullmatch(line)
        taken = [stage["image"]] if stage else [first or second for first, second in _FROM_OPTION.findall(line)]
        for name in taken:
            if name not in known and not (name.isdigit() and not stage):
                raise ImageError(
                    f"{name!r} is no stage above, no base image of the recipe and no context of this build",
                    remedy="name the base under [[image.base]] and lock it with `nox -s lock -- --images`",
                    where=place,
                )
        if stage and stage["name"]:
            known.add(stage["name"])
    names = stages(text)
    if target not in names:
        raise ImageError(f"has no stage {target!r}", remedy=f"its stages: {', '.join(names)}", where=where)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each instruction, continued lines joined, and of directives at the top."""
    joined, start, at_top = "", 0, True
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") or not line:
            if at_top and _DIRECTIVE.match(line):
                yield number, line
            continue
        at_top = False
        start = start or number
        if line.endswith("\\"):
            joined += f"{line[:-1]} "
            continue
        yield start, joined + line
        joined, start = "", 0
    if joined:
        yield start, joined
