"""Repack a wheel so that equal contents are equal bytes, on every machine.

Members are sorted, RECORD is last and computed anew, modes are 0644 or 0755, times are the epoch, and members
are stored, not deflated. Deflate output depends on which zlib a Python is linked with (zlib-ng, the default of
some distributions, makes other streams than zlib), and no pinned encoder comes with Python; stored bytes cannot
differ. The price, measured: vllm 0.27.1 for the rehearsal 36 MB instead of 8 MB; upstream's CUDA wheels 0.27.1
and 0.9.2 would be 718 and 1082 MiB instead of 297 and 365. A wheel mostly travels inside an image, whose layers
are compressed, and a stored wheel installs faster.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import lzma
import os
import re
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

from cufallback.errors import PayloadError
from cufallback.store import EARLIEST_EPOCH, workspace_errors

_LATEST_EPOCH = 4354819198  # 2107-12-31T23:59:58Z, the last time that a zip archive holds
_CHUNK = 1 << 20
# What zipfile and its decompressors raise on damaged input (ValueError: names that are not UTF-8, odd offsets).
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, OverflowError, RuntimeError, ValueError),
)
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")


def repack(wheel: Path, output_folder: Path, *, epoch: int, extra_dist_info: Mapping[str, bytes]) -> Path:
    """Write the byte-stable form of ``wheel`` into ``output_folder`` under the same name and return its path.

    Args:
        wheel: a wheel whose RECORD is right.
        output_folder: where the new wheel appears, whole or not at all.
        epoch: time of every member, seconds since 1970; clamped to what a zip archive can hold.
        extra_dist_info: files to add, by path below ``.dist-info``, such as ``sboms/wheel.cdx.json``.

    Raises:
        PayloadError: no wheel, unsafe or duplicate member names, links, encryption, a signature, or a RECORD
            that does not match the members.
        WorkspaceError: the folder cannot be written.
    """
    target = output_folder / wheel.name
    with workspace_errors(target):
        output_folder.mkdir(parents=True, exist_ok=True)
    temporary = output_folder / f".{wheel.name}.{os.getpid()}"
    try:
        with zipfile.ZipFile(wheel) as archive, workspace_errors(target):
            members, dist_info = _members(wheel, archive)
            extra = _extra(wheel, members, dist_info, extra_dist_info)
            _write(wheel, temporary, archive, members, extra, f"{dist_info}/RECORD", epoch)
            temporary.replace(target)
    except _UNREADABLE as error:
        _refuse(wheel, f"is no readable zip archive: {error}")
    except OSError as error:
        # Not the output's: those were named by workspace_errors. EINVAL: the archive leads to a negative offset.
        _refuse(wheel, f"cannot be read: {error.strerror}")
    finally:
        temporary.unlink(missing_ok=True)
    return target


def check_record(wheel: Path) -> None:
    """Compare every member of ``wheel`` with the wheel's own RECORD; nothing is written.

    Raises:
        PayloadError: as for :func:`repack`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members, dist_info = _members(wheel, archive)
            record = f"{dist_info}/RECORD"
            recorded = _read_record(wheel, archive.read(members[record]))
            for name in sorted(members.keys() - {record}):
                with archive.open(members[name]) as source:
                    digest, size = _digest(source)
                _check_row(wheel, name, recorded.pop(name, None), digest, size)
            _check_rest(wheel, recorded, record)
    except _UNREADABLE as error:
        _refuse(wheel, f"is no readable zip archive: {error}")
    except OSError as error:
        _refuse(wheel, f"cannot be read: {error.strerror}")


def _refuse(wheel: Path, reason: str, remedy: str = "build the wheel again") -> NoReturn:
    raise PayloadError(reason, remedy=remedy, where=str(wheel))


