"""Sessions over bare connections (see `transport.frames`): the same frames, answered in the turn of the loop that reads
them, without a task or a lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from strata.coordinator import wire
from strata.coordinator.session import HELLO_WITHIN_S, NO_FRAME, NO_HELLO
from strata.errors import ConfigError, StrataError
from strata.transport import frames
from strata.transport.addresses import parse_address
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from strata.coordinator.config import SecurityConfig
    from strata.coordinator.session import Link, SessionHub
    from strata.transport.addresses import Address

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""How long a peer has to take our last words."""
LEAVE_S = 1.0
HELLO_BYTES = 64 * 1024
"""The first message may have: until then nobody knows who speaks."""
MAX_STRANGERS = 1_000
"""Connections that have not said hello yet; beyond this, new ones are not taken."""


class FramedSession(asyncio.Protocol):
    """One connection."""

    def __init__(self, hub: SessionHub, company: set[FramedSession], *, max_message_bytes: int) -> None:
        """`company` are all connections there are."""
        self._hub = hub
        self._company = company
        self._max_message_bytes = max_message_bytes
        self._splitter = frames.Splitter(max_bytes=min(HELLO_BYTES, max_message_bytes), preface=frames.PREFACE)
        self._transport: asyncio.Transport | None = None
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_scheduled = False
        self._is_paused = False
        self.gone = asyncio.Event()

    # -- asyncio's -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._company.add(self)
        if len(self._company) > MAX_STRANGERS and sum(one.is_strange for one in self._company) > MAX_STRANGERS:
            transport.abort()
            return
        frames.tune(transport, gone_after_s=frames.PEER_GONE_S)
        transport.set_write_buffer_limits(high=frames.BUFFER_BYTES)
        self._timer = asyncio.get_running_loop().call_later(HELLO_WITHIN_S, self._no_hello)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self._hear(message)
        except frames.Malformed as error:
            self._end(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def eof_received(self) -> bool:
        """The peer is gone: a process that is killed looks like one that has no more to say."""
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._company.discard(self)
        self.gone.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._hub.closed(self._link)

    def pause_writing(self) -> None:
        """Whoever does not take the answers is not heard either."""
        self._is_paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._flush()

    # -- for the server --------------------------------------------------------------------------------------------

    @property
    def is_strange(self) -> bool:
        return self._link is None

    def leave(self) -> None:
        self._end(grpc.StatusCode.UNAVAILABLE, "the coordinator is leaving")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- ours ------------------------------------------------------------------------------------------------------

    def _hear(self, message: bytes) -> None:
        frame = self._hub.decode(message)
        if frame is None:
            self._end(grpc.StatusCode.INVALID_ARGUMENT, NO_FRAME)
            return
        if self._link is None:
            if not self._greet(frame):
                return
            assert self._link is not None
        self._hub.take_in(self._link, frame.requests)

    def _greet(self, frame: pb.ClientFrame) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if not frame.HasField("hello"):
            self._end(grpc.StatusCode.INVALID_ARGUMENT, NO_HELLO)
            return False
        try:
            self._link = self._hub.begin(frame.hello, self._hub.role_of(frame.hello.token), self._news)
        except StrataError as error:
            words, details = wire.encode_error_briefly(error)
            self._say_goodbye(pb.Goodbye(code=details.code, message=words, error=details))
            return False
        self._splitter.max_bytes = self._max_message_bytes
        self._write(self._hub.welcome())
        return True

    def _no_hello(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED, f"no frame within {HELLO_WITHIN_S:g} s")

    def _news(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Everything that has gathered in this turn of the loop goes out in one frame."""
        self._flush_scheduled = False
        link = self._link
        if link is None or self._transport is None or self._transport.is_closing():
            return
        while not self._is_paused and (frame := link.take_frame()) is not None:
            self._write(frame)
        if link.given_up:
            self._hub.dropped(link)
            self._end(*link.given_up)

    def _end(self, code: grpc.StatusCode, why: str) -> None:
        self._say_goodbye(pb.Goodbye(code=code.value[0], message=why))

    def _say_goodbye(self, goodbye: pb.Goodbye) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._write(pb.ServerFrame(goodbye=goodbye))
        self._transport.close()
        # One that does not read is not waited for.
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def _write(self, frame: pb.ServerFrame) -> None:
        assert self._transport is not None
        self._transport.write(frames.packed(self._hub.encode(frame)))


class FramesServer:
    """Listens beside the gRPC server; `hub.frames` tells its clients where."""

    def __init__(self, hub: SessionHub, *, max_message_bytes: int) -> None:
        self._hub = hub
        self._company: set[FramedSession] = set()
        self._max_message_bytes = max_message_bytes
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, wanted: str, grpc_address: str, security: SecurityConfig) -> None:
        """`wanted` is an address, or `auto`: a free port, or a socket, beside gRPC's.

        Raises:
            ConfigError: It cannot be bound.
        """
        address = _beside(grpc_address) if wanted == "auto" else parse_address(wanted, field="frames")
        context = None
        if security.certificate and not address.path:
            context = frames.server_context(security.certificate, security.key, security.client_ca)
        try:
            self._server, self.address = await frames.listen(self._make, address, context)
        except OSError as error:
            if wanted == "auto":  # such as a socket's path that is too long with what we add to it
                log.warning("no sessions without HTTP/2, gRPC serves them all: %s", error)
                return
            raise ConfigError(
                f"frames={wanted!r} cannot be bound ({error}); choose another port, or 'off'", field="frames"
            ) from error
        self._hub.frames = self.address if address.path else f":{self.address.rpartition(':')[2]}"

    def _make(self) -> FramedSession:
        return FramedSession(self._hub, self._company, max_message_bytes=self._max_message_bytes)

    async def stop(self) -> None:
        """Nobody is waited for longer than it takes to be polite: those who take over wait for us."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)  # noqa: ASYNC240 - a name, at the very end
        for session in list(self._company):
            session.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(session.gone.wait() for session in list(self._company)))
        for session in list(self._company):
            session.abort()


def _beside(grpc_address: str) -> Address:
    address = parse_address(grpc_address, field="listen")
    return type(address)("", 0, f"{address.path}.frames") if address.path else type(address)(address.host, 0)
