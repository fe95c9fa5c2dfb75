"""One CycloneDX component for each kind of thing: sources, crates, distributions, Debian packages, images, tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.component import (
    Commit,
    Component,
    ComponentScope,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseAcknowledgement, LicenseExpression
from cyclonedx.spdx import fixup_id, is_supported_id
from packageurl import PackageURL

from cufallback.attest.debian import DebianPackage, Distro
from cufallback.attest.licences import Licence
from cufallback.attest.purls import git_purl, oci_purl, python_purl

_PREFIX = "cufallback"


def hashes(sha256: str | None) -> list[HashType]:
    """Return the list of hashes that a component with this SHA-256 has; none for None."""
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def properties(values: Mapping[str, str]) -> list[Property]:
    """Return properties in this program's namespace."""
    return [Property(name=f"{_PREFIX}:{name}", value=value) for name, value in values.items()]


def wheel(name: str, version: str, filename: str, sha256: str | None) -> Component:
    """Return the component of a built wheel; without its hash in the document that lies inside it."""
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"wheel:{filename}",
        purl=python_purl(name, version),
        hashes=hashes(sha256),
        properties=properties({"filename": filename}),
    )


def main_source(source: Mapping[str, Any], name: str) -> Component:
    """Return the component of the upstream source, with every change that this build made to it as pedigree.

    Reasons are left out: they are no part of the build id, and this goes into the wheel's bytes.

    Args:
        source: ``result["source"]`` of the prefetch stage.
        name: of the project.
    """
    details = {"tree-sha256": source["tree_sha256"], "edited-tree-sha256": source["edited_tree_sha256"]}
    references = []
    commit = source["commit"]
    if source["kind"] == "git":
        version = commit["id"]
        purl = git_purl(source["origin"], version)
        references.append(ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(source["origin"])))
    else:
        version = source["ref"]
        purl = python_purl(source["origin"], version)
        if commit:
            # An archive does not prove the commit that upstream names for it.
            details["quoted-commit"] = commit["id"]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=f"source:{name}@{version}",
        purl=purl,
        hashes=hashes(source["archive_sha256"]),
        external_references=references,
        properties=properties(details),
        pedigree=_pedigree(source["changes"], source["origin"] if source["kind"] == "git" else None),
    )


def _pedigree(changes: Sequence[Mapping[str, Any]], url: str | None) -> Pedigree | None:
    if not changes:
        return None
    kinds = {"rewrite": PatchClassification.UNOFFICIAL, "cherry-pick": PatchClassification.CHERRY_PICK}
    picked = dict.fromkeys(change["commit"] for change in changes if change["commit"])
    return Pedigree(
        commits=[Commit(uid=commit, url=XsUri(url) if url else None) for commit in picked],
        patches=[
            Patch(
                type=kinds[change["kind"]],
                diff=Diff(text=AttachedText(content=change["diff"], content_type="text/x-diff")),
            )
            for change in changes
        ],
    )


def probe_source(tree_sha256: str) -> Component:
    """Return the component of the cuda-probe's source, which belongs to this program."""
    return Component(
        name="cuda-probe source",
        version=tree_sha256[:16],
        type=ComponentType.LIBRARY,
        bom_ref="source:cuda-probe",
        purl=PackageURL("generic", "cufallback", "cuda-probe", tree_sha256[:16]),
        properties=properties({"tree-sha256": tree_sha256}),
    )


def submodule(parent: str, path: str, commit: str | None) -> Component:
    """Return the component of a submodule. Without a commit, that of the parent pins it.

    Args:
        parent: the name of the source it is part of.
        path: where it lies there; ``*`` stands for all of them.
        commit: the commit the parent records, if known.
    """
    return Component(
        name="submodules" if path == "*" else path,
        group=parent,
        version=commit,
        type=ComponentType.LIBRARY,
        bom_ref=f"submodule:{parent}:{path}",
        properties=properties({"pinned-by": "its own commit" if commit else "the commit of its parent"}),
    )


def fetched(row: Mapping[str, Any]) -> Component:
    """Return the component of a source that upstream's build fetches.

    Args:
        row: one of ``result["source"]["fetches"]`` of the prefetch stage.
    """
    name, commit, sha256 = row["name"], row["commit"], row["sha256"]
    if row["kind"] == "crates":
        return Component(name=name, type=ComponentType.FILE, bom_ref=f"crates:{name}", hashes=hashes(sha256))
    if commit:
        purl = git_purl(row["url"], commit)
        reference = ExternalReferenceType.VCS
    else:
        purl = PackageURL("generic", None, name, None, {"download_url": row["url"], "checksum": f"sha256:{sha256}"})
        reference = ExternalReferenceType.DISTRIBUTION
    return Component(
        name=name,
        version=commit,
        type=ComponentType.LIBRARY,
        bom_ref=f"fetched:{name}",
        purl=purl,
        hashes=hashes(sha256),
        external_references=[ExternalReference(type=reference, url=XsUri(row["url"]))],
        properties=properties({"kind": row["kind"]}),
    )


