"""Build the image of a plan with BuildKit, from contexts on disk and without network, into an OCI layout."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from cufallback.errors import CommandError, ImageError, LockError
from cufallback.image.dockerfile import check_dockerfile
from cufallback.image.layout import Image, find_files, read_image
from cufallback.process import Runner
from cufallback.progress import Progress
from cufallback.recipe import GitSource, Recipe
from cufallback.store import link_tree, sha256_file, write_atomic, write_json

if TYPE_CHECKING:
    from cufallback.plan import BuildPlan

CONTEXTS = ("wheelhouse", "wheels")
CHECKS = "opt/vllm/cufallback-checks.json"
BUILD_ID_LABEL = "cufallback.build-id"
RECIPE_LABEL = "cufallback.recipe"
_OCI = "org.opencontainers.image."


@dataclass(frozen=True)
class BuiltWheel:
    """One wheel of this build that goes into the image."""

    path: Path
    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class BuiltImage:
    """An image on disk, the report it carries of its own checks, and what it was built with."""

    image: Image
    checks: list[dict[str, str]]
    labels: dict[str, str]
    require_cuda: str


def image_command(recipe: Recipe, bases: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return buildx's words with names in place of folders; all of them decide about bytes.

    Layers are zstd: several times faster than gzip to write and to unpack, and smaller. Docker Engine reads it since
    23.0, containerd since 1.5 (their release notes).

    Args:
        recipe: one with an image.
        bases: digest of each base by name.
    """
    image = _image_of(recipe)
    words = ["docker", "buildx", "build", "--file", image.dockerfile, "--target", image.target]
    words += ["--platform", recipe.oci_platform, "--network", "none", "--provenance=false", "--sbom=false"]
    words += ["--build-arg", f"PYTHON_VERSION={recipe.python.version}"]
    for name, digest in bases.items():
        words += ["--build-context", f"{name}=oci-layout:///{name.upper()}@{digest or 'DIGEST'}"]
    for name in CONTEXTS:
        words += ["--build-context", f"{name}={name.upper()}"]
    words += ["--output", "type=oci,dest=IMAGE,tar=false,rewrite-timestamp=true,compression=zstd,oci-mediatypes=true"]
    return tuple(words)


def _image_of(recipe: Recipe) -> Any:
    if recipe.image is None:
        raise ImageError(f"recipe {recipe.name} has no [image]", remedy="add one; docs/recipe.md explains its keys")
    return recipe.image


def check_definition(plan: BuildPlan) -> None:
    """Hold the Dockerfile of a plan to what the recipe pins.

    Raises:
        ImageError: there is no such file, it takes something that nothing pins, or a base has the name of a context.
    """
    if plan.recipe.image is None:
        return
    name = plan.recipe.image.dockerfile
    if name not in plan.definition:
        raise ImageError(
            "there is no such Dockerfile",
            remedy="correct image.dockerfile, or put the folder dockerfiles/ beside recipes/",
            where=f"dockerfiles/{name}",
        )
    check_dockerfile(
        plan.definition[name].decode("utf-8", "replace"),
        pinned=(*(base.name for base in plan.bases), *CONTEXTS),
        target=plan.recipe.image.target,
        where=f"dockerfiles/{name}",
    )


def expected_labels(plan: BuildPlan, version: str) -> dict[str, str]:
    """Return the labels that the image of a plan must carry.

    Args:
        plan: a complete plan.
        version: of the main wheel.
    """
    from cufallback.record import timestamp

    recipe, image = plan.recipe, _image_of(plan.recipe)
    source = recipe.source
    url = image.source or (source.url if isinstance(source, GitSource) else None)
    first = plan.bases[0]
    labels = {
        f"{_OCI}title": recipe.name,
        f"{_OCI}version": version,
        f"{_OCI}created": timestamp(plan.pinned().source.epoch),
        f"{_OCI}licenses": image.licenses,
        f"{_OCI}base.digest": first.digest or "",
        BUILD_ID_LABEL: plan.build_id,
        RECIPE_LABEL: recipe.name,
    }
    if first.origin == "lock":  # the name of what was put in its place is nobody's but this machine's
        labels[f"{_OCI}base.name"] = first.reference
    if url:
        labels[f"{_OCI}source"] = url
    if source.commit:
        labels[f"{_OCI}revision"] = source.commit
    return labels


def require_cuda(inspections: Sequence[Mapping[str, Any]]) -> str:
    """Return NVIDIA_REQUIRE_CUDA for wheels with these inspections: the newest driver that one of them needs."""
    from cufallback.cuda.versions import Driver

    drivers = [found for item in inspections if (found := (item.get("minimum_driver") or {}).get("driver"))]
    return f"driver>={max(drivers, key=Driver.parse)}" if drivers else ""


