"""Reading CMake: what is fetched is found in every branch, and what cannot be read is an error, never an omission."""

from __future__ import annotations

from textwrap import dedent

import pytest

from cufallback.errors import HarvestError
from cufallback.source.cmake import harvest_cmake
from cufallback.source.harvested import Harvested

ID = "0123456789" * 4


def read(text: str, *more: str) -> list[Harvested]:
    texts = [dedent(text), *map(dedent, more)]
    return harvest_cmake((f"{number}.cmake", text) for number, text in enumerate(texts))


def one(text: str) -> Harvested:
    (row,) = read(text)
    return row


def test_a_plain_declaration() -> None:
    row = one(f"""
        include(FetchContent)  # FetchContent_Declare( in a comment is none
        #[[ nor in a bracket comment:
        FetchContent_Declare(x GIT_REPOSITORY y) ]]
        FETCHCONTENT_DECLARE(
          lib  # with a comment
          GIT_REPOSITORY "https://h/a/lib.git"
          GIT_TAG {ID}
          GIT_PROGRESS TRUE)
    """)
    assert row == Harvested("lib", "fetchcontent", "https://h/a/lib.git", ID, ("*",), None, "0.cmake", 5)
    assert row.commit == ID
    assert not row.mutable


@pytest.mark.parametrize("ref", ["v1.2", "main", ID[:12], ID[:39], ID + "0", ID.replace("0", "A")])
def test_anything_but_a_full_id_is_mutable(ref: str) -> None:
    row = one(f"FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG {ref})")
    assert (row.ref, row.commit, row.mutable) == (ref, None, True)


def test_no_tag_at_all_is_mutable() -> None:
    assert one("FetchContent_Declare(lib GIT_REPOSITORY https://h/lib)").mutable


@pytest.mark.parametrize(
    ("text", "submodules"),
    [
        ("", ("*",)),
        ("GIT_SUBMODULES third-party/a", ("third-party/a",)),
        ('GIT_SUBMODULES "third-party/a" "b"', ("third-party/a", "b")),
        ('GIT_SUBMODULES "a;b"', ("a", "b")),
        ('GIT_SUBMODULES ""', ()),
        ("GIT_SUBMODULES ${list}", ("a", "b")),
    ],
)
def test_submodules(text: str, submodules: tuple[str, ...]) -> None:
    row = one(
        f"set(list a b)\nFetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG v1 {text} GIT_PROGRESS ON)"
    )
    assert row.submodules == submodules


def test_variables_of_the_same_file_are_resolved_through_each_other() -> None:
    row = one("""
        set(base "https://h")
        set(VERSION 1.2 CACHE STRING "which one")
        set(url "${base}/a/lib.git")
        ExternalProject_Add(lib GIT_REPOSITORY "${url}" GIT_TAG "v${VERSION}")
    """)
    assert (row.kind, row.url, row.ref) == ("externalproject", "https://h/a/lib.git", "v1.2")


def test_each_branch_is_a_variant_with_its_condition() -> None:
    rows = read(f"""
        if(DEVICE STREQUAL "rocm")
          set(url https://h/rocm)
          set(tag {ID})
        else()
          set(url https://h/cuda)
          set(tag v1)
        endif()
        FetchContent_Declare(lib GIT_REPOSITORY ${{url}} GIT_TAG ${{tag}})
    """)
    assert {(row.url, row.ref, row.when) for row in rows} == {
        ("https://h/rocm", ID, 'DEVICE STREQUAL "rocm"'),
        ("https://h/cuda", "v1", 'NOT (DEVICE STREQUAL "rocm")'),
    }


def test_the_same_test_asked_twice_gives_no_impossible_mixture() -> None:
    rows = read("""
        set(url https://h/default)
        set(tag v0)
        if(A)
          set(url https://h/a)
        endif()
        if(A)
          set(tag v1)
        endif()
        FetchContent_Declare(lib GIT_REPOSITORY ${url} GIT_TAG ${tag})
    """)
    assert {(row.url, row.ref) for row in rows} == {("https://h/default", "v0"), ("https://h/a", "v1")}


