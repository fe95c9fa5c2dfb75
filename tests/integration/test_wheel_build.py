"""Wheels built for real: the same bytes from anywhere, nothing of the machine inside, no network, clean ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from wheel_rooms import (  # house and granted are fixtures
    NONE,
    THIS,
    TINY,
    House,
    build,
    extension_project,
    granted,
    house,
    write_project,
)

from cufallback.errors import BuildError, WorkspaceError
from cufallback.process import LocalRunner
from cufallback.progress import Silent
from cufallback.wheel.builder import BuildRequest, build_wheel
from cufallback.wheel.environment import Environment, open_environment
from cufallback.wheel.isolate import FIXED, Isolation, open_room

__all__ = ["granted", "house"]
pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment(house: Callable[..., House], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return house(TINY).environment(tmp_path_factory.mktemp("e") / "env")


@pytest.fixture(scope="module")
def first_wheel(environment: Environment, granted: Isolation, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The extension's wheel, built in namespaces in a folder with a short plain name."""
    work = tmp_path_factory.mktemp("a")
    return build(extension_project(work / "p"), environment, work, granted).path.read_bytes()


@pytest.fixture
def below_var_tmp() -> Iterator[Path]:
    """A folder beside the fixed one, which the empty file system of the namespaces hides."""
    with tempfile.TemporaryDirectory(dir=FIXED.parent, prefix="cufallback test ") as name:
        yield Path(name)


def test_long_names_with_spaces_and_umlauts_change_nothing(
    house: Callable[..., House], first_wheel: bytes, granted: Isolation, tmp_path: Path
) -> None:
    work = tmp_path / "a much longer name, with spaces and \u00fcml\u00e4uts, than the first"
    environment = house(TINY).environment(work / "the \u00e9nvironment")
    built = build(extension_project(work / "the project"), environment, work, granted)
    assert built.path.read_bytes() == first_wheel
    assert built.path.parent == work / "output"


def test_folders_that_the_mounts_hide_change_nothing(
    house: Callable[..., House], first_wheel: bytes, granted: Isolation, below_var_tmp: Path
) -> None:
    environment = house(TINY).environment(below_var_tmp / "env")
    built = build(extension_project(below_var_tmp / "p"), environment, below_var_tmp, granted)
    assert built.path.read_bytes() == first_wheel


def test_what_the_mounts_hide_stays_visible_if_the_build_needs_it(
    environment: Environment, granted: Isolation, below_var_tmp: Path
) -> None:
    prefix = below_var_tmp / "interpreter"  # its libraries may be named by absolute paths
    for name in ("interpreter/lib", "other", "scratch"):
        (below_var_tmp / name).mkdir(parents=True)
    moved = replace(environment, base_prefix=prefix, base_executable=prefix / "bin/python3")
    with open_room(granted, below_var_tmp / "scratch", moved) as room:

        def exists(path: Path) -> bool:
            done, _ = room.run(["/usr/bin/test", "-e", path], env={}, runner=LocalRunner())
            return done.returncode == 0

        assert exists(prefix / "lib")
        assert not exists(below_var_tmp / "other")


def test_an_interpreter_elsewhere_changes_nothing(
    house: Callable[..., House], first_wheel: bytes, granted: Isolation, below_var_tmp: Path
) -> None:
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        pytest.skip("the system's interpreter cannot be copied by itself")
    ignore = shutil.ignore_patterns("__pycache__", "site-packages", "test", "tests", "idlelib", "share")
    copy = shutil.copytree(prefix, below_var_tmp / "an interpreter", symlinks=True, ignore=ignore)
    environment = house(TINY).environment(below_var_tmp / "env", python=copy / "bin" / f"python{THIS}")
    assert environment.base_prefix == copy
    built = build(extension_project(below_var_tmp / "p"), environment, below_var_tmp, granted)
    assert built.path.read_bytes() == first_wheel


def test_without_namespaces_the_bytes_are_the_same_and_the_record_says_so(
    environment: Environment, first_wheel: bytes, tmp_path: Path
) -> None:
    built = build(extension_project(tmp_path / "b c"), environment, tmp_path, NONE)
    assert built.path.read_bytes() == first_wheel
    assert built.isolation.statement == "network: not isolated (chosen by a test)"
    assert not [path for path in FIXED.iterdir() if path.name != "lock"]


