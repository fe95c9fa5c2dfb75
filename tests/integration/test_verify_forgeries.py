"""A forger changes one thing and brings every digest in line: verify must still say what disagrees."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_rooms import Rehearsal, replace_file

from cufallback.__main__ import main
from cufallback.errors import ExitCode
from cufallback.record import INSPECTION, PLAN, PYLOCK, RECORD, SUMS, checksum_lines, files_below
from cufallback.store import canonical_json, sha256_bytes, sha256_file
from cufallback.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.network]

OTHER = "ab" * 32
Edit = Callable[[Any], object]


@pytest.fixture
def folder(rehearsal: Rehearsal, tmp_path: Path) -> Path:
    """A copy of the build folder, to be forged."""
    return rehearsal.copy_folder(tmp_path)


def edit_json(path: Path, edit: Edit) -> None:
    data = json.loads(path.read_bytes())
    edit(data)
    replace_file(path, canonical_json(data))


def seal(folder: Path) -> None:
    """Bring the record's digests of files, recipe and plan, and SHA256SUMS, in line with what lies there."""
    files = files_below(folder)
    record = json.loads((folder / RECORD).read_bytes())
    record["files"] = [file.model_dump() for file in files]
    record["recipe"]["sha256"] = sha256_file(folder / "inputs" / "rehearsal.toml")
    record["build_id"] = sha256_file(folder / PLAN)
    replace_file(folder / RECORD, canonical_json(record))
    replace_file(folder / SUMS, checksum_lines(files, sha256_file(folder / RECORD)).encode())


def failed(folder: Path) -> dict[str, str]:
    return {check.what: check.why for check in verify(folder).checks if check.status == "failed"}


def test_sealing_an_unforged_folder_changes_nothing(folder: Path, rehearsal: Rehearsal) -> None:
    seal(folder)
    assert [(folder / name).read_bytes() for name in (RECORD, SUMS)] == [
        (rehearsal.folder / name).read_bytes() for name in (RECORD, SUMS)
    ]
    assert failed(folder) == {}


def at(*path: str | int, to: object) -> Edit:
    """Return an edit that sets the value at ``path``."""

    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        assert data[path[-1]] != to
        data[path[-1]] = to

    return edit


def without(*path: str | int) -> Edit:
    """Return an edit that removes the value at ``path``."""

    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return edit


def _first_failed_kernel(record: Any) -> None:
    record["subjects"][0]["kernels"]["findings"].append({"what": "MLA", "status": "failed", "why": "not built"})


def _added_distribution(record: Any) -> None:
    record["distributions"].append({**record["distributions"][-1], "name": "zzz", "sha256": OTHER})


def _swapped_subjects(record: Any) -> None:
    record["subjects"].reverse()


