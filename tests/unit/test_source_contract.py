"""Contracts: present, absent, where, and the reason shown when one is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from cufallback.errors import ContractError
from cufallback.recipe import Contract
from cufallback.source.contract import ContractResult, check_contracts, require_contracts
from cufallback.source.matching import MatchFailure, match_lines

WHY = "without it the build starts and then dies"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "outside").write_text("guard\n")
    (tmp_path / "tree" / "f.py").write_bytes(b"# \xff\nguard = 1\nother\nguard = 2\n")
    (tmp_path / "tree" / "link").symlink_to("../outside")
    return tmp_path / "tree"


def check(tree: Path, pattern: str, expect: str, file: str = "f.py") -> ContractResult:
    (result,) = check_contracts(tree, [Contract(file=file, pattern=pattern, expect=expect, why=WHY)])  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize(
    ("pattern", "expect", "held", "lines"),
    [
        ("^guard", "present", True, (2, 4)),
        ("^guard", "absent", False, (2, 4)),
        ("^Guard", "present", False, ()),
        ("^Guard", "absent", True, ()),
    ],
)
def test_each_answer(tree: Path, pattern: str, expect: str, held: bool, lines: tuple[int, ...]) -> None:
    result = check(tree, pattern, expect)
    assert (result.held, result.lines, result.why) == (held, lines, WHY)


@pytest.mark.parametrize("expect", ["present", "absent"])
@pytest.mark.parametrize(("file", "finding"), [("gone.py", "no such file"), ("link", "out of the tree")])
def test_a_file_that_proves_nothing_breaks_both_kinds(tree: Path, expect: str, file: str, finding: str) -> None:
    result = check(tree, "guard", expect, file)
    assert not result.held
    assert finding in result.finding


def test_every_broken_contract_is_listed_with_its_reason(tree: Path) -> None:
    results = [check(tree, "^guard", "present"), check(tree, "^guard", "absent"), check(tree, "x", "present", "gone")]
    require_contracts(results[:1])
    with pytest.raises(ContractError) as caught:
        require_contracts(results)
    assert "breaks 2 contracts" in caught.value.reason
    assert "f.py: the pattern matches on line 2, 4" in caught.value.reason
    assert "gone: there is no such file" in caught.value.reason
    assert caught.value.reason.count(WHY) == 2


def test_a_pattern_without_end_is_given_up() -> None:
    with pytest.raises(MatchFailure, match=r"still being matched after 0\.5 s"):
        match_lines("(a+)+$", "a" * 60 + "b", limit=0.5)


def test_many_matches_are_not_all_listed(tree: Path) -> None:
    (tree / "f.py").write_text("x\n" * 8000)
    assert check(tree, "^x", "absent").finding == (
        "the pattern matches on line 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 7990 more"
    )
