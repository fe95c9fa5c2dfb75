"""What the tests of images share: a build with an image, its keys, copies of recipes to edit, an engine that dies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import socket
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_rooms import CHECKOUT, Command, Rehearsal

from cufallback.image.layout import Image, read_image
from cufallback.image.reference import Reference, parse_reference
from cufallback.record import Record, read_record

NOWHERE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
BEFORE_IMAGE = ("prefetch", "wheels", "inspect")
STAGES = (*BEFORE_IMAGE, "image", "attest", "record")


@dataclass(frozen=True)
class Keys:
    """The files of a key pair."""

    private: Path
    public: Path


@dataclass(frozen=True)
class ImageBuild(Rehearsal):
    """A finished build with an image; ``base`` is the value of its ``--base``."""

    base: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        return (*super().options, "--base", self.base)

    @property
    def record(self) -> Record:
        return read_record(self.folder)

    @property
    def image(self) -> Image:
        return read_image(self.folder / "image")

    @property
    def digest(self) -> str:
        """The manifest's digest as the record has it."""
        found = self.record.image
        assert found is not None
        return found.manifest.digest

    def elsewhere(self, folder: Path, *stages: str) -> tuple[str | Path, ...]:
        """Return the words for the same build below ``folder``, where these stages are done already."""
        work = self.copy_work(folder / "work", *stages)
        return ("build", "--recipe", "rehearsal", "--work", work, "--dist", folder / "dist", "--base", self.base)


@dataclass(frozen=True)
class PushedBuild:
    """What ``cufallback push --json`` said of a build; ``name`` is REGISTRY/NAME."""

    name: str
    tag: str
    told: dict[str, object]

    @property
    def reference(self) -> Reference:
        return parse_reference(str(self.told["reference"]))


def run(*words: str | Path, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Run the cufallback command in a folder to its end; return exit status, stdout and stderr."""
    with contextlib.closing(Command(cwd)) as command:
        return command.run(*words, **environment)


def sign(folder: Path, keys: Keys) -> None:
    """Sign a build folder by the command."""
    code, _out, err = run("sign", folder, "--key", keys.private, cwd=keys.private.parent)
    assert code == 0, err


def push(folder: Path, name: str, tag: str, *, cwd: Path) -> PushedBuild:
    """Push a build folder by the command."""
    code, out, err = run("push", "--json", "--build", folder, f"{name}:{tag}", cwd=cwd)
    assert code == 0, err
    return PushedBuild(name, tag, json.loads(out))


def docker(*words: str | Path, status: int = 0) -> str:
    """Run docker, which must end with ``status``; return its output."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def data_copy(parent: Path, **edits: tuple[str, str]) -> dict[str, str]:
    """Copy recipes, locks and dockerfiles, edit files of the copy, and return the variable that selects it.

    Args:
        parent: folder that receives the copy.
        edits: ``recipe`` or ``dockerfile`` → (a text that stands there once, what takes its place).
    """
    root = parent / "data"
    for name in ("recipes", "locks/rehearsal", "dockerfiles"):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = {"recipe": "recipes/rehearsal.toml", "dockerfile": "dockerfiles/cu129.Dockerfile"}
    for name, (old, new) in edits.items():
        path = root / files[name]
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new))
    return {"CUFALLBACK_DATA": str(root)}


def one_error(stderr: str) -> str:
    """Return the error that a command ended with; there must be one, with a remedy and without a traceback."""
    assert "Traceback" not in stderr
    errors = re.findall(r"^error: (?:.*\n)*?  remedy: .*$", stderr, re.MULTILINE)
    assert len(errors) == 1, stderr
    return str(errors[0])


class _Front(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    engine: str
    open: set[socket.socket]


class _Connection(socketserver.BaseRequestHandler):
    server: _Front
    request: socket.socket

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(self.server.engine)
            ends = {self.request, engine}
            self.server.open |= ends
            back = threading.Thread(target=_copy, args=(engine, self.request))
            back.start()
            _copy(self.request, engine)
            back.join()
            self.server.open -= ends


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class MortalEngine:
    """A front of the real engine. After :meth:`die` nothing answers any more, as when the engine was killed."""

    server: _Front

    @property
    def host(self) -> str:
        """What DOCKER_HOST says."""
        return f"unix://{self.server.server_address!s}"

    def die(self) -> None:
        """Close every connection and take no new one."""
        Path(str(self.server.server_address)).unlink()
        self.server.shutdown()
        for end in set(self.server.open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def mortal_engine(host: str) -> Iterator[MortalEngine]:
    """Run a front of the engine at ``host``; empty for the default socket."""
    # A socket's path may have 107 bytes, fewer than those of tests' folders.
    with tempfile.TemporaryDirectory(prefix="engine-") as folder, _Front(f"{folder}/s", _Connection) as server:
        server.engine, server.open = host.removeprefix("unix://") or "/var/run/docker.sock", set()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield MortalEngine(server)
        finally:
            server.shutdown()
            thread.join()


def layer_pieces(image: Image) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the digest of each zstd layer and its decompressed bytes in pieces that overlap by 256 bytes."""
    for layer, diff_id in zip(image.layers, image.configuration["rootfs"]["diff_ids"], strict=True):
        assert layer.media_type.endswith("+zstd")
        yield layer.digest, overlapping(_decompressed(image.blob(layer), diff_id))


def _decompressed(blob: Path, diff_id: str) -> Iterator[bytes]:
    """Yield the pieces of a layer; in the end they must be all that the image's config says."""
    import zstandard

    digest = hashlib.sha256()
    with blob.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
        while piece := reader.read(1 << 22):
            digest.update(piece)
            yield piece
    assert f"sha256:{digest.hexdigest()}" == diff_id


def overlapping(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces, each with the last 256 bytes of the one before."""
    end = b""
    for piece in pieces:
        yield end + piece
        end = piece[-256:]


def open_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces that overlap by 256 bytes."""
    with path.open("rb") as file:
        yield from overlapping(iter(lambda: file.read(1 << 22), b""))
