"""Base images: what ``--base`` takes, which digest a name stands for, and what can be fetched from a fake registry."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.image_rooms import INDEX, document, image, layer, top

from cufallback.errors import CufallbackError, ImageError, LockError, RegistryError, UsageError
from cufallback.image.bases import Base, Replacement, base_folder, fetch_bases, parse_replacements, resolve_bases
from cufallback.image.lock import RESOLVED, ImageLock, LockedImage
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Registry
from cufallback.recipe import Recipe, load_recipe

REFERENCE = "docker.io/library/python:3.11-slim-bookworm"
A, B, C = (f"sha256:{digit * 64}" for digit in "abc")
FILE = layer(("etc/os-release", b"ID=demo\n"))


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("rehearsal")


def with_bases(recipe: Recipe, *names: str) -> Recipe:
    assert recipe.image is not None
    bases = tuple(recipe.image.base[0].model_copy(update={"name": name}) for name in names)
    return recipe.model_copy(update={"image": recipe.image.model_copy(update={"base": bases})})


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "a=layout @ home"


def test_a_replacement_names_a_whole_image_on_disk(recipe: Recipe, layout: Path) -> None:
    found = image(layout, [FILE])
    top(layout, found)
    given = f"base=oci-layout:{layout}@{found['digest']}"
    assert parse_replacements([given], recipe) == (Replacement("base", layout.resolve(), found["digest"]),)
    assert parse_replacements([], recipe) == ()


def test_a_replacement_by_its_index_stands_for_the_image_of_the_platform(recipe: Recipe, layout: Path) -> None:
    found = image(layout, [FILE])
    row = {**found, "platform": {"os": "linux", "architecture": "amd64"}}
    index = document(layout, {"manifests": [row]}, INDEX)
    top(layout, index)
    (read,) = parse_replacements([f"base=oci-layout:{layout}@{index['digest']}"], recipe)
    assert read.digest == found["digest"]


FORMS = [
    "", "base", "base=", "=oci-layout:DIR@DIGEST", "base=DIR@DIGEST", "base=oci-layout:@DIGEST", "base=oci-layout:DIR",
    "base=oci-layout:DIR:latest", "base=oci-layout:DIR@sha256:abc", "base=oci-layout:DIR@DIGESTd",
    "Base=oci-layout:DIR@DIGEST", "base=docker-image:DIR@DIGEST", "base=oci-layout:DIR@DIGEST ",
    "base oci-layout:DIR@DIGEST",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_replacement(recipe: Recipe, layout: Path, form: str) -> None:
    found = image(layout)
    top(layout, found)
    with pytest.raises(UsageError, match="not of the form") as raised:
        parse_replacements([form.replace("DIR", str(layout)).replace("DIGEST", found["digest"])], recipe)
    assert raised.value.where == "--base"


def test_no_such_base_and_one_twice(recipe: Recipe, layout: Path) -> None:
    found = image(layout)
    top(layout, found)
    argument = f"base=oci-layout:{layout}@{found['digest']}"
    with pytest.raises(UsageError, match="'other' is no base of recipe rehearsal") as raised:
        parse_replacements([argument.replace("base=", "other=", 1)], recipe)
    assert "its bases: base" in raised.value.remedy
    with pytest.raises(UsageError, match="'base' stands here twice"):
        parse_replacements([argument, argument], recipe)
    with pytest.raises(UsageError) as raised:
        parse_replacements([argument], recipe.model_copy(update={"image": None}))
    assert "its bases: none" in raised.value.remedy


@pytest.mark.parametrize("which", ["index.json", "oci-layout", "manifest", "config", "layer"])
def test_a_damaged_replacement(recipe: Recipe, layout: Path, which: str) -> None:
    found = image(layout, [FILE])
    top(layout, found)
    parts = dict.fromkeys(("index.json", "oci-layout"), "")
    path = layout / which
    if which not in parts:
        smallest_first = sorted((layout / "blobs" / "sha256").iterdir(), key=lambda blob: blob.stat().st_size)
        kinds = {"manifest": found["digest"][7:]}
        others = [blob.name for blob in smallest_first if blob.name != kinds["manifest"]]
        config = next(name for name in others if b"architecture" in (layout / "blobs" / "sha256" / name).read_bytes())
        kinds |= {"config": config, "layer": next(name for name in others if name != config)}
        path = layout / "blobs" / "sha256" / kinds[which]
    path.unlink()
    with pytest.raises(ImageError):
        parse_replacements([f"base=oci-layout:{layout}@{found['digest']}"], recipe)


@pytest.mark.parametrize("digest", [A, None])
def test_a_replacement_that_is_not_there(recipe: Recipe, layout: Path, digest: str | None) -> None:
    found = image(layout)
    if digest:
        top(layout, found)
    with pytest.raises(ImageError):
        parse_replacements([f"base=oci-layout:{layout}@{digest or found['digest']}"], recipe)


def test_a_replacement_for_another_platform(recipe: Recipe, layout: Path) -> None:
    found = image(layout, platform="linux/arm64")
    top(layout, found)
    with pytest.raises(ImageError, match="is for linux/arm64, not for linux/amd64"):
        parse_replacements([f"base=oci-layout:{layout}@{found['digest']}"], recipe)


def locked(name: str = "base", reference: str = REFERENCE, **platform: str) -> ImageLock:
    digests = {f"linux/{machine}": digest for machine, digest in platform.items()} or {
        "linux/amd64": A,
        "linux/arm64": C,
    }
    entry = LockedImage(name, parse_reference(reference), B, digests, "2026-12-01T00:00:00Z", RESOLVED)
    return ImageLock("rehearsal", (entry,))


def test_a_base_has_the_digest_of_its_lock_for_the_platform(recipe: Recipe) -> None:
    (base,) = resolve_bases(recipe, locked(), ())
    assert base.to_json() == {"name": "base", "reference": REFERENCE, "digest": A, "origin": "lock"}


def test_a_replaced_base_has_that_digest_whatever_the_lock_says(recipe: Recipe, tmp_path: Path) -> None:
    replaced = [Replacement("base", tmp_path, C)]
    for lock in (None, locked(), locked(reference=f"{REFERENCE}-other"), locked(name="other")):
        assert resolve_bases(recipe, lock, replaced) == (Base("base", REFERENCE, C, "replaced"),)


def test_without_a_lock_a_base_has_no_digest(recipe: Recipe) -> None:
    assert resolve_bases(recipe, None, ()) == (Base("base", REFERENCE, None, "lock"),)
    assert resolve_bases(recipe.model_copy(update={"image": None}), locked(), ()) == ()


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        (locked(name="other"), "has no image 'base', only other"),
        (ImageLock("rehearsal", ()), "has no image 'base', only none"),
        (locked(reference="docker.io/library/python:3.12-slim"), "the lock is for docker.io/library/python:3.12-slim"),
        (locked(arm64=A), "is locked for linux/arm64, not for linux/amd64"),
    ],
)
def test_a_lock_that_does_not_fit(recipe: Recipe, lock: ImageLock, reason: str) -> None:
    with pytest.raises(LockError, match=reason) as raised:
        resolve_bases(recipe, lock, ())
    assert "lock" in raised.value.remedy


class FakeRegistry:
    """Serves what ``answers`` has for a repository: an image's content, or the error to raise."""

    def __init__(self, answers: dict[str, CufallbackError | None]) -> None:
        self.answers = answers
        self.pulled: list[str] = []

    def pull(self, reference: Reference, folder: Path, *, platform: str) -> None:
        self.pulled.append(f"{reference} {platform}")
        error = self.answers[reference.repository]
        if error is not None:
            raise error
        top(folder, image(folder))