def test_no_path_of_this_machine_is_in_the_wheel(first_wheel: bytes, environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(first_wheel)
    with zipfile.ZipFile(tmp_path / "a.whl") as archive:
        (library,) = (archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    assert str(FIXED / "src").encode() in library  # what the compiler saw, so that the next line can fail
    for place in (environment.folder, environment.base_prefix, Path.home()):
        if place != Path("/usr"):
            assert bytes(place) not in library


@pytest.mark.parametrize("way", ["granted", "none"])
def test_no_path_of_this_machine_is_in_the_log(
    environment: Environment, request: pytest.FixtureRequest, tmp_path: Path, way: str
) -> None:
    built_in = request.getfixturevalue("granted") if way == "granted" else NONE
    build(extension_project(tmp_path / "p"), environment, tmp_path, built_in)
    log = (tmp_path / "build.log").read_text()
    assert "native.c" in log
    for place in (tmp_path, environment.folder, environment.base_prefix, Path.home(), Path(__file__).parents[2]):
        if place != Path("/usr"):
            assert str(place) not in log


SPY = """
    import json, os, shutil, socket, subprocess, sys
    from setuptools import setup

    def connect():
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["SPY_PORT"])), timeout=3).close()
        except OSError as error:
            return str(error)
        return "connected"

    umask = os.umask(0); os.umask(umask)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", "got", "victim"]
    seen = {
        "connect": connect(),
        "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
        "pip": subprocess.run(download, capture_output=True).returncode,
        "environ": dict(os.environ),
        "argv": sys.argv, "cwd": os.getcwd(), "prefix": sys.prefix, "base_prefix": sys.base_prefix,
        "umask": umask, "host": socket.gethostname(), "ccache": shutil.which("ccache"),
        "mode": os.stat("setup.py").st_mode, "mtime": os.stat("setup.py").st_mtime,
        "left_behind": sorted(set(os.listdir()) & {".git", "__pycache__"}),
    }
    json.dump(seen, open("tiny/seen.json", "w"))
    setup(name="tiny", version="1.0", packages=["tiny"], package_data={"tiny": ["seen.json"]})
    """


@pytest.fixture
def spied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Environment, house: Callable[..., House]
) -> Iterator[Callable[[Isolation], dict]]:  # type: ignore[type-arg]
    """``spied(isolation)`` is what a build sees of a machine that offers it everything it should not use."""
    index = tmp_path / "index/victim"
    index.mkdir(parents=True)
    shutil.copy(next(house(TINY).wheelhouse.glob("wheel-*.whl")), index / "victim-1.0-py3-none-any.whl")
    (index / "index.html").write_text('<a href="victim-1.0-py3-none-any.whl">victim-1.0-py3-none-any.whl</a>')
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = file://{tmp_path}/index\nfind-links = {index}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ccache").write_text("#!/bin/sh\n")
    (tmp_path / "bin/ccache").chmod(0o755)
    offers = {
        "PIP_CONFIG_FILE": f"{tmp_path}/pip.conf",
        "PIP_INDEX_URL": f"file://{tmp_path}/index",
        "CUFALLBACK_TEST_SECRET": "never to be seen",
        "CFLAGS": "-DLEAK",
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    for name, value in offers.items():
        monkeypatch.setenv(name, value)
    project = write_project(
        tmp_path / "spy", {"setup.py": SPY, "tiny/__init__.py": "", ".git/HEAD": "", "__pycache__/x": ""}
    )
    (project / "setup.py").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        port = str(server.getsockname()[1])

        def spy(isolation: Isolation) -> dict:  # type: ignore[type-arg]
            built = build(project, environment, tmp_path, isolation, {"SPY_PORT": port})
            with zipfile.ZipFile(built.path) as archive:
                seen = json.loads(archive.read("tiny/seen.json"))
            assert {name: seen["environ"][name] for name in built.environment} == dict(built.environment)
            return {**seen, "isolation": built.isolation}

        yield spy


def _accept(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def test_an_isolated_build_reaches_nothing(spied: Callable[[Isolation], dict], granted: Isolation) -> None:  # type: ignore[type-arg]
    seen = spied(granted)
    assert "unreachable" in seen["connect"]
    assert "eth0" not in seen["interfaces"]
    assert seen["pip"] != 0
    assert seen["host"] == "cufallback"
    assert [line.split()[0] for line in seen["isolation"].interfaces] == ["before", "after"]
    for line in seen["isolation"].interfaces:
        assert json.loads(line.split(" ", 1)[1])["lo"] == [0, 0]


def test_without_namespaces_the_network_is_there_but_no_index(spied: Callable[[Isolation], dict]) -> None:  # type: ignore[type-arg]
    seen = spied(NONE)
    assert seen["connect"] == "connected"  # or the test above could pass for a wrong reason
    assert seen["pip"] != 0


@pytest.mark.parametrize("way", ["granted", "none"])
def test_a_build_sees_a_clean_place(
    spied: Callable[[Isolation], dict],  # type: ignore[type-arg]
    request: pytest.FixtureRequest,
    way: str,
) -> None:
    seen = spied(request.getfixturevalue("granted") if way == "granted" else NONE)
    assert not {"CUFALLBACK_TEST_SECRET", "PIP_INDEX_URL", "USER"} & set(seen["environ"])
    assert seen["environ"]["PATH"].startswith(f"{FIXED}/env/bin:/usr/bin")
    assert seen["environ"]["SOURCE_DATE_EPOCH"] == "1754900000"
    # Configuration files of the system, such as /etc/pip.conf, are beyond a cleaned environment.
    assert (seen["environ"]["PIP_CONFIG_FILE"], seen["environ"]["PIP_NO_INDEX"]) == (os.devnull, "1")
    assert "LEAK" not in seen["environ"]["CFLAGS"]
    assert seen["ccache"] in (None, "/usr/bin/ccache")
    assert seen["cwd"] == str(FIXED / "src")
    assert (seen["prefix"], seen["base_prefix"]) == (str(FIXED / "env"), str(FIXED / "python"))
    assert seen["umask"] == 0o022
    assert (seen["mode"] & 0o7777, seen["mtime"]) == (0o644, 1_754_900_000)
    assert seen["left_behind"] == []


@pytest.mark.parametrize("way", ["granted", "none"])
def test_a_compiler_error_is_named_and_nothing_is_delivered(
    environment: Environment, request: pytest.FixtureRequest, tmp_path: Path, way: str
) -> None:
    project = extension_project(tmp_path / "p", body="return undeclared_thing;")
    with pytest.raises(BuildError) as caught:
        build(project, environment, tmp_path, request.getfixturevalue("granted") if way == "granted" else NONE)
    assert "native.c" in caught.value.reason
    assert "undeclared_thing" in caught.value.reason
    assert str(tmp_path / "build.log") in caught.value.remedy
    assert "undeclared_thing" in (tmp_path / "build.log").read_text()
    assert list((tmp_path / "output").iterdir()) == []


def test_a_broken_setup_py_is_named(environment: Environment, granted: Isolation, tmp_path: Path) -> None:
    project = write_project(tmp_path / "p", {"setup.py": "import no_such_module\n"})
    with pytest.raises(BuildError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        build(project, environment, tmp_path, granted)


def test_a_missing_tree_is_named(environment: Environment, granted: Isolation, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no source tree"):
        build(tmp_path / "absent", environment, tmp_path, granted)


def test_an_output_folder_in_the_way_is_a_workspace_error(
    environment: Environment, granted: Isolation, tmp_path: Path
) -> None:
    (tmp_path / "output").touch()
    with pytest.raises(WorkspaceError):
        build(extension_project(tmp_path / "p"), environment, tmp_path, granted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("kibibytes", [8, 64, 600])
def test_a_full_disk_is_a_workspace_error(
    environment: Environment, granted: Isolation, tmp_path: Path, kibibytes: int
) -> None:
    """It fills while folders are made, while the tree is copied, and while the compiler runs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    project = extension_project(tmp_path / "p")
    (project / "ballast").write_bytes(bytes(200_000))
    LocalRunner().run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", disk])
    try:
        with pytest.raises(WorkspaceError) as caught:
            build(project, environment, disk, granted)
        assert "space" in caught.value.reason
        assert not list(disk.rglob("*.whl"))
    finally:
        LocalRunner().run(["umount", disk])


def test_the_pristine_tree_stays_pristine(environment: Environment, granted: Isolation, tmp_path: Path) -> None:
    project = extension_project(tmp_path / "p")
    before = sorted((path, path.stat().st_mtime_ns, path.stat().st_mode) for path in project.rglob("*"))
    build(project, environment, tmp_path, granted)
    assert sorted((path, path.stat().st_mtime_ns, path.stat().st_mode) for path in project.rglob("*")) == before
    assert not (tmp_path / "scratch").exists()


def test_a_second_build_replaces_what_the_first_left(
    environment: Environment, granted: Isolation, tmp_path: Path
) -> None:
    project = extension_project(tmp_path / "p")
    (tmp_path / "scratch/src").mkdir(parents=True)
    (tmp_path / "scratch/src/stale").touch()
    first = build(project, environment, tmp_path, granted)
    assert build(project, environment, tmp_path, granted).path == first.path
    assert [path.name for path in (tmp_path / "output").iterdir()] == [first.path.name]


# A build that never ends, run by a cufallback that is ended from outside.
ENDLESS = """
    import subprocess
    subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
    subprocess.run(["sleep", "{marker}"])
    """
DRIVER = """
import signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from cufallback.process import LocalRunner
from cufallback.wheel.environment import open_environment
from wheel_rooms import NONE, build, probe_isolation
def stop(*_): raise SystemExit(143)
signal.signal(signal.SIGTERM, stop)
work = Path(sys.argv[4])
isolation = NONE if sys.argv[5] == "none" else probe_isolation(LocalRunner(), environ={})
build(work / "p", open_environment(Path(sys.argv[3]), LocalRunner()), work, isolation)
"""


def sleepers(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.joinpath("cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", marker.encode()]:
                found.append(folder.name)
    return found


@pytest.mark.parametrize("way", ["granted", "none"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_build_leaves_no_orphan_and_no_half_wheel(
    environment: Environment, request: pytest.FixtureRequest, tmp_path: Path, way: str, number: signal.Signals
) -> None:
    if way == "granted":
        request.getfixturevalue("granted")
    marker = f"86400.{os.getpid()}{number.value}{len(way)}"
    write_project(tmp_path / "p", {"setup.py": ENDLESS.format(marker=marker)})
    roots = [str(Path(__file__).parents[2] / "build"), str(Path(__file__).parent)]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *roots, str(environment.folder), str(tmp_path), way])
    deadline = time.monotonic() + 60
    # Without namespaces a process that leaves the session is beyond reach; the one inside must go.
    while len(sleepers(marker)) < 2 and time.monotonic() < deadline:
        assert driver.poll() is None
        time.sleep(0.1)
    assert len(sleepers(marker)) == 2
    driver.send_signal(number)
    driver.wait(20)
    escaped = 0 if way == "granted" else 1
    while len(sleepers(marker)) > escaped and time.monotonic() < deadline:
        time.sleep(0.1)
    left = sleepers(marker)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert len(left) == escaped
    assert list((tmp_path / "output").iterdir()) == []


NOBODY = 65534
AS_NOBODY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cufallback.process import LocalRunner
from cufallback.progress import Silent
from cufallback.wheel.builder import BuildRequest, build_wheel
from cufallback.wheel.environment import open_environment
work, environment = Path(sys.argv[3]), open_environment(Path(sys.argv[2]), LocalRunner())
request = BuildRequest(work / "p", environment, work / "output", {}, 1754900000, 1, work / "log", work / "scratch")
built = build_wheel(request, LocalRunner(), Silent())
print(json.dumps([built.isolation.kind, built.isolation.root, built.isolation.why, built.path.name]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_a_user_without_rights_is_isolated_too(house: Callable[..., House]) -> None:
    system = Path(f"/usr/bin/python{THIS}")
    if not system.exists() or shutil.which("setpriv") is None:
        pytest.skip(f"needs {system} and setpriv: nobody cannot read this interpreter")
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        shutil.copytree(Path(__file__).parents[2] / "build/cufallback", top / "lib/cufallback")
        environment = house(TINY).environment(top / "env", python=system)
        work = top / "w\u00f6rk"
        write_project(work / "p", {"setup.py": "from setuptools import setup\nsetup(name='tiny', version='1.0')\n"})
        for path in (work, *work.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        done = LocalRunner().run(
            [
                *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
                *(system, "-c", AS_NOBODY, top / "lib", environment.folder, work),
            ],
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            check=False,
        )
        assert done.returncode == 0, done.output
        kind, root, why, wheel = json.loads(done.output.splitlines()[-1])
        assert wheel == "tiny-1.0-py3-none-any.whl"
        if kind == "none":
            pytest.skip(f"this machine refuses user namespaces: {why}")
        assert (kind, root) == ("network namespace", False)
        assert (work / "output" / wheel).stat().st_uid == NOBODY


def test_progress_follows_ninja(environment: Environment, granted: Isolation, tmp_path: Path) -> None:
    bars: list[tuple[float | None, list[float]]] = []

    class Seen(Silent):
        @contextlib.contextmanager
        def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Callable[[float], None]]:
            steps: list[float] = []
            bars.append((total, steps))
            yield steps.append

    lines = "".join(f"print('[{done}/3] Building CXX object')\n" for done in (1, 3)) + "print('[1/1] Linking')\n"
    text = f"from setuptools import setup\n{lines}setup(name='tiny', version='1.0')\n"
    project = write_project(tmp_path / "p", {"setup.py": text})
    request = BuildRequest(
        *(project, environment, tmp_path / "output", {}, 0, None, tmp_path / "log", tmp_path / "scratch")
    )
    built = build_wheel(request, LocalRunner(), Seen(), isolation=granted)
    assert [bar for bar in bars if bar[0] is not None] == [(3, [1, 2]), (1, [1])]
    assert built.environment["SOURCE_DATE_EPOCH"] == "315532800"  # a clock before 1980


def test_the_environment_can_be_opened_again(environment: Environment) -> None:
    assert open_environment(environment.folder, LocalRunner()) == environment
    with pytest.raises(BuildError, match="does not run"):
        open_environment(replace(environment, folder=environment.folder / "absent").folder, LocalRunner())
