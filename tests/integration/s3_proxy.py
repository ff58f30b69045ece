"""An HTTP proxy between a client and an S3 server, with planned faults: it throttles, fails, hangs or cuts connections.

It forwards requests unchanged, so their signatures stay valid, and serves one request per connection.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

PIECE = 65_536
REASONS = {
    403: "ExpiredToken",
    500: "InternalError",
    503: "SlowDown",
    429: "TooManyRequests",
    507: "InsufficientStorage",
}


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    head: bytes
    num_bytes: int

    @property
    def kind(self) -> str:
        """The S3 operation of the request."""
        query = self.target.partition("?")[2]
        names = {
            ("POST", "uploads" in query): "create upload",
            ("PUT", "partNumber=" in query): "put part",
            ("POST", "uploadId=" in query): "complete upload",
            ("DELETE", "uploadId=" in query): "abort upload",
            ("POST", "delete" in query): "delete",
            ("GET", "list-type=" in query): "list",
        }
        return names.get((self.method, True), self.method.lower())


@dataclass(frozen=True, slots=True)
class Fault:
    """What the proxy does instead of serving a request."""

    status: int | None = None
    """Answer with this status."""
    arrives: bool = False
    """Forward the request to the server nevertheless."""
    sent_bytes: int | None = None
    """Cut the connection after this many bytes from the client."""
    received_bytes: int | None = None
    """Cut the connection after this many bytes to the client."""
    hangs: bool = False


THROTTLED = Fault(status=503)
HANG = Fault(hangs=True)
LOST_ANSWER = Fault(arrives=True, received_bytes=0)


class FaultyProxy:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._planned: list[tuple[Callable[[Request], bool], Iterator[Fault]]] = []
        self._over = threading.Event()
        self.seen: list[str] = []
        """The kinds of all requests, in order of arrival."""
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has closed the connection
                    proxy._serve(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = "http://{}:{}".format(*self._server.server_address)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def plan(self, fault: Fault, *kinds: str, num: int | None = 1) -> None:
        """Plan a fault for the next `num` requests (None: all) of these kinds, or of any kind if none is named."""
        faults = itertools.repeat(fault) if num is None else itertools.repeat(fault, num)
        with self._lock:
            self._planned.append((lambda request: not kinds or request.kind in kinds, faults))

    def heal(self) -> None:
        with self._lock:
            self._planned.clear()

    def _take(self, request: Request) -> Fault | None:
        with self._lock:
            self.seen.append(request.kind)
            for fits, faults in self._planned:
                if fits(request) and (fault := next(faults, None)) is not None:
                    return fault
        return None

    def _serve(self, client: socket.socket) -> None:
        request, body = _receive_head(client)
        fault = self._take(request) or Fault(arrives=True)
        if fault.sent_bytes is not None:
            _receive(client, body, min(fault.sent_bytes, request.num_bytes))
            _cut(client)
            return
        body = _receive(client, body, request.num_bytes)
        if fault.hangs:
            self._over.wait()
            return
        answer = self._forward(request, body) if fault.arrives or fault.received_bytes is not None else b""
        if fault.status is not None:
            client.sendall(_refusal(fault.status))
        elif fault.received_bytes is not None:
            head, _, rest = answer.partition(b"\r\n\r\n")
            if fault.received_bytes:
                client.sendall(head + b"\r\n\r\n" + rest[: fault.received_bytes])
            _cut(client)
        else:
            client.sendall(answer)

    def _forward(self, request: Request, body: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._target_port), timeout=60) as server:
            server.sendall(request.head + b"\r\nConnection: close\r\n\r\n" + body)
            pieces = []
            while piece := server.recv(PIECE):
                pieces.append(piece)
        return b"".join(pieces)


def _receive_head(client: socket.socket) -> tuple[Request, bytes]:
    found = b""
    while b"\r\n\r\n" not in found:
        piece = client.recv(PIECE)
        if not piece:
            raise ConnectionResetError
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, target, _ = line.split(" ")
    return Request(method, target, head, int(headers.get("content-length", 0))), body


def _receive(client: socket.socket, begun: bytes, num_bytes: int) -> bytes:
    pieces, missing = [begun], num_bytes - len(begun)
    while missing > 0:
        piece = client.recv(min(missing, 1 << 20))
        if not piece:
            raise ConnectionResetError
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _refusal(status: int) -> bytes:
    code = REASONS[status]
    body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
    reason = http.client.responses.get(status, "")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _cut(client: socket.socket) -> None:
    """Reset the connection, as a network does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
