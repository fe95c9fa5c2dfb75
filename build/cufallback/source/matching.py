"""Match a recipe's pattern against a file, for a bounded time: one with nested repetitions can take for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_LIMIT = 30.0  # seconds; the slowest pattern of the recipes takes milliseconds
_SHOWN = 10
# Python's matcher can be stopped only with its process. The text goes in and the line numbers come out as JSON.
_CHILD = """\
import json, re, sys
pattern, text = json.load(sys.stdin)
lines, number, at = [], 1, 0
for match in re.finditer(pattern, text, re.MULTILINE):
    number += text.count("\\n", at, match.start())
    at = match.start()
    lines.append(number)
json.dump(lines, sys.stdout)
"""


class MatchFailure(Exception):
    """A pattern could not be matched; the text goes on from "the pattern"."""


def match_lines(pattern: str, text: str, *, limit: float = _LIMIT) -> tuple[int, ...]:
    """Return the line, from 1, on which each match of a pattern begins.

    Args:
        pattern: a valid Python regular expression; ``^`` and ``$`` match at each line.
        text: where to look.
        limit: seconds after which the search is given up.

    Raises:
        MatchFailure: it took too long, or more memory than there is.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([pattern, text]),
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise MatchFailure(f"was still being matched after {limit:g} s") from error
    except (subprocess.CalledProcessError, OSError) as error:
        raise MatchFailure("could not be matched") from error
    lines: list[int] = json.loads(done.stdout)
    return tuple(lines)


def first_lines(lines: Sequence[int]) -> str:
    """Return line numbers as text, the first ten of them."""
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(map(str, lines[:_SHOWN])) + more