@pytest.mark.parametrize(
    "first",
    ["if(A)\n set(tag v1)\nelse()\n set(tag v1)\nendif()", "if(B)\n set(tag v0)\nendif()\nset(tag v1)", "set(tag v1)"],
)
def test_a_condition_that_no_longer_tells_worlds_apart_is_forgotten(first: str) -> None:
    rows = read(f"""
        {first}
        if(A)
          set(tag v2)
        endif()
        FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG ${{tag}})
    """)
    assert {(row.ref, row.when) for row in rows} == {("v1", "NOT (A)"), ("v2", "A")}


@pytest.mark.parametrize("body", ["set(unrelated 1)", "set(tag v1)\nelse()\nset(tag v1)"])
def test_branches_that_do_not_matter_make_no_variants(body: str) -> None:
    branches = "\n".join(f"if(C{number})\n {body}\nendif()" for number in range(40))
    row = one(f"set(tag v1)\n{branches}\nFetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG ${{tag}})")
    assert row.when == ""


def test_two_requests_for_one_name_are_told_apart() -> None:
    text = "FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG {})"
    rows = read(text.format("v1"), text.format("v2"), text.format("v1"))
    assert [(row.ref, row.file) for row in rows] == [("v1", "0.cmake"), ("v2", "1.cmake")]
    assert len({row.key for row in rows}) == 2


@pytest.mark.parametrize(
    "default",
    [
        "if(DEFINED ENV{TAG})\n set(tag $ENV{TAG})\nelse()\n set(tag v1)\nendif()",
        "set(tag v1)\nif(DEFINED ENV{TAG})\n set(tag $ENV{TAG})\nendif()",
        "if(NOT tag)\n set(tag v1)\nendif()",
        "if(NOT DEFINED tag)\n set(tag v1)\nendif()",
    ],
)
def test_upstreams_default_counts_where_the_user_may_set_another(default: str) -> None:
    row = one(f"{default}\nFetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG ${{tag}})")
    assert (row.ref, row.when) == ("v1", "")


@pytest.mark.parametrize(
    "text",
    [
        "if(DEFINED ENV{LIB_DIR})\n set(LIB_DIR $ENV{LIB_DIR})\nendif()\nif(LIB_DIR)\n FetchContent_Declare(lib "
        "SOURCE_DIR ${{LIB_DIR}})\nelse()\n {}\nendif()",
        "if(DEFINED ENV{LIB_DIR})\n message(x)\nelse()\n if(A)\n  {}\n endif()\nendif()",
        'set(LOCAL "$ENV{LIB_DIR}" CACHE PATH "doc")\nif(LOCAL)\nelseif(X)\n {}\nendif()',
        "if(DEFINED ENV{LIB_DIR} AND IS_DIRECTORY x)\nelse()\n if(EXISTS y)\n else()\n  {}\n endif()\nendif()",
    ],
    ids=["variable", "nested", "cache", "exists"],
)
def test_the_override_is_the_variable_whose_absence_leads_here(text: str) -> None:
    declared = "FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG v1)"
    row = one(text.replace("{}", declared).replace("{{", "{").replace("}}", "}"))
    assert row.override == "LIB_DIR"


def test_a_positive_test_for_the_environment_is_no_override() -> None:
    text = "if(DEFINED ENV{X})\n FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG v1)\nendif()"
    assert one(text).override is None


def test_a_local_folder_and_a_second_populate_fetch_nothing() -> None:
    rows = read("""
        FetchContent_Declare(lib SOURCE_DIR ${anything})
        FetchContent_Populate(lib)
        ExternalProject_Add(own SOURCE_DIR here BUILD_COMMAND "")
    """)
    assert rows == []


