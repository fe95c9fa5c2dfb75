"""A registry, spoken to through the program ``oras``: manifests, images, referrers, tags.

Everything is addressed by digest, and what comes back is held to it. Credentials are oras's matter: it reads the
docker configuration ($DOCKER_CONFIG/config.json and its helpers), so none ever stands in an argument. Referrers are
those of the OCI distribution specification 1.1; where a registry lacks their API, oras keeps them in an index under
the tag ``sha256-<hex>`` ("Referrers Tag Schema").
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cufallback.errors import ImageError, RegistryError, UsageError
from cufallback.image.artifact import TITLE, is_named, name_in_index, write_cosign, write_referrer
from cufallback.image.layout import INDEX_TYPES, Descriptor, Image, blob_path, check_blobs, is_digest, read_image
from cufallback.image.oras import QUESTION_SECONDS, TRANSFER_SECONDS, Oras
from cufallback.image.reference import Reference
from cufallback.process import Runner
from cufallback.store import discard, sha256_file, workspace_errors, write_atomic
from cufallback.tomlplace import printable

# One blob after the other: when two at once fail, oras 1.2.0 ends in a panic of its own and the reason is lost.
_COPY = ("cp", "--no-tty", "--concurrency", "1")
_OTHER_BASE = "name another image"


@dataclass(frozen=True)
class Referrer:
    """One document that refers to an image. ``digest`` is that of its manifest."""

    digest: str
    artifact_type: str
    annotations: Mapping[str, str]


class Registry:
    """Registries, through oras >= 1.2.

    Args:
        runner: starts oras.
        log: file that receives each command and its redacted output, or None.
        plain_http: speak http instead of https; None: only with registries on this machine, as Docker does.
        sleep: waits that many seconds between attempts.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        log: Path | None,
        plain_http: bool | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._oras = Oras(runner, log=log, sleep=sleep)
        self._plain_http = plain_http

    def version(self) -> str:
        """Return oras's version, such as ``1.2.0``.

        Raises:
            ToolchainError: there is no oras, or it is older than 1.2.
        """
        return self._oras.version()

    def digest_of(self, reference: Reference) -> Descriptor | None:
        """Return what a tag or digest names now, or None when the registry has no such tag, digest or repository.

        Raises:
            RegistryError: the registry could not be asked.
        """
        arguments = ["manifest", "fetch", "--descriptor", *self._http(reference), _address(reference)]
        output = self._oras.ask(reference, arguments)
        if output is None:
            return None
        data = _json_object(reference, output)
        digest, size, media_type = (data.get(key) for key in ("digest", "size", "mediaType"))
        if not is_digest(digest) or type(size) is not int or not isinstance(media_type, str):
            raise _odd(reference, "gives no media type, sha256 digest and size for it")
        if reference.digest not in (None, digest):
            raise _odd(reference, f"names {digest} instead")
        return Descriptor(media_type, str(digest), size)

    def manifest(self, reference: Reference) -> bytes:
        """Return the bytes of a manifest or index.

        Raises:
            RegistryError: it is not there, or its bytes do not have the digest that ``reference`` names.
        """
        return self._content(reference, "manifest", reference.digest)

    def blob(self, reference: Reference, digest: str) -> bytes:
        """Return the bytes of a blob of a repository: a config or a small document; images go by :meth:`pull`.

        Raises:
            RegistryError: it is not there, or its bytes do not have that digest.
        """
        return self._content(reference.at(digest), "blob", digest)

    def configuration(self, reference: Reference, manifest: bytes) -> dict[str, Any]:
        """Return the config document of an image: os, architecture, config, history, rootfs.

        Args:
            reference: of the image; its repository has the blob.
            manifest: the image's manifest.

        Raises:
            ImageError: the manifest names no config, or it is no JSON object.
            RegistryError: the config is not there, or its bytes have another digest.
        """
        where = str(reference)
        config = _document(manifest, where).get("config")
        if not isinstance(config, dict) or not is_digest(config.get("digest")):
            raise ImageError("is no image: its manifest names no config", remedy=_OTHER_BASE, where=where)
        return _document(self.blob(reference, config["digest"]), where)

    def pull(self, reference: Reference, folder: Path, *, platform: str) -> Image:
        """Copy one image into an OCI layout at ``folder`` and return it; of an index only the image for ``platform``.

        The index lies beside it as a blob, so that :func:`read_image` finds the image by either digest. What an
        interrupted pull has fetched is kept in a hidden folder beside the target and not fetched again.

        Args:
            reference: with the digest of a manifest or an index.
            folder: replaced as a whole when it does not hold the image already.
            platform: such as ``linux/amd64``.

        Raises:
            RegistryError: the registry lacks it, could not be reached, or sent other bytes.
            ImageError: there is no single image for the platform, or a layer is not what the manifest says.
        """
        digest = _digest_in(reference)
        if (folder / "oci-layout").is_file():
            try:
                present = _checked(folder, digest, platform)
            except ImageError:
                pass  # another image, or a damaged one: fetched anew
            else:
                return present
        content = self.manifest(reference)
        wanted = _image_digest(reference, content, platform)
        partial = folder.with_name(f".{folder.name}.partial")
        with workspace_errors(folder):
            partial.mkdir(parents=True, exist_ok=True)
            options = ["--to-oci-layout", *self._http(reference, "from-")]
            self._oras.run(
                reference,
                [*_COPY, *options, f"{reference.named}@{wanted}", f"{partial}@{wanted}"],
                seconds=TRANSFER_SECONDS,
                names={str(partial): folder.name},
            )
            write_atomic(blob_path(partial, digest), content)
            try:
                # An interrupted pull of another image may have left its name and blobs here as well.
                name_in_index(partial, read_image(partial, wanted, platform=platform).manifest)
                _checked(partial, digest, platform)
            except ImageError:
                discard(partial)
                raise
            discard(partial / "ingest")
            discard(folder)
            partial.rename(folder)
        return read_image(folder, digest, platform=platform)

    def push(self, folder: Path, digest: str, to: Reference) -> None:
        """Copy what ``digest`` names in an OCI layout into a repository, under its digest and no tag.

        Blobs that the registry has are not sent again.

        Args:
            folder: the layout; its index.json names the digest.
            digest: of an image or index.
            to: whose registry and repository receive it; its tag is not touched.

        Raises:
            ImageError: the layout's index.json does not name the digest.
            RegistryError: the registry refused it or could not be reached.
        """
        # oras would say "not found", as if the registry lacked something.
        if not is_named(folder, digest):
            raise ImageError(f"index.json does not name {digest}", remedy="build the image again", where=str(folder))
        self._copy_in(folder, digest, to.at(digest))

    def tag(self, reference: Reference, tag: str) -> None:
        """Make a tag name the digest of ``reference``, whatever it named before.

        Raises:
            RegistryError: the registry refused it or could not be reached.
        """
        target = reference.at(_digest_in(reference))
        self._oras.run(target, ["tag", *self._http(target), str(target), tag])

    def attach(
        self, subject: Reference, file: Path, *, artifact_type: str, media_type: str, annotations: Mapping[str, str]
    ) -> str:
        """Attach a file to an image as an OCI 1.1 referrer and return the digest of the referrer's manifest.

        The manifest holds nothing but its arguments: no time of its own. The same file attached again is the same
        referrer.

        Args:
            subject: the image, by digest.
            file: the document; its name becomes the title under which ``oras pull`` writes it.
            artifact_type: what kind of document refers to the image.
            media_type: of the file.
            annotations: of the manifest.

        Raises:
            RegistryError: the subject is not in the registry, or the registry refused or could not be reached.
        """
        target = subject.at(_digest_in(subject))
        found = self.digest_of(target)
        if found is None:
            raise RegistryError(
                "the registry does not have the image that a document is to be attached to",
                remedy="push the image first",
                where=str(target),
            )
        with _scratch() as layout:
            digest = write_referrer(
                layout,
                subject=found,
                file=file,
                artifact_type=artifact_type,
                media_type=media_type,
                annotations=annotations,
            )
            self.push(layout, digest, target)
        return digest

    def referrers(self, subject: Reference) -> list[Referrer]:
        """Return every document that refers to an image directly, sorted by artifact type and digest.

        Raises:
            RegistryError: the image is not there, or the registry could not be asked.
        """
        target = subject.at(_digest_in(subject))
        output = self._oras.run(target, ["discover", "--format", "json", *self._http(target), str(target)])
        data = _json_object(target, output)
        # oras 1.2 calls the list "manifests", 1.3 "referrers".
        rows = data.get("referrers", data.get("manifests")) or []
        found = [
            Referrer(row["digest"], str(row.get("artifactType", "")), dict(row.get("annotations") or {}))
            for row in rows
            if isinstance(row, dict) and is_digest(row.get("digest"))
        ]
        if len(found) != len(rows):
            raise _odd(target, "lists a referrer without a sha256 digest")
        return sorted(found, key=lambda referrer: (referrer.artifact_type, referrer.digest))

    def fetch(self, reference: Reference, digest: str) -> bytes:
        """Return the document of a referrer: the only layer of the manifest with ``digest``.

        Raises:
            RegistryError: it is not there, is no manifest with one layer, or its bytes have another digest.
        """
        return self.blob(reference, self._document_of(reference.at(digest)))

    def save(self, reference: Reference, digest: str, file: Path) -> None:
        """As :meth:`fetch`, but into ``file``: for documents too large for memory.

        Raises:
            RegistryError: as for :meth:`fetch`.
        """
        document = self._document_of(reference.at(digest))
        self._save(reference.at(document), "blob", document, file, seconds=TRANSFER_SECONDS)

    def _document_of(self, manifest: Reference) -> str:
        """Return the digest of a referrer's document."""
        layers = _layers(manifest, self.manifest(manifest))
        if len(layers) != 1:
            raise _odd(manifest, f"has a manifest with {len(layers)} layers where a document has one")
        return str(layers[0]["digest"])

    def title(self, reference: Reference, digest: str) -> str:
        """Return the file name of a referrer's document, empty when it has none.

        Raises:
            RegistryError: as for :meth:`fetch`.
        """
        manifest = reference.at(digest)
        layers = _layers(manifest, self.manifest(manifest))
        return str((layers[0].get("annotations") or {}).get(TITLE, "")) if len(layers) == 1 else ""

    def attach_cosign(self, subject: Reference, envelopes: Sequence[Path]) -> str | None:
        """Put DSSE envelopes where ``cosign verify-attestation`` looks; return the digest of that manifest.

        cosign 2.5 keeps them as layers of one manifest under the tag ``sha256-<hex>.att``. Layers that are there
        stay; an envelope that is there is not added again. None when there are none at all.

        Args:
            subject: the image, by digest.
            envelopes: files, each a DSSE envelope of an in-toto statement about the image.

        Raises:
            AttestationError: an envelope is malformed or speaks of something else.
            RegistryError: the registry refused or could not be reached.
        """
        image = _digest_in(subject)
        place = subject.tagged(f"{image.replace(':', '-')}.att")
        current = self.digest_of(place)
        present = _layers(place, self.manifest(place.at(current.digest))) if current is not None else []
        with _scratch() as layout:
            digest = write_cosign(layout, image, envelopes, present)
            if digest is None:
                return current.digest if current is not None else None
            self._copy_in(layout, digest, place)
        return digest

    def _copy_in(self, folder: Path, digest: str, to: Reference) -> None:
        options = ["--from-oci-layout", *self._http(to, "to-")]
        self._oras.run(
            to,
            [*_COPY, *options, f"{folder}@{digest}", _address(to)],
            seconds=TRANSFER_SECONDS,
            names={str(folder): "layout"},
        )

    def _content(self, reference: Reference, kind: str, digest: str | None) -> bytes:
        # By way of a file: output that passes a log is decoded and redacted, and would no longer be these bytes.
        with _scratch() as folder:
            self._save(reference, kind, digest, folder / "content")
            return (folder / "content").read_bytes()

    def _save(
        self, reference: Reference, kind: str, digest: str | None, file: Path, *, seconds: float = QUESTION_SECONDS
    ) -> None:
        self._oras.run(
            reference,
            [kind, "fetch", "--output", str(file), *self._http(reference), _address(reference)],
            seconds=seconds,
            names={str(file.parent): "scratch"},
        )
        actual = f"sha256:{sha256_file(file)}"
        if digest not in (None, actual):
            raise _odd(reference, f"sent bytes with digest {actual}")

    def _http(self, reference: Reference, prefix: str = "") -> list[str]:
        plain = reference.is_loopback if self._plain_http is None else self._plain_http
        return [f"--{prefix}plain-http"] if plain else []


