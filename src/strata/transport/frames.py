"""Length-prefixed messages over a bare connection: a gRPC stream without HTTP/2.

A connection starts with a preface line. After it, each direction carries messages, each preceded by its length in four
bytes (big-endian). There is no multiplexing, and no flow control except TCP's. A message costs a fraction of its cost
through gRPC, which barriers and heartbeats of a thousand workers need. TLS is layered below, as with gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.transport import sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.transport.addresses import Address

PREFACE = b"strata frames 1\n"
LENGTH_BYTES = 4
BUFFER_BYTES = 1 << 20
"""Bytes that may wait for the peer; beyond this the writer pauses."""
BACKLOG = 1_024
_ACCEPT_TURNS = 4
"""Turns of the event loop from the accepted socket to `connection_made`; asyncio takes three."""
HANDSHAKE_S = 10.0
PEER_GONE_S = 120
"""Seconds after which a server closes the connection of a machine that vanished; leases expire earlier."""


class Malformed(ValueError):
    """The received bytes do not follow this protocol."""


class Splitter:
    """Splits received bytes into messages. Buffers at most one message and one received chunk."""

    def __init__(self, *, max_bytes: int, preface: bytes = b"") -> None:
        self.max_bytes = max_bytes
        """May be raised between two messages."""
        self._preface = preface
        self._buffer: bytes | bytearray = b""
        """The received chunk itself while there is only one (the usual case), so that a message is cut out without
        another copy."""
        self._start = 0
        """Offset of the next message; earlier bytes were returned already."""

    @property
    def num_held(self) -> int:
        """The number of buffered bytes: incomplete messages, and complete ones not returned yet."""
        return len(self._buffer) - self._start

    def clear(self) -> None:
        """Discard the buffered bytes."""
        self._buffer = b""
        self._start = 0

    def push(self, data: bytes) -> None:
        if not self._buffer:
            self._buffer = data
            return
        if not isinstance(self._buffer, bytearray):
            self._buffer = bytearray(self._buffer)
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next complete message, or None.

        Raises:
            Malformed: The preface is wrong, or a message is too long.
        """
        buffer, start = self._buffer, self._start
        if self._preface:
            if not self._took_preface():
                return None
            start = self._start = len(PREFACE)
        body = start + LENGTH_BYTES
        if len(buffer) >= body:
            length = int.from_bytes(buffer[start:body], "big")
            if length > self.max_bytes:
                raise Malformed(f"a message has {length} bytes; the limit is {self.max_bytes}")
            end = body + length
            if len(buffer) >= end:
                message = bytes(buffer[body:end])
                if len(buffer) == end:
                    self._buffer, self._start = b"", 0
                else:
                    self._start = end
                return message
        if start:
            self._buffer, self._start = buffer[start:], 0
        return None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Push `data` and yield every complete message."""
        self.push(data)
        while (message := self.next()) is not None:
            yield message

    def _took_preface(self) -> bool:
        """Consume the preface; return whether all of it has arrived."""
        come = bytes(self._buffer[: len(self._preface)])
        if not self._preface.startswith(come):
            raise Malformed("this port expects strata frames; gRPC uses another port")
        if len(come) < len(self._preface):
            return False
        self._preface = b""
        return True


def packed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def tune(transport: asyncio.BaseTransport, *, gone_after_s: float) -> None:
    """Detect a vanished peer within `gone_after_s`."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sockets.tune(sock, gone_after_s=gone_after_s)


def server_context(certificate: str, key: str, client_ca: str) -> ssl.SSLContext:
    """Create the TLS context of a server.

    Raises:
        ConfigError: A file cannot be read or has the wrong contents.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _files_named("security.certificate", certificate):
        context.load_cert_chain(_at_home(certificate), _at_home(key), password=_NO_PASSWORD)
    if client_ca:
        with _files_named("security.client_ca", client_ca):
            context.load_verify_locations(_at_home(client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """Create the TLS context of a client.

    Raises:
        ConfigError: A file cannot be read or has the wrong contents.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _files_named("ca", ca):
        context.load_verify_locations(_at_home(ca))
    if certificate:
        with _files_named("certificate", certificate):
            context.load_cert_chain(_at_home(certificate), _at_home(key) if key else None, password=_NO_PASSWORD)
    return context


_NO_PASSWORD = ""
"""Without a password, OpenSSL would prompt for one on the terminal and block the server."""


def _at_home(path: str) -> Path:
    return Path(path).expanduser()


@contextlib.contextmanager
def _files_named(field: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{field}={path!r} cannot be loaded ({error}); check the file", field=field) from error


async def listen(
    make: type[asyncio.Protocol] | object, address: Address, context: ssl.SSLContext | None
) -> tuple[asyncio.Server, str]:
    """Start a server and return its actual address, with the real port for port 0."""
    loop = asyncio.get_running_loop()
    if address.path:
        server = await loop.create_unix_server(make, address.path)  # type: ignore[arg-type]  # any factory works
        return server, str(address)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_UNSPEC
    found = await loop.getaddrinfo(address.host, address.port, family=family, type=socket.SOCK_STREAM)
    family, *_, where = found[0]  # one socket: with two, the clients would need two ports
    listening = socket.create_server(
        where[:2], family=family, backlog=BACKLOG, dualstack_ipv6=address.host == "::" and socket.has_dualstack_ipv6()
    )
    patience = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": HANDSHAKE_S / 2} if context else {}
    server = await loop.create_server(make, sock=listening, ssl=context, backlog=BACKLOG, **patience)  # type: ignore[call-overload]
    port = listening.getsockname()[1]
    return server, f"{str(address).rpartition(':')[0]}:{port}"


async def close_server(server: asyncio.Server) -> None:
    """Accept no more connections. Those that are being accepted are made first: asyncio forgets them when their server
    is closed, and never closes their sockets.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(_ACCEPT_TURNS):
        await asyncio.sleep(0)
    server.close()
