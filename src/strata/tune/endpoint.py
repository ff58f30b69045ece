"""The endpoint of the driver, to which the processes of trials connect.

On one machine it is a Unix socket in a directory that only this user can enter. Between machines it is a TCP port with
TLS, under a certificate authority and a token that are generated for one start of the driver: there is nothing to set
up. The token is part of the first message; a connection without it, or without a first message, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from strata.transport import frames
from strata.transport.addresses import Address
from strata.tune import messages as m

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

log = logging.getLogger(__name__)
HELLO_S = 10.0
"""Time for a connection to identify itself."""
MAX_UNKNOWN = 1_000
"""Connections that have not identified themselves yet."""
MAX_WAITING_BYTES = 1 << 20
"""Bytes that a process has not read; beyond this, its connection is closed."""
VALID_DAYS = 3650
"""Longer than any study."""
PEER_GONE_S = 20.0


class Connection:
    """A connection to a process that has identified itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: m.ToTrial) -> None:
        """Send without waiting. A process that does not read loses its connection, and connects again."""
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
            self._writer.transport.abort()
        elif not self._writer.is_closing():
            self._writer.write(m.encode(message))

    async def messages(self) -> AsyncIterator[m.FromTrial]:
        """Yield messages until the connection ends."""
        try:
            while (message := await _receive(self._reader)) is not None:
                yield message
        except (OSError, ValueError) as error:
            log.info("lost the connection to a trial: %s", error)

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def serve(
    handle: Callable[[m.Hello, Connection], Awaitable[None]], place: Path, *, host: str = ""
) -> AsyncIterator[m.Endpoint]:
    """Accept connections of processes, and call `handle` for each; yield how to reach this endpoint.

    Args:
        place: Directory for a socket or for secrets, which only this user can enter.
        host: Address of this machine that others reach; empty: trials run on this machine only.
    """
    token, ca, context = "", "", None
    where = Address("", 0, str(place / "trials"))
    if host:
        from strata.transport.certificates import write_set  # noqa: PLC0415 - imports cryptography

        certificates = place / f"trials-{secrets.token_hex(4)}"  # a machine may drive a study again
        write_set(certificates, hosts=[host], now=datetime.now(UTC), days=VALID_DAYS)
        context = frames.server_context(str(certificates / "server.crt"), str(certificates / "server.key"), "")
        token, ca, where = secrets.token_hex(32), (certificates / "ca.crt").read_text(), Address(host, 0)
    unknown: set[asyncio.StreamWriter] = set()
    handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers[task] = writer
        try:
            if len(unknown) < MAX_UNKNOWN:
                unknown.add(writer)
                hello = await _hello(reader, token)
                unknown.discard(writer)
                if hello is not None:
                    frames.tune(writer.transport, gone_after_s=PEER_GONE_S)
                    await handle(hello, Connection(reader, writer))
        finally:
            unknown.discard(writer)
            del handlers[task]
            writer.close()

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=m.MAX_BYTES), connected)

    server, address = await frames.listen(protocol, where, context)
    try:
        yield m.Endpoint(address=address, ca=ca, token=token)
    finally:
        await frames.close_server(server)
        for writer in handlers.values():
            writer.transport.abort()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _hello(reader: asyncio.StreamReader, token: str) -> m.Hello | None:
    """Return the first message, if it comes in time and has the token."""
    try:
        async with asyncio.timeout(HELLO_S):
            hello = await _receive(reader)
    except (OSError, ValueError) as error:
        log.warning("closed a connection that did not identify itself: %s", str(error) or "it sent nothing")
        return None
    if not isinstance(hello, m.Hello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
        log.warning("refused a connection to the study: it has not its token")
        return None
    return hello


async def _receive(reader: asyncio.StreamReader) -> m.FromTrial | None:
    """
    Raises:
        ValueError: The message is invalid or too long.
    """
    line = await reader.readline()
    try:
        return m.from_trial.decode(line) if line.endswith(b"\n") else None
    except msgspec.DecodeError as error:
        raise ValueError(f"an invalid message: {error}") from error
