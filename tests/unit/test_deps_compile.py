"""Resolution by the real uv, against indexes on the loopback and folders of generated wheels."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.unit.index_server import FakeIndex, digest, make_wheel, serving

from cufallback import download
from cufallback.deps import compile as compiling
from cufallback.deps.compile import Resolution, parse_resolution, resolve, second_opinion
from cufallback.deps.lock import FreshLock, drift, make_locks
from cufallback.deps.lockfile import LockedDistribution, parse_lock, render_lock
from cufallback.deps.policy import Resolved
from cufallback.deps.surgery import Operated
from cufallback.errors import DownloadError, LockError, PolicyError, ToolchainError
from cufallback.process import LocalRunner, RecordingRunner
from cufallback.progress import Silent
from cufallback.recipe import Recipe, load_recipe

LONG_AGO, TOO_NEW = "2020-01-01T00:00:00Z", "2026-11-30T00:00:01Z"
OWN = "own"


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "_PAUSES", (0.0,))
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


@pytest.fixture
def start() -> Iterator[Callable[..., FakeIndex]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(FakeIndex(**options)))


@pytest.fixture
def default(start: Callable[..., FakeIndex], monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    index = start(upload_time=LONG_AGO)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    return index


def wheels(index: FakeIndex, *pins: str, **requires: list[str]) -> None:
    for pin in pins:
        name, version = pin.split("==")
        needs = requires.get(name.replace("-", "_"), [])
        index.add(f"{name.replace('-', '_')}-{version}-py3-none-any.whl", make_wheel(name, version, requires=needs))


def recipe(*, own: FakeIndex | None = None, packages: tuple[str, ...] = (OWN,), **deps: Any) -> Recipe:
    """The rehearsal, for the Python that runs this, with one explicit index or none."""
    base = load_recipe("rehearsal")
    index = base.deps.index[0].model_copy(update={"url": own.url if own else "", "packages": packages})
    update = {"index": (index,) if own else (), "ban": (), "edit": (), **deps}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return base.model_copy(
        update={
            "deps": base.deps.model_copy(update=update),
            "python": base.python.model_copy(update={"version": version}),
        }
    )


def operated(*lines: str, overrides: tuple[str, ...] = ()) -> Operated:
    return Operated(lines, overrides, ())


def solve(
    made: Operated, of: Recipe, workdir: Path, *, mirrors: tuple[Path, ...] = (), runner: Any = None
) -> Resolution:
    return resolve(made, of, mirrors=mirrors, workdir=workdir, runner=runner or LocalRunner())


def pins(resolution: Resolution) -> dict[str, str]:
    return {item.name: item.version for item in resolution.closure}


def test_closure_with_hashes_and_who_requires_whom(default: FakeIndex, tmp_path: Path) -> None:
    wheels(default, "top==1.0", "Mid_dle==2.0", "low==3.0", top=["mid-dle", "low"], Mid_dle=["low<9"])
    made = solve(operated("top==1.0", "mid-dle"), recipe(), tmp_path)
    assert {(item.name, item.version, item.direct, tuple(sorted(item.via))) for item in made.closure} == {
        ("top", "1.0", True, ()),
        ("mid-dle", "2.0", True, ("top",)),
        ("low", "3.0", False, ("mid-dle", "top")),
    }
    assert made.hashes["low"] == {digest(default.files["low-3.0-py3-none-any.whl"])}


def test_package_of_an_explicit_index_comes_from_there_alone(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start(upload_time=LONG_AGO)
    wheels(default, f"{OWN}==9.0", "a==1.0")
    wheels(own, f"{OWN}==1.0", "a==5.0")
    made = solve(operated(OWN, "a"), recipe(own=own), tmp_path)
    assert pins(made) == {OWN: "1.0", "a": "1.0"}
    assert not any(OWN in path for path, _range in default.requests)
    assert not any("/a" in path for path in own.pages)


def test_explicit_index_without_the_package_has_no_stand_in(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    wheels(default, f"{OWN}==9.0")
    with pytest.raises(DownloadError, match=f"the index has no package {OWN}"):
        solve(operated(OWN), recipe(own=start()), tmp_path)


def test_package_of_an_explicit_index_that_another_needs_becomes_direct(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start(upload_time=LONG_AGO)
    wheels(default, "a==1.0", "b==1.0", f"{OWN}==9.0", "second==9.0", a=["b"], b=[f"{OWN}>=1"])
    wheels(own, f"{OWN}==1.0", "second==1.0", own=["second"])
    made = solve(operated("a"), recipe(own=own, packages=(OWN, "Second")), tmp_path)
    assert pins(made) == {"a": "1.0", "b": "1.0", OWN: "1.0", "second": "1.0"}
    assert made.hashes["second"] == {digest(own.files["second-1.0-py3-none-any.whl"])}


def test_time_bound_holds_where_an_index_gives_times_and_only_there(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start()
    wheels(default, "a==1.0")
    wheels(own, f"{OWN}==1.0+cu129", f"{OWN}==2.0+cu129")
    assert pins(solve(operated("a", OWN), recipe(own=own), tmp_path)) == {"a": "1.0", OWN: "2.0+cu129"}
    own.upload_time = TOO_NEW
    with pytest.raises(LockError, match="could not be resolved"):
        solve(operated(OWN), recipe(own=own), tmp_path)
    default.upload_time = TOO_NEW
    shutil.rmtree(tmp_path / "uv-cache")
    with pytest.raises(LockError, match="could not be resolved"):
        solve(operated("a"), recipe(), tmp_path)


@pytest.mark.parametrize(
    ("filename", "requirement", "stands_in"),
    [
        (f"{OWN}-1.0+cu129-py3-none-any.whl", f"{OWN}==1.0+cu129", True),
        (f"{OWN}-1.0+cu129-py3-none-any.whl", OWN, False),  # a choice: the index decides
        (f"{OWN}-1.0+cu129-py3-none-any.whl", f"{OWN}==1.*", False),
        (f"{OWN}-1.1-py3-none-any.whl", f"{OWN}==1.0+cu129", False),
        (f"{OWN}-1.0+cu129-cp39-cp39-win_amd64.whl", f"{OWN}==1.0+cu129", False),
    ],
)
def test_mirror_stands_in_for_an_index_whose_pinned_packages_it_has(
    start: Callable[..., FakeIndex],
    default: FakeIndex,
    tmp_path: Path,
    filename: str,
    requirement: str,
    stands_in: bool,
) -> None:
    own = start()
    wheels(own, f"{OWN}==1.0+cu129")
    mirror = tmp_path / "mit Leerzeichen ü"
    mirror.mkdir()
    (mirror / "no wheel.whl").touch()
    (mirror / filename).write_bytes(make_wheel(OWN, filename.split("-")[1]))
    made = solve(operated(requirement), recipe(own=own), tmp_path, mirrors=(tmp_path, mirror))
    assert pins(made) == {OWN: "1.0+cu129"}
    assert bool(own.requests) is not stands_in
    assert default.requests == []


def test_override_wins_over_what_a_distribution_asks_for(default: FakeIndex, tmp_path: Path) -> None:
    wheels(default, "a==1.0", "b==1.0", "b==2.0", a=["b==1.0"])
    made = solve(operated("a", overrides=("b==2.0",)), recipe(), tmp_path)
    assert pins(made) == {"a": "1.0", "b": "2.0"}
    assert [item.via for item in made.closure if item.name == "b"] == [("a",)]


@pytest.mark.parametrize("name", ["UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL"])
def test_no_setting_of_the_user_adds_an_index(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stranger = start(upload_time=LONG_AGO)
    wheels(default, "a==1.0")
    wheels(stranger, "a==2.0")
    monkeypatch.setenv(name, stranger.url)
    assert pins(solve(operated("a"), recipe(), tmp_path)) == {"a": "1.0"}
    assert stranger.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_CONSTRAINT", "old.txt"),
        ("UV_OVERRIDE", "old.txt"),
        ("UV_RESOLUTION", "lowest"),
        ("UV_EXCLUDE_NEWER", LONG_AGO),
    ],
)
def test_no_setting_of_the_user_changes_the_choice(
    default: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    wheels(default, "a==1.0", "a==2.0")
    (tmp_path / "old.txt").write_text("a==1.0\n")
    monkeypatch.setenv(name, value)
    assert pins(solve(operated("a"), recipe(), tmp_path)) == {"a": "2.0"}


def test_no_resolution_is_told_in_uv_s_own_words(default: FakeIndex, tmp_path: Path) -> None:
    wheels(default, "a==1.0", "b==1.0", a=["b>=2"])
    with pytest.raises(LockError, match="could not be resolved") as caught:
        solve(operated("a"), recipe(), tmp_path)
    words = " ".join(caught.value.remedy.split())
    assert "only b==1.0 is available" in words
    assert "we can conclude that your requirements are unsatisfiable" in words
    assert caught.value.where == "recipe rehearsal"


def test_source_distributions_are_not_taken(default: FakeIndex, tmp_path: Path) -> None:
    default.add("a-1.0.tar.gz", b"never opened")
    with pytest.raises(LockError, match="could not be resolved"):
        solve(operated("a"), recipe(), tmp_path)


def fake_uv(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A shell script named uv in place of the real one."""
    folder.mkdir(exist_ok=True)
    path = folder / "uv"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return path


