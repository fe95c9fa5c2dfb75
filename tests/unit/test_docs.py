"""Documentation that says what the code says, and house files that say what they must."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuda_probe.diagnosis import STATUSES
from cufallback import record
from cufallback.attest.documents import PROVENANCE, SBOMS
from cufallback.errors import ExitCode
from cufallback.image import lock as image_lock
from cufallback.image.dockerfile import stages
from cufallback.recipe import json_schema
from cufallback.stages import STAGES

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])


def read(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def generate(*arguments: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "docs/generate.py", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "build")},
        capture_output=True,
        text=True,
        check=False,
    )


# Generated pages


def test_generated_files_are_current() -> None:
    done = generate("--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "run `nox -s docs`"


@pytest.mark.parametrize("name", ["docs/exit-codes.md", "docs/recipe.md", "recipes/recipe.schema.json"])
def test_a_stale_file_is_named_and_then_written(tmp_path: Path, name: str) -> None:
    for folder in ("docs", "recipes"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    (tmp_path / name).write_text("stale")
    checked = generate("--check", cwd=tmp_path)
    assert (checked.returncode, checked.stdout) == (1, f"not current: {name}\n")
    assert (tmp_path / name).read_text() == "stale"
    assert generate(cwd=tmp_path).stdout == f"written: {name}\n"
    assert (tmp_path / name).read_text() == read(name)


def test_exit_codes_are_those_of_the_program_each_with_a_remedy() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.+?) \| (.+?) \|$", read("docs/exit-codes.md"), re.MULTILINE)
    assert [(int(code), name, doc) for code, name, doc, _remedy in rows] == [
        (code.value, code.name, code.doc) for code in ExitCode
    ]
    assert all(remedy.strip() for *_row, remedy in rows)


def keys(node: dict[str, Any], definitions: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a recipe, found without the code that writes the page."""
    for branch in [*node.get("oneOf", []), *node.get("anyOf", []), *([node["items"]] if "items" in node else [])]:
        yield from keys(branch, definitions, path)
    if "$ref" in node:
        yield from keys(definitions[node["$ref"].rpartition("/")[2]], definitions, path)
    for name, field in node.get("properties", {}).items():
        yield (*path, name)
        yield from keys(field, definitions, (*path, name))


def test_the_page_of_the_recipe_format_lists_every_key_in_its_table() -> None:
    sections = re.split(r"^## `\[+([\w.]+)\]+`.*$", "## `[_]`\n" + read("docs/recipe.md"), flags=re.MULTILINE)[1:]
    tables: dict[str, str] = {}
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        tables[name.strip("_")] = tables.get(name.strip("_"), "") + body
    schema = json_schema()
    found = set(keys(schema, schema["$defs"]))
    assert len(found) > 60
    for *table, key in found:
        assert f"\n| `{key}` | " in tables[".".join(table)], (table, key)
    meanings = re.findall(r"^\| `\w+` \| .+? \| .+? \| (.*) \|$", read("docs/recipe.md"), re.MULTILINE)
    assert all(meanings)


def test_the_page_of_the_record_lists_every_key_and_file() -> None:
    text = read("docs/record.md")
    for name, field in record.Record.model_fields.items():
        assert f"| `{field.alias or name}` |" in text
    folders = ("wheels", "image", SBOMS, "inputs", "logs", *record.ADDED)
    files = (record.RECORD, record.PLAN, record.INSPECTION, record.PYLOCK, PROVENANCE, record.SUMS)
    for name in (*(f"{folder}/" for folder in folders), *files):
        assert f"| `{name}` |" in text
    for stage in STAGES:
        assert f"`{stage.name}`" in text


def test_the_page_of_the_image_knows_every_stage_of_the_dockerfile_and_every_key_of_the_lock() -> None:
    text = read("docs/image.md")
    (table,) = re.findall(r"^\| stage \| .*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)))
    assert sorted(shown) == sorted(stages(read("dockerfiles/cu129.Dockerfile")))
    (example,) = re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lock = image_lock.parse_image_lock(example.replace("DIGEST", "0" * 64), "rehearsal", where="docs/image.md")
    assert image_lock.render_image_lock(lock.images, "rehearsal").endswith(
        example.partition("\n")[2].replace("DIGEST", "0" * 64)
    )


def test_exit_codes_of_the_cuda_probe_are_those_of_the_program() -> None:
    rows_shown = re.findall(r"^\| (\d+) \| `(\w+)` \| (.+?) \|$", read("docs/cuda-probe.md"), re.MULTILINE)
    assert rows_shown == [(str(code), status, meaning) for status, (code, meaning) in STATUSES.items()]


def test_every_environment_variable_is_in_the_table_and_none_besides() -> None:
    files = [CHECKOUT / "noxfile.py", CHECKOUT / "tests/conftest.py"]
    for folder in ("build", "tests/services"):
        files += [path for path in (CHECKOUT / folder).rglob("*") if path.suffix in {".py", ".toml"}]
    # Not the beginning of a name that code completes, such as CUFALLBACK_PROBE_{…}
    used = {name for path in files for name in re.findall(r"\bCUFALLBACK_[A-Z_]+\b(?!\{)", path.read_text("utf-8"))}
    assert len(used) >= 9
    assert set(re.findall(r"^\| `(CUFALLBACK_\w+)` \|", read("docs/environment.md"), re.MULTILINE)) == used


# Links and the two READMEs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            led_to = page.parent / file if file else page
            assert led_to.is_file(), target
            assert not anchor or anchor in anchors(led_to.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in headings(text)}


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ .+$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)