def fetch(bases: list[Base], registry: FakeRegistry, work: Path, *replaced: Replacement) -> dict[str, Any]:
    pulled = cast(Registry, registry)
    return fetch_bases(bases, replaced, work=work, registry=pulled, recipe=load_recipe("rehearsal"))


def test_an_unreachable_base_leaves_the_others(tmp_path: Path) -> None:
    down = RegistryError("the registry does not answer", remedy="run again")
    registry = FakeRegistry({"a/one": down, "a/two": None})
    bases = [Base("one", "example.com/a/one:1", A, "lock"), Base("two", "example.com/a/two:1", B, "lock")]
    found = fetch(bases, registry, tmp_path)
    assert found == {"one": down, "two": base_folder(tmp_path, B)}
    assert registry.pulled == [f"example.com/a/one@{A} linux/amd64", f"example.com/a/two@{B} linux/amd64"]
    assert not base_folder(tmp_path, A).exists()


def test_what_was_pulled_is_not_pulled_again(tmp_path: Path) -> None:
    registry = FakeRegistry({"a/two": None})
    bases = [Base("two", "example.com/a/two:1", B, "lock")]
    assert fetch(bases, registry, tmp_path) == fetch(bases, registry, tmp_path)
    assert len(registry.pulled) == 1


def test_nothing_is_fetched_for_what_was_given_or_never_locked(tmp_path: Path) -> None:
    registry = FakeRegistry({})
    given = Replacement("given", tmp_path, A)
    bases = [Base("given", "example.com/a/given:1", A, "replaced"), Base("open", "example.com/a/open:1", None, "lock")]
    found = fetch(bases, registry, tmp_path, given)
    assert found["given"] == tmp_path
    assert isinstance(found["open"], ImageError)
    assert "base image open (example.com/a/open:1) is not locked" in found["open"].reason
    assert registry.pulled == []


def test_several_bases_keep_the_order_of_the_recipe(recipe: Recipe) -> None:
    several = with_bases(recipe, "zeta", "alpha")
    lock = ImageLock(
        "rehearsal", tuple(dataclasses.replace(locked().images[0], name=name) for name in ("alpha", "zeta"))
    )
    assert [base.name for base in resolve_bases(several, lock, ())] == ["zeta", "alpha"]
