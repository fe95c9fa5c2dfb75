from __future__ import annotations

import io
import sys

import pytest

from cufallback import progress
from cufallback.progress import Plain, Rich, Silent, choose_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shown", [Silent(), Plain(), Rich()], ids=lambda shown: type(shown).__name__)
def test_stdout_belongs_to_data(shown: progress.Progress, capsys: pytest.CaptureFixture[str]) -> None:
    shown.say("a fact")
    with shown.bar("work", 2, "files") as advance:
        advance(1)
    assert capsys.readouterr().out == ""


def test_plain_lines_say_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Plain()
    shown.say("a fact")
    with shown.bar("download", 3e6, "B") as advance:
        advance(1e6)
        advance(2e6)
    with shown.bar("look", None, "files") as advance:
        advance(7)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a fact"
    assert lines[1].startswith("download: 3.0 MB in 0.")
    assert lines[2].startswith("look: 7 files in 0.")


def test_plain_lines_come_at_intervals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("cufallback.progress.time.monotonic", lambda: now)
    with Plain().bar("download", 4e6, "B") as advance:
        for now in (101.0, 104.9, 105.0, 106.0):  # noqa: B007 - the clock reads it
            advance(1e6)
    assert capsys.readouterr().err.splitlines() == [
        "download: 3.0 MB of 4.0 MB, 5 s",
        "download: 4.0 MB in 6.0 s",
    ]


def test_work_that_fails_does_not_claim_to_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="gone"), Plain().bar("download", 4e6, "B"):
        raise OSError("gone")
    assert capsys.readouterr().err == ""


def test_titles_are_text_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    shown = Rich()
    shown.say("wheel[all] [bold]x[/bold]")
    with shown.bar("vllm[all]", 10, "B") as advance:
        advance(10)
    assert "wheel[all] [bold]x[/bold]" in screen.getvalue()
    assert "vllm[all]" in screen.getvalue()


@pytest.mark.parametrize(
    ("stream", "term", "kind"), [(Terminal, "xterm", Rich), (Terminal, "dumb", Plain), (io.StringIO, "xterm", Plain)]
)
def test_bars_are_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], term: str, kind: type
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", term)
    assert isinstance(choose_progress(), kind)
