"""Verification of the real rehearsal: it passes, and no byte of it can change unseen, not even consistently."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_rooms import Rehearsal, replace_file

from cufallback.__main__ import main
from cufallback.errors import ExitCode
from cufallback.record import RECORD, SUMS, files_below
from cufallback.store import canonical_json, sha256_file
from cufallback.verify import Verification, verify

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture
def folder(rehearsal: Rehearsal, tmp_path: Path) -> Path:
    """A copy of the build folder, to be damaged."""
    return rehearsal.copy_folder(tmp_path)


def failed(folder: Path) -> dict[str, str]:
    return {check.what: check.why for check in verify(folder).checks if check.status == "failed"}


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    data = json.loads(path.read_bytes())
    edit(data)
    replace_file(path, canonical_json(data))


def forge(folder: Path) -> None:
    """Bring file list, digests of recipe and subjects and SHA256SUMS in line with what lies there now."""

    def update(record: dict[str, Any]) -> None:
        files = {file.path: file for file in files_below(folder)}
        record["files"] = [file.model_dump() for file in files.values()]
        record["recipe"]["sha256"] = files[record["recipe"]["path"]].sha256
        for subject in record["subjects"]:
            subject |= {"sha256": files[subject["path"]].sha256, "size": files[subject["path"]].size}

    edit_json(folder / RECORD, update)
    names = sorted([*(file.path for file in files_below(folder)), RECORD])
    replace_file(folder / SUMS, "".join(f"{sha256_file(folder / name)}  {name}\n" for name in names).encode())


def test_the_untouched_folder_verifies_and_says_what_was_not_checked(
    rehearsal: Rehearsal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(rehearsal.folder)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert f"{rehearsal.folder}: verified: " in text
    assert "0 failed" in text
    for what in ("signatures", "stage image", "source commit"):
        assert f"not_run  {what} " in text


def test_json_says_the_same(rehearsal: Rehearsal, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", str(rehearsal.folder)]) == ExitCode.OK
    (told,) = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert {check["status"] for check in told["checks"]} == {"passed", "not_run"}
    named = {check["what"].removeprefix("file ") for check in told["checks"] if check["what"].startswith("file ")}
    there = {path.relative_to(rehearsal.folder).as_posix() for path in rehearsal.folder.rglob("*") if path.is_file()}
    assert named == there


def test_sha256sum_agrees_and_lists_every_file(rehearsal: Rehearsal) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", SUMS], cwd=rehearsal.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len([path for path in rehearsal.folder.rglob("*") if path.is_file()]) - 1


def test_a_forger_who_changes_nothing_changes_nothing(folder: Path, rehearsal: Rehearsal) -> None:
    forge(folder)
    for name in (RECORD, SUMS):
        assert (folder / name).read_bytes() == (rehearsal.folder / name).read_bytes()


# Any byte of any file


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_byte_of_any_file_is_found_and_the_file_named(
    rehearsal: Rehearsal, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    names = [path.relative_to(rehearsal.folder) for path in rehearsal.folder.rglob("*") if path.is_file()]
    assert len(names) > 10
    for number, name in enumerate(names):
        folder = rehearsal.copy_folder(tmp_path / str(number))
        content = bytearray((folder / name).read_bytes())
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[place]] ^= 1
        replace_file(folder / name, bytes(content))
        code = main(["verify", "--json", str(folder)])
        told = capsys.readouterr()
        if name.name == RECORD and code == ExitCode.RECORD:
            assert f"{folder / name}: " in told.err
        else:
            assert code == ExitCode.VERIFY_FAILED, name
            (verification,) = json.loads(told.out)
            named = {check["what"] for check in verification["checks"] if check["status"] == "failed"}
            assert f"file {name}" in named
        assert "Traceback" not in told.err


# Files missing, added, replaced


@pytest.mark.parametrize("name", ["plan.json", "inspection.json", "pylock.toml", SUMS, "logs/main.log", "inputs"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert [what for what in failed(folder) if what.startswith(f"file {name}")]


def test_a_missing_wheel_is_named(folder: Path) -> None:
    (wheel,) = (folder / "wheels").glob("vllm-*")
    wheel.unlink()
    assert failed(folder)[f"file wheels/{wheel.name}"] == "the record lists it, but it is not here"


@pytest.mark.parametrize("name", ["extra.txt", "wheels/extra-1.0-py3-none-any.whl", ".hidden", "logs/line\nbreak"])
def test_an_extra_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    shown = name.replace("\n", "\\n")
    assert failed(folder)[f"file {shown}"] == "it is here, but the record does not list it"


@pytest.mark.parametrize("target", ["same", "nowhere", "folder"])
def test_a_link_in_place_of_a_file_is_refused(folder: Path, rehearsal: Rehearsal, target: str) -> None:
    (folder / "plan.json").unlink()
    to = {"same": rehearsal.folder / "plan.json", "nowhere": Path("/nowhere"), "folder": rehearsal.folder}[target]
    (folder / "plan.json").symlink_to(to)
    assert "is no plain file" in failed(folder)["file plan.json"]


def test_a_pipe_among_the_files_is_refused_and_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert "file pipe" in failed(folder)


def test_a_renamed_folder_verifies_and_that_is_said(folder: Path) -> None:
    renamed = folder.rename(folder.with_name("renamed"))
    result: Verification = verify(renamed)
    assert result.passed
    (said,) = (check for check in result.checks if check.what == "folder name")
    assert (said.status, folder.name in said.why) == ("not_run", True)


# Consistent forgeries: every digest fits, and the content contradicts itself


def test_a_forged_inspection_alone(folder: Path) -> None:
    edit_json(folder / "inspection.json", lambda wheels: wheels[1]["extensions"][0].update(needed=["libcudart.so.13"]))
    forge(folder)
    assert "inspection" in failed(folder)


@pytest.mark.parametrize(
    "lie",
    [
        lambda wheels: wheels[1]["minimum_driver"].update(driver="525.60.13"),
        lambda wheels: wheels[1]["extensions"][0].update(sass=["9.0a", "10.0f", "10.3a"]),
        lambda wheels: wheels[1]["extensions"][0].update(ptx=[]),
        lambda wheels: wheels[1]["extensions"][0].update(needed=["libcudart.so.13"]),
        lambda wheels: wheels[0]["extensions"].pop(),
        lambda wheels: wheels[0].update(version="0.28.0"),
    ],
    ids=["driver", "sass", "ptx", "needed", "extension", "version"],
)
def test_a_forged_inspection_in_both_places(folder: Path, lie: Callable[[Any], object]) -> None:
    edit_json(folder / "inspection.json", lie)
    edit_json(folder / RECORD, lambda record: lie(record["inspection"]))
    forge(folder)
    assert "inspection repeated" in failed(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan["toolchain"].update(compiler="g++ 99.0"),
        lambda plan: plan["cuda"].update(toolkit="12.8.1"),
        lambda plan: plan["commands"].pop(),
        lambda plan: plan.update(more=1),
    ],
    ids=["toolchain", "toolkit", "command", "more"],
)
def test_a_forged_plan(folder: Path, edit: Callable[[Any], object]) -> None:
    edit_json(folder / "plan.json", edit)
    forge(folder)
    assert "build id" in failed(folder)


def test_a_plan_that_is_no_object_is_a_finding(folder: Path) -> None:
    replace_file(folder / "plan.json", b"[]\n")
    forge(folder)
    assert {"build id", "plan"} <= failed(folder).keys()


@pytest.mark.parametrize("name", ["build.txt", "runtime.txt", "source.lock.toml", "rehearsal.toml"])
def test_a_forged_input(folder: Path, name: str) -> None:
    path = folder / "inputs" / name
    text = path.read_text()
    # An edit that changes what is built, in each kind of file.
    changed = text.replace("12.9.1", "12.8.1").replace("eec2d54d", "eec2d54e").replace("12.9.79", "12.9.78")
    changed = changed.replace("\nepoch = 1", "\nepoch = 2")
    assert changed != text
    replace_file(path, changed.encode())
    forge(folder)
    assert failed(folder)


def test_a_plan_and_an_id_forged_together_do_not_follow_from_the_inputs(folder: Path) -> None:
    edit_json(folder / "plan.json", lambda plan: plan["cuda"].update(architectures=["9.0a"]))
    build_id = sha256_file(folder / "plan.json")
    edit_json(folder / RECORD, lambda record: record.update(build_id=build_id))
    forge(folder)
    assert failed(folder).keys() == {"plan"}


def test_another_wheel_under_the_same_name(folder: Path) -> None:
    (wheel,) = (folder / "wheels").glob("vllm-*")
    other = wheel.with_name("other.whl")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            evil = item.filename == "vllm/__init__.py"
            new.writestr(item, old.read(item) + b"import evil\n" * evil)
    replace_file(wheel, other.read_bytes())
    other.unlink()
    forge(folder)
    assert f"subject wheels/{wheel.name}" in failed(folder)


def test_the_two_wheels_swapped(folder: Path) -> None:
    one, two = sorted((folder / "wheels").iterdir())
    first, second = one.read_bytes(), two.read_bytes()
    replace_file(one, second)
    replace_file(two, first)
    forge(folder)
    assert "inspection repeated" in failed(folder) or f"subject wheels/{one.name}" in failed(folder)


def test_a_subject_taken_off_the_record(folder: Path) -> None:
    edit_json(folder / RECORD, lambda record: record["subjects"].pop())
    forge(folder)
    assert [what for what in failed(folder) if what.startswith("subject wheels/cufallback_cuda_probe")]


def test_a_lock_that_names_other_distributions(folder: Path) -> None:
    path = folder / "pylock.toml"
    replace_file(path, path.read_bytes().replace(b'version = "12.9.79"', b'version = "12.9.78"'))
    forge(folder)
    assert "pylock.toml" in failed(folder)


# What is no build folder


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no record here"),
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a record of this format"),
        (b'{"schema": 3}', "is not a record of this format: schema:"),
        (b'{"bomFormat": "CycloneDX"}', "is not a record of this format"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["missing", "empty", "half", "not UTF-8", "list", "schema", "other document", "deep"],
)
def test_what_is_no_record_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / RECORD).write_bytes(content)
    assert main(["verify", str(tmp_path)]) == ExitCode.RECORD
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {tmp_path / RECORD}: {reason}")
    assert "remedy: " in told.err


@pytest.mark.parametrize("kind", ["file", "missing", "record is a folder"])
def test_what_is_no_folder_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("x")
    elif kind == "record is a folder":
        (path / RECORD).mkdir(parents=True)
    assert main(["verify", str(path)]) == ExitCode.RECORD
    assert str(path) in capsys.readouterr().err


def test_an_unknown_key_is_named_by_its_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / RECORD, lambda record: record["source"].update(extra=1))
    assert main(["verify", str(folder)]) == ExitCode.RECORD
    assert "source.extra: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (lambda record: record.pop("toolchain"), "toolchain"),
        (lambda record: record.update(build_id="x"), "build_id"),
        (lambda record: record["files"][0].update(size="1"), "files.0.size"),
        (lambda record: record["source"]["commit"].update(status="checked"), "source.commit.status"),
        (lambda record: record["stages"][0].update(status=None), "stages.0.status"),
    ],
    ids=["missing", "digest", "type", "status", "none"],
)
def test_a_wrong_value_is_named_by_its_path(
    folder: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Any], object], key: str
) -> None:
    edit_json(folder / RECORD, edit)
    assert main(["verify", str(folder)]) == ExitCode.RECORD
    assert f"{key}: " in capsys.readouterr().err


def test_one_bad_folder_among_several_fails_the_run(
    rehearsal: Rehearsal, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "extra").touch()
    assert main(["verify", str(rehearsal.folder), str(folder)]) == ExitCode.VERIFY_FAILED
    text = capsys.readouterr().out
    assert f"{rehearsal.folder}: verified" in text
    assert f"{folder}: NOT verified" in text
