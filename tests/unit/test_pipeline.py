"""Resume, skip, redo: the pipeline with stages small enough to see every step."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cufallback import store
from cufallback.errors import BuildError, BusyError, WorkspaceError
from cufallback.pipeline import STATE_FILE, Context, Outcome, Pipeline, Setting, Stage, code_digest
from cufallback.process import RecordingRunner
from cufallback.progress import Silent
from cufallback.store import canonical_json, discard, sha256_bytes


class Kitchen:
    """Three stages that count how often they ran; ``broken`` makes one fail in the middle of its work."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.broken: str | None = None

    def stages(self) -> tuple[Stage, ...]:
        return (
            self._stage("first"),
            self._stage("second", judges=False),
            self._stage("third", reads=("dist",)),
        )

    def _stage(self, name: str, **options: Any) -> Stage:
        def run(context: Context) -> Outcome:
            self.ran.append(name)
            half = context.folder / "half"
            half.write_text("half-written")
            if self.broken == name:
                raise BuildError("broke", remedy="mend")
            (context.folder / "tree").mkdir()
            (context.folder / "tree" / "inner").write_text(f"{name} {context.plan.build_id}")
            half.write_text("whole")
            return Outcome({"said": name}, (half, context.folder / "tree"))

        return Stage(name, f"makes {name}", run, **options)


@pytest.fixture
def kitchen() -> Kitchen:
    return Kitchen()


@pytest.fixture
def cook(kitchen: Kitchen, tmp_path: Path) -> Callable[..., list[str]]:
    def run(build_id: str = "a" * 64, **options: Any) -> list[str]:
        kitchen.ran.clear()
        given = {name: options.pop(name) for name in ("recipe", "dist") if name in options}
        ran = pipeline(kitchen.stages(), tmp_path, build_id, **given).run(**options)
        assert [stage.stage for stage in ran if stage.action == "done"] == kitchen.ran
        return list(kitchen.ran)

    return run


def pipeline(
    stages: tuple[Stage, ...], root: Path, build_id: str = "a" * 64, recipe: bytes = b"", dist: str = "dist"
) -> Pipeline:
    plan: Any = SimpleNamespace(
        build_id=build_id, wheels_id=build_id, short_id=build_id[:16], inputs={"recipe.toml": recipe}, image_inputs=()
    )
    return Pipeline(
        plan=plan,
        stages=stages,
        work=root / "work",
        dist=root / dist,
        mirrors=(),
        runner=RecordingRunner(),
        progress=Silent(),
        clock=time.time,
        settings={"dist": Setting(root / dist, dist)},
    )


def test_an_unchanged_build_runs_nothing(cook: Callable[..., list[str]]) -> None:
    assert cook() == ["first", "second", "third"]
    assert cook() == []


def test_until_stops_there_and_the_next_run_goes_on(cook: Callable[..., list[str]]) -> None:
    assert cook(until="first") == ["first"]
    assert cook() == ["second", "third"]


def test_other_expectations_redo_the_stages_that_judge_and_no_other(cook: Callable[..., list[str]]) -> None:
    cook()
    assert cook(recipe=b"size_limit_mib = 7") == ["first", "third"]


def test_another_output_folder_is_published_into(cook: Callable[..., list[str]]) -> None:
    cook()
    assert cook(dist="elsewhere") == ["third"]


def test_another_build_id_shares_nothing(cook: Callable[..., list[str]]) -> None:
    cook()
    assert cook("b" * 64) == ["first", "second", "third"]
    assert cook() == []


@pytest.mark.parametrize("damage", ["half", "tree/inner"])
def test_a_damaged_output_is_redone_and_later_stages_stand(
    cook: Callable[..., list[str]], tmp_path: Path, damage: str
) -> None:
    cook()
    path = tmp_path / "work" / "work" / ("a" * 16) / "second" / damage
    content, times = path.read_text(), path.stat()
    path.write_text(content.swapcase())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same mtime: only bytes and ctime tell
    assert cook() == ["second"], "its bytes came out as before, so nothing after it changed"


