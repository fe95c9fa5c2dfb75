"""Requirements surgery on small trees: reading, including, editing, and each way that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cufallback.deps.surgery import AppliedEdit, Operated, operate
from cufallback.deps.target import Target
from cufallback.errors import LockError
from cufallback.recipe import Deps

TARGET = Target("3.12", "x86_64-manylinux_2_28")
WHY = "a reason of ten letters or more"


def deps(**tables: Any) -> Deps:
    return Deps.model_validate(
        {
            "exclude_newer": "2026-11-30T00:00:00Z",
            "build": {"files": ["req/main.txt"]},
            "runtime": {"add": ["added==1"]},
            **tables,
        }
    )


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "tree" / "req" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root / "tree"


def build(root: Path, main: str, *, edit: list[dict[str, Any]] | None = None, **files: str) -> Operated:
    edits = [{"why": WHY, **item} for item in edit or []]
    return operate(tree(root, main=main, **files), deps(edit=edits), TARGET)["build"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb==1\n", ("a", "b==1")),
        ("A.B >= 1 , < 2  # why\n", ("A.B<2,>=1",)),
        ("# a\n  # b\n\n\t\nc\t# tab\n", ("c",)),
        ("a#b\n", None),  # no comment without a space before it, as in a URL's fragment
        ("a >= 1, \\\n   < 2\nb\n", ("a<2,>=1", "b")),
        ("a \\\n# comment ends it\nb\n", ("a", "b")),
        ("a # comment \\\nb\nc\n", ("a", "c")),  # comments go after lines are joined: pip's documented order
        ("a \\", ("a",)),
        ("a\\", ("a",)),
        ("a\r\nb\r\n", ("a", "b")),
        ("a; python_version > '3.11'\nb; python_version < '3.12'\n", ("a",)),
        ("a; platform_machine == 'aarch64'\na==2; sys_platform == 'linux'", ("a==2",)),
        ("a[x,y]==1\na[x,y]==1\n", ("a[x,y]==1",)),
        ("", ()),
    ],
)
def test_lines_are_read_as_pip_reads_them(tmp_path: Path, text: str, lines: tuple[str, ...] | None) -> None:
    if lines is None:
        with pytest.raises(LockError, match="not a PEP 508 requirement"):
            build(tmp_path, text)
    else:
        assert build(tmp_path, text).lines == lines


@pytest.mark.parametrize("include", ["-r one.txt", "--requirement one.txt", "-rone.txt", "--requirement=one.txt"])
def test_included_files_are_read_in_place_relative_to_their_own(tmp_path: Path, include: str) -> None:
    made = build(
        tmp_path, f"a\n{include}  # comment\nz\n", one="b\n-r ../req/two.txt\n-r two.txt\n", two="c; os_name=='x'\nd\n"
    )
    assert made.lines == ("a", "b", "d", "z")
    assert [(edit.file, edit.line) for edit in made.edits if edit.before.startswith("c")] == [
        ("req/../req/two.txt", 1),
        ("req/two.txt", 1),
    ]


@pytest.mark.parametrize("include", ["main.txt", "./main.txt", "../req/main.txt", "one.txt", "link.txt"])
def test_file_that_includes_itself(tmp_path: Path, include: str) -> None:
    (tree(tmp_path, one="-r main.txt") / "req/link.txt").symlink_to("main.txt")
    with pytest.raises(LockError, match="includes itself") as caught:
        build(tmp_path, f"a\n-r {include}\n", one="-r main.txt")
    assert caught.value.where in ("req/main.txt:2", "req/one.txt:1")


@pytest.mark.parametrize(
    ("include", "reason"),
    [
        ("gone.txt", "cannot be read"),
        (".", "cannot be read"),
        ("", "cannot be read"),
        ("binary.txt", "cannot be read"),
        ("loop.txt", "cannot be read"),
        ("nul\0.txt", "cannot be read"),
        ("https://example.com/r.txt", "cannot be read"),
        ("../../outside.txt", "lies outside the tree"),
        ("/etc/hostname", "lies outside the tree"),
        ("out.txt", "lies outside the tree"),
    ],
)
def test_included_file_that_cannot_be_had(tmp_path: Path, include: str, reason: str) -> None:
    folder = tree(tmp_path, main="") / "req"
    (tmp_path / "outside.txt").write_text("a")
    (folder / "binary.txt").write_bytes(b"\xff\xfe")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "out.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(LockError, match=reason) as caught:
        build(tmp_path, f"a\n\n-r {include}\n")
    assert caught.value.where == "req/main.txt:3"


def test_file_of_the_recipe_that_is_not_there(tmp_path: Path) -> None:
    tree(tmp_path, other="")
    with pytest.raises(LockError, match=r"req/main\.txt cannot be read") as caught:
        operate(tmp_path / "tree", deps(), TARGET)
    assert caught.value.where is not None
    assert "deps.build.files" in caught.value.where


@pytest.mark.parametrize(
    "line",
    [
        "--extra-index-url https://example.com/whl/",
        "--extra-index-url=https://example.com/whl/",
        "--index-url https://example.com",
        "-i https://example.com",
        "-f ./wheels",
        "--find-links ./wheels",
    ],
)
def test_upstream_s_indexes_are_dropped_and_recorded(tmp_path: Path, line: str) -> None:
    made = build(tmp_path, f"a\n{line}\n")
    assert made.lines == ("a",)
    assert made.edits == (
        AppliedEdit("req/main.txt", 2, line, "", "each package has exactly one index, which the recipe names"),
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("-c constraints.txt", "the option -c is not supported"),
        ("--constraint=constraints.txt", "the option --constraint is not supported"),
        ("-e .", "the option -e is not supported"),
        ("--pre", "the option --pre is not supported"),
        ("--prefer-binary", "the option --prefer-binary is not supported"),
        ("--no-binary :all:", "the option --no-binary is not supported"),
        ("--require-hashes", "the option --require-hashes is not supported"),
        (f"a==1 --hash=sha256:{'0' * 64}", "not a PEP 508 requirement"),
        ("a==1 \\\n  --hash=sha256:00", "not a PEP 508 requirement"),
        ("./folder", "not a PEP 508 requirement"),
        ("https://example.com/a-1-py3-none-any.whl", "not a PEP 508 requirement"),
        ("a==${VERSION}", "not a PEP 508 requirement"),
        ("a @ https://example.com/a-1-py3-none-any.whl", "comes from a URL"),
        ("a @ git+https://example.com/a", "comes from a URL"),
    ],
)
def test_line_that_is_not_understood_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(LockError, match=reason) as caught:
        build(tmp_path, f"first\n\n{line}\n")
    assert caught.value.where == "req/main.txt:3"


def test_edits_replace_and_drop_and_carry_their_reasons(tmp_path: Path) -> None:
    made = build(
        tmp_path,
        "Torch == 2.13.0\nflash_infer==1\nkept>=1\nmarked==1; os_name == 'posix'\n",
        edit=[
            {
                "name": "torch",
                "requirement": "torch==2.13.0",
                "replacement": "torch==2.13.0+cu129",
                "why": "the CUDA 12 build",
            },
            {"name": "flash-infer", "why": "is not on the index"},
            {"name": "marked", "requirement": "marked==1; os_name=='posix'", "replacement": "marked==2"},
        ],
    )
    assert made.lines == ("torch==2.13.0+cu129", "kept>=1", "marked==2")
    assert made.edits == (
        AppliedEdit("req/main.txt", 1, "Torch == 2.13.0", "torch==2.13.0+cu129", "the CUDA 12 build"),
        AppliedEdit("req/main.txt", 2, "flash_infer==1", "", "is not on the index"),
        AppliedEdit("req/main.txt", 4, "marked==1; os_name == 'posix'", "marked==2", WHY),
    )


def test_direct_url_may_be_edited_away(tmp_path: Path) -> None:
    made = build(tmp_path, "a @ https://example.com/a.whl\n", edit=[{"name": "a", "replacement": "a==1"}])
    assert made.lines == ("a==1",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("torch==2.14.0", "torch==2.13.0"), ("torch[x]==2.13.0", "torch==2.13.0"), ("torch; os_name=='posix'", "torch")],
)
def test_edit_that_expects_another_line(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(LockError, match="the recipe's edit expects") as caught:
        build(tmp_path, f"a\n{line}\n", edit=[{"name": "torch", "requirement": expected, "replacement": "torch==1"}])
    assert caught.value.where == "req/main.txt:2"
    assert line in caught.value.reason


@pytest.mark.parametrize("main", ["a\n", "torchvision\n", "torch; os_name == 'nt'\n", "# torch\n"])
def test_edit_that_matches_nothing(tmp_path: Path, main: str) -> None:
    with pytest.raises(LockError, match="no requirement that holds for the target names torch") as caught:
        build(tmp_path, main, edit=[{"name": "torch", "replacement": "torch==1"}])
    assert caught.value.where == "deps.edit name = 'torch'"


def test_added_lines_and_overrides_are_recorded_and_count_for_the_digest(tmp_path: Path) -> None:
    override = {"requirement": "b<2", "why": WHY}
    made = operate(tree(tmp_path, main="a\n"), deps(override=[override]), TARGET)
    assert (made["runtime"].lines, made["runtime"].overrides) == (("added==1",), ("b<2",))
    assert [(edit.after, edit.why) for edit in made["runtime"].edits] == [
        ("added==1", "added by the recipe"),
        ("b<2", f"override: {WHY}"),
    ]
    plain = operate(tmp_path / "tree", deps(), TARGET)
    assert plain["runtime"].sha256 != made["runtime"].sha256
    assert plain["runtime"].sha256 != plain["build"].sha256
    assert (
        operate(tree(tmp_path, main="# moved\n\na  # said\n"), deps(), TARGET)["build"].sha256 == plain["build"].sha256
    )
