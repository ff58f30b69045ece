"""One session to the coordinator that survives lost connections.

Calls are sent in frames; a frame contains all calls made while the previous frame was being sent. An unanswered call is
sent again on the next connection. All calls are idempotent, so nothing happens twice and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc
import tenacity

from strata._version import __version__
from strata.coordinator import wire
from strata.coordinator.client._streams import TRANSIENT, FramedStream, GrpcStream, StreamEnded
from strata.errors import (
    ConfigError,
    CoordinatorUnavailable,
    InvalidArgument,
    JournalFenced,
    LimitExceeded,
    NotLeader,
    PermissionRefused,
    StrataError,
    Unauthenticated,
)
from strata.transport.backoff import pauses
from strata.transport.channels import LONGEST_CONNECT_S, client_options
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from google.protobuf.message import Message

    from strata.coordinator.client._config import ClientConfig
    from strata.coordinator.client._streams import Stream
    from strata.transport.credentials import ClientSecurity

log = logging.getLogger(__name__)

M = TypeVar("M", bound="Message")

_FINAL: dict[grpc.StatusCode, type[StrataError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionRefused,
}

_NO_CONNECTION = "no connection was established"
_NO_REASON = "Internal error from Core"

_HANDSHAKE = "handshake failed"
"""Part of gRPC's message when the TLS handshake fails."""

_CLOSED_HINT = (
    "it closes the connection; if it requires TLS, set STRATA_TLS_CA, and for a client certificate STRATA_TLS_CERT "
    "and STRATA_TLS_KEY"
)

_SHORTEST_CONNECT_S = 0.1
_CONNECT_MARGIN = 4.0
_DOUBLE_EVERY = 10
"""After this many failed attempts, the time for one attempt doubles."""

NEW_FRAMES_S = 1.0
"""Minimum time for a bare connection whose address gRPC has just announced …"""
KNOWN_FRAMES_S = 0.25
"""… and for one that worked before: after a lost connection, a worker has half a second before it is declared dead."""
FRAMES_AGAIN_S = 60.0

_NOT_LEADING = {NotLeader.__name__, JournalFenced.__name__}
"""Errors of a coordinator that no longer leads: the call did not run, and the next address may accept it."""


def message(kind: type[M], /, **fields: Any) -> M:
    """Create a protobuf message; report a value that does not fit by the name of its field."""
    try:
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{_invalid_field(kind, fields)} has an invalid value: {error}", field=_invalid_field(kind, fields)
        ) from None


def _invalid_field(kind: type[Message], fields: Mapping[str, Any]) -> str:
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError):
            return name
    return kind.__name__


