"""What a Dockerfile takes from outside itself: every such name must be pinned.

Lines are read as BuildKit reads them (moby/buildkit, frontend/dockerfile/parser). What would make it read them
otherwise, or fetch something by itself, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from cufallback.errors import ImageError

_STAGE = re.compile(r"FROM\s+(?:--\S+\s+)*(?P<image>[^-\s]\S*)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)
_INSTRUCTION = re.compile(
    r"(?:ONBUILD\s+)?(?P<word>FROM|RUN|COPY|ADD|ARG|ENV|CMD|ENTRYPOINT|LABEL|EXPOSE|USER|WORKDIR|VOLUME|HEALTHCHECK"
    r"|SHELL|STOPSIGNAL)\s(?P<flags>(?:\s*--\S+(?=\s|$))*)",
    re.IGNORECASE,
)
_DIRECTIVE = re.compile(r"#\s*(syntax|escape)\s*=\s*(\S+)", re.IGNORECASE)
_CONTINUED = re.compile(r"(?:^|[^\\])(\\[ \t]*)$")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)")


def stages(text: str) -> tuple[str, ...]:
    """Return the names of a Dockerfile's stages in lower case, in order: the case of letters tells none apart."""
    found = (_STAGE.fullmatch(line) for _number, line in _instructions(text))
    return tuple(match["name"].lower() for match in found if match and match["name"])


def check_dockerfile(text: str, *, pinned: Collection[str], target: str, where: str) -> None:
    """Demand that a Dockerfile takes images from nowhere but ``pinned`` and has the stage ``target``.

    Args:
        text: the Dockerfile.
        pinned: names of base images and contexts that the caller provides.
        target: the stage that is exported.
        where: its path, for messages.

    Raises:
        ImageError: another image behind FROM, ``COPY --from`` or a mount; a ``syntax`` line, which would make
            BuildKit fetch its frontend by tag; ADD; RUN with a network; a here-document or anything else that is not
            read here; no such stage.
    """
    known: set[str] = set()
    for number, line in _instructions(text):
        place = f"{where}:{number}"
        _refuse_unread(line, place)
        stage = _STAGE.fullmatch(line)
        for name in [stage["image"]] if stage else _taken(line):
            if name.lower() not in known and name not in ("scratch", *pinned) and (stage or not name.isdecimal()):
                raise ImageError(
                    f"{name!r} is no stage above, no base image of the recipe and no context of this build",
                    remedy="name the base under [[image.base]] and lock it with `nox -s lock -- --images`",
                    where=place,
                )
        if not stage and _has_network(line):
            raise ImageError(
                "RUN without --network=none can fetch what no lock pins", remedy="add --network=none", where=place
            )
        if stage and stage["name"]:
            known.add(stage["name"].lower())
    names = stages(text)
    if target.lower() not in names:
        raise ImageError(f"has no stage {target!r}", remedy=f"its stages: {', '.join(names) or 'none'}", where=where)


def _refuse_unread(line: str, place: str) -> None:
    """Refuse what fetches something unpinned, and what would have to be read in a way that this module does not."""
    directive, instruction = _DIRECTIVE.match(line), _INSTRUCTION.match(line)
    reason, remedy = "", ""
    if directive and directive[1].lower() == "syntax":
        reason, remedy = f"the syntax line fetches {directive[2]}, which no lock pins", "remove it"
    elif directive:
        reason, remedy = "the escape line changes how lines go on", "remove it and end continued lines in a backslash"
    elif instruction is None or (instruction["word"].upper() == "FROM" and not _STAGE.fullmatch(line)):
        reason, remedy = "this is no instruction that is known here", "correct it"
    elif instruction["word"].upper() in ("RUN", "COPY", "ADD") and _HEREDOC.search(line):
        reason, remedy = "here-documents are not read here", "put the text into a file beside the Dockerfile"
    elif instruction["word"].upper() == "ADD":
        reason, remedy = "ADD can fetch what no lock pins, however its source is written", "use COPY"
    elif re.search(r"[\"'\\]", instruction["flags"]):
        reason, remedy = "quotes or backslashes in an option are not read here", "write the option without them"
    if reason:
        raise ImageError(reason, remedy=remedy, where=place)


def _has_network(line: str) -> bool:
    instruction = _INSTRUCTION.match(line)
    if instruction is None or instruction["word"].upper() != "RUN":
        return False
    networks = [flag for flag in instruction["flags"].split() if flag.startswith("--network")]
    return networks != ["--network=none"]


def _taken(line: str) -> Iterator[str]:
    """Yield what the options of an instruction name behind ``from=``."""
    instruction = _INSTRUCTION.match(line)
    for option in instruction["flags"].split() if instruction else ():
        name, _, value = option.partition("=")
        if name == "--from":
            yield value
        elif name == "--mount":
            fields = (field.partition("=") for field in value.split(","))
            yield from (given for key, _, given in fields if key.lower() == "from")


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each instruction, continued lines joined, and of directives at the top."""
    joined, start, at_top = "", 0, True
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        # Only a first line loses its indentation, and lines are joined with nothing between them: a word may go on.
        line = line if joined else line.lstrip()
        if line.lstrip().startswith("#") or not line.strip():
            if at_top and _DIRECTIVE.match(line):
                yield number, line
            continue
        at_top = False
        start = start or number
        continued = _CONTINUED.search(line)
        if continued:
            joined += line[: continued.start(1)]
            continue
        yield start, (joined + line).strip()
        joined, start = "", 0
    if joined:
        yield start, joined.strip()
