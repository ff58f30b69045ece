"""The two transports of session frames, behind one interface: gRPC, and a bare connection."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from strata.coordinator import wire
from strata.transport import frames
from strata.transport.addresses import parse_address
from strata.v1 import session_pb2 as pb
from strata.v1 import types_pb2

if TYPE_CHECKING:
    from strata.transport.channels import Options
    from strata.transport.credentials import ClientSecurity

NEXT_ADDRESS_S = 0.05
"""Seconds until the next address of a host name is tried in parallel."""
GONE_AFTER_S = 4.0
"""A connection on which nothing is acknowledged for this long is closed; the same as gRPC's keepalive."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamEnded(Exception):
    """The stream has ended, with a gRPC status on either transport."""

    def __init__(self, code: grpc.StatusCode, details: str, kind: str = "") -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details or code.name
        self.kind = kind
        """The name of the Strata error in the status, if any."""


class Stream(Protocol):
    async def read(self) -> pb.ServerFrame:
        """Return the next frame.

        Raises:
            StreamEnded: The stream has ended.
        """
        ...

    async def write(self, frame: pb.ClientFrame) -> None:
        """Send a frame.

        Raises:
            StreamEnded: The stream has ended.
        """
        ...

    async def close(self) -> None: ...


class GrpcStream:
    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel = channel
        self._call = call

    @classmethod
    def open(cls, address: str, security: ClientSecurity, options: Options) -> GrpcStream:
        """Open a stream.

        Raises:
            ConfigError: A file of the security settings cannot be read.
        """
        channel, metadata = security.channel(address, options), security.metadata()
        method = channel.stream_stream(
            f"/{wire.SERVICE}/Session",
            request_serializer=pb.ClientFrame.SerializeToString,
            response_deserializer=pb.ServerFrame.FromString,
        )
        return cls(channel, method(metadata=metadata))

    async def read(self) -> pb.ServerFrame:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _ended(error) from None
        if frame is grpc.aio.EOF:
            raise await self._status()
        return frame  # type: ignore[no-any-return]  # the stubs do not know the type of the serializer

    async def write(self, frame: pb.ClientFrame) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise _ended(error) from None
        except asyncio.InvalidStateError:
            raise await self._status() from None

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _status(self) -> StreamEnded:
        call = self._call
        return _ended(
            grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        )


def _ended(error: grpc.aio.AioRpcError) -> StreamEnded:
    details = (error.trailing_metadata() or {}).get(wire.ERROR_METADATA_KEY)
    kind = types_pb2.Error.FromString(details).kind if isinstance(details, bytes) else ""
    return StreamEnded(error.code(), error.details() or "", kind)


class FramedStream(asyncio.Protocol):
    def __init__(self, max_message_bytes: int) -> None:
        self._splitter = frames.Splitter(max_bytes=max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self._come: deque[pb.ServerFrame] = deque()
        self._ended: StreamEnded | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        """Set while the peer's receive buffer is full."""

    @classmethod
    async def open(
        cls, grpc_address: str, announced: str, security: ClientSecurity, *, max_message_bytes: int
    ) -> FramedStream:
        """Connect to the address that the coordinator at `grpc_address` announced: ":PORT" or "unix:PATH".

        Raises:
            OSError: The connection or its TLS handshake failed.
        """
        loop = asyncio.get_running_loop()
        host = parse_address(grpc_address, field="address").host
        address = parse_address(
            announced if announced.startswith("unix:") else f"{host or 'localhost'}{announced}", field="frames"
        )
        if address.path:
            _, stream = await loop.create_unix_connection(lambda: cls(max_message_bytes), address.path)
        else:
            # A name may have several addresses, which are tried in parallel. Not so for a single address: if the
            # attempt is cancelled in the moment it succeeds, asyncio leaves the connection open (a race).
            delay_s = None if address.is_number else NEXT_ADDRESS_S
            _, stream = await loop.create_connection(
                lambda: cls(max_message_bytes),
                address.host,
                address.port,
                ssl=security.tls_context(),
                happy_eyeballs_delay=delay_s,
            )
        return stream

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        frames.tune(transport, gone_after_s=GONE_AFTER_S)
        transport.set_write_buffer_limits(high=frames.BUFFER_BYTES)
        transport.write(frames.PREFACE)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._splitter.feed(data):
                frame = pb.ServerFrame.FromString(message)
                if frame.HasField("goodbye"):
                    bye = frame.goodbye
                    code = _CODES.get(bye.code, grpc.StatusCode.UNKNOWN)
                    self._end(StreamEnded(code, bye.message, bye.error.kind))
                    return
                self._come.append(frame)
        except (frames.Malformed, DecodeError) as error:
            self._end(StreamEnded(grpc.StatusCode.INTERNAL, f"the coordinator sent an invalid frame ({error})"))
            return
        self._wake(self._reader)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(StreamEnded(grpc.StatusCode.UNAVAILABLE, str(error) if error else "Socket closed"))

    def pause_writing(self) -> None:
        self._writer = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake(self._writer)
        self._writer = None

    # -- Stream ----------------------------------------------------------------------------------------------------

    async def read(self) -> pb.ServerFrame:
        while not self._come:
            if self._ended is not None:
                raise self._ended
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._come.popleft()

    async def write(self, frame: pb.ClientFrame) -> None:
        await self.write_bytes(frame.SerializeToString())

    async def write_bytes(self, frame: bytes) -> None:
        """Send a serialised frame."""
        if self._writer is not None:
            await self._writer
        if self._ended is not None or self._transport is None:
            raise self._ended or StreamEnded(grpc.StatusCode.UNAVAILABLE, "not connected")
        self._transport.write(frames.packed(frame))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: StreamEnded) -> None:
        self._ended = self._ended or why
        self._wake(self._reader)
        self._wake(self._writer)
        if self._transport is not None:
            self._transport.close()

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


TRANSIENT = (OSError, ssl.SSLError, TimeoutError, UnicodeError)
"""Why a bare connection may fail where gRPC works: a firewall, a certificate, a coordinator that has gone."""
