"""Resolve operated requirements with uv, and with pip-tools as a second opinion."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cufallback.deps.lockfile import explicit_indexes
from cufallback.deps.policy import Resolved
from cufallback.deps.surgery import Operated
from cufallback.deps.target import Target, target_of, wheels_in
from cufallback.download import default_index, index_session, project_files, without_default_index
from cufallback.errors import CommandError, LockError
from cufallback.process import Runner
from cufallback.recipe import Recipe
from cufallback.store import write_atomic
from cufallback.toolchain import probe_uv, require
from cufallback.wheel.environment import find_uv

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:(?P<sha256>[0-9a-f]{64})")
_VIA = re.compile(r"^\s+#\s+(?:via\s+)?(?P<parent>\S+)")
_PROJECT = "resolution"
# What of the user's settings for uv and pip has a say here: how to reach the network, never what is resolved.
_KEPT_SETTINGS = re.compile(
    r"UV_(?:CACHE_DIR|NO_CACHE|OFFLINE|HTTP_\w+|SYSTEM_CERTS|NATIVE_TLS|INSECURE_HOST|KEYRING_PROVIDER|CONCURRENT_\w+"
    r"|INDEX_\w+_(?:USERNAME|PASSWORD))"
    r"|PIP_(?:CACHE_DIR|NO_CACHE_DIR|CERT|CLIENT_CERT|PROXY|TIMEOUT|DEFAULT_TIMEOUT|RETRIES|TRUSTED_HOST|KEYRING_PROVIDER)"
)
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
        mirrors: find-links folders; one that has every package of an explicit index, each pinned exactly, stands in
            for it.
        workdir: folder for the generated project and the log.
        runner: starts uv.

    Raises:
        LockError: no resolution; uv's explanation is in the remedy.
        DownloadError: an explicit index cannot be asked.
        ToolchainError: no uv, or one too old.
    """
    require([probe_uv(runner)])
    lines = list(operated.lines)
    while True:
        resolution = _uv(lines, operated.overrides, recipe, mirrors, workdir, runner)
        direct = {canonicalize_name(Requirement(line).name) for line in lines}
        explicit = explicit_indexes(recipe).keys() - direct
        strays = [item.name for item in resolution.closure if item.name in explicit]
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
    text, unbounded = _pyproject(lines, recipe, mirrors)
    write_atomic(project, text.encode())
    override_file = workdir / "overrides.txt"
    write_atomic(override_file, "".join(f"{line}\n" for line in overrides).encode())
    out = workdir / "resolved.txt"
    out.unlink(missing_ok=True)
    command: list[str | Path] = [find_uv(), "pip", "compile", project, "--no-config", "--quiet", "--no-progress"]
    command += ["--generate-hashes", "--no-header", "--only-binary", ":all:"]
    command += ["--python-version", recipe.python.version, "--python-platform", recipe.python.platform]
    command += ["--exclude-newer", recipe.deps.exclude_newer, "--overrides", override_file, "--output-file", out]
    for name in unbounded:
        command += ["--exclude-newer-package", f"{name}=false"]
    environment = _environment(UV_DEFAULT_INDEX=default_index(), UV_PYTHON_DOWNLOADS="never")
    _run(command, recipe, workdir, environment, runner)
    return parse_resolution(out.read_text(encoding="utf-8"), where=str(out))


def _run(
    command: Sequence[str | Path], recipe: Recipe, workdir: Path, environment: Mapping[str, str], runner: Runner
) -> None:
    try:
        runner.run(command, cwd=workdir, env=environment, log=workdir / "resolver.log", timeout=_LIMIT)
    except CommandError as error:
        raise LockError(
            f"the requirements could not be resolved: {without_default_index(error.reason)}",
            remedy=without_default_index(error.remedy),
            where=f"recipe {recipe.name}",
        ) from error


def _environment(**own: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_")) or _KEPT_SETTINGS.fullmatch(name)
    }
    return {**kept, **own}


def _pyproject(lines: Sequence[str], recipe: Recipe, mirrors: Sequence[Path]) -> tuple[str, list[str]]:
    """Return a project whose sources tie each package of an explicit index to that index.

    And the packages whose index gives no upload times: uv would take each of their files as too new.
    """
    unbounded: list[str] = []
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
        mirror = _mirror_of(used, mirrors, target_of(recipe))
        if mirror is None:
            unbounded += [requirement.name for requirement in used if not _has_times(requirement.name, index.url)]
        text += ["", "[[tool.uv.index]]", f'name = "{index.name}"', "explicit = true"]
        text += [f"url = {_quoted(str(mirror))}", 'format = "flat"'] if mirror else [f"url = {_quoted(index.url)}"]
        sources += [f'"{requirement.name}" = {{ index = "{index.name}" }}' for requirement in used]
    return "\n".join([*text, *sources, ""]), unbounded


