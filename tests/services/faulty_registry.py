"""A faulty front of a real registry: an HTTP proxy on a loopback port that forwards everything but one fault.

    front = faulty_registry(server_errors(1))
    push(..., front.address)
    assert [request.status for request in front.requests if request.method == "PUT"] == [500, 201]

A fault is a function of the exchange: it answers itself, or leaves the exchange alone, which is then forwarded.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any

PIECE = 1 << 20  # bytes
TLS_HANDSHAKE = b"\x16"  # content type of the first record (RFC 8446, section 5.1)
# Of one connection, not of the message (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


@dataclass
class Request:
    """What a client asked and was answered; ``status`` is None when the connection was closed instead."""

    method: str
    path: str
    headers: Message
    status: int | None = None

    @property
    def line(self) -> str:
        """``METHOD /path``."""
        return f"{self.method} {self.path}"


@dataclass
class Exchange:
    """One request as a fault sees it."""

    request: Request
    handler: _Handler
    done: bool = False

    def matches(self, pattern: str) -> bool:
        """Say whether ``METHOD /path`` matches a regular expression somewhere."""
        return re.search(pattern, self.request.line) is not None

    def answer(self, status: int, code: str, **headers: str) -> None:
        """Answer with an error document of the OCI distribution specification; ``_`` in names of headers is ``-``."""
        body = json.dumps({"errors": [{"code": code, "message": "injected by the test", "detail": None}]}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.handler.drop_body()
        self.handler.send(status, {"Content-Type": "application/json", "Content-Length": str(len(body))} | named)
        if self.request.method != "HEAD":
            self.handler.wfile.write(body)
        self.done = True

    def close(self) -> None:
        """Close the connection without an answer."""
        self.done = True

    def forward(self, *, share: float = 1.0) -> None:
        """Forward to the real registry; of the answer's body give only the first ``share``, then close."""
        self.handler.forward(share)
        self.done = True


Fault = Callable[[Exchange], None]


def no_fault(exchange: Exchange) -> None:
    """Forward everything; for tests that only look at the requests."""


def server_errors(times: int, *, matching: str = "", status: int = 500) -> Fault:
    """Answer the first ``times`` requests whose ``METHOD /path`` matches with an error of the server."""
    return _first(times, matching, lambda exchange: exchange.answer(status, "UNKNOWN"))


def manifests_refused() -> Fault:
    """Refuse every manifest that is pushed, as a registry does that finds it invalid."""
    return _first(None, r"^PUT /v2/.*/manifests/", lambda exchange: exchange.answer(400, "MANIFEST_INVALID"))


def blobs_truncated(times: int | None = None) -> Fault:
    """Send half of a blob that is downloaded and close, though Content-Length names all of it."""
    return _first(times, r"^GET /v2/.*/blobs/", lambda exchange: exchange.forward(share=0.5))


def connections_closed(times: int | None = None, *, matching: str = "") -> Fault:
    """Close connections without an answer: the registry is down, for good or for the first ``times`` requests."""
    return _first(times, matching, Exchange.close)


def credentials_required(user: str, password: str) -> Fault:
    """Demand HTTP Basic authentication (RFC 7617) with this user and password."""
    right = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def fault(exchange: Exchange) -> None:
        if exchange.request.headers.get("Authorization") != right:
            exchange.answer(401, "UNAUTHORIZED", WWW_Authenticate='Basic realm="faulty front"')

    return fault


def _first(times: int | None, matching: str, what: Callable[[Exchange], None]) -> Fault:
    counter = itertools.count()  # next() of it is atomic, and requests come in threads

    def fault(exchange: Exchange) -> None:
        if exchange.matches(matching) and (times is None or next(counter) < times):
            what(exchange)

    return fault


@dataclass
class FaultyRegistry:
    """A running front: ``address`` is ``127.0.0.1:PORT``, ``requests`` what came, in order of arrival."""

    address: str
    requests: list[Request] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # leaving waits for the exchanges that still run
    upstream: str
    fault: Fault
    front: FaultyRegistry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server
    rfile: io.BufferedReader
    request_seen: Request

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone, or the registry
            if self.rfile.peek(1)[:1] == TLS_HANDSHAKE:
                # What makes a client that tries HTTPS first fall back to HTTP on loopback, as dockerd does.
                self.rfile.read1()
                self.wfile.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            else:
                super().handle()

    def do(self) -> None:
        self.close_connection = True  # one exchange per connection: nothing of a faulty one is left to the next
        self.request_seen = Request(self.command, self.path, self.headers)
        self.server.front.requests.append(self.request_seen)
        exchange = Exchange(self.request_seen, self)
        self.server.fault(exchange)
        if not exchange.done:
            exchange.forward()

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do

    def send(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.request_seen.status = status
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()

    def drop_body(self) -> None:
        """Read what the client sends, so that it gets to reading the answer."""
        for _piece in self.body() or ():
            pass

    def body(self) -> Iterator[bytes] | None:
        """Return the pieces of the request's body, None when it has none."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return _chunks(self.rfile)
        size = int(self.headers.get("Content-Length", 0))
        return _pieces(self.rfile, size) if size else None

    def forward(self, share: float) -> None:
        """See :meth:`Exchange.forward`."""
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            if chunked:
                headers["Transfer-Encoding"] = "chunked"
            upstream.request(self.command, self.path, self.body(), headers, encode_chunked=chunked)
            answer = upstream.getresponse()
            self.send(answer.status, {name: self._here(name, value) for name, value in _end_to_end(answer)})
            if self.command == "HEAD":
                return
            size = int(answer.headers.get("Content-Length", -1))
            left = answer.read() if size < 0 else None
            for piece in [left] if left is not None else _pieces(answer, int(size * share)):
                self.wfile.write(piece)
        finally:
            upstream.close()

    def _here(self, name: str, value: str) -> str:
        """Let the place where an upload goes on lie behind this front too."""
        if name.lower() != "location":
            return value
        return re.sub(r"^http://[^/]*", f"http://{self.server.front.address}", value)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


def _end_to_end(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    for name, value in answer.getheaders():
        if name.lower() not in HOP_BY_HOP:
            yield name, value


def _pieces(stream: IO[bytes] | http.client.HTTPResponse, size: int) -> Iterator[bytes]:
    """Yield ``size`` bytes of a stream; fewer when it ends before."""
    while size > 0 and (piece := stream.read(min(PIECE, size))):
        size -= len(piece)
        yield piece


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a body in chunked transfer coding (RFC 9112, section 7.1)."""
    while size := int(stream.readline().split(b";")[0], 16):
        yield from _pieces(stream, size)
        stream.readline()
    while stream.readline().strip():  # trailers
        pass


@contextlib.contextmanager
def running_front(registry: str, fault: Fault) -> Iterator[FaultyRegistry]:
    """Run a front of the registry at ``registry`` (host:port, plain HTTP) with a fault, stopped on leaving."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.upstream, server.fault = registry, fault
    server.front = FaultyRegistry(f"127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.front
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
