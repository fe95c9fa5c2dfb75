"""What the wheel tests share: real wheelhouses and locks, cached, and small projects to build."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from cufallback.process import LocalRunner
from cufallback.progress import Silent
from cufallback.store import Store, sha256_bytes, sha256_file
from cufallback.wheel.builder import BuildRequest, BuiltWheel, build_wheel
from cufallback.wheel.environment import Environment, create_environment, find_uv
from cufallback.wheel.isolate import Isolation, probe_isolation

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
EPOCH = 1_754_900_000
NONE = Isolation("none", root=os.geteuid() == 0, why="chosen by a test")

TINY = ("build==1.6.1", "pip==26.1.2", "setuptools==77.0.3", "wheel==0.48.0")
PROBE = ("build==1.6.1", "hatchling==1.33.0", "cuda-toolkit[cudart,nvfatbin,nvrtc]==12.9.1")
TOOLS = ("nvidia-cuda-cuobjdump==13.2.86",)


@dataclass(frozen=True)
class House:
    """A wheelhouse with the lock that it was filled from."""

    wheelhouse: Path
    lock: Path
    python: str

    def environment(self, folder: Path, *, python: str | Path | None = None) -> Environment:
        return create_environment(
            folder,
            wheelhouse=self.wheelhouse,
            lock=self.lock,
            python=python or self.python,
            runner=LocalRunner(),
            log=folder.with_name(f"{folder.name}.log"),
        )


@pytest.fixture(scope="session")
def house(test_cache: Path) -> Callable[..., House]:
    """``house(requirements, python)``: lock and download them once, then work from the cache."""

    @functools.cache
    def furnish(requirements: tuple[str, ...], python: str = THIS) -> House:
        name = sha256_bytes("\n".join((python, *requirements)).encode())[:16]
        folder = test_cache / f"house-{name}"
        folder.mkdir(exist_ok=True)
        lock = folder / "build.txt"
        with (folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not lock.is_file():
                _compile(requirements, python, lock)
            _fill(folder / "wheelhouse", lock, python, Store(test_cache / "store"))
        return House(folder / "wheelhouse", lock, python)

    return furnish


def _compile(requirements: tuple[str, ...], python: str, lock: Path) -> None:
    wanted = lock.with_suffix(".in")
    wanted.write_text("\n".join((*requirements, "")))
    partial = lock.with_suffix(".partial")
    links = [word for link in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", link)]
    LocalRunner().run(
        [
            *(find_uv(), "pip", "compile", "--quiet", "--no-config", "--generate-hashes", "--no-header"),
            *("--no-annotate", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
            *("--extra-index-url", "https://download.pytorch.org/whl/cpu") * (not links and _torch(requirements)),
            *(*links, "--output-file", partial, wanted),
        ]
    )
    partial.replace(lock)


def _torch(requirements: tuple[str, ...]) -> bool:
    return any(line.startswith("torch") for line in requirements)


def _fill(wheelhouse: Path, lock: Path, python: str, store: Store) -> None:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple

    wheelhouse.mkdir(exist_ok=True)
    here = {sha256_file(path) for path in wheelhouse.glob("*.whl")}
    version = (int(python.split(".")[0]), int(python.split(".")[1]))
    tags = {*cpython_tags(version), *compatible_tags(version)}
    text = lock.read_text().replace("\\\n", " ")
    for name, pinned, hashes in re.findall(r"^([\w.-]+)==(\S+)((?:\s+--hash=sha256:\w+)+)", text, re.MULTILINE):
        digests = set(re.findall(r"sha256:(\w+)", hashes))
        if digests & here:
            continue
        for folder in os.environ.get("PIP_FIND_LINKS", "").split():
            for path in Path(folder).glob("*.whl"):
                if parse_wheel_filename(path.name)[0] == canonicalize_name(name) and sha256_file(path) in digests:
                    (wheelhouse / path.name).hardlink_to(path) if _same_disk(path, wheelhouse) else (
                        wheelhouse / path.name
                    ).write_bytes(path.read_bytes())
                    digests = set()
        if not digests:
            continue
        endpoint = (
            "https://download.pytorch.org/whl/cpu/"
            if "+cpu" in pinned
            else os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
        )
        with PyPISimple(endpoint) as index:
            for package in index.get_project_page(name).packages:
                digest = (package.digests or {}).get("sha256")
                if digest in digests and package.filename.endswith(".whl"):
                    if not parse_wheel_filename(package.filename)[3] & tags:
                        continue
                    if not store.has(digest):
                        partial = wheelhouse / f".{package.filename}"
                        index.download_package(package, partial, timeout=180)
                        store.add(partial, sha256=digest)
                    store.place(digest, wheelhouse / package.filename)
                    break
            else:
                pytest.fail(f"the index has no wheel of {name}=={pinned} for Python {python}")


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


@pytest.fixture(scope="session")
def granted() -> Isolation:
    """The isolation of this machine; tests of namespaces skip where it grants none."""
    found = probe_isolation(LocalRunner(), environ={})
    if found.kind == "none":
        pytest.skip(f"this machine grants no namespaces: {found.why}")
    return found


def build(
    source: Path,
    environment: Environment,
    work: Path,
    isolation: Isolation,
    variables: Mapping[str, str] | None = None,
) -> BuiltWheel:
    """Build ``source`` with everything of the build below ``work``."""
    request = BuildRequest(
        source=source,
        environment=environment,
        output=work / "output",
        build_environment=variables or {},
        epoch=EPOCH,
        jobs=2,
        log=work / "build.log",
        scratch=work / "scratch",
    )
    return build_wheel(request, LocalRunner(), Silent(), isolation=isolation)


def write_project(folder: Path, files: Mapping[str, str]) -> Path:
    """Write a setuptools project named tiny."""
    settings = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    for name, text in {"pyproject.toml": settings, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def extension_project(folder: Path, *, body: str = "return PyLong_FromLong(__LINE__);") -> Path:
    """A C extension that keeps paths: debug information, __FILE__, and the interpreter's headers."""
    return write_project(
        folder,
        {
            "setup.py": """
                from setuptools import Extension, setup
                extension = Extension("tiny.native", ["src/native.c"], extra_compile_args=["-g", "-O1"])
                setup(name="tiny", version="1.0", packages=["tiny"], ext_modules=[extension])
                """,
            "tiny/__init__.py": "",
            "src/native.c": f"""
                #include <Python.h>
                static const char here[] __attribute__((used)) = __FILE__;
                static PyObject *line(PyObject *self, PyObject *none) {{ {body} }}
                static PyMethodDef methods[] = {{{{"line", line, METH_NOARGS, here}}, {{0}}}};
                static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "native", here, -1, methods}};
                PyMODINIT_FUNC PyInit_native(void) {{ return PyModule_Create(&module); }}
                """,
        },
    )
