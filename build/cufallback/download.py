"""Fetch pinned files: store first, then mirror folders, then the one index of the package. Hash or nothing."""

from __future__ import annotations

import configparser
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cufallback.errors import DownloadError, IntegrityError
from cufallback.progress import Progress
from cufallback.redact import redact
from cufallback.store import Store, sha256_file, workspace_errors

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, PyPISimple

_ATTEMPTS = 4
_TIMEOUT = (10, 60)  # seconds to connect, seconds without a byte
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """One file, pinned: ``index_url`` None means the default index."""

    name: str
    version: str
    filename: str
    sha256: str
    index_url: str | None = None


@dataclass(frozen=True)
class Fetched:
    """A file that now lies in the store, and where it came from; ``size`` in bytes."""

    wanted: Wanted
    size: int
    origin: Literal["store", "mirror", "index"]


def default_index() -> str:
    """Return the URL of the index for every package without one of its own, as uv's and pip's settings name it."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(name):
            return os.environ[name]
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return PYPI_SIMPLE_ENDPOINT


def find_mirrors() -> tuple[Path, ...]:
    """Return the find-links folders to try before any index.

    From CUFALLBACK_FIND_LINKS (folders separated as in PATH), else from pip's own setting: PIP_FIND_LINKS or the
    ``find-links`` of its configuration files. Entries that are no folder on this machine are left out.
    """
    own = os.environ.get("CUFALLBACK_FIND_LINKS")
    if own is not None:
        names = own.split(os.pathsep)
    elif "PIP_FIND_LINKS" in os.environ:
        names = os.environ["PIP_FIND_LINKS"].split()
    else:
        names = list(_configured_links())
    folders = [Path(name.removeprefix("file://")).expanduser() for name in names if name]
    return tuple(folder for folder in folders if folder.is_dir())


def _configured_links() -> Iterator[str]:
    configured = os.environ.get("PIP_CONFIG_FILE")
    if configured == os.devnull:
        return
    config_home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    files = [
        Path(sys.prefix, "pip.conf"),
        *([Path(configured)] if configured else []),
        config_home / "pip" / "pip.conf",
        Path.home() / ".pip" / "pip.conf",
        Path("/etc/pip.conf"),
    ]
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    for file in reversed(files):  # later reads win, as in pip
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    for section in ("download", "global"):
        if parser.has_option(section, "find-links"):
            yield from parser.get(section, "find-links").split()
            return


@contextmanager
def index_client() -> Iterator[PyPISimple]:
    """Yield a client for package indexes that follows the certificates that pip and uv are told to use."""
    import requests
    from pypi_simple import PyPISimple

    session = requests.Session()
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT", "CURL_CA_BUNDLE"):
        if os.environ.get(name):
            session.verify = os.environ[name]
            break
    with session, PyPISimple(default_index(), session=session) as client:
        yield client


def project_files(client: PyPISimple, name: str, index_url: str | None) -> list[DistributionPackage]:
    """Return the files that the package's one index lists for it.

    Raises:
        DownloadError: the index cannot be reached or does not have the package.
    """
    import requests
    from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError

    index = index_url or default_index()
    for attempt in range(_ATTEMPTS):
        try:
            return list(PyPISimple(index, session=client.s).get_project_page(name, timeout=_TIMEOUT).packages)
        except NoSuchProjectError as error:
            raise DownloadError(
                f"the index has no package {name}",
                remedy="correct the index of this package in the recipe",
                where=redact(index),
            ) from error
        except (requests.RequestException, UnsupportedContentTypeError, ValueError) as error:
            if attempt + 1 == _ATTEMPTS or not _transient(error):
                raise DownloadError(
                    f"the index could not be asked for {name}: {redact(_short(error))}",
                    remedy="check the network, or point CUFALLBACK_FIND_LINKS at a folder that has the file",
                    where=redact(index),
                ) from error
            time.sleep(0.5 * 2**attempt)
    raise AssertionError  # the loop returns or raises


def fetch(
    wanted: Sequence[Wanted], *, store: Store, mirrors: Sequence[Path], progress: Progress, jobs: int = 8
) -> tuple[Fetched, ...]:
    """Bring every wanted file into the store, in parallel, resuming what an earlier run began.

    A file that the store has asks nobody. A mirror folder is tried before the index; a file there with the wanted
    name and other bytes is refused, never passed over.

    Args:
        wanted: pinned files.
        store: receives them.
        mirrors: folders of files, tried first.
        progress: one bar over all bytes that have to come from an index.
        jobs: files fetched at once.

    Raises:
        IntegrityError: a file has another digest; it is kept aside in ``<store>/rejected/`` for inspection.
        DownloadError: a file could not be had.
        WorkspaceError: the store cannot be written.
    """
    done: dict[Wanted, Fetched] = {}
    missing: list[Wanted] = []
    for item in dict.fromkeys(wanted):
        if store.has(item.sha256):
            done[item] = Fetched(item, store.path(item.sha256).stat().st_size, "store")
        elif path := _in_mirrors(item, mirrors):
            done[item] = _take(item, path, store)
        else:
            missing.append(item)
    if missing:
        done.update(_fetch_from_indexes(missing, store, progress, jobs))
    return tuple(done[item] for item in wanted)


def _in_mirrors(item: Wanted, mirrors: Sequence[Path]) -> Path | None:
    for folder in mirrors:
        path = folder / item.filename
        if not path.is_file():
            continue
        actual = sha256_file(path)
        if actual != item.sha256:
            raise IntegrityError(
                f"the mirror's {item.filename} has sha256 {actual}, the lock says {item.sha256}",
                remedy="remove the file from the mirror folder, or put the locked one there",
                where=str(path),
            )
        return path
    return None


def _take(item: Wanted, path: Path, store: Store) -> Fetched:
    part = _part(store, item)
    with workspace_errors(store.root):
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, part)
    store.add(part, sha256=item.sha256)
    return Fetched(item, path.stat().st_size, "mirror")


def _part(store: Store, item: Wanted) -> Path:
    return store.root / "part" / item.sha256


def _fetch_from_indexes(
    missing: Sequence[Wanted], store: Store, progress: Progress, jobs: int
) -> dict[Wanted, Fetched]:
    stop = threading.Event()
    with index_client() as client, ThreadPoolExecutor(max_workers=jobs) as pool:
        found = list(pool.map(lambda item: _find(client, item), missing))
        total = sum(size or 0 for _url, size in found)
        with progress.bar(f"downloading {len(missing)} files", total or None, "B") as advance:
            guard = threading.Lock()

            def count(amount: float) -> None:
                with guard:
                    advance(amount)

            def one(item: Wanted, url: str) -> Fetched:
                return _download(client, item, url, store, count, stop)

            futures = [pool.submit(one, item, url) for item, (url, _size) in zip(missing, found, strict=True)]
            try:
                return {item: future.result() for item, future in zip(missing, futures, strict=True)}
            except BaseException:
                stop.set()
                for future in futures:
                    future.cancel()
                raise


def _find(client: PyPISimple, item: Wanted) -> tuple[str, int | None]:
    for file in project_files(client, item.name, item.index_url):
        digest = file.digests.get("sha256")
        # An index without digests is asked by file name; the bytes are checked after the download all the same.
        if digest == item.sha256 or (digest is None and file.filename == item.filename):
            return file.url, file.size
    raise DownloadError(
        f"the index does not have {item.filename} with sha256 {item.sha256}",
        remedy="the file was withdrawn or the lock names the wrong index; run `nox -s lock` and review the difference, "
        "or point CUFALLBACK_FIND_LINKS at a folder that has the file",
        where=redact(item.index_url or default_index()),
    )


def _download(client: PyPISimple, item: Wanted, url: str, store: Store, advance: Any, stop: threading.Event) -> Fetched:
    import requests

    part = _part(store, item)
    with workspace_errors(store.root):
        part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(_ATTEMPTS):
        try:
            with workspace_errors(store.root):
                _stream(client, url, part, advance, stop)
            break
        except requests.RequestException as error:
            if attempt + 1 == _ATTEMPTS or not _transient(error):
                raise DownloadError(
                    f"{item.filename} could not be downloaded: {redact(_short(error))}",
                    remedy="run again: the download goes on where it stopped",
                    where=redact(url.partition("#")[0]),
                ) from error
            time.sleep(0.5 * 2**attempt)
    size = part.stat().st_size
    try:
        store.add(part, sha256=item.sha256)
    except IntegrityError as error:
        kept = store.root / "rejected" / f"{item.sha256}-{item.filename}"
        with workspace_errors(store.root):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part.replace(kept)
        raise IntegrityError(
            f"the index gave {item.filename} with other bytes: {error.reason}",
            remedy=f"inspect {kept}; nothing of it was used; run again to fetch the file anew",
            where=redact(item.index_url or default_index()),
        ) from error
    return Fetched(item, size, "index")


def _stream(client: PyPISimple, url: str, part: Path, advance: Any, stop: threading.Event) -> None:
    """Append to ``part`` what is missing of it; a server that knows no ranges sends the file from its start."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with client.s.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
        if response.status_code == 416:  # nothing is missing, or the part is longer than the file: the hash decides
            return
        response.raise_for_status()
        resumed = response.status_code == 206
        if resumed:
            advance(have)
        expected = response.headers.get("Content-Length")
        received = 0
        with part.open("ab" if resumed else "wb") as file:
            for chunk in response.iter_content(_CHUNK):
                if stop.is_set():
                    return
                file.write(chunk)
                received += len(chunk)
                advance(len(chunk))
        if expected is not None and received < int(expected):
            import requests

            msg = f"the connection ended after {received} of {expected} bytes"
            raise requests.ConnectionError(msg)


def _transient(error: Exception) -> bool:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
