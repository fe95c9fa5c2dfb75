from __future__ import annotations

import copy
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cufallback.errors import RecipeError
from cufallback.recipe import (
    GitSource,
    SdistSource,
    json_schema,
    load_recipe,
    parse_recipe,
)
from cufallback.resources import recipe_files
from cufallback.tomlplace import key_path, line_of

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = sorted((CHECKOUT / "recipes").glob("*.toml"))
REHEARSAL = (CHECKOUT / "recipes/rehearsal.toml").read_text()
PRODUCTION = (CHECKOUT / "recipes/kimi-k3-cu129.toml").read_text()

by_name = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


RUNTIME = next(line for line in REHEARSAL.splitlines() if line.startswith('add = ["cuda-toolkit[cudart]=='))


def write(folder: Path, text: str, name: str = "rehearsal") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str, name: str = "rehearsal") -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(write(folder, text, name))
    return caught.value


def changed(text: str, old: str, new: str) -> tuple[str, int]:
    """Return ``text`` with its only ``old`` replaced, and the line that stands on."""
    assert text.count(old) == 1, old
    return text.replace(old, new), text[: text.index(old)].count("\n") + 1


# The three recipes


@by_name
def test_recipe_loads_and_points_editors_to_its_schema(path: Path) -> None:
    assert parse_recipe(path).name == path.stem
    first = path.read_text().splitlines()[0]
    assert first.startswith("#:schema ")
    assert (path.parent / first.removeprefix("#:schema ")).is_file()


def test_what_the_recipes_are_for() -> None:
    assert load_recipe().name == "kimi-k3-cu129"
    rehearsal, default, older = (load_recipe(name) for name in ("rehearsal", "kimi-k3-cu129", "kimi-k3-0.27-cu129"))
    assert isinstance(rehearsal.source, SdistSource)
    assert isinstance(default.source, GitSource)
    assert isinstance(older.source, GitSource)
    assert default.source.ancestor[0].commit.startswith("aeeb36b1f1")
    assert older.source.rewrite == rehearsal.source.rewrite, "the rehearsal rehearses the guard of 0.27"
    assert {recipe.cuda.toolkit for recipe in (rehearsal, default, older)} == {"12.9.1"}
    assert rehearsal.recipe.status == "rehearsal"


@by_name
def test_every_ban_leaves_the_recipes_own_torch_alone(path: Path) -> None:
    recipe = parse_recipe(path)
    torch = next(ban for ban in recipe.deps.ban if ban.name == "torch")
    assert torch.versions
    assert torch.versions.startswith("!=2.13.0+")


def test_recipes_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe("rehearsal").python.version = "3.12"  # type: ignore[misc]


# Every fault with file, line, key path and a way out


def test_an_unknown_recipe_names_the_nearest_and_all() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("kimi-k3-cu130")
    assert "did you mean kimi-k3-cu129?" in caught.value.remedy
    assert "rehearsal" in caught.value.remedy


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("toolkit = ", "tool_kit = ", "cuda.tool_kit", "did you mean toolkit?"),
        ("exclude_newer = ", "exclude_never = ", "deps.exclude_never", "did you mean exclude_newer?"),
        ("count = 1", "cuont = 1", "source.rewrite[0].cuont", "did you mean count?"),
        ("sha256 = ", "sha265 = ", "source.sha265", "did you mean sha256?"),
        ("[builder]", "[bulider]", "bulider", "did you mean builder?"),
        ("[[source.unused]]", "[[source.unusd]]", "source.unusd", "did you mean unused?"),
        ("status = ", "zzz = 1\nstatus = ", "recipe.zzz", "valid keys are default, end_of_line, name, status, summary"),
        ("schema = 1\n", "schema = 1\nquux = 2\n", "quux", "valid keys are builder, cuda"),
    ],
)
def test_an_unknown_key_has_its_line_and_the_nearest_valid_key(
    tmp_path: Path, old: str, new: str, key: str, hint: str
) -> None:
    text, line = changed(REHEARSAL, old, new)
    line += new.startswith("schema")
    error = refused(tmp_path, text)
    assert f"{tmp_path / 'rehearsal.toml'}:{line}: {key}: unknown key" in error.reason
    assert hint in error.remedy