class FramesAddress(NamedTuple):
    """Where a coordinator accepts bare connections, and its instance id."""

    announced: str
    instance: str


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
        """Set when the first connection is rejected permanently."""
        self._last_failure = _NO_CONNECTION
        self._found_standby = False
        """The last coordinator that answered does not lead."""
        self._task: asyncio.Task[None] | None = None
        self._num_received = 0
        """The number of frames received."""
        self._connected_in_s: float | None = None
        """How long the last connection took to establish."""
        self._num_failed = 0
        """Failed attempts since then."""
        self._frames_at: dict[str, FramesAddress] = {}
        """Address → where it accepts bare connections, for those that worked."""
        self._failed_frames: dict[str, tuple[FramesAddress, float]] = {}
        """Address → where a bare connection failed although gRPC worked, and until when not to retry it."""
        self._max_message_bytes = config.max_message_bytes
        """The smaller of our limit and the coordinator's."""
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
                answered.set_exception(CoordinatorUnavailable("the client was closed before the answer arrived"))

    async def call(self, field: str, request: Message, *, timeout_s: float) -> Any:
        answered = self.submit(field, request)
        late = asyncio.get_running_loop().call_later(timeout_s, self._give_up, answered, timeout_s)
        try:
            return await answered
        finally:
            late.cancel()

    def _give_up(self, answered: asyncio.Future[Any], waited_s: float) -> None:
        if not answered.done():
            answered.set_exception(self.unavailable(waited_s))

    def submit(self, field: str, request: Message) -> asyncio.Future[Any]:
        """Put a call into the next frame, in the order of calls. Cancel the returned future to stop waiting."""
        if self._task is None:
            raise CoordinatorUnavailable("the client is not connected; use it in a `with` block or call connect()")
        number = next(self._ids)
        body: dict[str, Any] = {field: request}
        framed = pb.Request(id=number, **body)
        if framed.ByteSize() > self._most_bytes:
            raise self._too_large(framed)
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = (framed, answered)
        answered.add_done_callback(lambda _: self._unanswered.pop(number, None))
        if self._connected.is_set():  # else it is sent with all unanswered calls once connected
            self._outgoing.append(framed)
            self._to_send.set()
        return answered

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def unavailable(self, waited_s: float) -> CoordinatorUnavailable:
        if self._found_standby and not self._connected.is_set():
            return NotLeader(
                f"no leader among {' or '.join(self._addresses)} within {waited_s:g} s ({self._last_failure}); "
                "pass the addresses of all coordinators to the client"
            )
        state = "connected, but no answer" if self._connected.is_set() else self._last_failure
        return CoordinatorUnavailable(
            f"the coordinator at {' or '.join(self._addresses)} did not answer within {waited_s:g} s ({state}); "
            + (
                _CLOSED_HINT
                if "Socket closed" in state
                else "check that it is running; `strata coordinator` starts one"
            )
        )

    # -- connecting ------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        retrying = tenacity.AsyncRetrying(
            wait=pauses(self._config.backoff_s, self._config.max_backoff_s),
            retry=tenacity.retry_if_exception_type((StreamEnded, ConfigError)),
        )
        while True:
            async for attempt in retrying:
                with attempt:
                    await self._connect_once()

    async def _connect_once(self) -> None:
        """Open a stream and use it until it ends."""
        address = self._addresses[0]
        stream: Stream | None = None
        try:
            stream = await self._open_stream(address)
            self._resend()
            await self._stay(stream)
        except ConfigError as error:  # a missing file may appear later, during a rotation
            self._last_failure = str(error)
            if not self._refused.done():
                self._refused.set_result(error)
            raise
        except StreamEnded as error:
            was_connected = self._connected.is_set()
            self._note_failure(error)
            self._addresses.append(self._addresses.pop(0))  # the next one may lead by now
            if not was_connected:
                self._num_failed += 1
                self._check_final(error)
                raise
            log.info("lost the coordinator at %s (%s); reconnecting", address, self._last_failure)
        finally:
            self._connected.clear()
            if stream is not None:
                await stream.close()

    async def _open_stream(self, address: str) -> Stream:
        """Open a stream to a coordinator that has sent `welcome`: bare if offered and possible, else through gRPC."""
        known = self._frames_at.pop(address, None)
        if known is not None:
            bare = await self._open_frames(address, known, within_s=max(self._connect_within_s(), KNOWN_FRAMES_S))
            if bare is not None:
                return bare
        within_s = self._connect_within_s()
        options = client_options(max_message_bytes=self._config.max_message_bytes, connect_within_s=within_s)
        stream = GrpcStream.open(address, self._security, options)
        try:
            began_s = asyncio.get_running_loop().time()
            welcome = await self._greet(stream, began_s)
            bare = await self._try_frames(address, FramesAddress(welcome.frames, welcome.instance))
            if bare is None:
                self._accept(welcome)  # another coordinator may have answered meanwhile
                return stream
        except BaseException:
            await stream.close()
            raise
        try:
            await stream.close()
        except BaseException:  # a cancelled attempt must close this stream, too
            await bare.close()
            raise
        return bare

    async def _try_frames(self, address: str, frames: FramesAddress) -> Stream | None:
        """Try a bare connection to the address that gRPC announced; not repeatedly if it fails."""
        if not frames.announced or not self._config.frames or not self._security.may_go_bare(frames.announced):
            return None
        now_s = asyncio.get_running_loop().time()
        vain, until_s = self._failed_frames.get(address, (None, 0.0))
        if vain == frames and now_s < until_s:
            return None
        bare = await self._open_frames(address, frames, within_s=max(self._connect_within_s(), NEW_FRAMES_S))
        if bare is None:
            self._failed_frames[address] = (frames, now_s + FRAMES_AGAIN_S)
        return bare

    async def _open_frames(self, address: str, frames: FramesAddress, *, within_s: float) -> Stream | None:
        """Open a bare connection, or return None if gRPC must be used instead.

        The answer counts only if it comes from the coordinator that gRPC announced: behind a tunnel, that port of the
        apparent host may belong to another service. If the coordinator rejects us, gRPC reports it a moment later.
        """
        began_s = asyncio.get_running_loop().time()
        stream: FramedStream | None = None
        try:
            async with asyncio.timeout(within_s):
                stream = await FramedStream.open(
                    address, frames.announced, self._security, max_message_bytes=self._config.max_message_bytes
                )
                welcome = await self._greet(stream, began_s, token=self._security.current_token())
            if welcome.instance == frames.instance:
                self._frames_at[address] = frames
                return stream
        except (*TRANSIENT, StreamEnded) as error:
            log.debug("no bare connection to %s (%s): %s", address, frames.announced, error)
        finally:
            if stream is not None and address not in self._frames_at:
                await stream.close()
        return None

    def _connect_within_s(self) -> float:
        """Return the time for one attempt: somewhat more than the last connection took, because frequent attempts
        succeed sooner after an outage.

        It grows with the number of failures, because the network path may have become slower.
        """
        if self._connected_in_s is None:
            return LONGEST_CONNECT_S
        usual_s = max(_CONNECT_MARGIN * self._connected_in_s, _SHORTEST_CONNECT_S)
        num_doubled = min(self._num_failed // _DOUBLE_EVERY, 10)
        return min(usual_s * 2.0**num_doubled, LONGEST_CONNECT_S)

    def _check_final(self, error: StreamEnded) -> None:
        """End the first connection at once if the error is permanent."""
        if self._refused.done():
            return
        kind, details = _FINAL.get(error.code), error.details
        if kind is not None:
            self._refused.set_result(kind(details))
        elif _HANDSHAKE in details:
            self._refused.set_result(CoordinatorUnavailable(_explain_handshake(details)))

    async def _greet(self, stream: Stream, began_s: float, *, token: str = "") -> pb.Welcome:
        hello = pb.Hello(session_id=self._session_id, client=f"strata-python {__version__}", token=token)
        try:
            # A paused coordinator accepts connections, because its kernel does, but sends no welcome.
            async with asyncio.timeout(self._config.silence_s if len(self._addresses) > 1 else None):
                await stream.write(pb.ClientFrame(hello=hello))
                frame = await stream.read()
        except TimeoutError:
            raise _abandoned(f"no welcome within {self._config.silence_s:g} s") from None
        self._connected_in_s, self._num_failed = asyncio.get_running_loop().time() - began_s, 0
        self._accept(frame.welcome)
        return frame.welcome

    def _accept(self, welcome: pb.Welcome) -> None:
        ours = self._config.max_message_bytes
        self._max_message_bytes = min(ours, welcome.max_message_bytes or ours)

    def _resend(self) -> None:
        """Send all unanswered calls again."""
        self.num_connections += 1
        self._outgoing = []
        for request, answered in list(self._unanswered.values()):
            if answered.done():
                continue
            if request.ByteSize() > self._most_bytes:
                answered.set_exception(self._too_large(request))
            else:
                self._outgoing.append(request)
        self._to_send.set()
        self._connected.set()
        self._on_connect()

    @property
    def _most_bytes(self) -> int:
        return self._max_message_bytes - wire.FRAME_MARGIN_BYTES

    def _too_large(self, request: pb.Request) -> LimitExceeded:
        where = "here" if self._max_message_bytes == self._config.max_message_bytes else "at the coordinator"
        return LimitExceeded(
            f"the call has {request.ByteSize()} bytes, more than max_message_bytes={self._max_message_bytes} "
            f"{where}; send less at once, or raise the limit on both sides"
        )

    def _note_failure(self, error: StreamEnded) -> None:
        """Record why the connection failed. If we were rejected while writing, gRPC gives no reason, so an earlier one
        is kept.
        """
        if error.details != _NO_REASON or self._last_failure == _NO_CONNECTION:
            self._last_failure = error.details
            self._found_standby = error.kind in _NOT_LEADING

    # -- frames ----------------------------------------------------------------------------------------------------

    async def _stay(self, stream: Stream) -> None:
        """Use the stream until it ends or another address is better."""
        tasks = [asyncio.create_task(self._exchange(stream))]
        if len(self._addresses) > 1 or isinstance(stream, FramedStream):  # gRPC's pings do not detect a hung process
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
            owed, num_heard = self._overdue_calls(), self._num_received
            await asyncio.sleep(self._config.silence_s)
            if self._num_received == num_heard and owed & self._overdue_calls():
                raise _abandoned(f"connected, but nothing was received for {self._config.silence_s:g} s")

    def _overdue_calls(self) -> set[int]:
        """Return the calls that a healthy coordinator answers at once; excludes barriers, which may take long."""
        return {n for n, (request, _) in self._unanswered.items() if request.WhichOneof("call") != "wait_barrier"}

    async def _exchange(self, stream: Stream) -> None:
        writer = asyncio.create_task(self._write(stream))
        try:
            while True:
                frame = await stream.read()
                self._num_received += 1
                elsewhere = ""
                for response in frame.responses:
                    if response.error.kind in _NOT_LEADING:
                        elsewhere = response.error.message
                    else:
                        self._answer(response)
                for notice in frame.notices:
                    self._handle_notice(notice)
                if elsewhere:
                    raise _abandoned(elsewhere)
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, StreamEnded):
                await writer

    async def _write(self, stream: Stream) -> None:
        config = self._config
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing:
                batch = self._outgoing[: config.max_calls_per_frame]
                num = wire.num_fitting(batch, self._max_message_bytes)
                self._outgoing = self._outgoing[num:]
                await stream.write(pb.ClientFrame(requests=batch[:num]))

    def _handle_notice(self, notice: pb.Notice) -> None:
        try:
            self._on_notice(notice)
        except StrataError as error:
            log.warning("cannot decode a notice; the coordinator may be newer than this client: %s", error)

    def _answer(self, response: pb.Response) -> None:
        _, answered = self._unanswered.get(response.id, (None, None))
        if answered is None or answered.done():
            return  # answered on an earlier connection, or timed out
        field: str | None = response.WhichOneof("result")
        if field == "error" or field is None:
            answered.set_exception(wire.decode_error(response.error))
        else:
            answered.set_result(getattr(response, field))


def _explain_handshake(details: str) -> str:
    if "WRONG_VERSION_NUMBER" in details:
        return "the coordinator does not use TLS, but this client does; unset the authority (ca, STRATA_TLS_CA)"
    if "CERTIFICATE_VERIFY_FAILED" in details or "verif" in details:
        return (
            "the coordinator's certificate is not trusted: it has another authority (ca, STRATA_TLS_CA), has "
            f"expired, or is for another host name ({details})"
        )
    return f"the TLS handshake failed; check the authority and, if one is required, your certificate ({details})"


def _abandoned(why: str) -> StreamEnded:
    """Return the end of a stream, after which unanswered calls are sent again on the next one."""
    return StreamEnded(grpc.StatusCode.UNAVAILABLE, why)
