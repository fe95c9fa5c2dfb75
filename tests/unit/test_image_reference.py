"""References: the grammar of the OCI distribution specification, Docker's short names, one clear error for the rest."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufallback.errors import UsageError
from cufallback.image.reference import DOCKER_HUB, Reference, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4

component = st.from_regex(r"[a-z0-9]{1,5}((\.|_|__|-{1,3})[a-z0-9]{1,4}){0,2}", fullmatch=True)
references = st.builds(
    Reference,
    st.sampled_from(["localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000", "ghcr.io", "Reg.example.org:443"]),
    st.lists(component, min_size=1, max_size=4).map("/".join),
    st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.none() | st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True),
)


@given(references)
def test_written_and_read_back(reference: Reference) -> None:
    assert parse_reference(str(reference)) == reference
    # A name with a registry does not depend on the default.
    assert parse_reference(str(reference), DOCKER_HUB) == reference


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("python:3.11-slim", "docker.io/library/python:3.11-slim"),
        ("docker.io/python:3.11-slim", "docker.io/library/python:3.11-slim"),
        ("docker.io/library/debian", "docker.io/library/debian"),
        ("index.docker.io/nvidia/cuda:12.9.1", "docker.io/nvidia/cuda:12.9.1"),
        ("nvidia/cuda:12.9.1-devel-ubuntu22.04", "docker.io/nvidia/cuda:12.9.1-devel-ubuntu22.04"),
        (f"debian:12@{DIGEST}", f"docker.io/library/debian:12@{DIGEST}"),
        ("localhost/a", "localhost/a"),
        ("nvcr.io/nvidia/pytorch:25.06-py3", "nvcr.io/nvidia/pytorch:25.06-py3"),
    ],
)
def test_short_names_are_dockers(text: str, full: str) -> None:
    assert str(parse_reference(text, DOCKER_HUB)) == full


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no registry"),
        ("python:3.11", "names no registry"),
        ("team/app", "names no registry"),
        ("ghcr.io/", "no repository name"),
        ("ghcr.io/Team/app", "no repository name"),
        ("ghcr.io/team//app", "no repository name"),
        ("ghcr.io/team/app-", "no repository name"),
        ("ghcr.io/team/a b", "no repository name"),
        ("https://ghcr.io/team/app", "no host name"),
        ("user@ghcr.io/app", "the digest is not"),
        ("-x.io/app", "no host name"),
        ("ghcr.io:port/app", "no host name"),
        ("ghcr.io/app:", "no tag"),
        ("ghcr.io/app:.x", "no tag"),
        ("ghcr.io/app:" + "x" * 129, "no tag"),
        ("ghcr.io/app:a:b", "no tag"),
        ("ghcr.io/app@sha256:12", "the digest is not"),
        ("ghcr.io/app@sha512:" + "0" * 128, "the digest is not"),
        ("ghcr.io/app@" + DIGEST.upper(), "the digest is not"),
        ("ghcr.io/app\n", "no repository name"),
        ("ghcr.io/" + "a" * 300, "more than 255"),
    ],
)
def test_what_is_no_reference(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)) as caught:
        parse_reference(text)
    assert "REGISTRY/NAME" in caught.value.remedy
    assert "\n" not in str(caught.value.where)


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_an_error(text: str) -> None:
    try:
        reference = parse_reference(text, DOCKER_HUB)
    except UsageError:
        return
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    ("registry", "loopback"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.8.9.10", True),
        ("[::1]:5000", True),
        ("127.0.0.1.example.org", False),
        ("ghcr.io", False),
        ("[::2]:5000", False),
    ],
)
def test_only_this_machine_is_loopback(registry: str, loopback: bool) -> None:
    assert Reference(registry, "a").is_loopback is loopback


def test_another_digest_or_tag_of_the_same_repository() -> None:
    reference = parse_reference("ghcr.io/team/app:v1")
    assert reference.named == "ghcr.io/team/app"
    assert str(reference.at(DIGEST)) == f"ghcr.io/team/app@{DIGEST}"
    assert str(reference.at(DIGEST).tagged("v2")) == "ghcr.io/team/app:v2"
