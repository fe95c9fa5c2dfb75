"""Recipes: everything a reader must decide about a build, as a frozen model read from TOML."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cufallback.errors import RecipeError
from cufallback.redact import is_secret
from cufallback.resources import recipe_files
from cufallback.tomlplace import key_path, line_of

SCHEMA_VERSION = 1


def _without_epoch(variables: dict[str, str]) -> dict[str, str]:
    if "SOURCE_DATE_EPOCH" in variables:
        msg = "SOURCE_DATE_EPOCH is the time of the source, which the source lock pins; remove it"
        raise ValueError(msg)
    return variables


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        msg = f"not a PEP 440 version specifier: {text!r}"
        raise ValueError(msg) from error
    return text


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as error:
        msg = f"not a PEP 508 requirement: {text!r}"
        raise ValueError(msg) from error
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        msg = f"not a regular expression: {error}"
        raise ValueError(msg) from error
    return text


def _without_secrets(environment: dict[str, str]) -> dict[str, str]:
    secrets = [name for name, value in environment.items() if is_secret(name, value)]
    if secrets:
        msg = f"{', '.join(secrets)}: a secret has no place in a recipe, whose environment is hashed and published"
        raise ValueError(msg)
    return environment


def _inside(text: str) -> str:
    parts = Path(text).parts
    if not text or Path(text).is_absolute() or ".." in parts:
        msg = f"must be a relative path inside the tree: {text!r}"
        raise ValueError(msg)
    return text


def _timestamp(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        msg = f"not an RFC 3339 time: {text!r}"
        raise ValueError(msg) from error
    if moment.tzinfo is None:
        msg = f"needs a time zone, such as {text}Z"
        raise ValueError(msg)
    return text


Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$", description="full Git commit id, 40 hex digits")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256, 64 hex digits")]
Architecture = Annotated[
    str, Field(pattern=r"^\d{1,2}\.\d[af]?$", description="compute capability as in TORCH_CUDA_ARCH_LIST: 9.0a, 10.3")
]
ToolkitVersion = Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$", description="CUDA toolkit release, such as 12.9.1")]
Regex = Annotated[
    str,
    AfterValidator(_regex),
    Field(description="Python regular expression, in multi-line mode: ^ and $ match at each line"),
]
InnerPath = Annotated[
    str, AfterValidator(_inside), Field(description="path of a file in the source tree, relative to its top")
]
RequirementText = Annotated[str, AfterValidator(_requirement), Field(description="PEP 508 requirement")]
SpecifierText = Annotated[str, AfterValidator(_specifier)]
Timestamp = Annotated[str, AfterValidator(_timestamp)]
Reason = Annotated[str, Field(min_length=10, description="why, for the reader of the recipe and of the record")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EndOfLine(_Model):
    """When this recipe stops being a way forward."""

    when: Annotated[
        str, Field(description="the date or upstream version from which on this recipe has no newer pin to go to")
    ]
    why: Reason
    source: Annotated[str, Field(description="where that is known from")]


class Identity(_Model):
    """``[recipe]``: what this recipe is."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9][a-z0-9.-]*$",
            description="the file's name without .toml; names locks/NAME/ and dist/NAME/ too",
        ),
    ]
    summary: Annotated[str, Field(description="one sentence: what is built, for which hosts")]
    status: Annotated[
        Literal["production", "experimental", "rehearsal"],
        Field(
            description="production: meant for use; experimental: not proven yet; rehearsal: proves the pipeline only"
        ),
    ]
    default: Annotated[bool, Field(description="the recipe that a build without --recipe takes; one at most")] = False
    end_of_line: Annotated[EndOfLine | None, Field(description="when this recipe stops being a way forward")] = None


class CherryPick(_Model):
    """An upstream commit to apply on top of the pinned one."""

    commit: Commit
    why: Reason


class Rewrite(_Model):
    """A checked textual change: ``pattern`` must match exactly ``count`` times in ``file``."""

    file: InnerPath
    pattern: Regex
    replacement: Annotated[str, Field(description="replacement as for re.sub: `\\1` or `\\g<name>` for groups")]
    count: Annotated[int, Field(ge=1, description="how often the pattern must match; anything else is an error")] = 1
    why: Reason