@pytest.mark.parametrize(
    ("old", "new", "key", "message"),
    [
        ("schema = 1", "schema = 2", "schema", "Input should be 1"),
        ('toolkit = "12.9.1"', "toolkit = 12.9", "cuda.toolkit", "valid string"),
        ('toolkit = "12.9.1"', 'toolkit = "12.9"', "cuda.toolkit", "match pattern"),
        ("maximum_driver_branch = 575", 'maximum_driver_branch = "575"', "cuda.maximum_driver_branch", "valid integer"),
        ("maximum_driver_branch = 575", "maximum_driver_branch = true", "cuda.maximum_driver_branch", "valid integer"),
        ("maximum_driver_branch = 575", "maximum_driver_branch = 57", "cuda.maximum_driver_branch", "greater than"),
        (
            'architectures = ["9.0a", "10.0a", "10.3a"]',
            'architectures = ["9.0a", "sm_100"]',
            "cuda.architectures[1]",
            "match pattern",
        ),
        ('architectures = ["9.0a", "10.0a", "10.3a"]', "architectures = []", "cuda.architectures", "at least 1"),
        ('architectures = ["9.0a", "10.0a", "10.3a"]', 'architectures = "9.0a"', "cuda.architectures", "valid tuple"),
        ('status = "rehearsal"', 'status = "nearly"', "recipe.status", "'production', 'experimental' or 'rehearsal'"),
        ("count = 1", "count = 0", "source.rewrite[0].count", "greater than or equal to 1"),
        ('sha256 = "eec2', 'sha256 = "EEC2', "source.sha256", "match pattern"),
        ('sha256 = "eec2d', 'sha256 = "ec2d', "source.sha256", "match pattern"),
        ('kind = "sdist"', 'kind = "tarball"', "source", "expected tags"),
        ('kind = "sdist"', "", "source", "discriminator 'kind'"),
        ('version = "3.11"', 'version = "3.11.7"', "python.version", "match pattern"),
        ('exclude_newer = "2026-11-30T00:00:00Z"', 'exclude_newer = "soon"', "deps.exclude_newer", "RFC 3339"),
        (
            'exclude_newer = "2026-11-30T00:00:00Z"',
            'exclude_newer = "2026-11-30T00:00:00"',
            "deps.exclude_newer",
            "time zone",
        ),
        ('files = ["requirements/build/cpu.txt"]', 'files = ["../x.txt"]', "deps.build.files[0]", "inside the tree"),
        ('files = ["requirements/build/cpu.txt"]', 'files = ["/etc/x"]', "deps.build.files[0]", "inside the tree"),
        ('files = ["requirements/build/cpu.txt"]', 'files = [""]', "deps.build.files[0]", "inside the tree"),
        (
            'add = ["cuda-toolkit[cudart]==12.9.1", ',
            'add = ["cuda toolkit", ',
            "deps.runtime.add[0]",
            "not a PEP 508 requirement: 'cuda toolkit'",
        ),
        (f"{RUNTIME}\n", "\n", "deps.runtime", "needs files, add or both"),
        ('name = "base"', 'name = "wheels"', "image.base", "every build of an image has"),
        (
            'reference = "docker.io/library/python:3.11-slim-bookworm"',
            'reference = "python:3.11"',
            "image.base[0].reference",
            "names no registry",
        ),
        (
            'reference = "docker.io/library/python:3.11-slim-bookworm"',
            'reference = "docker.io/library/python"',
            "image.base[0].reference",
            "must be registry, name and tag",
        ),
        ('dockerfile = "cu129.Dockerfile"', 'dockerfile = "../Dockerfile"', "image.dockerfile", "match pattern"),
        ('versions = "!=2.13.0+cpu"', 'versions = "not 2.13"', "deps.ban[3].versions", "PEP 440"),
        (
            "pattern = 'hasattr\\(torch\\.ops\\._C, \"kimi_k3_attn_res\"\\)'",
            "pattern = 'hasattr('",
            "source.contract[0].pattern",
            "not a regular expression",
        ),
        ('url = "https://download', 'url = "http://download', "deps.index[0].url", "match pattern"),
        ("[python]\n", "[python]\nplatform = 1\n", "python.platform", "valid string"),
        (
            'why = "the +cpu build of torch is on PyTorch\'s own index alone"',
            'why = "because"',
            "deps.index[0].why",
            "at least 10",
        ),
    ],
)
def test_a_wrong_value_has_its_line_and_key(tmp_path: Path, old: str, new: str, key: str, message: str) -> None:
    text, line = changed(REHEARSAL, old, new)
    if key in ("source", "deps.runtime", "image.base"):  # the fault is that of the whole table
        line -= 1
    line += new.startswith("[python]")
    error = refused(tmp_path, text)
    assert f"{tmp_path / 'rehearsal.toml'}:{line}: {key}: " in error.reason
    assert message in error.reason
    assert error.remedy
    assert "sdist" not in key_path(key.split("."))


