"""The build environment comes from the wheelhouse and the lock alone."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from cufallback.errors import BuildError, IntegrityError, ToolchainError, WorkspaceError
from cufallback.process import LocalRunner, RecordingRunner
from cufallback.wheel.environment import Environment, create_environment, find_interpreter

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """A wheelhouse with one distribution, ``demo 1.0``."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    files = {
        "demo.py": b"x = 1\n",
        "demo-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    record = "\n".join([*rows, "demo-1.0.dist-info/RECORD,,", ""])
    with zipfile.ZipFile(folder / "demo-1.0-py3-none-any.whl", "w") as archive:
        for name, data in {**files, "demo-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return folder


def lock_for(wheelhouse: Path, *, sha256: str | None = None, name: str = "demo") -> Path:
    digest = sha256 or hashlib.sha256((wheelhouse / "demo-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock = wheelhouse.parent / "build.txt"
    lock.write_text(f"{name}==1.0 \\\n    --hash=sha256:{digest}\n")
    return lock


def create(folder: Path, wheelhouse: Path, lock: Path, python: str = THIS) -> Environment:
    log = wheelhouse.parent / "environment.log"
    return create_environment(folder, wheelhouse=wheelhouse, lock=lock, python=python, runner=LocalRunner(), log=log)


@pytest.mark.parametrize("name", ["env", "a l\u00f6nger name/environment"])
def test_it_holds_what_the_lock_names_and_nothing_else(
    tmp_path: Path, wheelhouse: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_CONSTRAINT", str(tmp_path / "there is no such file"))
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "leftover").touch()
    environment = create(folder, wheelhouse, lock_for(wheelhouse))
    listing = "import importlib.metadata as m, sys; print(sys.prefix, sorted(d.name for d in m.distributions()))"
    done = LocalRunner().run([environment.python, "-I", "-c", listing])
    assert done.output.strip() == f"{folder} ['demo']"
    assert environment.folder == folder
    assert environment.base_prefix == Path(sys.base_prefix).resolve()
    assert environment.base_executable.is_relative_to(environment.base_prefix)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir() and path != wheelhouse] == [folder.name]
    assert not (folder / "leftover").exists()
    log = (tmp_path / "environment.log").read_text()
    assert "demo==1.0" in log
    assert "--find-links WHEELHOUSE" in log
    for place in (tmp_path, Path(sys.prefix), Path(sys.base_prefix).resolve(), Path.home()):
        if place != Path("/usr"):
            assert str(place) not in log


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, wheelhouse: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        create(tmp_path / "env", wheelhouse, lock_for(wheelhouse, sha256="0" * 64))
    assert "0" * 64 in caught.value.remedy
    assert not (tmp_path / "env").exists()


def test_a_distribution_that_the_wheelhouse_lacks_is_named(tmp_path: Path, wheelhouse: Path) -> None:
    with pytest.raises(BuildError) as caught:
        create(tmp_path / "env", wheelhouse, lock_for(wheelhouse, name="absent"))
    assert "absent" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.txt", "environment.log", "wheelhouse"]


def test_a_lock_without_a_hash_is_refused(tmp_path: Path, wheelhouse: Path) -> None:
    (tmp_path / "build.txt").write_text("demo==1.0\n")
    with pytest.raises(BuildError, match="could not be made"):
        create(tmp_path / "env", wheelhouse, tmp_path / "build.txt")


def test_an_output_folder_in_the_way_is_a_workspace_error(tmp_path: Path, wheelhouse: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError):
        create(tmp_path / "file" / "env", wheelhouse, lock_for(wheelhouse))


def test_this_interpreter_is_found() -> None:
    assert find_interpreter(THIS, LocalRunner()) == Path(sys.executable)


def test_an_interpreter_that_is_not_installed_is_named_with_a_remedy() -> None:
    with pytest.raises(ToolchainError) as caught:
        find_interpreter("3.0", LocalRunner())
    assert "Python 3.0 is not installed" in caught.value.reason
    assert "uv python install 3.0" in caught.value.remedy


def test_a_shim_without_an_interpreter_behind_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.0"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.0: command not found'\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ToolchainError):
        find_interpreter("3.0", LocalRunner())


def test_nothing_is_downloaded() -> None:
    runner = RecordingRunner(lambda _argv: (1, ""))
    with pytest.raises(ToolchainError):
        find_interpreter("3.0", runner)
    (environment,) = (env for call, env in zip(runner.calls, runner.environments, strict=True) if "find" in call)
    assert environment is not None
    assert environment["UV_PYTHON_DOWNLOADS"] == "never"
