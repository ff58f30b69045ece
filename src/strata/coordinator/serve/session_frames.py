"""Sessions over bare connections (see `transport.frames`): the frames are those of gRPC sessions, but they are
answered in the same turn of the event loop that reads them, without a task or a lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from strata.coordinator import wire
from strata.coordinator.serve.admission import SMALL_BYTES, Buffers
from strata.coordinator.serve.session import HELLO_WITHIN_S, LOOK_EVERY, NO_FRAME, NO_HELLO
from strata.errors import ConfigError, StrataError
from strata.transport import frames
from strata.transport.addresses import parse_address
from strata.transport.sockets import SocketLock
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from strata.coordinator.config import Limits, SecurityConfig
    from strata.coordinator.serve.session import Link, SessionHub
    from strata.transport.addresses import Address

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""Seconds that a peer has to read the last frame."""
LEAVE_S = 1.0
MAX_WITHOUT_HELLO = 1_000
"""FramedConnections that have not sent `hello` yet; beyond this, a new one displaces the oldest."""


class FramedConnections:
    """All connections of a server, and their shared buffers."""

    def __init__(self, limits: Limits) -> None:
        self.all: set[FramedSession] = set()
        self.without_hello: dict[FramedSession, None] = {}
        """FramedConnections that have not sent `hello` yet, the oldest first."""
        self.buffers = Buffers(limits.max_receive_bytes)
        self.max_message_bytes = limits.max_message_bytes

    def join(self, session: FramedSession) -> None:
        self.all.add(session)
        self.without_hello[session] = None
        if len(self.without_hello) > MAX_WITHOUT_HELLO:
            oldest = next(iter(self.without_hello))
            del self.without_hello[oldest]
            oldest.abort()

    def leave(self, session: FramedSession) -> None:
        self.all.discard(session)
        self.without_hello.pop(session, None)
        self.buffers.release(session)