@pytest.mark.parametrize("digits", [7, 39, 41])
def test_a_commit_must_be_whole(tmp_path: Path, digits: int) -> None:
    whole = "2cf0a6915ce544dc493a0990f2ea38d81601128a"
    text, line = changed(PRODUCTION, f'commit = "{whole}"', f'commit = "{(whole + "0")[:digits]}"')
    error = refused(tmp_path, text, "kimi-k3-cu129")
    assert f":{line}: source.commit: String should match pattern" in error.reason


@pytest.mark.parametrize("table", ["recipe", "source", "cuda", "python", "deps", "wheel"])
def test_a_missing_table_is_named(tmp_path: Path, table: str) -> None:
    lines = REHEARSAL.splitlines(keepends=True)
    kept, inside = [], False
    for line in lines:
        if line.startswith("["):
            inside = line.strip("[]\n").split(".")[0] == table
        if not inside:
            kept.append(line)
    assert f": {table}: Field required" in refused(tmp_path, "".join(kept)).reason


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text, first = changed(REHEARSAL, "toolkit = ", "tool_kit = ")
    text, second = changed(text, "minimum_disk_gib = 6", "minimum_disk_gib = 0")
    error = refused(tmp_path, text)
    assert f":{first}: cuda.tool_kit: unknown key" in error.reason
    assert ": cuda.toolkit: Field required" in error.reason
    assert f":{second}: builder.minimum_disk_gib: " in error.reason


def test_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in refused(tmp_path, "schema = 1\n[recipe\n").reason


@pytest.mark.parametrize("content", [b"\xff\xfe", b"schema = 1\n# \xe4\n"])
def test_no_utf8_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rehearsal.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="not UTF-8 text"):
        parse_recipe(path)


@pytest.mark.parametrize("name", ["gone.toml", "folder.toml"])
def test_no_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(RecipeError, match="cannot be read") as caught:
        load_recipe(str(tmp_path / name))
    assert caught.value.where == str(tmp_path / name)


def test_the_file_is_named_like_the_recipe(tmp_path: Path) -> None:
    error = refused(tmp_path, REHEARSAL, "other")
    assert error.where == f"{tmp_path / 'other.toml'}:5: recipe.name"
    assert "rehearsal.toml" in error.remedy


@pytest.mark.parametrize(("defaults", "count"), [((), 0), (("a", "b"), 2)])
def test_one_recipe_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defaults: tuple[str, ...], count: int
) -> None:
    (tmp_path / "recipes").mkdir()
    for name in ("a", "b"):
        text = REHEARSAL.replace('name = "rehearsal"', f'name = "{name}"')
        write(tmp_path / "recipes", text.replace("[source]", "default = true\n\n[source]", name in defaults), name)
    monkeypatch.setenv("CUFALLBACK_DATA", str(tmp_path))
    with pytest.raises(RecipeError, match=f"{count} recipes say default"):
        load_recipe()


# Where a key stands