def index_platforms(content: bytes, *, where: str) -> dict[str, str] | None:
    """Return platform → digest of the Linux images of an index, or None when ``content`` is no index.

    A platform is ``linux/amd64`` or, with a variant, ``linux/arm/v7``; v8 of arm64 is the only one and left out.

    Raises:
        ImageError: not JSON, an entry without a digest, or two images for one platform.
    """
    data = _document(content, where)
    rows = data.get("manifests")
    if data.get("mediaType") not in (None, *INDEX_TYPES) or not isinstance(rows, list):
        return None
    found: dict[str, str] = {}
    for row in rows:
        platform = row.get("platform") if isinstance(row, dict) else None
        # BuildKit's attestations are of platform unknown/unknown.
        if not isinstance(platform, dict) or platform.get("os") != "linux":
            continue
        name = platform_name(platform)
        if not is_digest(row.get("digest")) or name in found:
            raise ImageError(f"the index lists {name} twice or without a digest", remedy=_OTHER_BASE, where=where)
        found[name] = row["digest"]
    return found


def platform_name(platform: Mapping[str, Any]) -> str:
    """Return ``os/architecture`` or ``os/architecture/variant`` for a platform object or an image's config."""
    name = f"{platform.get('os')}/{platform.get('architecture')}"
    variant = platform.get("variant")
    return f"{name}/{variant}" if variant and (name, variant) != ("linux/arm64", "v8") else name


