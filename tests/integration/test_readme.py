"""Every command that README and docs show is run: here, or where COVERED says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from build_rooms import Rehearsal
from tests.services.base import BaseLayout

CHECKOUT = Path(__file__).resolve().parents[2]
# The commands of docs/verify.md run in test_verify_docs.py.
PAGES = sorted({*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")} - {CHECKOUT / "docs/verify.md"})

# Command → the file that runs it, and the words there that do.
COVERED = {
    "python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s build-cu129 -- --recipe rehearsal": (
        ".ci/run",
        "python3 -m venv .venv && .venv/bin/pip install nox uv && .venv/bin/nox -s build-cu129 -- --recipe rehearsal",
    ),
    "python3 -m venv .venv && .venv/bin/pip install nox uv": (
        ".ci/run",
        "python3 -m venv .venv && .venv/bin/pip install nox uv",
    ),
    ".venv/bin/nox": ("tests/unit/test_noxfile.py", "def test_bare_nox_checks_and_never_builds"),
    ".venv/bin/nox -s tests": (".ci/run", ".venv/bin/nox -s tests"),
    ".venv/bin/nox -s verify -- dist/rehearsal/*/": (".ci/run", ".venv/bin/nox -s verify -- dist/rehearsal/*/"),
}

# Command → why nothing here can run it.
NOT_RUN = {
    'docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v "$HOME/.cache/huggingface:/hf" -e HF_HOME=/hf '
    "-e VLLM_ENABLE_CUDA_COMPATIBILITY=1 vllm/vllm-openai:v0.28.0 MODEL": "a GPU with an older driver, and 10 GB",
    'docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v "$HOME/.cache/huggingface:/hf" -e HF_HOME=/hf '
    "vllm/vllm-openai:v0.28.0-cu129 MODEL": "a GPU with an older driver, and 10 GB",
    "docker run --rm --gpus all --read-only --tmpfs /tmp REGISTRY/NAME@sha256:DIGEST": "a GPU",
}

# Commands that the tests below run, each by a test that names it.
RUN_HERE = {
    "python3 -m venv probe",
    "probe/bin/pip install wheels/cufallback_cuda_probe-*.whl",
    "probe/bin/pip install --no-index --find-links wheelhouse wheels/cufallback_cuda_probe-*.whl",
    "probe/bin/python -m cuda_probe",
    "probe/bin/python -m cuda_probe --json",
    "cp -r dist/rehearsal/BUILD-ID runtime",
    "cp -rL .cufallback/*/BUILD-ID/prefetch/wheelhouse/runtime runtime/wheelhouse",
    "uv venv --python 3.11 runtime/env",
    "uv pip install --python runtime/env --offline --no-index -r runtime/pylock.toml",
    ".venv/bin/pip install .",
    ".venv/bin/cufallback recipe list",
    ".venv/bin/cufallback plan --recipe rehearsal",
    ".venv/bin/cufallback recipe show kimi-k3-cu129",
    ".venv/bin/cufallback inspect vllm-0.28.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl",
    ".venv/bin/cufallback source harvest vllm-source-tree",
    ".venv/bin/nox -s lock -- --recipe rehearsal",
    ".venv/bin/nox -s lock -- --recipe rehearsal --check",
    ".venv/bin/nox -s lock -- --recipe rehearsal --images",
    ".venv/bin/nox -s lock -- --recipe rehearsal --images --check",
    ".venv/bin/nox -s build-cu129 -- --recipe rehearsal --require-image",
    "oras copy --platform linux/amd64 --to-oci-layout docker.io/library/python:3.11-slim-bookworm DIR:base",
    ".venv/bin/nox -s build-cu129 -- --recipe rehearsal --require-image --base base=oci-layout:DIR@sha256:DIGEST",
    ".venv/bin/cufallback show dist/rehearsal/BUILD-ID",
    ".venv/bin/cufallback sign dist/rehearsal/BUILD-ID --key cosign.pem",
    ".venv/bin/cufallback verify dist/rehearsal/BUILD-ID --key cosign.pub",
    ".venv/bin/nox -s push -- REGISTRY/NAME:TAG --build dist/rehearsal/BUILD-ID",
    ".venv/bin/cufallback verify REGISTRY/NAME@sha256:DIGEST --key cosign.pub",
    "docker run --rm --network none --read-only --tmpfs /tmp REGISTRY/NAME@sha256:DIGEST",
    "docker image inspect --format '{{json .Config.Labels}}' REGISTRY/NAME@sha256:DIGEST",
    "docker run --rm --network none --entrypoint cat REGISTRY/NAME@sha256:DIGEST /opt/vllm/cufallback-checks.json",
    "tar -cf image.tar -C dist/rehearsal/BUILD-ID/image .",
    "docker load --input image.tar",
}


def commands(page: Path) -> list[str]:
    """Return the command lines of a page's sh and console blocks."""
    found: list[str] = []
    blocks = re.findall(r"^```(sh|console|bash)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for kind, body in blocks:
        lines = re.sub(r"\\\n\s*", "", body).splitlines()
        found += [line.removeprefix("$ ") for line in lines if kind != "console" or line.startswith("$ ")]
    return found


JQ = [command for page in PAGES for command in commands(page) if command.startswith("jq ")]


def cufallback(
    command: str, cwd: Path, *more: str | Path, names: Mapping[str, str] = MappingProxyType({}), **environment: str
) -> str:
    """Run a README's cufallback or nox command with this environment's interpreter; return its stdout.

    Args:
        command: as it is shown.
        cwd: where.
        more: words behind it that keep a test to its own folders.
        names: what the command's placeholders stand for.
        environment: variables.
    """
    assert command in RUN_HERE
    line = re.sub(r"^\.venv/bin/(?:cufallback|nox -s) ", "", command)
    line = re.sub(r"^(lock|push) -- |^build-cu129 -- ", lambda session: f"{session[1] or 'build'} ", line)
    words = [filled(word, names) for word in line.split()]
    done = subprocess.run(
        [sys.executable, "-m", "cufallback", *words, *more],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "build"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def filled(text: str, names: Mapping[str, str]) -> str:
    """Put in what placeholders stand for."""
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], text) if names else text


