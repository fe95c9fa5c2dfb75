"""Recipes: everything a reader must decide about a build, as a frozen model read from TOML."""

from __future__ import annotations

import difflib
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cufallback.errors import RecipeError, UsageError
from cufallback.image.reference import parse_reference
from cufallback.redact import is_secret
from cufallback.resources import recipe_files
from cufallback.tomlplace import key_path, line_of, parse_toml, printable
from cufallback.weburl import url_fault

SCHEMA_VERSION = 1
_LARGEST_FILE = 1 << 20  # bytes; a recipe has a few thousand
_SHOWN_FAULTS = 20


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
        re.compile(text, re.MULTILINE)
    except (re.error, OverflowError) as error:
        msg = f"not a regular expression: {error}"
        raise ValueError(msg) from error
    except RecursionError as error:
        msg = "not a regular expression: nested too deeply"
        raise ValueError(msg) from error
    return text


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        msg = f"not a PEP 440 version: {text!r}"
        raise ValueError(msg) from error
    if text != text.strip():
        msg = f"has space around it: {text!r}"
        raise ValueError(msg)
    return text


def _wheel_name(text: str) -> str:
    try:
        parse_wheel_filename(text)
    except (InvalidWheelFilename, InvalidVersion) as error:
        msg = f"not the file name of a wheel: {text!r}"
        raise ValueError(msg) from error
    return text


def _number(value: object) -> object:
    if isinstance(value, bool):
        msg = f"must be the number {SCHEMA_VERSION}"
        raise ValueError(msg)  # pydantic turns only a ValueError into a fault with a place
    return value


def _index_url(text: str) -> str:
    return _url(text, ("https",))


def _git_url(text: str) -> str:
    return _url(text, ("https", "ssh", "file"))


def _url(text: str, schemes: Sequence[str]) -> str:
    if fault := url_fault(text, schemes):
        raise ValueError(fault)
    user = urlsplit(text)
    if user.password is not None or (user.username is not None and user.scheme == "https"):
        msg = "a secret has no place in a recipe, which is hashed and published; leave user and password out"
        raise ValueError(msg)
    return text


def _toolkit(text: str) -> str:
    from cufallback.cuda.facts import facts

    known = [toolkit.name for toolkit in facts().toolkits]
    if text not in known:
        near = difflib.get_close_matches(text, known, n=3, cutoff=0.0)
        msg = f"no CUDA toolkit release that is known here: {text!r}; near it: {', '.join(near)}"
        raise ValueError(msg)
    return text


def _image_reference(text: str) -> str:
    try:
        reference = parse_reference(text)
    except UsageError as error:
        raise ValueError(error.reason) from error
    if reference.tag is None or reference.digest is not None or str(reference) != text:
        msg = f"must be registry, name and tag, the digest is in the lock: {reference.named}:TAG"
        raise ValueError(msg)
    return text


def _without_secrets(environment: dict[str, str]) -> dict[str, str]:
    secrets = [name for name, value in environment.items() if is_secret(name, value)]
    if secrets:
        msg = f"{', '.join(secrets)}: a secret has no place in a recipe, whose environment is hashed and published"
        raise ValueError(msg)
    return environment


def _inside(text: str) -> str:
    parts = Path(text).parts
    if not text or Path(text).is_absolute() or ".." in parts or any(unicodedata.category(c) == "Cc" for c in text):
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
    str,
    Field(pattern=r"^[0-9]{1,2}\.[0-9][af]?$", description="compute capability as in TORCH_CUDA_ARCH_LIST: 9.0a, 10.3"),
]
ToolkitVersion = Annotated[
    str,
    Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", description="CUDA toolkit release, such as 12.9.1"),
    AfterValidator(_toolkit),
]
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

    @field_validator("replacement")
    @classmethod
    def _fits_the_pattern(cls, text: str, info: ValidationInfo) -> str:
        if "pattern" in info.data:
            try:
                re.compile(info.data["pattern"], re.MULTILINE).sub(text, "")
            except (re.error, IndexError, OverflowError) as error:
                msg = f"does not fit its pattern: {error}"
                raise ValueError(msg) from error
        return text


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

    name: Annotated[str, Field(min_length=1, description="glob on the names that `cufallback source harvest` shows")]
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
    url: Annotated[
        str,
        Field(pattern=r"^(https|ssh|file)://", description="URL to fetch the commit from"),
        AfterValidator(_git_url),
    ]
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
    package: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", description="distribution name in the package index"
        ),
    ]
    version: Annotated[str, AfterValidator(_version), Field(description="its version")]
    sha256: Sha256
    commit: Annotated[
        Commit | None, Field(description="the Git commit that upstream names for it; an archive cannot prove it")
    ] = None
    why: Reason
    rewrite: Rewrites = ()
    contract: Contracts = ()
    unused: UnusedSources = ()


