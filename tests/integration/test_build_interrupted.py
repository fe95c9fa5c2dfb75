"""Interrupted everywhere, then finished: one build in another place, ended in each stage, and two at once.

It is the second full build of the test run and also the proof that place and history leave no trace in the bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from build_rooms import Command, Rehearsal, Started

from cufallback.stages import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.network]

_ENTERED = "cufallback-network before"


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one of the same number."""

    pid: int
    born: str
    name: str

    @property
    def alive(self) -> bool:
        state, parent, born = _stat(self.pid)
        return born == self.born and state != "Z" and bool(parent)


def _stat(pid: int) -> tuple[str, int, str]:
    """Return state, parent and start time; empty ones when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0, ""
    return fields[0], int(fields[1]), fields[19]


def below(root: int) -> list[Process]:
    """Return every process that ``root`` started, directly or not."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found, rows = [root], []
    for pid in found:
        for child, (_state, parent, born) in parents.items():
            if parent == pid:
                found.append(child)
                name = Path(f"/proc/{child}/cmdline")
                rows.append(Process(child, born, name.read_bytes().replace(b"\0", b" ").decode() if born else ""))
    return rows


@dataclass
class Ending:
    """How one interrupted run ended."""

    code: int
    stderr: str
    started: list[Process]
    left: list[Process]


@dataclass
class Battered:
    """A build that was interrupted in every stage and then finished."""

    work: Path
    dist: Path
    endings: dict[str, Ending] = field(default_factory=dict)
    finished: tuple[int, str, str] = (-1, "", "")
    refused: tuple[int, str, str] = (-1, "", "")
    waited: tuple[int, str, str] = (-1, "", "")
    first_pid: int = 0

    @property
    def folder(self) -> Path:
        (folder,) = (self.dist / "rehearsal").iterdir()
        return folder


def end(running: Started, number: signal.Signals) -> Ending:
    """End ``running`` by a signal; see what it had started and what of that is still there soon after."""
    started = below(running.pid)
    os.kill(running.pid, number)
    status = running.wait()
    # As a shell tells it: Python itself ends by SIGINT when one came while a class was being made.
    code = status if status >= 0 else 128 - status
    patience = time.monotonic() + 5
    while time.monotonic() < patience and any(process.alive for process in started):
        time.sleep(0.02)
    return Ending(code, running.stderr, started, [process for process in started if process.alive])


@pytest.fixture(scope="module")
def battered(rehearsal: Rehearsal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battered]:
    root = tmp_path_factory.mktemp("b") / "another pl\u00e4ce \u4e2d, 100%20 longer #2 'than' the first"
    root.mkdir()
    work = rehearsal.copy_work(root / "w\u00f6rk")
    build = Battered(work, root / "the out put")
    options = ("build", "--recipe", "rehearsal", "--work", work, "--dist", build.dist)
    stage: Callable[[str], Path] = lambda name: rehearsal.stage(work, name)  # noqa: E731

    def has(path: Path, text: str = "") -> Callable[[], bool]:
        return lambda: path.exists() and (not text or text in path.read_text(errors="replace"))

    unpacked, wheelhouse = stage("prefetch") / "source", stage("prefetch") / "wheelhouse"
    log = stage("wheels") / "logs"
    plan: tuple[tuple[str, Callable[[], bool], signal.Signals], ...] = (
        ("prefetch by SIGTERM", has(unpacked.parent), signal.SIGTERM),
        ("prefetch by SIGINT", has(wheelhouse), signal.SIGINT),
        ("prefetch by SIGKILL", has(unpacked.parent), signal.SIGKILL),
        ("environment by SIGTERM", has(log / "environment.log", "pip sync"), signal.SIGTERM),
        ("environment by SIGKILL", has(log / "environment.log", "pip sync"), signal.SIGKILL),
        ("compile by SIGTERM", has(log / "main.log", _ENTERED), signal.SIGTERM),
        ("compile by SIGKILL", has(log / "main.log", _ENTERED), signal.SIGKILL),
    )
    with closing(Command(root)) as command:
        for name, seen, number in plan:
            running = command.start(*options)
            # What an earlier run left there is no sign of this one.
            running.says("prefetch: fetch and verify" if name.startswith("prefetch") else "wheels: build")
            running.until(lambda: not (log / "main.log").exists())
            running.until(seen)
            build.endings[name] = end(running, number)
        first = command.start(*options)
        first.says("wheels: build")
        build.first_pid = first.pid
        build.refused = command.run(*options, "--no-wait")
        second = command.start(*options)
        second.says("waiting")
        build.finished = (first.wait(), first.stdout, first.stderr)
        build.waited = (second.wait(), second.stdout, second.stderr)
        yield build


ENDINGS = [
    *(f"prefetch by {how}" for how in ("SIGTERM", "SIGINT", "SIGKILL")),
    *(f"{where} by {how}" for where in ("environment", "compile") for how in ("SIGTERM", "SIGKILL")),
]


