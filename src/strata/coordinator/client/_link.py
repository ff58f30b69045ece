"""One session to the coordinator that survives lost connections.

Calls go out in frames, as many as have gathered while the last frame was being sent. A call that has no answer yet is
sent again on the next connection: every call may be repeated, so nothing happens twice and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
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

_NO_CONNECTION = "no connection was made"
_UNTOLD = "Internal error from Core"

_HANDSHAKE = "handshake failed"
"""In gRPC's words when TLS does not come about."""

_HUNG_UP = "it hangs up: does it want TLS (STRATA_TLS_CA), or a client's certificate (STRATA_TLS_CERT, STRATA_TLS_KEY)?"

_SHORTEST_CONNECT_S = 0.1
_CONNECT_MARGIN = 4.0
_DOUBLE_EVERY = 10
"""After so many attempts in vain, each may take twice as long."""

NEW_FRAMES_S = 1.0
"""How long a bare connection may take, at least, where gRPC has just told of it …"""
KNOWN_FRAMES_S = 0.25
"""… and where it worked before: after a lost connection there is half a second until a worker is given up."""
FRAMES_AGAIN_S = 60.0

_ELSEWHERE = {NotLeader.__name__, JournalFenced.__name__}
"""Answers of a coordinator that does not lead any more: the call was not carried out, the next address may do it."""


def message(kind: type[M], /, **fields: Any) -> M:
    """A protobuf message; a value that does not fit its field is the caller's mistake, told by the field's name."""
    try:
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{_misfit(kind, fields)} does not fit: {error}", field=_misfit(kind, fields)) from None


def _misfit(kind: type[Message], fields: Mapping[str, Any]) -> str:
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError):
            return name
    return kind.__name__


class Place(NamedTuple):
    """Where a coordinator takes bare connections, and which coordinator it is."""

    told: str
    instance: str