def places(value: Any, location: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the location of every key of a parsed TOML document."""
    found = [location] if location else []
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*location, name))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            found += places(inner, (*location, index))
    return found


@by_name
def test_every_key_of_every_recipe_is_found_on_its_line(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    for location in places(tomllib.loads(text)):
        line = lines[line_of(text, location) - 1]
        last = [part for part in location if isinstance(part, str)][-1]
        assert last in line, (location, line)
        if line.startswith("["):
            assert line.strip("[]").startswith(".".join(part for part in location if isinstance(part, str))), location


def test_lines_inside_long_strings_are_no_keys() -> None:
    text = "a = \"\"\"\nb = 1\n[c]\n\"\"\"\nb = 2\n[c]\nd = '''\nd = 4\n'''\ne = 5\n"
    assert [line_of(text, place) for place in [("a",), ("b",), ("c",), ("c", "d"), ("c", "e")]] == [1, 5, 6, 7, 10]


def test_a_key_that_is_not_there_has_the_line_of_its_table() -> None:
    text = "a = 1\n\n[t]\nx = 1\n\n[[t.list]]\ny = 1\n\n[[t.list]]\ny = 2\n"
    assert line_of(text, ("t", "gone")) == 3
    assert line_of(text, ("t", "list", 1, "gone")) == 9
    assert line_of(text, ("t", "list", 1, "y")) == 10
    assert line_of(text, ("t", "list", 0, "y")) == 7
    assert line_of(text, ("gone",)) == 1


def test_dotted_and_quoted_keys_are_found() -> None:
    text = '[t]\na.b = 1\n"c d" = 2\n'
    assert line_of(text, ("t", "a", "b")) == 2
    assert line_of(text, ("t", "c d")) == 3


def test_key_paths_read_as_people_write_them() -> None:
    assert key_path(("source", "rewrite", 0, "file")) == "source.rewrite[0].file"
    assert key_path(("schema",)) == "schema"


def test_a_table_named_like_a_kind_of_source_keeps_its_name_in_messages(tmp_path: Path) -> None:
    text, line = changed(REHEARSAL, 'VLLM_TARGET_DEVICE = "tpu"', "git = 1")
    assert f":{line}: wheel.environment.git: " in refused(tmp_path, text).reason


# The JSON Schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The committed file, as an editor reads it."""
    loaded: dict[str, Any] = json.loads((CHECKOUT / "recipes/recipe.schema.json").read_text())
    return loaded


def test_the_committed_schema_is_current(schema: dict[str, Any]) -> None:
    assert schema == json_schema(), "run `nox -s docs`"


def test_the_schema_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "cufallback recipe"


@by_name
def test_the_schema_accepts_the_recipe(schema: dict[str, Any], path: Path) -> None:
    jsonschema.validate(tomllib.loads(path.read_text()), schema)


def add_key(path: str) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for part in path.split("."):
            data = data[int(part)] if part.isdigit() else data[part] if part else data
        data["unknown"] = "x"

    return edit


TABLES = ["", "recipe", "source", "source.rewrite.0", "cuda", "python", "deps", "deps.build", "deps.index.0", "wheel"]


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_refuses_an_unknown_key(schema: dict[str, Any], table: str) -> None:
    data = tomllib.loads(REHEARSAL)
    add_key(table)(data)
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(data))
    messages = [inner.message for error in errors for inner in (error, *error.context)]
    assert [message for message in messages if "'unknown' was unexpected" in message]


def test_the_schema_refuses_what_the_model_refuses(schema: dict[str, Any]) -> None:
    good = tomllib.loads(REHEARSAL)
    validator = jsonschema.Draft202012Validator(schema)
    for path, value in [
        ("schema", 2),
        ("cuda.toolkit", "12.9"),
        ("cuda.toolkit", 12.9),
        ("cuda.architectures", []),
        ("source.sha256", "abc"),
        ("recipe.status", "nearly"),
        ("recipe.default", "yes"),
    ]:
        data = copy.deepcopy(good)
        table = data
        *tables, key = path.split(".")
        for name in tables:
            table = table[name]
        table[key] = value
        assert list(validator.iter_errors(data)), path


def test_every_key_and_table_of_the_schema_has_a_description(schema: dict[str, Any]) -> None:
    for name, node in {**schema["$defs"], "Recipe": schema}.items():
        assert node["description"], name
        for key, field in node["properties"].items():
            assert field.get("description"), f"{name}.{key}"


def test_recipe_files_are_those_of_this_checkout() -> None:
    assert sorted(recipe_files().values()) == RECIPES


# Files and values made to break the reader