@pytest.mark.parametrize("name", ENDINGS)
def test_an_interrupted_run_says_so_and_leaves_no_process(battered: Battered, name: str) -> None:
    ending = battered.endings[name]
    words = {"SIGTERM": (143, "stopped by SIGTERM"), "SIGINT": (130, "stopped"), "SIGKILL": (137, "")}
    code, text = words[name.rpartition(" ")[2]]
    assert ending.code == code, ending.stderr
    assert text in ending.stderr
    if text:
        assert ending.stderr.endswith("run the same command again to resume\n")
    assert "Traceback" not in ending.stderr
    if not name.startswith("prefetch"):
        assert ending.started, "the signal came while a program ran"
    assert not ending.left


def test_what_was_finished_before_an_interruption_is_not_done_again(battered: Battered) -> None:
    for name in ENDINGS:
        redone = "prefetch: fetch and verify" in battered.endings[name].stderr
        assert redone == (name.startswith("prefetch") or name == "environment by SIGTERM"), name


def test_the_next_run_finishes(battered: Battered) -> None:
    code, stdout, stderr = battered.finished
    assert code == 0, stderr
    assert "skipped   prefetch (unchanged)" in stdout
    assert "prefetch: unchanged, skipped" in stderr


def test_a_second_run_that_may_not_wait_names_the_first(battered: Battered) -> None:
    code, stdout, stderr = battered.refused
    assert (code, stdout) == (24, "")
    assert f"process {battered.first_pid} is working in the same folder" in stderr
    assert "remedy: " in stderr


def test_a_second_run_that_waits_says_so_and_finds_all_done(battered: Battered) -> None:
    code, stdout, stderr = battered.waited
    assert code == 0, stderr
    assert stderr.startswith(f"process {battered.first_pid} is working in the same folder; waiting")
    assert "skipped   prefetch, wheels, inspect, image, attest, record (unchanged)" in stdout


def test_place_and_history_leave_no_trace(battered: Battered, rehearsal: Rehearsal) -> None:
    assert battered.folder.name == rehearsal.folder.name
    names = sorted(path.name for path in (rehearsal.folder / "wheels").iterdir())
    assert sorted(path.name for path in (battered.folder / "wheels").iterdir()) == names
    for name in (*(f"wheels/{name}" for name in names), "plan.json", "inspection.json", "pylock.toml"):
        assert (battered.folder / name).read_bytes() == (rehearsal.folder / name).read_bytes(), name


def test_the_records_differ_in_times_and_logs_alone(battered: Battered, rehearsal: Rehearsal) -> None:
    def steady(folder: Path) -> object:
        record = json.loads((folder / "record.json").read_bytes())
        timed = ("logs/", "provenance.intoto.json")
        record["files"] = [file for file in record["files"] if not file["path"].startswith(timed)]
        record["stages"] = [(stage["name"], stage["status"]) for stage in record["stages"]]
        for subject in record["subjects"]:
            del subject["isolation"]["interfaces"]
        return record

    assert steady(battered.folder) == steady(rehearsal.folder)


def test_nothing_half_made_is_left(battered: Battered) -> None:
    assert [path.name for path in (battered.dist / "rehearsal").iterdir()] == [battered.folder.name]
    stages = battered.work / "work" / battered.folder.name
    assert {path.name for path in stages.iterdir()} == {"lock", *(stage.name for stage in STAGES)}
    assert {path.name for path in (stages / "prefetch").iterdir()} == {"source", "wheelhouse", "stage.json"}
    assert {path.name for path in (stages / "wheels").iterdir()} == {"wheels", "logs", "stage.json"}


# The short stages, on copies of the shared build


@pytest.fixture(scope="module")
def short(rehearsal: Rehearsal, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder in which the long stages are done."""
    return rehearsal.copy_work(tmp_path_factory.mktemp("short") / "work", "prefetch", "wheels")


@pytest.mark.parametrize(
    ("stage", "number", "code"),
    [
        ("inspect", signal.SIGTERM, 143),
        ("inspect", signal.SIGINT, 130),
        ("record", signal.SIGTERM, 143),
        ("record", signal.SIGINT, 130),
        ("record", signal.SIGKILL, 137),
    ],
)
def test_the_short_stages_resume_too(
    rehearsal: Rehearsal, command: Command, short: Path, tmp_path: Path, stage: str, number: signal.Signals, code: int
) -> None:
    for done in ("inspect", "record"):
        shutil.rmtree(rehearsal.stage(short, done), ignore_errors=True)
    dist = tmp_path / "dist"
    options = ("build", "--recipe", "rehearsal", "--work", short, "--dist", dist)
    running = command.start(*options)
    running.says(f"{stage}: ")
    assert end(running, number).code == code, running.stderr
    assert not (dist / "rehearsal" / rehearsal.folder.name).exists(), "no folder before it is whole"
    status, stdout, stderr = command.run(*options)
    assert status == 0, stderr
    assert "skipped   prefetch, wheels" in stdout
    assert [path.name for path in (dist / "rehearsal").iterdir()] == [rehearsal.folder.name], "no leftovers"