def _has_times(name: str, index_url: str) -> bool:
    with index_session() as session:
        return any(file.upload_time is not None for file in project_files(session, name, index_url))


def _mirror_of(requirements: Sequence[Requirement], mirrors: Sequence[Path], target: Target) -> Path | None:
    """Return the folder that has a wheel for each requirement, or None.

    A requirement that leaves a choice asks its index: the lock must not depend on what lies in a folder here.
    """
    for folder in mirrors:
        if all(
            (version := _exact(item)) is not None
            and target.best(path.name for path in wheels_in(folder, item.name, version))
            for item in requirements
        ):
            return folder.resolve()
    return None


def _exact(requirement: Requirement) -> str | None:
    pins = [item.version for item in requirement.specifier if item.operator == "==" and not item.version.endswith(".*")]
    return pins[0] if pins else None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_resolution(text: str, *, where: str) -> Resolution:
    """Read what uv or pip-tools wrote: pins, hashes, and who requires what from the ``# via`` comments.

    Raises:
        LockError: a line that is no exact pin of an index, such as one with a URL.
    """
    order: list[tuple[str, str]] = []
    hashes: dict[str, set[str]] = {}
    via: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        pin, digest, parent = _PIN.match(line), _HASH.search(line), _VIA.match(line)
        if pin:
            name = canonicalize_name(pin["name"])
            order.append((name, pin["version"]))
            hashes[name], via[name] = set(), []
        elif not digest and line.strip() and not line.lstrip().startswith("#"):
            raise LockError(
                f"an exact pin was expected, not {line.strip()!r}",
                remedy="choose a release from an index with an edit in the recipe",
                where=f"{where}:{number}",
            )
        if order and digest:
            hashes[order[-1][0]].add(digest["sha256"])
        if order and parent and parent["parent"] != "via":
            via[order[-1][0]].append(parent["parent"])
    closure = tuple(
        Resolved(
            name,
            version,
            # -r, -c and --override name files, not distributions
            tuple(canonicalize_name(by) for by in via[name] if by != _PROJECT and not by.startswith("-")),
            direct=not {_PROJECT, "-r"}.isdisjoint(via[name]),
        )
        for name, version in order
    )
    return Resolution(closure, {name: frozenset(found) for name, found in hashes.items()})


def second_opinion(
    operated: Operated, resolution: Resolution, recipe: Recipe, *, workdir: Path, runner: Runner
) -> tuple[str, ...]:
    """Resolve with pip-tools what comes from the default index alone and return every difference, one line each.

    pip-tools knows neither an index per package nor overrides. Requirements that need a package of an explicit
    index or an overridden one are left out, and what they need beside it is held at uv's version.

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
    lines, held = _default_index_part(operated, resolution, recipe)
    if not lines:
        return ()
    source, constraints, out = (workdir / name for name in ("second.in", "second.constraints", "second.txt"))
    write_atomic(source, "".join(f"{line}\n" for line in lines).encode())
    write_atomic(constraints, "".join(f"{line}\n" for line in held).encode())
    out.unlink(missing_ok=True)  # pip-compile would take its pins and hashes over
    command: list[str | Path] = [sys.executable, "-m", "piptools", "compile", "--no-config", "--quiet"]
    command += ["--generate-hashes", "--allow-unsafe", "--no-header", "--no-emit-index-url", "--strip-extras"]
    command += ["--no-emit-find-links", "--no-emit-options", "--pip-args", "--only-binary=:all:"]
    command += ["--constraint", constraints, "--uploaded-prior-to", recipe.deps.exclude_newer]
    command += ["--output-file", out, source]
    environment = _environment(PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=default_index())
    _run(command, recipe, workdir, environment, runner)
    other = parse_resolution(out.read_text(encoding="utf-8"), where=str(out))
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


def _default_index_part(operated: Operated, resolution: Resolution, recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the requirement lines that need the default index alone, and the pins of what the others need too."""
    special = explicit_indexes(recipe).keys() | {canonicalize_name(Requirement(it).name) for it in operated.overrides}
    version = {item.name: item.version for item in resolution.closure}
    needs: dict[str, set[str]] = {name: set() for name in version}
    for item in resolution.closure:
        for parent in item.via:
            needs[parent].add(item.name)

    def reach(name: str) -> set[str]:
        found, todo = {name}, [name]
        while todo:
            new = needs.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found

    lines, shared = [], set[str]()
    for line in operated.lines:
        reached = reach(canonicalize_name(Requirement(line).name))
        if reached.isdisjoint(special):
            lines.append(line)
        else:
            shared |= reached - special
    return lines, [f"{name}=={version[name]}" for name in sorted(shared & version.keys())]
