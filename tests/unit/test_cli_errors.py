"""Whatever the user does wrong ends in one clear error and the documented exit status."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cufallback import cli
from cufallback.__main__ import main
from cufallback.cli import run
from cufallback.errors import CufallbackError, ExitCode, ToolchainError, UsageError

CHECKOUT = Path(__file__).resolve().parents[2]
COMMANDS = ("build", "plan", "lock", "verify", "sign", "push", "show", "inspect", "recipe", "source")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("CUFALLBACK_DATA", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "build"), "CFB": f"{sys.executable} -m cufallback"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["recipe"],
        ["source"],
        ["biuld"],
        ["verify"],
        ["inspect"],
        ["build", "--recipie", "x"],
        ["lock", "--engine", "poetry"],
        ["build", "--until"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("usage: cufallback ")
    assert re.search(r"^cufallback[ \w]*: error: \S", told.err, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == ExitCode.OK
    assert f"usage: cufallback {command}" in capsys.readouterr().out


def test_an_unknown_stage_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError) as raised:
        run(["build", "--recipe", "rehearsal", "--until", "weels"])
    assert str(raised.value) == (
        "--until: there is no stage 'weels'\n  remedy: stages are prefetch, wheels, inspect, image, attest, record"
    )


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 315532799.0])
def test_a_clock_before_1980(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="clock is before 1980") as raised:
        run(["build", "--recipe", "rehearsal"], clock=lambda: seconds)
    assert "set the clock" in raised.value.remedy
    assert not (tmp_path / ".cufallback").exists()


@pytest.mark.parametrize("command", ["build", "plan", "lock"])
def test_an_unknown_recipe_names_the_nearest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--recipe", "rehersal"]) == ExitCode.RECIPE
    assert "did you mean rehearsal?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["build", "plan", "lock"])
@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        (None, "", "No such file"),
        ("schema = 1\n[recipe\n", "", "not valid TOML: Expected ']' at the end of a table declaration (at line 2"),
        ('schema = 1\n[recipe]\nnmae = "x"\n', ":3", "name"),
        ("", "", ""),
    ],
    ids=["missing", "broken", "unknown key", "empty"],
)
def test_a_recipe_file_that_cannot_be_used_is_named_with_its_line(
    command: str, content: str | None, where: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r\u00e9 cipe.toml"
    if content is not None:
        path.write_text(content)
    assert main([command, "--recipe", str(path)]) == ExitCode.RECIPE
    error = capsys.readouterr().err
    assert f"{path}{where}" in error
    assert reason.lower() in error.lower()
    assert "remedy: " in error
    assert "Traceback" not in error


def test_a_data_folder_without_recipes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFALLBACK_DATA", str(tmp_path))
    assert main(["plan"]) == ExitCode.RECIPE
    assert "CUFALLBACK_DATA" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*CufallbackError.__subclasses__()], ids=lambda kind: kind.__name__)
def test_each_kind_of_error_ends_with_its_own_status_and_its_remedy(
    kind: type[CufallbackError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object) -> int:
        raise kind("it broke with TOKEN=sesame", remedy="mend it", where="here:3")

    monkeypatch.setattr(cli, "_recipe_list", fail)
    assert main(["recipe", "list"]) == kind.exit_code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: here:3: it broke with TOKEN=[redacted]\n  remedy: mend it\n"


def test_a_bug_leaves_a_report_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object) -> int:
        raise ZeroDivisionError("password=sesame")

    monkeypatch.setattr(cli, "_recipe_list", fail)
    assert main(["recipe", "list"]) == ExitCode.UNEXPECTED
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected fault in cufallback\n  remedy: ")
    assert "Traceback" not in error
    (report,) = (tmp_path / "tmp").glob("cufallback-report-*.txt")
    assert str(report) in error
    text = report.read_text()
    assert "Traceback" in text
    assert "ZeroDivisionError" in text
    assert "sesame" not in text


def test_a_bug_when_no_report_can_be_written_is_still_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object) -> int:
        raise ZeroDivisionError("the cause")

    def full(*_args: object, **_options: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "_recipe_list", fail)
    monkeypatch.setattr("tempfile.mkstemp", full)
    assert main(["recipe", "list"]) == ExitCode.UNEXPECTED
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected fault in cufallback")
    assert "ZeroDivisionError: the cause" in error, "without a report the cause must be on the screen"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    def hang(_options: object) -> int:
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), number)).start()
        threading.Event().wait(10)
        pytest.fail("no signal came")

    monkeypatch.setattr(cli, "_recipe_list", hang)
    assert main(["recipe", "list"]) == code
    assert "run the same command again to resume" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["recipe schema", "recipe show rehearsal", "plan --recipe rehearsal", "--help"])
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    done = shell(f"set -o pipefail; $CFB {command} | head -c 1 >/dev/null")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["recipe schema", "plan --recipe rehearsal", "recipe list"])
def test_a_reader_that_never_was_is_no_error(command: str) -> None:
    done = shell(f"set -o pipefail; (sleep 0.2; exec $CFB {command}) | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["recipe schema", "recipe list"])
def test_a_full_disk_behind_stdout_is_one_clear_error(command: str) -> None:
    done = shell(f"$CFB {command} >/dev/full")
    assert done.returncode == ExitCode.WORKSPACE, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", ["recipe schema", "recipe list"])
def test_no_stdout_at_all_is_no_crash(command: str) -> None:
    done = shell(f"$CFB {command} >&-")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, int(ExitCode.WORKSPACE))


def test_text_comes_out_whatever_the_locale() -> None:
    done = shell("$CFB recipe list", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def commands() -> Callable[[], set[str]]:
    def listed() -> set[str]:
        done = shell("$CFB --help")
        return set(re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE))

    return listed


def test_the_commands_are_these(commands: Callable[[], set[str]]) -> None:
    assert commands() == set(COMMANDS)


def test_an_edited_lock_is_named_before_a_network_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("recipes", "locks"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    lock = tmp_path / "locks/rehearsal/build.txt"
    lock.write_text(lock.read_text().replace("    --hash=", "    # hash=", 1))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://127.0.0.1:9/simple")
    monkeypatch.setenv("CUFALLBACK_FIND_LINKS", "")
    recipe = tmp_path / "recipes/rehearsal.toml"
    code = main(["build", "--recipe", str(recipe), "--work", str(tmp_path / "w"), "--dist", str(tmp_path / "d")])
    assert code == ExitCode.LOCK
    assert f"{lock}:" in capsys.readouterr().err
