"""checkout_git and apply_cherry_picks against real repositories over file://, with obliging and strict servers."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from cufallback.errors import CufallbackError, RewriteError, SourceError, WorkspaceError
from cufallback.progress import Silent
from cufallback.recipe import Ancestor, CherryPick, GitSource
from cufallback.source.checkout import Checkout, checkout_git
from cufallback.source.edit import apply_cherry_picks
from cufallback.store import tree_digest

WHY = "it is only a test"
UNKNOWN = "1234567890" * 4


class Upstream:
    """A repository with a served copy of itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = 1_600_000_000
        path.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def git(self, *arguments: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.path),
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{role}_NAME": "Somebody" for role in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{role}_EMAIL": "somebody@example.org" for role in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{role}_DATE": f"@{self.clock} +0000" for role in ("AUTHOR", "COMMITTER")},
        }
        command = ["git", "-c", "protocol.file.allow=always", *arguments]
        return subprocess.run(
            command, cwd=self.path, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, message: str, **files: str) -> str:
        for name, text in files.items():
            path = self.path / name.replace("__", "/").replace("_txt", ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")
        self.clock += 100
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream repo ü")


@pytest.fixture(params=["any commit", "tips only"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Servers differ in whether they hand out a commit that no ref points at. Protocol 0 asks for permission."""
    allowed = "true" if request.param == "any commit" else "false"
    settings = {
        "protocol.version": "0",
        "uploadpack.allowReachableSHA1InWant": allowed,
        "uploadpack.allowAnySHA1InWant": allowed,
        "uploadpack.allowFilter": allowed,
    }
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for number, (key, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    return str(request.param)


def source(url: str, ref: str, commit: str, **more: object) -> GitSource:
    return GitSource.model_validate({"kind": "git", "url": url, "ref": ref, "commit": commit, "why": WHY, **more})


def source_with_secret(url: str) -> GitSource:
    """A source that no recipe file can give, since recipes refuse secrets: what lies below must not rely on that."""
    return source("https://host.invalid/x.git", "main", UNKNOWN).model_copy(update={"url": url})


def checkout(upstream: Upstream, ref: str, commit: str, target: Path, ancestors: tuple[str, ...] = ()) -> Checkout:
    named = tuple(Ancestor(commit=ancestor, why=WHY) for ancestor in ancestors)
    return checkout_git(source(upstream.url, ref, commit, ancestor=named), target=target, progress=Silent())


def files(tree: Path) -> dict[str, str]:
    return {path.relative_to(tree).as_posix(): path.read_text() for path in tree.rglob("*") if path.is_file()}


def refused(upstream: Upstream, ref: str, commit: str, tmp_path: Path, **more: tuple[str, ...]) -> str:
    """Check that the checkout fails without leaving anything, and return the reason."""
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(SourceError) as caught:
        checkout(upstream, ref, commit, work / "t", **more)
    assert list(work.iterdir()) == []
    assert caught.value.remedy
    return caught.value.reason


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.usefixtures("server")
def test_a_tag(upstream: Upstream, tmp_path: Path, annotated: bool) -> None:
    upstream.commit("first", a_txt="1")
    pinned = upstream.commit("second", a_txt="2", sub__b_txt="b")
    upstream.git("tag", *(["-a", "-m", "v1"] if annotated else []), "v1")
    upstream.commit("third", a_txt="3")

    result = checkout(upstream, "v1", pinned, tmp_path / "t")

    assert files(tmp_path / "t") == {"a.txt": "2", "sub/b.txt": "b"}
    assert result == Checkout("git", pinned, None, upstream.clock - 100, tree_digest(tmp_path / "t"), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "upstream repo ü"]


@pytest.mark.usefixtures("server")
def test_a_branch_that_moved_on_still_holds_the_commit(upstream: Upstream, tmp_path: Path) -> None:
    pinned = upstream.commit("first", a_txt="1")
    upstream.commit("second", a_txt="2")
    upstream.commit("third", a_txt="3")
    assert checkout(upstream, "main", pinned, tmp_path / "t").commit == pinned
    assert files(tmp_path / "t") == {"a.txt": "1"}


@pytest.mark.usefixtures("server")
def test_a_commit_that_the_branch_lost(upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("first", a_txt="1")
    lost = upstream.commit("second", a_txt="2")
    upstream.git("branch", "elsewhere")
    upstream.git("reset", "--quiet", "--hard", "HEAD~1")
    head = upstream.commit("another second", a_txt="3")
    reason = refused(upstream, "main", lost, tmp_path)
    assert "not in the history of branch main" in reason
    assert lost in reason
    assert head in reason


@pytest.mark.usefixtures("server")
def test_a_moved_tag_names_both_commits(upstream: Upstream, tmp_path: Path) -> None:
    pinned = upstream.commit("first", a_txt="1")
    upstream.git("tag", "v1")
    moved = upstream.commit("second", a_txt="2")
    upstream.git("tag", "--force", "-a", "-m", "moved", "v1")
    assert refused(upstream, "v1", pinned, tmp_path) == f"tag v1 leads to {moved}, the recipe pins {pinned}"


@pytest.mark.usefixtures("server")
def test_an_unknown_commit(upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("first", a_txt="1")
    assert f"commit {UNKNOWN} is not reachable" in refused(upstream, "main", UNKNOWN, tmp_path)


@pytest.mark.parametrize("commit", ["", "abc1234", UNKNOWN[:39], UNKNOWN.replace("1", "A"), UNKNOWN + "\n"])
def test_no_full_commit_id(upstream: Upstream, tmp_path: Path, commit: str) -> None:
    pinned = source(upstream.url, "main", UNKNOWN).model_copy(update={"commit": commit})
    with pytest.raises(SourceError, match="no full commit id"):
        checkout_git(pinned, target=tmp_path / "t", progress=Silent())


def test_an_unknown_ref_suggests_the_nearest(upstream: Upstream, tmp_path: Path) -> None:
    pinned = upstream.commit("first", a_txt="1")
    upstream.git("tag", "v0.28.0")
    work = tmp_path / "w"
    with pytest.raises(SourceError, match=r"no tag or branch 'v0\.28'") as caught:
        checkout(upstream, "v0.28", pinned, work)
    assert "v0.28.0" in caught.value.remedy


def test_a_tag_wins_over_a_branch_of_its_name(upstream: Upstream, tmp_path: Path) -> None:
    tagged = upstream.commit("first", a_txt="1")
    upstream.git("tag", "same")
    upstream.git("branch", "same")
    upstream.commit("second", a_txt="2")
    upstream.git("branch", "--force", "same")
    assert checkout(upstream, "same", tagged, tmp_path / "t").commit == tagged


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("ref", ["v1", "main"])
def test_ancestors(upstream: Upstream, tmp_path: Path, ref: str) -> None:
    first = upstream.commit("first", a_txt="1")
    second = upstream.commit("second", a_txt="2")
    pinned = upstream.commit("third", a_txt="3")
    upstream.git("tag", "v1")
    result = checkout(upstream, ref, pinned, tmp_path / "t", (first, second, pinned))
    assert result.commit == pinned


@pytest.mark.usefixtures("server")
def test_each_missing_ancestor_is_named_with_its_reason(upstream: Upstream, tmp_path: Path) -> None:
    pinned = upstream.commit("first", a_txt="1")
    upstream.git("tag", "v1")
    later = upstream.commit("second", a_txt="2")
    reason = refused(upstream, "v1", pinned, tmp_path, ancestors=(pinned, later, UNKNOWN))
    assert f"{later}: {WHY}" in reason
    assert f"{UNKNOWN}: {WHY}" in reason
    assert f"{pinned}: " not in reason


@pytest.mark.usefixtures("server")
def test_submodules_at_their_recorded_commits(upstream: Upstream, tmp_path: Path) -> None:
    inner, middle = Upstream(tmp_path / "inner"), Upstream(tmp_path / "group" / "middle")
    inner_pin = inner.commit("inner", deep_txt="deep")
    inner.commit("inner moved on", deep_txt="deeper")
    middle.git("submodule", "--quiet", "add", inner.url, "third party/inner")
    middle.git("-C", "third party/inner", "checkout", "--quiet", inner_pin)
    middle_pin = middle.commit("middle", mid_txt="mid")
    middle.commit("middle moved on", mid_txt="later")
    upstream.git("submodule", "--quiet", "add", middle.url, "libs/middle")
    upstream.git("-C", "libs/middle", "checkout", "--quiet", middle_pin)
    # Relative, as many projects write it: against the URL of the repository that has it.
    upstream.git("config", "--file", ".gitmodules", "submodule.libs/middle.url", "../group/middle")
    pinned = upstream.commit("top", a_txt="1")

    result = checkout(upstream, "main", pinned, tmp_path / "t")

    assert result.submodules == (("libs/middle", middle_pin), ("libs/middle/third party/inner", inner_pin))
    tree = files(tmp_path / "t")
    assert tree["libs/middle/mid.txt"] == "mid"
    assert tree["libs/middle/third party/inner/deep.txt"] == "deep"
    assert not list((tmp_path / "t").rglob(".git"))


def test_a_submodule_without_url(upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("first", a_txt="1")
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{UNKNOWN},lib")
    upstream.git("commit", "--quiet", "-m", "a link to nowhere")
    pinned = upstream.git("rev-parse", "HEAD")
    assert "submodule lib has no URL" in refused(upstream, "main", pinned, tmp_path)


@pytest.mark.parametrize("url", ["ext::sh -c touch% /tmp/x", "http://example.org/x.git", "/etc", "-u./evil"])
def test_a_submodule_over_an_unsafe_protocol(upstream: Upstream, tmp_path: Path, url: str) -> None:
    upstream.commit("first", _gitmodules="")
    (upstream.path / ".gitmodules").write_text(f'[submodule "lib"]\n\tpath = lib\n\turl = "{url}"\n')
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{UNKNOWN},lib")
    upstream.git("add", ".gitmodules")
    upstream.git("commit", "--quiet", "-m", "unsafe")
    pinned = upstream.git("rev-parse", "HEAD")
    assert "protocol that is not allowed" in refused(upstream, "main", pinned, tmp_path)


def test_a_link_out_of_the_tree(upstream: Upstream, tmp_path: Path) -> None:
    (upstream.path / "out").symlink_to("../../etc")
    pinned = upstream.commit("first", a_txt="1")
    assert "out is a link out of the tree" in refused(upstream, "main", pinned, tmp_path)


def test_modes_and_the_users_configuration_do_not_change_the_tree(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (upstream.path / "run").write_text("#!/bin/sh\n")
    (upstream.path / "run").chmod(0o755)
    pinned = upstream.commit("first", a_txt="one\ntwo\n")
    expected = checkout(upstream, "main", pinned, tmp_path / "plain").tree_sha256

    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {home}/hooked\n")
    (hooks / "post-checkout").chmod(0o755)
    (home / "attributes").write_text("*.txt text eol=crlf\n")
    (home / ".gitconfig").write_text(
        f"[core]\n\tautocrlf = true\n\tfileMode = false\n\thooksPath = {hooks}\n\tattributesFile = {home}/attributes\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_INDEX_FILE", str(home / "index"))
    monkeypatch.setenv("GIT_DIR", str(home / "repository"))
    old = os.umask(0o077)
    try:
        result = checkout(upstream, "main", pinned, tmp_path / "t")
    finally:
        os.umask(old)

    assert result.tree_sha256 == expected
    assert oct((tmp_path / "t" / "run").stat().st_mode) == "0o100755"
    assert oct((tmp_path / "t" / "a.txt").stat().st_mode) == "0o100644"
    assert not (home / "hooked").exists()
    assert not (home / "index").exists()


def test_the_epoch_is_never_before_1980(upstream: Upstream, tmp_path: Path) -> None:
    upstream.clock = 1000
    pinned = upstream.commit("old", a_txt="1")
    assert checkout(upstream, "main", pinned, tmp_path / "t").epoch == 315_532_800


SECRET = "ghp_0123456789abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        (f"https://user:{SECRET}@127.0.0.1:9/x.git", "network"),
        (f"https://{SECRET}@127.0.0.1:9/x.git", "network"),
        (f"https://127.0.0.1:9/x.git?access_token={SECRET}", "network"),
        ("file:///no/such/repository", "check the URL"),
        ("https://no-such-host.invalid/x.git", "network"),
    ],
)
def test_an_unreachable_repository_tells_no_secret(tmp_path: Path, url: str, hint: str) -> None:
    with pytest.raises(SourceError, match="cannot be fetched from") as caught:
        checkout_git(source_with_secret(url), target=tmp_path / "t", progress=Silent())
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert hint in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_the_token_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "arguments"
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    real = subprocess.run(["which", "git"], check=True, capture_output=True, text=True).stdout.strip()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    secret = source_with_secret(f"https://{SECRET}@127.0.0.1:9/x.git")
    with pytest.raises(SourceError):
        checkout_git(secret, target=tmp_path / "t", progress=Silent())
    assert "ls-remote" in log.read_text()
    assert SECRET not in log.read_text()


def test_without_git(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = upstream.commit("first", a_txt="1")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SourceError, match="git was not found") as caught:
        checkout(upstream, "main", pinned, tmp_path / "t")
    assert "install git" in caught.value.remedy
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("size", ["64k", "1m", "3m"])
def test_a_full_disk_is_named_and_nothing_is_left(upstream: Upstream, tmp_path: Path, size: str) -> None:
    (upstream.path / "big").write_bytes(os.urandom(4_000_000))
    pinned = upstream.commit("big")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(WorkspaceError) as caught:
            checkout(upstream, "main", pinned, disk / "t")
        assert "free disk space" in caught.value.remedy
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- cherry-picks ---------------------------------------------------------------------------------------------------

BASE = "".join(f"line {number}\n" for number in range(30))


@pytest.fixture
def release(upstream: Upstream, tmp_path: Path) -> Callable[[], Path]:
    """A release branch off main, checked out; main goes on."""
    upstream.commit("base", a_txt=BASE, b_txt="b\n", gone_txt="gone\n")
    upstream.git("branch", "release")
    pinned = upstream.git("rev-parse", "HEAD")

    def tree() -> Path:
        target = tmp_path / "release tree"
        checkout(upstream, "release", pinned, target)
        return target

    return tree


def pick(upstream: Upstream, tree: Path, *commits: str) -> tuple:  # type: ignore[type-arg]
    picks = [CherryPick(commit=commit, why=WHY) for commit in commits]
    return apply_cherry_picks(tree, picks, url=upstream.url, progress=Silent())


@pytest.mark.usefixtures("server")
def test_picks_apply_in_order_and_leave_their_diffs(upstream: Upstream, release: Callable[[], Path]) -> None:
    upstream.commit("not wanted", b_txt="other\n")
    one = upstream.commit("fix one", a_txt=BASE.replace("line 5\n", "line five\n"), new__file_txt="new\n")
    (upstream.path / "gone.txt").unlink()
    two = upstream.commit("fix two", a_txt=BASE.replace("line 5\n", "line five\n").replace("line 6\n", "six\n"))
    tree = release()
    (tree / "a.txt").chmod(0o755)

    changes = pick(upstream, tree, one, two)

    assert (tree / "a.txt").read_text() == BASE.replace("line 5\n", "line five\n").replace("line 6\n", "six\n")
    assert (tree / "b.txt").read_text() == "b\n"
    assert (tree / "new/file.txt").read_text() == "new\n"
    assert not (tree / "gone.txt").exists()
    assert [(change.file, change.commit, change.kind) for change in changes] == [
        ("a.txt", one, "cherry-pick"),
        ("new/file.txt", one, "cherry-pick"),
        ("a.txt", two, "cherry-pick"),
        ("gone.txt", two, "cherry-pick"),
    ]
    assert "-line 5\n+line five\n" in changes[0].diff
    assert changes[0].why == WHY
    assert not (tree / ".git").exists()
    assert not list(tree.parent.glob(".*picks*"))


@pytest.mark.usefixtures("server")
def test_a_conflict_names_the_files_and_changes_nothing(upstream: Upstream, release: Callable[[], Path]) -> None:
    fine = upstream.commit("fine", b_txt="better\n")
    upstream.commit("unrelated but needed", a_txt=BASE.replace("line 5\n", "line V\n"))
    clash = upstream.commit("clash", a_txt=BASE.replace("line 5\n", "line five\n"), b_txt="best\n")
    tree = release()
    before = tree_digest(tree)
    with pytest.raises(RewriteError) as caught:
        pick(upstream, tree, fine, clash)
    assert "conflicts in a.txt" in caught.value.reason
    assert "b.txt" not in caught.value.reason
    assert caught.value.where == f"source.cherry_pick[1]: {clash}"
    assert tree_digest(tree) == before
    assert not list(tree.parent.glob(".*picks*"))


def test_a_pick_for_a_file_that_is_not_there(upstream: Upstream, release: Callable[[], Path]) -> None:
    upstream.commit("new file", later_txt="1\n")
    change = upstream.commit("change it", later_txt="2\n")
    with pytest.raises(RewriteError, match=r"conflicts in later\.txt"):
        pick(upstream, release(), change)


def test_a_pick_that_is_in_already(upstream: Upstream, release: Callable[[], Path]) -> None:
    fix = upstream.commit("fix", a_txt=BASE.replace("line 5\n", "line five\n"))
    tree = release()
    (tree / "a.txt").write_text(BASE.replace("line 5\n", "line five\n"))
    with pytest.raises(RewriteError, match="changes nothing"):
        pick(upstream, tree, fix)


def test_a_pick_without_parent(upstream: Upstream, release: Callable[[], Path]) -> None:
    root = upstream.git("rev-list", "--max-parents=0", "HEAD")
    with pytest.raises(RewriteError, match="cannot be applied"):
        pick(upstream, release(), root)


@pytest.mark.parametrize("commit", [UNKNOWN, UNKNOWN[:12]])
def test_a_pick_that_does_not_exist(upstream: Upstream, release: Callable[[], Path], commit: str) -> None:
    tree = release()
    picks = [CherryPick(commit=UNKNOWN, why=WHY).model_copy(update={"commit": commit})]
    with pytest.raises(CufallbackError, match=r"not reachable|no full commit id"):
        apply_cherry_picks(tree, picks, url=upstream.url, progress=Silent())


def test_a_pick_is_not_written_through_a_link(upstream: Upstream, release: Callable[[], Path], tmp_path: Path) -> None:
    change = upstream.commit("into a folder", out__file_txt="evil\n")
    tree = release()
    (tmp_path / "elsewhere").mkdir()
    (tree / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RewriteError, match="leads out of the tree"):
        pick(upstream, tree, change)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_picks_need_no_repository(tmp_path: Path) -> None:
    assert apply_cherry_picks(tmp_path, [], url="https://no-such-host.invalid/", progress=Silent()) == ()
