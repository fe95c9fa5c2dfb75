"""OCI image layouts on disk: descriptors, one image's manifest and config, every blob against its digest.

Field names are those of the OCI image specification 1.1 (descriptor, image layout, manifest and config).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cufallback.errors import ImageError, WorkspaceError
from cufallback.store import open_regular

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAXIMUM_DOCUMENT = 8 << 20  # bytes; registries take 4 MiB for a manifest
_MAXIMUM_FOUND = 256 << 20  # bytes; package lists and metadata of a large image have some 20 MiB
_REMEDY = "build or fetch the image again"


@dataclass(frozen=True)
class Descriptor:
    """What points to a blob. ``digest`` is ``sha256:`` and 64 hex digits, ``size`` in bytes."""

    media_type: str
    digest: str
    size: int

    @property
    def hex(self) -> str:
        """The 64 hex digits."""
        return self.digest.removeprefix("sha256:")

    def to_json(self) -> dict[str, Any]:
        """Return it as records hold it."""
        return {"media_type": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class Image:
    """One image of a layout. ``configuration`` is the config document: architecture, config, history, rootfs."""

    folder: Path
    manifest: Descriptor
    config: Descriptor
    layers: tuple[Descriptor, ...]
    configuration: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The manifest's digest: what a registry calls this image."""
        return self.manifest.digest

    @property
    def size(self) -> int:
        """The bytes of all blobs."""
        return sum(blob.size for blob in (self.manifest, self.config, *self.layers))

    @property
    def platform(self) -> str:
        """Such as ``linux/amd64``."""
        return f"{self.configuration.get('os', '')}/{self.configuration.get('architecture', '')}"

    @property
    def execution(self) -> Mapping[str, Any]:
        """The execution parameters: the config document's ``config``, which may be absent or null."""
        return self.configuration.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        """The config's labels."""
        return dict(self.execution.get("Labels") or {})

    def blob(self, descriptor: Descriptor) -> Path:
        """Return where a blob lies."""
        return blob_path(self.folder, descriptor.digest)


def blob_path(folder: Path, digest: str) -> Path:
    """Return where the blob of a digest lies in a layout."""
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def is_digest(text: object) -> bool:
    """Say whether ``text`` is a digest as used here: ``sha256:`` and 64 hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def read_image(folder: Path, digest: str | None = None, *, platform: str = "linux/amd64") -> Image:
    """Read one image of a layout: the one with ``digest``, or the only one.

    Args:
        folder: an OCI image layout: ``oci-layout``, ``index.json``, ``blobs/``.
        digest: of the image's manifest or of an index that leads to it; None when the layout holds one image.
        platform: which image of an index with several.

    Raises:
        ImageError: no layout, a blob that is missing or not what its digest says, or not exactly one such image.
    """
    if not os.path.isfile(folder / "oci-layout"):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        raise ImageError("is no OCI image layout: there is no file oci-layout", remedy=_REMEDY, where=str(folder))
    top = _document((folder / "index.json"), None, str(folder / "index.json"))
    descriptors = [
        entry for entry in _descriptors(top, "manifests", folder / "index.json") if digest in (None, entry.digest)
    ]
    if digest is not None and is_digest(digest) and not descriptors and blob_path(folder, digest).is_file():
        # Not named at the top, but here: an image of an index, for example.
        data = _document(blob_path(folder, digest), None, digest)
        kind = str(data.get("mediaType", MANIFEST_TYPES[0]))
        descriptors = [Descriptor(kind, digest, blob_path(folder, digest).stat().st_size)]
    if len({entry.digest for entry in descriptors}) != 1:
        asked = f"image {digest}" if digest else "image"
        raise ImageError(
            f"holds {len(descriptors)} instead of one {asked}", remedy="name the digest of one", where=str(folder)
        )
    return _resolve(folder, descriptors[0], platform)


def _resolve(folder: Path, descriptor: Descriptor, platform: str) -> Image:
    path = blob_path(folder, descriptor.digest)
    data = _document(path, descriptor, descriptor.digest)
    if descriptor.media_type in INDEX_TYPES:
        fitting = [
            entry
            for entry, raw in zip(_descriptors(data, "manifests", path), data["manifests"], strict=True)
            if entry.media_type in MANIFEST_TYPES
            and platform in (_platform(raw.get("platform")), None)
            and not _is_attestation(raw)
        ]
        if len(fitting) != 1:
            raise ImageError(
                f"the index has {len(fitting)} images for {platform}", remedy="name another base", where=str(path)
            )
        return _resolve(folder, fitting[0], platform)
    if descriptor.media_type not in MANIFEST_TYPES:
        raise ImageError(f"is no image but {descriptor.media_type!r}", remedy=_REMEDY, where=str(path))
    (config,) = _descriptors({"config": [data.get("config")]}, "config", path)
    configuration = _document(blob_path(folder, config.digest), config, config.digest)
    if not _is_configuration(configuration):
        raise ImageError("the config document of the image is malformed", remedy=_REMEDY, where=str(path))
    layers = tuple(_descriptors(data, "layers", path))
    return Image(folder, descriptor, config, layers, configuration)


def _is_attestation(raw: Mapping[str, Any]) -> bool:
    """Whether an entry of an index is one of BuildKit's attestations, which look like images."""
    annotations = raw.get("annotations")
    return isinstance(annotations, dict) and "vnd.docker.reference.type" in annotations


