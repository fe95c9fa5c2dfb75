"""Real vLLM source distributions: extraction, the attn_res contract and rewrite, the harvest of four releases."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cufallback.errors import ContractError, HarvestError, WorkspaceError
from cufallback.progress import Silent
from cufallback.recipe import SdistSource, load_recipe
from cufallback.source.checkout import extract_sdist
from cufallback.source.contract import check_contracts, require_contracts
from cufallback.source.edit import apply_rewrites
from cufallback.source.harvest import harvest
from cufallback.source.harvested import Harvested
from cufallback.source.lock import compare, lock_sources, require_locked
from cufallback.source.tree import Checkout
from cufallback.store import tree_digest

TREE = Checkout("sdist", None, "a" * 64, 1786406400, "a" * 64)

pytestmark = [pytest.mark.network, pytest.mark.slow]

Fixture = Callable[[str], Path]
Harvest = Callable[[str], tuple[Harvested, ...]]
TABLE = tomllib.loads((Path(__file__).parents[1] / "data/source/fetched.toml").read_text())
VERSIONS: list[str] = TABLE.pop("versions")


@pytest.fixture(scope="module")
def source() -> SdistSource:
    source = load_recipe("rehearsal").source
    assert isinstance(source, SdistSource)
    return source


@pytest.fixture(scope="module")
def harvested(extracted: Fixture) -> Callable[[str], tuple[Harvested, ...]]:
    """The harvest of each release, read once."""
    return functools.cache(lambda version: harvest(extracted(version)))


@pytest.fixture
def tree(source: SdistSource, sdist: Fixture, tmp_path: Path) -> Path:
    extract_sdist(sdist("0.27.1"), source, target=tmp_path / "tree")
    return tmp_path / "tree"


def test_extraction_agrees_with_tarfile(
    source: SdistSource, sdist: Fixture, extracted: Fixture, tmp_path: Path
) -> None:
    result = extract_sdist(sdist("0.27.1"), source, target=tmp_path / "tree")
    assert result.tree_sha256 == tree_digest(extracted("0.27.1")) == tree_digest(tmp_path / "tree")
    assert result.epoch == 1_786_445_067
    assert sum(path.is_file() for path in (tmp_path / "tree").rglob("*")) == 6374


def test_without_the_guard_the_contract_fails_and_with_the_rewrite_it_holds(source: SdistSource, tree: Path) -> None:
    guard = source.contract[0]
    before = check_contracts(tree, source.contract)
    assert [result.held for result in before] == [False, True, True]
    with pytest.raises(ContractError) as caught:
        require_contracts(before)
    assert guard.file in caught.value.reason
    assert guard.why in caught.value.reason

    (change,) = apply_rewrites(tree, source.rewrite)

    after = check_contracts(tree, source.contract)
    require_contracts(after)
    added = [line for line in change.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert [line.lstrip("+ ") for line in added] == ['and hasattr(torch.ops._C, "kimi_k3_attn_res")']
    assert not [line for line in change.diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    compile((tree / guard.file).read_text(), guard.file, "exec")


def test_the_later_release_has_the_guard_itself(source: SdistSource, extracted: Fixture) -> None:
    require_contracts(check_contracts(extracted("0.28.0"), source.contract[:1]))


def expected(version: str) -> dict[str, tuple[str, str, str, tuple[str, ...]]]:
    """Return name → (repository, ref, override, submodules) of the table."""
    last = VERSIONS.index(version)

    def value(row: dict[str, Any], key: str) -> str:
        return next(found for found in reversed(row[key][: last + 1]) if found != "=")

    rows = {}
    for name, row in TABLE.items():
        submodules = tuple(value(row, "submodules").split()) if "submodules" in row else ("*",)
        rows[name] = (value(row, "repository"), value(row, "ref"), row["override"], submodules)
    return {name: row for name, row in rows.items() if row[0]}


def cuda(row: Harvested) -> bool:
    """Say whether a row belongs to a CUDA build: the others are in the CPU build's file or for ROCm alone."""
    return row.kind == "fetchcontent" and row.file != "cmake/cpu_extension.cmake" and row.when != ROCM


ROCM = 'VLLM_TARGET_DEVICE STREQUAL "rocm"'


@pytest.mark.parametrize("version", VERSIONS)
def test_the_harvest_is_the_table(harvested: Harvest, version: str) -> None:
    rows = harvested(version)
    found = {
        row.name: (
            re.sub(r"^https://github\.com/|\.git$", "", row.url),
            row.ref,
            row.override,
            row.submodules,
        )
        for row in rows
        if cuda(row)
    }
    assert found == expected(version)
    for row in rows:
        assert row.mutable is not bool(re.fullmatch("[0-9a-f]{40}", row.commit or "") or row.sha256)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_row_names_the_line_that_asks(harvested: Harvest, extracted: Fixture, version: str) -> None:
    for row in harvested(version):
        line = (extracted(version) / row.file).read_text().splitlines()[row.line - 1]
        asks = r"FetchContent_(Declare|Populate)|source = |curl|wget|clone|build|ADD|urlopen"
        assert re.search(asks, line), (row.asked_by, line)


