"""A finished build and the outside: sign it, bring it into a registry, verify it from there."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from cufallback.attest.documents import IMAGE_SBOM, PROVENANCE
from cufallback.attest.sign import RECORD_ENVELOPE, is_about_signatures
from cufallback.checks import Check
from cufallback.crosscheck import rebuild_plan
from cufallback.errors import AttestationError, ImageError, RecordError, RegistryError, UsageError
from cufallback.image.artifact import DSSE_TYPE
from cufallback.image.layout import blob_path
from cufallback.image.reference import Reference, parse_reference
from cufallback.image.registry import Referrer, Registry
from cufallback.process import LocalRunner
from cufallback.progress import Progress
from cufallback.push import (
    BUILD_MEDIA_TYPE,
    BUILD_TYPE,
    IN_TOTO_TYPE,
    SBOM_TYPE,
    Document,
    Pushed,
    push_image,
)
from cufallback.record import (
    ACCEPTANCE,
    RECORD,
    SIGNATURES,
    STATEMENT_SUFFIX,
    SUMS,
    Record,
    is_inner_path,
    is_place,
    read_record,
    timestamp,
)
from cufallback.store import EARLIEST_EPOCH, link_or_copy, sha256_file, workspace_errors, write_atomic
from cufallback.verify import Verification, verify

if TYPE_CHECKING:
    from securesystemslib.signer import Key

_ARCHIVE = "build.tar"
_BLOBS = "image/blobs/"


def sign_build(
    folder: Path, key: Path | None, *, clock: Callable[[], float], ask: Callable[[], str] | None
) -> tuple[Path, ...]:
    """Verify a build folder, then sign its record, provenance and SBOMs; signatures that are there are replaced.

    Args:
        folder: of the build.
        key: file of the private key; None: the key is in the environment.
        clock: seconds since 1970.
        ask: asks for the key's password; None where nobody can be asked.

    Raises:
        KeyFileError: the key cannot be used.
        RecordError: the folder does not verify; nothing is signed.
    """
    from cufallback.attest.check import signed_subjects
    from cufallback.attest.keys import load_private_key
    from cufallback.attest.sign import sign_folder

    signer = load_private_key(key, environ=os.environ, ask=ask)
    record = _verified(folder, but=is_about_signatures)  # those that are there are replaced
    wheels, image = signed_subjects(record, rebuild_plan(folder, record))
    return sign_folder(folder, signer, wheels=wheels, image=image, verified_at=timestamp(clock()))


def _verified(folder: Path, *, but: Callable[[Check], bool] = lambda _check: False) -> Record:
    """Return the record of a folder that verifies, but for the checks that do not matter."""
    verification = verify(folder)
    faults = [check for check in verification.checks if check.status == "failed" and not but(check)]
    if faults:
        raise RecordError(
            f"the build folder does not verify: {faults[0].what}: {faults[0].why}",
            remedy="run `cufallback verify` on it; build again rather than mend it",
            where=str(folder),
        )
    return read_record(folder)


def find_build(folder: Path | None, dist: Path) -> Path:
    """Return the build folder that was named, or the only one with an image below ``dist``.

    Raises:
        UsageError: there is none, or several.
    """
    if folder is not None:
        return folder
    found = sorted(path.parent for path in dist.glob(f"*/*/{RECORD}") if (path.parent / "image").is_dir())
    if len(found) != 1:
        if not found:
            raise UsageError(
                f"there is no build with an image in {dist}",
                remedy="build one first (`cufallback plan` shows what is missing), or name one with --build DIR",
            )
        shown = ", ".join(map(str, found))
        raise UsageError(f"{len(found)} builds with an image in {dist}: {shown}", remedy="name one with --build DIR")
    return found[0]


def push_build(folder: Path, target: str, *, move_tag: bool, plain_http: bool | None, progress: Progress) -> Pushed:
    """Verify a build folder and push its image with everything that was said of it.

    Attached are the image's SBOM, the provenance, the signatures, acceptance results, and the build folder itself but
    for the image, from which :func:`verify_reference` verifies it elsewhere.

    Args:
        folder: of the build.
        target: ``REGISTRY/NAME`` or ``REGISTRY/NAME:TAG``.
        move_tag: take the tag from the image that it names now.
        plain_http: speak http; None: only with registries on this machine.
        progress: told each step.

    Raises:
        RecordError: the folder does not verify.
        ImageError: it has no image.
        TagError, RegistryError: as :func:`cufallback.push.push_image`.
    """
    to = parse_reference(target)
    record = _verified(folder)
    if record.image is None:
        raise ImageError(
            "this build has no image", remedy="build again where `cufallback plan` shows an engine", where=str(folder)
        )
    signatures = sorted((folder / SIGNATURES).glob("*.json"))
    results = sorted((folder / ACCEPTANCE).glob(f"*{STATEMENT_SUFFIX}"))
    with tempfile.TemporaryDirectory(prefix="cufallback-push-") as scratch:
        archive = Path(scratch) / _ARCHIVE
        write_archive(folder, record, archive)
        documents = [
            Document(folder / IMAGE_SBOM, SBOM_TYPE, SBOM_TYPE),
            Document(folder / PROVENANCE, IN_TOTO_TYPE, IN_TOTO_TYPE),
            Document(archive, BUILD_TYPE, BUILD_MEDIA_TYPE),
            *(Document(path, DSSE_TYPE, DSSE_TYPE) for path in signatures),
            *(Document(path, IN_TOTO_TYPE, IN_TOTO_TYPE) for path in results),
        ]
        return push_image(
            folder / record.image.path,
            record.image.manifest.digest,
            to=to,
            documents=documents,
            envelopes=[path for path in signatures if path.name in ("provenance.dsse.json", "sbom-image.dsse.json")],
            move_tag=move_tag,
            registry=Registry(LocalRunner(), log=None, plain_http=plain_http),
            progress=progress,
        )


def write_archive(folder: Path, record: Record, path: Path) -> None:
    """Write a tar archive of a build folder's record but for the image's blobs; equal folders give equal bytes."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted([RECORD, SUMS, *(file.path for file in record.files if not file.path.startswith(_BLOBS))]):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = (folder / name).stat().st_size, EARLIEST_EPOCH, 0o644
            with (folder / name).open("rb") as file:
                archive.addfile(member, file)


