"""The traps of an import root that is called build/, and what a wheel of this project must carry."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())

# Folders whose files must work without a checkout, with their place in the wheel. A folder that does not exist yet
# needs no place; one that exists and is not shipped fails.
DATA = {
    "recipes": "cufallback/_data/recipes",
    "locks": "cufallback/_data/locks",
    "dockerfiles": "cufallback/_data/dockerfiles",
    "build/cuda_probe": "cufallback/_data/cuda_probe",
    "tests/smoke": "cufallback/_data/smoke",
    "build/cufallback": "cufallback",
}


def run(*command: str | Path, cwd: Path = CHECKOUT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def python(*arguments: str | Path, cwd: Path = CHECKOUT, **environment: str) -> str:
    done = run(sys.executable, *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Every tracked file, and those not committed yet that are not ignored."""
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if done.returncode != 0:
        pytest.skip("not a Git checkout")
    return [name for name in done.stdout.split("\0") if name and (CHECKOUT / name).is_file()]


def build_wheel(target: Path) -> Path:
    python("-m", "hatchling", "build", "--target", "wheel", "--directory", target)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return the `cufallback` of a fresh environment that knows nothing of this checkout.

    Its dependencies are those of the environment that runs the tests, through a path file: what is proved here is
    the wheel's own content.
    """
    folder = tmp_path_factory.mktemp("installed")
    python("-m", "venv", "--without-pip", folder / "env")
    done = run(
        *("uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", folder / "env/bin/python", wheel),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    # A plain line, not site.addsitedir: path files of that folder, such as this checkout's own, stay out.
    (site / "dependencies.pth").write_text("\n".join(ours) + "\n")
    return folder / "env/bin/cufallback"


# build/ as an import root


def test_git_does_not_ignore_the_import_root() -> None:
    for path in ("build/cufallback/cli.py", "build/cuda_probe/pyproject.toml", "build/new/file.py"):
        done = run("git", "check-ignore", "--no-index", path)
        assert (done.returncode, done.stdout) == (1, ""), f"{path} is ignored"


def test_every_module_is_tracked(tracked: list[str]) -> None:
    modules = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "build").rglob("*.py")}
    assert modules
    assert modules <= set(tracked)


def test_build_is_no_package() -> None:
    assert not (CHECKOUT / "build/__init__.py").exists()


def test_the_build_distribution_wins_over_the_folder(tmp_path: Path) -> None:
    # pip-tools brings `build`; with the checkout on sys.path, as under python -m, ours must not take its place.
    where = python("-c", "import build; print(build.__file__)").strip()
    assert where.endswith("site-packages/build/__init__.py")


def test_pytest_collects_a_test_below_a_folder_called_build(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((CHECKOUT / "pyproject.toml").read_text())
    (tmp_path / "tests/build").mkdir(parents=True)
    (tmp_path / "tests/build/test_deep.py").write_text("def test_it(): pass\n")
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_ruff_looks_at_the_import_root() -> None:
    seen = run(Path(sys.executable).with_name("ruff"), "check", "--show-files").stdout
    assert f"{CHECKOUT}/build/cufallback/errors.py\n" in seen
    assert f"{CHECKOUT}/docs/generate.py\n" in seen


def test_mypy_looks_at_the_import_root() -> None:
    assert PROJECT["tool"]["mypy"]["mypy_path"] == "build"
    assert "cufallback" in PROJECT["tool"]["mypy"]["packages"]


# The wheel


def members(wheel: Path) -> list[str]:
    return sorted(zipfile.ZipFile(wheel).namelist())


def test_two_builds_list_the_same_files(wheel: Path, tmp_path: Path) -> None:
    again = build_wheel(tmp_path)
    assert members(again) == members(wheel)
    assert again.read_bytes() == wheel.read_bytes(), "hatchling's wheels are byte-stable"


def test_building_writes_nothing_into_the_import_root(wheel: Path, tracked: list[str]) -> None:
    caches = {"__pycache__", ".mypy_cache", ".ruff_cache"}
    found = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "build").rglob("*") if path.is_file()}
    assert {name for name in found if not caches & set(name.split("/"))} <= set(tracked)


def shipped_names(tracked: list[str]) -> dict[str, str]:
    """Return tracked file → member of the wheel, for every file that must be shipped."""
    return {
        name: DATA[folder] + name.removeprefix(folder)
        for folder in DATA
        for name in tracked
        if name.startswith(f"{folder}/") and not name.endswith("/.keep")
    }


def test_package_and_data_are_in_the_wheel(wheel: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, member in shipped_names(tracked).items():
            assert member in archive.namelist(), f"{name} is not shipped: see force-include in pyproject.toml"
            assert archive.read(member) == (CHECKOUT / name).read_bytes()


def test_nothing_else_is_in_the_wheel(wheel: Path, tracked: list[str]) -> None:
    expected = set(shipped_names(tracked).values())
    extra = {name for name in members(wheel) if ".dist-info/" not in name} - expected
    assert {name for name in extra if not name.endswith("/.keep")} == set()


def test_force_include_names_folders_that_exist() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for folder, place in included.items():
        assert (CHECKOUT / folder).is_dir(), folder
        assert DATA[folder] == place


def test_metadata_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode()
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
        assert "cufallback/py.typed" in archive.namelist()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert dict(points["console_scripts"]) == {"cufallback": "cufallback.__main__:main"}


def test_outside_a_checkout_the_command_works_with_its_own_data(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "recipe", "show", "rehearsal", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"]["sha256"].startswith("eec2d54d")
    show = "from cufallback.resources import *; print(data_root()); print(lock_folder(recipe_files()['rehearsal']))"
    data, locks = run(installed.with_name("python"), "-c", show, cwd=tmp_path).stdout.splitlines()
    assert Path(data).is_relative_to(installed.parents[1])
    assert Path(locks).is_relative_to(data)
    assert sorted(path.name for path in Path(data).iterdir()) == sorted(
        Path(place).name for folder, place in DATA.items() if place.startswith("cufallback/_") and has_files(folder)
    )


def has_files(folder: str) -> bool:
    return any((CHECKOUT / folder).rglob("*")) if (CHECKOUT / folder).is_dir() else False


def test_the_recipes_of_a_checkout_win_over_those_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "build/cufallback").mkdir(parents=True)
    (tmp_path / "build/cufallback/resources.py").write_text("")
    (tmp_path / "recipes").mkdir()
    text = (CHECKOUT / "recipes/rehearsal.toml").read_text()
    (tmp_path / "recipes/mine.toml").write_text(text.replace('name = "rehearsal"', 'name = "mine"'))
    below = tmp_path / "docs"
    below.mkdir()
    done = run(installed, "recipe", "show", "mine", cwd=below)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]["name"] == "mine"
    assert run(installed, "recipe", "show", "rehearsal", cwd=below).returncode == 10


# What the code imports, and the lock of the environment


def imported(folder: str) -> dict[str, str]:
    """Return top-level module → a file that imports it, for all that is neither ours nor Python's."""
    found: dict[str, str] = {}
    for path in (CHECKOUT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0]: path.relative_to(CHECKOUT).as_posix() for name in names}
    own = {path.stem for path in (CHECKOUT / "tests").rglob("*.py")} | {"cufallback", "cuda_probe", "tests"}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | own}


