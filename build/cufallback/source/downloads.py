"""Hard-coded downloads in Dockerfiles, shell scripts and Python tools: curl, wget, ADD, git clone, urllib."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from cufallback.source import shelltext
from cufallback.source.harvested import ALL_SUBMODULES, Harvested
from cufallback.source.shelltext import ShellCommand

# Options whose value is the next word, which is then no URL to fetch.
_CURL_OPTIONS = """
    -A -F -H -T -b -c -d -e -m -o -u -w -x --cacert --connect-timeout --data --header --max-time --output --output-dir
    --proto --proxy --retry --retry-delay --retry-max-time --user
    """
_CURL_VALUES = frozenset(_CURL_OPTIONS.split())
_WGET_OPTIONS = """
    -O -P -T -a -o -t --directory-prefix --header --output-document --output-file --progress --timeout --tries
    """
_WGET_VALUES = frozenset(_WGET_OPTIONS.split())
_CLONE_OPTIONS = "-b -c -j -o --branch --config --depth --filter --jobs --origin --reference"
_CLONE_VALUES = frozenset(_CLONE_OPTIONS.split())
_URL = re.compile(r"(?:https?|ftp|git|ssh)://\S+")
_HEX = re.compile(r"[0-9a-f]{7,40}")
_PYTHON_FETCHERS = frozenset({"urlopen", "urlretrieve", "Request", "get", "download_url"})


def harvest_downloads(file: str, text: str) -> list[Harvested]:
    """Return what one Dockerfile, shell script or Python tool downloads, each request once.

    Args:
        file: path relative to the tree; ``.py`` is read as Python.
        text: its text.
    """
    found = _python(file, text) if file.endswith(".py") else _shell(file, text)
    rows: dict[tuple[str, str, str], Harvested] = {}
    for row in sorted(found, key=lambda row: row.line):
        rows.setdefault((row.kind, row.url, row.ref), row)
    return _distinct_names(list(rows.values()))


def _distinct_names(rows: Sequence[Harvested]) -> list[Harvested]:
    counts: dict[str, int] = {}
    named = []
    for row in rows:
        counts[row.name] = counts.get(row.name, 0) + 1
        named.append(row if counts[row.name] == 1 else replace(row, name=f"{row.name}#{counts[row.name]}"))
    return named


def _shell(file: str, text: str) -> Iterator[Harvested]:
    values = shelltext.variables(text)
    arguments = shelltext.parameters(text)
    functions = shelltext.functions(text)
    commands = shelltext.read_commands(text)
    clones = any(command.words[:2] == ("git", "clone") for command in commands)
    for position, command in enumerate(commands):
        program = command.words[0].rsplit("/", 1)[-1]
        if program in ("curl", "wget"):
            skipped = _CURL_VALUES if program == "curl" else _WGET_VALUES
            for word in _fetched(command.words[1:], skipped, values, arguments):
                yield _row(file, command, "download", word, values)
        elif program == "ADD":
            yield from _add(file, command, values)
        elif command.words[:2] == ("git", "clone"):
            following = (commands[index] for index in range(position + 1, len(commands)))
            yield from _clone(file, command, values, arguments, following)
        elif program in functions:
            urls = [word for word in command.words[1:] if _URL.fullmatch(shelltext.expand(word, values))]
            refs = [ref for word in command.words[1:] if _HEX.fullmatch(ref := shelltext.expand(word, values))]
            for word in urls:
                row = _row(file, command, "git-clone" if clones else "download", word, values)
                yield replace(row, ref=refs[0] if refs and clones else "")


def _fetched(
    words: Sequence[str], skipped: frozenset[str], values: dict[str, str], arguments: set[str]
) -> Iterator[str]:
    """Yield the words that name a URL, known or not, leaving out options and their values."""
    after_option = False
    for word in words:
        if after_option:
            after_option = False
        elif word.startswith("-"):
            after_option = word in skipped
        elif re.match(r"[<>0-9]*[<>]", word):
            after_option = re.fullmatch(r"[<>0-9]*[<>]+", word) is not None
        else:
            unknown = word.startswith("$") and word.strip("${}") not in arguments
            if unknown or _URL.search(shelltext.expand(word, values)):
                yield word


def _row(file: str, command: ShellCommand, kind: str, word: str, values: dict[str, str]) -> Harvested:
    url = shelltext.expand(word, values)
    return Harvested(f"{file}:{_title(word, values)}", kind, url, "", (), None, file, command.line)


def _title(word: str, values: dict[str, str]) -> str:
    """Return the last part of the URL as it is written, so that a new version number is no new name."""
    address = shelltext.unfold(word, values).split("#")[0].rstrip("/")
    return shelltext.unfold(address.rsplit("/", 1)[-1], values).removesuffix(".git")


def _add(file: str, command: ShellCommand, values: dict[str, str]) -> Iterator[Harvested]:
    digest = None
    for word in command.words[1:-1]:
        if word.startswith("--checksum=sha256:"):
            digest = shelltext.expand(word, values).removeprefix("--checksum=sha256:")
        url = shelltext.expand(word, values)
        if _URL.fullmatch(url) and not word.startswith("--"):
            row = _row(file, command, "download", word, values)
            if re.search(r"\.git(#|$)", url):
                address, _, ref = url.partition("#")
                yield replace(row, kind="git-clone", url=address, ref=ref)
            else:
                yield replace(row, sha256=digest)


def _clone(
    file: str, command: ShellCommand, values: dict[str, str], arguments: set[str], following: Iterable[ShellCommand]
) -> Iterator[Harvested]:
    words = command.words[2:]
    urls = list(_fetched(words, _CLONE_VALUES, values, arguments))
    if not urls:
        return
    ref = ""
    for option, value in pairwise(words):
        if option in ("-b", "--branch"):
            ref = shelltext.expand(value, values)
    for later in following:
        names = [word for word in later.words[2:] if not word.startswith("-")]
        if later.words[:2] == ("git", "clone"):
            break
        if later.words[:2] == ("git", "fetch") and len(names) > 1:
            ref = shelltext.expand(names[-1], values)
        if later.words[:2] == ("git", "checkout") and names:
            ref = ref if names[0] == "FETCH_HEAD" else shelltext.expand(names[0], values)
            break
    recursive = any(word in ("--recursive", "--recurse-submodules") for word in words)
    row = _row(file, command, "git-clone", urls[0], values)
    yield replace(row, ref=ref, submodules=ALL_SUBMODULES if recursive else ())


def _python(file: str, text: str) -> Iterator[Harvested]:
    try:
        yield from list(_parsed_python(file, ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Written for a newer Python than this one, or no Python: every URL in it is listed rather than none.
        for number, line in enumerate(text.splitlines(), start=1):
            for match in _URL.finditer(line.split("#", 1)[0]):
                url = match[0].rstrip("\"'),;")
                yield Harvested(f"{file}:{_title(url, {})}", "download", url, "", (), None, file, number)


def _parsed_python(file: str, tree: ast.Module) -> Iterator[Harvested]:
    assigned: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (value := _literal(node.value, {})) is not None:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, set()).add(value)
    values = {name: next(iter(found)) for name, found in assigned.items() if len(found) == 1}
    for node in ast.walk(tree):
        kind, fetched = _fetch_expression(node, values)
        if fetched is not None and _URL.match(address := _literal(fetched, values) or ""):
            yield Harvested(f"{file}:{_title(address, {})}", kind, address, "", (), None, file, fetched.lineno)


def _fetch_expression(node: ast.AST, values: dict[str, str]) -> tuple[str, ast.expr | None]:
    """Return (kind, expression of the URL) when the node fetches something."""
    if isinstance(node, ast.List) and [_literal(item, {}) for item in node.elts[:2]] == ["git", "clone"]:
        urls = [item for item in node.elts[2:] if _URL.match(_literal(item, values) or "")]
        return "git-clone", urls[0] if urls else None
    if isinstance(node, ast.Call) and node.args and _called(node) in _PYTHON_FETCHERS:
        return "download", node.args[0]
    return "", None


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _literal(node: ast.expr, values: dict[str, str]) -> str | None:
    """Return the text of a string expression; parts that only a run knows become ``${...}``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                known = _literal(part.value, values)
                parts.append(known if known is not None else f"${{{ast.unparse(part.value)}}}")
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        return "".join(parts)
    return None
