"""Uvicorn inside the coordinator's event loop, with limits on its connections.

uvicorn waits for a request indefinitely, so incomplete requests could occupy the server. Here, a connection without a
request in progress has a deadline. If there are too many connections, from one machine or in total, a new one displaces
the one that has waited for a request for longest. A client that does not read its answer is disconnected, so that a
stream of events costs no more than one buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from strata.coordinator.http import peers
from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from strata.coordinator.config import SecurityConfig

MAX_CONNECTIONS = 1_000
MAX_CONNECTIONS_PER_PEER = 128
REQUEST_WITHIN_S = 10.0
"""From the connection, or from the last answer, to the end of the headers of the next request."""
READ_WITHIN_S = 20.0
"""A client must take some of its answer from us within this time."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel may buffer of an answer, so that a client that does not read is noticed soon."""

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Connection(Protocol):
    peer: str

    def abort(self) -> None: ...


class Connections:
    """All connections of one server."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._num_of: dict[str, int] = {}
        """The number of connections per peer."""
        self._waiting: dict[Connection, float] = {}
        """Connections without a request in progress and their deadlines; the longest waiting first."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(self._num_of.values())

    def add(self, connection: Connection) -> bool:
        """Add a connection; return False if there is no room because all others have a request in progress."""
        peer = connection.peer
        is_one_too_many = self._num_of.get(peer, 0) >= MAX_CONNECTIONS_PER_PEER
        if (is_one_too_many or len(self) >= MAX_CONNECTIONS) and not self._displace(peer if is_one_too_many else None):
            return False
        self._num_of[peer] = self._num_of.get(peer, 0) + 1
        self.mark_idle(connection)
        return True

    def remove(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._num_of[connection.peer] -= 1
        if not self._num_of[connection.peer]:
            del self._num_of[connection.peer]

    def mark_busy(self, connection: Connection) -> None:
        """Record that a request is in progress on the connection."""
        self._waiting.pop(connection, None)

    def mark_idle(self, connection: Connection) -> None:
        """Record that the connection waits for a request from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = self._now_s() + REQUEST_WITHIN_S
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REQUEST_WITHIN_S, self._close_overdue)

    def _displace(self, peer: str | None) -> bool:
        for connection in self._waiting:
            if peer in (None, connection.peer):
                del self._waiting[connection]
                connection.abort()
                return True
        return False

    def _close_overdue(self) -> None:
        self._timer = None
        for connection, until_s in list(self._waiting.items()):
            left_s = until_s - self._now_s()
            if left_s > 0:
                self._timer = asyncio.get_running_loop().call_later(left_s, self._close_overdue)
                return
            del self._waiting[connection]
            connection.abort()


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, with its connection counted in `Connections`."""

    def __init__(self, connections: Connections, *, is_private: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._registry = connections
        self._is_private = is_private
        self._is_counted = False
        self._unread: asyncio.TimerHandle | None = None
        self.peer = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        if self._is_private and not peers.is_own_user(self.client, self.server):
            transport.abort()
            return
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._is_counted = self._registry.add(self)
        if not self._is_counted:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting_for_reader()
        if self._is_counted:
            self._registry.remove(self)
            self._is_counted = False
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_serving:
            self._registry.mark_busy(self)

    def _should_upgrade(self) -> bool:
        """Ignore upgrades: a connection that uvicorn gives to another protocol would count as open forever."""
        return False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_counted and not self._is_serving:
            self._registry.mark_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = asyncio.get_running_loop().call_later(READ_WITHIN_S, self._drop_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _drop_reader(self) -> None:
        """Reset the connection: after an ordinary close, the kernel would keep the unread bytes for minutes."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self.abort()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def abort(self) -> None:
        self.transport.abort()

    @property
    def _is_serving(self) -> bool:
        cycle = self.cycle  # None before the first request, despite its type
        return bool(cycle) and not cycle.response_complete


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # the coordinator handles signals, not uvicorn


def make_server(app: FastAPI, security: SecurityConfig, *, is_private: bool = False) -> uvicorn.Server:
    """Create the server; reject invalid certificates now, instead of connections later.

    `is_private`: refuse connections of other users of this machine.
    """
    config = uvicorn.Config(
        app,
        log_level="error",  # its warnings name neither the sender nor the port, and anyone can cause them
        access_log=False,
        ws="none",
        http=partial(GuardedProtocol, Connections(), is_private=is_private),  # type: ignore[arg-type]  # any factory works
        ssl_certfile=security.certificate or None,
        ssl_keyfile=security.key or None,
        ssl_ca_certs=security.client_ca or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if security.client_ca else ssl.CERT_NONE,
    )
    try:
        config.load()
    except OSError as error:  # also ssl.SSLError
        raise ConfigError(
            f"cannot use the certificates in security for HTTP: {error}; check certificate, key and client_ca",
            field="security.certificate",
        ) from error
    return HttpServer(config)
