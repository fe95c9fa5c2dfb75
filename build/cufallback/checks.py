"""What verifying says: one check for each thing looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cufallback import __version__
from cufallback.record import RECORD, Record
from cufallback.store import canonical_json


@dataclass(frozen=True)
class Check:
    """One thing looked at: what, how it stands, and why (for ``not_run``: why not)."""

    what: str
    status: Literal["passed", "failed", "not_run"]
    why: str


def same_version(record: Record) -> bool:
    """Whether this version wrote the record, so that it would say the same in the same words."""
    return record.cufallback == __version__


def agree(what: str, expected: Any, found: Any, *, source: str = "the inputs", document: str = RECORD) -> Check:
    """Return the check that two JSON values are equal; a failed one names up to three places where they are not."""
    if canonical_json(expected) == canonical_json(found):
        return Check(what, "passed", f"{document} says what {source} say" if source == "the inputs" else f"as {source}")
    places = "; ".join(list(_differences(expected, found, ""))[:3])
    return Check(what, "failed", f"{document} and {source} differ: {places}")


def _differences(expected: Any, found: Any, place: str) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(str(key), expected.get(key), found.get(key)) for key in sorted(expected.keys() | found.keys())]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(str(number), *pair) for number, pair in enumerate(zip(expected, found, strict=True))]
    elif isinstance(expected, list) and isinstance(found, list):
        yield f"{place or 'rows'}: {len(found)} instead of {len(expected)}"
        return
    else:
        if canonical_json(expected) != canonical_json(found):
            yield f"{place or 'value'} is {_short(found)} instead of {_short(expected)}"
        return
    for key, one, other in pairs:
        yield from _differences(one, other, f"{place}.{key}".lstrip("."))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:80]} …"
