"""`cufallback lock --images` against a fake registry: written, unchanged, only compared, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image_rooms import CHECKOUT, CONFIG, DIGEST, INDEX, MANIFEST

from cufallback import lock
from cufallback.errors import (
    CufallbackError,
    ExitCode,
    ImageError,
    RecipeError,
    RegistryError,
    UsageError,
    WorkspaceError,
)
from cufallback.image.layout import Descriptor
from cufallback.image.lock import RESOLVED, LockedImage, parse_image_lock
from cufallback.image.reference import Reference
from cufallback.lock import LockReport, lock_images
from cufallback.plan import IMAGE_LOCK
from cufallback.progress import Silent
from cufallback.store import sha256_bytes

THEN, NOW = "2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z"
AMD, ARM = (f"sha256:{digit * 64}" for digit in "ab")


def index(amd: str = AMD) -> bytes:
    rows = [
        {"digest": digest, "mediaType": MANIFEST, "size": 1, "platform": {"os": "linux", "architecture": machine}}
        for machine, digest in (("amd64", amd), ("arm64", ARM))
    ]
    return json.dumps({"mediaType": INDEX, "manifests": rows}).encode()


class FakeRegistry:
    """Has one tag, whose manifest or index is ``content``; or fails with ``error``; or has nothing."""

    content: bytes | None = index()
    error: CufallbackError | None = None
    platform: dict[str, str] = {"os": "linux", "architecture": "amd64"}  # noqa: RUF012 - replaced, never changed
    asked: list[str] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, _runner: object, *, log: Path | None) -> None:
        self.log = log

    def digest_of(self, reference: Reference) -> Descriptor | None:
        self.asked.append(str(reference))
        if self.error is not None:
            raise self.error
        if self.content is None:
            return None
        return Descriptor(INDEX, f"sha256:{sha256_bytes(self.content)}", len(self.content))

    def manifest(self, reference: Reference) -> bytes:
        assert self.content is not None
        assert reference.digest == f"sha256:{sha256_bytes(self.content)}"
        return self.content

    def configuration(self, _reference: Reference, _manifest: bytes) -> dict[str, Any]:
        return self.platform


def locked(path: Path) -> tuple[LockedImage, ...]:
    return parse_image_lock(path.read_text("utf-8"), "rehearsal", where="x").images


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Room:
    """A checkout with the rehearsal recipe alone."""

    def __init__(self, root: Path) -> None:
        self.root, self.said = root, Said()
        self.recipe = root / "recipes" / "rehearsal.toml"
        self.path = root / "locks" / "rehearsal" / IMAGE_LOCK
        shutil.copytree(CHECKOUT / "dockerfiles", root / "dockerfiles")
        shutil.copytree(CHECKOUT / "locks" / "rehearsal", self.path.parent)
        self.path.unlink(missing_ok=True)
        self.recipe.parent.mkdir()
        shutil.copyfile(CHECKOUT / "recipes" / "rehearsal.toml", self.recipe)

    def lock(self, *, check: bool = False, now: str = NOW) -> LockReport:
        return lock_images(str(self.recipe), work=self.root / "work", check=check, now=now, progress=self.said)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRegistry]:
    class Fresh(FakeRegistry):
        asked: list[str] = []  # noqa: RUF012 - one for each test

    monkeypatch.setattr(lock, "Registry", Fresh)
    return Fresh


@pytest.fixture
def room(tmp_path: Path, fake: type[FakeRegistry]) -> Room:
    return Room(tmp_path)


def test_the_lock_is_written(room: Room, fake: type[FakeRegistry]) -> None:
    report = room.lock()
    assert (report.written, report.exit_code, report.differences) == (True, ExitCode.OK, (f"{IMAGE_LOCK}: missing",))
    (entry,) = locked(room.path)
    assert (entry.name, str(entry.reference)) == ("base", "docker.io/library/python:3.11-slim-bookworm")
    assert entry.index == f"sha256:{sha256_bytes(index())}"
    assert entry.platform == {"linux/amd64": AMD, "linux/arm64": ARM}
    assert (entry.resolved, entry.source) == (NOW, RESOLVED)
    assert fake.asked == ["docker.io/library/python:3.11-slim-bookworm"]
    assert "written to" in report.text()


def test_a_tag_of_one_image_needs_no_index(room: Room, fake: type[FakeRegistry]) -> None:
    fake.content = json.dumps({"mediaType": MANIFEST, "config": {"mediaType": CONFIG, "digest": DIGEST}}).encode()
    room.lock()
    (entry,) = locked(room.path)
    assert (entry.index, entry.platform) == (None, {"linux/amd64": f"sha256:{sha256_bytes(fake.content)}"})


def test_unchanged_digests_keep_their_date_and_the_file(room: Room) -> None:
    room.lock(now=THEN)
    before, inode = room.path.read_bytes(), room.path.stat().st_ino
    report = room.lock()
    assert (report.differences, report.exit_code) == ((), ExitCode.OK)
    assert room.path.read_bytes() == before
    assert room.path.stat().st_ino == inode
    assert "are current" in report.text()


def test_other_digests_are_written_with_their_date_and_shown(room: Room, fake: type[FakeRegistry]) -> None:
    room.lock(now=THEN)
    fake.content = index(DIGEST)
    report = room.lock()
    (entry,) = locked(room.path)
    assert (entry.platform["linux/amd64"], entry.resolved) == (DIGEST, NOW)
    assert f'{IMAGE_LOCK}: +"linux/amd64" = "{DIGEST}"' in report.differences
    assert f'{IMAGE_LOCK}: -"linux/amd64" = "{AMD}"' in report.differences
    assert "arm64" not in report.text()


@pytest.mark.parametrize("there", [True, False])
def test_a_check_writes_nothing_and_finds_the_drift(room: Room, fake: type[FakeRegistry], there: bool) -> None:
    if there:
        room.lock(now=THEN)
        fake.content = index(DIGEST)
    before = room.path.read_bytes() if there else None
    report = room.lock(check=True)
    assert (report.written, report.exit_code) == (False, ExitCode.LOCK_DRIFT)
    assert (room.path.read_bytes() if room.path.exists() else None) == before
    assert "drifted: " in report.text()


def test_a_check_of_a_current_lock_finds_nothing(room: Room) -> None:
    room.lock(now=THEN)
    assert room.lock(check=True).exit_code == ExitCode.OK


REFUSED = {
    "no TOML": b"[[[",
    "no text": b"\xff\xfe",
    "another recipe": b'schema = 1\nrecipe = "other"\n',
    "another schema": b'schema = 2\nrecipe = "rehearsal"\n',
    "damaged": b'schema = 1\nrecipe = "rehearsal"\n[[image]]\nname = "base"\n',
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_a_refused_lock_is_written_anew_and_it_is_said(room: Room, content: bytes) -> None:
    room.path.write_bytes(content)
    report = room.lock()
    assert report.written
    assert locked(room.path)[0].resolved == NOW
    (line,) = [line for line in room.said.lines if "is refused" in line]
    assert str(room.path) in line


def test_an_empty_lock_is_refused_too(room: Room) -> None:
    room.path.write_bytes(b"")
    assert room.lock().written
    assert locked(room.path)[0].resolved == NOW


DOWN = RegistryError("the registry does not answer", remedy="run again")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"error": DOWN}, RegistryError),
        ({"content": None}, RegistryError),
        ({"content": b"{"}, ImageError),
        ({"content": json.dumps({"mediaType": INDEX, "manifests": []}).encode()}, RegistryError),
        ({"content": index("sha256:x")}, ImageError),
    ],
)
def test_a_registry_that_fails_leaves_the_lock_as_it_is(
    room: Room, fake: type[FakeRegistry], there: bool, changed: dict[str, Any], error: type[CufallbackError]
) -> None:
    if there:
        room.lock(now=THEN)
    before = room.path.read_bytes() if there else None
    for name, value in changed.items():
        setattr(fake, name, value)
    with pytest.raises(error):
        room.lock()
    assert (room.path.read_bytes() if room.path.exists() else None) == before


def test_a_recipe_without_an_image_has_nothing_to_lock(room: Room, fake: type[FakeRegistry]) -> None:
    head, _, rest = room.recipe.read_text().partition("[image]\n")
    room.recipe.write_text(head + "[builder]\n" + rest.partition("[builder]\n")[2])
    with pytest.raises(UsageError, match=r"recipe rehearsal has no \[image\]") as raised:
        room.lock()
    assert raised.value.where == "--images"
    assert fake.asked == []


def test_no_such_recipe_and_no_room_to_work(room: Room) -> None:
    with pytest.raises(RecipeError):
        lock_images("nothing", work=room.root / "work", check=True, now=NOW, progress=room.said)
    (room.root / "work").write_text("in the way")
    with pytest.raises(WorkspaceError):
        room.lock()
