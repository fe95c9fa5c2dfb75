"""One row of the harvest: something outside the tree that the tree would fetch."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIT_KINDS = frozenset({"fetchcontent", "externalproject", "cargo-git", "git-clone"})
"""Kinds that are fetched with Git and pinned by a commit; the others are pinned by a SHA-256."""

ALL_SUBMODULES = ("*",)
"""Every submodule, recursively: what CMake does without GIT_SUBMODULES and what cargo always does."""

_FULL_ID = re.compile(r"[0-9a-f]{40}")


class Labelled:
    """What a row of the harvest and its entry in the lock have in common: how they are told apart."""

    name: str
    when: str

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the row in a lock."""
        return (self.name, self.when)

    @property
    def label(self) -> str:
        """Name and condition, for a reader and for the globs of ``[[source.unused]]``."""
        return f"{self.name} when {self.when}" if self.when else self.name


@dataclass(frozen=True)
class Harvested(Labelled):
    """A source that the tree asks for.

    Args:
        name: the name it has upstream: of the CMake project, of the cargo repository; for other downloads
            ``<file>:<what>``, so that a glob can name a whole file.
        kind: ``fetchcontent``, ``externalproject``, ``cargo-git``, ``crates``, ``git-clone`` or ``download``.
        url: where it comes from. ``${NAME}`` is left where only the build knows the value.
        ref: the tag, branch or commit upstream asks for; for ``crates`` the number of packages; else "".
        submodules: the submodules that are fetched too; ``("*",)`` is all of them.
        override: environment variable that makes the build take a local folder instead, or None.
        file: upstream file that asks for it, relative to the tree.
        line: line in ``file``, from 1.
        sha256: the digest upstream itself demands; for ``crates`` that of the Cargo.lock, which pins each by hash.
        when: the condition under which upstream takes this one; set only where a name has several variants.
        resolved: the commit that upstream's own lock file gives for ``ref``.
    """

    name: str
    kind: str
    url: str
    ref: str
    submodules: tuple[str, ...]
    override: str | None
    file: str
    line: int
    sha256: str | None = None
    when: str = ""
    resolved: str | None = None

    @property
    def commit(self) -> str | None:
        """The commit upstream pins itself, 40 hex digits, or None for a tag, a branch or a short id."""
        if self.resolved is not None:
            return self.resolved
        return self.ref if _FULL_ID.fullmatch(self.ref) else None

    @property
    def mutable(self) -> bool:
        """Whether the same request may fetch other bytes tomorrow: no full commit id, or no hash for a download."""
        return self.commit is None if self.kind in GIT_KINDS else self.sha256 is None

    @property
    def asked_by(self) -> str:
        """``file:line`` of the upstream line that asks for it."""
        return f"{self.file}:{self.line}"
