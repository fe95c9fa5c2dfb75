"""Runs one command at fixed paths: the program inside the build's namespaces, started by isolate.py.

Standard library only, and no import of cufallback: it runs by path, with ``python -I -S``, before and after
mounts that may hide this very file. Its one argument is a JSON object:

``namespaces`` (bool: fresh mount, network, PID and UTS namespaces are around us) · ``cover`` (folder that gets
an empty file system) · ``binds`` ([[source, target], …] in order; targets below ``cover``) · ``read_only`` (those
targets that nothing may write to, neither there nor at their sources' own paths) · ``cwd`` · ``argv``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

MARK = "cufallback-network"

# linux/mount.h
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
# What statvfs reports of a mount, and the flag of linux/mount.h that keeps it. A user namespace may not drop any.
_KEPT = {
    os.ST_NOSUID: _MS_NOSUID,
    os.ST_NODEV: _MS_NODEV,
    os.ST_NOEXEC: _MS_NOEXEC,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 1 << 21,
}

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    data = None if options is None else options.encode()
    if _libc.mount(*words, ctypes.c_ulong(flags), data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def _forbid_writing(place: str) -> None:
    """Make the mount at ``place`` read-only; what is mounted below it stays as it is."""
    present = os.statvfs(place).f_flag
    kept = sum(flag for seen, flag in _KEPT.items() if present & seen)
    _mount("none", place, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def _bind_all(cover: str, binds: list[tuple[str, str]], read_only: list[str]) -> None:
    """Cover ``cover`` with an empty file system and bind every source below it.

    Sources may themselves lie below ``cover``. They are held open first and reached through /proc/self/fd, and
    they stay visible at their own path too, so that an interpreter there still finds its libraries.
    """
    covered = Path(cover).resolve()
    real = [(str(Path(source).resolve()), target) for source, target in binds]
    held = [(os.open(source, os.O_PATH | os.O_CLOEXEC), source, target) for source, target in real]
    _mount("tmpfs", cover, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    for handle, source, target in held:
        hidden = Path(source).is_relative_to(covered)
        closed = target in read_only
        for place in (source, target) if hidden or closed else (target,):
            if not os.path.lexists(place):
                Path(place).parent.mkdir(parents=True, exist_ok=True)
                if stat.S_ISDIR(os.fstat(handle).st_mode):
                    Path(place).mkdir()
                else:
                    Path(place).touch()
            # Recursive: a user namespace may not show what lies beneath a mount that it did not make.
            _mount(f"/proc/self/fd/{handle}", place, None, _MS_BIND | _MS_REC)
            if closed:
                _forbid_writing(place)
        os.close(handle)


def _show_network(moment: str) -> None:
    """Print each interface with the bytes it received and sent, as the build itself sees them."""
    interfaces = {}
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, counters = line.partition(":")
        numbers = counters.split()
        interfaces[name.strip()] = [int(numbers[0]), int(numbers[8])]
    # The build's last line may lack its end: the mark must start a line of its own all the same.
    print(f"\n{MARK}", moment, json.dumps(interfaces, sort_keys=True), flush=True)


def _end_everything(namespaces: bool) -> NoReturn:
    if not namespaces:
        os.killpg(0, signal.SIGKILL)
    os._exit(143)  # as PID 1 of the namespace this ends every process in it


def main() -> int:
    """Enter, run, watch; return the command's exit status."""
    spec = json.loads(sys.argv[1])
    namespaces: bool = spec["namespaces"]
    signal.signal(signal.SIGTERM, lambda *_: _end_everything(namespaces))
    if namespaces:
        _bind_all(spec["cover"], spec["binds"], spec["read_only"])
        with contextlib.suppress(OSError):  # a container may forbid either; neither touches bytes of a sane build
            socket.sethostname("cufallback")
        with contextlib.suppress(OSError):
            _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.umask(0o022)
    _show_network("before")
    child = subprocess.Popen(spec["argv"], cwd=spec["cwd"], stdin=subprocess.DEVNULL)
    # Our output is a pipe to cufallback. When its other end is gone, cufallback was killed: no orphan may go on.
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    while child.poll() is None:
        if reader.poll(100):
            _end_everything(namespaces)
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
    _show_network("after")
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
