"""Take secrets out of text before it reaches a log, a record or a screen."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "[redacted]"

_SECRET_NAME = re.compile(r"(?i)(token|secret|passw(or)?d|passphrase|api_?key|credential|authorization|private_?key)")
_PATTERNS = (
    # user:password@ or token@ in a URL
    (re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]*://)[^/\s@]+@"), rf"\g<keep>{MASK}@"),
    (re.compile(r"(?i)(?P<keep>\bauthorization\s*[:=]\s*(?:bearer|basic|token)?\s*)[^\s'\",]+"), rf"\g<keep>{MASK}"),
    (re.compile(r"(?i)(?P<keep>\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\g<keep>{MASK}"),
    # NAME=value and --name value / "name": "value" for names that speak of a secret
    (
        re.compile(
            r"(?i)(?P<keep>\b[\w-]*(?:token|secret|password|passwd|passphrase|api[_-]?key|private[_-]?key)"
            r"[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+"
        ),
        rf"\g<keep>{MASK}",
    ),
    # well-known token shapes: GitHub, GitLab, Hugging Face, package index, AWS, Slack
    (
        re.compile(
            r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
            r"|pypi-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|sk-[A-Za-z0-9_-]{16,})"
        ),
        MASK,
    ),
)


def redact(text: str) -> str:
    """Return ``text`` with credentials in URLs, headers, assignments and known token shapes masked."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the values of secret-sounding names masked, for display or a record."""
    return {name: MASK if _SECRET_NAME.search(name) else redact(value) for name, value in sorted(environment.items())}