class WheelSource(_Model):
    """``[source]`` of kind ``wheel``: a published wheel, taken as it is. Nothing of it is compiled or changed."""

    kind: Annotated[Literal["wheel"], Field(description="a wheel from the package index, taken as it is")]
    file: Annotated[str, AfterValidator(_wheel_name), Field(description="its file name")]
    sha256: Sha256
    commit: Annotated[
        Commit | None, Field(description="the Git commit that upstream names for it; a wheel cannot prove it")
    ] = None
    why: Reason
    contract: Contracts = ()

    @property
    def package(self) -> str:
        """The distribution's name as the file has it, normalised."""
        return str(parse_wheel_filename(self.file)[0])

    @property
    def version(self) -> str:
        """The distribution's version."""
        return str(parse_wheel_filename(self.file)[1])

    @property
    def rewrite(self) -> tuple[Rewrite, ...]:
        """None: a published wheel is not changed."""
        return ()

    @property
    def unused(self) -> tuple[Unused, ...]:
        """None: nothing of it is compiled, so nothing is fetched."""
        return ()


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

    @field_validator("architectures")
    @classmethod
    def _toolkit_builds(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        from cufallback.cuda.facts import facts
        from cufallback.cuda.versions import Architecture as Target

        toolkit = info.data.get("toolkit")
        if toolkit is None:
            return names
        major, minor, _patch = map(int, toolkit.split("."))
        rows = [row for row in facts().architectures if (major, minor) in row.toolkits]
        known = {target for row in rows for target in (*row.plain, *row.specific, *row.family)}
        unknown = [name for name in names if rows and Target.parse(name) not in known]
        if unknown:
            builds = ", ".join(map(str, sorted(known)))
            msg = f"CUDA {toolkit} cannot build {', '.join(unknown)}; it builds {builds}"
            raise ValueError(msg)
        return names


class Python(_Model):
    """``[python]``: the interpreter line of wheels and locks."""

    version: Annotated[str, Field(pattern=r"^3\.[0-9]+$", description="Python's minor version, such as 3.12")]
    platform: Annotated[
        str, Field(description="the platform that locks are resolved for, a value of uv's --python-platform")
    ] = "x86_64-manylinux_2_28"


class Index(_Model):
    """``[[deps.index]]``: the one index that may serve the named packages; all others come from the default index."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", description="a short name for locks and messages")]
    url: Annotated[
        str,
        Field(pattern=r"^https://", description="address of the simple index (PEP 503)"),
        AfterValidator(_index_url),
    ]
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

    name: Annotated[str, Field(min_length=1, description="glob on normalised distribution names")]
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


class BaseImage(_Model):
    """``[[image.base]]``: an image that the Dockerfile starts from. Its digest lies in images.lock.toml."""

    name: Annotated[
        str, Field(pattern=r"^[a-z][a-z0-9-]*$", description="the name that stands behind FROM in the Dockerfile")
    ]
    reference: Annotated[
        str,
        AfterValidator(_image_reference),
        Field(description="name and tag, such as docker.io/nvidia/cuda:12.9.1-base-ubuntu22.04"),
    ]
    why: Reason


class Image(_Model):
    """``[image]``: the container image that carries the wheels; without it the build ends with the wheels."""

    dockerfile: Annotated[
        str, Field(pattern=r"^[\w.-]+\.Dockerfile$", description="file in the folder dockerfiles/ beside recipes/")
    ]
    target: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", description="stage of the Dockerfile to export")]
    base: Annotated[
        tuple[BaseImage, ...],
        Field(strict=False, min_length=1, description="images that the Dockerfile starts from, the first one first"),
    ]
    licenses: Annotated[
        str, Field(min_length=1, description="SPDX expression for the label org.opencontainers.image.licenses")
    ]
    source: Annotated[
        str | None,
        Field(pattern=r"^https://", description="URL of the code for the label; absent: the URL of a git source"),
    ] = None

    @field_validator("base")
    @classmethod
    def _names_once(cls, bases: tuple[BaseImage, ...]) -> tuple[BaseImage, ...]:
        names = [base.name for base in bases]
        if len(set(names)) != len(names):
            msg = f"a name stands here twice: {', '.join(names)}"
            raise ValueError(msg)
        if taken := sorted({"definition", "image", "wheelhouse", "wheels"} & set(names)):
            msg = f"{taken[0]!r} is the name of something that every build of an image has"
            raise ValueError(msg)
        return bases


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

    schema_: Annotated[
        Literal[1], BeforeValidator(_number), Field(alias="schema", description="version of this format")
    ]
    recipe: Annotated[Identity, Field(description="what this recipe is")]
    source: Annotated[
        GitSource | SdistSource | WheelSource,
        Field(discriminator="kind", description="the source code, the changes to it and what must be true of it"),
    ]
    cuda: Annotated[Cuda, Field(description="the CUDA toolkit, the GPUs and the driver ceiling")]
    python: Annotated[Python, Field(description="the interpreter line of wheels and locks")]
    deps: Annotated[Deps, Field(description="how the two dependency locks come about")]
    wheel: Annotated[Wheel, Field(description="how the main wheel is built and what it must carry")]
    image: Annotated[Image | None, Field(description="the container image that carries the wheels")] = None
    builder: Annotated[Builder, Field(description="where compilation happens")] = Builder()

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    @property
    def oci_platform(self) -> str:
        """The platform of images, such as ``linux/amd64``."""
        machine = self.python.platform.partition("-")[0]
        return f"linux/{ {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(machine, machine) }"

    @property
    def source_name(self) -> str:
        """What is built, in a word: the package, or the last part of the repository's URL."""
        source = self.source
        return source.url.rstrip("/").rpartition("/")[2] if isinstance(source, GitSource) else source.package


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
    text = _read(path)
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise RecipeError(str(error), remedy="correct the file", where=str(path)) from error
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


def _read(path: Path) -> str:
    """Return the text of a recipe; what is no ordinary file of a sensible size is never read."""
    try:
        # Without waiting for a writer, in case it is a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RecipeError("is no ordinary file", remedy="give a recipe's name or path", where=str(path))
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise RecipeError(
                "is larger than 1 MiB, which no recipe is", remedy="give a recipe's name or path", where=str(path)
            )
        text = data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        where = printable(str(path))
        raise RecipeError(f"cannot be read: {why}", remedy="give a recipe's name or path", where=where) from error
    if text.startswith("\ufeff"):
        raise RecipeError(
            "the file begins with a byte-order mark",
            remedy="save it as UTF-8 without the byte-order mark (BOM)",
            where=str(path),
        )
    return text


def _explain(path: Path, text: str, error: ValidationError) -> RecipeError:
    faults: list[str] = []
    remedies: list[str] = []
    found = error.errors(include_url=False, include_context=False)
    for fault in found[:_SHOWN_FAULTS]:
        location = fault["loc"]
        if location[:1] == ("source",) and location[1:2] in (("git",), ("sdist",), ("wheel",)):
            # pydantic puts the value of `kind` here, which is no key of the file
            location = ("source", *location[2:])
        key = key_path(location)
        line = line_of(text, location)
        message = printable(fault["msg"].removeprefix("Value error, "))
        if fault["type"] == "extra_forbidden":
            valid = _valid_keys(location[:-1])
            near = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.4)
            message = "unknown key"
            remedies.append(f"{key}: did you mean {near[0]}?" if near else f"{key}: valid keys are {', '.join(valid)}")
        faults.append(f"{path}:{line}: {key}: {message}")
    if len(found) > _SHOWN_FAULTS:
        faults.append(f"and {len(found) - _SHOWN_FAULTS} more")
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
