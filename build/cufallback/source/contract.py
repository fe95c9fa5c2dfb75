"""Contracts: what must be true of the tree once cherry-picks and rewrites are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cufallback.errors import ContractError
from cufallback.recipe import Contract
from cufallback.source.matching import MatchFailure, first_lines, match_lines
from cufallback.source.tree import inside
from cufallback.tomlplace import printable


@dataclass(frozen=True)
class ContractResult:
    """The answer to one contract.

    Args:
        file: path inside the tree.
        pattern: Python regular expression, multi-line mode.
        expect: ``present`` or ``absent``.
        held: whether the contract holds.
        lines: lines (from 1) on which the pattern begins to match.
        why: the recipe's reason.
        finding: what was seen, for a reader.
    """

    file: str
    pattern: str
    expect: str
    held: bool
    lines: tuple[int, ...]
    why: str
    finding: str


def check_contracts(tree: Path, contracts: Sequence[Contract]) -> tuple[ContractResult, ...]:
    """Look every contract up in the tree. A missing file breaks a contract of either kind: it proves nothing."""
    return tuple(_check(tree, contract) for contract in contracts)


def require_contracts(results: Sequence[ContractResult]) -> None:
    """Demand that every contract holds.

    Raises:
        ContractError: listing each broken contract with its reason.
    """
    broken = [result for result in results if not result.held]
    if not broken:
        return
    listing = "".join(
        f"\n  {result.file}: {result.finding} (pattern {printable(result.pattern)})\n    why it matters: {result.why}"
        for result in broken
    )
    number = "a contract" if len(broken) == 1 else f"{len(broken)} contracts"
    raise ContractError(
        f"the source tree breaks {number} of the recipe:{listing}",
        remedy="add a source.rewrite or source.cherry_pick that makes it true, pin a commit where it is true, or "
        "remove the contract with a reason",
    )


def _check(tree: Path, contract: Contract) -> ContractResult:
    def result(held: bool, finding: str, lines: tuple[int, ...] = ()) -> ContractResult:
        return ContractResult(contract.file, contract.pattern, contract.expect, held, lines, contract.why, finding)

    path = inside(tree, contract.file)
    if path is None:
        return result(False, "the path leads out of the tree through a link")
    if not path.is_file():
        return result(False, "there is no such file")
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    try:
        lines = match_lines(contract.pattern, text)
    except MatchFailure as failure:
        return result(False, f"the pattern {failure}")
    if not lines:
        return result(contract.expect == "absent", "the pattern matches nowhere")
    return result(contract.expect == "present", f"the pattern matches on line {first_lines(lines)}", lines)