def _is_configuration(data: Mapping[str, Any]) -> bool:
    """Whether the fields of a config document that are read here are of the specification's types."""

    def texts(values: object) -> bool:
        return isinstance(values, dict | list) and all(
            isinstance(value, str) for value in (values.values() if isinstance(values, dict) else values)
        )

    execution = data.get("config")
    if execution is None:
        execution = {}
    return (
        all(isinstance(data.get(key, ""), str) for key in ("os", "architecture"))
        and isinstance(execution, dict)
        and isinstance(execution.get("User") or "", str)
        and all(
            execution.get(key) is None or (isinstance(execution[key], kind) and texts(execution[key]))
            for key, kind in (("Labels", dict), ("Env", list), ("Entrypoint", list))
        )
    )


def _platform(raw: object) -> str | None:
    return f"{raw.get('os')}/{raw.get('architecture')}" if isinstance(raw, dict) else None


def _descriptors(data: Mapping[str, Any], key: str, path: Path) -> list[Descriptor]:
    rows = data.get(key)
    if not isinstance(rows, list):
        raise ImageError(f"has no list {key!r}", remedy=_REMEDY, where=str(path))
    found = []
    for row in rows:
        if (
            not isinstance(row, dict)
            or not is_digest(row.get("digest"))
            or type(row.get("size")) is not int
            or not isinstance(row.get("mediaType"), str)
        ):
            raise ImageError(f"{key}: not a descriptor with a sha256 digest", remedy=_REMEDY, where=str(path))
        found.append(Descriptor(row["mediaType"], row["digest"], row["size"]))
    return found