def expectation(plan: BuildPlan, wheels: Sequence[BuiltWheel]) -> dict[str, Any]:
    """Return what the image must find in itself: the content of expectation.json."""
    distributions = {item.name: item.version for item in plan.pinned().runtime.distributions}
    distributions |= {canonicalize_name(wheel.name): wheel.version for wheel in wheels}
    return {"distributions": distributions, **plan.image_expectation}


def build_image(
    plan: BuildPlan,
    wheels: Sequence[BuiltWheel],
    *,
    inspections: Sequence[Mapping[str, Any]],
    wheelhouses: Path,
    bases: Mapping[str, Path],
    folder: Path,
    log: Path,
    runner: Runner,
    progress: Progress,
    use_cache: bool = True,
) -> BuiltImage:
    """Build the image of ``plan`` into the OCI layout ``folder``.

    Args:
        plan: a complete plan whose recipe has an image and whose bases all have digests.
        wheels: the main wheel and the cuda-probe.
        inspections: of these wheels, in the same order.
        wheelhouses: folder with ``build`` and ``runtime``.
        bases: OCI layout of each base by name.
        folder: where the layout appears; its parent is scratch space too.
        log: receives BuildKit's output.
        runner: starts buildx.
        progress: shows BuildKit's steps.
        use_cache: let BuildKit take steps from its cache.

    Raises:
        ImageError: BuildKit failed, an assertion inside the image failed, or the result is not what was asked for.
        LockError: the build lock has no uv.
    """
    recipe, epoch = plan.recipe, plan.pinned().source.epoch
    scratch = folder.parent / "scratch"
    places = {
        **{name: scratch / name for name in ("definition", *CONTEXTS)},
        **{name: _without_at(base, scratch / f"base-{name}") for name, base in bases.items()},
        "image": folder,
    }
    for name, content in plan.definition.items():
        write_atomic(places["definition"] / name, content)
    _lay_wheelhouse(plan, wheelhouses, places["wheelhouse"])
    _lay_wheels(plan, wheels, places["wheels"])
    labels, needs = expected_labels(plan, wheels[0].version), require_cuda(inspections)
    words = list(image_command(recipe, {base.name: base.digest for base in plan.bases}))
    more = [word for name, value in sorted(labels.items()) for word in ("--label", f"{name}={value}")]
    more += ["--build-arg", f"NVIDIA_REQUIRE_CUDA={needs}", "--progress", "plain"]
    more += ["--tag", f"{plan.image_name}:{plan.short_id}"]  # what `docker load` calls it
    more += [] if use_cache else ["--no-cache"]
    metadata = scratch / "metadata.json"
    real = [_placed(word, places) for word in words]
    real[real.index("--file") + 1] = str(places["definition"] / _image_of(recipe).dockerfile)
    try:
        with progress.bar("building the image", None):
            runner.run(
                [*real, *more, "--metadata-file", metadata, places["definition"]],
                env=_environment(epoch),
                log=log,
                shown=[*words, *more, "DEFINITION"],
                names={str(scratch): "SCRATCH", **{str(path): name.upper() for name, path in places.items()}},
                on_line=_steps(progress),
            )
    except CommandError as error:
        raise _failure(error, log) from error
    shutil.rmtree(folder / "ingest", ignore_errors=True)  # containerd's room for unfinished blobs
    digest = _built_digest(metadata, log)
    image = read_image(folder, digest, platform=recipe.oci_platform)
    shutil.rmtree(scratch)
    return BuiltImage(image, _checked(image, labels, needs), labels, needs)


