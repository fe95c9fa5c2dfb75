"""Wheel tags and markers of a target, against those that packaging gives for a real interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging import _manylinux, tags
from packaging.markers import default_environment

from cufallback.deps.target import Target, wheels_in
from cufallback.errors import RecipeError

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
X86 = Target("3.11", "x86_64-manylinux_2_28")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [17, 28, 35])
def test_tags_are_packaging_s_own(monkeypatch: pytest.MonkeyPatch, machine: str, minor: int) -> None:
    monkeypatch.setattr(_manylinux, "_get_glibc_version", lambda: (2, minor))
    monkeypatch.setattr(_manylinux, "_have_compatible_abi", lambda *_arguments: True)
    monkeypatch.setattr(_manylinux, "_is_compatible", lambda *_arguments: True)
    platforms = [*_manylinux.platform_tags([machine]), f"linux_{machine}"]
    interpreter = f"cp{HERE.replace('.', '')}"
    theirs = [
        *tags.cpython_tags(abis=[interpreter], platforms=platforms),
        *tags.compatible_tags(interpreter=interpreter, platforms=platforms),
    ]
    assert Target(HERE, f"{machine}-manylinux_2_{minor}").tags() == theirs


def test_tags_do_not_depend_on_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Target("3.13", X86.platform).tags()
    monkeypatch.setattr(tags.sysconfig, "get_config_var", lambda name: name in ("Py_GIL_DISABLED", "Py_DEBUG"))
    assert Target("3.13", X86.platform).tags() == before
    assert {tag.abi for tag in before} == {"cp313", "abi3", "none"}


@pytest.mark.parametrize(
    ("filenames", "best"),
    [
        (["a-1-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl"], 1),
        (["a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["a-1-cp311-cp311-manylinux2014_x86_64.whl", "a-1-cp311-cp311-manylinux_2_34_x86_64.whl"], 0),
        (["a-1-cp38-abi3-manylinux2014_x86_64.whl", "a-1-cp312-cp312-manylinux2014_x86_64.whl"], 0),
        (["a-1-cp38-abi3-manylinux2014_x86_64.whl", "a-1-cp310-abi3-manylinux2014_x86_64.whl"], 1),
        (["a-1-cp311-cp311-manylinux_2_28_aarch64.whl", "a-1-py3-none-any.whl"], 1),
        (["a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "a-1-py2.py3-none-any.whl"], 1),
        (["a-1-py3-none-any.whl", "a-1-2-py3-none-any.whl", "a-1-10-py3-none-any.whl"], 2),
        (["a-1-1-py3-none-any.whl", "a-1-1b-py3-none-any.whl", "a-1-py3-none-any.whl"], 1),
        (["a-1.tar.gz", "no wheel.whl", "a-1-py3-none-any.whl"], 2),
        (["a-1.tar.gz", "a-1-cp311-cp311-macosx_11_0_arm64.whl", "a-1-cp310-cp310-linux_x86_64.whl"], None),
        ([], None),
    ],
)
def test_best_is_what_an_installer_takes(filenames: list[str], best: int | None) -> None:
    expected = None if best is None else filenames[best]
    assert X86.best(filenames) == expected
    assert X86.best(reversed(filenames)) == expected


def test_markers_are_complete_and_those_of_the_target() -> None:
    markers = Target("3.12", "aarch64-manylinux_2_28").markers()
    assert markers.keys() == {*default_environment().keys(), "extra"}
    assert (markers["python_version"], markers["platform_machine"]) == ("3.12", "aarch64")


@pytest.mark.parametrize("platform", ["x86_64", "windows", "x86_64-musllinux_1_2", "riscv64-manylinux_2_39", ""])
def test_unknown_platform(platform: str) -> None:
    target = Target("3.12", platform)
    for ask in (target.tags, target.markers):
        with pytest.raises(RecipeError, match="is not known") as caught:
            ask()
        assert caught.value.where == "python.platform"


def test_wheels_in_a_folder_are_found_by_name_and_version(tmp_path: Path) -> None:
    for name in ("My_Pkg-1.0+cpu-py3-none-any.whl", "my_pkg-1.0-py3-none-any.whl", "my_pkg-1.0+cpu.tar.gz", "x.whl"):
        (tmp_path / name).touch()
    assert [path.name for path in wheels_in(tmp_path, "my-pkg", "1.0+CPU")] == ["My_Pkg-1.0+cpu-py3-none-any.whl"]
