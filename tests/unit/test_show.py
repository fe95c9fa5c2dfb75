"""Text for people: a build on one screen, what was pushed, what was verified; in a pipe and on a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.unit.image_rooms import DIGEST
from tests.unit.record_samples import BUILD_ID, COMMIT, REFERENCE, WHEELS, record_json, write_build, write_record_of

from cufallback import show
from cufallback.checks import Check
from cufallback.image.reference import parse_reference
from cufallback.push import Pushed, PushedDocument
from cufallback.show import pushed_text, summary_text, verification_text
from cufallback.summary import summary
from cufallback.verify import Verification


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)


def test_a_build_with_an_image(tmp_path: Path) -> None:
    write_build(tmp_path)
    text = summary_text(summary(tmp_path))
    lines = text.split("\n")
    assert "recipe    rehearsal (rehearsal)" in lines
    assert f"build id  {BUILD_ID}" in lines
    assert f"source    vllm 0.27.1 {COMMIT} (quoted), changes: 1" in lines
    assert "locked    1 distributions" in lines
    assert "          3.0 MiB in 2 layers, needs driver>=575.51.03" in lines
    assert "          built by Docker Engine 26.1.5, checks inside: 1 not_run, 1 passed" in lines
    assert f"base      {REFERENCE} {DIGEST}" in lines
    assert "signed    no: cufallback sign DIR --key FILE signs it" in lines
    rows = [line.split() for line in lines]
    assert [WHEELS[0], "5.0", "MiB", "any", "2", "passed,", "1", "warned"] in rows
    assert [WHEELS[1], "5.0", "MiB", "575.51.03", "none"] in rows
    assert ["wheels", "passed", "61.5", "s"] in rows
    assert len(lines) < 40, "one screen"
    assert "\x1b" not in text


def test_a_build_without_an_image_says_why(tmp_path: Path) -> None:
    write_build(tmp_path, with_image=False)
    lines = summary_text(summary(tmp_path)).split("\n")
    assert ["image", "not_run", "no", "engine"] in [line.split() for line in lines]
    assert not [line for line in lines if line.startswith(("image     sha256", "base"))]


def test_a_signed_build_names_its_signatures(tmp_path: Path) -> None:
    write_build(tmp_path)
    (tmp_path / "signatures").mkdir()
    for name in ("record.dsse.json", "provenance.dsse.json"):
        (tmp_path / "signatures" / name).write_text("{}")
    assert "signed    2 signatures: cufallback verify DIR --key FILE checks them" in summary_text(
        summary(tmp_path)
    ).split("\n")


def test_a_replaced_base_a_missing_commit_and_no_driver(tmp_path: Path) -> None:
    value = record_json(tmp_path)
    value["bases"][0]["origin"] = "replaced"
    value["source"]["commit"] = None
    value["image"].update(require_cuda="", engine={})
    write_record_of(tmp_path, value)
    lines = summary_text(summary(tmp_path)).split("\n")
    assert f"base      {DIGEST}, given in place of {REFERENCE}" in lines
    assert "source    vllm 0.27.1, changes: 1" in lines
    assert "          3.0 MiB in 2 layers, needs no driver" in lines
    assert "          built by Docker Engine unknown, checks inside: 1 not_run, 1 passed" in lines


def test_a_summary_is_json_as_it_is(tmp_path: Path) -> None:
    write_build(tmp_path)
    found = summary(tmp_path)
    assert summary_text(json.loads(json.dumps(found))) == summary_text(found)


MARKUP = ["[red]x[/red]", "[/]", ":smile:", "https://example.com/[a]"]


@pytest.mark.parametrize("text", MARKUP)
def test_what_a_record_says_is_text_and_no_markup(tmp_path: Path, text: str) -> None:
    value = record_json(tmp_path)
    value["source"]["origin"] = text
    value["stages"][1]["why"] = text
    write_record_of(tmp_path, value)
    assert f"source    {text} 0.27.1" in summary_text(summary(tmp_path))


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_narrow_terminal_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(show, "terminal", lambda: (columns, False))
    write_build(tmp_path)
    text = summary_text(summary(tmp_path))
    assert all(len(line) <= columns for line in text.split("\n"))
    joined = "".join(text.split())
    assert BUILD_ID in joined
    assert DIGEST in joined


def test_colours_only_on_a_terminal_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    check = (Check("a", "failed", "b"),)
    found = Verification("folder", "0" * 64, check)
    monkeypatch.setattr(show, "terminal", lambda: (80, True))
    assert "\x1b[" in verification_text(found)
    monkeypatch.setattr(show, "terminal", lambda: (80, False))
    assert "\x1b" not in verification_text(found)


def test_the_terminal_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show.terminal() == (1000, False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show.terminal() == (77, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert show.terminal() == (77, False)


IMAGE = parse_reference(f"127.0.0.1:5000/a/b@{DIGEST}")


def test_what_was_pushed() -> None:
    documents = (
        PushedDocument("image.cdx.json", "application/vnd.cyclonedx+json", DIGEST, False),
        PushedDocument("build.tar", "application/vnd.cufallback.build.v1", DIGEST, True),
    )
    lines = pushed_text(Pushed(IMAGE, "127.0.0.1:5000/a/b:1", False, documents, None)).split("\n")
    assert lines[:2] == [f"image     127.0.0.1:5000/a/b@{DIGEST}", "tag       127.0.0.1:5000/a/b:1"]
    rows = [line.split() for line in lines]
    assert ["image.cdx.json", "application/vnd.cyclonedx+json", "new"] in rows
    assert ["build.tar", "application/vnd.cufallback.build.v1", "was", "there"] in rows


def test_what_was_pushed_without_a_tag() -> None:
    lines = pushed_text(Pushed(IMAGE, None, True, (), None)).split("\n")
    assert not [line for line in lines if line.startswith("tag ")]


@pytest.mark.parametrize(
    ("status", "verdict"), [("passed", "verified"), ("failed", "NOT verified"), ("not_run", "verified")]
)
def test_a_verification_shows_what_did_not_pass(status: str, verdict: str) -> None:
    checks = (Check("one", "passed", "fine"), Check("[two]", status, "so it is"))  # type: ignore[arg-type]
    text = verification_text(Verification("folder", "0" * 64, checks))
    counted = {"passed": 1, "failed": 0, "not_run": 0}
    counted[status] += 1
    told = f"{counted['passed']} checks passed, {counted['failed']} failed, {counted['not_run']} not run"
    assert text.split("\n")[0] == f"folder: {verdict}: {told}"
    assert ("[two]" in text) == (status != "passed")
    assert "one" not in text.replace("not", "")
