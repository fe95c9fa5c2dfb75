"""`cufallback plan` and what `build` says before it starts: complete, incomplete, and what is missing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cufallback.__main__ import main
from cufallback.cli import run
from cufallback.errors import ExitCode, ToolchainError

PRODUCTION = ("kimi-k3-cu129", "kimi-k3-0.27-cu129")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("CUFALLBACK_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "--json", *words]) == ExitCode.OK
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_rehearsal_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    plan = told(capsys, "--recipe", "rehearsal")
    states = {need["what"]: need["state"] for need in plan["needs"]}
    assert states.pop("base image base") == "degraded", "no registry could be asked for its digest yet"
    states.pop("image engine")  # as this machine has one or not: wheels need none
    assert set(states.values()) <= {"ok", "not checked"}, plan["needs"]
    assert plan["complete"]
    assert re.fullmatch(r"[0-9a-f]{64}", plan["build_id"])
    assert [command["stage"] for command in plan["plan"]["commands"]] == ["wheels", "wheels", "image"]
    assert plan["plan"]["commands"][0]["environment"]["VLLM_TARGET_DEVICE"] == "tpu"


@pytest.mark.parametrize("recipe", PRODUCTION)
def test_a_production_recipe_is_incomplete_here_and_names_all_that_is_missing(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    plan = told(capsys, "--recipe", recipe)
    assert not plan["complete"]
    assert plan["build_id"] is None
    assert plan["plan"]["toolchain"] is None, "its toolchain comes from the builder image, never from this host"
    missing = [need for need in plan["needs"] if need["state"] == "missing"]
    assert "builder image" in {need["what"] for need in missing}
    assert all(need["remedy"] for need in missing)


def test_without_a_name_the_default_recipe_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys)["plan"]["recipe"] == "kimi-k3-cu129"


def test_the_text_shows_stages_commands_environment_pins_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--recipe", "rehearsal"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert re.search(r"^build id +[0-9a-f]{16}$", text, re.MULTILINE)
    assert re.search(r"^prefetch +network +", text, re.MULTILINE)
    assert not re.search(r"^(wheels|inspect|record) +network ", text, re.MULTILINE), "no network after prefetch"
    assert "$ /var/tmp/cufallback-build/env/bin/python -P -m build --wheel --no-isolation" in text
    assert re.search(r"^ +VLLM_TARGET_DEVICE=tpu$", text, re.MULTILINE)
    assert re.search(r"^ +SOURCE_DATE_EPOCH=1786445067$", text, re.MULTILINE)
    assert re.search(r"^build +torch==2\.13\.0\+cpu +[0-9a-f]{64}$", text, re.MULTILINE)
    assert re.search(r"^g\+\+ +ok +11\.3 or newer ", text, re.MULTILINE)
    assert "what recipe rehearsal needs of this machine" in text


@pytest.mark.parametrize("recipe", PRODUCTION)
def test_the_text_of_a_production_recipe_explains_itself(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert run(["plan", "--recipe", recipe]) == ExitCode.OK
    text = capsys.readouterr().out
    assert re.search(r"^build id +none yet: something below is missing$", text, re.MULTILINE)
    assert re.search(r"^because +\S", text, re.MULTILINE)
    assert re.search(r"^builder image +missing ", text, re.MULTILINE)
    assert text.rstrip().endswith("cufallback build --recipe rehearsal")


def test_build_without_a_recipe_stops_with_the_table_and_names_the_rehearsal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ToolchainError) as raised:
        run(["build"])
    assert raised.value.exit_code == ExitCode.TOOLCHAIN == 11
    table = capsys.readouterr()
    assert table.out == ""
    assert "what recipe kimi-k3-cu129 needs of this machine" in table.err
    assert re.search(r"^builder image +missing ", table.err, re.MULTILINE)
    assert "cufallback build --recipe rehearsal" in table.err
    assert list(tmp_path.iterdir()) == [], "it stopped before anything was made"


# Tools: only what PATH and the interpreter's folder offer


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose PATH, for us and for the build, is one folder that starts empty."""
    folder = tmp_path / "fake-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("cufallback.wheel.builder.DEFAULT_PATH", str(folder))
    # uv is also looked for beside the interpreter.
    real = Path(shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or "/usr/bin/python3")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "python3").symlink_to(real)
    monkeypatch.setattr("sys.executable", str(alone / "python3"))
    return folder


def fake(folder: Path, name: str, output: str) -> None:
    """Install a program that says ``output`` whatever it is asked."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)


def missing(capsys: pytest.CaptureFixture[str], recipe: str) -> dict[str, str]:
    needs = told(capsys, "--recipe", recipe)["needs"]
    return {need["what"]: need["found"] for need in needs if need["state"] == "missing"}


def test_nothing_installed(lonely: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = missing(capsys, "rehearsal")
    assert {name: found[name] for name in ("uv", "g++", "ld")} == dict.fromkeys(("uv", "g++", "ld"), "not found")
    assert missing(capsys, "kimi-k3-cu129")["git"] == "not found"


def test_tools_too_old(lonely: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake(lonely, "uv", "uv 0.4.18")
    fake(lonely, "g++", "g++ (Debian 10.2.1-6) 10.2.1 20210110")
    fake(lonely, "ld", "GNU ld (GNU Binutils for Debian) 2.35.2")
    fake(lonely, "git", "git version 2.20.1")
    found = missing(capsys, "rehearsal")
    assert found["uv"] == "0.4.18"
    assert "ld" not in found
    assert missing(capsys, "kimi-k3-cu129")["git"] == "2.20.1"


@pytest.mark.parametrize("output", ["", "no number", "Segmentation fault"])
def test_a_tool_that_says_nothing_of_use_counts_as_missing(
    lonely: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    fake(lonely, "g++", output)
    assert missing(capsys, "rehearsal")["g++"] == "not found"


def test_build_says_what_to_install(lonely: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["build", "--recipe", "rehearsal"]) == ExitCode.TOOLCHAIN
    error = capsys.readouterr().err
    assert re.search(r"^g\+\+ +missing +11\.3 or newer +not found ", error, re.MULTILINE)
    assert "install g++ with the system's packages" in error
    assert "python3 -m pip install uv" in error
    assert not (tmp_path / ".cufallback").exists()
