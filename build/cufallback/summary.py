"""What matters most of a build folder, on one screen or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cufallback.attest.sign import RECORD_ENVELOPE
from cufallback.errors import RecordError
from cufallback.record import RECORD, SIGNATURES, Record, read_record


def summary(folder: Path) -> dict[str, Any]:
    """Return what matters most of a build folder, for `cufallback show`.

    Raises:
        RecordError: there is no record, or it contradicts itself.
    """
    record = read_record(folder)
    try:
        return _summarised(folder, record)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # The inspections are of free form, and only `cufallback verify` holds them to anything.
        raise RecordError(
            f"the record's inspections are not those of its wheels: {type(error).__name__}: {error}",
            remedy="run `cufallback verify` on it",
            where=str(folder / RECORD),
        ) from error


def _summarised(folder: Path, record: Record) -> dict[str, Any]:
    return {
        "schema": 1,
        "folder": str(folder),
        "recipe": record.recipe.name,
        "status": record.recipe.status,
        "build_id": record.build_id,
        "source": {
            "origin": record.source.origin,
            "ref": record.source.ref,
            "commit": record.source.commit and record.source.commit.model_dump(),
            "changes": len(record.source.changes),
        },
        "wheels": [
            {
                "file": Path(wheel.path).name,
                "sha256": wheel.sha256,
                "size": wheel.size,
                "minimum_driver": (inspection.get("minimum_driver") or {}).get("driver"),
                "findings": _counted(str(finding["status"]) for finding in inspection.get("findings", [])),
            }
            for wheel, inspection in zip(record.subjects, record.inspection, strict=True)
        ],
        "image": record.image
        and {
            "digest": record.image.manifest.digest,
            "size": record.image.size,
            "layers": len(record.image.layers),
            "driver": record.image.require_cuda,
            "engine": record.image.engine,
            "checks": _counted(check.status for check in record.image.checks),
            "bases": [base.model_dump() for base in record.bases],
        },
        "distributions": len(record.distributions),
        "signatures": sorted(path.name for path in (folder / SIGNATURES).glob("*.json")),
        "signed_record": (folder / SIGNATURES / RECORD_ENVELOPE).is_file(),
        "stages": [stage.model_dump() for stage in record.stages],
    }


def _counted(words: Iterable[str]) -> dict[str, int]:
    return dict(Counter(words))
