"""Which isolation a machine grants, what the fixed folder must be, and that one build at a time uses it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cufallback.errors import BuildError, CommandError, WorkspaceError
from cufallback.process import LocalRunner, RecordingRunner
from cufallback.wheel import isolate
from cufallback.wheel.environment import Environment
from cufallback.wheel.isolate import FIXED, Isolation, Room, open_room, probe_isolation

NONE = Isolation("none", root=True, why="a test")
SPACES = Isolation("network namespace", root=True, why="a test")


def refuse(words: str, code: int = 1) -> RecordingRunner:
    return RecordingRunner(lambda _argv: (code, words))


def test_this_machine_is_probed_for_real() -> None:
    found = probe_isolation(LocalRunner(), environ={})
    assert found.why
    assert found.statement.startswith("network: isolated" if found.kind != "none" else "network: not isolated")


def test_a_grant_is_believed_only_with_evidence_from_inside() -> None:
    granted = probe_isolation(
        RecordingRunner(lambda _argv: (0, 'cufallback-network before {"lo": [0, 0]}\n')), environ={}
    )
    assert granted.kind == "network namespace"
    assert probe_isolation(RecordingRunner(), environ={}).kind == "none"


@pytest.mark.parametrize(("uid", "ways"), [(0, [False, True]), (1000, [True])])
def test_a_refusal_says_why_and_root_tries_a_user_namespace_too(
    monkeypatch: pytest.MonkeyPatch, uid: int, ways: list[bool]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    runner = refuse("unshare: unshare failed: Operation not permitted\n")
    found = probe_isolation(runner, environ={})
    assert found.statement == "network: not isolated (unshare: unshare failed: Operation not permitted)"
    assert ["--map-root-user" in call for call in runner.calls] == ways


def test_a_machine_without_unshare_is_not_isolated() -> None:
    class Missing(RecordingRunner):
        def run(self, *args: object, **options: object) -> object:  # type: ignore[override]
            raise CommandError("unshare was not found", remedy="install it")

    assert probe_isolation(Missing(), environ={}).why == "unshare was not found"


def test_the_switch_turns_namespaces_off_without_trying() -> None:
    runner = RecordingRunner()
    found = probe_isolation(runner, environ={"CUFALLBACK_ISOLATION": "none"})
    assert found.statement == "network: not isolated (CUFALLBACK_ISOLATION=none)"
    assert runner.calls == []


def test_an_unknown_value_of_the_switch_is_an_error() -> None:
    with pytest.raises(WorkspaceError, match="unknown isolation 'off'"):
        probe_isolation(RecordingRunner(), environ={"CUFALLBACK_ISOLATION": "off"})


QUIET = """cufallback-network before {"lo": [0, 0]}
cufallback-network after {"lo": [0, 0]}
"""


def room(isolation: Isolation, tmp_path: Path) -> Room:
    return Room(isolation, tmp_path, tmp_path, tmp_path, (("/s\u00fcd west", str(FIXED / "src")),))


def test_the_command_enters_namespaces_and_keeps_paths_whole(tmp_path: Path) -> None:
    runner = RecordingRunner(lambda _argv: (0, QUIET))
    room(SPACES, tmp_path).run(["prog", "a b"], env={"A": "1"}, runner=runner)
    (call,) = runner.calls
    assert call[0] == "unshare"
    assert {"--net", "--mount", "--pid", "--kill-child"} <= set(call)
    spec = json.loads(call[-1])
    assert spec["argv"] == ["prog", "a b"]
    assert spec["binds"] == [["/s\u00fcd west", str(FIXED / "src")]]
    assert runner.environments == [{"A": "1"}]


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        ("", "never"),
        (QUIET.splitlines()[0], "before"),
        (QUIET.replace("\ncufallback-network after", "\nbusy...cufallback-network after"), "before"),
        (QUIET + QUIET.splitlines()[1], "before and after and after"),
    ],
)
def test_evidence_that_is_lost_or_forged_is_an_error(tmp_path: Path, output: str, seen: str) -> None:
    with pytest.raises(BuildError, match=f"was read {seen}\n"):
        room(SPACES, tmp_path).run(["prog"], env={}, runner=RecordingRunner(lambda _argv: (0, output)))


@pytest.mark.parametrize("text", ["{", "[]", '{"eth0": "x"}', '{"eth0": [1]}'])
def test_evidence_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    output = QUIET.replace('{"lo": [0, 0]}', text)
    with pytest.raises(BuildError, match="looks like evidence"):
        room(SPACES, tmp_path).run(["prog"], env={}, runner=RecordingRunner(lambda _argv: (0, output)))


def test_a_failed_command_is_left_to_its_own_words(tmp_path: Path) -> None:
    done, _isolation = room(SPACES, tmp_path).run(["prog"], env={}, runner=RecordingRunner(lambda _argv: (1, "mount")))
    assert (done.returncode, done.output) == (1, "mount")


@pytest.fixture
def entered(environment: Environment, tmp_path: Path) -> Iterator[Room]:
    """A real room; skips where the machine grants none."""
    granted = probe_isolation(LocalRunner(), environ={})
    if granted.kind == "none":
        pytest.skip(granted.why)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_room(granted, scratch, environment) as inside:
        yield inside


def test_a_last_line_without_its_end_does_not_swallow_the_evidence(entered: Room) -> None:
    done, isolation = entered.run(["/usr/bin/printf", "no end"], env={}, runner=LocalRunner())
    assert done.returncode == 0
    assert [line.split()[0] for line in isolation.interfaces] == ["before", "after"]


def test_a_build_cannot_alter_what_builds_the_next(entered: Room, environment: Environment) -> None:
    script = "for place; do (echo x > $place/planted) 2>/dev/null && echo $place; done; true"
    places = [*(FIXED / name for name in ("env", "env/bin", "python", "python/bin", "src", "out", "tmp"))]
    places += [environment.folder, environment.base_prefix]
    done, _isolation = entered.run(["/bin/sh", "-c", script, "sh", *places], env={}, runner=LocalRunner())
    written = [line for line in done.output.splitlines() if line.startswith("/")]
    assert written == [str(FIXED / name) for name in ("src", "out", "tmp")]
    assert not (environment.folder / "planted").exists()


def test_the_log_names_no_path_of_this_machine(entered: Room, environment: Environment, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [f"-I{environment.headers}", f"{environment.folder}/x.py:3:", f"'{entered.source}'"]
    done, _isolation = entered.run(["/bin/echo", *words], env={}, runner=LocalRunner(), log=log)
    text = log.read_text()
    assert str(tmp_path) in done.output
    assert str(tmp_path) not in text
    assert text.splitlines()[-3] == f"-I{FIXED}/python/include/python3.11 {FIXED}/env/x.py:3: '{FIXED}/src'"
    assert "unshare" not in text


def test_traffic_on_an_isolated_network_is_an_error(tmp_path: Path) -> None:
    def answer(_argv: tuple[str, ...]) -> tuple[int, str]:
        return (
            0,
            'cufallback-network before {"lo": [0, 0], "tunl0": [0, 0]}\ncufallback-network after {"eth0": [9, 9]}\n',
        )

    with pytest.raises(BuildError, match="eth0 carried traffic after"):
        room(SPACES, tmp_path).run(["prog"], env={}, runner=RecordingRunner(answer))
    done, isolation = room(NONE, tmp_path).run(["prog"], env={}, runner=RecordingRunner(answer))
    assert isolation.interfaces == ('before {"lo": [0, 0], "tunl0": [0, 0]}', 'after {"eth0": [9, 9]}')
    assert done.returncode == 0


@pytest.fixture
def fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fixed folder, moved where tests may break it."""
    folder = tmp_path / "fixed"
    monkeypatch.setattr(isolate, "FIXED", folder)
    for name, inner in (("SOURCE", "src"), ("ENVIRONMENT", "env"), ("PYTHON", "python"), ("OUTPUT", "out")):
        monkeypatch.setattr(isolate, name, folder / inner)
    monkeypatch.setattr(isolate, "TEMPORARY", folder / "tmp")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment as far as its layout goes."""
    prefix, folder = tmp_path / "base prefix", tmp_path / "env"
    for inner in (prefix / "bin", prefix / "include/python3.11", folder / "bin"):
        inner.mkdir(parents=True)
    executable = prefix / "bin/python3.11"
    executable.touch()
    (prefix / "include/python3.11/Python.h").touch()
    (folder / "bin/python").symlink_to(executable)
    (folder / "bin/tool").write_text("#!/bin/sh\n")
    (folder / "pyvenv.cfg").write_text(f"home = {prefix}/bin\nversion_info = 3.11.7\n")
    return Environment(folder / "bin/python", folder, prefix, executable, prefix / "include/python3.11")


def test_the_fixed_folder_holds_copies_and_is_emptied(fixed: Path, environment: Environment, tmp_path: Path) -> None:
    with open_room(NONE, tmp_path, environment) as inside:
        assert inside.source == fixed / "src"
        assert (fixed / "env/bin/python").readlink() == fixed / "python/bin/python3.11"
        assert (fixed / "env/pyvenv.cfg").read_text() == f"home = {fixed}/python/bin\nversion_info = 3.11.7\n"
        assert (fixed / "python/bin/python3.11").exists()
        # Headers must be there in person: CMake follows links, and debug information keeps where they lead.
        assert (fixed / "python/include/python3.11/Python.h").resolve() == fixed / "python/include/python3.11/Python.h"
    assert [path.name for path in fixed.iterdir()] == ["lock"]
    # The environment is linked into the fixed folder, and must survive what is done to it there.
    assert (environment.folder / "bin/python").readlink() == environment.base_executable
    assert "base prefix" in (environment.folder / "pyvenv.cfg").read_text()


def test_leftovers_of_a_killed_build_are_removed(fixed: Path, environment: Environment, tmp_path: Path) -> None:
    (fixed / "src").mkdir(parents=True)
    (fixed / "src/old").touch()
    (fixed / "python").symlink_to("/usr")
    with open_room(NONE, tmp_path, environment) as inside:
        assert list(inside.source.iterdir()) == []
    assert Path("/usr/bin").is_dir()


@pytest.mark.parametrize("attack", ["link", "file", "writable", "foreign"])
def test_a_fixed_folder_that_is_not_ours_alone_is_refused(
    fixed: Path, environment: Environment, tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    if attack == "link":
        fixed.symlink_to(victim)
    elif attack == "file":
        fixed.touch()
    else:
        fixed.mkdir()
        if attack == "writable":
            fixed.chmod(0o777)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(WorkspaceError, match="must be a folder that belongs to this user"):
        open_room(NONE, tmp_path, environment).__enter__()
    assert (victim / "precious").exists()


def test_a_lock_file_that_is_a_link_is_not_followed(fixed: Path, environment: Environment, tmp_path: Path) -> None:
    fixed.mkdir()
    (fixed / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WorkspaceError, match="symbolic links"):
        open_room(NONE, tmp_path, environment).__enter__()
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_build_waits_and_says_so(fixed: Path, environment: Environment, tmp_path: Path) -> None:
    said: list[str] = []
    waiting, entered = threading.Event(), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    def second() -> None:
        with open_room(NONE, tmp_path, environment, say=say):
            entered.set()

    with open_room(NONE, tmp_path, environment):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        assert not entered.is_set()
    assert entered.wait(10)
    thread.join()
    assert said == [f"another build uses {fixed}; waiting for it to end"]


def test_in_namespaces_the_environment_shows_the_fixed_interpreter(environment: Environment, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_room(SPACES, scratch, environment) as inside:
        targets = {target: source for source, target in inside.binds}
    face = Path(targets[f"{FIXED}/env/bin"])
    assert (face / "python").readlink() == FIXED / "python/bin/python3.11"
    assert (face / "tool").is_file()
    assert targets[f"{FIXED}/python"] == str(environment.base_prefix)
    assert (environment.folder / "bin/python").readlink() == environment.base_executable