def _changed(**fields: Any) -> Callable[[dict[str, Any]], bytes]:
    """Return how to write a state with some fields changed and a digest that fits: only types and keys tell."""

    def text(state: dict[str, Any]) -> bytes:
        rest = {name: value for name, value in (state | fields).items() if name != "sha256" and value is not ...}
        return canonical_json({**rest, "sha256": sha256_bytes(canonical_json(rest))})

    return text


STATES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "cut off": lambda state: canonical_json(state)[:-20],
    "empty": lambda _state: b"",
    "no object": lambda _state: b"[]",
    "no text": lambda _state: b"\xff",
    "deep": lambda _state: b"[" * 100_000,
    "deep result": lambda _state: b'{"result":' * 100_000,
    "edited result": lambda state: canonical_json({**state, "result": {}}),
    "edited time": lambda state: canonical_json({**state, "started": 1.0}),
    "no digest": lambda state: canonical_json({name: value for name, value in state.items() if name != "sha256"}),
    "digest no text": lambda state: canonical_json({**state, "sha256": 3}),
    "no output": _changed(outputs=[]),
    "outputs no list": _changed(outputs={}),
    "path no text": _changed(outputs=[{"path": 3, "sha256": "", "facts": ""}]),
    "path with a zero byte": _changed(outputs=[{"path": "\0", "sha256": "", "facts": ""}]),
    "path too long": _changed(outputs=[{"path": "x" * 5000, "sha256": "", "facts": ""}]),
    "output of other keys": _changed(outputs=[{"path": "half"}]),
    "output no object": _changed(outputs=["half"]),
    "time no number": _changed(started="x"),
    "time a truth value": _changed(finished=True),
    "result no object": _changed(result=[]),
    "inputs no texts": _changed(inputs={"plan": 1}),
    "stage no text": _changed(stage=None),
    "a key too many": _changed(more=1),
    "a key too few": _changed(started=...),
}


@pytest.mark.parametrize("damage", STATES.values(), ids=STATES)
def test_a_state_file_that_is_not_as_written_counts_as_unfinished(
    cook: Callable[..., list[str]], tmp_path: Path, damage: Callable[[dict[str, Any]], bytes]
) -> None:
    cook()
    path = tmp_path / "work" / "work" / ("a" * 16) / "first" / STATE_FILE
    path.write_bytes(damage(json.loads(path.read_bytes())))
    assert cook() == ["first"]
    assert cook() == []


def test_a_state_file_that_is_whole_is_taken_as_it_is(cook: Callable[..., list[str]], tmp_path: Path) -> None:
    cook()
    path = tmp_path / "work" / "work" / ("a" * 16) / "first" / STATE_FILE
    path.write_bytes(_changed()(json.loads(path.read_bytes())))
    assert cook() == []


def _as_pipe(path: Path) -> None:
    discard(path)
    os.mkfifo(path)


def _as_folder(path: Path) -> None:
    discard(path)
    (path / "within").mkdir(parents=True)


def _as_file(path: Path) -> None:
    discard(path)
    path.write_text("in the way")


def _as_link(path: Path) -> None:
    """Move what is there elsewhere and leave a link to it, so that everything looks right through the link."""
    elsewhere = next(folder for folder in path.parents if folder.name == "work").parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _as_circle(path: Path) -> None:
    discard(path)
    path.symlink_to(path.name)


def files_of(path: Path) -> list[Path]:
    return sorted([path, *path.rglob("*")]) if path.exists() else []


REPLACED = [_as_pipe, _as_folder, _as_file, _as_link, _as_circle]


@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("what", [STATE_FILE, "half", "."])
def test_what_takes_the_place_of_a_stages_files_is_removed_and_the_stage_redone(
    cook: Callable[..., list[str]], tmp_path: Path, what: str, replace: Callable[[Path], None]
) -> None:
    cook()
    replace(tmp_path / "work" / "work" / ("a" * 16) / "first" / what)
    before = files_of(tmp_path / "elsewhere")
    if what == "half" and replace is _as_link:
        return  # an output may be a link: its bytes are what counts
    assert cook() == ["first"]
    assert files_of(tmp_path / "elsewhere") == before, "nothing is removed through a link"
    assert not (tmp_path / "work" / "work" / ("a" * 16) / "first").is_symlink()


