"""A published wheel as the source: its members are the tree, its bytes are what the image gets."""

from __future__ import annotations

import calendar
import shutil
import stat
import zipfile
from pathlib import Path

from cufallback.errors import IntegrityError, PayloadError, SourceError
from cufallback.recipe import WheelSource
from cufallback.source.tree import Checkout, normalise_modes, staged
from cufallback.store import EARLIEST_EPOCH, sha256_file, tree_digest
from cufallback.wheel.normalize import check_record

MAX_BYTES = 16 << 30
"""Bound on the unpacked size; upstream's CUDA wheels unpack to about 1 GiB."""


def extract_wheel(archive: Path, source: WheelSource, *, target: Path) -> Checkout:
    """Verify a wheel's digest and its own RECORD, and unpack it to ``target``.

    The epoch is the time of its newest member, which zip archives hold without a time zone; it is taken as UTC.

    Args:
        archive: the downloaded wheel.
        source: the recipe's source, with the sha256 that it must have.
        target: folder to create; it appears whole or not at all.

    Raises:
        IntegrityError: the wheel has another digest.
        SourceError: it is no wheel whose members are what its RECORD says, or it is too large.
        WorkspaceError: ``target`` exists or cannot be written.
    """
    digest = sha256_file(archive)
    if digest != source.sha256:
        raise IntegrityError(
            f"sha256 is {digest}, the recipe pins {source.sha256}",
            remedy="inspect the file; nothing of it was used",
            where=str(archive),
        )
    # The store names files by their digest alone; the checks want the wheel's own name.
    with staged(target) as scratch:
        named = scratch / source.file
        named.symlink_to(archive.resolve())
        tree = scratch / "tree"
        try:
            check_record(named)
        except PayloadError as error:
            raise SourceError(error.reason, remedy="lock another wheel", where=source.file) from error
        with zipfile.ZipFile(named) as wheel:
            members = [member for member in wheel.infolist() if not member.is_dir()]
            if sum(member.file_size for member in members) > MAX_BYTES:
                raise SourceError("unpacks to more than 16 GiB", remedy="lock another wheel", where=source.file)
            for member in members:
                path = tree / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(member) as content, path.open("xb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                path.chmod(0o755 if (member.external_attr >> 16) & stat.S_IXUSR else 0o644)
            epoch = max(calendar.timegm((*member.date_time, 0, 0, 0)) for member in members)
        normalise_modes(tree)
        tree_sha256 = tree_digest(tree)
    return Checkout("wheel", source.commit, digest, max(epoch, EARLIEST_EPOCH), tree_sha256)