class Contract(_Model):
    """Something that must be true of the tree after cherry-picks and rewrites."""

    file: InnerPath
    pattern: Regex
    expect: Annotated[
        Literal["present", "absent"],
        Field(description="whether the pattern must match somewhere in the file or nowhere"),
    ]
    why: Reason


class Ancestor(_Model):
    """A commit that the pinned commit must descend from."""

    commit: Commit
    why: Reason


class Unused(_Model):
    """A source that upstream's files would fetch in some build, but not in this one."""

    name: Annotated[str, Field(description="glob on the names that `cufallback source harvest` shows")]
    why: Reason


Rewrites = Annotated[
    tuple[Rewrite, ...], Field(strict=False, description="checked textual changes, applied after the cherry-picks")
]
Contracts = Annotated[
    tuple[Contract, ...], Field(strict=False, description="what must be true of the tree after all changes")
]
UnusedSources = Annotated[
    tuple[Unused, ...], Field(strict=False, description="sources that some build would fetch, but not this one")
]


class GitSource(_Model):
    """``[source]`` of kind ``git``."""

    kind: Annotated[Literal["git"], Field(description="a Git repository")]
    url: Annotated[str, Field(pattern=r"^(https|ssh|file)://", description="URL to fetch the commit from")]
    ref: Annotated[str, Field(min_length=1, description="tag or branch that names the commit for readers")]
    commit: Commit
    why: Reason
    ancestor: Annotated[
        tuple[Ancestor, ...], Field(strict=False, description="commits that the pinned one must descend from")
    ] = ()
    cherry_pick: Annotated[
        tuple[CherryPick, ...], Field(strict=False, description="upstream commits applied on top, in this order")
    ] = ()
    rewrite: Rewrites = ()
    contract: Contracts = ()
    unused: UnusedSources = ()


class SdistSource(_Model):
    """``[source]`` of kind ``sdist``: a source distribution from the package index."""

    kind: Annotated[Literal["sdist"], Field(description="a source distribution from the package index")]
    package: Annotated[str, Field(description="distribution name in the package index")]
    version: Annotated[str, Field(description="its version")]
    sha256: Sha256
    commit: Annotated[
        Commit | None, Field(description="the Git commit that upstream names for it; an archive cannot prove it")
    ] = None
    why: Reason
    rewrite: Rewrites = ()
    contract: Contracts = ()
    unused: UnusedSources = ()


class Kernel(_Model):
    """A kernel family that the build log must or must not report as built."""

    name: Annotated[str, Field(description="as in upstream's CMake message: 'Building NAME for archs: ...'")]
    expect: Annotated[Literal["built", "not built"], Field(description="what the build log must say of it")]
    architectures: Annotated[
        tuple[Architecture, ...], Field(strict=False, description="for which it must be built; absent: not checked")
    ] = ()
    why: Reason


class Cuda(_Model):
    """``[cuda]``: the toolkit and the ceiling."""

    toolkit: ToolkitVersion
    architectures: Annotated[
        tuple[Architecture, ...],
        Field(strict=False, min_length=1, description="the GPU architectures that must be covered by compiled code"),
    ]
    maximum_driver_branch: Annotated[
        int, Field(ge=450, description="the newest driver branch of the hosts this build is for, such as 575")
    ]
    kernel: Annotated[
        tuple[Kernel, ...], Field(strict=False, description="kernel families with what the build log must say of each")
    ] = ()


class Python(_Model):
    """``[python]``: the interpreter line of wheels and locks."""

    version: Annotated[str, Field(pattern=r"^3\.\d+$", description="Python's minor version, such as 3.12")]
    platform: Annotated[
        str, Field(description="the platform that locks are resolved for, a value of uv's --python-platform")
    ] = "x86_64-manylinux_2_28"


