"""What the end-to-end tests share: the command as a user starts it, and a finished build to copy from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 240


class Started:
    """A command in the background. Its stderr is a file, so that nothing blocks and nothing is lost."""

    def __init__(self, words: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
        self._files = contextlib.ExitStack()
        name = f".stream-{time.monotonic_ns()}"
        self._out, self._err = (cwd / f"{name}.{kind}" for kind in ("out", "err"))
        out, err = (self._files.enter_context(path.open("wb")) for path in (self._out, self._err))
        self.process = subprocess.Popen(words, cwd=cwd, env=environment, stdout=out, stderr=err)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def until(self, seen: Callable[[], bool]) -> None:
        """Wait until ``seen``; the command must still be running then."""
        for _ in range(_PATIENCE_SECONDS * 200):
            if seen():
                return
            assert self.process.poll() is None, f"ended with {self.process.returncode} too early:\n{self.stderr}"
            time.sleep(0.005)
        pytest.fail(f"nothing to see after {_PATIENCE_SECONDS} s:\n{self.stderr}")

    def says(self, text: str) -> None:
        """Wait until the command has written ``text`` to stderr."""
        self.until(lambda: text in self.stderr)

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        return self.process.wait(_PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._files.close()


@dataclass(frozen=True)
class Command:
    """The cufallback command of this checkout, run in a folder that is no checkout."""

    cwd: Path
    started: list[Started] = field(default_factory=list)

    def start(self, *words: str | Path, **environment: str) -> Started:
        """Start it in the background."""
        whole = (sys.executable, "-m", "cufallback", *map(str, words))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUFALLBACK_")}
        begun = Started(whole, self.cwd, {**inherited, "PYTHONPATH": str(CHECKOUT / "build"), **environment})
        self.started.append(begun)
        return begun

    def run(self, *words: str | Path, **environment: str) -> tuple[int, str, str]:
        """Run it to its end; return exit status, stdout and stderr."""
        begun = self.start(*words, **environment)
        return begun.wait(), begun.stdout, begun.stderr

    def close(self) -> None:
        """End what still runs."""
        for begun in self.started:
            begun.close()


@dataclass(frozen=True)
class Rehearsal:
    """The finished shared build. Never write into it: ``copy_work`` and ``copy_folder`` are for that."""

    work: Path
    dist: Path
    folder: Path
    stdout: str
    stderr: str

    @property
    def options(self) -> tuple[str, ...]:
        """The words that started it."""
        return ("build", "--recipe", "rehearsal", "--work", str(self.work), "--dist", str(self.dist))

    def stage(self, work: Path, name: str) -> Path:
        """Return the folder of a stage in a copy of the work folder."""
        return work / "work" / self.folder.name / name

    def copy_work(self, target: Path, *stages: str) -> Path:
        """Make a work folder of links with the same store and these finished stages: stages replace files whole."""
        shutil.copytree(self.work / "store", target / "store", copy_function=os.link)
        for name in stages:
            shutil.copytree(self.stage(self.work, name), self.stage(target, name), symlinks=True, copy_function=_link)
        return target

    def copy_folder(self, parent: Path) -> Path:
        """Make a build folder with the same content. Its files are links: replace them, never write into them."""
        return Path(shutil.copytree(self.folder, parent / self.folder.name, copy_function=os.link))


def _link(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)


def resize(folder: Path, size: str) -> None:
    """Change the size of a :func:`small_disk`."""
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


def replace_file(path: Path, content: bytes) -> None:
    """Give ``path`` new content in a new file, so that other links of the old one keep theirs."""
    path.unlink()
    path.write_bytes(content)
