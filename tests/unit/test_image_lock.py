"""The image lock: written and read back, and every broken file one error with its line."""

from __future__ import annotations

import pytest

from cufallback.errors import LockError
from cufallback.image.lock import (
    RESOLVED,
    ImageLock,
    LockedImage,
    parse_image_lock,
    render_image_lock,
)
from cufallback.image.reference import parse_reference

A, B, C = (f"sha256:{digit * 64}" for digit in "abc")
NOW = "2026-12-01T00:00:00Z"
INDEXED = LockedImage(
    "runtime",
    parse_reference("docker.io/nvidia/cuda:12.9.1-base-ubuntu22.04"),
    A,
    {"linux/amd64": B, "linux/arm64": C, "linux/arm/v7": A},
    NOW,
    'quoted: the "overview" page \\ of the registry, 2026-11-30',
)
SINGLE = LockedImage("base", parse_reference("127.0.0.1:5000/base:1"), None, {"linux/amd64": C}, NOW, RESOLVED)
TEXT = render_image_lock([SINGLE], "r")


def test_written_and_read_back() -> None:
    text = render_image_lock([SINGLE, INDEXED], "r")
    lock = parse_image_lock(text, "r", where="x")
    assert lock == ImageLock("r", (SINGLE, INDEXED))
    assert render_image_lock(lock.images, "r") == text
    assert lock.image("runtime").digest("linux/arm64") == C


def test_an_empty_lock_is_a_lock() -> None:
    assert parse_image_lock(render_image_lock([], "r"), "r", where="x") == ImageLock("r", ())


@pytest.mark.parametrize(
    ("old", "new", "reason", "shown"),
    [
        ("schema = 1", "schema = 2", "schema is 2", "schema"),
        ("schema = 1", "schema = true", "schema is True", "schema"),
        ('recipe = "r"', 'recipe = "other"', "of recipe 'other'", "recipe"),
        ('recipe = "r"', 'recipe = "r"\nextra = 1', "unknown key 'extra'", "extra"),
        ("[[image]]", "[image]", "must be a list of tables", "[image]"),
        ('name = "base"', 'name = "Base"', "must be of a-z", 'name = "Base"'),
        ('name = "base"', "name = 7", "must be a text", "name = 7"),
        ('name = "base"\n', "", "is missing", "[[image]]"),
        ("source =", "sauce =", "unknown key", "sauce"),
        (":1", "", "must have a tag", "reference"),
        (":1", f":1@{A}", "no digest", "reference"),
        ("127.0.0.1:5000/base:1", "python:3.11", "names no registry", "reference"),
        ("127.0.0.1:5000/base:1", "docker.io/python:3", "docker.io/library/python:3", "reference"),
        ("resolved =", f'index = "{A[:-1]}"\nresolved =', "is no digest", "index"),
        ("resolved =", 'index = "latest"\nresolved =', "is no digest", "index"),
        (C, C.upper(), "is no digest", '"linux/amd64"'),
        (C, "", "is no digest", '"linux/amd64"'),
        ('"linux/amd64"', '"amd64"', "is no platform", '"amd64"'),
        (f'"linux/amd64" = "{C}"', "", "must be a table with a digest", "[image.platform]"),
        (f'"{C}"', f'"{C}"\n"linux/arm64" = "{A}"', "only an index", "[image.platform]"),
        (NOW, "2026-12-01", "RFC 3339", "resolved"),
        (NOW, "2026-13-01T00:00:00Z", "RFC 3339", "resolved"),
        (NOW, "2026-12-01T00:00:00", "RFC 3339", "resolved"),
        (RESOLVED, "a dream", "must be", "source"),
        (RESOLVED, "quoted: ", "names no source", "source"),
        ("schema = 1", "schema = ", "not valid TOML", ""),
    ],
)
def test_a_broken_lock_is_one_error_with_its_line(old: str, new: str, reason: str, shown: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    with pytest.raises(LockError) as caught:
        parse_image_lock(text, "r", where="images.lock.toml")
    assert reason in caught.value.reason
    assert "cufallback lock --images" in caught.value.remedy
    if shown:
        line = int(str(caught.value.where).rpartition(":")[2])
        assert text.splitlines()[line - 1].startswith(shown)


def test_two_entries_of_one_name() -> None:
    with pytest.raises(LockError, match="base is listed twice"):
        parse_image_lock(render_image_lock([SINGLE, SINGLE], "r"), "r", where="x")


def test_what_is_not_in_the_lock() -> None:
    lock = ImageLock("r", (SINGLE,))
    with pytest.raises(LockError, match="no image 'devel', only base"):
        lock.image("devel")
    with pytest.raises(LockError, match="locked for linux/amd64, not for linux/arm64"):
        lock.image("base").digest("linux/arm64")
