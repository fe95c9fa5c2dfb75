"""Disks that fill in the middle, cannot be written, or have something in the way."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from build_rooms import Command, Rehearsal, Started, resize

pytestmark = [pytest.mark.slow, pytest.mark.network]

_MIB = 2**20
Mount = Callable[[str], Path]


@pytest.fixture
def disk(small_disk: Mount) -> Path:
    """A disk that has room enough when the build starts."""
    return small_disk("size=8g")


def fill_up(running: Started, disk: Path, *, at: str, room: int) -> None:
    """Leave ``room`` MiB on ``disk`` at the moment when the build says ``at``."""
    running.says(at)
    os.kill(running.pid, signal.SIGSTOP)
    used = shutil.disk_usage(disk).used // _MIB
    resize(disk, f"{used + room}m")
    os.kill(running.pid, signal.SIGCONT)


def expect_full(running: Started, work: Path) -> None:
    code = running.wait()
    assert code == 23, running.stderr
    assert "No space left on device" in running.stderr or "the disk is full" in running.stderr
    assert "remedy: free disk space" in running.stderr
    assert "resumes" in running.stderr
    assert str(work) in running.stderr
    assert "Traceback" not in running.stderr


@pytest.fixture
def options(rehearsal: Rehearsal, disk: Path) -> tuple[str | Path, ...]:
    (disk / "work").mkdir()
    (disk / "work/store").symlink_to(rehearsal.work / "store")
    return ("build", "--recipe", "rehearsal", "--work", disk / "work", "--dist", disk / "dist")


def test_full_while_fetching_and_resumed_with_more_room(
    command: Command, options: tuple[str | Path, ...], disk: Path
) -> None:
    running = command.start(*options, "--until", "prefetch")
    fill_up(running, disk, at="prefetch: fetch and verify", room=20)
    expect_full(running, disk / "work")
    resize(disk, "8g")
    code, stdout, stderr = command.run(*options, "--until", "prefetch")
    assert code == 0, stderr
    assert "done      prefetch" in stdout


@pytest.mark.parametrize("room", [1, 100])
def test_full_while_the_environment_is_installed(
    rehearsal: Rehearsal, command: Command, options: tuple[str | Path, ...], disk: Path, room: int
) -> None:
    shutil.copytree(
        rehearsal.stage(rehearsal.work, "prefetch"), rehearsal.stage(disk / "work", "prefetch"), symlinks=True
    )
    running = command.start(*options)
    fill_up(running, disk, at="wheels: build", room=room)
    expect_full(running, disk / "work")
    assert not rehearsal.stage(disk / "work", "wheels").joinpath("stage.json").exists()


def test_full_while_the_output_is_written_and_resumed_elsewhere(
    rehearsal: Rehearsal, command: Command, small_disk: Mount, tmp_path: Path
) -> None:
    work, small = rehearsal.copy_work(tmp_path / "work", "prefetch", "wheels"), small_disk("size=10m")
    running = command.start("build", "--recipe", "rehearsal", "--work", work, "--dist", small / "dist")
    expect_full(running, small / "dist")
    assert not list((small / "dist/rehearsal").iterdir()), "nothing half-written"
    resize(small, "100m")
    code, stdout, stderr = command.run("build", "--recipe", "rehearsal", "--work", work, "--dist", small / "dist")
    assert code == 0, stderr
    assert "skipped   prefetch, wheels, inspect, image, attest (unchanged)" in stdout


@pytest.mark.parametrize("option", ["--work", "--dist"])
def test_a_read_only_folder_is_refused_before_anything_runs(
    command: Command, small_disk: Mount, tmp_path: Path, option: str
) -> None:
    disk = small_disk("size=8g")
    resize(disk, "8g,ro")
    folders = {"--work": tmp_path / "work", "--dist": tmp_path / "dist"} | {option: disk / "x"}
    words = [word for pair in folders.items() for word in pair]
    code, stdout, stderr = command.run("build", "--recipe", "rehearsal", *words)
    assert (code, stdout) == (23, ""), stderr
    assert f"{disk / 'x'}: Read-only file system" in stderr
    assert "remedy: choose a writable folder (--work, --dist)" in stderr
    assert "prefetch" not in stderr


@pytest.mark.parametrize("option", ["--work", "--dist"])
@pytest.mark.parametrize("below", ["", "/inner"])
def test_a_file_in_the_way_is_named(command: Command, tmp_path: Path, option: str, below: str) -> None:
    (tmp_path / "file").write_text("x")
    folders = {"--work": str(tmp_path / "work"), "--dist": str(tmp_path / "dist")}
    folders[option] = f"{tmp_path / 'file'}{below}"
    words = [word for pair in folders.items() for word in pair]
    code, _stdout, stderr = command.run("build", "--recipe", "rehearsal", *words)
    assert code == 23, stderr
    assert str(tmp_path / "file") in stderr
    assert "a file is in its way" in stderr
    assert (tmp_path / "file").read_text() == "x"
