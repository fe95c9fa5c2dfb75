"""Read TOML with one kind of fault, and say where a key stands: its line and its path as people write it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

# A string with its quotes, a comment, a bare key, or any other character. Multi-line strings end with up to two
# quotes of their own before the closing three.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[A-Za-z0-9_-]+|.', re.DOTALL
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LARGEST = 2**63  # integers of TOML are 64 bits wide; longer ones cannot even be shown by Python


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: with the reason in one short line, whatever is wrong: syntax, nesting, a number out of range.
    """
    if text.startswith("\ufeff"):
        raise ValueError("the file begins with a byte-order mark")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {printable(str(error))}") from error
    except RecursionError as error:
        raise ValueError("not valid TOML: nested too deeply") from error
    except ValueError as error:
        raise ValueError("not valid TOML: a number or date is out of range") from error
    todo: list[Any] = [data]
    while todo:
        value = todo.pop()
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise ValueError("not valid TOML: an integer does not fit in 64 bits")
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return data


def printable(text: str, limit: int = 300) -> str:
    """Return ``text`` for a message: control characters escaped, no longer than ``limit`` characters and a mark."""
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def key_path(location: Sequence[str | int]) -> str:
    """Return ``source.rewrite[0].file`` for ``("source", "rewrite", 0, "file")``; odd keys are quoted and escaped."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part if _BARE.fullmatch(part) else repr(printable(part, 80))}"
        for part in location
    ).lstrip(".")


def line_of(text: str, location: Sequence[str | int]) -> int:
    """Return the 1-based line of the key at ``location``, or of the nearest enclosing table.

    The text has already been parsed by tomllib when it is asked, so it is taken to be valid.
    """
    wanted = tuple(location)
    line, best = 1, (0, True)
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for number, brackets, names in _statements(text):
        if brackets:
            table = ()
            for name in names:
                if table in counts:
                    table = (*table, counts[table])
                table = (*table, name)
            if brackets == 2:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
        here = table if brackets else (*table, *names)
        shared = 0
        while shared < min(len(here), len(wanted)) and here[shared] == wanted[shared]:
            shared += 1
        # A key below the wanted one shows where it is, unless the wanted one has a line of its own.
        if (shared, shared == len(here)) > best:
            line, best = number, (shared, shared == len(here))
    return line


def _statements(text: str) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield line, number of opening brackets (0 for a key) and names of every table header and key."""
    number, depth = 1, 0
    start, brackets, in_value = 1, 0, False
    names: list[str] = []
    for piece in _TOKEN.findall(text):
        if in_value:
            depth += (piece in ("[", "{")) - (piece in ("]", "}"))
        elif piece[0] in "\"'":
            names.append(next(iter(tomllib.loads(f"{piece} = 0"))))
        elif piece == "[":
            brackets += 1
        elif _BARE.fullmatch(piece):
            names.append(piece)
        elif piece == "=":
            yield start, 0, tuple(names)
            in_value = True
        number += piece.count("\n")
        if piece == "\n" and depth == 0:
            if brackets:
                yield start, brackets, tuple(names)
            start, brackets, in_value = number, 0, False
            names = []
    if brackets:
        yield start, brackets, tuple(names)