def _members(wheel: Path, archive: zipfile.ZipFile) -> tuple[dict[str, zipfile.ZipInfo], str]:
    """Return the checked members by name without folders, and the name of the dist-info folder."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        # orig_filename: zipfile cuts names at a NUL and turns backslashes on some systems.
        _check_name(wheel, info.orig_filename.removesuffix("/"))
        if info.is_dir():
            continue
        if info.filename in members:
            _refuse(wheel, f"holds {info.filename} twice")
        if stat.S_ISLNK(info.external_attr >> 16):
            _refuse(wheel, f"holds a link: {info.filename}")
        if info.flag_bits & 0x1:
            _refuse(wheel, f"holds an encrypted member: {info.filename}")
        members[info.filename] = info
    stem = "-".join(wheel.name.removesuffix(".whl").split("-")[:2])
    folders = {name.split("/")[0] for name in members if re.fullmatch(r"[^/]+\.dist-info/.+", name)}
    if folders != {f"{stem}.dist-info"}:
        _refuse(wheel, f"must hold exactly the folder {stem}.dist-info, holds {', '.join(sorted(folders)) or 'none'}")
    (dist_info,) = folders
    for needed in ("METADATA", "WHEEL", "RECORD"):
        if f"{dist_info}/{needed}" not in members:
            _refuse(wheel, f"has no {dist_info}/{needed}")
    for name in _SIGNATURES:
        if f"{dist_info}/{name}" in members:
            _refuse(wheel, f"is signed ({name}), and repacking would break the signature", "repack before signing")
    return members, dist_info


def _check_name(wheel: Path, name: str) -> None:
    if not name or _FORBIDDEN.search(name) or any(part in ("", ".", "..") for part in name.split("/")):
        _refuse(wheel, f"holds an unsafe member name: {name!r}")


def _extra(
    wheel: Path, members: Mapping[str, zipfile.ZipInfo], dist_info: str, extra: Mapping[str, bytes]
) -> dict[str, bytes]:
    added = {}
    for name, data in extra.items():
        _check_name(wheel, name)
        full = f"{dist_info}/{name}"
        if full in members or name in _SIGNATURES:
            _refuse(wheel, f"already holds {full}" if full in members else f"may not be given {name}")
        added[full] = data
    return added


def _write(
    wheel: Path,
    target: Path,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    extra: Mapping[str, bytes],
    record: str,
    epoch: int,
) -> None:
    recorded = _read_record(wheel, archive.read(members[record]))
    moment = time.gmtime(min(max(epoch, EARLIEST_EPOCH), _LATEST_EPOCH))[:6]
    rows: list[tuple[str, str, str]] = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:

        def add(name: str, mode: int, size: int, source: IO[bytes]) -> tuple[str, int]:
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix, whatever this machine is
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.file_size = size
            with new.open(entry, "w") as sink:
                return _digest(source, sink)

        for name in sorted({*members, *extra} - {record}):
            if name in extra:
                digest, size = add(name, 0o644, len(extra[name]), io.BytesIO(extra[name]))
            else:
                info = members[name]
                mode = 0o755 if (info.external_attr >> 16) & 0o111 else 0o644
                with archive.open(info) as source:
                    digest, size = add(name, mode, info.file_size, source)
                _check_row(wheel, name, recorded.pop(name, None), digest, size)
            rows.append((name, f"sha256={digest}", str(size)))
        _check_rest(wheel, recorded, record)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        data = text.getvalue().encode()
        add(record, 0o644, len(data), io.BytesIO(data))


def _digest(source: IO[bytes], sink: IO[bytes] | None = None) -> tuple[str, int]:
    """Read ``source`` to its end, copying it to ``sink``; return its SHA-256 as RECORD writes it, and its size."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if sink is not None:
            sink.write(chunk)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), size


def _read_record(wheel: Path, data: bytes) -> dict[str, tuple[str, str]]:
    recorded: dict[str, tuple[str, str]] = {}
    try:
        for row in csv.reader(io.StringIO(data.decode(), newline=""), strict=True):
            if not row:
                continue
            name, digest, size = row
            if name in recorded:
                _refuse(wheel, f"RECORD names {name} twice")
            recorded[name] = (digest, size)
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        _refuse(wheel, f"its RECORD cannot be read: {error}")
    return recorded


def _check_row(wheel: Path, name: str, row: tuple[str, str] | None, digest: str, size: int) -> None:
    """Compare a member with its RECORD row; hashes weaker than SHA-256 are refused (PEP 427)."""
    if row is None:
        _refuse(wheel, f"holds {name}, which its RECORD does not name")
    if row != (f"sha256={digest}", str(size)):
        _refuse(wheel, f"{name} is not what RECORD says: sha256={digest}, {size} bytes; RECORD: {row[0]}, {row[1]}")


def _check_rest(wheel: Path, recorded: dict[str, tuple[str, str]], record: str) -> None:
    """Demand that no row is left but that of RECORD itself."""
    recorded.pop(record, None)
    if recorded:
        _refuse(wheel, f"RECORD names {sorted(recorded)[0]}, which the wheel does not hold")
