"""docs/verify.md: every command it shows runs on a real build, and fails on a small one that was tampered with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from build_rooms import CHECKOUT
from image_rooms import ImageBuild, Keys, PushedBuild
from tests.unit.sign_rooms import WHEELS, Build, write_build, write_key

from cufallback.attest.statement import Subject

pytestmark = pytest.mark.services

PAGE = CHECKOUT / "docs" / "verify.md"

# The two commands of this project run above the build folder; they take whole builds only.
OURS = (
    ".venv/bin/cufallback verify dist/RECIPE/BUILD-ID --key cosign.pub",
    ".venv/bin/cufallback verify REGISTRY/NAME@sha256:DIGEST --key cosign.pub",
)


def sections() -> dict[str, list[str]]:
    """Return the commands of each section of the page, by its heading."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^##+ ", PAGE.read_text("utf-8"), flags=re.MULTILINE):
        blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        if commands := [line for block in blocks for line in block.splitlines()]:
            found[part.splitlines()[0]] = commands
    return found


SECTIONS = sections()
KEY, REGISTRY = "Make a key pair", "The registry"
FOLDER = [name for name in SECTIONS if name not in (KEY, REGISTRY)]

SILENT = ("cmp", "cp", "diff", "mkdir", "oras manifest fetch", "tar")  # in the section of the registry

ATTACH = (
    "cosign attach attestation --attestation signatures/provenance.dsse.json"
    " --attestation signatures/sbom-image.dsse.json"
)


@dataclass(frozen=True)
class Room:
    """A signed build folder, the public key above it, and what the page's placeholders stand for."""

    build: Build
    name: str = "localhost:1/nothing"

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        folder = self.build.folder
        words = {
            "REGISTRY/NAME": self.name,
            "DIGEST": self.build.image.sha256,
            "dist/RECIPE/BUILD-ID": folder.name,
            ".venv/bin/cufallback": f"{sys.executable} -m cufallback",
        }
        line = re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], command)
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=folder.parent if command in OURS else folder,
            env={**os.environ, "HOME": str(folder.parent), "PYTHONPATH": str(CHECKOUT / "build")},
            capture_output=True,
            text=True,
            check=False,
        )

    def failed(self, names: list[str]) -> list[str]:
        """Run the sections' commands in order and return those that failed."""
        return [
            command
            for name in names
            for command in SECTIONS[name]
            if command not in OURS and self.run(command).returncode
        ]


@pytest.fixture
def room(cosign: str, tmp_path: Path) -> Room:
    """A build signed with a key that the page's own commands make."""
    made = Room(write_build(tmp_path / "build"))
    assert made.failed([KEY]) == []
    made.build.sign(tmp_path / "cosign.pem")
    return made


@pytest.fixture
def real(signed_build: ImageBuild, pushed_build: PushedBuild, keys: Keys, tmp_path: Path) -> Room:
    """A real build, signed and pushed, where the page expects it."""
    shutil.copy(keys.public, tmp_path / "cosign.pub")
    build = Build(signed_build.copy_folder(tmp_path), (), Subject("image", signed_build.digest.removeprefix("sha256:")))
    # oras speaks plain HTTP to localhost only; cosign to every loopback address.
    return Room(build, pushed_build.name.replace("127.0.0.1", "localhost"))


def test_the_page_has_the_sections_that_are_run_here() -> None:
    assert {KEY, REGISTRY} < SECTIONS.keys()
    assert len(FOLDER) == 8
    assert {command for commands in SECTIONS.values() for command in commands} > set(OURS)


@pytest.mark.parametrize("name", FOLDER)
def test_the_commands_for_the_folder_run_on_a_small_one(room: Room, name: str) -> None:
    assert room.failed([name]) == []


@pytest.mark.slow
@pytest.mark.network
def test_every_command_runs_on_a_real_build(real: Room) -> None:
    for name in [*FOLDER, REGISTRY]:
        for command in SECTIONS[name]:
            done = real.run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert name != REGISTRY or done.stdout or command.startswith(SILENT), command


def test_the_digest_and_the_key_id_are_printed_as_the_page_says(room: Room) -> None:
    from cufallback.attest.keys import load_public_key

    digest, key = (room.run(command).stdout for command in SECTIONS["What you need"])
    assert digest == f"sha256:{room.build.image.sha256}\n"
    assert key.split()[0] == load_public_key(room.build.folder.parent / "cosign.pub").keyid


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def sign_by_another(build: Build) -> None:
    private, _public = write_key(build.folder.parent / "other")
    build.sign(private)


# what was done → (doing it, the sections of which at least one command must fail)
TAMPERING: Mapping[str, tuple[Callable[[Build], object], str]] = {
    "a wheel altered": (lambda build: append(build.folder / "wheels" / WHEELS[1]), "2345"),
    "a wheel added": (lambda build: (build.folder / "wheels/extra.whl").write_text("x"), "245"),
    "a wheel removed": (lambda build: (build.folder / "wheels" / WHEELS[1]).unlink(), "23"),
    "the record altered": (lambda build: append(build.folder / "record.json"), "12"),
    "the checksums altered": (lambda build: append(build.folder / "SHA256SUMS"), "12"),
    "the provenance altered": (lambda build: append(build.folder / "provenance.intoto.json"), "24"),
    "an SBOM exchanged": (
        lambda build: shutil.copy(
            build.folder / f"sbom/{WHEELS[0]}.cdx.json", build.folder / f"sbom/{WHEELS[1]}.cdx.json"
        ),
        "25",
    ),
    "a layer altered": (lambda build: append(largest(build.folder / "image/blobs/sha256")), "26"),
    "signed by another": (sign_by_another, "145"),
    "an SBOM's signature exchanged": (
        lambda build: shutil.copy(
            build.folder / f"signatures/sbom-{WHEELS[0]}.dsse.json",
            build.folder / f"signatures/sbom-{WHEELS[1]}.dsse.json",
        ),
        "5",
    ),
}


@pytest.mark.parametrize("kind", TAMPERING)
def test_each_kind_of_tampering_fails_where_the_page_says(room: Room, kind: str) -> None:
    tamper, expected = TAMPERING[kind]
    tamper(room.build)
    assert "".join(name[0] for name in FOLDER if name[0].isdigit() and room.failed([name])) == expected


def test_cosign_finds_no_attestation_on_an_image_that_carries_those_of_another(
    room: Room, registry: str, oras: str, tmp_path: Path
) -> None:
    other = Room(
        write_build(tmp_path / "other", layer=b"\1" * 1024), f"{registry.replace('127.0.0.1', 'localhost')}/verify-docs"
    )
    assert other.run("oras cp --from-oci-layout image@sha256:DIGEST REGISTRY/NAME:1").returncode == 0
    assert room.run(f"{ATTACH} {other.name}@sha256:{other.build.image.sha256}").returncode == 0
    attested = [command for command in SECTIONS[REGISTRY] if command.startswith("cosign")]
    assert len(attested) == 2
    for command in attested:
        done = other.run(command)
        assert done.returncode != 0
        assert "digest" in done.stderr, done.stderr
