"""One real rehearsal for all tests of its output, made by the command as a user starts it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from build_rooms import Command, Rehearsal
from image_rooms import ImageBuild, Keys, PushedBuild, push, sign
from tests.services.base import BaseLayout
from tests.unit.sign_rooms import write_key

from cufallback.errors import ToolchainError
from cufallback.process import LocalRunner
from cufallback.wheel.environment import find_interpreter


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The command, in a folder of its own; what still runs ends with the test."""
    with contextlib.closing(Command(tmp_path_factory.mktemp("cwd"))) as command:
        yield command


@pytest.fixture(scope="session")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """Build the rehearsal recipe once for the whole test run."""
    try:
        find_interpreter("3.11", LocalRunner())
    except ToolchainError as error:
        pytest.skip(f"{error.reason}; {error.remedy}")
    root = tmp_path_factory.mktemp("rehearsal")
    work, dist = root / "work", root / "dist"
    with contextlib.closing(Command(root)) as command:
        code, stdout, stderr = command.run("build", "--recipe", "rehearsal", "--work", work, "--dist", dist)
    assert code == 0, stderr
    (folder,) = (dist / "rehearsal").iterdir()
    return Rehearsal(work, dist, folder, stdout, stderr)


@pytest.fixture(scope="session")
def image_build(
    rehearsal: Rehearsal, engine: str, base_layout: BaseLayout, tmp_path_factory: pytest.TempPathFactory
) -> ImageBuild:
    """Build the rehearsal with its image, in the work folder of ``rehearsal``, whose wheels it takes over."""
    dist, base = tmp_path_factory.mktemp("image") / "dist", f"base=oci-layout:{base_layout.folder}@{base_layout.digest}"
    options = ("build", "--recipe", "rehearsal", "--work", rehearsal.work, "--dist", dist, "--base", base)
    with contextlib.closing(Command(dist.parent)) as command:
        code, stdout, stderr = command.run(*options, "--require-image")
    assert code == 0, stderr
    (folder,) = (dist / "rehearsal").iterdir()
    return ImageBuild(rehearsal.work, dist, folder, stdout, stderr, base)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """A key pair as docs/verify.md makes it."""
    return Keys(*write_key(tmp_path_factory.mktemp("keys")))


@pytest.fixture(scope="session")
def signed_build(image_build: ImageBuild, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> ImageBuild:
    """A copy of ``image_build``, signed. Never write into it: ``copy_folder`` is for that."""
    root = tmp_path_factory.mktemp("signed")
    folder = image_build.copy_folder(root)
    sign(folder, keys)
    return ImageBuild(image_build.work, root, folder, image_build.stdout, image_build.stderr, image_build.base)


@pytest.fixture(scope="session")
def pushed_build(
    signed_build: ImageBuild, registry: str, oras: str, tmp_path_factory: pytest.TempPathFactory
) -> PushedBuild:
    """The signed build in the registry, under a tag. Never change what lies there."""
    return push(signed_build.folder, f"{registry}/rehearsal/image", "v1", cwd=tmp_path_factory.mktemp("push"))


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """``small_disk("size=10m")`` is a file system in memory with those mount options; gone after the test."""
    with contextlib.ExitStack() as mounted:

        def mount(options: str) -> Path:
            folder = tmp_path_factory.mktemp("disk")
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                pytest.skip(f"no right to mount ({done.stderr.strip()}); run these tests as root")
            mounted.callback(lambda: subprocess.run(["umount", "--lazy", folder], check=True))
            return folder

        yield mount