def fences(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_both_readmes_show_the_same() -> None:
    english, chinese = read("README.md"), read("README.zh-CN.md")
    assert fences(english) == fences(chinese)
    assert len(headings(english)) == len(headings(chinese))
    assert english.count("\n|") == chinese.count("\n|")
    # Links to each other apart, the same links, and the same figures in the same order of tables
    pages = {"README.md", "README.zh-CN.md", "#sources", "#来源", "#recipes", "#配方", "#without-a-build", "#免构建"}
    pages |= {"#an-image", "#镜像"}
    links = [set(re.findall(r"\]\(([^)\s]+)\)", text)) - pages for text in (english, chinese)]
    assert links[0] == links[1]
    figures = r"r5\d\d(?:\.\d\d(?:\.\d\d)?)?|v0\.\d\d(?:\.\d)?|\d+\.\d+\.\d+|\((?:9|10|12)\.\d\)"
    for first, second in zip(rows(english), rows(chinese), strict=True):
        assert re.findall(figures, ascii_brackets(first)) == re.findall(figures, ascii_brackets(second))
    assert re.findall(r"<!-- .*? -->", english) == re.findall(r"<!-- .*? -->", chinese)


def rows(text: str) -> list[str]:
    return re.findall(r"^\|.*\|$", text, re.MULTILINE)


def ascii_brackets(text: str) -> str:
    return text.replace("\N{FULLWIDTH LEFT PARENTHESIS}", "(").replace("\N{FULLWIDTH RIGHT PARENTHESIS}", ")")


def test_the_first_screen_of_the_readme_has_what_a_reader_must_know_first() -> None:
    first = "\n".join(read("README.md").splitlines()[:50])
    for needed in (
        "Is this for you?",
        "VLLM_ENABLE_CUDA_COMPATIBILITY=1",
        "r580",
        "r575",
        "B300",
        "error 804",
        "cannot build",
    ):
        assert needed in first
    set_up, tests = fences(read("README.md"))[:2]
    assert set_up == (
        "python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s build-cu129 -- --recipe rehearsal\n"
    )
    assert tests == ".venv/bin/nox -s tests\n"
    assert set_up in first


def test_the_changelog_has_its_shape() -> None:
    text = read("CHANGELOG.md")
    assert "keepachangelog.com" in text
    assert "\n## Unreleased\n" in text
    kinds = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# Continuous integration


def test_ci_runs_the_commands_of_the_readme() -> None:
    path = CHECKOUT / ".ci/run"
    assert os.access(path, os.X_OK)
    script = path.read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    for command in fences(read("README.md"))[:2]:
        assert f"    {command}" in script
    assert script.rstrip().splitlines()[-1] == 'step "tests" run_tests'
    assert "\nexport CI=true\n" in script
    # What `step` runs stands left of ||, where "set -e" is off: a command that fails must end the function by itself.
    for body in re.findall(r"^clone\(\) \{\n(.*?)^\}", script, re.DOTALL | re.MULTILINE):
        lines = [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]
        assert all(line.endswith("&&") for line in lines[:-1]), body


def test_the_workflow_has_few_rights_and_pinned_actions() -> None:
    text = read(".github/workflows/ci.yml")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used), used
    assert all(re.search(rf"{name} # v\d", text) for name in used)
    assert job["steps"][0]["with"]["persist-credentials"] is False
    assert job["steps"][-1]["run"].endswith(".ci/run")


def test_pre_commit_runs_local_hooks_only() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    assert {hook["entry"] for hook in repository["hooks"]} == {".venv/bin/nox -s lint", ".venv/bin/nox -s typecheck"}
    command = [sys.executable, "-m", "pre_commit", "validate-config", CHECKOUT / ".pre-commit-config.yaml"]
    assert subprocess.run(command, check=False).returncode == 0
