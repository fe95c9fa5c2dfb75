"""The rehearsal from end to end: what the user sees, what the record says, and the second run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from build_rooms import CHECKOUT, Command, Rehearsal

from cufallback.download import default_index
from cufallback.store import canonical_json, sha256_bytes

pytestmark = [pytest.mark.slow, pytest.mark.network]

STAGES = ("prefetch", "wheels", "inspect", "image", "attest", "record")


@pytest.fixture(scope="module")
def record(rehearsal: Rehearsal) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((rehearsal.folder / "record.json").read_bytes())
    return data


# What the user sees


def test_stdout_is_the_summary_and_names_the_next_command(rehearsal: Rehearsal) -> None:
    lines = dict(line.split(None, 1) for line in rehearsal.stdout.splitlines() if not line.startswith("check it"))
    assert lines["recipe"] == "rehearsal"
    assert re.fullmatch(r"build id +[0-9a-f]{16}", rehearsal.stdout.splitlines()[1])
    made = [stage for stage in STAGES if stage != "image"]
    assert re.fullmatch(r", ".join(rf"{stage} \d+\.\d s" for stage in made), lines["done"])
    # With an engine it is the base image that is missing, without one the engine.
    assert re.match(
        r"not built: (base image base .* nox -s lock -- --images|no Docker engine .* start)", lines["image"]
    )
    assert lines["record"] == str(rehearsal.folder / "record.json")
    assert rehearsal.stdout.endswith(f"check it  cufallback verify {rehearsal.folder}\n")


def test_stderr_is_plain_lines_that_tell_each_stage_in_order(rehearsal: Rehearsal) -> None:
    assert "\x1b" not in rehearsal.stderr
    assert "\r" not in rehearsal.stderr
    assert re.findall(r"^(\w+): done in \d+\.\d s$", rehearsal.stderr, re.MULTILINE) == list(STAGES)
    assert re.search(r"^downloading \d+ files: .* MB in ", rehearsal.stderr, re.MULTILINE)
    assert "Traceback" not in rehearsal.stderr


def test_the_second_run_skips_every_stage_and_says_so(rehearsal: Rehearsal, command: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in rehearsal.folder.rglob("*")}
    code, stdout, stderr = command.run(*rehearsal.options)
    assert code == 0
    assert f"skipped   {', '.join(STAGES)} (unchanged)\n" in stdout
    assert "done" not in stdout
    assert stderr.splitlines() == [f"{stage}: unchanged, skipped" for stage in STAGES]
    assert {path: path.stat().st_mtime_ns for path in rehearsal.folder.rglob("*")} == before


def test_json_is_the_whole_of_stdout(rehearsal: Rehearsal, command: Command) -> None:
    code, stdout, _stderr = command.run(*rehearsal.options, "--json")
    told = json.loads(stdout)
    assert code == 0
    assert told["build_id"][:16] == rehearsal.folder.name
    assert (told["recipe"], told["folder"]) == ("rehearsal", str(rehearsal.folder))
    assert [(stage["stage"], stage["action"]) for stage in told["stages"]] == [(stage, "skipped") for stage in STAGES]


# What the record says


def test_the_source_is_identified_and_the_commit_is_only_quoted(record: dict[str, Any]) -> None:
    source = record["source"]
    assert source["commit"]["id"] == "6e448d0ea9bf3d88d898b65449ca6dc2aec170ac"
    assert source["commit"]["status"] == "quoted"
    assert (source["kind"], source["origin"], source["ref"]) == ("sdist", "vllm", "0.27.1")
    assert source["archive_sha256"] == "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646"
    assert re.fullmatch(r"[0-9a-f]{64}", source["tree_sha256"])
    assert re.fullmatch(r"[0-9a-f]{64}", source["edited_tree_sha256"])
    assert source["edited_tree_sha256"] != source["tree_sha256"]


def test_the_rewrite_is_there_with_its_diff_and_is_in_the_wheel(record: dict[str, Any], rehearsal: Rehearsal) -> None:
    (change,) = record["source"]["changes"]
    assert change["kind"] == "rewrite"
    added = [line[1:] for line in change["diff"].splitlines() if re.match(r"\+[^+]", line)]
    assert added == ['        and hasattr(torch.ops._C, "kimi_k3_attn_res")']
    assert "CUDA 12" in change["why"]
    (wheel,) = (rehearsal.folder / "wheels").glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert added[0] in archive.read(change["file"]).decode().splitlines()


def test_the_contracts_held_and_say_where_and_why(record: dict[str, Any]) -> None:
    contracts = record["source"]["contracts"]
    assert [contract["status"] for contract in contracts] == ["passed"] * 3
    assert all(contract["lines"] and contract["why"] for contract in contracts)
    assert contracts[0]["file"] == "vllm/models/kimi_k3/nvidia/ops/attn_res.py"


def test_every_locked_distribution_is_listed(record: dict[str, Any]) -> None:
    listed = {item["sha256"]: item for item in record["distributions"]}
    for which in ("build", "runtime"):
        text = (CHECKOUT / f"locks/rehearsal/{which}.txt").read_text()
        pins = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
        assert pins
        there = {(item["name"], item["version"]) for item in listed.values() if which in item["used_for"]}
        assert there == set(pins)
        assert all(f"sha256:{sha}" in text for sha, item in listed.items() if which in item["used_for"])
    (torch,) = (item for item in listed.values() if item["name"] == "torch")
    assert (torch["version"], torch["index"]) == ("2.13.0+cpu", "https://download.pytorch.org/whl/cpu")
    assert all(item["size"] > 0 for item in listed.values())


def test_the_toolchain_is_there(record: dict[str, Any]) -> None:
    assert record["toolchain"]["compiler"].startswith("g++ ")
    assert record["toolchain"]["linker"].startswith("GNU ld ")
    assert record["toolchain"]["python"].startswith("3.11.")
    assert record["toolchain"]["c_compiler"].startswith("gcc ")
    assert record["toolchain"].keys() == {"machine", "libc", "python", "compiler", "c_compiler", "linker"}


def test_the_extensions_of_vllm_are_the_expected_ones(record: dict[str, Any]) -> None:
    main = record["inspection"][0]
    assert {extension["name"] for extension in main["extensions"]} == {"vllm.fs_io_C", "vllm.spinloop"}
    assert all(extension["needed"] and extension["glibc"] for extension in main["extensions"])
    assert not [finding for finding in main["findings"] if finding["status"] == "failed"]


def test_the_cuda_probe_carries_cuda_12_9_code_and_names_its_driver(record: dict[str, Any]) -> None:
    (library,) = record["inspection"][1]["extensions"]
    assert library["sass"] == ["9.0a", "10.0a", "10.3a"]
    assert library["ptx"] == [{"isa": "8.8", "target": "8.0"}]
    assert library["needed"] == ["libcudart.so.12"]
    assert library["cuda_libraries"] == [{"cuda": [12], "name": "libcudart.so.12"}]
    driver = library["minimum_driver"]
    assert driver["driver"] == "575.51.03", "the first driver whose compiler reads PTX 8.8"
    assert {"libcudart.so.12", "PTX 8.8"} <= {reason["what"] for reason in driver["reasons"]}
    assert all(reason["why"] and reason["source"] for reason in driver["reasons"])


def test_the_stages_have_times_and_what_was_not_run_says_why(record: dict[str, Any]) -> None:
    stages = {stage["name"]: stage for stage in record["stages"]}
    for name in ("prefetch", "wheels", "inspect", "attest"):
        stage = stages[name]
        assert stage["status"] == "passed"
        assert datetime.fromisoformat(stage["started"]) <= datetime.fromisoformat(stage["finished"])
        assert stage["seconds"] >= 0
    assert stages["image"]["status"] == "not_run", "no base image is locked or given"
    assert stages["image"]["why"]


def test_the_build_was_kept_off_the_network_or_says_that_it_was_not(record: dict[str, Any]) -> None:
    for subject in record["subjects"]:
        isolated = subject["isolation"]["status"] == "passed"
        assert ("not isolated" in subject["isolation"]["statement"]) is not isolated
        if isolated:
            assert [line.split()[0] for line in subject["isolation"]["interfaces"]] == ["before", "after"]


def test_the_id_is_the_hash_of_the_plan_and_names_the_folder(record: dict[str, Any], rehearsal: Rehearsal) -> None:
    plan = json.loads((rehearsal.folder / "plan.json").read_bytes())
    assert sha256_bytes(canonical_json(plan)) == record["build_id"]
    assert rehearsal.folder.name == record["build_id"][:16]


@pytest.mark.parametrize("name", ["record.json", "plan.json", "inspection.json", "pylock.toml", "inputs/build.txt"])
def test_no_document_names_this_machine(rehearsal: Rehearsal, name: str) -> None:
    text = (rehearsal.folder / name).read_text()
    places = {rehearsal.work, rehearsal.dist, rehearsal.work.parent, CHECKOUT, Path(sys.prefix), Path.home()}
    places |= {Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split()}
    host = re.compile(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])")
    assert not [str(place) for place in places if place != Path("/") and f"{place}/" in f"{text}/"]
    assert not host.search(text)
    assert (urlsplit(default_index()).hostname or "no host") not in text


def test_no_log_names_an_index(rehearsal: Rehearsal) -> None:
    host = urlsplit(default_index()).hostname
    for log in (rehearsal.folder / "logs").iterdir():
        assert str(host) not in log.read_text(), f"{log.name} would publish the user's own index"


# Outside a checkout


def test_an_installed_wheel_makes_the_same_plan(rehearsal: Rehearsal, command: Command, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.is_file():
        uv = Path("uv")
    for words in (
        (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, CHECKOUT),
        (sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"),
    ):
        subprocess.run(words, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "env/bin/python"
    install = (uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel)
    subprocess.run(install, check=True, capture_output=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    done = subprocess.run(
        (tmp_path / "env/bin/cufallback", "plan", "--recipe", "rehearsal", "--json", "--work", rehearsal.work),
        cwd=command.cwd,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUFALLBACK_DATA")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["complete"]
    assert told["build_id"][:16] == rehearsal.folder.name, "locks and probe of the wheel are those of the checkout"
