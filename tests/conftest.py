"""Fixtures that tests of several rooms share: real vLLM source distributions, fetched once and verified."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cufallback.store import sha256_file

pytest_plugins = ["tests.services.plugin", "tests.services.containers"]

# A shell starts what it runs in the background with Ctrl-C ignored, and every child inherits that: tests of Ctrl-C
# would then test nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Computed from the files on the package index, November 2026.
SDISTS = {
    "0.27.0": "862671641625d6cfb7aaab98a5386126738b59ca50e5d01ca539a4e32f63ffcb",
    "0.27.1": "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646",
    "0.28.0": "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
    "0.29.0": "c03feb07943ecae9e69e7dc424d7c5569ecf8d1292513aef2a4de67af381cd97",
    "0.30.0": "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b",
    "0.31.0": "dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """The folder that outlives test runs: CUFALLBACK_TEST_CACHE, by default ~/.cache/cufallback-tests."""
    chosen = os.environ.get("CUFALLBACK_TEST_CACHE")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "cufallback-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def sdist(test_cache: Path) -> Callable[[str], Path]:
    """``sdist(version)`` is the path of vLLM's source distribution, downloaded at most once. Never write to it."""

    @functools.cache
    def fetch(version: str) -> Path:
        path = test_cache / f"vllm-{version}.tar.gz"
        with _only_one(path):
            if not (path.is_file() and sha256_file(path) == SDISTS[version]):
                partial = path.with_suffix(".partial")
                _download(path.name, partial)
                assert sha256_file(partial) == SDISTS[version], f"the index served another {path.name}"
                partial.replace(path)
        return path

    return fetch


@pytest.fixture(scope="session")
def extracted(test_cache: Path, sdist: Callable[[str], Path]) -> Callable[[str], Path]:
    """``extracted(version)`` is that source distribution unpacked by tarfile alone. Copy what a test will change."""

    @functools.cache
    def extract(version: str) -> Path:
        archive = sdist(version)
        target = test_cache / f"tree-{version}-{SDISTS[version][:12]}"
        with _only_one(target):
            if not target.is_dir():
                scratch = target.with_suffix(".partial")
                shutil.rmtree(scratch, ignore_errors=True)
                with tarfile.open(archive) as tar:
                    tar.extractall(scratch, filter="data")
                (scratch / f"vllm-{version}").replace(target)
                scratch.rmdir()
        return target

    return extract


def _download(name: str, path: Path) -> None:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple

    with PyPISimple(os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT) as index:
        (package,) = (package for package in index.get_project_page("vllm").packages if package.filename == name)
        index.download_package(package, path, timeout=180)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock file beside ``path``, so that parallel test processes do the work once."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