class Index(_Model):
    """``[[deps.index]]``: the one index that may serve the named packages; all others come from the default index."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", description="a short name for locks and messages")]
    url: Annotated[str, Field(pattern=r"^https://", description="address of the simple index (PEP 503)")]
    packages: Annotated[
        tuple[str, ...],
        Field(strict=False, min_length=1, description="distributions that come from here and only here"),
    ]
    why: Reason


class Edit(_Model):
    """``[[deps.edit]]``: requirements surgery on upstream's files. ``replacement`` absent means: drop the line."""

    name: Annotated[str, Field(description="normalised distribution name of the line")]
    requirement: Annotated[
        RequirementText | None, Field(description="the line as it must stand upstream; absent: any line of that name")
    ] = None
    replacement: Annotated[RequirementText | None, Field(description="the line to put there; absent: drop it")] = None
    why: Reason


class Override(_Model):
    """``[[deps.override]]``: a requirement that wins over what any distribution asks for (uv --override)."""

    requirement: RequirementText
    why: Reason


class Ban(_Model):
    """``[[deps.ban]]``: distributions that may not be in the closure."""

    name: Annotated[str, Field(description="glob on normalised distribution names")]
    versions: Annotated[
        SpecifierText | None, Field(description="PEP 440 specifier of the banned versions; absent: all")
    ] = None
    unsuffixed: Annotated[bool, Field(description="ban only names without a -cuNN suffix")] = False
    allow: Annotated[tuple[str, ...], Field(strict=False, description="names that the ban leaves alone")] = ()
    why: Reason


class Requirements(_Model):
    """``[deps.build]`` and ``[deps.runtime]``: upstream's files plus what the recipe adds."""

    files: Annotated[
        tuple[InnerPath, ...],
        Field(strict=False, description="requirements files of the source tree, read with their -r"),
    ] = ()
    add: Annotated[
        tuple[RequirementText, ...], Field(strict=False, description="requirements that upstream's files do not name")
    ] = ()

    @model_validator(mode="after")
    def _not_empty(self) -> Requirements:
        if not self.files and not self.add:
            msg = "needs files, add or both"
            raise ValueError(msg)
        return self


class Deps(_Model):
    """``[deps]``: how the two dependency locks come about."""

    exclude_newer: Annotated[
        Timestamp,
        Field(description="resolution sees no upload later than this RFC 3339 time, where an index gives times"),
    ]
    build: Annotated[Requirements, Field(description="what the build environment is made of")]
    runtime: Annotated[Requirements, Field(description="what runs beside the wheels")]
    index: Annotated[
        tuple[Index, ...],
        Field(strict=False, description="indexes that serve named distributions instead of the default one"),
    ] = ()
    edit: Annotated[tuple[Edit, ...], Field(strict=False, description="changes to upstream's requirements")] = ()
    override: Annotated[
        tuple[Override, ...], Field(strict=False, description="requirements that win over every other")
    ] = ()
    ban: Annotated[
        tuple[Ban, ...], Field(strict=False, description="distributions that fail the lock when they are in it")
    ] = ()


class Wheel(_Model):
    """``[wheel]``: how the main wheel is built and what it must carry."""

    environment: Annotated[
        dict[str, str],
        AfterValidator(_without_secrets),
        AfterValidator(_without_epoch),
        Field(
            description="environment variables of the build; no secrets, since the record shows them, and no "
            "`SOURCE_DATE_EPOCH`, which is the source lock's"
        ),
    ] = {}
    expected_extensions: Annotated[
        tuple[str, ...], Field(strict=False, description="modules that the wheel must carry compiled, dotted names")
    ] = ()
    device_code: Annotated[
        bool, Field(description="whether the main wheel must carry GPU code for every one of `cuda.architectures`")
    ] = True
    size_limit_mib: Annotated[int, Field(ge=1, description="the largest size the wheel may have, in MiB")] = 2000


class Builder(_Model):
    """``[builder]``: where compilation happens. Job counts are no input of the build id."""

    image: Annotated[
        str | None, Field(description="builder image whose toolchain counts; absent: this machine's own toolchain")
    ] = None
    jobs: Annotated[int | None, Field(ge=1, description="compilations at once; no part of the build id")] = None
    minimum_disk_gib: Annotated[int, Field(ge=1, description="free disk space that the build needs, in GiB")] = 10
    minimum_memory_gib: Annotated[int, Field(ge=1, description="memory that the build needs, in GiB")] = 4