def test_every_command_shown_is_run_somewhere() -> None:
    shown = {command for page in PAGES for command in commands(page)} - set(JQ)
    assert shown == COVERED.keys() | NOT_RUN.keys() | RUN_HERE
    own = Path(__file__).read_text()
    for command in RUN_HERE:
        assert len(re.findall(rf'[" ]{re.escape(command)}"', own)) > 1, f"no test here runs {command}"


@pytest.mark.parametrize("command", COVERED)
def test_what_runs_a_command_elsewhere_is_still_there(command: str) -> None:
    file, words = COVERED[command]
    assert words in (CHECKOUT / file).read_text()


def test_recipe_list(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback recipe list", tmp_path)
    status = tomllib.loads((CHECKOUT / "recipes/kimi-k3-cu129.toml").read_text())["recipe"]["status"]
    assert re.search(rf"^\* kimi-k3-cu129 +{status}", text, re.MULTILINE)
    assert re.search(r"^  rehearsal +rehearsal", text, re.MULTILINE)


def test_recipe_show(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback recipe show kimi-k3-cu129", tmp_path)
    assert "2cf0a6915ce544dc493a0990f2ea38d81601128a" in text


def test_plan(tmp_path: Path) -> None:
    text = cufallback(".venv/bin/cufallback plan --recipe rehearsal", tmp_path)
    assert "prefetch" in text
    assert "vllm 0.27.1" in text
    assert not (tmp_path / "dist").exists(), "a plan runs nothing"


def test_inspect(tmp_path: Path) -> None:
    command = ".venv/bin/cufallback inspect vllm-0.28.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(tmp_path / command.split()[-1], "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr(
            "vllm-0.28.0+cu129.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0+cu129\n"
        )
        wheel.writestr(
            "vllm-0.28.0+cu129.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
        )
        wheel.writestr("vllm-0.28.0+cu129.dist-info/RECORD", "")
    assert "vllm" in cufallback(command, tmp_path)


@pytest.mark.network
def test_source_harvest(tmp_path: Path, extracted: Callable[[str], Path]) -> None:
    (tmp_path / "vllm-source-tree").symlink_to(extracted("0.27.1"))
    text = cufallback(".venv/bin/cufallback source harvest vllm-source-tree", tmp_path)
    for name in ("cutlass", "deepgemm", "flashkda", "flashmla", "vllm-flash-attn", "harmony"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert re.search(r"^flashmla .* a8f794d1251c", text, re.MULTILINE), "the commit that 0.27.1 asks for"


@pytest.mark.slow
@pytest.mark.network
def test_lock(tmp_path: Path) -> None:
    for folder in ("recipes", "locks"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    committed = (tmp_path / "locks/rehearsal/build.txt").read_bytes()
    data = {"CUFALLBACK_DATA": str(tmp_path)}
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal --check", tmp_path, **data)
    (tmp_path / "locks/rehearsal/build.txt").unlink()
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal", tmp_path, **data)
    assert (tmp_path / "locks/rehearsal/build.txt").read_bytes() == committed


@pytest.mark.slow
@pytest.mark.network
def test_pip_install(tmp_path: Path) -> None:
    clone, command = tmp_path / "clone", ".venv/bin/pip install ."
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, clone / name)
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=clone, check=True)
    subprocess.run([*command.split(), "--quiet"], cwd=clone, check=True)
    done = subprocess.run([clone / ".venv/bin/cufallback", "--version"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.startswith(b"cufallback ")
    assert not list((clone / "build").rglob("lib")), "a build of the wheel leaves nothing in the import root"


def test_the_pytest_words_of_the_contributing_page_select_tests() -> None:
    shown = re.findall(r"nox -s tests -- (.+?)`", (CHECKOUT / "CONTRIBUTING.md").read_text())
    assert len(shown) == 2
    for words in shown:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words.split()]
        assert subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=False).returncode == 0, words


# What the pages show of a finished build. `.ci/run` makes one before it comes to these tests.


@pytest.fixture
def build() -> Path:
    """The newest rehearsal in this checkout's dist/."""
    found = sorted(CHECKOUT.glob("dist/rehearsal/*/record.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail("continuous integration builds the rehearsal before the tests")
        pytest.skip("no build in dist/: run `nox -s build-cu129 -- --recipe rehearsal` first")
    return found[-1].parent


def shell(command: str, cwd: Path, *, expect: int = 0) -> str:
    """Run a shown command by a shell, with this environment's programs first; return its stdout."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


# These look into the image, its bases or its SBOM.
OF_IMAGE = [command for command in JQ if re.search(r"\.image|\.bases|image\.cdx\.json|image/index|DIR/", command)]


@pytest.mark.parametrize("command", [command for command in JQ if command not in OF_IMAGE])
def test_jq_finds_something_in_a_real_record(build: Path, command: str) -> None:
    find_something(command, build)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.services
@pytest.mark.parametrize("command", [command for command in OF_IMAGE if "DIR/" not in command])
def test_jq_finds_something_in_the_record_of_an_image(image_build: Rehearsal, command: str) -> None:
    find_something(command, image_build.folder)


def find_something(command: str, folder: Path) -> None:
    """Run a shown jq command in a build folder and demand that it finds what it asks for."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    text = shell(command, folder)
    assert text.strip() not in ("", "null", "{}", "[]")
    if "-r" not in command.split():  # one object or a stream of them: each name that is asked for has a value
        asked = re.search(r"\{([\w, ]+)\}", command)
        first, _ = json.JSONDecoder().raw_decode(text)
        assert not asked or (set(asked[1].split(", ")) == first.keys() and None not in first.values())
    else:
        assert "null:" not in text
        assert not text.startswith("null ")


def test_there_is_an_expression_for_each_part_of_the_record_that_readers_look_for() -> None:
    text = "\n".join(JQ)
    for part in ("commit", "tree_sha256", ".diff", ".contracts", ".distributions", ".toolchain", ".extensions"):
        assert part in text
    for part in ("cufallback-cuda-probe", "minimum_driver.reasons", ".stages"):
        assert part in text
    for part in (".image.manifest.digest", ".image.layers", ".image.checks", ".bases", ".components", ".builder.id"):
        assert part in text


def probe_room(build: Path, tmp_path: Path) -> None:
    """Lay a build's wheels and its runtime wheelhouse out as docs/cuda-probe.md says, with a fresh environment."""
    (tmp_path / "wheels").symlink_to(build / "wheels")
    (tmp_path / "wheelhouse").symlink_to(CHECKOUT / ".cufallback/work" / build.name / "prefetch/wheelhouse/runtime")
    shell("python3 -m venv probe", tmp_path)


def run_probe(tmp_path: Path) -> None:
    """Run the installed probe both ways; without a driver it ends with 3, with one as it finds."""
    done = subprocess.run(
        [tmp_path / "probe/bin/python", "-m", "cuda_probe", "--json"], capture_output=True, check=False
    )
    report = json.loads(done.stdout)
    if report["kernel_driver"] is None:
        assert report["status"] == "no_driver"
        assert report["exit_code"] == done.returncode == 3
    assert "CUDA 12.9" in shell("probe/bin/python -m cuda_probe", tmp_path, expect=done.returncode)
    again = json.loads(shell("probe/bin/python -m cuda_probe --json", tmp_path, expect=done.returncode))
    assert again["exit_code"] == done.returncode


@pytest.mark.slow
def test_the_cuda_probe_installs_without_an_index(build: Path, tmp_path: Path) -> None:
    probe_room(build, tmp_path)
    shell("probe/bin/pip install --no-index --find-links wheelhouse wheels/cufallback_cuda_probe-*.whl", tmp_path)
    run_probe(tmp_path)


@pytest.mark.slow
@pytest.mark.network
def test_the_cuda_probe_installs_from_the_index(build: Path, tmp_path: Path) -> None:
    probe_room(build, tmp_path)
    shell("probe/bin/pip install wheels/cufallback_cuda_probe-*.whl", tmp_path)
    run_probe(tmp_path)


@pytest.mark.slow
def test_the_runtime_installs_from_pylock(build: Path, tmp_path: Path) -> None:
    for name in ("dist", ".cufallback"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    for command in (
        "cp -r dist/rehearsal/BUILD-ID runtime",
        "cp -rL .cufallback/*/BUILD-ID/prefetch/wheelhouse/runtime runtime/wheelhouse",
        "uv venv --python 3.11 runtime/env",
        "uv pip install --python runtime/env --offline --no-index -r runtime/pylock.toml",
    ):
        shell(command.replace("BUILD-ID", build.name), tmp_path)
    listed = shell("uv pip list --python runtime/env --format json", tmp_path)
    assert {"vllm", "cufallback-cuda-probe", "nvidia-cuda-runtime-cu12"} <= {
        item["name"] for item in json.loads(listed)
    }


# What the pages show of images: the commands in their order, on the shared build with an image.


@dataclass(frozen=True)
class Desk:
    """A folder in which the commands of the README find what they name: ``dist/``, a key pair, and ``names``."""

    folder: Path
    names: Mapping[str, str]

    def cufallback(self, command: str, *more: str | Path, **environment: str) -> str:
        return cufallback(command, self.folder, *more, names=self.names, **environment)

    def shell(self, command: str, *, expect: int = 0) -> str:
        return shell(filled(command, self.names), self.folder, expect=expect)


@pytest.fixture(scope="module")
def desk(image_build: Rehearsal, registry: str, oras: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """The shared build with an image, copied to be signed and pushed."""
    folder, build_id = tmp_path_factory.mktemp("desk"), image_build.folder.name
    (folder / "dist/rehearsal").mkdir(parents=True)
    image_build.copy_folder(folder / "dist/rehearsal")
    digest = json.loads((image_build.folder / "record.json").read_bytes())["image"]["manifest"]["digest"]
    names = {
        "REGISTRY/NAME": f"{registry}/readme/rehearsal",
        "TAG": "1",
        "BUILD-ID": build_id,
        "DIGEST": digest.removeprefix("sha256:"),
    }
    for command in commands(CHECKOUT / "docs/verify.md"):
        if "cosign.pem" in command:  # its section "Make a key pair"
            shell(command.replace("../", ""), folder)
    made = Desk(folder, names)
    yield made
    for image in (f"{names['REGISTRY/NAME']}@{digest}", f"cufallback/rehearsal:{build_id}"):
        subprocess.run(["docker", "image", "rm", image], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.services
def test_an_image_is_shown_signed_pushed_verified_and_run(desk: Desk) -> None:
    digest = f"sha256:{desk.names['DIGEST']}"
    shown = desk.cufallback(".venv/bin/cufallback show dist/rehearsal/BUILD-ID")
    assert digest in shown
    assert "cufallback sign" in shown, "not signed yet, and how to"
    paths = desk.cufallback(".venv/bin/cufallback sign dist/rehearsal/BUILD-ID --key cosign.pem").splitlines()
    assert len(paths) == 5
    assert all((desk.folder / path).is_file() for path in paths)
    verified = desk.cufallback(".venv/bin/cufallback verify dist/rehearsal/BUILD-ID --key cosign.pub")
    assert " verified: " in verified
    assert "signatures/" not in verified, "each signature was checked, so none is listed"
    pushed = desk.cufallback(".venv/bin/nox -s push -- REGISTRY/NAME:TAG --build dist/rehearsal/BUILD-ID")
    reference = f"{desk.names['REGISTRY/NAME']}@{digest}"
    assert f"image     {reference}\n" in pushed
    verified = desk.cufallback(".venv/bin/cufallback verify REGISTRY/NAME@sha256:DIGEST --key cosign.pub")
    assert verified.startswith(f"{reference}: verified: ")
    assert "signatures/" not in verified, "each signature was checked, so none is listed"
    # No host of these tests has a GPU that the container could see.
    text = desk.shell("docker run --rm --network none --read-only --tmpfs /tmp REGISTRY/NAME@sha256:DIGEST", expect=3)
    assert "CUDA 12.9" in text
    assert "no_driver" in text
    labels = json.loads(
        desk.shell("docker image inspect --format '{{json .Config.Labels}}' REGISTRY/NAME@sha256:DIGEST")
    )
    assert labels["cufallback.build-id"].startswith(desk.names["BUILD-ID"])
    page = (CHECKOUT / "docs/image.md").read_text()
    for label in labels:
        assert f"`{label.removeprefix('org.opencontainers.image.')}`" in page, label
    ask = "docker run --rm --network none --entrypoint cat REGISTRY/NAME@sha256:DIGEST /opt/vllm/cufallback-checks.json"
    checks = json.loads(desk.shell(ask))
    record = json.loads((desk.folder / "dist/rehearsal" / desk.names["BUILD-ID"] / "record.json").read_bytes())
    assert checks == record["image"]["checks"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.services
def test_an_engine_takes_the_layout_as_it_is(desk: Desk) -> None:
    desk.shell("tar -cf image.tar -C dist/rehearsal/BUILD-ID/image .")
    loaded = desk.shell("docker load --input image.tar")
    (desk.folder / "image.tar").unlink()
    name = f"cufallback/rehearsal:{desk.names['BUILD-ID']}"
    assert name in loaded
    found = json.loads(shell(f"docker image inspect {name}", desk.folder))
    assert found[0]["Id"] == f"sha256:{desk.names['DIGEST']}"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.services
def test_an_image_is_built_from_a_locked_base_and_from_one_on_disk(
    image_build: Rehearsal, base_layout: BaseLayout, registry: str, oras: str, tmp_path: Path
) -> None:
    # docker.io is out of reach: the base of the tests stands under another name in another registry.
    hub, name = "docker.io/library/python:3.11-slim-bookworm", f"{registry}/readme/base:1"
    for folder in ("recipes", "locks", "dockerfiles"):
        shutil.copytree(CHECKOUT / folder, tmp_path / "data" / folder)
    recipe = tmp_path / "data/recipes/rehearsal.toml"
    assert hub in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(hub, name))
    shell(f"oras copy --to-plain-http --from-oci-layout {base_layout.folder}@{base_layout.digest} {name}", tmp_path)
    data = {"CUFALLBACK_DATA": str(tmp_path / "data")}
    lock = tmp_path / "data/locks/rehearsal/images.lock.toml"
    lock.unlink(missing_ok=True)
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal --images", tmp_path, **data)
    assert base_layout.digest in lock.read_text()
    cufallback(".venv/bin/nox -s lock -- --recipe rehearsal --images --check", tmp_path, **data)

    own = ("--work", image_build.work, "--dist", tmp_path / "dist")
    text = cufallback(".venv/bin/nox -s build-cu129 -- --recipe rehearsal --require-image", tmp_path, *own, **data)
    (built,) = (tmp_path / "dist/rehearsal").iterdir()
    record = json.loads((built / "record.json").read_bytes())
    assert record["image"]["manifest"]["digest"] in text
    assert record["bases"] == [{"name": "base", "reference": name, "digest": base_layout.digest, "origin": "lock"}]

    copy = "oras copy --platform linux/amd64 --to-oci-layout docker.io/library/python:3.11-slim-bookworm DIR:base"
    assert copy in RUN_HERE
    shell(filled(copy, {hub: f"--from-plain-http {name}", "DIR": "base"}), tmp_path)
    (ask,) = (command for command in JQ if "DIR/" in command)
    digest = shell(ask.replace("DIR", "base"), tmp_path).strip()
    assert digest == base_layout.digest
    # The very build that all these tests share, its base from another folder.
    text = cufallback(
        ".venv/bin/nox -s build-cu129 -- --recipe rehearsal --require-image --base base=oci-layout:DIR@sha256:DIGEST",
        tmp_path,
        *("--work", image_build.work, "--dist", image_build.dist),
        names={"DIR": "base", "DIGEST": digest.removeprefix("sha256:")},
    )
    assert image_build.folder.name in text
    assert "\ndone " not in text, "nothing is left to do"
