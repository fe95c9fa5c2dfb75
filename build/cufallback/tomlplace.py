"""Where a key stands in a TOML file, for messages: its line and its path as people write it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"^\s*(\[\[?)\s*([\w.\-]+)\s*\]\]?")
_KEY = re.compile(r"^\s*([\w\-]+(?:\s*\.\s*[\w\-]+)*|\"[^\"]+\")\s*=")


def key_path(location: Sequence[str | int]) -> str:
    """Return ``source.rewrite[0].file`` for ``("source", "rewrite", 0, "file")``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def line_of(text: str, location: Sequence[str | int]) -> int:
    """Return the 1-based line of the key at ``location``, or of the nearest enclosing table.

    A line scanner, not a TOML parser: the text has already been parsed by tomllib when it is asked.
    """
    best, depth = 1, 0
    wanted = tuple(location)
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:
            if quote in line:
                quote = ""
            continue
        header = _HEADER.match(line)
        key = _KEY.match(line)
        if header:
            names = tuple(header[2].split("."))
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
            located: list[str | int] = []
            for length, name in enumerate(names, start=1):
                located.append(name)
                if names[:length] in counts:
                    located.append(counts[names[:length]])
            table = tuple(located)
            here = table
        elif key:
            here = (*table, *(part.strip().strip('"') for part in key[1].split(".")))
            rest = line[key.end() :]
            for mark in ('"""', "'''"):
                if rest.count(mark) % 2:
                    quote = mark
        else:
            continue
        if header and isinstance(here[-1], int) and wanted == here[:-1]:
            here = here[:-1]  # the array itself is asked for: its first table
        if len(here) > depth and wanted[: len(here)] == here:
            best, depth = number, len(here)
    return best
