"""What a Dockerfile takes from outside: pinned names pass, all else is named with its line; the shipped file passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cufallback.errors import ImageError
from cufallback.image.build import CONTEXTS
from cufallback.image.dockerfile import check_dockerfile, stages

SHIPPED = Path(__file__).resolve().parents[2] / "dockerfiles" / "cu129.Dockerfile"
HEAD = "FROM base AS one\n"


def check(text: str, target: str = "one") -> None:
    check_dockerfile(text, pinned=("base", "wheels"), target=target, where="dockerfiles/x")


PASSES = {
    "AS in any case": "from base as one",
    "a stage in any case": f"{HEAD}FROM ONE AS two\nCOPY --from=Two /a /b",
    "a platform": "FROM --platform=linux/amd64 base AS one",
    "scratch": f"{HEAD}FROM scratch",
    "a stage without a name": f"FROM base\n{HEAD}",
    "a stage by number": f"{HEAD}FROM base AS two\nCOPY --from=0 /a /b",
    "a context": f"{HEAD}COPY --from=wheels /a /b",
    "a mounted context": f"{HEAD}RUN --network=none --mount=type=bind,from=wheels,target=/mnt ls",
    "a mount of a number": f"{HEAD}RUN --network=none --mount=type=bind,from=0,target=/mnt ls",
    "a mount from nowhere else": f"{HEAD}RUN --network=none --mount=type=cache,target=/c --mount=target=/m,source=a ls",
    "from= behind the options": f"{HEAD}RUN --network=none tool --from=elsewhere",
    "ONBUILD": f"{HEAD}ONBUILD COPY --from=wheels /a /b",
    "a here-string and a shift": f"{HEAD}RUN --network=none cat <<< text",
    "a quote behind the options": f'{HEAD}RUN --network=none echo "x" --y="z"',
    "directives that are none": f"{HEAD}# syntax=docker/dockerfile:1",
    "a check directive": f"# check=skip=all\n{HEAD}",
    "comments and blanks in a continued line": f"{HEAD}RUN --network=none a \\\n# FROM evil\n\n  && b",
    "a continued line at the end": f"{HEAD}RUN --network=none a \\",
    "lines of Windows": HEAD.replace("\n", "\r\n") + "RUN --network=none a \\\r\n  b\r\n",
    "blanks behind a backslash": f"{HEAD}RUN --network=none a \\  \n  FROM evil",
}


@pytest.mark.parametrize("text", PASSES.values(), ids=PASSES)
def test_what_takes_nothing_unpinned_passes(text: str) -> None:
    check(text)


UNPINNED = {
    "FROM": ("FROM evil", 2),
    "FROM with a tag": ("FROM python:3", 2),
    "FROM by digest": (f"FROM base@sha256:{'0' * 64}", 2),
    "FROM a variable": ("ARG BASE=base\nFROM ${BASE}", 3),
    "FROM a variable, short": ("FROM $BASE", 2),
    "FROM with an option": ("FROM --platform=$BUILDPLATFORM evil", 2),
    "FROM a number": ("FROM 0", 2),
    "FROM a stage below": ("FROM two\nFROM base AS two", 2),
    "FROM in small letters": ("from evil as x", 2),
    "FROM with a tab": ("FROM\tevil", 2),
    "FROM on two lines": ("FROM \\\n  evil", 2),
    "FROM with a comment between": ("FROM \\\n  # base\n evil", 2),
    "COPY": ("COPY --from=evil /a /b", 2),
    "COPY a variable": ("COPY --from=$STAGE /a /b", 2),
    "COPY on two lines": ("COPY --link \\\n --from=evil /a /b", 2),
    "COPY from nothing": ("COPY --from= /a /b", 2),
    "an option cut in two": ("COPY --fr\\\nom=evil /a /b", 2),
    "a name cut in two": ("COPY --from=wheels\\\n/evil:1 /a /b", 2),
    "a mount cut in two": ("RUN --network=none --mount=target=/x,fr\\\nom=evil ls", 2),
    "a mount": ("RUN --mount=type=bind,from=evil,target=/m ls", 2),
    "a mount, from= first": ("RUN --mount=from=evil,target=/m ls", 2),
    "a mount in capitals": ("RUN --mount=type=bind,FROM=evil ls", 2),
    "the second mount": ("RUN --mount=type=cache,target=/c \\\n --mount=type=bind,from=evil,target=/m ls", 2),
    "the second from= of a mount": ("RUN --mount=type=bind,from=wheels,from=evil ls", 2),
    "a mount behind another option": ("RUN --network=none --mount=type=bind,from=evil ls", 2),
    "ONBUILD": ("ONBUILD COPY --from=evil /a /b", 2),
    "after a doubled backslash": ("RUN --network=none echo a\\\\\nFROM evil", 3),
    "after a backslash and an odd blank": ("RUN --network=none echo a \\\N{NO-BREAK SPACE}\nFROM evil", 3),
    "after a comment with a line separator": ("# c\N{LINE SEPARATOR}RUN \\\nFROM evil", 3),
    "after a comment with a form feed": ("# c\fRUN \\\nFROM evil", 3),
}


@pytest.mark.parametrize(("text", "line"), UNPINNED.values(), ids=UNPINNED)
def test_what_nothing_pins_is_named_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ImageError, match="is no stage above") as raised:
        check(HEAD + text)
    assert raised.value.where == f"dockerfiles/x:{line}"


REFUSED = {
    "syntax": ("# syntax=docker/dockerfile:1\n", "the syntax line fetches docker/dockerfile:1", 1),
    "syntax without blanks": ("#syntax=x\n", "the syntax line fetches x", 1),
    "syntax in capitals": ("# SYNTAX = x\n", "the syntax line fetches x", 1),
    "syntax below a comment and a blank": ("# a comment\n\n   # syntax=x\n", "the syntax line", 3),
    "syntax behind slashes": ("// syntax=x\n", "no instruction", 1),
    "syntax in JSON": ('{"syntax": "x"}\n', "no instruction", 1),
    "syntax behind a shebang": ("#!/usr/bin/env x\n# syntax=x\n", "the syntax line", 2),
    "syntax behind a byte order mark": ("\ufeff# syntax=x\n", "no instruction", 1),
    "escape": ("# escape=`\n", "the escape line", 1),
    "ADD of a list": (f'{HEAD}ADD ["https://evil/x", "/x"]\n', "ADD can fetch", 2),
    "ADD of a variable": (f"{HEAD}ADD ${{U}} /x\n", "ADD can fetch", 2),
    "ADD of a file": (f"{HEAD}ADD rootfs.tar /\n", "ADD can fetch", 2),
    "RUN with the network": (f"{HEAD}RUN apt-get update\n", "without --network=none", 2),
    "RUN with two networks": (f"{HEAD}RUN --network=none --network=default ls\n", "without --network=none", 2),
    "a here-document": (f"{HEAD}RUN <<EOF\nls\nEOF\n", "here-documents", 2),
    "a here-document behind options": (f"{HEAD}RUN --network=none cat <<-'EOF' > /x\nls\nEOF\n", "here-documents", 2),
    "a here-document named by a number": (f"{HEAD}RUN 0<<2\nls\n2\n", "here-documents", 2),
    "a copied here-document": (f"{HEAD}COPY <<a /a\nx\na\n", "here-documents", 2),
    "ADD of a URL": (f"{HEAD}ADD https://example.com/a /a\n", "ADD can fetch", 2),
    "ADD of a repository": (f"{HEAD}ADD --keep-git-dir=true git@example.com:a/b.git /a\n", "ADD can fetch", 2),
    "ADD of a short name": (f"{HEAD}ADD github.com/a/b /a\n", "ADD can fetch", 2),
    "ADD with a checksum": (f"{HEAD}ADD --checksum=sha256:0 http://example.com/a /a\n", "ADD can fetch", 2),
    "a quoted option": (f'{HEAD}RUN --mount=type=bind,"from=evil" ls\n', "quotes", 2),
    "a quote within an option": (f"{HEAD}RUN --mount=type=bind,fr'o'm=evil ls\n", "quotes", 2),
    "a backslash in an option": (f"{HEAD}COPY --fr\\om=evil /a /b\n", "quotes", 2),
    "an unknown instruction": (f"{HEAD}INCLUDE other\n", "no instruction", 2),
    "FROM nothing": (f"{HEAD}FROM\n", "no instruction", 2),
    "FROM with too much": (f"{HEAD}FROM base AS a b\n", "no instruction", 2),
    "FROM an option alone": (f"{HEAD}FROM --platform=x\n", "no instruction", 2),
    "binary": ("\0\1\2", "no instruction", 1),
}


@pytest.mark.parametrize(("text", "reason", "line"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_here_is_refused_and_not_passed_over(text: str, reason: str, line: int) -> None:
    with pytest.raises(ImageError, match=reason) as raised:
        check(text)
    assert raised.value.where == f"dockerfiles/x:{line}"
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("text", "shown"), [(HEAD, "its stages: one"), ("FROM base", "its stages: none"), ("", "none")]
)
def test_a_missing_target_is_named(text: str, shown: str) -> None:
    with pytest.raises(ImageError, match="has no stage 'probe'") as raised:
        check(text, "probe")
    assert shown in raised.value.remedy


def instructions() -> list[str]:
    """Return the shipped file's instructions: comments and blank lines out, continued lines joined."""
    lines = [line for line in SHIPPED.read_text().split("\n") if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").split("\n")


def test_the_shipped_file_takes_nothing_unpinned() -> None:
    text = SHIPPED.read_text()
    for target in ("probe", "server"):
        check_dockerfile(text, pinned=("base", *CONTEXTS), target=target, where=SHIPPED.name)
    with pytest.raises(ImageError, match="'wheelhouse'"):
        check_dockerfile(text, pinned=("base", "wheels"), target="probe", where=SHIPPED.name)
    assert stages(text)[0] == "dependencies"


def test_each_stage_of_the_shipped_file_with_a_run_takes_the_epoch_before_it() -> None:
    """BuildKit hands the argument to a stage only where it is declared; without it bytecode and times differ."""
    runs, declared = 0, False
    for line in instructions():
        declared = declared or line == "ARG SOURCE_DATE_EPOCH"
        if line.startswith("FROM "):
            declared = False
        elif line.startswith("RUN "):
            runs += 1
            assert declared, line
    assert runs >= 3


def test_no_step_of_the_shipped_file_has_a_network_or_root_at_the_end() -> None:
    runs = [line for line in instructions() if line.startswith("RUN ")]
    assert runs
    assert all(line.startswith("RUN --network=none ") for line in runs)
    assert [line for line in instructions() if re.match("USER", line)] == ["USER 10001:10001"]
    assert not re.search(r"useradd|adduser|chpasswd", "\n".join(runs)), "these stamp the day into /etc/shadow"
