"""Under which licence a distribution says it is: read from the METADATA of its wheel."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from cufallback.errors import PayloadError

_SHORT = 100  # characters; a longer License field holds the text itself
_CLASSIFIER = "License :: "
_LARGEST_METADATA = 8 << 20  # bytes


@dataclass(frozen=True)
class Licence:
    """What METADATA says: an SPDX ``expression``, or else ``names`` in its own words; ``files`` inside the wheel."""

    expression: str | None = None
    names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def licence_of(wheel: Path) -> Licence:
    """Return the licence that a wheel declares.

    Raises:
        PayloadError: it is no wheel or has no readable METADATA.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                item
                for item in archive.infolist()
                if item.filename.endswith(".dist-info/METADATA") and item.filename.count("/") == 1
            ]
            if len(members) == 1 and members[0].file_size <= _LARGEST_METADATA:
                return licence_in(archive.read(members[0]))
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise PayloadError(f"cannot be read as a wheel: {error}", remedy="fetch it again", where=str(wheel)) from error
    raise PayloadError("has not one readable METADATA", remedy="fetch it again", where=str(wheel))


def licence_in(metadata: bytes) -> Licence:
    """Return the licence that core metadata declares.

    ``License-Expression`` (PEP 639) counts first, then a short ``License`` that is an SPDX expression, then the
    classifiers and a short ``License`` as names.
    """
    headers = HeaderParser().parsestr(metadata.decode("utf-8", "replace"))

    def values(name: str) -> list[str]:
        found = (" ".join(str(value).split()) for value in headers.get_all(name, ()))
        return [value for value in found if value and value != "UNKNOWN"]

    files = tuple(values("License-File"))
    declared = values("License-Expression")[:1]
    short = [value for value in values("License")[:1] if len(value) <= _SHORT]
    for text in (*declared, *short):
        if expression := _expression(text):
            return Licence(expression, (), files)
    classified = [
        value.removeprefix(_CLASSIFIER).rpartition(" :: ")[2]
        for value in values("Classifier")
        if value.startswith(_CLASSIFIER)
    ]
    # "OSI Approved" alone names no licence.
    names = dict.fromkeys(name for name in (*declared, *short, *classified) if name and name != "OSI Approved")
    return Licence(None, tuple(names), files)


def _expression(text: str) -> str | None:
    try:
        return str(canonicalize_license_expression(text))
    except (InvalidLicenseExpression, ValueError):
        return None
