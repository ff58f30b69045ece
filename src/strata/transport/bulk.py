"""Bulk messages between processes: a small header and large buffers, over stream sockets.

A message is `u32 bytes of the header · u16 number of buffers · u16 kind`, then for each buffer a `u64 length`, then the
header and the buffers themselves; all little-endian. A buffer inside shared memory (`Slab`) is not sent: its length has
the highest bit set and is followed by its `u64 offset`, and the receiver gets a view of the same memory.

A connection starts with a preface and the client's token, which the server answers with a line: empty, or the reason
why it refuses. There is no pickle, every size is bounded, and a peer that stops in the middle of a message, or whose
machine no longer answers, is dropped. One thread may receive while others send.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from strata.errors import ConfigError, PermissionRefused, StrataError, Unauthenticated
from strata.transport.addresses import parse_address
from strata.transport.slab import Slab
from strata.transport.sockets import SocketLock, tune
from strata.transport.tokens import Role, bearer, require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from strata.transport.addresses import Address
    from strata.transport.tokens import Guard

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFACE = b"strata bulk 1\n"
MAX_HEADER_BYTES = 1 << 16
MAX_BUFFERS = 256
MAX_TOKEN_BYTES = 4_096
MAX_REASON_BYTES = 1_024
HELLO_WITHIN_S = 10.0
"""Seconds in which a new connection must send its preface and token."""
STALL_S = 30.0
"""Seconds after which a connection is dropped: without a byte in the middle of a message, or without a sign of the
other machine."""
BACKLOG = 128
MAX_GREETING = 64
"""Connections whose token has not been checked yet; a further one displaces the oldest."""
_PREFIX = struct.Struct("<IHH")
_PLAIN, _SLAB = 0, 1
_REFERENCE = 1 << 63
_WORD = struct.Struct("<Q")
_WANTED: dict[type[OSError], int] = {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
"""What TLS needs, whichever direction was asked for."""


class ConnectionLost(StrataError):
    """The peer closed the connection, stopped in the middle of a message, or sent something else."""


@dataclass(frozen=True, slots=True)
class Message:
    header: bytes
    buffers: list[Bytes] = field(default_factory=list)


class BulkConnection:
    """One connection. Blocking; one thread may receive while others send."""

    def __init__(self, sock: socket.socket, *, max_bytes: int) -> None:
        """`max_bytes`: the largest message that is received, without what lies in shared memory."""
        self._sock = sock
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        self._ours: Slab | None = None
        self._theirs: Slab | None = None
        # OpenSSL does not allow a read and a write at the same time, and neither may block the other.
        self._engine = threading.Lock() if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext()
        sock.setblocking(False)
        tune(sock, gone_after_s=STALL_S)

    @property
    def can_share(self) -> bool:
        """Whether the peer is on this machine and can map our memory."""
        return self._sock.family == socket.AF_UNIX

    def share(self, slab: Slab) -> None:
        """Let the peer map this slab; buffers inside it are not copied from now on."""
        with self._sending:
            self._send([_PREFIX.pack(0, 0, _SLAB)])
            self._attempt(lambda: socket.send_fds(self._sock, [b"\0"], [slab.fd]), select.POLLOUT)
            self._ours = slab

    def send(self, header: bytes, buffers: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message. The contents of buffers in a slab must not change until the peer has answered.

        Raises:
            ConnectionLost: The peer is gone, or does not read.
        """
        assert len(header) <= MAX_HEADER_BYTES
        assert len(buffers) <= MAX_BUFFERS
        words, inline = [], []
        for each in buffers:
            plain = np.ascontiguousarray(each).view(np.uint8).reshape(-1)
            offset = self._ours.offset_of(plain) if self._ours is not None and plain.nbytes else None
            if offset is None:
                words.append(plain.nbytes)
                if plain.nbytes:
                    inline.append(plain)
            else:
                words += [plain.nbytes | _REFERENCE, offset]
        prefix = _PREFIX.pack(len(header), len(buffers), _PLAIN) + struct.pack(f"<{len(words)}Q", *words)
        with self._sending:
            self._send([prefix + header, *inline])

    def receive(self) -> Message | None:
        """Return the next message; None if the peer has closed the connection after its last one.

        Raises:
            ConnectionLost: It closed it or stopped in the middle of one, or sent something else.
        """
        while True:
            first = self._read(_PREFIX.size, is_start=True)
            if first is None:
                return None
            header_bytes, num_buffers, kind = _PREFIX.unpack(first)
            if header_bytes > MAX_HEADER_BYTES or num_buffers > MAX_BUFFERS or kind not in (_PLAIN, _SLAB):
                raise ConnectionLost("the peer does not send bulk messages")
            if kind == _SLAB:
                self._receive_slab()
                continue
            places = [self._read_place() for _ in range(num_buffers)]
            if sum(length for length, offset in places if offset is None) > self._max_bytes:
                raise ConnectionLost(f"the peer sends a message of more than {self._max_bytes} bytes")
            header = bytes(self._read(header_bytes) or b"")
            return Message(header, [self._buffer(length, offset) for length, offset in places])

    def close(self) -> None:
        _shut(self._sock)
        self._sock.close()
        if self._theirs is not None:
            self._theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ---------------------------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[], T], events: int, *, may_wait: bool = False) -> T:
        """Return the result of a call on the socket, as soon as the socket is ready for it.

        `may_wait`: for any time, as between two messages; otherwise the peer must not pause.
        """
        try:
            while True:
                try:
                    with self._engine:
                        return act()
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    poll = select.poll()
                    poll.register(self._sock, _WANTED.get(type(error), events))
                    if not poll.poll(None if may_wait else STALL_S * 1_000):
                        raise ConnectionLost(f"the peer has stopped for {STALL_S:g} s within a message") from None
        except ConnectionLost:
            raise
        except (OSError, ValueError) as error:  # ValueError: closed by us
            raise ConnectionLost(f"the connection is lost: {error}") from error

    def _read(self, num_bytes: int, *, is_start: bool = False) -> bytearray | None:
        data = bytearray(num_bytes)
        if not self._fill(memoryview(data), is_start=is_start):
            return None
        return data

    def _fill(self, view: memoryview, *, is_start: bool = False) -> bool:
        """Fill `view`; return False if the peer closed the connection before the first byte of a message."""
        at = 0
        while at < len(view):
            is_first = is_start and not at
            num = self._attempt(partial(self._sock.recv_into, view[at:]), select.POLLIN, may_wait=is_first)
            if not num:
                if is_first:
                    return False
                raise ConnectionLost("the peer closed the connection in the middle of a message")
            at += num
        return True

    def _read_place(self) -> tuple[int, int | None]:
        """Return the length of a buffer, and its offset if it is in the peer's slab."""
        length = _WORD.unpack(self._read(_WORD.size) or b"")[0]
        if not length & _REFERENCE:
            return length, None
        length &= ~_REFERENCE
        offset = _WORD.unpack(self._read(_WORD.size) or b"")[0]
        if self._theirs is None or offset + length > self._theirs.num_bytes:
            raise ConnectionLost("the peer refers to memory that it does not share")
        return length, offset

    def _buffer(self, length: int, offset: int | None) -> Bytes:
        if offset is not None:
            assert self._theirs is not None
            return self._theirs.view(offset, length)
        buffer = np.empty(length, np.uint8)
        self._fill(memoryview(buffer.data))
        return buffer

    def _receive_slab(self) -> None:
        if not self.can_share:
            raise ConnectionLost("only a process of this machine can share memory")
        _, descriptors, _, _ = self._attempt(lambda: socket.recv_fds(self._sock, 1, 1), select.POLLIN)
        if len(descriptors) != 1:
            raise ConnectionLost("the peer shares nothing")
        if self._theirs is not None:
            os.close(descriptors[0])
            raise ConnectionLost("the peer shares memory twice")
        try:
            self._theirs = Slab.received(descriptors[0])
        except ValueError as error:
            raise ConnectionLost(f"the peer cannot share its memory: {error}") from error

    def _send(self, parts: Sequence[Any]) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            num = self._attempt(lambda: self._send_some(views), select.POLLOUT)
            while views and num >= len(views[0]):
                num -= len(views.pop(0))
            if num:
                views[0] = views[0][num:]

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(views[0])
        return self._sock.sendmsg(views[:MAX_BUFFERS])


