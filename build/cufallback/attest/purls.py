"""Package URLs of what a build takes and makes (github.com/package-url/purl-spec)."""

from __future__ import annotations

from urllib.parse import urlsplit

from packageurl import PackageURL
from packaging.utils import canonicalize_name


def python_purl(name: str, version: str, **qualifiers: str) -> PackageURL:
    """Return ``pkg:pypi/name@version``; a local version's ``+`` becomes ``%2B``."""
    return PackageURL("pypi", None, canonicalize_name(name), version, qualifiers)


def git_purl(url: str, commit: str) -> PackageURL:
    """Return the package URL of a commit: of type github where the repository is there, else generic."""
    parts = urlsplit(url)
    path = parts.path.strip("/").removesuffix(".git").split("/")
    if parts.hostname == "github.com" and len(path) == 2:
        return PackageURL("github", path[0], path[1], commit)
    return PackageURL("generic", None, path[-1] or "source", commit, {"vcs_url": f"git+{url}@{commit}"})


def oci_purl(reference: str, digest: str) -> PackageURL:
    """Return ``pkg:oci/<last part>@sha256:…`` of an image.

    Args:
        reference: such as ``docker.io/library/debian:12``; of a path of this machine only the last part is told.
        digest: of its manifest or index.
    """
    path = reference.removeprefix("oci-layout:").partition("@")[0]
    repository, colon, tag = path.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = path, ""
    name = repository.rstrip("/").rpartition("/")[2].lower()
    qualifiers = {"tag": tag} if tag else {}
    if "/" in repository and not reference.startswith(("oci-layout:", "/", ".")):
        qualifiers["repository_url"] = repository.lower()
    return PackageURL("oci", None, name or "image", digest, qualifiers)