# What is changed in record.json, and the check that names it.
RECORD_FORGERIES: dict[str, tuple[Edit, str]] = {
    "tree": (at("source", "tree_sha256", to=OTHER), "source: tree_sha256"),
    "archive": (at("source", "archive_sha256", to=OTHER), "source: archive_sha256"),
    "ref": (at("source", "ref", to="0.27.0"), "source: ref"),
    "kind": (at("source", "kind", to="git"), "source: kind"),
    "origin": (at("source", "origin", to="vllm-evil"), "source: origin"),
    "epoch": (at("source", "epoch", to=1), "source: epoch"),
    "commit": (at("source", "commit", "id", to="c" * 40), "source: commit.id"),
    "commit called verified": (at("source", "commit", "status", to="passed"), "source: commit.status"),
    "no commit": (at("source", "commit", to=None), "source: commit"),
    "no contracts": (at("source", "contracts", to=[]), "contracts: rows"),
    "a contract's pattern": (at("source", "contracts", 0, "pattern", to="."), "contracts: 0.pattern"),
    "a contract's reason": (at("source", "contracts", 0, "why", to="because"), "contracts: 0.why"),
    "a broken contract": (at("source", "contracts", 1, "status", to="failed"), "contracts: 1.status"),
    "a contract that matches nowhere": (at("source", "contracts", 2, "lines", to=[]), "contracts: 2.matches"),
    "no changes": (at("source", "changes", to=[]), "changes: rows"),
    "a change without diff": (at("source", "changes", 0, "diff", to=""), "changes: 0.diff"),
    "a change of another file": (at("source", "changes", 0, "file", to="setup.py"), "changes: 0.diff"),
    "no fetches": (at("source", "fetches", to=[]), "fetches: rows"),
    "a fetch called used": (at("source", "fetches", 0, "unused", to=None), "fetches: 0.unused"),
    "a fetch's pin": (at("source", "fetches", 0, "commit", to="c" * 40), "fetches: 0.commit"),
    "no stages": (at("stages", to=[]), "stages: rows"),
    "a stage less": (without("stages", 3), "stages: rows"),
    "a stage without times": (at("stages", 0, "started", to=None), "stage prefetch: "),
    "a stage that ended before it began": (at("stages", 0, "started", to="2999-01-01T00:00:00Z"), "stage prefetch: "),
    "a stage left out without reason": (at("stages", 3, "why", to=""), "stage image: "),
    "no requirement edits": (at("requirement_edits", to=[]), "requirements added: rows"),
    "another requirement": (at("requirement_edits", -1, "after", to="evil"), "requirements added: "),
    "no distributions": (at("distributions", to=[]), "distributions: rows"),
    "a distribution less": (without("distributions", 0), "distributions: rows"),
    "a distribution more": (_added_distribution, "distributions: rows"),
    "a distribution's hash": (at("distributions", 0, "sha256", to=OTHER), "distributions: 0.sha256"),
    "a distribution's version": (at("distributions", 0, "version", to="1"), "distributions: 0.version"),
    "a distribution's index": (at("distributions", 0, "index", to="https://evil.example"), "distributions: 0.index"),
    "what a distribution is for": (at("distributions", 0, "used_for", to=["runtime"]), "distributions: 0.used_for"),
    "the probe": (at("cuda_probe_sha256", to=OTHER), "plan: cuda_probe"),
    "the compiler": (at("toolchain", "compiler", to="g++ 99.0"), "plan: toolchain.compiler"),
    "another toolchain": (at("toolchain", to={"nvcc": "12.9"}), "inputs: "),
    "the recipe's name": (at("recipe", "name", to="kimi-k3-cu129"), "recipe: name"),
    "the recipe's status": (at("recipe", "status", to="production"), "recipe: status"),
    "the recipe's path": (at("recipe", "path", to="inputs/build.txt"), "inputs: "),
    "the version": (at("cufallback", to="9.9.9"), "plan: cufallback"),
    "a command": (at("subjects", 0, "command", 0, to="/usr/bin/python3"), "command of wheels/vllm"),
    "the probe's command": (at("subjects", 1, "command", to=[]), "command of wheels/cufallback_cuda_probe"),
    "the compiler's name": (at("subjects", 0, "environment", "CC", to="evil"), "environment of wheels/vllm"),
    "the target": (at("subjects", 0, "environment", "VLLM_TARGET_DEVICE", to="cuda"), "environment of wheels/vllm"),
    "no epoch": (without("subjects", 0, "environment", "SOURCE_DATE_EPOCH"), "environment of wheels/vllm"),
    "a variable more": (
        lambda record: record["subjects"][0]["environment"].update(LD_PRELOAD="/evil.so"),
        "environment of wheels/vllm",
    ),
    "other flags": (
        lambda record: record["subjects"][0]["environment"].update(CFLAGS="-O0"),
        "environment of wheels/vllm",
    ),
    "jobs": (at("subjects", 0, "environment", "MAX_JOBS", to="many"), "environment of wheels/vllm"),
    "the probe's PTX": (
        at("subjects", 1, "environment", "CUFALLBACK_PROBE_PTX", to="9.0"),
        "environment of wheels/cufallback_cuda_probe",
    ),
    "no proof of isolation": (
        lambda record: record["subjects"][0]["isolation"].update(status="passed", interfaces=[]),
        "isolation of wheels/vllm",
    ),
    "half a proof of isolation": (
        lambda record: record["subjects"][0]["isolation"].update(
            status="passed", interfaces=['before {"lo": [0, 0]}', 'before {"lo": [0, 0]}']
        ),
        "isolation of wheels/vllm",
    ),
    "a failed kernel": (_first_failed_kernel, "kernels of wheels/vllm"),
    "a finding less": (without("inspection", 0, "findings", 0), "inspection: "),
    "a subject less": (without("subjects", 1), "subject wheels/cufallback_cuda_probe"),
    "a subject's hash": (at("subjects", 0, "sha256", to=OTHER), "subject wheels/vllm"),
    "a log": (at("subjects", 0, "log", to="logs/other.log"), "log logs/other.log"),
    "subjects in another order": (_swapped_subjects, "inspection repeated"),
}


@pytest.mark.parametrize("name", RECORD_FORGERIES)
def test_a_forged_record(folder: Path, name: str) -> None:
    edit, named = RECORD_FORGERIES[name]
    edit_json(folder / RECORD, edit)
    seal(folder)
    assert names(folder, named)


