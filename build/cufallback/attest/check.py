"""Hold the documents of a build folder against its record: all but signatures can be derived anew."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.attest.bom import check_bom
from cufallback.attest.debian import SYSTEM_FILES, read_system
from cufallback.attest.documents import (
    IMAGE_SBOM,
    PROVENANCE,
    SBOMS,
    base_images,
    image_facts,
    wheel_sbom,
    wheel_subject,
)
from cufallback.attest.licences import licence_in
from cufallback.attest.provenance import Builder, check_provenance, provenance
from cufallback.attest.sbom import EMBEDDED_NAME, image_bom, wheel_bom
from cufallback.attest.sign import check_signatures, expected_statements
from cufallback.attest.statement import Subject, subjects_of
from cufallback.attest.subjects import ImageSubject
from cufallback.checks import Check, agree, same_version
from cufallback.image.check import files_of, metadata_of
from cufallback.image.layout import read_image
from cufallback.plan import BuildPlan
from cufallback.record import ACCEPTANCE, RECORD, STATEMENT_SUFFIX, Record

if TYPE_CHECKING:
    from securesystemslib.signer import Key


def prefetched(record: Record) -> dict[str, Any]:
    """Return what the prefetch stage contributed to a record."""
    data = record.to_json()
    return {key: data[key] for key in ("source", "distributions", "requirement_edits")}


def check_sboms(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Each wheel and the image has an SBOM that is valid, about it, and says what record and plan say."""
    listed = sorted(file.path for file in record.files if file.path.startswith(f"{SBOMS}/"))
    names = [Path(wheel.path).name for wheel in record.subjects]
    wanted = [wheel_sbom(name) for name in names] + ([IMAGE_SBOM] if record.image else [])
    yield agree("SBOMs", sorted(wanted), listed, source="the subjects")
    for number, (name, wheel) in enumerate(zip(names, record.subjects, strict=True)):
        path = wheel_sbom(name)
        content = (folder / path).read_bytes()
        facts = check_bom(content, where=path)
        yield agree(f"{path}: subject", wheel.sha256, facts.root.sha256, document=path)
        if not same_version(record):
            yield Check(
                path, "not_run", f"cufallback {record.cufallback} wrote this; only form and subject were checked"
            )
            continue
        documents = [(path, content, wheel_subject(name, wheel.sha256, number=number))]
        if embedded := _embedded(folder / wheel.path):
            documents.append((f"{name}: {EMBEDDED_NAME}", embedded, wheel_subject(name, number=number)))
        elif wheel.command:
            yield Check(f"{name}: {EMBEDDED_NAME}", "failed", "the wheel carries no SBOM of this build")
        for what, found, subject in documents:
            again = wheel_bom(subject, plan, prefetched(record), identity=plan.wheels_id)
            yield agree(what, json.loads(again), json.loads(found), source="record and plan", document=what)
    if record.image is not None:
        image = read_image(folder / record.image.path, record.image.manifest.digest)
        yield from check_image_bom((folder / IMAGE_SBOM).read_bytes(), record, plan, files_of(image))


def check_image_bom(content: bytes, record: Record, plan: BuildPlan, files: Mapping[str, bytes]) -> Iterator[Check]:
    """The image's SBOM is about the image and says what record, plan and the image's own files say.

    Args:
        content: the document.
        record: of the build.
        plan: that its inputs give.
        files: what :func:`cufallback.image.check.files_of` read from the image.
    """
    if record.image is None:
        return
    facts = check_bom(content, where=IMAGE_SBOM)
    digest = record.image.manifest.digest.removeprefix("sha256:")
    yield agree(f"{IMAGE_SBOM}: subject", digest, facts.root.sha256, document=IMAGE_SBOM)
    if not same_version(record):
        yield Check(
            IMAGE_SBOM, "not_run", f"cufallback {record.cufallback} wrote this; only form and subject were checked"
        )
        return
    metadata = metadata_of(files)
    licences = {
        item.filename: licence_in(metadata[item.name, item.version])
        for item in record.distributions
        if (item.name, item.version) in metadata
    }
    wheels = [
        wheel_subject(Path(wheel.path).name, wheel.sha256, number=number)
        for number, wheel in enumerate(record.subjects)
    ]
    packages, distro = read_system({path: text for path, text in files.items() if SYSTEM_FILES.fullmatch(path)})
    image = ImageSubject(plan.image_name, record.image.manifest.digest, base_images(plan))
    again = image_bom(image, plan, prefetched(record), wheels, packages, distro, licences)
    yield agree(
        IMAGE_SBOM, json.loads(again), json.loads(content), source="record, plan and image", document=IMAGE_SBOM
    )


