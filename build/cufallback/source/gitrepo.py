"""Git through GitPython, in throw-away repositories: no hooks, no filters, no prompts, no secrets in messages."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cufallback.errors import SourceError, WorkspaceError
from cufallback.redact import redact

MINIMUM_GIT = "2.32"
"""The first whose `git apply` takes --3way and --cached at once (Git's release notes, 2.32), the newest thing used of
it here; `git fetch --no-write-fetch-head` came with 2.29."""

FULL_ID = re.compile(r"[0-9a-f]{40}")

# What the user's own Git configuration may not change: bytes, hooks, background work. Credentials, proxies and
# insteadOf rules are theirs to set and stay.
_CONFIG = """\
[core]
\tbare = false
\tautocrlf = false
\teol = lf
\tfileMode = true
\tsymlinks = true
\tattributesFile = /dev/null
\thooksPath = /dev/null
\tfsmonitor = false
[filter "lfs"]
\tsmudge =
\tprocess =
\trequired = false
[fetch]
\trecurseSubmodules = false
\twriteCommitGraph = false
[submodule]
\trecurse = false
[gc]
\tauto = 0
[maintenance]
\tauto = false
"""

_REFUSED = re.compile(
    r"not our ref|unadvertised object|does not allow request|does not support shallow|"
    r"couldn't find remote ref|no such remote ref"
)
_MISSING = re.compile(r"does not (appear to be|exist)|not found|no such file", re.IGNORECASE)
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_DENIED = re.compile(r"authentication failed|could not read username|permission denied|access denied", re.IGNORECASE)


class GitFailure(Exception):
    """A git command failed. Callers turn it into an error that says what that means."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class Ref:
    """What a name means on a server: its kind (``tag`` or ``branch``) and the commit it leads to, tags peeled."""

    name: str
    kind: str
    commit: str


class Repository:
    """A repository in ``folder`` that serves one task and is then removed with its parent folder.

    Args:
        folder: Git directory to create.
        tree: working tree; it never holds a ``.git``.
        url: where fetches go. It stands in the repository's configuration, not on command lines, which other users
            of the machine can read.
    """

    def __init__(self, folder: Path, *, tree: Path, url: str | None = None) -> None:
        self._git = _gitpython()
        self.url = url
        self._where = redact(url) if url else str(tree)
        folder.mkdir(parents=True)
        self._client = self._git.Git(str(tree))
        self._environment = {
            "GIT_DIR": str(folder),
            "GIT_WORK_TREE": str(tree),
            "GIT_INDEX_FILE": str(folder / "index"),
            "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": "",
            "GIT_ALLOW_PROTOCOL": "https:ssh:file",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_TERMINAL_PROMPT": "0",
            # A server that sends less than 1 kB/s for a minute is taken for dead.
            "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
            "GIT_HTTP_LOW_SPEED_TIME": "60",
            "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=30"),
        }
        self.run("init", "--quiet", "--template=")
        remote = f'[remote "origin"]\n\turl = "{_quoted(url)}"\n' if url else ""
        config = folder / "config"
        config.write_text(config.read_text(encoding="utf-8") + _CONFIG + remote, encoding="utf-8")

    def run(self, *arguments: str) -> str:
        """Run git and return its output without the final newline.

        Raises:
            GitFailure: it exits with another status than 0; the message is redacted.
            SourceError: there is no git on this machine.
            WorkspaceError: the disk is full.
        """
        try:
            return str(self._client.execute(["git", *arguments], env=self._environment))
        except self._git.GitCommandNotFound as error:
            raise _no_git() from error
        except self._git.GitCommandError as error:
            message = _message(error.stderr)
            if _FULL.search(message):
                raise WorkspaceError(
                    message, remedy="free disk space or choose another work folder (--work), then run again"
                ) from None
            # Not "from error": GitPython's exception holds git's words before redaction.
            raise GitFailure(message) from None

    def succeeds(self, *arguments: str) -> bool:
        """Say whether git exits with 0."""
        try:
            self.run(*arguments)
        except GitFailure:
            return False
        return True

    def has_commit(self, commit: str) -> bool:
        """Say whether the object of that id is here and is a commit."""
        return self.succeeds("cat-file", "-e", f"{commit}^{{commit}}")

    def fetch(self, commit: str, *, depth: int | None, ref: Ref | None = None, history_only: bool = False) -> None:
        """Fetch one commit by its id; where the server refuses that, by the ref that leads to it, else everything.

        Args:
            commit: full commit id.
            depth: how many generations; None for all.
            ref: a ref known to lead to some commit, used when it is this one.
            history_only: take commits without their trees where the server can.

        Raises:
            SourceError: the server cannot be reached, or the commit is not there.
        """
        options = ["--quiet", "--no-tags", "--no-write-fetch-head"]
        if history_only:
            options.append("--filter=tree:0")
        shallow = [f"--depth={depth}"] if depth else []
        attempts = [[*options, *shallow, "origin", commit]]
        if ref is not None and ref.commit == commit:
            spec = ref.name if ref.name.startswith("refs/") else f"refs/{_FOLDER[ref.kind]}/{ref.name}"
            attempts.append([*options, *shallow, "origin", spec])
        attempts.append([*options, "origin", "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"])
        for attempt in attempts:
            try:
                self.run("fetch", *attempt)
            except GitFailure as failure:
                if not _REFUSED.search(failure.message):
                    raise self._unreachable(failure) from failure
            if self.has_commit(commit):
                return
        raise SourceError(
            f"commit {commit} is not reachable from any branch or tag",
            remedy="check the commit id: it must be pushed to this repository, not to a fork",
            where=self._where,
        )

    def resolve(self, name: str) -> Ref:
        """Ask the server what ``name`` means: a tag before a branch, as git itself reads it.

        Raises:
            SourceError: there is no such tag or branch, or the server cannot be reached.
        """
        refs = self.list_refs(name)
        if refs:
            return refs[0]
        known = [ref.name for ref in self.list_refs()]
        near = difflib.get_close_matches(name, known, n=3)
        raise SourceError(
            f"there is no tag or branch {name!r}",
            remedy=f"did you mean {' or '.join(near)}?" if near else "name a tag or a branch of this repository",
            where=self._where,
        )

    def list_refs(self, name: str | None = None) -> list[Ref]:
        """Return the server's tags (peeled to commits), then its branches: all, or those called ``name``.

        Raises:
            SourceError: the server cannot be reached.
        """
        if name is None:
            patterns = ["refs/tags/*", "refs/heads/*"]
        elif name.startswith("refs/"):
            patterns = [name, f"{name}^{{}}"]
        else:
            patterns = [f"refs/tags/{name}", f"refs/tags/{name}^{{}}", f"refs/heads/{name}"]
        try:
            lines = self.run("ls-remote", "--quiet", "origin", *patterns).splitlines()
        except GitFailure as failure:
            raise self._unreachable(failure) from failure
        found: dict[str, str] = {}
        for line in lines:
            commit, full = line.split("\t", 1)
            found[full] = commit
        refs = []
        for full, commit in found.items():
            if full.endswith("^{}"):
                continue
            kind = "tag" if full.startswith("refs/tags/") else "branch"
            short = full.removeprefix(f"refs/{_FOLDER[kind]}/")
            if name is None or name in (full, short):
                refs.append(Ref(full if name == full else short, kind, found.get(f"{full}^{{}}", commit)))
        return sorted(refs, key=lambda ref: ref.kind, reverse=True)

    def _unreachable(self, failure: GitFailure) -> SourceError:
        if _DENIED.search(failure.message):
            remedy = "give git access to this repository (a credential helper or an SSH key), then run again"
        elif _MISSING.search(failure.message):
            remedy = "check the URL; a private repository needs credentials that git can find"
        else:
            remedy = "check the network and the proxy settings of git, then run again: it resumes"
        return SourceError(
            f"the repository cannot be fetched from: {failure.message}", remedy=remedy, where=self._where
        )


_FOLDER = {"tag": "tags", "branch": "heads"}


def _quoted(url: str) -> str:
    return url.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "")


def _message(stderr: str | None) -> str:
    """Return git's own words, redacted, on one line, without GitPython's wrapping."""
    text = re.sub(r"^\s*stderr: '(.*)'\s*$", r"\1", stderr or "", flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return redact("; ".join(lines)) or "git gave no reason"


def _gitpython() -> Any:
    try:
        import git
    except ImportError as error:
        # GitPython looks for the program when it is imported.
        raise _no_git() from error
    return git


def _no_git() -> SourceError:
    return SourceError("git was not found on PATH", remedy=f"install git {MINIMUM_GIT} or newer, then run again")


def require_full_id(commit: str, *, where: str) -> None:
    """Refuse a short or malformed commit id.

    Raises:
        SourceError: it is not 40 lower-case hex digits.
    """
    if not FULL_ID.fullmatch(commit):
        raise SourceError(
            f"{commit!r} is no full commit id ({len(commit)} characters)",
            remedy="give all 40 hex digits: a short id can come to mean another commit",
            where=where,
        )


def utf8(text: str) -> str:
    """Replace what is no UTF-8 in git's output, so that the text can go into a JSON record."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
