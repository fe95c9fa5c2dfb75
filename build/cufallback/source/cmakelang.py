"""The CMake language as far as it says what is fetched: commands with their arguments, inside their if-branches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cufallback.errors import HarvestError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+)
  | (?P<comment>\#\[(?P<c>=*)\[.*?\](?P=c)\] | \#[^\n]*)
  | (?P<paren>[()])
  | \[(?P<b>=*)\[(?P<bracket>.*?)\](?P=b)\]
  | "(?P<quoted>(?:[^"\\]|\\.)*)"
  | (?P<plain>(?:[^\s()\#"\\]|\\.)(?:[^\s()\#"\\]|\\.|"(?:[^"\\]|\\.)*")*)
    """,
    re.VERBOSE | re.DOTALL,
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_REFERENCE = re.compile(r"\$(?P<env>ENV)?\{(?P<name>[\w./+-]+)\}")


@dataclass(frozen=True)
class Argument:
    """One argument: its text without quotes, and whether it was quoted."""

    text: str
    quoted: bool = False

    def __str__(self) -> str:
        return f'"{self.text}"' if self.quoted else self.text


@dataclass(frozen=True)
class Command:
    """One command invocation; ``name`` is lower case, as CMake ignores case there."""

    name: str
    arguments: tuple[Argument, ...]
    line: int

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments as text."""
        return tuple(argument.text for argument in self.arguments)


@dataclass
class Branch:
    """One branch of an if: its condition as written ("" for else) and what it contains."""

    condition: str
    body: list[Command | Choice] = field(default_factory=list)


@dataclass
class Choice:
    """An if with its branches."""

    line: int
    branches: list[Branch]

    def conditions(self) -> list[str]:
        """Return the condition of each branch, spelled out: an else branch negates those before it."""
        seen: list[str] = []
        result = []
        for branch in self.branches:
            negated = " AND ".join(f"NOT ({condition})" for condition in seen)
            result.append(" AND ".join(part for part in (negated, branch.condition) if part))
            seen.append(branch.condition)
        return result

    @property
    def exhaustive(self) -> bool:
        """Whether there is an else."""
        return self.branches[-1].condition == "" and len(self.branches) > 1


def parse_commands(text: str, *, file: str) -> list[Command]:
    """Return every command of a CMake file, in order.

    Raises:
        HarvestError: the file cannot be read as CMake, with file and line.
    """
    commands: list[Command] = []
    position = 0
    name = ""
    started = depth = 0
    line, counted = 1, 0
    arguments: list[Argument] = []
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _unreadable(text, position, file, "an unfinished string or bracket")
        position = match.end()
        if match["space"] is not None or match["comment"] is not None:
            continue
        if depth == 0:
            if match["paren"] == "(" and name:
                depth, arguments = 1, []
            elif match["plain"] is not None and _IDENTIFIER.fullmatch(match["plain"]) and not name:
                name, started = match["plain"], match.start()
            else:
                raise _unreadable(text, match.start(), file, "no command where one must be")
        elif match["paren"] is not None:
            depth += 1 if match["paren"] == "(" else -1
            if depth == 0:
                line, counted = line + text.count("\n", counted, started), started
                commands.append(Command(name.lower(), tuple(arguments), line))
                name = ""
            else:
                arguments.append(Argument(match["paren"]))
        elif match["plain"] is not None:
            arguments.append(Argument(match["plain"]))
        elif match["quoted"] is not None:
            arguments.append(Argument(_unescape(match["quoted"]), quoted=True))
        else:
            arguments.append(Argument(match["bracket"], quoted=True))
    if name or depth:
        raise _unreadable(text, started, file, f"the command {name} is not closed")
    return commands


def nest(commands: list[Command], *, file: str) -> list[Command | Choice]:
    """Arrange commands by their if-branches. Loops and functions stay as they are: their bodies are read once.

    Raises:
        HarvestError: if and endif do not match, with file and line.
    """
    root: list[Command | Choice] = []
    bodies = [root]
    choices: list[Choice] = []
    for command in commands:
        if command.name == "if":
            choice = Choice(command.line, [Branch(_condition(command))])
            bodies[-1].append(choice)
            choices.append(choice)
            if len(choices) > _MAXIMUM_DEPTH:
                raise HarvestError(
                    f"more than {_MAXIMUM_DEPTH} ifs within each other", remedy=_REMEDY, where=f"{file}:{command.line}"
                )
            bodies.append(choice.branches[0].body)
        elif command.name in ("else", "elseif", "endif"):
            if not choices:
                raise HarvestError(f"{command.name} without if", remedy=_REMEDY, where=f"{file}:{command.line}")
            bodies.pop()
            if command.name == "endif":
                choices.pop()
                continue
            if len(choices[-1].branches) == _MAXIMUM_BRANCHES:
                raise HarvestError(
                    f"more than {_MAXIMUM_BRANCHES} branches of one if", remedy=_REMEDY, where=f"{file}:{command.line}"
                )
            branch = Branch(_condition(command) if command.name == "elseif" else "")
            choices[-1].branches.append(branch)
            bodies.append(branch.body)
        else:
            bodies[-1].append(command)
    if choices:
        raise HarvestError("if without endif", remedy=_REMEDY, where=f"{file}:{choices[-1].line}")
    return root


def references(text: str) -> set[str]:
    """Return the names of the variables that ``text`` refers to with ``${NAME}``."""
    return {match["name"] for match in _REFERENCE.finditer(text) if not match["env"]}


def environment_references(text: str) -> set[str]:
    """Return the names of the environment variables that ``text`` refers to with ``$ENV{NAME}``."""
    return {match["name"] for match in _REFERENCE.finditer(text) if match["env"]}


def substitute(text: str, values: dict[str, str]) -> str:
    """Replace each ``${NAME}`` whose value is known; others stay as they are, and all where the result is too long."""

    def value(match: re.Match[str]) -> str:
        return match[0] if match["env"] else values.get(match["name"], match[0])

    if sum(len(value(match)) for match in _REFERENCE.finditer(text)) > _MAXIMUM_VALUE:
        # Only a hostile file doubles a value again and again. A fetch that needs it is then an error, as any unknown.
        return text
    return _REFERENCE.sub(value, text)


# Real files have some ten levels and branches, and values of less than a kilobyte.
_MAXIMUM_DEPTH = 50
_MAXIMUM_BRANCHES = 200
_MAXIMUM_VALUE = 16 << 10
_REMEDY = "the file is no valid CMake, or this reader is too simple for it: report it with the file"


def _condition(command: Command) -> str:
    text = " ".join(str(argument) for argument in command.arguments)
    return text.replace("( ", "(").replace(" )", ")")


def _unescape(text: str) -> str:
    return re.sub(r"\\(?:\n|(.))", lambda match: match[1] or "", text, flags=re.DOTALL) if "\\" in text else text


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _unreadable(text: str, position: int, file: str, what: str) -> HarvestError:
    return HarvestError(f"cannot be read: {what}", remedy=_REMEDY, where=f"{file}:{_line(text, position)}")