def _embedded(wheel: Path) -> bytes | None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f".dist-info/sboms/{EMBEDDED_NAME}")]
        return archive.read(names[0]) if names else None


def subjects(record: Record, plan: BuildPlan) -> list[tuple[str, str]]:
    """Return name and SHA-256 of everything that a provenance must speak of."""
    found = [(Path(wheel.path).name, wheel.sha256) for wheel in record.subjects]
    if record.image is not None:
        found.append((plan.image_name, record.image.manifest.digest.removeprefix("sha256:")))
    return found


def check_provenance_of(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """The provenance is valid, about these subjects, and says what record and plan say."""
    content = (folder / PROVENANCE).read_bytes()
    statement = check_provenance(content, where=PROVENANCE)
    expected = dict(subjects(record, plan))
    yield agree(f"{PROVENANCE}: subjects", expected, statement.subjects, source=RECORD, document=PROVENANCE)
    run = statement.predicate.runDetails
    yield Check(f"{PROVENANCE}: builder", "not_run", f"{run.builder.id} says so itself; a signature says who vouches")
    if not same_version(record):
        yield Check(f"{PROVENANCE}: contents", "not_run", f"cufallback {record.cufallback} wrote this")
        return
    known = {file.path: file.sha256 for file in record.files}
    again = provenance(
        plan,
        prefetched(record),
        subjects(record, plan),
        builder=Builder(run.builder.id, run.builder.version),
        started=datetime.fromisoformat(run.metadata.startedOn).timestamp(),
        finished=datetime.fromisoformat(run.metadata.finishedOn).timestamp(),
        invocation=run.metadata.invocationId,
        isolation={Path(wheel.path).name: wheel.isolation.statement for wheel in record.subjects},
        image=image_facts(plan, record.image.engine) if record.image else None,
        byproducts=[
            (path, sha256)
            for path, sha256 in known.items()
            if path.startswith((f"{SBOMS}/", "logs/")) or path == "inspection.json"
        ],
    )
    yield agree(
        f"{PROVENANCE}: contents",
        json.loads(again),
        json.loads(content),
        source="record and plan",
        document=PROVENANCE,
    )


def check_signed(folder: Path, record: Record, plan: BuildPlan, key: Key | None) -> Iterator[Check]:
    """Every document is signed by ``key``, exactly as it lies here."""
    wheels, image = signed_subjects(record, plan)
    yield from check_signatures(folder, expected_statements(folder, wheels=wheels, image=image), key)


def check_acceptance(folder: Path, record: Record, plan: BuildPlan) -> Iterator[Check]:
    """Each result that came after the record is an in-toto statement about something of this build."""
    known = {sha256 for _name, sha256 in subjects(record, plan)}
    for path in sorted((folder / ACCEPTANCE).rglob("*")):
        what = f"{ACCEPTANCE}/{path.relative_to(folder / ACCEPTANCE)}"
        if not path.name.endswith(STATEMENT_SUFFIX):
            yield Check(what, "failed", f"no file *{STATEMENT_SUFFIX}; nothing else belongs there")
            continue
        foreign = [item.name for item in subjects_of(path.read_bytes(), where=what) if item.sha256 not in known]
        why = f"speaks of what is not here: {foreign}" if foreign else "is about this build"
        yield Check(what, "failed" if foreign else "passed", why)


def signed_subjects(record: Record, plan: BuildPlan) -> tuple[list[Subject], Subject | None]:
    """Return the wheels and the image as signatures name them."""
    found = [Subject(name, sha256) for name, sha256 in subjects(record, plan)]
    return (found[:-1], found[-1]) if record.image is not None else (found, None)
