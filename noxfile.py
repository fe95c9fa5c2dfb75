"""Sessions of `nox`. Each is one call; what it does lives in the `cufallback` command or in a tool."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests"]

# uv would otherwise fetch an interpreter of its own when it does not like the one that nox runs on.
os.environ["UV_PYTHON_DOWNLOADS"] = "never"

ROOT = Path(__file__).parent
LOCK = Path("locks/cufallback/dev.txt")


def environment(session: nox.Session) -> None:
    """Bring the session's environment to the state of the lock; nothing to do when the stamp says that it is.

    The stamp covers pyproject.toml, the lock and the interpreter. The package itself is installed editable, so
    that a change of source needs no new installation.
    """
    settings = Path(session.virtualenv.location) / "pyvenv.cfg"
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if session.python is None and f"version_info = {platform.python_version()}\n" not in settings.read_text():
        session.run_install("uv", "venv", "--quiet", "--clear", "--python", sys.executable, settings.parent)
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", ROOT / LOCK, settings):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    if stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return
    stamp.unlink(missing_ok=True)
    session.run_install("uv", "pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode", LOCK)
    # hatchling comes from the lock too: nothing is fetched that the lock does not name.
    session.run_install("uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    stamp.write_text(digest.hexdigest())


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    environment(session)
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strictly."""
    environment(session)
    session.run("mypy", *session.posargs)
    session.run("mypy", "noxfile.py", "docs/generate.py")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; words after -- go to pytest."""
    environment(session)
    session.run("pytest", *session.posargs)


@nox.session(name="build-cu129")
def build_cu129(session: nox.Session) -> None:
    """Build the production recipe; -- --recipe rehearsal runs the whole pipeline on any Linux x86_64 machine."""
    environment(session)
    session.run("cufallback", "build", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve and write the locks of a recipe; -- --check fails when the committed ones have drifted."""
    environment(session)
    session.run("cufallback", "lock", *session.posargs)


@nox.session
def verify(session: nox.Session) -> None:
    """Verify a build folder from disk alone: -- dist/RECIPE/BUILD-ID."""
    environment(session)
    session.run("cufallback", "verify", *session.posargs)


@nox.session
def push(session: nox.Session) -> None:
    """Push the image of a build and all that was said of it: -- REGISTRY/NAME:TAG."""
    environment(session)
    session.run("cufallback", "push", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated pages of docs/ and the recipe schema anew; -- --check fails when they are not current."""
    environment(session)
    session.run("python", "docs/generate.py", *session.posargs)


@nox.session(name="lock-dev")
def lock_dev(session: nox.Session) -> None:
    """Refresh locks/cufallback/dev.txt, the environment of these sessions; -- --upgrade moves its pins."""
    options = ("--quiet", "--universal", "--generate-hashes", "--group", "dev", "--output-file", str(LOCK))
    header = ("--custom-compile-command", "nox -s lock-dev")
    session.run("uv", "pip", "compile", "pyproject.toml", *options, *header, *session.posargs)