def test_what_is_no_ordinary_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "large.toml").write_bytes(b"#" * ((1 << 20) + 1))
    for name in ("pipe", "folder", "device", "large", "x" * 5000, "nul\0"):
        with pytest.raises(RecipeError):
            parse_recipe(tmp_path / f"{name}.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "out of range"),
        ("a = 0x" + "f" * 5000, "64 bits"),
        ("a = [[9223372036854775808]]", "64 bits"),
        ("\ufeff" + REHEARSAL, "byte-order mark"),
        ("a = 1\ra = 2", "not valid TOML"),
    ],
)
def test_what_cannot_be_parsed_is_one_short_error(tmp_path: Path, text: str, said: str) -> None:
    error = refused(tmp_path, text)
    assert said in error.reason
    assert len(str(error)) < 1000
    assert ("byte-order mark" in error.remedy) == text.startswith("\ufeff")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("schema = 1", "schema = true", "schema"),
        ("pattern = \"'g6e448d0ea'\"", "pattern = 'a{99999999999999999999}'", "source.contract[1].pattern"),
        ("pattern = \"'g6e448d0ea'\"", f"pattern = '{'(' * 3000}{')' * 3000}'", "source.contract[1].pattern"),
        ('file = "vllm/_version.py"', 'file = "vllm/\\u0000"', "source.contract[1].file"),
        ('file = "vllm/_version.py"', 'file = "vllm/\\u001b[2J"', "source.contract[1].file"),
        (r"replacement = '\g<indent>", r"replacement = '\g<other>", "source.rewrite[0].replacement"),
        (r"replacement = '\g<indent>", r"replacement = '\9", "source.rewrite[0].replacement"),
        (r"replacement = '\g<indent>", r"replacement = '\z", "source.rewrite[0].replacement"),
        ('toolkit = "12.9.1"', 'toolkit = "12.9.77"', "cuda.toolkit"),
        ('toolkit = "12.9.1"', 'toolkit = "\u0661\u0662.9.1"', "cuda.toolkit"),
        ('architectures = ["9.0a", "10.0a", "10.3a"]', 'architectures = ["9.9a"]', "cuda.architectures"),
        ('package = "vllm"', 'package = "../vllm"', "source.package"),
        ('version = "0.27.1"', 'version = "newest"', "source.version"),
        ('name = "*"', 'name = ""', "source.unused[0].name"),
        ('url = "https://download', 'url = "https://me:s3cr3t@download', "deps.index[0].url"),
        ('url = "https://download.pytorch.org', 'url = "https://h:s3cr3t', "deps.index[0].url"),
        ("schema = 1\n", 'schema = 1\n"k\\u001b[2J" = 1\n', r"'k\\x1b[2J'"),
    ],
)
def test_a_value_that_would_break_a_later_stage_is_refused(tmp_path: Path, old: str, new: str, key: str) -> None:
    text, line = changed(REHEARSAL, old, new)
    error = refused(tmp_path, text)
    line += new.startswith("schema = 1\n")
    assert f":{line}: {key}: " in error.reason
    assert "s3cr3t" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1000


def test_a_thousand_faults_are_not_all_listed(tmp_path: Path) -> None:
    error = refused(tmp_path, "".join(f"k{number} = 1\n" for number in range(1000)))
    assert error.reason.count("\n") < 30
    assert "more" in error.reason


# Statements, and on which of their lines, from 0, the key stands
PARTS = [
    ('{} = 1 # """\n', 0),
    ("{} = \"a ''' b\"\n", 0),
    ('{} = \'a """ b # c\'\n', 0),
    ('{} = """\n[no]\nx = 1\\"""\n"""\n', 0),
    ("{} = '''\n[[no]]\n''''\n", 0),
    ('# [no] = """\n{} = [\n  "]", # ]\n  {{ x = 1 }},\n]\n', 1),
    ("\n  {} . sub = 2000-01-01\n", 1),
    ('{} = "\\\\" # \'\n', 0),
]


@given(
    st.lists(st.tuples(st.sampled_from(["", "[{}]", "[[{}]]", '["{}"]', "[ {} . 'in ner' ]"]), st.sampled_from(PARTS)))
)
def test_every_key_of_any_file_is_found(parts: list[tuple[str, tuple[str, int]]]) -> None:
    text = ""
    expected: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for number, (header, (statement, offset)) in enumerate(parts):
        if header:
            table = (f"t{number}", *((0,) if "[[" in header else ("in ner",) if "ner" in header else ()))
            text += header.format(f"t{number}") + "\n"
            expected[table] = text.count("\n")
        expected[(*table, f"k{number}")] = text.count("\n") + 1 + offset
        text += statement.format(f"k{number}")
    tomllib.loads(text)
    assert {place: line_of(text, place) for place in expected} == expected
