"""Names of images in registries: ``registry/repository:tag@digest``.

The grammar of repository, tag and digest is that of the OCI distribution specification 1.1 ("Pulling manifests").
Short names such as ``python:3.11-slim`` mean Docker Hub, as Docker reads them in a Dockerfile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cufallback.errors import UsageError
from cufallback.image.layout import is_digest
from cufallback.tomlplace import printable

DOCKER_HUB = "docker.io"

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
# Docker and most registries refuse more characters of registry and repository together.
_LONGEST_NAME = 255
_REMEDY = "write REGISTRY/NAME, REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:… with a name in lower case"


@dataclass(frozen=True)
class Reference:
    """Where an image is: ``tag`` and ``digest`` (``sha256:`` and 64 hex digits) are each None when not given."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag is not None else ""
        digest = f"@{self.digest}" if self.digest is not None else ""
        return f"{self.named}{tag}{digest}"

    @property
    def named(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine: 127.0.0.0/8, ::1 or localhost, with any port."""
        host = re.sub(r":[0-9]+$", "", self.registry).strip("[]").lower()
        return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None

    def at(self, digest: str) -> Reference:
        """Return the reference to that digest in the same repository, without a tag."""
        return Reference(self.registry, self.repository, digest=digest)

    def tagged(self, tag: str) -> Reference:
        """Return the reference to that tag in the same repository, without a digest."""
        return Reference(self.registry, self.repository, tag)


def parse_reference(text: str, default_registry: str | None = None) -> Reference:
    """Read a reference.

    The first part names the registry when it has a dot, a colon or an upper-case letter or is ``localhost``, as
    Docker decides it. Docker Hub's own names are completed: ``python`` is ``docker.io/library/python``.

    Args:
        text: what was written.
        default_registry: the registry of names without one; None: such a name is an error.

    Raises:
        UsageError: not a reference, or no registry in it.
    """

    def fault(reason: str) -> UsageError:
        return UsageError(reason, remedy=_REMEDY, where=repr(printable(text)))

    name, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise fault("the digest is not sha256: and 64 hex digits in lower case")
    first, slash, rest = name.partition("/")
    if slash and (re.search(r"[.:A-Z]", first) or first == "localhost"):
        registry, path = first, rest
    elif default_registry is not None:
        registry, path = default_registry, name
    else:
        raise fault("names no registry")
    path, colon, tag = path.partition(":")
    if registry == "index.docker.io":
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    if not _HOST.fullmatch(registry):
        raise fault(f"{printable(registry)!r} is no host name with an optional port")
    if not _REPOSITORY.fullmatch(path):
        raise fault(f"{printable(path)!r} is no repository name")
    if len(registry) + 1 + len(path) > _LONGEST_NAME:
        raise fault(f"registry and repository have more than {_LONGEST_NAME} characters")
    if colon and not _TAG.fullmatch(tag):
        raise fault(f"{printable(tag)!r} is no tag")
    return Reference(registry, path, tag if colon else None, digest if at else None)