@pytest.mark.parametrize(
    ("folder", "groups"),
    [("build/cufallback", []), ("build/cuda_probe", ["package"]), ("tests", ["dev"]), ("docs", [])],
)
def test_every_import_is_of_a_distribution_that_the_project_names(folder: str, groups: list[str]) -> None:
    wanted = PROJECT["project"]["dependencies"] + [entry for name in groups for entry in group(name)]
    named = {canonicalize_name(Requirement(entry).name) for entry in wanted}
    providers = packages_distributions()
    for module, path in imported(folder).items():
        assert named & set(map(canonicalize_name, providers.get(module, []))), f"{path} imports {module}"


def dev_lock() -> dict[str, Requirement]:
    text = (CHECKOUT / "locks/cufallback/dev.txt").read_text()
    entries = [line.removesuffix(" \\") for line in text.splitlines() if re.match(r"[a-z]", line)]
    return {canonicalize_name(entry.name): entry for entry in map(Requirement, entries)}


def group(name: str) -> list[str]:
    wanted: list[str] = []
    for entry in PROJECT["dependency-groups"][name]:
        wanted += [entry] if isinstance(entry, str) else group(entry["include-group"])
    return wanted


def test_the_lock_holds_every_requirement_of_the_project() -> None:
    locked = dev_lock()
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *group("dev")]
    for requirement in map(Requirement, wanted):
        pin = locked.get(canonicalize_name(requirement.name))
        assert pin, f"{requirement} is not in the lock: run `nox -s lock-dev`"
        (version,) = [specifier.version for specifier in pin.specifier if specifier.operator == "=="]
        assert requirement.specifier.contains(version, prereleases=True), f"{pin}: run `nox -s lock-dev`"


