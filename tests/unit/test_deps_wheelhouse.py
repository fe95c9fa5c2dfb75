"""The wheelhouse: exactly the files of a lock, mended when damaged, refused when they are not what they say."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from tests.unit.index_server import digest, make_wheel

from cufallback.deps.wheelhouse import fill
from cufallback.download import Wanted
from cufallback.errors import IntegrityError
from cufallback.progress import Silent
from cufallback.store import Store

NAME = "my_pebble-1.0-py3-none-any.whl"


class House:
    """A wheelhouse of one wheel, fed from a mirror folder."""

    def __init__(self, root: Path, data: bytes) -> None:
        self.mirror, self.folder, self.store = root / "mirror", root / "house", Store(root / "store")
        self.mirror.mkdir()
        (self.mirror / NAME).write_bytes(data)
        self.wheel, self.wanted = self.folder / NAME, Wanted("my-pebble", "1.0", NAME, digest(data))

    def fill(self) -> str:
        (fetched,) = fill([self.wanted], folder=self.folder, store=self.store, mirrors=[self.mirror], progress=Silent())
        return fetched.origin


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, make_wheel("my-pebble", "1.0"))


def test_filled_once_and_left_alone(house: House) -> None:
    assert house.fill() == "mirror"
    before = house.wheel.stat()
    assert house.fill() == "store"
    assert house.wheel.stat().st_ino == before.st_ino
    assert digest(house.wheel.read_bytes()) == house.wanted.sha256


@pytest.mark.parametrize("linked", [True, False])
def test_truncated_file_is_replaced(house: House, linked: bool) -> None:
    house.fill()
    if not linked:  # the store's own file stays whole
        data = house.wheel.read_bytes()
        house.wheel.unlink()
        house.wheel.write_bytes(data)
    house.wheel.chmod(0o644)
    with house.wheel.open("r+b") as file:
        file.truncate(10)
    house.fill()
    assert digest(house.wheel.read_bytes()) == house.wanted.sha256
    assert digest(house.store.path(house.wanted.sha256).read_bytes()) == house.wanted.sha256


def test_what_does_not_belong_is_removed(house: House, tmp_path: Path) -> None:
    house.fill()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (house.folder / "other-1.0-py3-none-any.whl").touch()
    (house.folder / "folder" / "inner").mkdir(parents=True)
    (house.folder / "link").symlink_to(tmp_path / "elsewhere")
    house.fill()
    assert [path.name for path in house.folder.iterdir()] == [NAME]
    assert (tmp_path / "elsewhere" / "kept").exists()


def archive(**members: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, text in members.items():
            file.writestr(name, text)
    return made.getvalue()


def encrypted() -> bytes:
    data = bytearray(make_wheel("my-pebble", "1.0"))
    for header, at in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        start = data.find(header)
        data[start + at] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make_wheel("my-pebble", "1.0", says=("other", "1.0")), "installs other 1.0, its lock says my-pebble 1.0"),
        (make_wheel("my-pebble", "1.0", says=("my-pebble", "2.0")), "installs my-pebble 2.0"),
        (make_wheel("my-pebble", "1.0", says=("my-pebble", "1.0+cu130")), r"installs my-pebble 1\.0\+cu130"),
        (make_wheel("my-pebble", "1.0", says=("my-pebble", "none")), "no readable wheel: Invalid version"),
        (make_wheel("my-pebble", "1.0", says=("my-pebble", "")), "no readable wheel: Invalid version"),
        (b"no zip", "no readable wheel"),
        (b"", "no readable wheel"),
        (archive(readme=""), "no readable wheel: it has 0 METADATA files"),
        (archive(**{"a.dist-info/METADATA": "", "b.dist-info/METADATA": ""}), "it has 2 METADATA files"),
        (encrypted(), "no readable wheel"),
    ],
)
def test_wheel_that_is_not_what_its_lock_says(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason) as caught:
        House(tmp_path, data).fill()
    assert caught.value.where == str(tmp_path / "house" / NAME)


@pytest.mark.parametrize("says", [("My.Pebble", "1.0"), ("my_pebble", "1.0.0")])
def test_other_spellings_of_name_and_version_are_the_same(tmp_path: Path, says: tuple[str, str]) -> None:
    assert House(tmp_path, make_wheel("my-pebble", "1.0", says=says)).fill() == "mirror"