@pytest.mark.parametrize(
    ("text", "sha256"),
    [
        (f"FetchContent_Declare(z URL https://h/z.tgz URL_HASH SHA256={'A' * 64})", "a" * 64),
        ("FetchContent_Declare(z URL https://h/z.tgz URL_HASH MD5=00)", None),
        ("FetchContent_Declare(z URL https://h/z.tgz)", None),
        (f"file(DOWNLOAD https://h/z.tgz out EXPECTED_HASH SHA256={'a' * 64} SHOW_PROGRESS)", "a" * 64),
        ("file(DOWNLOAD https://h/z.tgz out)", None),
    ],
)
def test_downloads(text: str, sha256: str | None) -> None:
    row = one(text)
    assert (row.kind, row.url, row.sha256, row.mutable) == ("download", "https://h/z.tgz", sha256, sha256 is None)


UNREADABLE = {
    "unset variable": ("\nFetchContent_Declare(lib GIT_REPOSITORY ${url} GIT_TAG v1)", 2, "${url}"),
    "variable from the environment": (
        "set(url $ENV{URL})\nFetchContent_Declare(lib GIT_REPOSITORY ${url} GIT_TAG v1)",
        2,
        "$ENV{URL}",
    ),
    "computed variable": (
        "set(tag v1)\nstring(APPEND tag 2)\nFetchContent_Declare(lib GIT_REPOSITORY https://h GIT_TAG ${tag})",
        3,
        "${tag}",
    ),
    "variable of a loop": (
        "foreach(tag v1 v2)\nFetchContent_Declare(lib GIT_REPOSITORY https://h GIT_TAG ${tag})\nendforeach()",
        2,
        "${tag}",
    ),
    "own wrapper": (
        "function(get name tag)\nFetchContent_Declare(${name} GIT_REPOSITORY https://h GIT_TAG ${tag})\nendfunction()",
        2,
        "${name}",
    ),
    "from nowhere": ("FetchContent_Declare(lib)", 1, "no repository"),
    "no name": ("FetchContent_Declare()", 1, "without a name"),
    "two tags": ("FetchContent_Declare(lib GIT_REPOSITORY https://h GIT_TAG a b)", 1, "2 values"),
    "other system": ("FetchContent_Declare(lib SVN_REPOSITORY https://h)", 1, "SVN_REPOSITORY"),
    "own command": ("ExternalProject_Add(lib DOWNLOAD_COMMAND curl https://h)", 1, "DOWNLOAD_COMMAND"),
    "in a string": ('\ninstall(CODE "FetchContent_Declare(lib GIT_REPOSITORY x)")', 2, "not as a command"),
    "another module": ("CPMAddPackage(NAME lib GITHUB_REPOSITORY a/b)", 1, "CPMAddPackage"),
    "unfinished string": ('message(x)\nset(a "b)\n', 2, "unfinished"),
    "unfinished command": ("message(x)\nset(a b\n", 2, "not closed"),
    "no command": ("message(x)\n) y", 2, "no command"),
    "unfinished bracket": ("set(a [[b)\nx(", 2, "not closed"),
    "if without end": ("if(A)\nFetchContent_Declare(l GIT_REPOSITORY https://h)", 1, "without endif"),
    "end without if": ("endif()\nFetchContent_Declare(l GIT_REPOSITORY https://h)", 1, "without if"),
}


@pytest.mark.parametrize(("text", "line", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_an_error_with_file_and_line(text: str, line: int, said: str) -> None:
    with pytest.raises(HarvestError) as caught:
        read("", text)
    assert caught.value.where == f"1.cmake:{line}"
    assert said in caught.value.reason


def test_the_language(subtests: pytest.Subtests) -> None:
    cases = {
        "escapes": ('set(t "a\\"b")\n', 'a"b'),
        "bracket argument": ("set(t [==[a ]] b]==])\n", "a ]] b"),
        "continued string": ('set(t "a\\\nb")\n', "ab"),
        "unquoted with quotes": ("set(t -Da=x)\n", "-Da=x"),
        "parent scope": ("set(t x PARENT_SCOPE)\n", "x"),
        "case of commands": ("SET(t x)\n", "x"),
        "parentheses in conditions": ("set(t x)\nif((A AND B) OR (C))\nendif()\n", "x"),
    }
    for name, (text, value) in cases.items():
        with subtests.test(name):
            row = one(text + "FetchContent_Declare(lib GIT_REPOSITORY https://h GIT_TAG ${t})")
            assert row.ref == value
