"""What CMake files fetch: FetchContent, ExternalProject and file(DOWNLOAD), with variables resolved per branch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cufallback.errors import HarvestError
from cufallback.source import cmakelang as lang
from cufallback.source.cmakelang import Choice, Command
from cufallback.source.harvested import ALL_SUBMODULES, Harvested

_FETCHING = {
    "fetchcontent_declare": "fetchcontent",
    "fetchcontent_populate": "fetchcontent",
    "externalproject_add": "externalproject",
}
_PLAIN = re.compile(
    r"\b(FetchContent_Declare|FetchContent_Populate|ExternalProject_Add|CPMAddPackage|CPMFindPackage)\s*\(",
    re.IGNORECASE,
)
_BRACKET_COMMENT = re.compile(r"#\[(=*)\[.*?\]\1\]", re.DOTALL)
# Keywords of ExternalProject_Add and FetchContent_Declare (CMake 3.31 reference): each ends the values of the one
# before it.
_KEYWORD_LIST = """
    BINARY_DIR BUILD_ALWAYS BUILD_BYPRODUCTS BUILD_COMMAND BUILD_IN_SOURCE BUILD_JOB_SERVER_AWARE CMAKE_ARGS
    CMAKE_CACHE_ARGS CMAKE_CACHE_DEFAULT_ARGS CMAKE_COMMAND CMAKE_GENERATOR CMAKE_GENERATOR_INSTANCE
    CMAKE_GENERATOR_PLATFORM CMAKE_GENERATOR_TOOLSET COMMAND COMMENT CONFIGURE_COMMAND CONFIGURE_HANDLED_BY_BUILD
    CVS_MODULE CVS_REPOSITORY CVS_TAG DEPENDS DOWNLOAD_COMMAND DOWNLOAD_DIR DOWNLOAD_EXTRACT_TIMESTAMP DOWNLOAD_NAME
    DOWNLOAD_NO_EXTRACT DOWNLOAD_NO_PROGRESS EXCLUDE_FROM_ALL FIND_PACKAGE_ARGS GIT_CONFIG GIT_PROGRESS
    GIT_REMOTE_NAME GIT_REMOTE_UPDATE_STRATEGY GIT_REPOSITORY GIT_SHALLOW GIT_SUBMODULES GIT_SUBMODULES_RECURSE
    GIT_TAG HG_REPOSITORY HG_TAG HTTP_HEADER HTTP_PASSWORD HTTP_USERNAME INACTIVITY_TIMEOUT INSTALL_BYPRODUCTS
    INSTALL_COMMAND INSTALL_DIR INSTALL_JOB_SERVER_AWARE LIST_SEPARATOR LOG_BUILD LOG_CONFIGURE LOG_DIR LOG_DOWNLOAD
    LOG_INSTALL LOG_MERGED_STDOUTERR LOG_OUTPUT_ON_FAILURE LOG_PATCH LOG_TEST LOG_UPDATE NETRC NETRC_FILE
    OVERRIDE_FIND_PACKAGE PATCH_COMMAND PREFIX QUIET SOURCE_DIR SOURCE_SUBDIR STAMP_DIR STEP_TARGETS SUBBUILD_DIR
    SVN_PASSWORD SVN_REPOSITORY SVN_REVISION SVN_TRUST_CERT SVN_USERNAME SYSTEM TEST_AFTER_INSTALL
    TEST_BEFORE_INSTALL TEST_COMMAND TEST_EXCLUDE_FROM_MAIN TIMEOUT TLS_CAINFO TLS_VERIFY TLS_VERSION TMP_DIR
    UPDATE_COMMAND UPDATE_DISCONNECTED URL URL_HASH URL_MD5 USES_TERMINAL_BUILD USES_TERMINAL_CONFIGURE
    USES_TERMINAL_DOWNLOAD USES_TERMINAL_INSTALL USES_TERMINAL_PATCH USES_TERMINAL_TEST USES_TERMINAL_UPDATE
    """
_KEYWORDS = frozenset(_KEYWORD_LIST.split())
_DECIDING = ("GIT_REPOSITORY", "GIT_TAG", "GIT_SUBMODULES", "URL", "URL_HASH")
_OTHER_DOWNLOADS = ("SVN_REPOSITORY", "HG_REPOSITORY", "CVS_REPOSITORY", "DOWNLOAD_COMMAND")
# Real files come to a handful of combinations of values; each if that changes another variable doubles them.
_MAXIMUM_WORLDS = 500
# Commands that write into a variable named as a plain argument: after them its value is not known here.
_COMPUTING_LIST = """
    string list math file get_filename_component cmake_path execute_process foreach unset option separate_arguments
    cmake_parse_arguments find_program find_path find_file find_library find_package function macro
    """
_COMPUTING = frozenset(_COMPUTING_LIST.split())


@dataclass(frozen=True)
class _World:
    """One way to arrive at a line: the values of the variables that matter, and the conditions that led there."""

    values: tuple[tuple[str, str], ...] = ()
    conditions: tuple[str, ...] = ()

    def with_value(self, name: str, value: str) -> _World:
        kept = dict(self.values)
        kept[name] = value
        return replace(self, values=tuple(sorted(kept.items())))


@dataclass(frozen=True)
class _Row:
    harvested: Harvested
    conditions: tuple[str, ...]


def harvest_cmake(texts: Iterable[tuple[str, str]]) -> list[Harvested]:
    """Return what the given CMake files fetch.

    Every FetchContent_Declare, FetchContent_Populate and ExternalProject_Add that plain text shows must have been
    read as a command. A variable is resolved from the ``set`` commands of the same file; where branches give it
    different values, each value becomes a row of its own, with the condition in ``when``.

    Args:
        texts: (path relative to the tree, text) of each file.

    Raises:
        HarvestError: a file cannot be read, or a fetch in it cannot be understood, with file and line.
    """
    rows = [row for file, text in texts for row in _File(file, text).rows()]
    by_name: dict[str, dict[Harvested, _Row]] = {}
    for row in rows:
        request = replace(row.harvested, file="", line=0, override=None)
        by_name.setdefault(row.harvested.name, {}).setdefault(request, row)
    return [harvested for variants in by_name.values() for harvested in _told_apart(list(variants.values()))]


def _told_apart(variants: list[_Row]) -> list[Harvested]:
    """Give each variant of a name the conditions that the variants do not share."""
    if len(variants) == 1:
        return [variants[0].harvested]
    shared = set.intersection(*(set(row.conditions) for row in variants))
    named = []
    for row in variants:
        own = [condition for condition in row.conditions if condition not in shared]
        named.append(replace(row.harvested, when=" AND ".join(own) or f"in {row.harvested.asked_by}"))
    if len({row.key for row in named}) < len(named):
        named = [replace(row, when=f"{row.when}, in {row.asked_by}") for row in named]
    return named


class _File:
    """One CMake file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.commands = lang.parse_commands(text, file=file)
        self._relevant = self._relevant_variables()
        self._from_environment = self._environment_variables()
        self._rows: list[_Row] = []

    def rows(self) -> list[_Row]:
        """Return what the file fetches."""
        self._require_all_read()
        if any(command.name in _FETCHING or _is_download(command) for command in self.commands):
            self._run(lang.nest(self.commands, file=self.file), [_World()], ())
        return self._rows

    def _require_all_read(self) -> None:
        """Count by plain text what must be read, apart from the parser, and compare."""
        read = sorted(command.line for command in self.commands if command.name in _FETCHING)
        text = _BRACKET_COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), self.text)
        for number, line in enumerate(text.split("\n"), start=1):
            for match in _PLAIN.finditer(line.split("#", 1)[0]):
                if number not in read:
                    raise self._error(number, f"{match[1]} stands here, but not as a command that can be read")
                read.remove(number)

    def _relevant_variables(self) -> set[str]:
        """Return the variables that decide what is fetched, directly or through other variables."""
        wanted: set[str] = set()
        for command in self.commands:
            if command.name in _FETCHING:
                keywords = _keywords(command)
                texts = [*command.words[:1], *(word for key in _DECIDING for word in keywords.get(key, ()))]
                wanted |= {name for text in texts for name in lang.references(text)}
            elif _is_download(command):
                wanted |= {name for text in command.words for name in lang.references(text)}
        used: dict[str, set[str]] = {}
        for command in self.commands:
            if command.name == "set" and command.words:
                used.setdefault(command.words[0], set()).update(*map(lang.references, command.words[1:]))
        pending = list(wanted)
        while pending:
            more = used.get(pending.pop(), set()) - wanted
            wanted |= more
            pending += more
        return wanted

    def _environment_variables(self) -> dict[str, str]:
        """Return variable → environment variable for ``set(X $ENV{Y})``."""
        found: dict[str, str] = {}
        for command in self.commands:
            if command.name == "set" and len(command.words) >= 2:
                for name in lang.environment_references(command.words[1]):
                    found.setdefault(command.words[0], name)
        return found

    def _run(self, body: list[Command | Choice], worlds: list[_World], enclosing: tuple[str, ...]) -> list[_World]:
        for item in body:
            if isinstance(item, Choice):
                worlds = self._choose(item, worlds, enclosing)
            elif item.name == "set" and item.words and item.words[0] in self._relevant:
                worlds = _merged([self._assign(item, world) for world in worlds])
            elif item.name in _FETCHING or _is_download(item):
                for world in worlds:
                    self._fetch(item, world, enclosing)
            elif item.name in _COMPUTING:
                for name in self._relevant.intersection(item.words):
                    worlds = [world.with_value(name, f"${{{name}}}") for world in worlds]
        return worlds

    def _choose(self, choice: Choice, worlds: list[_World], enclosing: tuple[str, ...]) -> list[_World]:
        conditions = choice.conditions()
        after: list[_World] = []
        for world in worlds:
            ends: list[_World] = []
            for branch, condition in zip(choice.branches, conditions, strict=True):
                if _contradicts(condition, world.conditions):
                    continue
                for end in self._run(branch.body, [world], (*enclosing, condition)):
                    ends.append(replace(end, conditions=(*end.conditions, condition)))
            if not choice.exhaustive:
                negated = " AND ".join(f"NOT ({branch.condition})" for branch in choice.branches)
                if not _contradicts(negated, world.conditions):
                    ends.append(replace(world, conditions=(*world.conditions, negated)))
            after += _upstreams_own(choice, ends) or [world]
        worlds = _merged(after)
        if len(worlds) > _MAXIMUM_WORLDS:
            raise self._error(choice.line, f"branches combine to more than {_MAXIMUM_WORLDS} sets of values")
        return worlds

    def _assign(self, command: Command, world: _World) -> _World:
        name, *words = command.words
        for mark in ("CACHE", "PARENT_SCOPE"):
            if mark in words:
                words = words[: words.index(mark)]
        value = lang.substitute(";".join(words), dict(world.values))
        return world.with_value(name, value)

    def _fetch(self, command: Command, world: _World, enclosing: tuple[str, ...]) -> None:
        values = dict(world.values)
        row = self._download(command, values) if _is_download(command) else self._project(command, values, enclosing)
        if row is not None:
            self._rows.append(_Row(row, (*enclosing, *world.conditions)))

    def _project(self, command: Command, values: dict[str, str], enclosing: tuple[str, ...]) -> Harvested | None:
        if not command.words:
            raise self._error(command.line, f"{command.name} without a name")
        name = self._resolve(command.words[0], values, command, "name")
        keywords = _keywords(command)
        base = Harvested(name, _FETCHING[command.name], "", "", (), self._override(enclosing), self.file, command.line)
        if "GIT_REPOSITORY" in keywords:
            url = self._one(keywords, "GIT_REPOSITORY", values, command)
            ref = self._one(keywords, "GIT_TAG", values, command) if "GIT_TAG" in keywords else ""
            submodules = tuple(
                part
                for word in keywords.get("GIT_SUBMODULES", ALL_SUBMODULES)
                for part in self._resolve(word, values, command, "GIT_SUBMODULES").split(";")
                if part
            )
            return replace(base, url=url, ref=ref, submodules=submodules)
        if "URL" in keywords:
            url = self._one(keywords, "URL", values, command)
            hashed = self._one(keywords, "URL_HASH", values, command) if "URL_HASH" in keywords else ""
            return replace(base, kind="download", url=url, sha256=_sha256(hashed))
        for key in _OTHER_DOWNLOADS:
            if any(keywords.get(key, ())):
                raise self._error(command.line, f"{name} is fetched by {key}, which cannot be pinned")
        if "SOURCE_DIR" in keywords or (command.name == "fetchcontent_populate" and len(command.words) == 1):
            return None
        raise self._error(command.line, f"{name} names no repository, URL or folder to come from")

    def _download(self, command: Command, values: dict[str, str]) -> Harvested:
        url = self._resolve(command.words[1], values, command, "URL")
        hashed = ""
        for key, value in zip(command.words, command.words[1:], strict=False):
            if key == "EXPECTED_HASH":
                hashed = self._resolve(value, values, command, key)
        name = f"{self.file}:{url.rstrip('/').rsplit('/', 1)[-1]}"
        return Harvested(name, "download", url, "", (), None, self.file, command.line, _sha256(hashed))

    def _override(self, enclosing: tuple[str, ...]) -> str | None:
        """Return the environment variable whose absence led here: the nearest ``else`` of a test for it."""
        for condition in reversed(enclosing):
            if not condition.startswith("NOT ("):
                continue
            for word in re.findall(r"ENV\{([\w.-]+)\}|([\w.-]+)", condition):
                variable = word[0] or self._from_environment.get(word[1])
                if variable:
                    return variable
        return None

    def _one(self, keywords: dict[str, list[str]], key: str, values: dict[str, str], command: Command) -> str:
        words = keywords[key]
        if len(words) != 1:
            raise self._error(command.line, f"{key} has {len(words)} values")
        return self._resolve(words[0], values, command, key)

    def _resolve(self, text: str, values: dict[str, str], command: Command, key: str) -> str:
        resolved = lang.substitute(text, values)
        if "${" in resolved or "$ENV{" in resolved:
            raise self._error(command.line, f"the value of {key} is not known from this file: {resolved}")
        return resolved

    def _error(self, line: int, reason: str) -> HarvestError:
        return HarvestError(
            reason,
            remedy="look at that line: what it fetches must be known before the build may run without network",
            where=f"{self.file}:{line}",
        )


