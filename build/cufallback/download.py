"""Fetch pinned files: store first, then mirror folders, then the one index of the package. Hash or nothing."""

from __future__ import annotations

import configparser
import fcntl
import os
import re
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from cufallback.errors import DownloadError, IntegrityError, ToolchainError
from cufallback.progress import Advance, Progress
from cufallback.redact import redact
from cufallback.store import Store, sha256_file, workspace_errors
from cufallback.weburl import url_fault

if TYPE_CHECKING:
    import requests
    from pypi_simple import DistributionPackage

T = TypeVar("T")

_PAUSES = (0.5, 1.0, 2.0)  # seconds before each repetition
_TIMEOUT = (10, 60)  # seconds to connect, seconds without a byte
_CHUNK = 1 << 20
_DEFAULT = "the default index"


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
    """Return the URL of the index for every package without one of its own, as uv's and pip's settings name it.

    It may carry a secret anywhere, its path included: no message names it, see :func:`without_default_index`.

    Raises:
        ToolchainError: the setting is no URL of an index; the setting is named, its value is not shown.
    """
    setting, url = _default_index_setting()
    if fault := url_fault(url, ("https", "http", "file")):
        raise ToolchainError(
            f"the URL of the default index {fault}",
            remedy="correct it; its value is not shown here, since it may carry a password",
            where=setting,
        )
    return url


def _default_index_setting() -> tuple[str, str]:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if os.environ.get(name):
            return name, os.environ[name]
    configured = _pip_setting("index-url")
    if configured:
        return "PIP_INDEX_URL" if os.environ.get("PIP_INDEX_URL") else "index-url of pip's configuration", configured
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return "pypi_simple", PYPI_SIMPLE_ENDPOINT


def without_default_index(text: str) -> str:
    """Return what another program said with the default index's URL, however it is written, replaced by its name."""
    url = default_index()
    parts = urlsplit(url)
    place, path = re.escape(parts.netloc.rpartition("@")[2]), re.escape(parts.path.rstrip("/"))
    # As it was given, or with another user part: programs mask it.
    written = rf"(?i){re.escape(parts.scheme)}://(?:[^\s/@]*@)?{place}(?:{path})?"
    return re.sub(written, _DEFAULT, text.replace(url, _DEFAULT))


def find_mirrors() -> tuple[Path, ...]:
    """Return the find-links folders to try before any index.

    From CUFALLBACK_FIND_LINKS (folders separated as in PATH), else from pip's own setting: PIP_FIND_LINKS or the
    ``find-links`` of its configuration files. Entries that are no folder on this machine are left out.
    """
    own = os.environ.get("CUFALLBACK_FIND_LINKS")
    names = (_pip_setting("find-links") or "").split() if own is None else own.split(os.pathsep)
    folders = [_local_folder(name) for name in names if name]
    return tuple(folder for folder in folders if folder is not None)


def _local_folder(name: str) -> Path | None:
    try:
        path = _local_path(name)
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, of no known user, not to be looked at, no valid URL
        return None


def _local_path(name: str) -> Path:
    if name.startswith("file:"):
        return Path(url2pathname(urlsplit(name).path))
    return Path(name).expanduser()


