"""Services that tests need: used where they run, started where that is allowed, and never missed silently in CI.

A test that needs one is marked ``services`` and asks for it in its first line::

    need("docker engine", check=engine_answers, start=engine)

``check`` says whether the service answers; ``start`` returns a context manager that installs and starts it on
entering and stops it on leaving, at the end of the test run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import pytest


class Need(Protocol):
    """Makes sure that a service answers, or skips the test."""

    def __call__(
        self, name: str, *, check: Callable[[], bool], start: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """See the module."""


def in_ci() -> bool:
    """Say whether this is a continuous-integration run, where everything that can be tested must be."""
    return os.environ.get("CI") == "true"


@pytest.fixture(scope="session")
def need() -> Iterator[Need]:
    """Return the function that brings up services; what it started stops when the run ends."""
    with contextlib.ExitStack() as started:

        def bring_up(
            name: str, *, check: Callable[[], bool], start: Callable[[], contextlib.AbstractContextManager[Any]]
        ) -> None:
            if check():
                return
            if not in_ci() and os.environ.get("CUFALLBACK_TEST_SERVICES") != "1":
                pytest.skip(
                    f"the service {name!r} does not run here; start it, or set CUFALLBACK_TEST_SERVICES=1 to let the "
                    "tests install and start it (as root on Debian)"
                )
            started.enter_context(start())
            if not check():
                pytest.fail(f"the service {name!r} was started but does not answer")

        yield bring_up


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test that is marked ``services`` is a failure, whoever skipped it."""
    report = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("services"):
        report.outcome = "failed"
        report.longrepr = f"CI=true allows no skip for want of a service: {report.longreprtext}"
    return report