def _built_digest(metadata: Path, log: Path) -> str:
    try:
        return str(json.loads(metadata.read_bytes())["containerimage.digest"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ImageError(
            "buildx does not say which image it built", remedy="upgrade the buildx plugin", where=str(log)
        ) from error


def _environment(epoch: int) -> dict[str, str]:
    # buildx hands SOURCE_DATE_EPOCH on as a build argument.
    return {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


def _placed(word: str, places: Mapping[str, Path]) -> str:
    """Return a word of :func:`image_command` with the folders of this machine."""
    if word.startswith("type=oci,"):  # a line of CSV, in which a folder may have a comma
        field = f"dest={places['image']}"
        return word.replace("dest=IMAGE", '"{}"'.format(field.replace('"', '""')) if set(field) & set(',"') else field)
    known = "|".join(re.escape(name.upper()) for name in places)
    pattern = rf"(?<==)(?:{known})(?=$|,)|(?<=oci-layout://)/(?:{known})(?=@)"
    return re.sub(pattern, lambda found: str(places[found[0].strip("/").lower()]), word)


def _without_at(folder: Path, link: Path) -> Path:
    """Return a path to a folder in which buildx finds no ``@``, behind which it would look for a digest."""
    if "@" not in str(folder):
        return folder
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return link


def _lay_wheelhouse(plan: BuildPlan, wheelhouses: Path, target: Path) -> None:
    """Lay out the context ``wheelhouse``: the runtime's wheels, their lock, and uv out of its locked wheel."""
    locks = plan.pinned()
    link_tree(wheelhouses / "runtime", target)
    write_atomic(target / "runtime.txt", plan.inputs["runtime.txt"])
    uv = next((item for item in locks.build.distributions if item.name == "uv"), None)
    if uv is None:
        raise LockError(
            "the build lock has no uv, which installs the wheels into the image",
            remedy='add "uv" to deps.build.add and run `nox -s lock`',
            where=f"locks/{plan.recipe.name}/build.txt",
        )
    with zipfile.ZipFile(wheelhouses / "build" / uv.filename) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))
        write_atomic(target / "uv", wheel.read(member))
    (target / "uv").chmod(0o755)


def _lay_wheels(plan: BuildPlan, wheels: Sequence[BuiltWheel], target: Path) -> None:
    """Lay out the context ``wheels``: what this build made, each with its hash, and what the image must hold."""
    target.mkdir(parents=True)
    lines = []
    for wheel in wheels:
        shutil.copy2(wheel.path, target / wheel.path.name)
        lines.append(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    write_atomic(target / "built.txt", "".join(lines).encode())
    write_json(target / "expectation.json", expectation(plan, wheels))


def _steps(progress: Progress) -> Any:
    """Say each step of the Dockerfile once, as BuildKit comes to it."""
    seen: set[str] = set()

    def show(line: str) -> None:
        step = re.match(r"#\d+ (\[[\w-]+ +\d+/\d+\] .{1,80})", line)
        if step and step[1] not in seen:
            seen.add(step[1])
            progress.say(f"image: {step[1]}")

    return show


def _failure(error: CommandError, log: Path) -> ImageError:
    """Name the cause of a failed build where its log shows one."""
    text = log.read_text("utf-8", "replace") if log.is_file() else ""
    failed = list(dict.fromkeys(re.findall(r"^#\d+ [\d.]+ failed: (.+)$", text, re.MULTILINE)))
    if failed:
        return ImageError(
            "the image is not what the plan says:\n  " + "\n  ".join(failed),
            remedy="correct the recipe or the locks; the log shows every check",
            where=str(log),
        )
    own = re.sub(r"^#\d+ [\d.]+ .*$", "", text, flags=re.MULTILINE)  # what buildx says, not what its steps print
    if re.search(r"(?i:cannot connect to the docker daemon|error reading from server|connection refused)|\bEOF\b", own):
        remedy = "look at the engine's own log, start it again, then run again: what is built stays"
        return ImageError("the Docker engine went away during the build", remedy=remedy, where=str(log))
    return ImageError(error.reason, remedy=error.remedy, where=str(log))


def _checked(image: Image, labels: Mapping[str, str], needs: str) -> list[dict[str, str]]:
    """Demand of the finished image what was asked for; return the report that it carries."""
    config = image.execution
    user, environment = str(config.get("User") or ""), config.get("Env") or []
    faults = [
        f"label {name} is {image.labels.get(name)!r}" for name in labels if image.labels.get(name) != labels[name]
    ]
    if is_root(user):
        faults.append(f"its user is {user or 'root'!r}")
    if needs and f"NVIDIA_REQUIRE_CUDA={needs}" not in environment:
        faults.append(f"it does not carry NVIDIA_REQUIRE_CUDA={needs}")
    report = find_files(image, re.compile(re.escape(CHECKS))).get(CHECKS)
    if report is None:
        faults.append(f"it holds no /{CHECKS}, so the Dockerfile's check did not run")
    if faults or report is None:
        raise ImageError(
            f"the image is not what the plan says: {'; '.join(faults)}",
            remedy="correct the Dockerfile",
            where=str(image.folder),
        )
    try:
        return _checks(json.loads(report))
    except (ValueError, RecursionError) as error:
        raise ImageError(
            f"its own report, /{CHECKS}, is malformed: {error}",
            remedy="correct the Dockerfile",
            where=str(image.folder),
        ) from error


def _checks(report: Any) -> list[dict[str, str]]:
    def is_check(row: Any) -> bool:
        return (
            isinstance(row, dict)
            and row.keys() == {"what", "status", "why"}
            and all(isinstance(value, str) for value in row.values())
            and row["status"] in ("passed", "not_run")
        )

    if not isinstance(report, list) or not all(map(is_check, report)):
        msg = "it is no list of checks, each passed or not run"
        raise ValueError(msg)
    return report


def is_root(user: str) -> bool:
    """Say whether ``USER`` of an image means root: no user, its name, or its number in any spelling, with any group."""
    return re.fullmatch(r"(?:root|[+-]?0+)?", user.partition(":")[0].strip()) is not None


def index_digest(image: Image) -> str:
    """Return the digest of the layout's ``index.json``."""
    return f"sha256:{sha256_file(image.folder / 'index.json')}"