def _document(path: Path, descriptor: Descriptor | None, name: str) -> dict[str, Any]:
    """Return the JSON object in a file after holding its bytes to the descriptor."""
    try:
        with open_regular(path) as file:
            content = file.read(_MAXIMUM_DOCUMENT + 1)
    except (OSError, WorkspaceError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        raise ImageError(f"{name} cannot be read: {why}", remedy=_REMEDY, where=str(path)) from error
    if len(content) > _MAXIMUM_DOCUMENT:
        raise ImageError(f"{name} is larger than any manifest", remedy=_REMEDY, where=str(path))
    if descriptor is not None:
        actual = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if (actual, len(content)) != (descriptor.digest, descriptor.size):
            raise ImageError(
                f"has digest {actual} and {len(content)} bytes, not {descriptor.digest} and {descriptor.size}",
                remedy=_REMEDY,
                where=str(path),
            )
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{name} is not JSON: {error}", remedy=_REMEDY, where=str(path)) from error
    if not isinstance(data, dict):
        raise ImageError(f"{name} is no JSON object", remedy=_REMEDY, where=str(path))
    return data


def check_blobs(image: Image) -> None:
    """Hold every layer's bytes to its digest and size; manifest and config were when the image was read.

    Raises:
        ImageError: naming the first blob that is missing, truncated or altered.
    """
    for layer in image.layers:
        path = image.blob(layer)
        try:
            with open_regular(path) as file:
                actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except (OSError, WorkspaceError) as error:
            why = error.strerror if isinstance(error, OSError) else error.reason
            raise ImageError(f"layer {layer.digest} cannot be read: {why}", remedy=_REMEDY, where=str(path)) from error
        if actual != layer.digest or path.stat().st_size != layer.size:
            raise ImageError(
                f"the layer has digest {actual} and {path.stat().st_size} bytes, not {layer.digest} and {layer.size}",
                remedy=_REMEDY,
                where=str(path),
            )


@contextmanager
def _opened_layer(image: Image, layer: Descriptor) -> Iterator[IO[bytes]]:
    path = image.blob(layer)
    with open_regular(path) as raw:
        size = os.fstat(raw.fileno()).st_size
        if size != layer.size:  # a tar archive that ends between two members does not show it
            raise ImageError(
                f"layer {layer.digest} has {size} bytes, not {layer.size}", remedy=_REMEDY, where=str(path)
            )
        if layer.media_type.endswith(("+zstd", ".zstd")):
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
                yield io.BufferedReader(reader, 1 << 20)
        elif layer.media_type.endswith(("+gzip", ".gzip")):
            import gzip

            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield io.BufferedReader(unzipped, 1 << 20)
        else:
            yield raw


def find_files(image: Image, pattern: re.Pattern[str], *, limit: int = 32 << 20) -> dict[str, bytes]:
    """Return path → content of the regular files of the finished file system whose path matches ``pattern`` whole.

    Layers are applied from the bottom: a later one replaces, and its whiteouts remove what lies below it (OCI image
    specification, "Layer Filesystem Changeset").

    Args:
        image: the image.
        pattern: for paths without a leading slash, such as ``var/lib/dpkg/status``.
        limit: bytes that one such file may have.

    Raises:
        ImageError: a layer is no tar archive of its media type, a file is larger than ``limit``, or a matching path is
            a hard link to a file that does not match, whose content is not at hand.
    """
    import zlib

    import zstandard

    found: dict[str, bytes] = {}
    for layer in image.layers:
        own: dict[str, bytes] = {}
        try:
            with _opened_layer(image, layer) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    _apply(found, own, member, archive, pattern, limit)
        except (
            *(tarfile.TarError, OSError, WorkspaceError, EOFError),
            *(zlib.error, zstandard.ZstdError, ValueError, OverflowError, RecursionError),
        ) as error:
            raise ImageError(
                f"layer {layer.digest} cannot be read as {layer.media_type}: {error}",
                remedy=_REMEDY,
                where=str(image.blob(layer)),
            ) from error
        found |= own
    return found


def _apply(
    below: dict[str, bytes],
    own: dict[str, bytes],
    member: tarfile.TarInfo,
    archive: tarfile.TarFile,
    pattern: re.Pattern[str],
    limit: int,
) -> None:
    """Apply one member of a layer: to its ``own`` files and to those ``below``, which alone its whiteouts hide."""
    path = _normal(member.name)
    folder, _, name = path.rpartition("/")
    if name == ".wh..wh..opq":
        _drop_below(below, folder)
        return
    if name.startswith(".wh."):
        gone = name.removeprefix(".wh.")
        if gone:
            _drop(below, f"{folder}/{gone}" if folder else gone)
        return
    if member.isdir():
        below.pop(path, None)
        own.pop(path, None)
        return
    linked = own.get(_normal(member.linkname), below.get(_normal(member.linkname))) if member.islnk() else None
    _drop(below, path)
    _drop(own, path)
    if not pattern.fullmatch(path):
        return
    if member.islnk():
        if linked is None:
            raise ImageError(
                f"{path} is a hard link to {member.linkname}, which was not read", remedy=_REMEDY, where=path
            )
        own[path] = linked
    elif member.isreg():
        if member.size > limit:
            raise ImageError(f"{path} has {member.size} bytes, more than {limit}", remedy=_REMEDY, where=path)
        if member.size + sum(len(text) for texts in (below, own) for text in texts.values()) > _MAXIMUM_FOUND:
            raise ImageError(f"more than {_MAXIMUM_FOUND >> 20} MiB of such files", remedy=_REMEDY, where=path)
        content = archive.extractfile(member)
        own[path] = content.read() if content is not None else b""


def _normal(name: str) -> str:
    """Return the path of a member from the root of the file system, without a leading slash."""
    return posixpath.normpath(f"/{name}").lstrip("/")


def _drop(files: dict[str, bytes], path: str) -> None:
    files.pop(path, None)
    _drop_below(files, path)


def _drop_below(files: dict[str, bytes], folder: str) -> None:
    for path in [path for path in files if path.startswith(f"{folder}/" if folder else "")]:
        del files[path]
