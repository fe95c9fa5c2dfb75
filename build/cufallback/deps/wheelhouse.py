"""A folder with exactly the files of a lock, each checked by its digest and its own metadata."""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cufallback.download import Fetched, Wanted, fetch
from cufallback.errors import IntegrityError
from cufallback.progress import Progress
from cufallback.store import Store, sha256_file, workspace_errors
from cufallback.wheel.metadata import read_metadata


def fill(
    wanted: Sequence[Wanted], *, folder: Path, store: Store, mirrors: Sequence[Path], progress: Progress
) -> tuple[Fetched, ...]:
    """Fetch every file of a lock and lay it into ``folder``; what lies there and does not belong is removed.

    Args:
        wanted: the lock's files.
        folder: the wheelhouse.
        store: where files are kept between builds.
        mirrors: find-links folders, tried before any index.
        progress: shows the download.

    Raises:
        IntegrityError: wrong bytes, or a wheel that is not the distribution its lock says.
        DownloadError: a file could not be had.
        WorkspaceError: the folder cannot be written.
    """
    fetched = fetch(wanted, store=store, mirrors=mirrors, progress=progress)
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = {item.filename for item in wanted}
        for path in folder.iterdir():
            if path.name in names:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for item in wanted:
        target = folder / item.filename
        if not target.is_file() or sha256_file(target) != item.sha256:
            try:
                store.place(item.sha256, target)
            except IntegrityError:
                # Both are one file by a hard link, so what damaged the one damaged the other, which is now dropped.
                fetch([item], store=store, mirrors=mirrors, progress=progress)
                store.place(item.sha256, target)
        _check_metadata(item, target)
    return fetched


def _check_metadata(item: Wanted, path: Path) -> None:
    """A wheel installs what its metadata says, not what its file name says."""
    try:
        with zipfile.ZipFile(path) as wheel:
            members = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            if len(members) != 1:
                msg = f"it has {len(members)} METADATA files"
                raise zipfile.BadZipFile(msg)
            metadata = read_metadata(wheel.read(members[0]).decode("utf-8", "replace"))
        name, version = canonicalize_name(metadata.name), Version(metadata.version)
    # RuntimeError: an encrypted member; NotImplementedError: a compression that this Python does not know
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, InvalidVersion) as error:
        raise IntegrityError(
            f"{item.filename} is no readable wheel: {error}", remedy="lock another version", where=str(path)
        ) from error
    if (name, version) != (canonicalize_name(item.name), Version(item.version)):
        raise IntegrityError(
            f"{item.filename} installs {name} {version}, its lock says {item.name} {item.version}",
            remedy="do not use this file; lock another version",
            where=str(path),
        )