def test_the_lock_has_hashes_and_no_address() -> None:
    text = (CHECKOUT / "locks/cufallback/dev.txt").read_text()
    for entry in re.split(r"\n(?=[a-z])", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert "://" not in text
    assert not re.search(r"^--(?!hash)", text, re.MULTILINE), "an option line would name an index or a folder"


def test_the_environment_of_the_tests_is_the_locked_one() -> None:
    if not (Path(sys.prefix) / "installed.sha256").is_file():
        pytest.skip("not run by nox")
    there = {canonicalize_name(item.name): item.version for item in distributions(path=[p for p in sys.path if p])}
    here = {name: pin for name, pin in dev_lock().items() if not pin.marker or pin.marker.evaluate()}
    assert there.keys() - here.keys() <= {"cufallback", "cufallback-cuda-probe"}
    assert {name: there.get(name) for name in here} == {
        name: next(iter(pin.specifier)).version for name, pin in here.items()
    }
    assert default_environment()["python_version"] >= "3.11"


# What no tracked file may name


def registry_hosts() -> set[str]:
    """Return the hosts of the package registries that this machine's tools are set to, never written down here."""
    settings = python("-c", "from pip._internal.models.index import PyPI as i; print(i.url, i.file_storage_domain)")
    settings += python("-m", "pip", "config", "list")
    settings += "\n".join(value for name, value in os.environ.items() if "INDEX" in name or "REGISTRY" in name.upper())
    settings += run("npm", "config", "get", "registry").stdout if has("npm") else ""
    for folder in (Path("/etc/apt"), Path("/etc/apt/sources.list.d")):
        for path in [*folder.glob("*.list"), *folder.glob("*.sources")]:
            settings += "\n".join(re.findall(r"(?m)^[^#\n]*?(https?://\S+/debian\S*)", path.read_text()))
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[^\s'\"]+", settings)}
    hosts |= {word for word in settings.split() if re.fullmatch(r"[a-z]+(\.[a-z]+){2,}", word)}
    return {host for host in hosts if host}


def has(program: str) -> bool:
    return any((Path(folder) / program).is_file() for folder in os.environ["PATH"].split(os.pathsep))


def test_no_file_names_a_registry_host(tracked: list[str]) -> None:
    hosts = registry_hosts()
    assert len(hosts) >= 2, "pip's own index and file hosts at least"
    for name in tracked:
        text = (CHECKOUT / name).read_text(encoding="utf-8", errors="replace")
        assert not [host for host in hosts if host in text], name


def test_no_file_names_the_home_or_the_place_of_this_checkout(tracked: list[str]) -> None:
    homes = re.compile(r"(?<![\w.-])/(?:home/[a-z]|root/[\w.]|Users/[A-Z])")
    here = {str(CHECKOUT), str(Path.home()), os.environ.get("PIP_FIND_LINKS", "")} - {"", "/", "/root"}
    for name in tracked:
        text = (CHECKOUT / name).read_text(encoding="utf-8", errors="replace")
        assert not homes.search(text), name
        assert not [path for path in here if path in text], name
