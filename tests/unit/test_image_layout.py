"""OCI layouts: which image is read, every kind of damage, and the files that are left when all layers are applied."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.image_rooms import (
    CONFIG,
    DIGEST,
    DOCKER,
    INDEX,
    LAYER,
    MANIFEST,
    PACKERS,
    Member,
    blob,
    configuration,
    document,
    image,
    layer,
    top,
)

from cufallback.errors import ImageError
from cufallback.image.layout import blob_path, check_blobs, find_files, is_digest, read_image

EVERYTHING = re.compile(r".*", re.DOTALL)
ARM = {"os": "linux", "architecture": "arm64"}
AMD = {"os": "linux", "architecture": "amd64"}
FILE = layer(("etc/os-release", b"ID=demo\n"))


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "layout"


def indexed(layout: Path, *, index_type: str = INDEX, manifest_type: str = MANIFEST) -> tuple[dict[str, Any], ...]:
    """An index with an image for two platforms and BuildKit's attestation of one; return all four descriptors."""
    amd = {**image(layout, [FILE], manifest_type=manifest_type), "platform": AMD}
    arm = {**image(layout, [FILE], platform="linux/arm64", manifest_type=manifest_type), "platform": ARM}
    note = document(layout, {"layers": [], "config": document(layout, {}, CONFIG)}, MANIFEST)
    note |= {"platform": AMD, "annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    rows = (note, arm, amd)
    found = document(layout, {"schemaVersion": 2, "mediaType": index_type, "manifests": rows}, index_type)
    top(layout, found)
    return found, amd, arm, note


def test_the_only_image_needs_no_digest(layout: Path) -> None:
    found = image(layout, [FILE], config={"Labels": {"a": "b"}, "User": "7"})
    top(layout, found)
    read = read_image(layout)
    assert (read.digest, read.platform, read.labels) == (found["digest"], "linux/amd64", {"a": "b"})
    assert read == read_image(layout, found["digest"])
    assert read.blob(read.config).is_file()
    assert read.manifest.to_json() == {"media_type": MANIFEST, "digest": found["digest"], "size": found["size"]}
    check_blobs(read)


@pytest.mark.parametrize(
    "types",
    [
        (INDEX, MANIFEST),
        (f"{DOCKER}distribution.manifest.list.v2+json", f"{DOCKER}distribution.manifest.v2+json"),
    ],
)
def test_an_index_gives_the_image_of_the_platform_and_no_attestation(layout: Path, types: tuple[str, str]) -> None:
    index, amd, arm, _note = indexed(layout, index_type=types[0], manifest_type=types[1])
    assert read_image(layout).digest == amd["digest"]
    assert read_image(layout, index["digest"]).digest == amd["digest"]
    assert read_image(layout, index["digest"], platform="linux/arm64").digest == arm["digest"]
    assert read_image(layout, arm["digest"]).digest == arm["digest"], "named by its own digest, not at the top"
    with pytest.raises(ImageError, match="the index has 0 images for linux/riscv64"):
        read_image(layout, platform="linux/riscv64")


def test_several_images_at_the_top_need_a_digest(layout: Path) -> None:
    one, other = image(layout, [FILE]), image(layout, [])
    top(layout, one, other)
    with pytest.raises(ImageError, match="holds 2 instead of one image"):
        read_image(layout)
    assert read_image(layout, other["digest"]).digest == other["digest"]
    top(layout, one, {**one, "annotations": {"org.opencontainers.image.ref.name": "again"}})
    assert read_image(layout).digest == one["digest"], "one image under two names is one"


@pytest.mark.parametrize("digest", [DIGEST, "sha256:x", "", "../../oci-layout", "sha256:../../../oci-layout"])
def test_an_image_that_is_not_there(layout: Path, digest: str) -> None:
    top(layout, image(layout))
    with pytest.raises(ImageError, match="holds 0 instead of one image"):
        read_image(layout, digest)


@pytest.mark.parametrize(
    "text", [DIGEST[:-1], DIGEST.upper(), f"{DIGEST}\n", DIGEST[7:], f"sha512:{'d' * 128}", 7, None]
)
def test_what_is_no_digest(text: object) -> None:
    assert not is_digest(text)


# Damage to files. The blob is the manifest, the config or the layer in turn.


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "altered": _alter,
    "a pipe": _pipe,
    "a folder": _folder,
    "a dangling link": _dangling,
    "a link to itself": _circle,
}


