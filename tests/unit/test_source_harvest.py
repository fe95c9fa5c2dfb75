"""Cargo locks, scripts and Dockerfiles; and the whole harvest of a small tree."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from cufallback.errors import HarvestError
from cufallback.source.cargo import harvest_cargo_lock
from cufallback.source.downloads import harvest_downloads
from cufallback.source.harvest import harvest
from cufallback.source.harvested import Harvested
from cufallback.store import sha256_bytes

ID = "0123456789" * 4


# --- cargo ----------------------------------------------------------------------------------------------------------

LOCK = f"""\
version = 4

[[package]]
name = "anyhow"
version = "1.0.0"
source = "registry+https://github.com/rust-lang/crates.io-index"
checksum = "{"a" * 64}"

[[package]]
name = "first-of-lib"
version = "1.0.0"
source = "git+https://github.com/a/lib?tag=v1#{ID}"

[[package]]
name = "second-of-lib"
version = "1.0.0"
source = "git+https://github.com/a/lib?tag=v1#{ID}"

[[package]]
name = "own"
version = "0.1.0"
"""


def test_a_cargo_lock_is_one_row_per_repository_and_one_for_the_registry() -> None:
    git, crates = harvest_cargo_lock("rust/Cargo.lock", LOCK.encode())
    assert git == Harvested(
        "lib", "cargo-git", "https://github.com/a/lib", "v1", ("*",), None, "rust/Cargo.lock", 12, resolved=ID
    )
    assert (git.commit, git.mutable) == (ID, False)
    assert (crates.kind, crates.name, crates.ref, crates.line) == ("crates", "rust/Cargo.lock", "1 packages", 6)
    assert (crates.sha256, crates.mutable) == (sha256_bytes(LOCK.encode()), False)


def test_a_registry_package_without_checksum_makes_the_row_mutable() -> None:
    _git, crates = harvest_cargo_lock("Cargo.lock", LOCK.replace("checksum", "checks").encode())
    assert crates.mutable


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (LOCK.replace(f"#{ID}", "").encode(), "Cargo.lock:12"),
        (LOCK.replace(ID, ID[:12]).encode(), "Cargo.lock:12"),
        (LOCK.replace("version = 4", "version = ").encode(), "Cargo.lock:1"),
        (b"package = 1", "Cargo.lock"),
        (b"\xff", "Cargo.lock"),
    ],
)
def test_a_damaged_cargo_lock(data: bytes, where: str) -> None:
    with pytest.raises(HarvestError) as caught:
        harvest_cargo_lock("Cargo.lock", data)
    assert caught.value.where == where


# --- scripts and Dockerfiles ----------------------------------------------------------------------------------------


def downloads(text: str, file: str = "docker/Dockerfile") -> list[tuple[str, str, str, str, int]]:
    rows = harvest_downloads(file, dedent(text))
    return [(row.kind, row.name.removeprefix(f"{file}:"), row.url, row.ref, row.line) for row in rows]


def test_a_dockerfile() -> None:
    assert downloads(
        """\
        ARG TOOL_URL="https://h/get-tool.py"
        ARG VERSION=1.2
        ARG KEY_URL
        FROM base
        RUN apt-get install -y curl wget git
        # RUN curl https://h/commented
        RUN set -x \\
            # curl https://h/commented-too
            && curl -sSf --retry 3 "${TOOL_URL}" -o /tmp/tool \\
            && case "$P" in a) ARCH=x ;; b) ARCH=y ;; esac \\
            && if true; then sudo wget -q https://h/v${VERSION}/t-$VERSION-${ARCH}.tgz; fi \\
            && curl -L ${KEY_URL} | gpg
        RUN --mount=type=cache,target=/c echo https://h/echoed
        LABEL source="https://h/label"
        ADD https://h/added.tgz /tmp/
        ADD . /src
        """
    ) == [
        ("download", "get-tool.py", "https://h/get-tool.py", "", 9),
        ("download", "t-$VERSION-${ARCH}.tgz", "https://h/v1.2/t-1.2-${ARCH}.tgz", "", 11),
        ("download", "${KEY_URL}", "${KEY_URL}", "", 12),
        ("download", "added.tgz", "https://h/added.tgz", "", 15),
    ]


def test_add_with_a_checksum_is_pinned() -> None:
    (row,) = harvest_downloads("Dockerfile", f"ADD --checksum=sha256:{'a' * 64} https://h/x.tgz /tmp/\n")
    assert (row.sha256, row.mutable) == ("a" * 64, False)


def test_add_of_a_repository() -> None:
    assert downloads(f"ADD https://h/a/lib.git#{ID} /src\n") == [
        ("git-clone", "lib", "https://h/a/lib.git", ID, 1),
    ]


@pytest.mark.parametrize(
    ("text", "ref", "submodules"),
    [
        ("RUN git clone ${REPO} && cd lib && git checkout ${BRANCH}\n", "deadbeef", ()),
        ("RUN git clone ${REPO} lib\nRUN cd lib && git checkout --detach $BRANCH\n", "deadbeef", ()),
        ("RUN git clone --recursive -b v1 --depth 1 $REPO\n", "v1", ("*",)),
        ("RUN git clone $REPO && git fetch -v -- origin ${BRANCH} && git checkout FETCH_HEAD\n", "deadbeef", ()),
        ("RUN git clone $REPO\nRUN git clone https://h/b && git checkout v9\n", "", ()),
        ("RUN git clone $REPO\n", "", ()),
    ],
)
def test_a_clone_and_what_it_checks_out(text: str, ref: str, submodules: tuple[str, ...]) -> None:
    arguments = 'ARG REPO="https://h/a/lib.git"\nARG BRANCH=deadbeef\nARG BRANCH\n'
    row = harvest_downloads("Dockerfile", arguments + text)[0]
    assert (row.kind, row.name, row.url, row.ref) == ("git-clone", "Dockerfile:lib", "https://h/a/lib.git", ref)
    assert row.submodules == submodules
    assert row.mutable


def test_a_script_that_clones_through_its_own_function() -> None:
    assert downloads(
        """\
        #!/bin/bash
        REF=${REF:-"d4f41e4e93"}
        while true; do REF="$2"; done
        build() {
            local url=$1
            git clone "$url"
        }
        FILE="lib-${VER:-3.3.24}_${UNSET}.tar"
        curl -fSL "https://h/$FILE" -o "$FILE"
        build \\
            "https://h/DeepEP" \\
            "$REF"
        """,
        "tools/x.sh",
    ) == [
        ("download", "lib-${VER:-3.3.24}_${UNSET}.tar", "https://h/lib-3.3.24_${UNSET}.tar", "", 9),
        ("git-clone", "DeepEP", "https://h/DeepEP", "d4f41e4e93", 10),
    ]


def test_requests_of_one_name_are_numbered() -> None:
    names = [
        name for _kind, name, *_rest in downloads("RUN curl https://h/1/x\nRUN curl https://h/2/x https://h/1/x\n")
    ]
    assert names == ["x", "x#2"]


def test_a_python_tool() -> None:
    assert downloads(
        '''\
        """See https://h/docs."""
        REPO = "https://h/a/lib.git"

        def main(version: str, given: str) -> None:
            run(["git", "clone", REPO, "lib"])
            url = f"https://h/{version}/x.whl"
            urllib.request.urlretrieve(url, "x")
            requests.get(given)
            options.get("https")
        ''',
        "tools/x.py",
    ) == [
        ("git-clone", "lib", "https://h/a/lib.git", "", 5),
        ("download", "x.whl", "https://h/${version}/x.whl", "", 7),
    ]


def test_python_that_cannot_be_parsed_lists_every_url() -> None:
    assert downloads("match = = 'https://h/x.whl'\n", "tools/x.py") == [("download", "x.whl", "https://h/x.whl", "", 1)]


# --- a whole tree ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "CMakeLists.txt": f"FetchContent_Declare(lib GIT_REPOSITORY https://h/lib GIT_TAG {ID})",
        "cmake/deep/more.cmake": "FetchContent_Declare(more GIT_REPOSITORY https://h/more GIT_TAG v1)",
        "rust/Cargo.lock": LOCK,
        "rust/Cargo.toml": '[dependencies]\nlib = { git = "https://github.com/a/lib", tag = "v1" }\n',
        "docker/Dockerfile.x": "RUN curl https://h/docker",
        "tools/a/get.sh": "curl https://h/tool",
        "setup.sh": "wget https://h/top",
        "docs/get.sh": "curl https://h/docs",
        "vllm/get.py": "urlopen('https://h/runtime')",
        ".git/x.cmake": "FetchContent_Declare(",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_read_and_in_which_order(tree: Path) -> None:
    assert [(row.kind, row.name) for row in harvest(tree)] == [
        ("fetchcontent", "lib"),
        ("fetchcontent", "more"),
        ("cargo-git", "lib"),
        ("crates", "rust/Cargo.lock"),
        ("download", "docker/Dockerfile.x:docker"),
        ("download", "setup.sh:top"),
        ("download", "tools/a/get.sh:tool"),
    ]


def test_a_folder_that_is_no_source_tree(tmp_path: Path) -> None:
    with pytest.raises(HarvestError, match=r"no CMakeLists\.txt"):
        harvest(tmp_path)


def test_a_git_dependency_without_a_lock(tree: Path) -> None:
    (tree / "rust/Cargo.lock").unlink()
    with pytest.raises(HarvestError) as caught:
        harvest(tree)
    assert caught.value.where == "rust/Cargo.toml:2"


def test_a_fault_deep_in_the_tree_is_not_passed_over(tree: Path) -> None:
    (tree / "csrc").mkdir()
    (tree / "csrc/CMakeLists.txt").write_text("\nFetchContent_Declare(lib GIT_REPOSITORY ${url})")
    with pytest.raises(HarvestError) as caught:
        harvest(tree)
    assert caught.value.where == "csrc/CMakeLists.txt:2"


BUILD_FILES = ["CMakeLists.txt", "cmake/a.cmake", "rust/Cargo.lock", "rust/Cargo.toml", "docker/Dockerfile"]


@pytest.mark.parametrize("kind", ["pipe", "circle", "dangling", "folder", "device", "large"])
@pytest.mark.parametrize("name", BUILD_FILES)
def test_a_build_file_that_cannot_be_read_whole_is_never_left_out(tree: Path, name: str, kind: str) -> None:
    if name == "CMakeLists.txt":
        name = "csrc/CMakeLists.txt"
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_text("#\n" * 600_000)
    else:
        path.symlink_to({"circle": path.name, "dangling": "nowhere", "device": "/dev/zero"}[kind])
    with pytest.raises(HarvestError) as caught:
        harvest(tree)
    assert caught.value.where == name


@pytest.mark.parametrize("long", ["x" * 5000, "x/" * 2500])
def test_a_path_that_no_system_takes(tmp_path: Path, long: str) -> None:
    with pytest.raises(HarvestError, match="too long"):
        harvest(tmp_path / long)


FETCH = "FetchContent_Declare(x GIT_REPOSITORY h GIT_TAG ${a})\n"
HOSTILE = {
    "cmake/a.cmake": [
        "if(A)\n" * 20_000 + FETCH + "endif()\n" * 20_000,
        "if(A)\n" + "elseif(B)\n" * 20_000 + FETCH + "endif()\n",
        'set(a "xxxxxxxx")\n' + ('set(a "' + "${a}" * 8 + '")\n') * 12 + FETCH,
        "".join(f"if(A{n})\nset(a ${{b{n}}})\nset(b{n} 1)\nendif()\n" for n in range(20)) + FETCH,
    ],
    "rust/Cargo.lock": ["a = " + "[" * 100_000, "a = " + "{a=" * 100_000],
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_a_hostile_build_file_is_one_clear_error_and_soon(tree: Path, name: str, text: str) -> None:
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(text)
    with pytest.raises(HarvestError) as caught:
        harvest(tree)
    assert (caught.value.where or "").startswith(name)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "RUN git clone a\\\n" * 60_000,
        "RUN git clone a\n" * 30_000,
        "RUN a &&\\\n" * 60_000,
        "\n" * 900_000,
        "RUN curl " + "${" * 100_000,
        "RUN curl '" + "x" * 900_000 + "'",
        "".join(f"ARG A{n}={f'$A{n + 1}' * 8}\n" for n in range(20)) + "ARG A20=x\nRUN curl https://h/$A0\n",
    ],
    ids=["continued", "clones", "commands", "blank", "open", "word", "doubling"],
)
def test_a_hostile_script_takes_no_long_time(text: str) -> None:
    harvest_downloads("docker/Dockerfile", text)


@pytest.mark.parametrize("text", ["x = " + "(" * 50_000, "x = '\0'", "x = f'{a" + ".b" * 50_000 + "}'"])
def test_python_that_is_hostile_lists_every_url(text: str) -> None:
    assert len(harvest_downloads("tools/x.py", f"y = 'https://h/x.whl'\n{text}\n")) <= 1