@pytest.mark.parametrize("script", ["echo uv 0.8.22", "echo nonsense", "exit 1"])
def test_uv_too_old_or_broken(default: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_uv(tmp_path / "bin", monkeypatch, script)
    with pytest.raises(ToolchainError, match=r"uv: wanted [\d.]+ or newer, found"):
        solve(operated("a"), recipe(), tmp_path)


def test_no_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"uv: wanted .* found not found"):
        solve(operated("a"), recipe(), tmp_path)


@pytest.mark.timeout(30)
def test_resolution_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_uv(tmp_path / "bin", monkeypatch, '[ "$1" = --version ] && echo uv 0.13.0 && exit\nsleep 60')
    monkeypatch.setattr(compiling, "_LIMIT", 0.2)
    with pytest.raises(LockError, match=r"did not end within 0\.2 s"):
        solve(operated("a"), recipe(), tmp_path)


def test_generated_project_quotes_and_ties(start: Callable[..., FakeIndex], tmp_path: Path) -> None:
    own = start()
    wheels(own, f"{OWN}==1.0")
    text, unbounded = compiling._pyproject(['a[x]; os_name == "a\\b"', "Own==1.0"], recipe(own=own), ())
    read = tomllib.loads(text)
    assert read["project"]["dependencies"] == ['a[x]; os_name == "a\\b"', "Own==1.0"]
    assert read["tool"]["uv"] == {
        "sources": {"Own": {"index": "pytorch-cpu"}},
        "index": [{"name": "pytorch-cpu", "url": own.url, "explicit": True}],
    }
    assert unbounded == ["Own"]