@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_blob_is_named(layout: Path, damage: str, which: str) -> None:
    top(layout, image(layout, [FILE]))
    read = read_image(layout)
    digest = {"manifest": read.digest, "config": read.config.digest, "layer": read.layers[0].digest}[which]
    DAMAGE[damage](blob_path(layout, digest))
    with pytest.raises(ImageError) as raised:
        check_blobs(read_image(layout))
    assert digest in raised.value.reason + str(raised.value.where)


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
@pytest.mark.parametrize("damage", ["missing", "a pipe", "a folder", "a dangling link", "a link to itself"])
def test_a_layout_without_its_own_files(layout: Path, name: str, damage: str) -> None:
    top(layout, image(layout))
    DAMAGE[damage](layout / name)
    with pytest.raises(ImageError):
        read_image(layout)


@pytest.mark.parametrize("name", ["nothing", "x" * 5000, "a/" * 3000])
def test_a_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match="no OCI image layout"):
        read_image(tmp_path / name)


NO_DOCUMENT = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\xff",
    "no object": b"[]",
    "null": b"null",
    "deep": b'{"a":' * 100_000,
    "deep lists": b"[" * 100_000,
    "a number without end": b'{"size": ' + b"9" * 5000 + b"}",
    "huge": b'{"a": "' + b"x" * (8 << 20) + b'"}',
}


@pytest.mark.parametrize("content", NO_DOCUMENT.values(), ids=NO_DOCUMENT)
@pytest.mark.parametrize("which", ["index.json", "index", "manifest", "config"])
def test_a_document_that_is_none(layout: Path, which: str, content: bytes) -> None:
    """Digest and size are right throughout: only the content is at fault."""
    if which == "config":
        value = {"layers": [], "config": blob(layout, content, CONFIG)}
        top(layout, document(layout, value, MANIFEST))
    else:
        top(layout, blob(layout, content, INDEX if which == "index" else MANIFEST))
    if which == "index.json":
        (layout / "index.json").write_bytes(content)
    with pytest.raises(ImageError):
        read_image(layout)


ODD: dict[str, Any] = {
    "nothing": None, "a number": 7, "a half": 0.5, "true": True, "a text": "x", "a list": [7], "an object": {"a": 7},
}  # fmt: skip
DESCRIPTOR_FIELDS = [(key, name) for key in ("mediaType", "digest", "size") for name in ODD]


@pytest.mark.parametrize(("key", "name"), DESCRIPTOR_FIELDS)
@pytest.mark.parametrize("place", ["index.json", "index", "config", "layers"])
def test_a_descriptor_with_a_field_of_another_kind(layout: Path, place: str, key: str, name: str) -> None:
    found = image(layout, [FILE])
    value = json.loads(blob_path(layout, found["digest"]).read_bytes())
    if place == "index.json":
        found[key] = ODD[name]
    elif place == "index":
        row = {**found, "platform": AMD, key: ODD[name]}
        found = document(layout, {"manifests": [row]}, INDEX)
    else:
        (value[place] if place == "config" else value[place][0])[key] = ODD[name]
        found = document(layout, value, MANIFEST)
    top(layout, found)
    if key == "mediaType" and name == "a text" and place in ("config", "layers"):
        read_image(layout)  # any text is a media type; what reads the layer must know it
        return
    with pytest.raises(ImageError):
        check_blobs(read_image(layout))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("place", ["manifests", "manifests/0", "config", "layers", "layers/0", "index.json"])
def test_a_list_or_descriptor_of_another_kind(layout: Path, place: str, odd: Any) -> None:
    found = image(layout, [FILE])
    value = json.loads(blob_path(layout, found["digest"]).read_bytes())
    key, _, within = place.partition("/")
    if key == "index.json":
        top(layout)
        (layout / "index.json").write_text(json.dumps(odd))
    else:
        value = {"manifests": [found]} if key == "manifests" else value
        value[key] = [odd] if within else odd
        top(layout, document(layout, value, INDEX if key == "manifests" else MANIFEST))
    with pytest.raises(ImageError):
        read_image(layout)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("key", ["platform", "annotations", "artifactType"])