def _image_digest(reference: Reference, content: bytes, platform: str) -> str:
    platforms = index_platforms(content, where=str(reference))
    if platforms is None:
        return _digest_in(reference)
    if platform not in platforms:
        raise ImageError(
            f"the index has no image for {platform}, only for {', '.join(platforms) or 'none'}",
            remedy=_OTHER_BASE,
            where=str(reference),
        )
    return platforms[platform]


def _checked(folder: Path, digest: str, platform: str) -> Image:
    image = read_image(folder, digest, platform=platform)
    if image.platform != platform:
        raise ImageError(f"is for {image.platform}, not for {platform}", remedy=_OTHER_BASE, where=digest)
    check_blobs(image)
    return image


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cufallback-") as folder:
        yield Path(folder)


def _address(reference: Reference) -> str:
    """Return the reference as oras takes it: by digest when there is one, else by tag."""
    if reference.digest is not None:
        return str(reference.at(reference.digest))
    if reference.tag is None:
        raise UsageError("names neither a tag nor a digest", remedy="add one", where=str(reference))
    return str(reference)


def _digest_in(reference: Reference) -> str:
    if reference.digest is None:
        raise UsageError("names no digest", remedy="write NAME@sha256:…", where=str(reference))
    return reference.digest


def _document(content: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the manifest is not JSON: {error}", remedy=_OTHER_BASE, where=where) from error
    if not isinstance(data, dict):
        raise ImageError("the manifest is no JSON object", remedy=_OTHER_BASE, where=where)
    return data


def _layers(reference: Reference, content: bytes) -> list[dict[str, Any]]:
    rows = _document(content, str(reference)).get("layers")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and is_digest(row.get("digest")) for row in rows):
        raise _odd(reference, "has a manifest without layers that have sha256 digests")
    return rows


def _json_object(reference: Reference, output: str) -> dict[str, Any]:
    """Return the JSON object that oras printed, perhaps after warnings."""
    start = re.search(r"^\{", output, re.MULTILINE)
    try:
        data, _end = json.JSONDecoder().raw_decode(output, start.start() if start else 0)
    except (ValueError, RecursionError) as error:
        raise _odd(reference, f"is answered by oras with no JSON: {printable(output, 80)}") from error
    return dict(data)


def _odd(reference: Reference, what: str) -> RegistryError:
    return RegistryError(
        f"the registry {what}",
        remedy="check that this is the registry you mean and that nothing between alters what it sends; run again",
        where=str(reference),
    )