def crate(row: Mapping[str, Any]) -> Component:
    """Return the component of a Rust crate, one of ``result["source"]["crates"]`` of the prefetch stage."""
    purl = PackageURL("cargo", None, row["name"], row["version"])
    return Component(
        name=row["name"],
        version=row["version"],
        type=ComponentType.LIBRARY,
        bom_ref=f"{row['lock']}:{purl.to_string()}",
        purl=purl,
        hashes=hashes(row["sha256"]),
    )


def distribution(row: Mapping[str, Any], *, licence: Licence | None = None, contained: bool = True) -> Component:
    """Return the component of a locked distribution.

    Args:
        row: one of ``result["distributions"]`` of the prefetch stage.
        licence: what its METADATA says.
        contained: False for one that only took part in making what is contained.
    """
    return Component(
        name=row["name"],
        version=row["version"],
        type=ComponentType.LIBRARY,
        bom_ref=f"distribution:{row['filename']}",
        purl=python_purl(row["name"], row["version"]),
        scope=None if contained else ComponentScope.EXCLUDED,
        hashes=hashes(row["sha256"]),
        licenses=_licences(licence) if licence else [],
        properties=properties({"filename": row["filename"]})
        + [part for name in (licence.files if licence else ()) for part in properties({"licence-file": name})],
    )


def _licences(licence: Licence) -> list[License]:
    declared = LicenseAcknowledgement.DECLARED
    if licence.expression and not is_supported_id(licence.expression):
        return [LicenseExpression(licence.expression, acknowledgement=declared)]
    texts: Iterable[str] = [licence.expression] if licence.expression else licence.names
    found: dict[str, License] = {}
    for text in texts:
        if known := fixup_id(text):
            found[known] = DisjunctiveLicense(id=known, acknowledgement=declared)
        else:
            found[text] = DisjunctiveLicense(name=text, acknowledgement=declared)
    return list(found.values())


def debian_package(package: DebianPackage, distro: Distro) -> Component:
    """Return the component of an installed Debian package."""
    qualifiers = {"arch": package.architecture, "distro": distro.qualifier}
    if package.source_version != package.version:
        qualifiers["upstream"] = f"{package.source}@{package.source_version}"
    elif package.source != package.name:
        qualifiers["upstream"] = package.source
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"deb:{package.name}:{package.architecture}@{package.version}",
        purl=PackageURL("deb", distro.id, package.name, package.version, qualifiers),
    )


def operating_system(distro: Distro) -> Component:
    """Return the component of the distribution that an image holds."""
    return Component(
        name=distro.id,
        version=distro.version or None,
        description=distro.pretty,
        type=ComponentType.OPERATING_SYSTEM,
        bom_ref=f"os:{distro.qualifier}",
    )


def image(name: str, reference: str, digest: str, *, ref: str) -> Component:
    """Return the component of an image: the one that is described, or a base.

    Args:
        name: how people call it.
        reference: registry, repository and tag, or ``oci-layout:``.
        digest: ``sha256:`` and 64 hex digits.
        ref: what other parts of the document call it.
    """
    return Component(
        name=name,
        version=digest,
        type=ComponentType.CONTAINER,
        bom_ref=ref,
        purl=oci_purl(reference, digest),
        hashes=hashes(digest.removeprefix("sha256:")),
    )


def tools(toolchain: Mapping[str, str]) -> list[Component]:
    """Return one component for each tool of a toolchain.

    Args:
        toolchain: :meth:`cufallback.toolchain.Toolchain.to_json`: what each tool answers to ``--version``.
    """
    found = []
    for role in ("libc", "python", "compiler", "c_compiler", "linker"):
        answer = toolchain[role]
        name, _, rest = answer.partition(" ")
        found.append(
            Component(
                name="CPython" if role == "python" else name,
                version=answer if role == "python" else rest.rpartition(" ")[2],
                description=answer,
                type=ComponentType.LIBRARY if role == "libc" else ComponentType.APPLICATION,
                bom_ref=f"tool:{role}",
            )
        )
    return found
