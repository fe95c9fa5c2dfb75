"""Bans: distributions that may not be in a closure, with the chain of who requires them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from cufallback.errors import PolicyError
from cufallback.recipe import Ban

_SUFFIXED = re.compile(r"-(?:cu\d+|cuda\d+x?)$")


@dataclass(frozen=True)
class Resolved:
    """A distribution of a closure; ``via`` names the distributions that require it, ``direct`` says that the
    requirements themselves name it.
    """

    name: str
    version: str
    via: tuple[str, ...] = ()
    direct: bool = False


@dataclass(frozen=True)
class Violation:
    """A banned distribution, the ban's reason, and the chain from a requirement to it."""

    name: str
    version: str
    why: str
    chain: tuple[str, ...]


@dataclass(frozen=True)
class Allowed:
    """A distribution that a ban would catch if the ban did not name it as an exception."""

    name: str
    version: str
    why: str


def violations(closure: Sequence[Resolved], bans: Sequence[Ban]) -> tuple[tuple[Violation, ...], tuple[Allowed, ...]]:
    """Hold a closure to the bans.

    Args:
        closure: the resolved distributions.
        bans: the recipe's ``[[deps.ban]]``.

    Returns:
        What is banned, and what only an exception lets pass.
    """
    by_name: dict[str, Resolved] = {canonicalize_name(item.name): item for item in closure}
    found: list[Violation] = []
    allowed: list[Allowed] = []
    for name, item in by_name.items():
        for ban in bans:
            if not _caught(name, item.version, ban):
                continue
            if name in {str(canonicalize_name(allow)) for allow in ban.allow}:
                allowed.append(Allowed(name, item.version, ban.why))
            else:
                found.append(Violation(name, item.version, ban.why, _chain(name, by_name)))
                break
    return tuple(found), tuple(allowed)


def require_allowed(closure: Sequence[Resolved], bans: Sequence[Ban], *, where: str) -> tuple[Allowed, ...]:
    """Return the exceptions in use.

    Raises:
        PolicyError: naming every banned distribution with its chain and the ban's reason.
    """
    found, allowed = violations(closure, bans)
    if found:
        lines = [f"{item.name} {item.version}: {item.why} (required by {' → '.join(item.chain)})" for item in found]
        raise PolicyError(
            "banned distributions in the closure:\n  " + "\n  ".join(lines),
            remedy="add an edit or override to the recipe that chooses another one, or an exception to the ban",
            where=where,
        )
    return allowed


def _caught(name: str, version: str, ban: Ban) -> bool:
    if not fnmatchcase(name, canonicalize_name(ban.name)):
        return False
    if ban.unsuffixed and _SUFFIXED.search(name):
        return False
    return ban.versions is None or SpecifierSet(ban.versions).contains(Version(version), prereleases=True)


def _chain(name: str, by_name: Mapping[str, Resolved]) -> tuple[str, ...]:
    """Return the shortest chain from the requirements to ``name``."""
    chains: list[tuple[str, ...]] = [(name,)]
    seen = {name}
    for chain in chains:  # grows while it is walked: breadth first
        item = by_name[chain[0]]
        if item.direct:
            return ("the requirements", *chain)
        for parent in map(canonicalize_name, item.via):
            if parent in by_name and parent not in seen:
                seen.add(parent)
                chains.append((parent, *chain))
    return (name,)