def names(folder: Path, named: str) -> bool:
    """Whether a failed check starts with what comes before ": " and says what comes after it."""
    what, _, why = named.partition(": ")
    found = failed(folder)
    assert found, "accepted"
    return any(key.startswith(what) and why in reason for key, reason in found.items()) or pytest.fail(str(found))


PLAN_FORGERIES: dict[str, tuple[Edit, str]] = {
    "no locks": (at("locks", to={}), "plan: locks"),
    "no commands": (at("commands", to=[]), "plan: commands"),
    "another command": (at("commands", 0, "command", to=["true"]), "plan: commands.0.command"),
    "another variable": (at("commands", 0, "environment", "CC", to="evil"), "plan: commands.0.environment.CC"),
    "the compiler": (at("toolchain", "compiler", to="g++ 99.0"), "plan: toolchain.compiler"),
    "the probe": (at("cuda_probe", to=OTHER), "plan: cuda_probe"),
    "the toolkit": (at("cuda", "toolkit", to="12.8.1"), "plan: cuda.toolkit"),
    "the schema": (at("schema", to=1), "plan: schema"),
    "the version": (at("cufallback", to="9.9.9"), "plan: cufallback"),
    "more": (lambda plan: plan.update(more=1), "plan: more"),
}


@pytest.mark.parametrize("name", PLAN_FORGERIES)
def test_a_forged_plan_with_a_build_id_of_its_own(folder: Path, name: str) -> None:
    edit, named = PLAN_FORGERIES[name]
    edit_json(folder / PLAN, edit)
    seal(folder)
    assert names(folder, named)


# file, what stands there, what is put there, the check that names it
TEXT_FORGERIES = {
    "a hash in the lock": (PYLOCK, "cfb", "cfc", "pylock.toml: "),
    "a path in the lock": (PYLOCK, '"wheels/vllm', '"../wheels/vllm', "pylock.toml: "),
    "a URL in the lock": (PYLOCK, 'path = "wheelhouse/', 'url = "https://evil.example/', "pylock.toml: "),
    "a size in the lock": (PYLOCK, "size = 2303", "size = 2304", "pylock.toml: "),
    "a version in the lock": (PYLOCK, 'version = "12.9.79"', 'version = "12.9.78"', "pylock.toml: "),
    "the Python of the lock": (PYLOCK, "==3.11.*", "==3.12.*", "python: "),
    "the recipe's toolkit": ("inputs/rehearsal.toml", 'toolkit = "12.9.1"', 'toolkit = "12.9.0"', "plan: cuda.toolkit"),
    "the recipe's target": ("inputs/rehearsal.toml", 'DEVICE = "tpu"', 'DEVICE = "cpu"', "plan: "),
    "the recipe's rewrite": ("inputs/rehearsal.toml", "and hasattr", "or hasattr", "plan: source.rewrite"),
    "the recipe's contract": ("inputs/rehearsal.toml", "'g6e448d0ea'", "'g6e'", "contracts: 1.pattern"),
    "the recipe's ban": ("inputs/rehearsal.toml", '"!=2.13.0+cpu"', '"==2.13.0+cpu"', "distributions: "),
    "the recipe's limit": (
        "inputs/rehearsal.toml",
        "size_limit_mib = 100",
        "size_limit_mib = 1",
        "inspection repeated",
    ),
    "the recipe's requirement": ("inputs/rehearsal.toml", '"hatchling"', '"hatchling>1"', "requirements added: "),
    "the source lock's tree": ("inputs/source.lock.toml", "tree_sha256 = ", "tree_sha256 = ", "source: tree_sha256"),
    "a dependency lock": ("inputs/build.txt", "build-1.6.1-", "build-1.6.2-", "inputs: "),
    "an input's encoding": ("inputs/rehearsal.toml", "schema = 1", "schema = 1 # \udcff", "inputs: "),
}


@pytest.mark.parametrize("name", TEXT_FORGERIES)
def test_a_forged_file(folder: Path, name: str) -> None:
    file, old, new, named = TEXT_FORGERIES[name]
    text = (folder / file).read_text()
    if name == "a hash in the lock":
        old, new = sha256_bytes(next((folder / "wheels").glob("vllm-*")).read_bytes()), OTHER
    elif name == "the source lock's tree":
        old = next(line for line in text.splitlines() if line.startswith(old))
        new = f'{new}"{OTHER}"'
    assert old in text
    replace_file(folder / file, text.replace(old, new, 1).encode(errors="surrogateescape"))
    seal(folder)
    assert names(folder, named)


