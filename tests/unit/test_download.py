"""Downloads against indexes on the loopback that fail in every way that real ones do."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.index_server import FakeIndex, digest, make_wheel, serving

from cufallback import download
from cufallback.download import Fetched, Wanted, default_index, fetch, find_mirrors, without_default_index
from cufallback.errors import DownloadError, IntegrityError, ToolchainError, WorkspaceError
from cufallback.progress import Advance, Silent
from cufallback.store import Store, sha256_bytes

NAME = "pebble-1.0-py3-none-any.whl"
DATA = make_wheel("pebble", "1.0", padding=300_000)


@pytest.fixture(autouse=True)
def no_pauses_or_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(download, "_CHUNK", 10_000)
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "CUFALLBACK_FIND_LINKS", "XDG_CONFIG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def start() -> Iterator[Callable[..., FakeIndex]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(FakeIndex(**options)))


@pytest.fixture
def index(start: Callable[..., FakeIndex], monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """The default index, with one file."""
    made = start(files={NAME: DATA})
    monkeypatch.setenv("UV_DEFAULT_INDEX", made.url)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def pebble(**changes: str) -> Wanted:
    return Wanted(**{"name": "pebble", "version": "1.0", "filename": NAME, "sha256": digest(DATA), **changes})


def get(store: Store, *wanted: Wanted, mirrors: Sequence[Path] = (), **options: int) -> tuple[Fetched, ...]:
    return fetch(wanted or (pebble(),), store=store, mirrors=mirrors, progress=Silent(), **options)


def content(store: Store, item: Fetched) -> bytes:
    return store.path(item.wanted.sha256).read_bytes()


def begin(store: Store, data: bytes) -> Path:
    """Leave ``data`` behind as an interrupted download does."""
    part = store.root / "part" / digest(DATA)
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    return part


def test_file_comes_from_the_index_and_then_from_the_store_without_a_request(index: FakeIndex, store: Store) -> None:
    (first,) = get(store)
    assert (first.origin, first.size, content(store, first)) == ("index", len(DATA), DATA)
    index.requests.clear()
    (second,) = get(store)
    assert (second.origin, second.size, index.requests) == ("store", len(DATA), [])


def test_files_are_fetched_at_the_same_time(index: FakeIndex, store: Store) -> None:
    wheels = {f"pebble-{number}.0-py3-none-any.whl": make_wheel("pebble", f"{number}.0") for number in range(1, 5)}
    wanted = [pebble(filename=name, sha256=index.add(name, data)) for name, data in wheels.items()]
    index.barrier = threading.Barrier(4)  # no answer before four requests are there
    got = get(store, *wanted, jobs=4)
    assert [item.wanted for item in got] == wanted
    assert [content(store, item) for item in got] == list(wheels.values())


def test_mirror_comes_before_the_index(index: FakeIndex, store: Store, tmp_path: Path) -> None:
    empty, mirror = tmp_path / "empty", tmp_path / "mit Leerzeichen ü"
    empty.mkdir()
    mirror.mkdir()
    (mirror / NAME).write_bytes(DATA)
    (got,) = get(store, mirrors=[empty, mirror])
    assert (got.origin, content(store, got), index.requests) == ("mirror", DATA, [])
    assert (mirror / NAME).read_bytes() == DATA


def test_mirror_with_other_bytes_under_the_name_is_refused_not_passed_over(
    index: FakeIndex, store: Store, tmp_path: Path
) -> None:
    (tmp_path / NAME).write_bytes(b"other")
    with pytest.raises(IntegrityError, match=f"the mirror's {NAME} has sha256 {sha256_bytes(b'other')}") as caught:
        get(store, mirrors=[tmp_path])
    assert caught.value.where == str(tmp_path / NAME)
    assert index.requests == []


def test_wrong_bytes_are_kept_aside_and_fetched_anew_next_time(index: FakeIndex, store: Store) -> None:
    index.swapped[NAME] = b"not these"
    with pytest.raises(IntegrityError, match=f"other bytes: sha256 is {sha256_bytes(b'not these')}") as caught:
        get(store)
    rejected = store.root / "rejected" / f"{digest(DATA)}-{NAME}"
    assert rejected.read_bytes() == b"not these"
    assert str(rejected) in caught.value.remedy
    assert not store.has(digest(DATA))
    index.swapped.clear()
    assert content(store, get(store)[0]) == DATA


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (pebble(sha256="0" * 64), f"does not have {NAME} with sha256 000"),
        (pebble(name="boulder"), "has no package boulder"),
    ],
)
def test_what_the_index_does_not_have(index: FakeIndex, store: Store, wanted: Wanted, reason: str) -> None:
    with pytest.raises(DownloadError, match=reason) as caught:
        get(store, wanted)
    assert caught.value.where == "the default index"
    assert index.downloads == []


def test_unreachable_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeIndex()) as gone:
        monkeypatch.setenv("UV_DEFAULT_INDEX", gone.url)
    with pytest.raises(DownloadError, match="could not be asked for pebble: connection refused"):
        get(store)


@pytest.mark.parametrize("status", [500, 502, 429])
@pytest.mark.parametrize("what", ["page_statuses", "file_statuses"])
def test_passing_failure_is_tried_again(index: FakeIndex, store: Store, what: str, status: int) -> None:
    getattr(index, what).extend([status, status, status])
    assert content(store, get(store)[0]) == DATA


@pytest.mark.parametrize(("status", "tries"), [(500, 4), (403, 1), (404, 1)])
def test_lasting_failure_of_a_file(index: FakeIndex, store: Store, status: int, tries: int) -> None:
    index.file_statuses = [status] * 9
    with pytest.raises(DownloadError, match=f"{NAME} could not be downloaded: status {status}"):
        get(store)
    assert len(index.downloads) == tries


@pytest.mark.parametrize(("status", "tries"), [(500, 4), (401, 1)])
def test_lasting_failure_of_a_page(index: FakeIndex, store: Store, status: int, tries: int) -> None:
    index.page_statuses = [status] * 9
    with pytest.raises(DownloadError, match=f"could not be asked for pebble: status {status}"):
        get(store)
    assert len(index.pages) == tries


@pytest.mark.parametrize(
    "page",
    [
        ("application/vnd.pypi.simple.v1+json", b"not json"),
        ("application/vnd.pypi.simple.v1+json", b'{"meta": {"api-version": "1.0"}}'),
        ("application/vnd.pypi.simple.v1+json", b'{"meta": {"api-version": "7.0"}, "name": "pebble", "files": []}'),
        ("application/pdf", b"%PDF"),
    ],
)
def test_answer_that_is_no_index_page(index: FakeIndex, store: Store, page: tuple[str, bytes]) -> None:
    index.raw_page = page
    with pytest.raises(DownloadError, match="could not be asked for pebble"):
        get(store)


def test_cut_connection_goes_on_where_it_ended(index: FakeIndex, store: Store) -> None:
    index.cut_after = [100_000, 50_000]
    assert content(store, get(store)[0]) == DATA
    assert [wanted for _name, wanted in index.downloads] == ["", "bytes=100000-", "bytes=150000-"]


def test_cut_connection_of_a_server_without_ranges_begins_anew(index: FakeIndex, store: Store) -> None:
    index.ranges = False
    index.cut_after = [100_000]
    assert content(store, get(store)[0]) == DATA
    assert len(index.downloads) == 2


def test_connection_cut_each_time_keeps_what_came(index: FakeIndex, store: Store) -> None:
    index.cut_after = [10_000] * 4
    with pytest.raises(DownloadError, match="could not be downloaded") as caught:
        get(store)
    assert "goes on where it stopped" in caught.value.remedy
    index.requests.clear()
    assert content(store, get(store)[0]) == DATA
    assert index.downloads == [(NAME, "bytes=40000-")]


@pytest.mark.parametrize(
    ("left", "requests"),
    [
        (DATA[:1234], ["bytes=1234-"]),
        (DATA, [f"bytes={len(DATA)}-"]),  # answered with 416: nothing is missing
        (DATA + b"more", [f"bytes={len(DATA) + 4}-", ""]),
        (b"\0" * 1234, ["bytes=1234-", ""]),
        (b"\0" * len(DATA), [f"bytes={len(DATA)}-", ""]),
    ],
)
def test_part_of_an_earlier_run_is_resumed_or_when_damaged_replaced(
    index: FakeIndex, store: Store, left: bytes, requests: list[str]
) -> None:
    part = begin(store, left)
    assert content(store, get(store)[0]) == DATA
    assert [wanted for _name, wanted in index.downloads] == requests
    assert not part.exists()
    assert not (store.root / "rejected").exists()


def test_only_the_package_s_own_index_is_asked(start: Callable[..., FakeIndex], index: FakeIndex, store: Store) -> None:
    own = start(files={})
    with pytest.raises(DownloadError, match="has no package pebble"):
        get(store, pebble(index_url=own.url))
    assert len(own.requests) == 1
    assert index.requests == []
    own.files[NAME] = DATA
    get(store, pebble(index_url=own.url))
    assert index.requests == []


def test_index_without_digests_is_asked_by_name_and_its_bytes_are_checked(index: FakeIndex, store: Store) -> None:
    index.hashes = False
    index.swapped[NAME] = b"not these"
    with pytest.raises(IntegrityError):
        get(store)
    index.swapped.clear()
    assert content(store, get(store)[0]) == DATA


SECRET = "pa55" * 100  # long enough that a message cut to its first characters ends inside it


@pytest.mark.parametrize("fault", ["page", "file", "hash", "missing", "unreachable", "unknown name"])
@pytest.mark.parametrize("place", ["user", "query"])
def test_secrets_of_the_index_are_in_no_message(
    index: FakeIndex, store: Store, monkeypatch: pytest.MonkeyPatch, fault: str, place: str
) -> None:
    server = index.url.removeprefix("http://").partition("/")[0]
    server = {"unreachable": "127.0.0.1:9", "unknown name": "no-such-host.invalid"}.get(fault, server)
    url = f"http://me:{SECRET}@{server}/simple/" if place == "user" else f"http://{server}/simple/?{SECRET}/"
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    index.page_statuses = [403] if fault == "page" else []
    index.file_statuses = [403] if fault == "file" else []
    index.swapped = {NAME: b"x"} if fault == "hash" else {}
    wanted = pebble(name="boulder") if fault == "missing" else pebble()
    with pytest.raises((DownloadError, IntegrityError)) as caught:
        get(store, wanted)
    assert "pa55" not in str(caught.value)
    assert server not in str(caught.value)


@pytest.mark.parametrize("server", ["127.0.0.1:9", "no-such-host.invalid"])
def test_a_token_in_the_path_of_the_index_is_in_no_message(
    store: Store, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{server}/pa55/simple")
    with pytest.raises(DownloadError, match=r"refused|not known") as caught:
        get(store)
    assert "pa55" not in str(caught.value)
    assert caught.value.where == "the default index"


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
@pytest.mark.parametrize(
    "url",
    [
        "https://h:99999/",
        "https://h:abc/pa55",
        "https://[::1/pa55",
        "https://me:a/pa55@127.0.0.1:9/simple",
        "me:pa55@host/simple",
        "host/pa55/simple",
        "ftp://host/pa55",
        "https:///pa55",
        "https://a..b/pa55",
        f"https://{'l' * 64}.example/pa55",
        "https://host/pa55\nsimple",
    ],
)
def test_a_malformed_index_setting_is_named_and_not_shown(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(ToolchainError) as caught:
        get(store)
    assert caught.value.where == name
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "https://me:pa55@h.example:8/t0ken/simple",
        "https://me:pa55@h.example:8/t0ken/simple/torch/",
        "https://me:****@h.example:8/t0ken/simple/torch/",
        "https://h.example:8/t0ken/simple/torch/",
        "HTTPS://H.example:8/t0ken/simple",
    ],
)
def test_what_other_programs_say_of_the_index_is_replaced(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:pa55@h.example:8/t0ken/simple/")
    shown = without_default_index(f"error: `{said}` failed")
    assert shown.startswith("error: `the default index")
    assert not {"pa55", "t0ken", "example"} & set(re.split(r"\W", shown))


def test_certificates_that_are_not_there_are_named(
    index: FakeIndex, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    with pytest.raises(ToolchainError, match="no such certificates") as caught:
        get(store)
    assert caught.value.where == "REQUESTS_CA_BUNDLE"


@pytest.mark.parametrize("entry", ["~nouser/x", "a" * 5000, "file://[x", "x\udc80", "/dev/null", "/proc/1/root/x"])
def test_find_links_that_are_no_folder_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str
) -> None:
    monkeypatch.setattr(download.os, "pathsep", ";")
    monkeypatch.setenv("CUFALLBACK_FIND_LINKS", f"{entry};{tmp_path}")
    assert find_mirrors() == (tmp_path,)


def test_failure_of_one_file_stops_the_others_at_once_and_keeps_their_parts(index: FakeIndex, store: Store) -> None:
    boulder = pebble(name="boulder", filename="boulder-1.0-py3-none-any.whl")
    boulder = replace(boulder, sha256=index.add(boulder.filename, b"right"))
    index.swapped[boulder.filename] = b"wrong"
    index.slow = NAME
    with pytest.raises(IntegrityError, match="the index gave boulder"):
        get(store, pebble(), boulder)
    part = store.root / "part" / digest(DATA)
    assert part.stat().st_size < len(DATA)
    assert [path.name for path in (store.root / "rejected").iterdir()] == [f"{boulder.sha256}-{boulder.filename}"]
    index.slow = ""
    assert content(store, get(store)[0]) == DATA


def test_two_wanted_files_of_one_digest_are_fetched_once(index: FakeIndex, store: Store) -> None:
    index.add("pebble-1.0-1-py3-none-any.whl", DATA)
    got = get(store, pebble(), pebble(filename="pebble-1.0-1-py3-none-any.whl"), pebble())
    assert [item.wanted.filename for item in got] == [NAME, "pebble-1.0-1-py3-none-any.whl", NAME]
    assert len(index.downloads) == 1


def test_second_process_waits_for_the_first_and_takes_its_files(index: FakeIndex, store: Store) -> None:
    class Speaking(Silent):
        """Ends the wait by ending what is waited for."""

        def say(self, text: str) -> None:
            said.append(text)
            done = store.root / "part" / "done"
            done.write_bytes(DATA)
            store.add(done, sha256=digest(DATA))
            fcntl.flock(other, fcntl.LOCK_UN)

    said: list[str] = []
    lock = store.root / "part" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (got,) = fetch([pebble()], store=store, mirrors=(), progress=Speaking())
    assert (got.origin, index.requests) == ("store", [])
    assert "waiting" in said[0]


def test_bar_counts_each_byte_once_whatever_is_repeated(index: FakeIndex, store: Store) -> None:
    class Counting(Silent):
        @contextmanager
        def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
            bars.append((title, total, unit))
            yield counted.append

    bars: list[tuple[str, float | None, str]] = []
    counted: list[float] = []
    index.ranges = False
    index.cut_after = [100_000]
    begin(store, DATA[:500])
    fetch([pebble()], store=store, mirrors=(), progress=Counting())
    assert bars == [("downloading 1 file", len(DATA), "B")]
    assert sum(counted) == len(DATA)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_full_disk_is_named_and_the_next_run_resumes(index: FakeIndex, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", small], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        store = Store(small / "store")
        with pytest.raises(WorkspaceError, match="No space left on device") as caught:
            get(store)
        assert "run again: it resumes" in caught.value.remedy
        subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
        index.requests.clear()
        assert content(store, get(store)[0]) == DATA
        assert index.downloads[0][1].startswith("bytes=")
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, without any setting of pip."""
    monkeypatch.delenv("PIP_CONFIG_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setattr(download.sys, "prefix", str(tmp_path / "prefix"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def write_conf(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_default_index_is_uv_s_then_pip_s_then_pypi(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    assert default_index() == PYPI_SIMPLE_ENDPOINT
    write_conf(settings / "etc/pip/pip.conf", "[global]\nindex-url = https://site.example/simple\n")
    assert default_index() == "https://site.example/simple"
    write_conf(settings / ".config/pip/pip.conf", "[global]\nindex-url = https://user.example/simple\n")
    assert default_index() == "https://user.example/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    assert default_index() == "https://pip.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    assert default_index() == "https://uv.example/simple"


def test_pip_config_file_stands_in_for_the_user_s(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_conf(settings / ".config/pip/pip.conf", f"[global]\nfind-links = {settings / 'one'}\n")
    assert find_mirrors() == (settings / "one",)
    write_conf(settings / "named.conf", "[global]\nindex-url = https://named.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings / "named.conf"))
    assert (find_mirrors(), default_index()) == ((), "https://named.example/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    write_conf(settings / "prefix/pip.conf", f"[global]\nfind-links = {settings / 'one'}\n")
    assert find_mirrors() == ()


def test_mirrors_are_ours_then_those_of_pip(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = settings / "one", settings / "two"
    write_conf(
        settings / ".config/pip/pip.conf",
        f"[global]\nfind-links = {two}\n[download]\nfind-links =\n    {one.as_uri()}\n    {two}\n    https://x.example/\n",
    )
    assert find_mirrors() == (one, two)
    monkeypatch.setenv("PIP_FIND_LINKS", f"~/two {settings / 'nowhere'}")
    assert find_mirrors() == (two,)
    monkeypatch.setenv("CUFALLBACK_FIND_LINKS", f"{one}{os.pathsep}{two}")
    assert find_mirrors() == (one, two)
    monkeypatch.setenv("CUFALLBACK_FIND_LINKS", "")
    assert find_mirrors() == ()


@pytest.mark.parametrize("text", ["find-links = x\n", "[global\n", "\xff\xfe"])
def test_broken_pip_configuration_says_nothing(settings: Path, text: str) -> None:
    path = settings / ".config/pip/pip.conf"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    assert find_mirrors() == ()