class Recipe(_Model):
    """One recipe file."""

    schema_: Annotated[Literal[1], Field(alias="schema", description="version of this format")]
    recipe: Annotated[Identity, Field(description="what this recipe is")]
    source: Annotated[
        GitSource | SdistSource,
        Field(discriminator="kind", description="the source code, the changes to it and what must be true of it"),
    ]
    cuda: Annotated[Cuda, Field(description="the CUDA toolkit, the GPUs and the driver ceiling")]
    python: Annotated[Python, Field(description="the interpreter line of wheels and locks")]
    deps: Annotated[Deps, Field(description="how the two dependency locks come about")]
    wheel: Annotated[Wheel, Field(description="how the main wheel is built and what it must carry")]
    builder: Annotated[Builder, Field(description="where compilation happens")] = Builder()

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    @property
    def source_name(self) -> str:
        """What is built, in a word: the package, or the last part of the repository's URL."""
        source = self.source
        return source.package if isinstance(source, SdistSource) else source.url.rstrip("/").rpartition("/")[2]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file, for editors and outside validators."""
    schema = Recipe.model_json_schema(by_alias=True)
    return {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "cufallback recipe"}


def load_recipe(name_or_path: str | None = None) -> Recipe:
    """Load a recipe by name (from the checkout or the installed package), by path, or the default one.

    Raises:
        RecipeError: no such recipe, no TOML, or not a valid recipe; every fault with file, line and key path.
    """
    return parse_recipe(find_recipe(name_or_path))


def find_recipe(name_or_path: str | None = None) -> Path:
    """Return the file of a recipe named by its name, its path, or as the default one.

    Raises:
        RecipeError: no such recipe.
    """
    known = recipe_files()
    if name_or_path is None:
        defaults = [path for path in known.values() if parse_recipe(path).recipe.default]
        if len(defaults) != 1:
            raise RecipeError(
                f"{len(defaults)} recipes say default = true",
                remedy="name one with --recipe",
                where=", ".join(map(str, defaults)) or "recipes/",
            )
        return defaults[0]
    if name_or_path.endswith(".toml"):
        return Path(name_or_path)
    if name_or_path not in known:
        near = difflib.get_close_matches(name_or_path, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(
            f"there is no recipe {name_or_path!r}",
            remedy=f"{hint}known recipes: {', '.join(sorted(known))}; or give the path of a .toml file",
        )
    return known[name_or_path]


def parse_recipe(path: Path) -> Recipe:
    """Read and validate one recipe file.

    Raises:
        RecipeError: unreadable, no TOML, or not a valid recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"cannot be read: {why}", remedy="give a recipe's name or path", where=str(path)) from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"not valid TOML: {error}", remedy="correct the file", where=str(path)) from error
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(path, text, error) from error
    if path.stem != recipe.name:
        raise RecipeError(
            f"is named {recipe.name!r} but its file is {path.name}",
            remedy=f"rename the file to {recipe.name}.toml",
            where=f"{path}:{line_of(text, ('recipe', 'name'))}: recipe.name",
        )
    return recipe


def _explain(path: Path, text: str, error: ValidationError) -> RecipeError:
    faults: list[str] = []
    remedies: list[str] = []
    for fault in error.errors():
        location = fault["loc"]
        if location[:1] == ("source",) and location[1:2] in (("git",), ("sdist",)):
            # pydantic puts the value of `kind` here, which is no key of the file
            location = ("source", *location[2:])
        key = key_path(location)
        line = line_of(text, location)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            valid = _valid_keys(location[:-1])
            near = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.4)
            message = "unknown key"
            remedies.append(f"{key}: did you mean {near[0]}?" if near else f"{key}: valid keys are {', '.join(valid)}")
        faults.append(f"{path}:{line}: {key}: {message}")
    return RecipeError(
        "the recipe is invalid:\n  " + "\n  ".join(faults),
        remedy="; ".join(remedies) or "correct these lines; `cufallback recipe schema` prints the format",
        where=str(path),
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _valid_keys(location: Sequence[str | int]) -> list[str]:
    """Return the keys that are valid in the table at ``location``."""
    models: list[type[BaseModel]] = [Recipe]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [inner for field in fields for inner in _models(field.annotation)]
    return sorted({field.alias or name for model in models for name, field in model.model_fields.items()})