@pytest.mark.parametrize(
    "line", ["a @ https://example.com/a.whl", "-e .", "--index-url https://example.com", "a>=1", "./a.whl"]
)
def test_resolver_s_answer_with_anything_but_pins_is_refused(line: str) -> None:
    with pytest.raises(LockError, match="an exact pin was expected") as caught:
        parse_resolution(f"b==1\n    # via resolution (pyproject.toml)\n{line}\n", where="out.txt")
    assert caught.value.where == "out.txt:3"


def test_answer_of_pip_tools_is_read_too() -> None:
    sha = "0" * 64
    text = (
        f"a==1 \\\n    --hash=sha256:{sha}\n    # via -r second.in\n"
        f"b_c==2 \\\n    --hash=sha256:{sha}\n    # via\n    #   -c pins.txt\n    #   a\n"
        f"\n# The following packages are considered to be unsafe\nd==3 \\\n    --hash=sha256:{sha}\n    # via b-c\n"
    )
    assert parse_resolution(text, where="").closure == (
        Resolved("a", "1", (), direct=True),
        Resolved("b-c", "2", ("a",)),
        Resolved("d", "3", ("b-c",)),
    )


def test_second_opinion_needs_the_recipe_s_python() -> None:
    of = recipe()
    other = of.model_copy(update={"python": of.python.model_copy(update={"version": "3.9"})})
    with pytest.raises(LockError, match=r"not for 3\.9"):
        second_opinion(operated("a"), Resolution((), {}), other, workdir=Path(), runner=RecordingRunner())


