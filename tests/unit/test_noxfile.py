"""noxfile.py: thin sessions, and an environment that is redone only when it must be."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


class Session:
    """Stands in for nox's session: keeps what would be run, and lays out an environment as uv does."""

    python = None

    def __init__(self, location: Path, *posargs: str) -> None:
        self.posargs = list(posargs)
        self.virtualenv = SimpleNamespace(location=str(location))
        self.ran: list[tuple[str, ...]] = []
        self.installed: list[tuple[str, ...]] = []
        self.broken = False
        self.lay_out(location, platform.python_version())

    @staticmethod
    def lay_out(location: Path, version: str) -> None:
        location.mkdir(exist_ok=True)
        (location / "pyvenv.cfg").write_text(f"home = /usr/bin\nuv = 0.13.9\nversion_info = {version}\n")

    def run(self, *words: str | Path) -> None:
        self.ran.append(tuple(map(str, words)))

    def run_install(self, *words: str | Path) -> None:
        self.installed.append(tuple(map(str, words)))
        if self.broken:
            raise RuntimeError("no network")
        if words[1] == "venv":
            shutil.rmtree(words[-1])
            self.lay_out(Path(words[-1]), platform.python_version())


@pytest.fixture
def noxfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return noxfile.py, loaded from a folder of its own that holds what the stamp covers."""
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "automatic")
    monkeypatch.setattr("nox.registry._REGISTRY", OrderedDict())
    for name in ("noxfile.py", "pyproject.toml", "locks/cufallback/dev.txt"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CHECKOUT / name, tmp_path / "checkout" / name)
    spec = importlib.util.spec_from_file_location("noxfile", tmp_path / "checkout/noxfile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nox(*words: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "nox", *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_bare_nox_checks_and_never_builds() -> None:
    listed = nox("--list").stdout.splitlines()
    assert [line.split()[1] for line in listed if line.startswith("* ")] == ["lint", "typecheck", "tests"]
    others = {line.split()[1] for line in listed if line.startswith("- ")}
    assert others == {"build-cu129", "lock", "verify", "push", "docs", "lock-dev"}
    for entry in json.loads(nox("--list", "--json", "--session", "lint", *others).stdout):
        assert entry["description"], entry
        assert entry["python"] is None, "uv does not find pyenv's versions, and nox then skips the session"


@pytest.mark.parametrize(
    ("name", "posargs", "commands"),
    [
        ("build_cu129", [], [("cufallback", "build")]),
        (
            "build_cu129",
            ["--recipe", "rehearsal", "--until", "wheels"],
            [("cufallback", "build", "--recipe", "rehearsal", "--until", "wheels")],
        ),
        ("lock", ["--check"], [("cufallback", "lock", "--check")]),
        ("verify", ["dist/x y"], [("cufallback", "verify", "dist/x y")]),
        ("tests", ["-k", "one"], [("pytest", "-k", "one")]),
        ("typecheck", [], [("mypy",), ("mypy", "noxfile.py", "docs/generate.py")]),
        ("lint", ["--fix"], [("ruff", "check", "--fix"), ("ruff", "format", "--check")]),
        ("docs", ["--check"], [("python", "docs/generate.py", "--check")]),
    ],
)
def test_a_session_is_one_call(
    noxfile: ModuleType, tmp_path: Path, name: str, posargs: list[str], commands: list[tuple[str, ...]]
) -> None:
    session = Session(tmp_path / "env", *posargs)
    getattr(noxfile, name)(session)
    assert session.ran == commands
    assert session.installed


def test_the_environment_is_made_from_hashes_alone_and_only_once(noxfile: ModuleType, tmp_path: Path) -> None:
    session = Session(tmp_path / "env")
    noxfile.environment(session)
    sync, install = session.installed
    assert {"sync", "--require-hashes"} <= set(sync)
    assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(install)
    noxfile.environment(session)
    assert session.installed == [sync, install]


@pytest.mark.parametrize("name", ["pyproject.toml", "locks/cufallback/dev.txt"])
def test_a_change_of_what_it_is_made_from_redoes_it(noxfile: ModuleType, tmp_path: Path, name: str) -> None:
    session = Session(tmp_path / "env")
    noxfile.environment(session)
    with (tmp_path / "checkout" / name).open("a") as file:
        file.write("# changed\n")
    noxfile.environment(session)
    assert len(session.installed) == 4


def test_another_python_of_nox_makes_a_new_environment(noxfile: ModuleType, tmp_path: Path) -> None:
    session = Session(tmp_path / "env")
    noxfile.environment(session)
    Session.lay_out(tmp_path / "env", "3.99.1")
    noxfile.environment(session)
    assert session.installed[2][:2] == ("uv", "venv")
    assert session.installed[2][-2:] == (sys.executable, str(tmp_path / "env"))
    assert len(session.installed) == 5


def test_an_installation_that_failed_is_tried_again(noxfile: ModuleType, tmp_path: Path) -> None:
    session = Session(tmp_path / "env")
    noxfile.environment(session)
    project = tmp_path / "checkout/pyproject.toml"
    before = project.read_text()
    project.write_text("[project]\n")
    session.broken = True
    with pytest.raises(RuntimeError):
        noxfile.environment(session)
    session.broken = False
    project.write_text(before)  # what the last stamp was for, but the environment is half of something else by now
    noxfile.environment(session)
    assert len(session.installed) == 2 + 1 + 2


def test_uv_fetches_no_interpreter(noxfile: ModuleType) -> None:
    assert os.environ["UV_PYTHON_DOWNLOADS"] == "never"


@pytest.mark.slow
@pytest.mark.network
def test_a_session_that_has_nothing_to_install_costs_half_a_second_at_most(tmp_path: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, tmp_path / name)
    words = ("-s", "verify", "--", "--help")
    assert "usage: cufallback verify" in nox(*words, cwd=tmp_path).stdout

    def seconds(*command: str) -> float:
        started = time.perf_counter()
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        return time.perf_counter() - started

    alone = min(seconds(str(tmp_path / ".nox/verify/bin/cufallback"), "verify", "--help") for _ in range(3))
    through_nox = min(seconds(sys.executable, "-m", "nox", *words) for _ in range(3))
    assert through_nox - alone <= 0.5