def _merged(worlds: list[_World]) -> list[_World]:
    """Make one world of those that agree on every variable that matters, under the conditions that they share."""
    merged: dict[tuple[tuple[str, str], ...], _World] = {}
    for world in worlds:
        other = merged.get(world.values, world)
        shared = tuple(condition for condition in other.conditions if condition in world.conditions)
        merged[world.values] = replace(world, conditions=shared)
    return list(merged.values())


def _upstreams_own(choice: Choice, ends: list[_World]) -> list[_World]:
    """Leave out the ends where the user sets a variable from outside, when another end has upstream's default."""
    names = {name for end in ends for name, _value in end.values}
    asked = {word for branch in choice.branches for word in re.findall(r"[\w.-]+", branch.condition)}

    def from_outside(end: _World) -> bool:
        values = dict(end.values)
        taken = any(lang.environment_references(value) for value in values.values())
        return taken or bool(asked & (names - values.keys()))

    return [end for end in ends if not from_outside(end)] or ends


def _contradicts(condition: str, others: tuple[str, ...]) -> bool:
    """Say whether a condition is the plain opposite of one that led here: the same test asked twice."""
    return f"NOT ({condition})" in others or any(condition == f"NOT ({other})" for other in others)


def _is_download(command: Command) -> bool:
    return command.name == "file" and len(command.words) >= 2 and command.words[0] == "DOWNLOAD"


def _keywords(command: Command) -> dict[str, list[str]]:
    """Return keyword → values of a project declaration."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in command.arguments[1:]:
        if argument.text in _KEYWORDS and not argument.quoted:
            values = found.setdefault(argument.text, [])
        else:
            values.append(argument.text)
    return found


def _sha256(hashed: str) -> str | None:
    algorithm, _, digest = hashed.partition("=")
    return digest.lower() if algorithm.upper() == "SHA256" else None
