"""Shell scripts and Dockerfiles as far as they say what is downloaded: commands, words, simple variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_ASSIGNMENT = re.compile(
    r"""(?:^|[\s;&(])(?P<name>[A-Za-z_]\w*)=(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|(?:\$\{[^\s]*\}|[^\s;&|)"'])*)""",
    re.MULTILINE,
)
_ENV_PAIR = re.compile(r"^\s*ENV\s+(?P<name>[A-Za-z_]\w*)\s+(?P<value>[^=\s].*)$", re.MULTILINE | re.IGNORECASE)
_ARGUMENT = re.compile(r"\$(?:\{?[0-9@*#])")
_PREFIX_LIST = "run onbuild if then else elif do while until ! time sudo env exec command {"
_PREFIXES = frozenset(_PREFIX_LIST.split())
_OPERATORS = re.compile(r"[;&|()]+")
_MAX_DEPTH = 10


@dataclass(frozen=True)
class ShellCommand:
    """One simple command with its words unquoted and its variables as written."""

    words: tuple[str, ...]
    line: int


def read_commands(text: str) -> list[ShellCommand]:
    """Return the simple commands of a shell script or Dockerfile: prefixes such as RUN, sudo and if are left out."""
    commands = []
    for start, logical in _logical_lines(text):
        for words in _split(logical):
            while words and (words[0].lower() in _PREFIXES or _is_prefix(words[0])):
                words = words[1:]
            if words:
                commands.append(ShellCommand(tuple(words), _locate(text, start, words)))
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
    return set(re.findall(r"^\s*(?:function\s+)?([\w-]+)\s*\(\s*\)", text, re.MULTILINE))


def expand(text: str, values: dict[str, str], depth: int = 0) -> str:
    """Replace ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` where the value is known; the rest stays as written."""
    if depth > _MAX_DEPTH:
        return text
    out = []
    position = 0
    while (start := text.find("$", position)) >= 0:
        out.append(text[position:start])
        name, default, end = _reference(text, start)
        if name in values:
            others = {key: value for key, value in values.items() if key != name}
            out.append(expand(values[name], others, depth + 1))
        elif default is not None:
            out.append(expand(default.strip("\"'"), values, depth + 1))
        else:
            out.append(text[start:end])
        position = end
    return "".join(out) + text[position:]


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
    for end in range(start + 1, len(text)):
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
        # A string that goes on in the next line: words by blanks are good enough to see a URL in it.
        commands = [re.sub(r"[\"']", "", part).split() for part in re.split(r"&&|\|\||[;|()]", line)]
    return commands


def _is_prefix(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*=.*|--mount=.*|--network=.*|--security=.*", word, re.DOTALL) is not None


def _locate(text: str, start: int, words: list[str]) -> int:
    """Return the physical line, within the logical line that begins at ``start``, that has most of the words."""
    lines = text.splitlines()
    best, most = start, 0
    for number in range(start, len(lines) + 1):
        line = lines[number - 1]
        count = sum(word in line for word in words)
        if count > most and words[0] in line:
            best, most = number, count
        if not line.rstrip().endswith("\\") and not line.lstrip().startswith("#"):
            break
    return best