def test_odd_entries_of_an_index_do_no_harm(layout: Path, key: str, odd: Any) -> None:
    good = {**image(layout, [FILE]), "platform": AMD}
    other = {**image(layout, []), "platform": ARM, key: odd}
    top(layout, document(layout, {"manifests": [other, good]}, INDEX))
    assert read_image(layout).digest == good["digest"]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_annotations_of_the_image_itself_are_an_error_or_nothing(layout: Path, odd: Any) -> None:
    good = {**image(layout, [FILE]), "platform": AMD, "annotations": odd}
    top(layout, document(layout, {"manifests": [good]}, INDEX))
    assert read_image(layout).digest == good["digest"]


CONFIGS = [
    (key, name) for key in ("config", "config/Labels", "config/Env", "config/Labels/a", "config/Env/0") for name in ODD
]
CONFIGS += [(key, name) for key in ("config/User", "os", "architecture") for name in ODD]
HARMLESS = {
    *(("config", name) for name in ("nothing", "an object")),
    *((f"config/{name}", "nothing") for name in ("Labels", "Env", "User")),
    *((name, "a text") for name in ("config/Labels/a", "config/Env/0", "config/User", "os", "architecture")),
}


@pytest.mark.parametrize(("key", "name"), CONFIGS)
def test_a_config_document_with_a_field_of_another_kind(layout: Path, key: str, name: str) -> None:
    value = configuration({"Labels": {"a": "b"}, "Env": ["A=1"]})
    spot: Any = value
    *parents, last = key.split("/")
    for parent in parents:
        spot = spot[parent]
    spot[int(last) if last.isdigit() else last] = ODD[name]
    top(layout, document(layout, {"layers": [], "config": document(layout, value, CONFIG)}, MANIFEST))
    if (key, name) in HARMLESS:
        read = read_image(layout)
        assert isinstance(read.labels, dict)
        assert isinstance(read.execution, dict)
        return
    with pytest.raises(ImageError, match="config"):
        read_image(layout)


@pytest.mark.parametrize("kind", [CONFIG, LAYER, "", "application/vnd.oci.empty.v1+json"])
def test_what_is_no_image(layout: Path, kind: str) -> None:
    found = image(layout)
    top(layout, {**found, "mediaType": kind})
    with pytest.raises(ImageError, match="is no image but"):
        read_image(layout)


# Files of the finished file system.


def files(
    layout: Path, layers: list[bytes], media_type: str = LAYER, pattern: re.Pattern[str] = EVERYTHING
) -> dict[str, bytes]:
    top(layout, image(layout, layers, media_type=media_type))
    return find_files(read_image(layout), pattern)


@pytest.mark.parametrize("media_type", PACKERS)
def test_layers_of_each_media_type_are_read(layout: Path, media_type: str) -> None:
    assert files(layout, [FILE, layer(("a", b"1"))], media_type) == {"etc/os-release": b"ID=demo\n", "a": b"1"}


def test_a_layer_of_several_zstd_frames_is_read_whole(layout: Path) -> None:
    tar = layer(*((f"f{number}", bytes(1000)) for number in range(20)))
    frames = b"".join(zstandard.compress(tar[start : start + 3000]) for start in range(0, len(tar), 3000))
    value = {"config": document(layout, configuration(), CONFIG), "layers": [blob(layout, frames, f"{LAYER}+zstd")]}
    top(layout, document(layout, value, MANIFEST))
    assert len(find_files(read_image(layout), EVERYTHING)) == 20


