"""A private Docker engine for tests: dockerd with BuildKit and the containerd image store.

Only that store gives the engine's own builder the OCI exporter. The engine has its own socket, containers, images
and cgroup; processes that test at the same time share it, and the last one to leave stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.services.debian import PATH, install, program
from tests.services.network import Network

OLDEST = 24  # dockerd's major version; older ones lack or only try out the containerd image store
STORE = "io.containerd.snapshotter"
CGROUP = "cufallback-tests"
# What would lead the client past DOCKER_HOST.
MISLEADING = ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "BUILDX_BUILDER")


def engine_answers(host: str | None = None) -> bool:
    """Say whether the engine of the environment, or at ``host``, answers with BuildKit and that image store."""
    docker = program("docker")
    if docker is None:
        return False
    environment = os.environ | ({"DOCKER_HOST": host} if host else {})
    for words, expected in ((["info", "--format", "{{json .DriverStatus}}"], STORE), (["buildx", "version"], "buildx")):
        try:
            done = subprocess.run(
                [docker, *words], capture_output=True, text=True, errors="replace", env=environment, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode != 0 or expected not in done.stdout:
            return False
    return True


def another_engine_runs() -> bool:
    """Say whether some dockerd runs on this machine."""
    return any(_command(int(path.name)).startswith("dockerd") for path in Path("/proc").glob("[0-9]*"))


def _command(pid: int) -> str:
    """Return the name and arguments of a process; nothing when it has ended, also when nobody has reaped it yet."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return " ".join((os.path.basename(words[0]), *words[1:])).strip()  # noqa: PTH119 - no path, perhaps empty


@dataclass(frozen=True)
class PrivateEngine:
    """Where a private engine lives.

    ``run`` holds the socket, so its path must be short (107 bytes are the limit of the socket's address); ``data``
    holds images and build cache and must lie on a disk: the engine cannot stack its layers on overlayfs. Without
    ``network`` it leaves bridges, iptables and forwarding alone, as beside another engine; then containers and build
    steps have the network ``none`` or ``host``.
    """

    run: Path
    data: Path
    network: bool = True

    @property
    def host(self) -> str:
        """What DOCKER_HOST says."""
        return f"unix://{self.run}/docker.sock"

    @contextlib.contextmanager
    def shared(self) -> Iterator[str]:
        """Start the engine, or join the processes that use it; yield its host. The last one to leave stops it."""
        self.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.run / "start.lock").open("w") as gate, (self.run / "users.lock").open("w") as users:
            # The gate is held while somebody starts or stops; each user holds a share of the other lock, which the
            # system takes back even from a process that was killed.
            fcntl.flock(gate, fcntl.LOCK_EX)
            try:
                fcntl.flock(users, fcntl.LOCK_SH)
                if not engine_answers(self.host):
                    self._start()
                fcntl.flock(gate, fcntl.LOCK_UN)
                yield self.host
            finally:
                fcntl.flock(gate, fcntl.LOCK_EX)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._stop()

    def _start(self) -> None:
        self._end_leftovers()
        for folder in (self.data, self.run / "config"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = self.run / "network.json"
        if self.network and not before.exists():  # a run that was killed has left the true one
            before.write_text(Network.now().to_json())
        settings: dict[str, Any] = {
            "features": {"containerd-snapshotter": True},
            "data-root": str(self.data),
            "exec-root": str(self.run / "exec"),
            "pidfile": str(self.run / "docker.pid"),
            "hosts": [self.host],
            "cgroup-parent": CGROUP,
        }
        if self.network:
            settings |= {"ip6tables": False}
        else:
            settings |= {"bridge": "none", "iptables": False, "ip6tables": False, "ip-forward": False}
        (self.run / "daemon.json").write_text(json.dumps(settings))
        dockerd = program("dockerd")
        assert dockerd is not None, "dockerd has just been installed"
        log = self.run / "dockerd.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        pid = os.posix_spawn(
            dockerd,
            ["dockerd", "--config-file", str(self.run / "daemon.json")],
            os.environ | {"PATH": PATH},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # Ctrl-C ends the tests, and they end the engine
        )
        for _ in range(300):
            if (self.run / "docker.sock").exists() and engine_answers(self.host):
                return
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                break
            time.sleep(0.2)
        pytest.fail(f"dockerd does not answer:\n{log.read_text(errors='replace')[-3000:]}", pytrace=False)

    def _stop(self) -> None:
        """End what runs here by the identifiers that it wrote, put the network back, delete the data."""
        docker = program("docker")
        if docker is not None and engine_answers(self.host):
            containers = self._docker(docker, "ps", "--all", "--quiet").split()
            if containers:
                self._docker(docker, "rm", "--force", *containers)
        self._end_leftovers()
        before = self.run / "network.json"
        if before.exists():
            Network.from_json(before.read_text()).restore()
            before.unlink()
        for group in sorted(Path("/sys/fs/cgroup").glob(f"**/{CGROUP}/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        for mount in sorted(self._mounts(), reverse=True):
            subprocess.run(["umount", mount], env=os.environ | {"PATH": PATH}, check=False, capture_output=True)
        if not self._mounts():  # never delete what a container had mounted
            shutil.rmtree(self.data, ignore_errors=True)
            for path in self.run.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.suffix != ".lock":
                    path.unlink()

    def _docker(self, docker: str, *words: str) -> str:
        environment = os.environ | {"DOCKER_HOST": self.host}
        done = subprocess.run([docker, *words], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    def _end_leftovers(self) -> None:
        """End this folder's dockerd, and the containerd that one leaves behind when it is killed."""
        for name, path in (("dockerd", "docker.pid"), ("containerd", "exec/containerd/containerd.pid")):
            try:
                pid = int((self.run / path).read_text())
            except (OSError, ValueError):
                continue
            if self._is_ours(pid, name):
                _end(pid, partial(self._is_ours, pid, name))
            (self.run / path).unlink(missing_ok=True)
        (self.run / "docker.sock").unlink(missing_ok=True)

    def _is_ours(self, pid: int, name: str) -> bool:
        command = _command(pid)
        return command.startswith(name) and str(self.run) in command

    def _mounts(self) -> list[str]:
        """Return the mounts below this engine's folders."""
        rows = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [row for row in rows if Path(row).is_relative_to(self.run) or Path(row).is_relative_to(self.data)]


def _end(pid: int, runs: Callable[[], bool]) -> None:
    """End a process with SIGTERM, after 20 seconds with SIGKILL."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        for _ in range(200):
            if not runs():
                break
            time.sleep(0.1)
        else:
            continue
        break
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def private_engine(engine: PrivateEngine) -> Iterator[None]:
    """Install what is missing, run the engine, and set the environment so that every client finds it."""
    if not _is_installed():
        install()
    changes: dict[str, str | None] = dict.fromkeys(MISLEADING)
    changes |= {"DOCKER_HOST": engine.host, "DOCKER_CONFIG": str(engine.run / "config")}
    with engine.shared(), changed_environment(changes):
        yield


@contextlib.contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or unset those with None; put them back on leaving."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _is_installed() -> bool:
    dockerd, docker = program("dockerd"), program("docker")
    if dockerd is None or docker is None:
        return False
    version = subprocess.run([dockerd, "--version"], capture_output=True, text=True).stdout
    buildx = subprocess.run([docker, "buildx", "version"], capture_output=True, text=True)
    words = version.split()  # Docker version 26.1.5+dfsg1, build 411e817
    return buildx.returncode == 0 and len(words) > 2 and int(words[2].split(".")[0]) >= OLDEST
