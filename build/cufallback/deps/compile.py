"""Resolve operated requirements with uv, and with pip-tools as a second opinion."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from cufallback.deps.policy import Resolved
from cufallback.deps.surgery import Operated
from cufallback.download import default_index
from cufallback.errors import CommandError, LockError
from cufallback.process import Runner
from cufallback.recipe import Recipe
from cufallback.store import write_atomic
from cufallback.wheel.environment import find_uv

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:(?P<sha256>[0-9a-f]{64})")
_VIA = re.compile(r"^\s+#\s+(?:via\s+)?(?P<parent>\S.*)$")
_PROJECT = "resolution"
_LIMIT = 900.0  # seconds for one resolution


@dataclass(frozen=True)
class Resolution:
    """A closure, and the SHA-256 of every file that the index has for each distribution in it."""

    closure: tuple[Resolved, ...]
    hashes: Mapping[str, frozenset[str]]


def resolve(
    operated: Operated, recipe: Recipe, *, mirrors: Sequence[Path], workdir: Path, runner: Runner
) -> Resolution:
    """Resolve with ``uv pip compile``, each named package from its one index, all others from the default index.

    uv applies ``tool.uv.sources`` to direct dependencies only. A package of an explicit index that turns out to
    be a dependency of another one is therefore made a direct one, and the resolution is repeated.

    Args:
        operated: requirement lines and overrides.
        recipe: names target, time bound and indexes.
        mirrors: find-links folders; an explicit index all of whose packages lie in one is replaced by it.
        workdir: folder for the generated project and the log.
        runner: starts uv.

    Raises:
        LockError: no resolution; uv's explanation is in the remedy.
        ToolchainError: no uv.
    """
    lines = list(operated.lines)
    while True:
        resolution = _uv(lines, operated.overrides, recipe, mirrors, workdir, runner)
        direct = {canonicalize_name(Requirement(line).name) for line in lines}
        explicit = {canonicalize_name(name) for index in recipe.deps.index for name in index.packages}
        strays = [item.name for item in resolution.closure if item.name in explicit and item.name not in direct]
        if not strays:
            return resolution
        lines += strays


def _uv(
    lines: Sequence[str],
    overrides: Sequence[str],
    recipe: Recipe,
    mirrors: Sequence[Path],
    workdir: Path,
    runner: Runner,
) -> Resolution:
    project = workdir / "pyproject.toml"
    write_atomic(project, _pyproject(lines, recipe, mirrors).encode())
    override_file = workdir / "overrides.txt"
    write_atomic(override_file, "".join(f"{line}\n" for line in overrides).encode())
    out = workdir / "resolved.txt"
    out.unlink(missing_ok=True)
    command: list[str | Path] = [find_uv(), "pip", "compile", project, "--no-config", "--quiet", "--no-progress"]
    command += ["--generate-hashes", "--no-header", "--only-binary", ":all:"]
    command += ["--python-version", recipe.python.version, "--python-platform", recipe.python.platform]
    command += ["--exclude-newer", recipe.deps.exclude_newer, "--overrides", override_file, "--output-file", out]
    # A mirror's index page gives no upload times, and uv takes a file without one as too new.
    environment = {**os.environ, "UV_DEFAULT_INDEX": default_index(), "UV_PYTHON_DOWNLOADS": "never"}
    try:
        runner.run(command, cwd=workdir, env=environment, log=workdir / "uv.log", timeout=_LIMIT)
    except CommandError as error:
        raise LockError(
            "the requirements could not be resolved", remedy=error.remedy, where=f"recipe {recipe.name}"
        ) from error
    return parse_resolution(out.read_text(encoding="utf-8"))


def _pyproject(lines: Sequence[str], recipe: Recipe, mirrors: Sequence[Path]) -> str:
    """Return a project whose sources tie each package of an explicit index to that index."""
    direct = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    text = [
        "[project]",
        f'name = "{_PROJECT}"',
        'version = "0"',
        f'requires-python = ">={recipe.python.version}"',
        "dependencies = [",
        *(f"    {_quoted(line)}," for line in lines),
        "]",
    ]
    sources = ["", "[tool.uv.sources]"]
    for index in recipe.deps.index:
        used = [direct[name] for name in map(canonicalize_name, index.packages) if name in direct]
        if not used:
            continue
        mirror = _mirror_of(used, mirrors)
        text += ["", "[[tool.uv.index]]", f'name = "{index.name}"', "explicit = true"]
        text += [f"url = {_quoted(str(mirror))}", 'format = "flat"'] if mirror else [f"url = {_quoted(index.url)}"]
        sources += [f'"{requirement.name}" = {{ index = "{index.name}" }}' for requirement in used]
    return "\n".join([*text, *sources, ""])


def _mirror_of(requirements: Sequence[Requirement], mirrors: Sequence[Path]) -> Path | None:
    """Return the folder that holds a wheel for each requirement, or None."""
    for folder in mirrors:
        have = []
        for path in folder.glob("*.whl"):
            try:
                name, version, _build, _tags = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            have.append((name, version))
        if all(
            any(
                name == canonicalize_name(item.name) and item.specifier.contains(version, prereleases=True)
                for name, version in have
            )
            for item in requirements
        ):
            return folder.resolve()
    return None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_resolution(text: str) -> Resolution:
    """Read what uv or pip-tools wrote: pins, hashes, and who requires what from the ``# via`` comments."""
    order: list[tuple[str, str]] = []
    hashes: dict[str, set[str]] = {}
    via: dict[str, list[str]] = {}
    for line in text.splitlines():
        pin = _PIN.match(line)
        if pin:
            name = canonicalize_name(pin["name"])
            order.append((name, pin["version"]))
            hashes.setdefault(name, set())
            via.setdefault(name, [])
        if order and (digest := _HASH.search(line)):
            hashes[order[-1][0]].add(digest["sha256"])
        parent = _VIA.match(line)
        if order and parent and parent["parent"] != "via":
            words = parent["parent"].split()
            if words[0] != _PROJECT and not words[0].startswith(("-r", "--")):
                via[order[-1][0]].append(canonicalize_name(words[0]))
    closure = tuple(Resolved(name, version, tuple(via[name])) for name, version in order)
    return Resolution(closure, {name: frozenset(found) for name, found in hashes.items()})