LAYERS: dict[str, tuple[list[bytes], dict[str, bytes]]] = {
    "none": ([], {}),
    "an empty one": ([layer()], {}),
    "replaced": ([layer(("a", b"1")), layer(("a", b"2"))], {"a": b"2"}),
    "twice in one": ([layer(("a", b"1"), ("a", b"2"))], {"a": b"2"}),
    "whiteout": ([layer(("d/a", b"1"), ("d/b", b"2")), layer(("d/.wh.a", b""))], {"d/b": b"2"}),
    "whiteout at the root": ([layer(("a", b"1"), ("b", b"2")), layer((".wh.a", b""))], {"b": b"2"}),
    "whiteout of a folder": ([layer(("d/a", b"1"), ("da", b"2")), layer((".wh.d", b""))], {"da": b"2"}),
    "whiteout of nothing": ([layer(("a", b"1")), layer((".wh.b", b""))], {"a": b"1"}),
    "whiteout without a name": ([layer(("a", b"1"), ("d/b", b"2")), layer((".wh.", b""))], {"a": b"1", "d/b": b"2"}),
    "whiteout and file in one": ([layer(("a", b"1")), layer(("a", b"2"), (".wh.a", b""))], {"a": b"2"}),
    "file and whiteout in one": ([layer(("a", b"1")), layer((".wh.a", b""), ("a", b"2"))], {"a": b"2"}),
    "opaque": (
        [layer(("d/a", b"1"), ("e", b"2")), layer(("d/.wh..wh..opq", b""), ("d/b", b"3"))],
        {"e": b"2", "d/b": b"3"},
    ),
    "opaque, last in its layer": (
        [layer(("d/a", b"1")), layer(("d/b", b"3"), ("d/.wh..wh..opq", b""))],
        {"d/b": b"3"},
    ),
    "opaque root": ([layer(("a", b"1"), ("d/b", b"2")), layer((".wh..wh..opq", b""))], {}),
    "back again": ([layer(("a", b"1")), layer((".wh.a", b"")), layer(("a", b"3"))], {"a": b"3"}),
    "link over file": ([layer(("a", b"1")), layer(("a", "b"))], {}),
    "file over folder": ([layer(("a/b", b"1")), layer(("a", b"2"))], {"a": b"2"}),
    "folder over file": ([layer(("a", b"1")), layer(("a", None))], {}),
    "folder over folder": ([layer(("a/b", b"1")), layer(("a", None))], {"a/b": b"1"}),
    "hard link": ([layer(("a", b"1")), layer(("b", "a"), hard=True)], {"a": b"1", "b": b"1"}),
    "hard link, ./": ([layer(("./a", b"1")), layer(("./b", "./a"), hard=True)], {"a": b"1", "b": b"1"}),
    "spellings": (
        [layer(("./a", b"1"), ("/b", b"2"), ("././c", b"3"), ("d//e", b"4"), ("x/../f", b"5"), (".", None))],
        {"a": b"1", "b": b"2", "c": b"3", "d/e": b"4", "f": b"5"},
    ),
    "spelled otherwise": ([layer(("./a", b"1")), layer(("/.wh.a", b""))], {}),
    "no way out": ([layer(("../../a", b"1"))], {"a": b"1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("media_type", [LAYER, f"{LAYER}+zstd"])
def test_layers_are_applied_as_the_specification_says(layout: Path, name: str, media_type: str) -> None:
    layers, expected = LAYERS[name]
    assert files(layout, layers, media_type) == expected


def test_only_whole_paths_that_match_are_read(layout: Path) -> None:
    made = layer(("a/b", b"1"), ("a/bc", b"2"), ("x/a/b", b"3"))
    assert files(layout, [made], pattern=re.compile(r"a/b")) == {"a/b": b"1"}


def test_a_hard_link_to_what_was_not_read_is_an_error_and_never_an_absent_file(layout: Path) -> None:
    made = [layer(("kept/elsewhere", b"1")), layer(("wanted", "kept/elsewhere"), hard=True)]
    with pytest.raises(ImageError, match="wanted is a hard link to kept/elsewhere"):
        files(layout, made, pattern=re.compile("wanted"))


def test_a_file_larger_than_asked_for_is_not_read(layout: Path) -> None:
    top(layout, image(layout, [layer(("a", bytes(11)))]))
    assert find_files(read_image(layout), EVERYTHING, limit=11)
    with pytest.raises(ImageError, match="a has 11 bytes, more than 10"):
        find_files(read_image(layout), EVERYTHING, limit=10)
    assert find_files(read_image(layout), re.compile("b"), limit=10) == {}


NO_LAYER = {
    "no archive": b"\x01" * 2000,
    "empty": b"",
    "text": b"this is no archive" * 99,
}


@pytest.mark.parametrize("media_type", [*PACKERS, "application/x-odd"])
@pytest.mark.parametrize("content", NO_LAYER.values(), ids=NO_LAYER)
def test_a_layer_that_is_not_what_its_media_type_says(layout: Path, media_type: str, content: bytes) -> None:
    value = {"config": document(layout, configuration(), CONFIG), "layers": [blob(layout, content, media_type)]}
    top(layout, document(layout, value, MANIFEST))
    with pytest.raises(ImageError, match=f"cannot be read as {re.escape(media_type)}"):
        find_files(read_image(layout), EVERYTHING)


CUTS = [0.05, 0.3, 0.5, 0.8, 0.95]


@pytest.mark.parametrize("media_type", PACKERS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_layer_cut_short_on_disk_is_noticed(layout: Path, media_type: str, cut: float) -> None:
    """Wherever it was cut: between two members too, where a tar archive alone does not show it."""
    top(
        layout, image(layout, [layer(*((f"f{number}", os.urandom(512)) for number in range(9)))], media_type=media_type)
    )
    read = read_image(layout)
    path = read.blob(read.layers[0])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ImageError):
        find_files(read, EVERYTHING)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 10**9),
    byte=st.integers(0, 255),
    media_type=st.sampled_from([LAYER, f"{LAYER}+gzip", f"{LAYER}+zstd"]),
)
def test_a_layer_with_one_other_byte_is_read_or_refused(tmp_path: Path, at: int, byte: int, media_type: str) -> None:
    layout = tmp_path / "altered"
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("ä" * 120)
        member.size, member.pax_headers = 3, {"SCHILY.xattr.user.a": "1"}
        archive.addfile(member, io.BytesIO(b"abc"))
    content = bytearray(PACKERS[media_type](tar.getvalue()))
    content[at % len(content)] = byte
    value = {"config": document(layout, configuration(), CONFIG), "layers": [blob(layout, bytes(content), media_type)]}
    top(layout, document(layout, value, MANIFEST))
    with contextlib.suppress(ImageError):  # and no other
        find_files(read_image(layout), EVERYTHING)


NAMES = ("a", "b", "d/a", "d/b", "d/e/a")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("file"), st.sampled_from(NAMES), st.binary(max_size=3)),
        st.tuples(st.just("whiteout"), st.sampled_from((*NAMES, "d", "d/e")), st.just(b"")),
        st.tuples(st.just("opaque"), st.sampled_from(("d", "d/e")), st.just(b"")),
        st.tuples(st.just("link"), st.sampled_from(NAMES), st.just(b"")),
    ),
    max_size=6,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stacks=st.lists(STEPS, max_size=4))
@example(stacks=[[("file", "d/a", b"1")], [("file", "d/b", b"2"), ("opaque", "d", b"")]])
def test_any_layers_give_what_a_simple_model_says(tmp_path: Path, stacks: list[list[tuple[str, str, bytes]]]) -> None:
    """The model: of each layer first what it removes from those below, then what it holds itself, the last one wins."""
    model: dict[str, bytes] = {}
    archives = []
    for steps in stacks:
        members: list[Member] = []
        own: dict[str, bytes] = {}
        for kind, path, content in steps:
            folder, _, name = path.rpartition("/")
            if kind == "file":
                members.append((path, content))
                own[path] = content
                model.pop(path, None)
            elif kind == "link":
                members.append((path, "elsewhere"))
                own.pop(path, None)
                model.pop(path, None)
            elif kind == "opaque":
                members.append((f"{path}/.wh..wh..opq", b""))
                model = {key: value for key, value in model.items() if not key.startswith(f"{path}/")}
            else:
                members.append((f"{folder}/.wh.{name}" if folder else f".wh.{name}", b""))
                model = {key: value for key, value in model.items() if key != path and not key.startswith(f"{path}/")}
        model |= own
        archives.append(layer(*members))
    assert files(tmp_path / "layout", archives) == model
