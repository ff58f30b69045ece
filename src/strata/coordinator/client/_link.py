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
from strata.errors import (
    ConfigError,
    CoordinatorUnavailable,
    JournalFenced,
    LimitExceeded,
    NotLeader,
    PermissionRefused,
    StrataError,
    Unauthenticated,
)
from strata.transport.channels import client_options
from strata.v1 import session_pb2 as pb
from strata.v1 import types_pb2

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

_NO_CONNECTION = "no connection was made"
_UNTOLD = "Internal error from Core"

_HANDSHAKE = "handshake failed"
"""In gRPC's words when TLS does not come about."""

_HUNG_UP = "it hangs up: does it want TLS (STRATA_TLS_CA), or a client's certificate (STRATA_TLS_CERT, STRATA_TLS_KEY)?"

_ELSEWHERE = {NotLeader.__name__, JournalFenced.__name__}
"""Answers of a coordinator that does not lead any more: the call was not carried out, the next address may do it."""


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
        self._last_failure = _NO_CONNECTION
        self._found_standby = False
        """The last one that answered does not lead."""
        self._task: asyncio.Task[None] | None = None
        self._num_heard = 0
        """Frames."""
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
            raise self.unavailable(self._config.connect_timeout_s) from None
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
        for _, answered in list(self._unanswered.values()):
            if not answered.done():
                answered.set_exception(CoordinatorUnavailable("the client was closed before the answer came"))

    async def call(self, field: str, request: Message, *, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.ask(field, request)
        except TimeoutError:
            raise self.unavailable(timeout_s) from None

    def ask(self, field: str, request: Message) -> asyncio.Future[Any]:
        """Puts a call into the next frame, in the order of asking. Cancel what is given back to give up waiting."""
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
        answered.add_done_callback(lambda _: self._unanswered.pop(number, None))
        if self._connected.is_set():  # else it goes with all that is unanswered, when there is a connection
            self._outgoing.append(framed)
            self._to_send.set()
        return answered

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def unavailable(self, waited_s: float) -> CoordinatorUnavailable:
        if self._found_standby and not self._connected.is_set():
            return NotLeader(
                f"no leader among {' or '.join(self._addresses)} within {waited_s:g} s ({self._last_failure}); "
                "give the client the addresses of all coordinators"
            )
        state = "connected, but no answer" if self._connected.is_set() else self._last_failure
        return CoordinatorUnavailable(
            f"the coordinator at {' or '.join(self._addresses)} did not answer within {waited_s:g} s ({state}); "
            + (_HUNG_UP if "Socket closed" in state else "is it running? `strata coordinator` starts one")
        )

    # -- connecting ------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        retrying = tenacity.AsyncRetrying(
            wait=tenacity.wait_random_exponential(multiplier=self._config.backoff_s, max=self._config.max_backoff_s),
            retry=tenacity.retry_if_exception_type((grpc.aio.AioRpcError, ConfigError)),
        )
        while True:
            async for attempt in retrying:
                with attempt:
                    await self._connect_once()

    async def _connect_once(self) -> None:
        """Opens a stream and stays on it until it ends."""
        options = client_options(max_message_bytes=self._config.max_message_bytes)
        address = self._addresses[0]
        try:
            opened, metadata = self._security.channel(address, options), self._security.metadata()
        except ConfigError as error:  # a file that is not there; later it may be, in the middle of a rotation
            self._last_failure = str(error)
            if not self._refused.done():
                self._refused.set_result(error)
            raise
        async with opened as channel:
            stream: Stream = channel.stream_stream(
                f"/{wire.SERVICE}/Session",
                request_serializer=pb.ClientFrame.SerializeToString,
                response_deserializer=pb.ServerFrame.FromString,
            )(metadata=metadata)
            try:
                await self._greet(stream)
                await self._stay(stream)
            except grpc.aio.AioRpcError as error:
                was_connected = self._connected.is_set()
                self._note_failure(error)
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
        if self._refused.done():
            return
        kind = _FINAL.get(error.code())
        details = error.details() or error.code().name
        if kind is not None:
            self._refused.set_result(kind(details))
        elif _HANDSHAKE in details:
            self._refused.set_result(CoordinatorUnavailable(_handshake_in_words(details)))

    async def _greet(self, stream: Stream) -> None:
        hello = pb.Hello(session_id=self._session_id, client=f"strata-python {__version__}")
        await stream.write(pb.ClientFrame(hello=hello))
        try:
            # A paused coordinator takes connections, for its kernel does, and greets nobody.
            async with asyncio.timeout(self._config.silence_s if len(self._addresses) > 1 else None):
                welcome = await stream.read()
        except TimeoutError:
            raise _moved(f"no greeting within {self._config.silence_s:g} s") from None
        if welcome is grpc.aio.EOF:
            await _raise_status(stream)
        self.num_connections += 1
        self._outgoing = [request for request, answered in self._unanswered.values() if not answered.done()]
        self._to_send.set()
        self._connected.set()
        self._on_connect()

    def _note_failure(self, error: grpc.aio.AioRpcError) -> None:
        """Turned away while we still wrote, gRPC does not tell why; what was told before then says more."""
        details = error.details() or error.code().name
        if details != _UNTOLD or self._last_failure == _NO_CONNECTION:
            self._last_failure = details
            self._found_standby = _is_standby(error)

    # -- frames ----------------------------------------------------------------------------------------------------

    async def _stay(self, stream: Stream) -> None:
        """Until the stream ends, or another address is the better one."""
        tasks = [asyncio.create_task(self._exchange(stream))]
        if len(self._addresses) > 1:
            tasks.append(asyncio.create_task(self._watch_silence()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_silence(self) -> None:
        while True:
            owed, num_heard = self._owed(), self._num_heard
            await asyncio.sleep(self._config.silence_s)
            if self._num_heard == num_heard and owed & self._owed():
                raise _moved(f"connected, but nothing was heard for {self._config.silence_s:g} s")

    def _owed(self) -> set[int]:
        """Calls that are answered at once by whoever is well; a barrier may take its time."""
        return {n for n, (request, _) in self._unanswered.items() if request.WhichOneof("call") != "wait_barrier"}

    async def _exchange(self, stream: Stream) -> None:
        writer = asyncio.create_task(self._write(stream))
        try:
            while (frame := await stream.read()) is not grpc.aio.EOF:
                self._num_heard += 1
                elsewhere = ""
                for response in frame.responses:
                    if response.error.kind in _ELSEWHERE:
                        elsewhere = response.error.message
                    else:
                        self._answer(response)
                for notice in frame.notices:
                    self._hear(notice)
                if elsewhere:
                    raise _moved(elsewhere)
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


def _handshake_in_words(details: str) -> str:
    if "WRONG_VERSION_NUMBER" in details:
        return "the coordinator does not speak TLS, and this client does; leave out the authority (ca, STRATA_TLS_CA)"
    if "CERTIFICATE_VERIFY_FAILED" in details or "verif" in details:
        return (
            "the coordinator's certificate is not believed: it is of another authority (ca, STRATA_TLS_CA), out of "
            f"date, or for another host name ({details})"
        )
    return f"no TLS connection comes about; check the authority and, if one is asked for, your certificate ({details})"


async def _raise_status(stream: Stream) -> None:
    """The stream has ended: says why, as an exception."""
    raise grpc.aio.AioRpcError(
        await stream.code(), await stream.initial_metadata(), await stream.trailing_metadata(), await stream.details()
    )


def _moved(why: str) -> grpc.aio.AioRpcError:
    """As if the stream had ended: the calls without an answer are sent again on the next."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), why)


def _is_standby(error: grpc.aio.AioRpcError) -> bool:
    details = (error.trailing_metadata() or {}).get(wire.ERROR_METADATA_KEY)
    return isinstance(details, bytes) and types_pb2.Error.FromString(details).kind in _ELSEWHERE
