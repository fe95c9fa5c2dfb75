"""pylock.toml: valid by packaging's own model, the same each time, and installed from by uv."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.pylock import Pylock
from tests.unit.index_server import digest, make_wheel

from cufallback.deps.pylock import Entry, render_pylock
from cufallback.errors import CommandError
from cufallback.process import LocalRunner
from cufallback.recipe import Recipe, load_recipe
from cufallback.wheel.environment import find_uv

WHEEL = make_wheel("my-pebble", "1.0")
OTHER = make_wheel("my-pebble", "1.0", says=("my_pebble", "1.0"))  # of the same size
PATH = "wheelhouse/my_pebble-1.0-py3-none-any.whl"
ENTRIES = (
    Entry("vllm", "0.27.1+cu129", "wheels/vllm-0.27.1+cu129-cp311-cp311-linux_x86_64.whl", "b" * 64, 2),
    Entry("My_Pebble", "1.0", PATH, digest(WHEEL), len(WHEEL)),
)


def recipe() -> Recipe:
    base = load_recipe("rehearsal")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return base.model_copy(update={"python": base.python.model_copy(update={"version": version})})


def test_valid_ordered_and_without_a_url() -> None:
    text = render_pylock(ENTRIES, recipe())
    lock = Pylock.from_dict(tomllib.loads(text))
    assert [package.name for package in lock.packages] == ["my-pebble", "vllm"]
    assert [(wheel.path, wheel.size, dict(wheel.hashes)) for wheel in lock.packages[0].wheels or ()] == [
        (PATH, len(WHEEL), {"sha256": digest(WHEEL)})
    ]
    assert [str(marker) for marker in lock.environments or ()] == [
        'sys_platform == "linux" and platform_machine == "x86_64"'
    ]
    assert "url" not in text
    assert "://" not in text
    assert text == render_pylock(tuple(reversed(ENTRIES)), recipe())


def test_awkward_text_is_quoted() -> None:
    odd = replace(ENTRIES[1], path=f'a "ü" \\b/{PATH}')
    (package,) = tomllib.loads(render_pylock([odd], recipe()))["packages"]
    assert package["wheels"][0]["path"] == odd.path


@pytest.mark.parametrize("damaged", [False, True])
def test_uv_installs_from_it_offline_and_checks_the_hash(tmp_path: Path, damaged: bool) -> None:
    (tmp_path / "wheelhouse").mkdir()
    (tmp_path / PATH).write_bytes(OTHER if damaged else WHEEL)
    (tmp_path / "pylock.toml").write_text(render_pylock(ENTRIES[1:], recipe()))
    command = [find_uv(), "pip", "install", "--no-config", "--offline", "--no-cache", "--python", sys.executable]
    command += ["--target", str(tmp_path / "target"), "--preview", "-r", str(tmp_path / "pylock.toml")]
    if damaged:
        with pytest.raises(CommandError) as caught:
            LocalRunner().run(command)
        assert "ash mismatch" in caught.value.remedy
    else:
        LocalRunner().run(command)
        assert (tmp_path / "target" / "my_pebble.py").exists()
