"""A private registry for tests: Debian's docker-registry on a loopback port, with storage of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIGURATION = """\
version: 0.1
log: {level: info}
storage: {filesystem: {rootdirectory: "%s"}, delete: {enabled: true}}
http: {addr: "127.0.0.1:0"}
"""


@contextlib.contextmanager
def running_registry(program: str) -> Iterator[str]:
    """Start docker-registry and yield ``127.0.0.1:PORT``; it speaks plain HTTP. Stopped and deleted on leaving."""
    with tempfile.TemporaryDirectory(prefix="cufallback-registry-") as name:
        folder = Path(name)
        (folder / "registry.yml").write_text(CONFIGURATION % (folder / "storage"))
        log = folder / "log"
        # Variables named REGISTRY_... would override the file.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("REGISTRY_", "OTEL_"))}
        with log.open("w") as output:
            process = subprocess.Popen(
                [program, "serve", folder / "registry.yml"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the system chose, from the log."""
    for _ in range(300):
        if found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail(f"docker-registry does not listen:\n{log.read_text()[-3000:]}", pytrace=False)
