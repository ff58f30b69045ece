"""One session to the coordinator that survives lost connections.

Calls go out in frames, as many as have gathered while the last frame was being sent. A call that has no answer yet is
sent again on the next connection: every call may be repeated, so nothing happens twice and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any

import grpc
import tenacity

from strata._version import __version__
from strata.coordinator import wire
from strata.errors import CoordinatorUnavailable, LimitExceeded, PermissionRefused, StrataError, Unauthenticated
from strata.transport.channels import client_options
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message

    from strata.coordinator.client._config import ClientConfig
    from strata.transport.credentials import ClientSecurity

log = logging.getLogger(__name__)

Stream = Any
"""grpc.aio's StreamStreamCall."""

_FINAL: dict[grpc.StatusCode, type[StrataError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionRefused,
}


class SessionLink:
    def __init__(
        self,
        addresses: Sequence[str],
        config: ClientConfig,
        security: ClientSecurity,
        *,
        on_notice: Callable[[pb.Notice], None],
        on_connect: Callable[[], None],
    ) -> None:
        self._addresses = list(addresses)
        self._security = security
        self._config = config
        self._on_notice = on_notice
        self._on_connect = on_connect
        self._session_id = uuid.uuid4().hex
        self._ids = itertools.count(1)
        self._unanswered: dict[int, tuple[pb.Request, asyncio.Future[Message]]] = {}
        self._outgoing: list[pb.Request] = []
        self._to_send = asyncio.Event()
        self._connected = asyncio.Event()
        self._refused: asyncio.Future[StrataError] = asyncio.get_running_loop().create_future()
        """Set when the first connection is turned away for good."""
        self._last_failure = "no connection was made"
        self._task: asyncio.Task[None] | None = None
        self.num_connections = 0

    # -- for the client --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name="strata-session")
        connected = asyncio.create_task(self._connected.wait())
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                first: set[asyncio.Future[Any]] = {connected, self._refused}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.close()
            raise self._unavailable(self._config.connect_timeout_s) from None
        finally:
            connected.cancel()
        if not self._connected.is_set():
            await self.close()
            raise self._refused.result()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for _, answered in self._unanswered.values():
            if not answered.done():
                answered.set_exception(CoordinatorUnavailable("the client was closed before the answer came"))

    async def call(self, field: str, request: Message, *, timeout_s: float) -> Any:
        if self._task is None:
            raise CoordinatorUnavailable("the client is not connected; use it in a `with` block, or call connect()")
        number = next(self._ids)
        body: dict[str, Any] = {field: request}
        framed = pb.Request(id=number, **body)
        most = self._config.max_message_bytes - wire.FRAME_MARGIN_BYTES
        if framed.ByteSize() > most:
            raise LimitExceeded(
                f"the call holds {framed.ByteSize()} bytes, more than max_message_bytes={most}; send less at once"
            )
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = (framed, answered)
        self._outgoing.append(framed)
        self._to_send.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise self._unavailable(timeout_s) from None
        finally:
            del self._unanswered[number]

    def _unavailable(self, waited_s: float) -> CoordinatorUnavailable:
        state = "connected, but no answer" if self._connected.is_set() else self._last_failure
        return CoordinatorUnavailable(
            f"the coordinator at {' or '.join(self._addresses)} did not answer within {waited_s:g} s ({state}); "
            "is it running? `strata coordinator` starts one"
        )

    # -- connecting ------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        retrying = tenacity.AsyncRetrying(
            wait=tenacity.wait_random_exponential(multiplier=self._config.backoff_s, max=self._config.max_backoff_s),
            retry=tenacity.retry_if_exception_type(grpc.aio.AioRpcError),
            before_sleep=self._remember_failure,
        )
        while True:
            async for attempt in retrying:
                with attempt:
                    await self._connect_once()

    async def _connect_once(self) -> None:
        """Opens a stream and stays on it until it ends."""
        options = client_options(max_message_bytes=self._config.max_message_bytes)
        address = self._addresses[0]
        async with self._security.channel(address, options) as channel:
            stream: Stream = channel.stream_stream(
                f"/{wire.SERVICE}/Session",
                request_serializer=pb.ClientFrame.SerializeToString,
                response_deserializer=pb.ServerFrame.FromString,
            )(metadata=self._security.metadata())
            try:
                await self._greet(stream)
                await self._exchange(stream)
            except grpc.aio.AioRpcError as error:
                was_connected = self._connected.is_set()
                self._last_failure = error.details() or error.code().name
                self._addresses.append(self._addresses.pop(0))  # the next one may be the leader by now
                if not was_connected:
                    self._turned_away(error)
                    raise
                log.info("lost the coordinator at %s (%s); reconnecting", address, self._last_failure)
            finally:
                self._connected.clear()
                stream.cancel()

    def _turned_away(self, error: grpc.aio.AioRpcError) -> None:
        """A refusal that no patience changes ends the first connection at once."""
        kind = _FINAL.get(error.code())
        if kind is not None and not self._refused.done():
            self._refused.set_result(kind(error.details() or kind.__name__))

    async def _greet(self, stream: Stream) -> None:
        hello = pb.Hello(session_id=self._session_id, client=f"strata-python {__version__}")
        await stream.write(pb.ClientFrame(hello=hello))
        welcome = await stream.read()
        if welcome is grpc.aio.EOF:
            await _raise_status(stream)
        self.num_connections += 1
        self._outgoing = [request for request, _ in self._unanswered.values()]
        self._to_send.set()
        self._connected.set()
        self._on_connect()

    def _remember_failure(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, grpc.aio.AioRpcError):
            self._last_failure = error.details() or error.code().name

    # -- frames ----------------------------------------------------------------------------------------------------

    async def _exchange(self, stream: Stream) -> None:
        writer = asyncio.create_task(self._write(stream))
        try:
            while (frame := await stream.read()) is not grpc.aio.EOF:
                for response in frame.responses:
                    self._answer(response)
                for notice in frame.notices:
                    self._hear(notice)
            await _raise_status(stream)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await writer

    async def _write(self, stream: Stream) -> None:
        config = self._config
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing:
                batch = self._outgoing[: config.max_calls_per_frame]
                num = wire.num_fitting(batch, config.max_message_bytes)
                self._outgoing = self._outgoing[num:]
                await stream.write(pb.ClientFrame(requests=batch[:num]))

    def _hear(self, notice: pb.Notice) -> None:
        try:
            self._on_notice(notice)
        except StrataError as error:
            log.warning("a notice was not understood, is the coordinator newer than this client? %s", error)

    def _answer(self, response: pb.Response) -> None:
        _, answered = self._unanswered.get(response.id, (None, None))
        if answered is None or answered.done():
            return  # answered on an earlier connection, or given up
        field: str | None = response.WhichOneof("result")
        if field == "error" or field is None:
            answered.set_exception(wire.decode_error(response.error))
        else:
            answered.set_result(getattr(response, field))


async def _raise_status(stream: Stream) -> None:
    """The stream has ended: says why, as an exception."""
    raise grpc.aio.AioRpcError(
        await stream.code(), await stream.initial_metadata(), await stream.trailing_metadata(), await stream.details()
    )
