"""Loopback package indexes that misbehave on demand, and the tiny wheels that they serve."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name


def make_wheel(
    name: str, version: str, *, requires: Sequence[str] = (), says: tuple[str, str] | None = None, padding: int = 0
) -> bytes:
    """Return an installable pure wheel; ``says`` are the name and version in its metadata, when they shall differ."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    said_name, said_version = says or (name, version)
    members = {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {said_name}\nVersion: {said_version}\n"
        + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name.replace('-', '_')}.py": "#" * padding,
    }
    members[f"{folder}/RECORD"] = "".join(f"{path},,\n" for path in [*members, f"{folder}/RECORD"])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in members.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    return made.getvalue()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class FakeIndex:
    """A simple index. The lists of statuses are used up one a request; ``cut_after`` ends each answer early, once."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    ranges: bool = True
    hashes: bool = True
    upload_time: str | None = None
    page_statuses: list[int] = field(default_factory=list)
    file_statuses: list[int] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    swapped: dict[str, bytes] = field(default_factory=dict)
    raw_page: tuple[str, bytes] | None = None
    repository_version: str = "1.1"
    slow: str = ""
    barrier: threading.Barrier | None = None

    def add(self, filename: str, data: bytes) -> str:
        self.files[filename] = data
        return digest(data)

    @property
    def pages(self) -> list[str]:
        return [path for path, _range in self.requests if path.startswith("/simple/")]

    @property
    def downloads(self) -> list[tuple[str, str]]:
        return [(path.removeprefix("/files/"), wanted) for path, wanted in self.requests if path.startswith("/files/")]

    def page(self, name: str) -> tuple[str, bytes] | None:
        if self.raw_page is not None:
            return self.raw_page
        mine = {key: data for key, data in self.files.items() if canonicalize_name(re.split(r"-\d", key)[0]) == name}
        if not mine:
            return None
        rows: list[dict[str, Any]] = []
        for filename, data in mine.items():
            rows.append(
                {
                    "filename": filename,
                    "url": f"/files/{quote(filename)}",
                    "hashes": {"sha256": digest(data)} if self.hashes else {},
                    "size": len(data),
                    **({"upload-time": self.upload_time} if self.upload_time else {}),
                }
            )
        meta = {"api-version": self.repository_version}
        body = json.dumps({"meta": meta, "name": name, "versions": [], "files": rows}).encode()
        return "application/vnd.pypi.simple.v1+json", body


class FakeIndexHandler(BaseHTTPRequestHandler):
    index: FakeIndex

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index, path = self.index, unquote(self.path)
        index.requests.append((path, self.headers.get("Range", "")))
        if path.startswith("/simple/"):
            status = index.page_statuses.pop(0) if index.page_statuses else 200
            found = index.page(path.split("/")[2])
            if status != 200 or found is None:
                self.send_error(404 if status == 200 else status)
                return
            self._answer(200, found[1], content_type=found[0])
            return
        filename = path.removeprefix("/files/")
        status = index.file_statuses.pop(0) if index.file_statuses else 200
        if status != 200 or filename not in index.files:
            self.send_error(404 if status == 200 else status)
            return
        if index.barrier is not None:
            index.barrier.wait(timeout=10)
        data = index.swapped.get(filename, index.files[filename])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and index.ranges:
            start = int(wanted[1])
            end = int(wanted[2]) if wanted[2] else len(data) - 1
            if start >= len(data):
                self.send_error(416)
                return
            part = data[start : end + 1]
            self._answer(206, part, ("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}"))
            return
        self._answer(200, data)

    def _answer(
        self, status: int, body: bytes, *headers: tuple[str, str], content_type: str = "application/octet-stream"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for header in headers:
            self.send_header(*header)
        self.end_headers()
        if self.command == "HEAD":
            return
        if content_type == "application/octet-stream" and self.index.cut_after:
            body = body[: self.index.cut_after.pop(0)]
            self.close_connection = True
        slow = bool(self.index.slow) and self.path.endswith(self.index.slow)
        step = 10_000 if slow else len(body) or 1
        with suppress(ConnectionError):
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                if slow:
                    time.sleep(0.02)


@contextmanager
def serving(index: FakeIndex) -> Iterator[FakeIndex]:
    """Serve ``index`` on a port of its own; ``index.url`` is its address while it runs."""
    handler = type("FakeIndexHandlerOfOne", (FakeIndexHandler,), {"index": index})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        index.url = f"http://127.0.0.1:{server.server_port}/simple/"
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