class FramedSession(asyncio.Protocol):
    """One connection."""

    def __init__(self, hub: SessionHub, connections: FramedConnections) -> None:
        self._hub = hub
        self._connections = connections
        first_bytes = min(SMALL_BYTES, connections.max_message_bytes)
        self._splitter = frames.Splitter(max_bytes=first_bytes, preface=frames.PREFACE)
        self._transport: asyncio.Transport | None = None
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_scheduled = False
        self._is_paused = False
        self._num_unsent = 0
        """Bytes of answers that the peer does not read, while writing is paused."""
        self._is_holding = False
        """Whether it occupies some of the shared buffers."""
        self.gone = asyncio.Event()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.join(self)
        frames.tune(transport, gone_after_s=frames.PEER_GONE_S)
        transport.set_write_buffer_limits(high=frames.BUFFER_BYTES)
        self._timer = asyncio.get_running_loop().call_later(HELLO_WITHIN_S, self._no_hello)

    def data_received(self, data: bytes) -> None:
        splitter, link = self._splitter, self._link
        splitter.push(data)
        if link is None or not link.is_busy:
            self._process_frames()
        if splitter.num_held or (link is not None and link.large):
            self._hold()

    def _process_frames(self) -> None:
        """Process the frames that have arrived, for as long as one turn of the event loop allows."""
        since_s, num_heard = self._hub.metrics.now_s(), 0
        try:
            while (message := self._splitter.next()) is not None and not self._is_over:
                if self._is_holding:
                    self._release_buffers()  # the deadline of the next frame counts from now
                self._receive(message)
                num_heard += 1
                link = self._link
                if link is not None and num_heard % LOOK_EVERY == 0:
                    self._hub.rest(link, since_s)
                if link is not None and link.is_busy:
                    self._update_reading()
                    return
        except frames.Malformed as error:
            self._end(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def eof_received(self) -> bool:
        """Close the connection: a killed process looks like one that has finished sending."""
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        """Drop all references at once: timers of the loop may keep this object alive for a while."""
        self._transport = None
        self._splitter.clear()
        self._connections.leave(self)
        self.gone.set()
        if self._timer is not None:
            self._timer.cancel()
        self._count_unsent(0)
        link, self._link = self._link, None
        if link is not None:
            self._hub.closed(link)

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read its answers."""
        self._is_paused = True
        self._update_reading()
        if self._transport is not None:
            self._count_unsent(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._is_paused = False
        self._count_unsent(0)
        self._update_reading()
        self._flush()

    def _update_reading(self) -> None:
        """Read from the peer, or pause it."""
        if self._is_over:
            return
        assert self._transport is not None
        if self._is_paused or self._is_busy:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _count_unsent(self, num_bytes: int) -> None:
        more, self._num_unsent = num_bytes - self._num_unsent, num_bytes
        if more and self._link is not None:
            self._link.count_unread(more)

    def _idle(self) -> None:
        """Continue after a large frame was processed; more may have arrived behind it."""
        if self._is_over:
            return
        self._release_buffers()
        self._update_reading()
        self.data_received(b"")

    @property
    def _is_busy(self) -> bool:
        return self._link is not None and self._link.is_busy

    def _hold(self) -> None:
        self._is_holding = True
        num_bytes = self._splitter.num_held + (len(self._link.large) if self._link is not None else 0)
        self._connections.buffers.hold(self, num_bytes, is_arriving=not self._is_busy)

    def _release_buffers(self) -> None:
        self._is_holding = False
        self._connections.buffers.release(self)

    # -- for the server --------------------------------------------------------------------------------------------

    def displace(self, why: str) -> None:
        """Close the connection because another one needs its share of the buffers."""
        self._is_holding = False
        if self._link is not None:
            self._link.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._end(grpc.StatusCode.RESOURCE_EXHAUSTED, why)

    def leave(self) -> None:
        self._end(grpc.StatusCode.UNAVAILABLE, "the coordinator is shutting down")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- private ---------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _receive(self, message: bytes) -> None:
        if self._link is not None:
            self._hub.receive(self._link, message)
            return
        frame = self._hub.decode(message)
        if frame is None:
            self._end(grpc.StatusCode.INVALID_ARGUMENT, NO_FRAME)
        elif link := self._begin_session(frame):
            self._hub.run_calls(link, frame.requests)

    def _begin_session(self, frame: pb.ClientFrame) -> Link | None:
        if self._timer is not None:
            self._timer.cancel()
        if not frame.HasField("hello"):
            self._end(grpc.StatusCode.INVALID_ARGUMENT, NO_HELLO)
            return None
        try:
            link = self._hub.begin(
                frame.hello,
                self._hub.role_of(frame.hello.token),
                carrier_bytes=self._connections.max_message_bytes,
                on_news=self._schedule_flush,
                on_idle=self._idle,
            )
        except StrataError as error:
            words, details = wire.encode_error_briefly(error)
            self._send_goodbye(pb.Goodbye(code=details.code, message=words, error=details))
            return None
        self._link = link
        self._connections.without_hello.pop(self, None)
        self._splitter.max_bytes = link.max_request_bytes
        self._write(self._hub.welcome(link))
        return link

    def _no_hello(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED, f"no frame within {HELLO_WITHIN_S:g} s")

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send everything that has collected in this turn of the loop in one frame."""
        self._flush_scheduled = False
        link = self._link
        if link is None or self._is_over:
            return
        while not self._is_paused and (frame := link.take_frame()) is not None:
            self._write(frame)
        if link.given_up:
            self._hub.dropped(link)
            self._end(*link.given_up)

    def _end(self, code: grpc.StatusCode, why: str) -> None:
        self._send_goodbye(pb.Goodbye(code=code.value[0], message=why))

    def _send_goodbye(self, goodbye: pb.Goodbye) -> None:
        if self._is_over:
            return
        assert self._transport is not None
        self._write(pb.ServerFrame(goodbye=goodbye))
        self._transport.close()
        self._splitter.clear()
        # Do not wait for a peer that does not read.
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def _write(self, frame: pb.ServerFrame) -> None:
        assert self._transport is not None
        self._transport.write(frames.packed(self._hub.encode(frame)))


class FramesServer:
    """Listens beside the gRPC server; `hub.frames` announces its address to clients."""

    def __init__(self, hub: SessionHub, limits: Limits) -> None:
        self._hub = hub
        self._connections = FramedConnections(limits)
        self._server: asyncio.Server | None = None
        self._lock: SocketLock | None = None
        self.address = ""

    async def start(self, wanted: str, grpc_address: str, security: SecurityConfig) -> None:
        """Listen on the address `wanted`, or, for `auto`, on a free port or a socket beside gRPC's.

        Raises:
            ConfigError: The address cannot be bound.
        """
        address = _beside(grpc_address) if wanted == "auto" else parse_address(wanted, field="frames")
        context = None
        if security.certificate and not address.path:
            context = frames.server_context(security.certificate, security.key, security.client_ca)
        if address.path:
            self._lock = SocketLock(address.path, field="frames")
        try:
            self._server, self.address = await frames.listen(self._make, address, context)
        except OSError as error:
            self._unlock()
            if wanted == "auto":  # for example if the suffix makes the path of a socket too long
                log.warning("cannot serve sessions without HTTP/2, so all of them use gRPC: %s", error)
                return
            raise ConfigError(
                f"frames={wanted!r} cannot be bound ({error}); choose another port or 'off'", field="frames"
            ) from error
        self._hub.frames = self.address if address.path else f":{self.address.rpartition(':')[2]}"

    def _make(self) -> FramedSession:
        return FramedSession(self._hub, self._connections)

    async def stop(self) -> None:
        """Close all connections, with a short grace period: the coordinator that takes over waits for us."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await frames.close_server(server)
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)  # noqa: ASYNC240 - one unlink at shutdown
        self._unlock()
        for session in list(self._connections.all):
            session.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(session.gone.wait() for session in list(self._connections.all)))
        for session in list(self._connections.all):
            session.abort()
        await asyncio.sleep(0)  # their sockets are closed in the next turn

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _beside(grpc_address: str) -> Address:
    address = parse_address(grpc_address, field="listen")
    return type(address)("", 0, f"{address.path}.frames") if address.path else type(address)(address.host, 0)