def _pip_setting(name: str) -> str | None:
    """Return pip's setting: its environment variable, else the configuration file that pip heeds most."""
    variable = f"PIP_{name.upper().replace('-', '_')}"
    if variable in os.environ:
        return os.environ[variable]
    configured = os.environ.get("PIP_CONFIG_FILE", "")
    if configured == os.devnull:
        return None
    home = Path.home()
    files = [Path(folder, "pip/pip.conf") for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files.append(Path("/etc/pip.conf"))
    if not (configured and Path(configured).exists()):  # pip's rule: the named file stands in for the user's
        files += [home / ".pip/pip.conf", Path(os.environ.get("XDG_CONFIG_HOME", home / ".config"), "pip/pip.conf")]
    files += [Path(sys.prefix, "pip.conf"), *([Path(configured)] if configured else [])]
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    for file in files:  # later reads win, as in pip
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    for section in ("download", "global"):
        if parser.has_option(section, name):
            return parser.get(section, name)
    return None


def index_session() -> requests.Session:
    """Return an HTTP session that follows the certificates that pip and uv are told to use.

    Raises:
        ToolchainError: they are told to use some that are not there.
    """
    import requests

    session = requests.Session()
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT", "CURL_CA_BUNDLE"):
        if os.environ.get(name):
            if not os.path.exists(os.environ[name]):  # noqa: PTH110  # false for whatever is no path at all
                raise ToolchainError("there are no such certificates", remedy="correct or unset it", where=name)
            session.verify = os.environ[name]
            break
    return session


def project_files(
    session: requests.Session, name: str, index_url: str | None, *, stop: threading.Event | None = None
) -> list[DistributionPackage]:
    """Return the files that the package's one index lists for it.

    Args:
        session: see :func:`index_session`.
        name: the package.
        index_url: its index, None for the default one.
        stop: gives up between two attempts when it is set.

    Raises:
        DownloadError: the index cannot be reached, does not have the package or is no package index.
    """
    import requests
    from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedRepoVersionError

    index = index_url or default_index()
    client = PyPISimple(index, session=session)
    try:
        return list(_repeated(lambda: client.get_project_page(name, timeout=_TIMEOUT).packages, stop))
    except NoSuchProjectError as error:
        raise DownloadError(
            f"the index has no package {name}",
            remedy="correct the index of this package in the recipe",
            where=_name_of(index_url),
        ) from error
    except (requests.RequestException, UnsupportedRepoVersionError, ValueError) as error:
        raise DownloadError(
            f"the index could not be asked for {name}: {_in_words(error)}",
            remedy="check the network, or point CUFALLBACK_FIND_LINKS at a folder that has the file",
            where=_name_of(index_url),
        ) from error


def _repeated(action: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Return what ``action`` returns, tried again after each pause while it fails for want of a good connection.

    Raises:
        CancelledError: ``stop`` was set during a pause.
    """
    import requests

    stop = stop or threading.Event()
    for pause in _PAUSES:
        try:
            return action()
        except requests.RequestException as error:
            if not _transient(error):
                raise
        if stop.wait(pause):
            raise CancelledError
    return action()


def fetch(
    wanted: Sequence[Wanted], *, store: Store, mirrors: Sequence[Path], progress: Progress, jobs: int = 8
) -> tuple[Fetched, ...]:
    """Bring every wanted file into the store, in parallel, resuming what an earlier run began.

    A file that the store has, undamaged, asks nobody. A mirror folder is tried before the index; a file there with
    the wanted name and other bytes is refused, never passed over.

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
    done: dict[str, Fetched] = {}
    missing: dict[str, Wanted] = {}
    for item in wanted:
        if store.intact(item.sha256):
            done[item.sha256] = _stored(item, store)
        else:
            missing[item.sha256] = item
    if missing:
        with _alone(store, progress):
            remote = []
            for sha256, item in missing.items():
                # Another process may just have fetched it.
                if store.has(sha256):
                    done[sha256] = _stored(item, store)
                elif path := _in_mirrors(item, mirrors):
                    done[sha256] = _take(item, path, store)
                else:
                    remote.append(item)
            done |= _fetch_from_indexes(remote, store, progress, jobs)
    return tuple(replace(done[item.sha256], wanted=item) for item in wanted)


def _stored(item: Wanted, store: Store) -> Fetched:
    return Fetched(item, store.path(item.sha256).stat().st_size, "store")


def _in_mirrors(item: Wanted, mirrors: Sequence[Path]) -> Path | None:
    for folder in mirrors:
        path = folder / item.filename
        try:
            actual = sha256_file(path) if path.is_file() else None
        except OSError as error:
            raise DownloadError(
                f"the mirror's file cannot be read: {error.strerror}",
                remedy="correct its rights, or take its folder out of CUFALLBACK_FIND_LINKS",
                where=str(path),
            ) from error
        if actual == item.sha256:
            return path
        if actual is not None:
            raise IntegrityError(
                f"the mirror's {item.filename} has sha256 {actual}, the lock says {item.sha256}",
                remedy="remove the file from the mirror folder, or put the locked one there",
                where=str(path),
            )
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


@contextmanager
def _alone(store: Store, progress: Progress) -> Iterator[None]:
    """Let one process at a time download to a store: two would write to the same part of a file."""
    path = store.root / "part" / ".lock"
    with workspace_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process is downloading to the same store; waiting for it to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_from_indexes(missing: Sequence[Wanted], store: Store, progress: Progress, jobs: int) -> dict[str, Fetched]:
    if not missing:
        return {}
    stop = threading.Event()
    with index_session() as session, ThreadPoolExecutor(max_workers=jobs) as pool:

        def gather(function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
            """Call ``function`` in parallel; the first failure stops what still runs."""
            futures = [pool.submit(function, *each) for each in zip(*arguments, strict=True)]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
                return [future.result() for future in futures]
            except BaseException:
                stop.set()
                for future in futures:
                    future.cancel()
                raise

        found = gather(lambda item: _find(session, item, stop), missing)
        sizes = [size for _url, size in found]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        with progress.bar(f"downloading {len(missing)} file{'s' * (len(missing) > 1)}", total, "B") as advance:
            guard = threading.Lock()

            def count(amount: float) -> None:
                with guard:
                    advance(amount)

            def one(item: Wanted, url: str) -> Fetched:
                return _download(session, item, url, store, count, stop)

            done = gather(one, missing, [url for url, _size in found])
    return {item.wanted.sha256: item for item in done}


def _find(session: requests.Session, item: Wanted, stop: threading.Event) -> tuple[str, int | None]:
    for file in project_files(session, item.name, item.index_url, stop=stop):
        digest = file.digests.get("sha256")
        # An index without digests is asked by file name; the bytes are checked after the download all the same.
        if digest == item.sha256 or (digest is None and file.filename == item.filename):
            return file.url, file.size
    raise DownloadError(
        f"the index does not have {item.filename} with sha256 {item.sha256}",
        remedy="the file was withdrawn or the lock names the wrong index; run `nox -s lock` and review the difference, "
        "or point CUFALLBACK_FIND_LINKS at a folder that has the file",
        where=_name_of(item.index_url),
    )


def _download(
    session: requests.Session, item: Wanted, url: str, store: Store, advance: Advance, stop: threading.Event
) -> Fetched:
    import requests

    part = _part(store, item)
    shown = 0  # where the bar stands: an attempt that begins anew sets it back

    def count(position: int) -> None:
        nonlocal shown
        advance(position - shown)
        shown = position

    def attempt() -> None:
        with workspace_errors(store.root):
            _stream(session, url, part, count, stop)

    resumed = part.exists()
    try:
        _repeated(attempt, stop)
        if resumed and sha256_file(part) != item.sha256:
            # What an earlier run left may be damaged. The index is to blame only for what it gave in one piece.
            part.unlink()
            _repeated(attempt, stop)
    except requests.RequestException as error:
        raise DownloadError(
            f"{item.filename} could not be downloaded: {_in_words(error)}",
            remedy="run again: the download goes on where it stopped",
            where=_name_of(item.index_url),
        ) from error
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
            where=_name_of(item.index_url),
        ) from error
    return Fetched(item, size, "index")


def _stream(
    session: requests.Session, url: str, part: Path, count: Callable[[int], None], stop: threading.Event
) -> None:
    """Append to ``part`` what is missing of it; a server that knows no ranges sends the file from its start."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with session.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
        if response.status_code == 416:  # nothing is missing, or the part is longer than the file: the hash decides
            return
        response.raise_for_status()
        resumed = response.status_code == 206
        with part.open("ab" if resumed else "wb") as file:
            count(file.tell())
            for chunk in response.iter_content(_CHUNK):
                file.write(chunk)
                count(file.tell())
                if stop.is_set():
                    raise CancelledError


def _transient(error: Exception) -> bool:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError)


def _name_of(index_url: str | None) -> str:
    """Return how messages call an index: an explicit one stands in a public recipe, the default one may be secret."""
    return redact(index_url) if index_url else _DEFAULT


def _in_words(error: Exception) -> str:
    """Say what failed in our own words: those of the HTTP library contain the URL, and with it any secret in it."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"status {error.response.status_code}"
    causes = list(_causes(error))
    for kind, words in (
        (requests.exceptions.ProxyError, "the proxy could not be used"),
        (socket.gaierror, "the server's name is not known"),
        (ConnectionRefusedError, "connection refused"),
        (ssl.SSLCertVerificationError, "the server's certificate is not trusted"),
        (ssl.SSLError, "no secure connection could be made"),
        (requests.Timeout, "timeout"),
        (TimeoutError, "timeout"),
        (requests.exceptions.ChunkedEncodingError, "the answer broke off"),
        (requests.ConnectionError, "the connection failed or broke off"),
        (requests.TooManyRedirects, "too many redirections"),
    ):
        if any(isinstance(cause, kind) for cause in causes):
            return words
    if isinstance(error, requests.RequestException):
        return f"the request failed ({type(error).__name__})"
    return f"the answer is no package list ({type(error).__name__})"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what brought it about, wherever the libraries keep that."""
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        cause = todo.pop()
        if isinstance(cause, BaseException) and not any(cause is other for other in seen):
            seen.append(cause)
            yield cause
            todo += [*cause.args, cause.__cause__, cause.__context__, getattr(cause, "reason", None)]
