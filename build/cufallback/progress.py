"""Progress on stderr: rich bars on a terminal, plain lines elsewhere; nothing on stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

Advance = Callable[[float], None]


class Progress(Protocol):
    """What long work reports to."""

    def say(self, text: str) -> None:
        """Show one finished fact as a line."""
        ...

    def bar(self, title: str, total: float | None, unit: str = "") -> contextlib.AbstractContextManager[Advance]:
        """Show work of ``total`` units (bytes when ``unit`` is "B"); the yielded call adds units."""
        ...


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """See :meth:`Progress.say`."""

    @contextlib.contextmanager
    def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:  # noqa: ARG002
        """See :meth:`Progress.bar`."""
        yield lambda _amount: None


class Plain:
    """One line when work starts, one each five seconds, one when it ends. For logs and CI."""

    _EVERY = 5.0

    def say(self, text: str) -> None:
        """See :meth:`Progress.say`."""
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See :meth:`Progress.bar`."""
        done = 0.0
        started = shown = time.monotonic()

        def advance(amount: float) -> None:
            nonlocal done, shown
            done += amount
            now = time.monotonic()
            if now - shown >= self._EVERY:
                shown = now
                share = f" of {_amount(total, unit)}" if total else ""
                self.say(f"{title}: {_amount(done, unit)}{share}, {now - started:.0f} s")

        yield advance
        amount = f"{_amount(done, unit)} in " if done else ""
        self.say(f"{title}: {amount}{time.monotonic() - started:.1f} s")


class Rich:
    """Live bars on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        """See :meth:`Progress.say`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See :meth:`Progress.bar`."""
        from rich import progress

        counter = (
            (progress.DownloadColumn(), progress.TransferSpeedColumn())
            if unit == "B"
            else (progress.MofNCompleteColumn(), progress.TextColumn(unit))
        )
        with progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            *counter,
            progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
        ) as live:
            task = live.add_task(title, total=total)
            yield lambda amount: live.advance(task, amount)


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    if unit == "B":
        return f"{value / 1e6:.1f} MB"
    return f"{value:.0f} {unit}".strip()


def choose_progress() -> Progress:
    """Return live bars when stderr is a terminal, plain lines otherwise. NO_COLOR is honoured by rich itself."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Rich()
    return Plain()