def verify_reference(
    target: str, *, key: Key | None, plain_http: bool | None, platform: str, progress: Progress
) -> Verification:
    """Fetch an image with everything attached to it and verify that as the build folder it came from.

    Args:
        target: ``REGISTRY/NAME@sha256:…``, or a tag, which is resolved and named in the checks.
        key: public key for the signatures; None: they are not checked.
        plain_http: speak http; None: only with registries on this machine.
        platform: such as ``linux/amd64``.
        progress: told each step.

    Raises:
        RegistryError: the image is not there, nothing of a build is attached to it, or the registry failed.
        RecordError: what is attached is no record.
    """
    reference = parse_reference(target)
    registry = Registry(LocalRunner(), log=None, plain_http=plain_http)
    found = registry.digest_of(reference)
    if found is None:
        raise RegistryError("the registry has no such image", remedy="check name and digest", where=str(reference))
    subject = reference.at(found.digest)
    referrers = registry.referrers(subject)
    builds = [referrer.digest for referrer in referrers if referrer.artifact_type == BUILD_TYPE]
    if not builds:
        raise RegistryError(
            "no build record is attached to this image",
            remedy="`oras discover` lists what is attached; a push with `cufallback push` attaches one",
            where=str(subject),
        )
    verifications = []
    with tempfile.TemporaryDirectory(prefix="cufallback-verify-") as scratch:
        layout = Path(scratch) / "image"
        progress.say(f"fetching {subject} and {len(referrers)} attached documents")
        registry.pull(subject, layout, platform=platform)
        for number, build in enumerate(builds):
            place = Path(scratch) / str(number)
            place.mkdir()
            verifications.append(_verify_attached(registry, subject, referrers, build, layout, place, key))
            if verifications[-1].passed:
                break
            shutil.rmtree(place)
    # Builds that are reproducible give one image and several records; one that holds, signed by the key, is enough.
    return verifications[-1] if verifications[-1].passed else verifications[0]


def _verify_attached(
    registry: Registry,
    subject: Reference,
    referrers: Sequence[Referrer],
    build: str,
    layout: Path,
    place: Path,
    key: Key | None,
) -> Verification:
    """Lay out one attached build record with the image below ``place``, and verify it as a build folder."""
    folder, archive = place / "build", place / _ARCHIVE
    registry.save(subject, build, archive)
    extract_archive(archive, folder, where=f"{subject}: {_ARCHIVE}")
    archive.unlink()  # it holds the wheels, which may have gigabytes
    folder = folder.rename(folder.with_name(read_record(folder).build_id[:16]))
    _lay_blobs(layout, folder, subject.digest)
    checks = list(_attached(registry, subject, referrers, folder, key))
    verification, record = verify(folder, key), read_record(folder)
    digest = record.image.manifest.digest if record.image else "none"
    state: Literal["passed", "failed"] = "passed" if digest == subject.digest else "failed"
    checks.insert(0, Check("image", state, f"{subject.digest}; the record is of {digest}"))
    return Verification(str(subject), verification.build_id, (*checks, *verification.checks))