def pauses(first_s: float, longest_s: float) -> Callable[[tenacity.RetryCallState], float]:
    """Longer and longer, with chance in them. The chance is our own: a program that trains must not draw other numbers
    because a connection was lost, and Python's generator is the whole program's.
    """
    most_s = tenacity.wait_exponential(multiplier=first_s, max=longest_s)
    chance = random.Random()  # noqa: S311 - no secret
    return lambda state: chance.uniform(0.0, most_s(state))


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
        self._greeted_in_s: float | None = None
        """How long the last connection took to be made."""
        self._num_failed = 0
        """Attempts since then."""
        self._frames_at: dict[str, Place] = {}
        """Address → where its bare connections are taken, of those that worked."""
        self._frames_in_vain: dict[str, tuple[Place, float]] = {}
        """Address → where a bare connection did not come about although gRPC did, and until when not to try again."""
        self._max_message_bytes = config.max_message_bytes
        """Ours or the coordinator's, whichever is less."""
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
        answered = self.ask(field, request)
        late = asyncio.get_running_loop().call_later(timeout_s, self._give_up, answered, timeout_s)
        try:
            return await answered
        finally:
            late.cancel()

    def _give_up(self, answered: asyncio.Future[Any], waited_s: float) -> None:
        if not answered.done():
            answered.set_exception(self.unavailable(waited_s))

    def ask(self, field: str, request: Message) -> asyncio.Future[Any]:
        """Puts a call into the next frame, in the order of asking. Cancel what is given back to give up waiting."""
        if self._task is None:
            raise CoordinatorUnavailable("the client is not connected; use it in a `with` block, or call connect()")
        number = next(self._ids)
        body: dict[str, Any] = {field: request}
        framed = pb.Request(id=number, **body)
        if framed.ByteSize() > self._most_bytes:
            raise self._too_large(framed)
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = (framed, answered)
        answered.add_done_callback(lambda _: self._unanswered.pop(number, None))
        if self._connected.is_set():  # else it goes with all that is unanswered, when there is a connection
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
            wait=pauses(self._config.backoff_s, self._config.max_backoff_s),
            retry=tenacity.retry_if_exception_type((StreamEnded, ConfigError)),
        )
        while True:
            async for attempt in retrying:
                with attempt:
                    await self._connect_once()

    async def _connect_once(self) -> None:
        """Opens a stream and stays on it until it ends."""
        address = self._addresses[0]
        stream: Stream | None = None
        try:
            stream = await self._open_stream(address)
            self._begin()
            await self._stay(stream)
        except ConfigError as error:  # a file that is not there; later it may be, in the middle of a rotation
            self._last_failure = str(error)
            if not self._refused.done():
                self._refused.set_result(error)
            raise
        except StreamEnded as error:
            was_connected = self._connected.is_set()
            self._note_failure(error)
            self._addresses.append(self._addresses.pop(0))  # the next one may be the leader by now
            if not was_connected:
                self._num_failed += 1
                self._turned_away(error)
                raise
            log.info("lost the coordinator at %s (%s); reconnecting", address, self._last_failure)
        finally:
            self._connected.clear()
            if stream is not None:
                await stream.close()

    async def _open_stream(self, address: str) -> Stream:
        """A stream whose coordinator has greeted us: bare where that is offered and comes about, else through gRPC."""
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
            bare = await self._try_frames(address, Place(welcome.frames, welcome.instance))
            if bare is None:
                self._heed(welcome)  # another may have greeted us meanwhile
                return stream
        except BaseException:
            await stream.close()
            raise
        try:
            await stream.close()
        except BaseException:  # whoever gives up meanwhile has this one to close, too
            await bare.close()
            raise
        return bare

    async def _try_frames(self, address: str, place: Place) -> Stream | None:
        """Where gRPC has just told of; not again and again where it does not come about."""
        if not place.told or not self._config.frames or not self._security.may_go_bare(place.told):
            return None
        now_s = asyncio.get_running_loop().time()
        vain, until_s = self._frames_in_vain.get(address, (None, 0.0))
        if vain == place and now_s < until_s:
            return None
        bare = await self._open_frames(address, place, within_s=max(self._connect_within_s(), NEW_FRAMES_S))
        if bare is None:
            self._frames_in_vain[address] = (place, now_s + FRAMES_AGAIN_S)
        return bare

    async def _open_frames(self, address: str, place: Place, *, within_s: float) -> Stream | None:
        """None: it does not come about, so it has to be gRPC.

        Whoever answers there counts only if it is the coordinator that we were told of: behind a tunnel anything may be
        at that port of what we take for the same host. A refusal, too, is heard through gRPC a moment later.
        """
        began_s = asyncio.get_running_loop().time()
        stream: FramedStream | None = None
        try:
            async with asyncio.timeout(within_s):
                stream = await FramedStream.open(
                    address, place.told, self._security, max_message_bytes=self._config.max_message_bytes
                )
                welcome = await self._greet(stream, began_s, token=self._security.current_token())
            if welcome.instance == place.instance:
                self._frames_at[address] = place
                return stream
        except (*TRANSIENT, StreamEnded) as error:
            log.debug("no bare connection to %s (%s): %s", address, place.told, error)
        finally:
            if stream is not None and address not in self._frames_at:
                await stream.close()
        return None

    def _connect_within_s(self) -> float:
        """Somewhat longer than it took before: when a network is back, whoever tries often is back first.

        In time longer, for the way may have become a longer one.
        """
        if self._greeted_in_s is None:
            return LONGEST_CONNECT_S
        usual_s = max(_CONNECT_MARGIN * self._greeted_in_s, _SHORTEST_CONNECT_S)
        num_doubled = min(self._num_failed // _DOUBLE_EVERY, 10)
        return min(usual_s * 2.0**num_doubled, LONGEST_CONNECT_S)

    def _turned_away(self, error: StreamEnded) -> None:
        """A refusal that no patience changes ends the first connection at once."""
        if self._refused.done():
            return
        kind, details = _FINAL.get(error.code), error.details
        if kind is not None:
            self._refused.set_result(kind(details))
        elif _HANDSHAKE in details:
            self._refused.set_result(CoordinatorUnavailable(_handshake_in_words(details)))

    async def _greet(self, stream: Stream, began_s: float, *, token: str = "") -> pb.Welcome:
        hello = pb.Hello(session_id=self._session_id, client=f"strata-python {__version__}", token=token)
        try:
            # A paused coordinator takes connections, for its kernel does, and greets nobody.
            async with asyncio.timeout(self._config.silence_s if len(self._addresses) > 1 else None):
                await stream.write(pb.ClientFrame(hello=hello))
                frame = await stream.read()
        except TimeoutError:
            raise _moved(f"no greeting within {self._config.silence_s:g} s") from None
        self._greeted_in_s, self._num_failed = asyncio.get_running_loop().time() - began_s, 0
        self._heed(frame.welcome)
        return frame.welcome

    def _heed(self, welcome: pb.Welcome) -> None:
        ours = self._config.max_message_bytes
        self._max_message_bytes = min(ours, welcome.max_message_bytes or ours)

    def _begin(self) -> None:
        """Everything without an answer is sent again."""
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
            f"the call holds {request.ByteSize()} bytes, more than max_message_bytes={self._max_message_bytes} "
            f"{where}; send less at once, or raise it on both sides"
        )

    def _note_failure(self, error: StreamEnded) -> None:
        """Turned away while we still wrote, gRPC does not tell why; what was told before then says more."""
        if error.details != _UNTOLD or self._last_failure == _NO_CONNECTION:
            self._last_failure = error.details
            self._found_standby = error.kind in _ELSEWHERE

    # -- frames ----------------------------------------------------------------------------------------------------

    async def _stay(self, stream: Stream) -> None:
        """Until the stream ends, or another address is the better one."""
        tasks = [asyncio.create_task(self._exchange(stream))]
        if len(self._addresses) > 1 or isinstance(stream, FramedStream):  # gRPC has pings, which a hung process misses
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
            while True:
                frame = await stream.read()
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


def _moved(why: str) -> StreamEnded:
    """As if the stream had ended: the calls without an answer are sent again on the next."""
    return StreamEnded(grpc.StatusCode.UNAVAILABLE, why)