def test_second_opinion_is_asked_about_the_default_index_alone(start: Callable[..., FakeIndex]) -> None:
    closure = (
        Resolved("plain", "1", direct=True),
        Resolved("shared", "2", ("plain", "needs-own")),
        Resolved("needs-own", "3", direct=True),
        Resolved(OWN, "4", ("needs-own",)),
        Resolved("below-own", "5", (OWN,)),
        Resolved("needs-override", "6", direct=True),
        Resolved("overridden", "7", ("needs-override",)),
    )
    made = operated("plain", "needs-own>=1", "needs-override", overrides=("overridden==7",))
    lines, held = compiling._default_index_part(made, Resolution(closure, {}), recipe(own=start()))
    assert lines == ["plain"]
    assert held == ["below-own==5", "needs-override==6", "needs-own==3", "shared==2"]


# One lock, made whole.


def lock(of: Recipe, workdir: Path, *, mirrors: tuple[Path, ...] = ()) -> dict[str, FreshLock]:
    made = make_locks(of, workdir, mirrors=mirrors, workdir=workdir, runner=LocalRunner(), progress=Silent())
    return {item.which: item for item in made}


def adding(build: tuple[str, ...], runtime: tuple[str, ...] = ("a",)) -> dict[str, Any]:
    requirements = load_recipe("rehearsal").deps.build
    return {
        which: requirements.model_copy(update={"files": (), "add": lines})
        for which, lines in (("build", build), ("runtime", runtime))
    }


def test_lock_has_one_wheel_each_and_neither_url_nor_path(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start()
    for tag in (
        "py3-none-any",
        "cp311-cp311-win_amd64",
        "py3-none-manylinux_2_17_x86_64",
        "py3-none-manylinux_2_39_x86_64",
    ):
        default.add(f"a-1.0-{tag}.whl", make_wheel("a", "1.0", padding=len(tag)))
    default.add("a-1.0.tar.gz", b"source")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / f"{OWN}-1.0-py3-none-any.whl").write_bytes(make_wheel(OWN, "1.0"))
    of = recipe(own=own, **adding(("a", f"{OWN}==1.0")))
    made = lock(of, tmp_path / "work", mirrors=(mirror,))["build"]
    assert [(item.name, item.filename) for item in made.distributions] == [
        ("a", "a-1.0-py3-none-manylinux_2_17_x86_64.whl"),
        (OWN, f"{OWN}-1.0-py3-none-any.whl"),
    ]
    assert "://" not in made.text
    assert str(tmp_path) not in made.text
    assert parse_lock(made.text, of, "build", where="").distributions == made.distributions
    assert own.requests == []


def test_lock_is_the_same_from_an_index_and_from_its_mirror(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start()
    wheels(own, f"{OWN}==1.0")
    wheels(default, "a==1.0")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / f"{OWN}-1.0-py3-none-any.whl").write_bytes(own.files[f"{OWN}-1.0-py3-none-any.whl"])
    of = recipe(own=own, **adding((f"{OWN}==1.0",)))
    assert lock(of, tmp_path / "one") == lock(of, tmp_path / "two", mirrors=(mirror,))


