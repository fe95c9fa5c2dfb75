from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from cufallback.errors import CommandError, WorkspaceError
from cufallback.process import LocalRunner, RecordingRunner

runner = LocalRunner()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    """Zombies count as dead: nobody has waited for them yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int) -> None:
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} was left running")


def test_both_streams_arrive_in_order_and_in_the_log(tmp_path: Path) -> None:
    seen: list[str] = []
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr, flush=True); print('three')"
    done = runner.run(python(code), log=tmp_path / "deep/er/x.log", on_line=seen.append)
    assert seen == ["one", "two", "three"]
    assert done.output == "one\ntwo\nthree\n"
    assert done.returncode == 0
    command, _, rest = (tmp_path / "deep/er/x.log").read_text().partition("\n")
    assert command.startswith("+ ")
    assert "import sys" in command
    assert rest == done.output


def test_a_second_command_is_added_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    runner.run(["echo", "a"], log=log)
    runner.run(["echo", "b"], log=log)
    assert log.read_text() == "+ echo a\na\n+ echo b\nb\n"


def test_the_log_grows_while_the_program_runs(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    at_first_line: list[str] = []
    code = "import time; print('first', flush=True); time.sleep(0.3); print('second')"
    runner.run(python(code), log=log, on_line=lambda _line: at_first_line.append(log.read_text()))
    assert at_first_line[0].endswith("first\n")


def test_secrets_reach_neither_log_nor_output_nor_callback_nor_error(tmp_path: Path) -> None:
    seen: list[str] = []
    log = tmp_path / "x.log"
    command = ["sh", "-c", "echo HF_TOKEN=sesame; exit 3", "--password", "sesame", "https://me:sesame@host/x"]
    with pytest.raises(CommandError) as caught:
        runner.run(command, log=log, on_line=seen.append)
    texts = [*seen, log.read_text(), str(caught.value), runner.run(command, check=False).output]
    assert seen == ["HF_TOKEN=[redacted]"]
    assert not [text for text in texts if "sesame" in text]


def test_a_failure_names_program_status_log_and_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(CommandError) as caught:
        runner.run(["sh", "-c", "seq 40; exit 7"], log=log)
    text = str(caught.value)
    assert "sh exited with 7" in text
    assert str(log) in text
    assert "    40" in text
    assert "    20\n" not in text


def test_without_check_the_status_is_the_callers_business() -> None:
    assert runner.run(["sh", "-c", "exit 7"], check=False).returncode == 7


@pytest.mark.parametrize("name", ["no-such-program-here", "/no/such/program"])
def test_a_missing_program_is_named(name: str) -> None:
    with pytest.raises(CommandError, match=f"{name} was not found"):
        runner.run([name, "--version"])


def test_a_missing_folder_is_named_not_the_program(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="gone was not found"):
        runner.run(["true"], cwd=tmp_path / "gone")


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(CommandError, match="could not be started: Permission denied"):
        runner.run([text])


def test_the_environment_given_is_the_whole_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFALLBACK_LEAK", "yes")
    assert runner.run(["/usr/bin/env"], env={"A": "1"}).output == "A=1\n"
    assert "CUFALLBACK_LEAK=yes" in runner.run(["/usr/bin/env"]).output


def test_stdin_is_closed_so_that_no_program_waits_for_an_answer() -> None:
    assert runner.run(["cat"], timeout=20).output == ""


def test_bytes_that_are_not_utf8_are_no_fault() -> None:
    assert runner.run(["printf", r"a\377b\n"]).output == "a\N{REPLACEMENT CHARACTER}b\n"


@pytest.mark.timeout(60, method="thread")  # a child that is not ended can only be seen from outside
def test_running_out_of_time_ends_the_program_and_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(CommandError, match=r"did not end within 0\.5 s"):
        runner.run(["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"], timeout=0.5)
    wait_until_dead(int(pid.read_text()))


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="did not end within"):
        runner.run(python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"), timeout=0.5)


def test_a_quick_program_leaves_no_timer_behind() -> None:
    before = threading.active_count()
    runner.run(["true"], timeout=600)
    assert threading.active_count() == before


def test_an_interrupt_ends_the_program_and_its_children(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(["sh", "-c", "sleep 600 & echo $!; wait"], on_line=interrupt)
    wait_until_dead(pids[0])


def test_a_log_that_cannot_be_written_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkspaceError, match=r"Not a directory|File exists"):
        runner.run(["touch", tmp_path / "started"], log=tmp_path / "file" / "x.log")
    assert not (tmp_path / "started").exists()


def test_a_disk_that_is_full_ends_the_program() -> None:
    with pytest.raises(WorkspaceError, match="No space left on device"):
        runner.run(["sh", "-c", "echo $$; sleep 600"], log=Path("/dev/full"), timeout=20)


def test_paths_with_spaces_and_umlauts_pass_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "ein schöner Ort; rm -rf $HOME"
    folder.mkdir()
    assert runner.run(["pwd"], cwd=folder).output == f"{folder}\n"
    assert runner.run(["echo", folder]).output == f"{folder}\n"


def test_the_recording_runner_keeps_calls_and_answers() -> None:
    recording = RecordingRunner(answer=lambda argv: (1, "x\ny\n") if argv[0] == "bad" else (0, "fine"))
    seen: list[str] = []
    assert recording.run(["good", Path("p")], env={"A": "1"}).output == "fine"
    assert recording.run(["bad"], check=False, on_line=seen.append).returncode == 1
    with pytest.raises(CommandError, match="bad exited with 1"):
        recording.run(["bad"])
    assert recording.calls == [("good", "p"), ("bad",), ("bad",)]
    assert recording.environments == [{"A": "1"}, None, None]
    assert seen == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "logged"),
    [
        ("/a/b/c.py:3: no", "ENV/c.py:3: no"),
        ("in '/a/b'.", "in 'ENV'."),
        ("/a/b.", "ENV."),
        ("-I/a/b -isystem/a/b -Wl,-rpath,/a/b --x=/a/b", "-IENV -isystemENV -Wl,-rpath,ENV --x=ENV"),
        ("file:///a/b/x", "file://ENV/x"),
        ("/a/b/deep/x /a/x", "DEEP/x TOP/x"),
        ("/x/a/b /a/bc /a/b-c /a/b.c /ab", "/x/a/b TOP/bc TOP/b-c TOP/b.c /ab"),
    ],
)
def test_a_log_can_name_places_by_what_they_are(tmp_path: Path, line: str, logged: str) -> None:
    names = {"/a": "TOP", "/a/b": "ENV", "/a/b/deep": "DEEP"}
    log = tmp_path / "log"
    done = LocalRunner().run(["/bin/echo", line], log=log, shown=["say", "/a/b"], names=names)
    assert done.output == f"{line}\n"
    assert log.read_text() == f"+ say ENV\n{logged}\n"