# -- client ------------------------------------------------------------------------------------------------------------


def connect(
    address: str, *, token: str = "", context: ssl.SSLContext | None = None, max_bytes: int, timeout_s: float = 10.0
) -> BulkConnection:
    """Connect to a server.

    Raises:
        ConnectionLost: No server answers at this address.
        Unauthenticated: The server refuses the token, or its role.
    """
    place = parse_address(address, field="address")
    try:
        sock = _connected(place, timeout_s)
    except OSError as error:
        raise ConnectionLost(f"no server answers at {address} ({error}); is it running?") from error
    try:
        if context is not None and not place.path:
            sock = context.wrap_socket(sock, server_hostname=place.host)
        encoded = token.encode()
        sock.sendall(PREFACE + len(encoded).to_bytes(2, "little") + encoded)
        reason = _read_line(sock)
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionLost(f"the server at {address} does not speak this protocol: {error}") from error
    if reason:
        sock.close()
        raise Unauthenticated(reason)
    return BulkConnection(sock, max_bytes=max_bytes)


def _connected(place: Address, timeout_s: float) -> socket.socket:
    if not place.path:
        return socket.create_connection((place.host, place.port), timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        sock.connect(place.path)
    except BaseException:
        sock.close()
        raise
    return sock


def _read_line(sock: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        more = sock.recv(1)
        if not more or len(line) > MAX_REASON_BYTES:
            raise ValueError("it closed the connection")
        line += more
    return line.decode(errors="replace").strip()


# -- server ------------------------------------------------------------------------------------------------------------


class BulkServer:
    """Accepts connections and serves each in a thread of its own."""

    def __init__(
        self,
        address: str,
        serve: Callable[[BulkConnection, Role], None],
        *,
        guard: Guard,
        needed: Role = Role.WORKER,
        context: ssl.SSLContext | None = None,
        max_bytes: int,
        max_connections: int = 1_024,
    ) -> None:
        """Listen. `needed`: the lowest role that may connect.

        Raises:
            ConfigError: The address cannot be bound, or other machines could reach it without a token and TLS.
        """
        place = parse_address(address, field="address")
        if not place.is_local and (guard.is_open or context is None):
            raise ConfigError(
                f"address={address!r} is reachable from other machines without a token and TLS; configure both",
                field="address",
            )
        self._serve = serve
        self._guard = guard
        self._needed = needed
        self._context = None if place.path else context
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._open: set[BulkConnection] = set()
        self._greeting: dict[socket.socket, None] = {}
        """Connections whose token has not been checked yet, the oldest first."""
        self._lock = threading.Lock()
        self._socket_lock = SocketLock(place.path, field="address") if place.path else None
        self._path = place.path
        try:
            if place.path:
                Path(place.path).unlink(missing_ok=True)
                self._listening = socket.socket(socket.AF_UNIX)
                self._listening.bind(place.path)
                Path(place.path).chmod(0o600)
            else:
                family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
                self._listening = socket.create_server((place.host, place.port), family=family)
            self._listening.listen(BACKLOG)
        except OSError as error:
            self._unlock()
            raise ConfigError(f"address={address!r} cannot be bound ({error})", field="address") from error
        self.address = address
        if not place.path:
            self.address = str(type(place)(place.host, self._listening.getsockname()[1]))
        self._thread = threading.Thread(target=self._accept, name="strata-bulk-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        _shut(self._listening)
        self._listening.close()
        self._thread.join(HELLO_WITHIN_S)
        with self._lock:
            connections, greeting = list(self._open), list(self._greeting)
        for sock in greeting:
            _shut(sock)
        for connection in connections:
            connection.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._socket_lock is not None:
            self._socket_lock.release()
            self._socket_lock = None

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                self._greeting[sock] = None
                oldest = next(iter(self._greeting)) if len(self._greeting) > MAX_GREETING else None
            if oldest is not None:
                _shut(oldest)
            threading.Thread(target=self._run, args=(sock,), name="strata-bulk", daemon=True).start()

    def _run(self, sock: socket.socket) -> None:
        try:
            connection, role = self._greet(sock)
        except (OSError, ValueError, StrataError) as error:
            log.info("a connection was refused: %s", error)
            return
        finally:
            with self._lock:
                self._greeting.pop(sock, None)
        with self._lock:
            is_accepted = len(self._open) < self._max_connections
            if is_accepted:
                self._open.add(connection)
        try:
            with connection:
                if is_accepted:
                    self._serve(connection, role)
        except StrataError as error:
            log.info("a connection ended: %s", error)
        except Exception:
            # Process boundary: a failing connection must not affect the others.
            log.exception("unexpected error in a connection")
        finally:
            with self._lock:
                self._open.discard(connection)

    def _greet(self, sock: socket.socket) -> tuple[BulkConnection, Role]:
        """Check the token of a new connection; close it if it is refused."""
        with contextlib.ExitStack() as unless_accepted:
            unless_accepted.callback(sock.close)
            deadline_s = time.monotonic() + HELLO_WITHIN_S
            if self._context is not None:
                sock.settimeout(HELLO_WITHIN_S)
                sock = self._context.wrap_socket(sock, server_side=True)
                unless_accepted.callback(sock.close)
            preface = _exactly(sock, len(PREFACE) + 2, deadline_s)
            if preface[: len(PREFACE)] != PREFACE:
                raise ValueError("the preface is missing")
            num_bytes = int.from_bytes(preface[len(PREFACE) :], "little")
            if num_bytes > MAX_TOKEN_BYTES:
                raise ValueError("the token is too long")
            token = _exactly(sock, num_bytes, deadline_s).decode(errors="replace")
            try:
                role = self._guard.role_of(bearer(token) if token else "")
                require(role, self._needed, "this server")
            except (Unauthenticated, PermissionRefused) as error:
                sock.sendall(f"{error.message}\n".encode()[:MAX_REASON_BYTES])
                raise
            sock.sendall(b"\n")
            unless_accepted.pop_all()
        return BulkConnection(sock, max_bytes=self._max_bytes), role


def _exactly(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise ValueError("the client closed the connection")
        data += more
    return data


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
