"""Take secrets out of text before it reaches a log, a record or a screen."""

from __future__ import annotations

import re

MASK = "[redacted]"

# Whole words: a token is secret, TOKENIZERS_PARALLELISM and --max-tokens are not. A name starts only where no name
# character stands before it, so that no line takes time by its length squared.
_WORD = r"(?:token|secrets?|passw(?:or)?ds?|passphrase|credentials?|(?:api|access|private)[_-]?keys?)(?![a-z])"
_NAME = rf"(?<![\w.-])(?=[\w.-]*{_WORD})[\w.-]+"
_VALUE = r"(?:(?<=\")(?:[^\"\\\n]|\\.)*|(?<=')[^'\n]*|[^\s\"',;&]+)"
_SECRET_NAME = re.compile(rf"(?i)authorization|{_NAME}")
_PATTERNS = (
    # user:password@ or token@ in a URL, up to the last @ before the path
    (re.compile(r"(?i)(?P<keep>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^/\s\"'<>]+@"), rf"\g<keep>{MASK}@"),
    # a header to its end, whatever its scheme is called
    (re.compile(r"(?i)(?P<keep>\bauthorization[\"']?\s*[:=]\s*[\"']?)[^\s\"'][^\"'\n]*"), rf"\g<keep>{MASK}"),
    (re.compile(r"(?i)(?P<keep>\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\g<keep>{MASK}"),
    # NAME=value, "name": "value" and --name value for names that speak of a secret
    (re.compile(rf"(?i)(?P<keep>{_NAME}[\"']?\s*[=:]\s*[\"']?){_VALUE}"), rf"\g<keep>{MASK}"),
    # docker's --secret takes the id of a secret, not the secret
    (re.compile(rf"(?i)(?P<keep>(?<![\w.-])(?=--?\w){_NAME}\s+[\"']?)(?!-|id=){_VALUE}"), rf"\g<keep>{MASK}"),
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


def is_secret(name: str, value: str) -> bool:
    """Say whether an environment variable looks like a secret, by its name or by its value."""
    return bool(_SECRET_NAME.search(name)) or redact(value) != value
