"""Check an address before anything uses it, without ever repeating it: it may carry a secret."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit


def url_fault(url: str, schemes: Collection[str]) -> str | None:
    """Return what is wrong with an address, in words that do not contain it, or None.

    Args:
        url: the address.
        schemes: those that are allowed; all but ``file`` need a host.
    """
    if not url.isprintable():
        return "has a control character in it"
    if " " in url and not url.startswith("file://"):
        return "has a space in it"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port  # checked when it is read
        host.encode("idna")
    except ValueError:
        return "has no valid host and port"
    if "://" not in url or parts.scheme not in schemes:
        return f"does not begin with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    if not host and parts.scheme != "file":
        return "names no host"
    return None
