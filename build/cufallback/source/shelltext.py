"""Shell scripts and Dockerfiles as far as they say what is downloaded: commands, words, simple variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_ASSIGNMENT = re.compile(
    r"""(?:^|[\s;&(])(?P<name>[A-Za-z_]\w*)=(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|(?:\$\{[^\s]*\}|[^\s;&|)"'])*)""",
    re.MULTILINE,
)
_ENV_PAIR = re.compile(r"^[ \t]*ENV[ \t]+(?P<name>[A-Za-z_]\w*)\s+(?P<value>[^=\s].*)$", re.MULTILINE | re.IGNORECASE)
_ARGUMENT = re.compile(r"\$(?:\{?[0-9@*#])")
_PREFIX_LIST = "run onbuild if then else elif do while until ! time sudo env exec command {"
_PREFIXES = frozenset(_PREFIX_LIST.split())
_OPERATORS = re.compile(r"[;&|()]+")
_MAX_DEPTH = 10
# Real expansions take some ten references of some tens of characters; a hostile one doubles at each level.
_MAX_REFERENCES = 100
_MAX_REFERENCE_LENGTH = 1000
_MAX_EXPANSION = 16 << 10
# Longer ones are split by blanks: the exact way would take a time that grows with the square of a word's length.
_MAX_EXACT_LINE = 64 << 10
# What finding the line of every command in a file may cost; real files take less than a hundredth.
_MAX_LOOKING = 200_000_000


@dataclass(frozen=True)
class ShellCommand:
    """One simple command with its words unquoted and its variables as written."""

    words: tuple[str, ...]
    line: int


def read_commands(text: str) -> list[ShellCommand]:
    """Return the simple commands of a shell script or Dockerfile: prefixes such as RUN, sudo and if are left out."""
    commands = []
    lines = text.splitlines()
    budget = _MAX_LOOKING
    for start, logical in _logical_lines(text):
        for words in _split(logical) if logical.strip() else ():
            first = 0
            while first < len(words) and (words[first].lower() in _PREFIXES or _is_prefix(words[first])):
                first += 1
            if first < len(words):
                line, budget = _locate(lines, start, words[first:], budget)
                commands.append(ShellCommand(tuple(words[first:]), line))
    return commands


def variables(text: str) -> dict[str, str]:
    """Return the variables that have one value in the whole file: ARG and ENV defaults and assignments.

    A name that is given several values, or a computed one, is left out; values from the script's own arguments
    only override a default and do not count.
    """
    text = "\n".join(line for _start, line in _logical_lines(text))
    values: dict[str, set[str]] = {}
    for match in (*_ASSIGNMENT.finditer(text), *_ENV_PAIR.finditer(text)):
        value = match["value"].strip()
        if value[:1] in "\"'" and len(value) >= 2:
            value = value[1:-1]
        own = value in (f"${match['name']}", f"${{{match['name']}}}")
        if not own and not _ARGUMENT.match(value):
            values.setdefault(match["name"], set()).add(value)
    return {
        name: next(iter(found))
        for name, found in values.items()
        if len(found) == 1 and "$(" not in next(iter(found)) and "`" not in next(iter(found))
    }


def parameters(text: str) -> set[str]:
    """Return the variables that only ever take the script's or function's own arguments."""
    values: dict[str, list[str]] = {}
    for match in _ASSIGNMENT.finditer(text):
        values.setdefault(match["name"], []).append(match["value"].strip("\"'"))
    return {name for name, found in values.items() if all(_ARGUMENT.match(value) for value in found)}


def functions(text: str) -> set[str]:
    """Return the names of the functions that a shell script defines."""
    return set(re.findall(r"^[ \t]*(?:function[ \t]+)?([\w-]+)[ \t]*\([ \t]*\)", text, re.MULTILINE))


def expand(text: str, values: dict[str, str]) -> str:
    """Replace ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` where the value is known; the rest stays as written.

    So does the whole text when the result would be longer, or of more parts, than any real one.
    """
    left = _MAX_REFERENCES

    def inner(text: str, hidden: frozenset[str]) -> str:
        nonlocal left
        out = []
        position = 0
        while (start := text.find("$", position)) >= 0 and left > 0:
            left -= 1
            out.append(text[position:start])
            name, default, end = _reference(text, start)
            if name in values and name not in hidden and len(hidden) < _MAX_DEPTH:
                out.append(inner(values[name], hidden | {name}))
            elif default is not None:
                out.append(inner(default.strip("\"'"), hidden))
            else:
                out.append(text[start:end])
            position = end
        return "".join(out) + text[position:]

    expanded = inner(text, frozenset())
    return expanded if left > 0 and len(expanded) <= max(_MAX_EXPANSION, len(text)) else text


def unfold(text: str, values: dict[str, str]) -> str:
    """Follow a text that is one variable and nothing else to the text that it stands for, as that is written."""
    for _ in range(_MAX_DEPTH):
        name, default, end = _reference(text, 0)
        value = values.get(name)
        following = default if value is None or value == text else value
        if end != len(text) or following is None:
            break
        text = following.strip("\"'")
    return text


def _reference(text: str, start: int) -> tuple[str, str | None, int]:
    """Return (name, default, end) of the reference at ``start``; the name is "" when there is none."""
    plain = re.compile(r"\$([A-Za-z_]\w*)").match(text, start)
    if plain:
        return plain[1], None, plain.end()
    if not text.startswith("${", start):
        return "", None, start + 1
    depth = 0
    for end in range(start + 1, min(len(text), start + _MAX_REFERENCE_LENGTH)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            inner = re.fullmatch(r"([A-Za-z_]\w*)(?::?-(.*))?", text[start + 2 : end], re.DOTALL)
            return (inner[1], inner[2], end + 1) if inner else ("", None, end + 1)
    return "", None, start + 1


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Join continued lines; return (first line from 1, text). Comment lines vanish, inside a continuation too."""
    joined: list[tuple[int, str]] = []
    pending = ""
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        start = start or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        joined.append((start, pending + line))
        pending, start = "", 0
    if pending:
        joined.append((start, pending))
    return joined


def _split(line: str) -> list[list[str]]:
    if len(line) > _MAX_EXACT_LINE:
        return _split_roughly(line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if _OPERATORS.fullmatch(word):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        # A string that goes on in the next line.
        return _split_roughly(line)
    return commands


def _split_roughly(line: str) -> list[list[str]]:
    """Split by operators and blanks, whatever is quoted: good enough to see a URL."""
    return [re.sub(r"[\"']", "", part).split() for part in re.split(r"&&|\|\||[;|()]", line)]


def _is_prefix(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*=.*|--mount=.*|--network=.*|--security=.*", word, re.DOTALL) is not None


def _locate(lines: list[str], start: int, words: list[str], budget: int) -> tuple[int, int]:
    """Return the physical line, within the logical line from ``start``, that has most words; and the budget left."""
    best, most = start, 0
    for number in range(start, len(lines) + 1):
        line = lines[number - 1]
        budget -= len(words) * (len(line) + 50)
        if budget < 0:
            break
        count = sum(word in line for word in words)
        if count > most and words[0] in line:
            best, most = number, count
        if not line.rstrip().endswith("\\") and not line.lstrip().startswith("#"):
            break
    return best, budget