def test_file_of_a_mirror_that_the_index_does_not_have_is_not_locked(
    start: Callable[..., FakeIndex], default: FakeIndex, tmp_path: Path
) -> None:
    own = start()
    wheels(own, f"{OWN}==1.0")
    wheels(default, "a==1.0")
    (tmp_path / f"{OWN}-1.0-1-py3-none-any.whl").write_bytes(b"another build")
    made = lock(recipe(own=own, **adding((OWN,))), tmp_path / "work", mirrors=(tmp_path,))["build"]
    assert made.distributions[0].sha256 == digest(own.files[f"{OWN}-1.0-py3-none-any.whl"])


def test_no_wheel_for_the_target(default: FakeIndex, tmp_path: Path) -> None:
    resolution = Resolution((Resolved("a", "1.0", direct=True),), {"a": frozenset({digest(b"x")})})
    default.add("a-1.0-cp39-cp39-win_amd64.whl", b"x")
    from cufallback.deps.lock import _one_file_each

    with pytest.raises(LockError, match=r"a 1\.0 has no wheel for Python .* on x86_64-manylinux_2_28"):
        _one_file_each(resolution, recipe(), ())


def test_index_without_digests_cannot_be_locked(default: FakeIndex, tmp_path: Path) -> None:
    default.hashes = False
    wheels(default, "a==1.0")
    with pytest.raises(LockError, match="gives no sha256"):
        lock(recipe(**adding(("a",))), tmp_path / "work")


def test_ban_is_held_to_the_closure_and_exceptions_are_said(default: FakeIndex, tmp_path: Path) -> None:
    wheels(default, "a==1.0", "x-cu13==1.0", a=["x-cu13"])
    ban = load_recipe("rehearsal").deps.ban[0]
    with pytest.raises(PolicyError, match="the requirements → a → x-cu13"):
        lock(recipe(ban=(ban,), **adding(("a",))), tmp_path / "work")

    class Noting(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    said: list[str] = []
    of = recipe(ban=(ban.model_copy(update={"allow": ("x-cu13",)}),), **adding(("a",)))
    make_locks(of, tmp_path, mirrors=(), workdir=tmp_path / "work", runner=LocalRunner(), progress=Noting())
    assert any(line.startswith("x-cu13 1.0 passes by exception: ") for line in said)


OLD = (
    LockedDistribution("a", "1.0", "a-1.0-py3-none-any.whl", "a" * 64),
    LockedDistribution("b", "1.0", "b-1.0-py3-none-any.whl", "b" * 64),
)


def written(*distributions: LockedDistribution, inputs: str = "0" * 64) -> str:
    return render_lock(distributions, recipe=recipe(), which="build", inputs=inputs)


@pytest.mark.parametrize(
    ("committed", "lines"),
    [
        (written(*OLD), ()),
        (None, ("build.txt: missing",)),
        (written(OLD[0]), ("build.txt: + b 1.0",)),
        (
            written(*OLD, LockedDistribution("c", "3", "c-3-py3-none-any.whl", "c" * 64)),
            ("build.txt: - c 3",),
        ),
        (
            written(OLD[0], LockedDistribution("b", "0.9", "b-0.9-py3-none-any.whl", "b" * 64)),
            ("build.txt: b 0.9 → 1.0",),
        ),
        (
            written(OLD[0], LockedDistribution("b", "1.0", "b-1.0-py3-none-any.whl", "c" * 64)),
            (f"build.txt: b 1.0: b-1.0-py3-none-any.whl {'c' * 12} → b-1.0-py3-none-any.whl {'b' * 12}",),
        ),
        (written(*OLD, inputs="1" * 64), ("build.txt: the requirements changed, and the distributions did not",)),
        (
            written(*OLD).replace("sha256:aaa", "sha256:baa"),
            ("build.txt:9: the lock was edited: it does not have its digest",),
        ),
        ("garbage", ("build.txt:1: this is not a dependency lock",)),
    ],
)
def test_drift_is_told_line_by_line(committed: str | None, lines: tuple[str, ...]) -> None:
    fresh = FreshLock("build", written(*OLD), OLD)
    assert drift(fresh, committed, recipe(), where="build.txt") == lines