def test_an_input_that_nothing_names(folder: Path) -> None:
    (folder / "inputs" / "other.toml").write_text("schema = 1\n")
    seal(folder)
    assert names(folder, "inputs: rows")


def test_a_file_that_is_listed_twice(folder: Path) -> None:
    edit_json(folder / RECORD, lambda record: record["files"].insert(0, {**record["files"][0], "sha256": OTHER}))
    assert names(folder, "files: twice")


# Content that nothing must stumble over

DEEP = b"[" * 50_000
HOSTILE = {
    "deep plan": (PLAN, DEEP),
    "deep inspection": (INSPECTION, DEEP + b"]" * 50_000),
    "deep lock": (PYLOCK, b"x = " + DEEP),
    "deep recipe": ("inputs/rehearsal.toml", b"x = " + DEEP),
    "deep source lock": ("inputs/source.lock.toml", b"x = " + DEEP),
    "huge number": (PLAN, b'{"schema": ' + b"9" * 5000 + b"}"),
    "no number": (PLAN, b'{"schema": NaN}'),
    "half a character": (PLAN, b'{"schema": "\\ud800"}'),
    "two equal keys": (PLAN, b'{"schema": 1, "schema": 1}'),
    "a list": (PLAN, b"[]\n"),
    "no JSON": (INSPECTION, b"\xff"),
    "other JSON": (INSPECTION, b"null\n"),
    "no UTF-8": (PYLOCK, b"\xff"),
    "no table": (PYLOCK, b"packages = 1\n"),
    "recipe without UTF-8": ("inputs/rehearsal.toml", b"\xff"),
    "lock without UTF-8": ("inputs/build.txt", b"\xff"),
    "empty lock": ("inputs/runtime.txt", b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_findings(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, content = HOSTILE[name]
    replace_file(folder / file, content)
    seal(folder)
    assert main(["verify", str(folder)]) == ExitCode.VERIFY_FAILED
    assert "failed" in capsys.readouterr().out


HOSTILE_RECORDS: dict[str, Callable[[bytes], bytes]] = {
    "deep": lambda text: text.replace(b'"inspection": [', b'"inspection": [' + DEEP),
    "deep and whole": lambda text: text.replace(
        b'"inspection": [', b'"inspection": [' + b"[" * 900 + b"]" * 900 + b","
    ),
    "huge number": lambda text: text.replace(b'"epoch": ', b'"epoch": ' + b"9" * 5000),
    "no number": lambda text: text.replace(b'"seconds": ', b'"seconds": NaN, "x": '),
    "endless": lambda text: text.replace(b'"seconds": ', b'"seconds": 1e999, "x": '),
    "half a character": lambda text: text.replace(b'"statement": "', b'"statement": "\\udc80'),
    "half a character in a key": lambda text: text.replace(b'"toolchain": {', b'"toolchain": {"\\udc80": "", '),
    "two equal keys": lambda text: text.replace(b'"schema": 1', b'"schema": 1, "schema": 1'),
    "another form": lambda text: text.replace(b"\n", b"\n "),
}


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_hostile_records_are_one_clear_error(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = (folder / RECORD).read_bytes()
    new = HOSTILE_RECORDS[name](old)
    assert new != old
    replace_file(folder / RECORD, new)
    assert main(["verify", str(folder)]) == ExitCode.RECORD
    assert "remedy: " in capsys.readouterr().err


PATHS = ["../x", "/etc/passwd", "a/../x", "a//x", "./x", "", "a\\x", "a\nx", "a\x1bx", "a/", "\u202ex"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "key", [("subjects", 0, "path"), ("subjects", 0, "log"), ("recipe", "path"), ("files", 0, "path")], ids=str
)
def test_a_path_that_leads_elsewhere_is_named_by_its_key(
    folder: Path, key: tuple[str | int, ...], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(folder / RECORD, at(*key, to=path))
    assert main(["verify", str(folder)]) == ExitCode.RECORD
    error = capsys.readouterr().err
    assert ".".join(map(str, key)) in error
    assert all(line.isprintable() for line in error.splitlines())


@pytest.mark.parametrize("name", [b"x\xff", b"x\ny", b"x\x1b[31m", b"x\\y"], ids=repr)
def test_a_file_of_an_odd_name_is_a_finding(folder: Path, name: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/logs/" + name)).touch()
    for options in ([], ["--json"]):
        assert main(["verify", *options, str(folder)]) == ExitCode.VERIFY_FAILED
        told = capsys.readouterr().out
        assert "file logs/x" in told
        assert all(line.isprintable() for line in told.splitlines())