def extract_archive(archive: Path, folder: Path, *, where: str) -> None:
    """Lay out the archive of a build folder in a new one.

    Args:
        archive: what :func:`write_archive` wrote, or somebody else.
        folder: the new folder.
        where: what to call the archive in errors.

    Raises:
        WorkspaceError: the folder cannot be written.
        AttestationError: no tar archive, or a member that is no plain file inside it or lies where another does.
    """
    remedy = "do not use this image; ask who pushed it"
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    try:
        with workspace_errors(folder, creating=True), tarfile.open(archive, "r:") as members:
            for member in members:
                # A sparse file of a few bytes here may be one of any size there.
                if not member.isreg() or member.issparse() or not is_inner_path(member.name):
                    raise AttestationError(f"holds {member.name!a}, which is no plain file", remedy=remedy, where=where)
                path = PurePosixPath(member.name)
                if member.name not in (RECORD, SUMS) and not is_place(member.name):
                    raise AttestationError(f"holds {member.name!a}, no file of a build", remedy=remedy, where=where)
                if path in files or path in folders or files.intersection(path.parents):
                    raise AttestationError(f"holds {member.name!a} twice", remedy=remedy, where=where)
                files.add(path)
                folders.update(path.parents)
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with members.extractfile(member) or io.BytesIO() as content, (folder / path).open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise AttestationError(f"is no tar archive: {error}", remedy=remedy, where=where) from error


def _lay_blobs(layout: Path, folder: Path, digest: str | None) -> None:
    """Lay the blobs of the image itself into a build folder."""
    from cufallback.image.layout import read_image

    image = read_image(layout, digest)
    for blob in {image.manifest, image.config, *image.layers}:
        target = blob_path(folder / "image", blob.digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            link_or_copy(image.blob(blob), target)


def _attached(
    registry: Registry, subject: Reference, referrers: Sequence[Referrer], folder: Path, key: Key | None
) -> Iterator[Check]:
    """Compare what is attached for other tools with the build folder; lay acceptance results and signatures into it."""
    for name, kind in ((IMAGE_SBOM, SBOM_TYPE), (PROVENANCE, IN_TOTO_TYPE)):
        found = {item.digest: registry.fetch(subject, item.digest) for item in referrers if item.artifact_type == kind}
        ours = (folder / name).read_bytes() if (folder / name).is_file() else None
        there = ours in found.values()
        why = "is that of the build folder" if there else f"{len(found)} attached, none as in the build"
        if there and kind == SBOM_TYPE and set(found.values()) != {ours}:
            # The SBOM follows from the image alone, so that another one is false, and somebody may take it.
            there, why = False, f"{len(found)} attached, and not all are as in the build"
        yield Check(f"attached {name}", "passed" if there else "failed", why)
        if kind == IN_TOTO_TYPE:
            for digest, content in found.items():
                if content != ours and not _is_provenance(content):
                    write_atomic(folder / ACCEPTANCE / _title(registry, subject, digest), content)
    _lay_signatures(registry, subject, referrers, folder, key)


def _title(registry: Registry, subject: Reference, digest: str) -> str:
    """Return the file name of an attached document."""
    name = registry.title(subject, digest)
    if not is_inner_path(name) or "/" in name:
        raise AttestationError("a document has an unsafe name", remedy="ask who pushed it", where=str(subject))
    return name


def _is_provenance(content: bytes) -> bool:
    """Say whether a statement is a provenance: that of another record of the same image."""
    from cufallback.attest.statement import PROVENANCE_PREDICATE, parse_json

    return bool(parse_json(content, where="an attached statement").get("predicateType") == PROVENANCE_PREDICATE)


def _lay_signatures(
    registry: Registry, subject: Reference, referrers: Sequence[Referrer], folder: Path, key: Key | None
) -> None:
    """Lay out the signatures; of several on one document, one that is about this build and of ``key``."""
    for referrer in referrers:
        if referrer.artifact_type != DSSE_TYPE:
            continue
        name, content = _title(registry, subject, referrer.digest), registry.fetch(subject, referrer.digest)
        target = folder / SIGNATURES / name
        if not target.exists() or _belongs(name, content, folder, key):
            write_atomic(target, content)


def _belongs(name: str, content: bytes, folder: Path, key: Key | None) -> bool:
    """Say whether an envelope is about the record or provenance in ``folder`` and, where one is given, of the key."""
    from cufallback.attest.sign import PROVENANCE_ENVELOPE, open_envelope, verify_envelope
    from cufallback.attest.statement import subjects_of

    try:
        envelope = open_envelope(content, where=name)
        if key is not None:
            verify_envelope(envelope, key, where=name)
        if name == PROVENANCE_ENVELOPE:
            return envelope.payload == (folder / PROVENANCE).read_bytes()
        if name == RECORD_ENVELOPE:
            digests = {item.sha256 for item in subjects_of(envelope.payload, where=name)}
            return sha256_file(folder / RECORD) in digests
    except AttestationError:
        return False
    return True
