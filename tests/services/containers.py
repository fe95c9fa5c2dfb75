"""Fixtures for tests of images: an engine, a registry, the tools that speak to them, and a base image.

What runs or is installed is used. What is missing is installed and started only where ``need`` allows it, and what
was started is stopped at the end of the run. The packages stay installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.services.base import BaseLayout, base_folder, cached_base, make_base
from tests.services.debian import installed, program
from tests.services.engine import PrivateEngine, another_engine_runs, engine_answers, private_engine
from tests.services.faulty_registry import Fault, FaultyRegistry, running_front
from tests.services.plugin import Need
from tests.services.registry import running_registry


def _needed(need: Need, name: str) -> str:
    need(name, check=lambda: program(name) is not None, start=installed)
    path = program(name)
    assert path is not None
    return path


@pytest.fixture(scope="session")
def engine(need: Need, test_cache: Path) -> str:
    """DOCKER_HOST of an engine with BuildKit and the containerd image store; "" for the client's own choice.

    ``docker`` and its SDK find it by the environment.
    """

    def start() -> contextlib.AbstractContextManager[None]:
        private = PrivateEngine(Path("/run/cufallback-tests"), test_cache / "engine", not another_engine_runs())
        return private_engine(private)

    need("Docker engine with the containerd image store and buildx", check=engine_answers, start=start)
    return os.environ.get("DOCKER_HOST", "")


@pytest.fixture(scope="session")
def registry(need: Need) -> Iterator[str]:
    """``127.0.0.1:PORT`` of a private registry over plain HTTP, empty at first, with deletion allowed."""
    with running_registry(_needed(need, "docker-registry")) as address:
        yield address


@pytest.fixture(scope="session")
def oras(need: Need) -> str:
    """The path of oras."""
    return _needed(need, "oras")


@pytest.fixture(scope="session")
def cosign(need: Need) -> str:
    """The path of cosign."""
    return _needed(need, "cosign")


@pytest.fixture(scope="session")
def skopeo(need: Need) -> str:
    """The path of skopeo."""
    return _needed(need, "skopeo")


@pytest.fixture(scope="session")
def base_layout(request: pytest.FixtureRequest, need: Need, test_cache: Path) -> BaseLayout:
    """A Debian 12 with Python 3.11, made once and kept in the cache. Never write to its folder."""
    folder = base_folder(test_cache)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cached_base(folder)
        if found is None:
            _needed(need, "mmdebstrap")
            request.getfixturevalue("engine")
            found = make_base(folder)
    return found


@pytest.fixture
def faulty_registry(registry: str) -> Iterator[Callable[[Fault], FaultyRegistry]]:
    """``faulty_registry(fault)`` is a running front of the real registry with one of the module's faults."""
    with contextlib.ExitStack() as fronts:
        yield lambda fault: fronts.enter_context(running_front(registry, fault))