@pytest.mark.parametrize(
    ("version", "git", "packages"),
    [
        (
            "0.27.1",
            {
                "harmony": "76e849426cc092f84509e31a17027755f67d662a",
                "llm-multimodal": "15adba5e025d8636ba4a334fb379b1371f6196a1",
            },
            595,
        ),
        (
            "0.33.0",
            {
                "harmony": "76e849426cc092f84509e31a17027755f67d662a",
                "llm-multimodal": "1b6197354e498b1dfb6e2647b2c68e4d11eaf5b5",
                "zmq.rs": "67dcba97559ebe8e8206dab753710d8b9cb07591",
            },
            606,
        ),
    ],
)
def test_cargo(harvested: Harvest, version: str, git: dict[str, str], packages: int) -> None:
    rows = harvested(version)
    assert {row.name: row.commit for row in rows if row.kind == "cargo-git"} == git
    (crates,) = (row for row in rows if row.kind == "crates")
    assert (crates.ref, crates.mutable) == (f"{packages} packages", False)


def test_hard_coded_downloads(harvested: Harvest) -> None:
    rows = {row.name: row for row in harvested("0.27.1")}
    deepep = rows["tools/ep_kernels/install_python_libraries.sh:DeepEP"]
    assert (deepep.url, deepep.ref, deepep.mutable) == ("https://github.com/deepseek-ai/DeepEP", "d4f41e4e93", True)
    nvshmem = next(row for row in rows.values() if "libnvshmem" in row.name)
    assert "/libnvshmem-${NVSHMEM_SUBDIR}-3.3.24_cuda${CUDA_VERSION_MAJOR}-archive.tar.xz" in nvshmem.url
    urls = {row.url for row in rows.values()}
    assert "https://bootstrap.pypa.io/get-pip.py" in urls
    assert "https://astral.sh/uv/install.sh" in urls
    assert (
        "https://github.com/protocolbuffers/protobuf/releases/download/v34.2/protoc-34.2-linux-${URL_ARCH}.zip" in urls
    )


def test_nothing_that_names_an_url_for_curl_or_wget_is_missed(harvested: Harvest, extracted: Fixture) -> None:
    """A plain grep beside the reader: every URL on a curl or wget line of the main Dockerfile must be in a row."""
    tree = extracted("0.27.1")
    urls = " ".join(row.url for row in harvested("0.27.1"))
    for file in ("docker/Dockerfile", "docker/Dockerfile.cpu", "docker/Dockerfile.xpu", "docker/Dockerfile.s390x"):
        for line in (tree / file).read_text().splitlines():
            if re.match(r"\s*#", line) or not re.search(r"\b(curl|wget)\b", line):
                continue
            for address in re.findall(r"https?://[^\s\"'${]+", line):
                assert address in urls, (file, line)


def test_one_more_fetch_in_the_tree_is_found_by_name(extracted: Fixture, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(extracted("0.27.1"), tree, ignore=shutil.ignore_patterns("vllm", "tests", "docs"))
    rows = harvest(tree)
    lock = lock_sources(
        rows, None, recipe="r", checkout=TREE, unused=[], scratch=tmp_path / "scratch", progress=Silent()
    )
    assert {difference.kind for difference in compare(rows, lock, [])} == {"mutable"}

    cmake = tree / "CMakeLists.txt"
    lines = cmake.read_text().splitlines(keepends=True)
    cmake.write_text("".join(lines) + "FetchContent_Declare(sneaky GIT_REPOSITORY https://h/s GIT_TAG main)\n")
    with pytest.raises(HarvestError, match=rf"unlocked: sneaky \(CMakeLists\.txt:{len(lines) + 1}\): asks for main"):
        require_locked(harvest(tree), lock, [])


def test_the_rehearsal_fetches_nothing(source: SdistSource, harvested: Harvest, tmp_path: Path) -> None:
    rows = harvested("0.27.1")
    lock = lock_sources(
        rows,
        None,
        recipe="rehearsal",
        checkout=TREE,
        unused=source.unused,
        scratch=tmp_path / "scratch",
        progress=Silent(),
    )
    require_locked(rows, lock, source.unused)
    assert len(lock.sources) == len(rows), "unused sources are listed all the same"


def test_an_extraction_onto_a_full_disk_leaves_nothing(source: SdistSource, sdist: Fixture, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(WorkspaceError) as caught:
            extract_sdist(sdist("0.27.1"), source, target=disk / "tree")
        assert "free disk space" in caught.value.remedy
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