def second_opinion(
    operated: Operated, resolution: Resolution, recipe: Recipe, *, workdir: Path, runner: Runner
) -> tuple[str, ...]:
    """Resolve what comes from the default index with pip-tools and return every difference, one line each.

    Requirements of an explicit index are left out, so what only they need is not compared.

    Raises:
        LockError: this Python is not the recipe's, or pip-tools finds no resolution.
    """
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != recipe.python.version:
        raise LockError(
            f"pip-tools resolves for the Python that runs it, {running}, not for {recipe.python.version}",
            remedy=f"run cufallback with Python {recipe.python.version} for the second opinion",
            where="--engine pip-tools",
        )
    explicit = {canonicalize_name(name) for index in recipe.deps.index for name in index.packages}
    lines = [line for line in operated.lines if canonicalize_name(Requirement(line).name) not in explicit]
    source, out = workdir / "second.in", workdir / "second.txt"
    write_atomic(source, "".join(f"{line}\n" for line in lines).encode())
    out.unlink(missing_ok=True)  # pip-compile would take its pins and hashes over
    command: list[str | Path] = [sys.executable, "-m", "piptools", "compile", "--quiet", "--generate-hashes"]
    command += ["--allow-unsafe", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--strip-extras"]
    command += ["--uploaded-prior-to", recipe.deps.exclude_newer, "--output-file", out, source]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": default_index()}
    try:
        runner.run(command, cwd=workdir, env=environment, log=workdir / "pip-tools.log", timeout=_LIMIT)
    except CommandError as error:
        raise LockError(
            "pip-tools could not resolve the requirements", remedy=error.remedy, where=f"recipe {recipe.name}"
        ) from error
    other = parse_resolution(out.read_text(encoding="utf-8"))
    ours = {item.name: item.version for item in resolution.closure}
    differences = []
    for item in other.closure:
        if item.name not in ours:
            differences.append(f"{item.name}: pip-tools has {item.version}, uv does not have it")
        elif ours[item.name] != item.version:
            differences.append(f"{item.name}: pip-tools has {item.version}, uv has {ours[item.name]}")
        elif other.hashes[item.name] != resolution.hashes[item.name]:
            differences.append(f"{item.name} {item.version}: the hash sets differ")
    return tuple(differences)