@pytest.mark.parametrize("replace", REPLACED)
def test_a_lock_that_is_no_file_is_one_clear_error(
    cook: Callable[..., list[str]], tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    cook()
    lock = tmp_path / "work" / "work" / ("a" * 16) / "lock"
    replace(lock)
    if replace is _as_file:
        assert cook() == []
        return
    with pytest.raises(WorkspaceError, match="the lock is no regular file") as raised:
        cook()
    assert raised.value.where == str(lock)


def test_the_lock_names_only_its_last_holder(cook: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "work" / "work" / ("a" * 16)).mkdir(parents=True)
    lock = tmp_path / "work" / "work" / ("a" * 16) / "lock"
    lock.write_bytes(b"\xff" * 100)
    cook()
    assert lock.read_text() == f"process {os.getpid()}"


def test_a_touched_but_equal_output_is_not_redone_and_hashed_only_once(
    cook: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cook()
    folder = tmp_path / "work" / "work" / ("a" * 16) / "second"
    os.link(folder / "half", tmp_path / "another link of it")  # as another build's wheelhouse does: ctime moves
    before = (folder / STATE_FILE).read_bytes()
    assert cook() == []
    assert (folder / STATE_FILE).read_bytes() != before, "the new facts are kept"
    monkeypatch.setattr(store, "sha256_file", lambda _path: pytest.fail("nothing is to be hashed again"))
    assert cook() == []


def test_a_failed_stage_leaves_no_state_and_is_redone(
    kitchen: Kitchen, cook: Callable[..., list[str]], tmp_path: Path
) -> None:
    kitchen.broken = "second"
    with pytest.raises(BuildError):
        cook()
    assert not (tmp_path / "work" / "work" / ("a" * 16) / "second" / STATE_FILE).exists()
    kitchen.broken = None
    assert cook() == ["second", "third"]


def _hold(root: Path, ready: Any) -> None:
    def run(context: Context) -> Outcome:
        (context.folder / "out").write_text("x")
        ready.set()
        time.sleep(60)
        return Outcome({}, (context.folder / "out",))

    pipeline((Stage("first", "waits", run),), root).run()


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    yield process
    if process.is_alive():
        process.kill()
    process.join()


def test_a_second_run_that_may_not_wait_names_the_first(holder: Any, kitchen: Kitchen, tmp_path: Path) -> None:
    with pytest.raises(BusyError, match=f"process {holder.pid}"):
        pipeline(kitchen.stages(), tmp_path).run(wait=False)


def test_a_killed_run_frees_the_lock_and_its_stage_is_redone(
    holder: Any, cook: Callable[..., list[str]], tmp_path: Path
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert cook(wait=False) == ["first", "second", "third"]


def test_a_file_in_the_way_of_the_work_folder_is_one_clear_error(kitchen: Kitchen, tmp_path: Path) -> None:
    (tmp_path / "work").write_text("in the way")
    with pytest.raises(WorkspaceError) as raised:
        pipeline(kitchen.stages(), tmp_path).run()
    assert "--work" in raised.value.remedy


def test_a_checkout_and_an_installation_of_the_same_code_are_one(tmp_path: Path) -> None:
    for name in ("checkout", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("x = 1\n")
    (tmp_path / "installed" / "_data" / "recipes").mkdir(parents=True)
    (tmp_path / "installed" / "_data" / "recipes" / "a.toml").write_text("schema = 1\n")
    assert code_digest(tmp_path / "checkout") == code_digest(tmp_path / "installed")
    (tmp_path / "installed" / "code.py").write_text("x = 2\n")
    code_digest.cache_clear()
    assert code_digest(tmp_path / "checkout") != code_digest(tmp_path / "installed")
