"""Admission control: tokens and roles, rates, and the cost of a request before it is decoded.

A few bytes on the wire can cause a thousand times as much work, and an incomplete request occupies a buffer for as long
as its sender likes. This module therefore bounds the bytes being received, the elements of a message, and the time that
one caller takes from the event loop. All callers of a process share these bounds; docs/design/hardening.md explains
them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from strata.coordinator.wire import FRAME_MARGIN_BYTES
from strata.errors import InvalidArgument, LimitExceeded, StrataError
from strata.transport.tokens import METADATA_KEY, Guard, Role, bearer, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import grpc
    from google.protobuf.message import Message

    from strata.clock import Clock
    from strata.coordinator.config import Limits
    from strata.coordinator.serve.service import Method

    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

T = TypeVar("T")
_OVER = object()

SMALL_BYTES = 64 * 1024
"""A request or frame of up to this size is processed at once, without counting its elements. Readers, and connections
that have not sent `hello`, may send nothing larger."""
UNSCANNED_BYTES = 1 << 20
"""A request of up to this size is decoded without scanning it first: 25 ms and 32 MB in the worst case."""
BODY_WITHIN_S = 10.0
"""Seconds in which the body of a unary call must arrive."""
FRAME_WITHIN_S = 10.0
"""Seconds in which a frame must arrive, from its first byte to its last."""
CHECK_EVERY_S = 0.1
"""Seconds between two checks for overdue bodies."""
CONTENDED_WITHIN_S = 0.5
"""Seconds in which a body must arrive while other calls wait for its slot."""
NUM_BODIES = 64
"""Unary calls whose bodies are received concurrently; gRPC may buffer `max_grpc_message_bytes` for each."""
NUM_READERS_BODIES = 16
"""The same for readers, which have separate slots so that they take none from workers."""
PAUSE_AFTER_S = 0.02
"""A piece of work that took longer is followed by a pause of the same length."""
LONGEST_PAUSE_S = 1.0
MAX_PEERS = 10_000
"""Peers whose rate of unary calls is tracked; the least recent are dropped first."""


def receivable_bytes(role: Role, max_bytes: int) -> int:
    """Return the largest frame or request that a role may send over a connection that accepts `max_bytes`."""
    return min(SMALL_BYTES, max_bytes) if role <= Role.READER else max_bytes


# -- elements ------------------------------------------------------------------------------------------------------


def check_wire(data: bytes, *, levels: int, limits: Limits) -> None:
    """Reject a message that would contain too many elements once decoded.

    `levels` is the nesting depth of its repeated fields. Bytes that are not protobuf pass; decoding rejects them.
    """
    if len(data) <= UNSCANNED_BYTES:
        return
    most = limits.max_message_elements
    if num_fields(data, levels=levels, most=most) > most:
        raise _too_many(f"the message of {len(data)} bytes has", limits)


def check_repeated(names: Sequence[str], request: Message, limits: Limits) -> None:
    """Reject a decoded request with too many elements before iterating over them."""
    for name in names:
        num = len(getattr(request, name))
        if num > limits.max_message_elements:
            raise _too_many(f"{name} has {num},", limits, field=name)


def check_answer(answer: Message | StrataError, limits: Limits) -> Message | StrataError:
    """Return `answer`, or an error if it is too large to send."""
    if isinstance(answer, StrataError):
        return answer
    num_bytes = answer.ByteSize()
    fits = num_bytes <= limits.max_message_bytes - FRAME_MARGIN_BYTES
    return answer if fits else answer_too_large(num_bytes, limits)


def answer_too_large(num_bytes: int, limits: Limits) -> LimitExceeded:
    return LimitExceeded(
        f"the answer has {num_bytes} bytes, more than limits.max_message_bytes={limits.max_message_bytes}; "
        "request less at once, or raise the limit on both sides"
    )


def _too_many(what: str, limits: Limits, field: str = "") -> LimitExceeded:
    return LimitExceeded(
        f"{what} more than limits.max_message_elements={limits.max_message_elements} elements; send fewer per call, "
        "or raise the limit",
        field=field,
    )


def num_fields(data: bytes, *, levels: int, most: int) -> int:
    """Count the fields of a serialised message on its first `levels` levels; stop just above `most`."""
    try:
        return _count(data, 0, len(data), levels, most)
    except IndexError:  # truncated inside a varint
        return 0


def _count(data: bytes, at: int, end: int, levels: int, most: int) -> int:
    num = 0
    while at < end and num <= most:
        num += 1
        tag = data[at]
        at += 1
        if tag >= 0x80:
            while data[at] >= 0x80:
                at += 1
            at += 1
        kind = tag & 7
        if kind == 2:  # length-delimited
            length = data[at]
            at += 1
            if length >= 0x80:
                length &= 0x7F
                shift = 7
                while (byte := data[at]) >= 0x80:
                    length |= (byte & 0x7F) << shift
                    shift += 7
                    at += 1
                length |= byte << shift
                at += 1
            if levels > 1 and length:
                num += _count(data, at, min(at + length, end), levels - 1, most - num)
            at += length
        elif kind == 0:  # varint
            while data[at] >= 0x80:
                at += 1
            at += 1
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
    return num


# -- bytes that are being received ---------------------------------------------------------------------------------


class Holder(Protocol):
    def displace(self, why: str) -> None:
        """Close the connection and discard what it buffers."""
        ...


class Buffers:
    """Bounds, in bytes and in time, what bare connections buffer of frames that are not processed yet.

    When the bytes run out, the connection that has been buffering for longest is closed.
    """

    def __init__(self, most_bytes: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._held: dict[Holder, tuple[int, float]] = {}
        """Bytes, and the deadline for their arrival; the holder that has been buffering for longest comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    def hold(self, holder: Holder, num_bytes: int, *, is_arriving: bool) -> None:
        """Record that `holder` buffers `num_bytes` now. While they arrive, the deadline counts from the first call."""
        before, until_s = self._held.get(holder, (0, 0.0))
        if not before:
            until_s = self._now_s() + FRAME_WITHIN_S
        self._held[holder] = (num_bytes, until_s if is_arriving else math.inf)
        self.num_bytes += num_bytes - before
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FRAME_WITHIN_S, self._check_deadlines)
        while self.num_bytes > self._most_bytes:
            self._displace(next(iter(self._held)), f"limits.max_receive_bytes={self._most_bytes} are in use; retry")

    def release(self, holder: Holder) -> None:
        """Record that `holder` buffers nothing any more."""
        num_bytes, _ = self._held.pop(holder, (0, 0.0))
        self.num_bytes -= num_bytes

    def _displace(self, holder: Holder, why: str) -> None:
        self.release(holder)
        holder.displace(why)

    def _check_deadlines(self) -> None:
        self._timer = None
        now_s = self._now_s()
        for holder in [holder for holder, (_, until_s) in self._held.items() if until_s <= now_s]:
            self._displace(holder, f"a frame did not arrive within {FRAME_WITHIN_S:g} s")
        if self._held:
            next_s = min(until_s for _, until_s in self._held.values()) - now_s
            self._timer = asyncio.get_running_loop().call_later(min(next_s, FRAME_WITHIN_S), self._check_deadlines)


class BodySlots:
    """Slots for unary calls whose bodies are being received.

    gRPC assembles bodies internally, so only their number can be bounded. A call that waits for a slot shortens the
    deadline of the oldest call that has one. Every unary call passes through here, so a call that finds a free slot
    pays only for a counter and a dict entry: a semaphore and a second dict cost 2 µs more. One timer enforces all
    deadlines: an `asyncio.timeout` per call would add a fifteenth to its cost.
    """

    def __init__(self, num: int) -> None:
        self._num_free = num
        self._queue: deque[asyncio.Future[None]] = deque()
        """Calls that wait for a slot. Slots are handed over, so none is free while a call waits."""
        self._since_s: dict[asyncio.Task[Any], float] = {}
        """Calls that have a slot, and since when; the oldest first."""
        self._deadlines_s: dict[asyncio.Task[Any], float] = {}
        """Deadlines of calls that wait for a slot, and shortened deadlines of calls that have one."""
        self._overdue: set[asyncio.Task[Any]] = set()
        self._is_watching = False

    async def receive(self, context: Context) -> bytes:
        """Return the single message of a unary call.

        Raises:
            StrataError: No message arrived in time.
        """
        call = asyncio.current_task()
        assert call is not None
        if not self._is_watching:
            self._watch()
        try:
            if self._num_free:
                self._num_free -= 1
            else:
                await self._wait_for_slot(call)
            self._since_s[call] = time.monotonic()
            try:
                body = await context.read()
            finally:
                del self._since_s[call]
                self._release_slot()
        except asyncio.CancelledError:
            if call not in self._overdue or call.uncancel() > 0:  # the caller cancelled it, too
                raise
            raise LimitExceeded("the body of the call did not arrive in time; retry the call") from None
        finally:
            self._deadlines_s.pop(call, None)
            self._overdue.discard(call)
        if not isinstance(body, bytes):
            raise InvalidArgument("the call ended without a message; send one")
        return body

    async def _wait_for_slot(self, call: asyncio.Task[Any]) -> None:
        now_s = time.monotonic()
        left_alone = (held for held in self._since_s if held not in self._deadlines_s and held not in self._overdue)
        if (oldest := next(left_alone, None)) is not None:
            self._deadlines_s[oldest] = max(self._since_s[oldest] + CONTENDED_WITHIN_S, now_s)
        self._deadlines_s[call] = now_s + BODY_WITHIN_S
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # it was handed over in the same turn
                self._release_slot()
            raise
        finally:
            del self._deadlines_s[call]

    def _release_slot(self) -> None:
        while self._queue:
            slot = self._queue.popleft()
            if not slot.done():  # else the call that waited for it was cancelled
                slot.set_result(None)
                return
        self._num_free += 1

    def _watch(self) -> None:
        self._is_watching = True
        asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check_deadlines)

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        deadlines_s = {call: since_s + BODY_WITHIN_S for call, since_s in self._since_s.items()} | self._deadlines_s
        for call, deadline_s in deadlines_s.items():
            if deadline_s <= now_s and call not in self._overdue:
                self._overdue.add(call)
                call.cancel()
        self._is_watching = bool(deadlines_s)
        if self._is_watching:
            self._watch()


# -- turns of the loop ---------------------------------------------------------------------------------------------


class Account:
    """The time that a caller has used in a `FairQueue`; callers with less go first."""

    __slots__ = ("used_s",)

    def __init__(self) -> None:
        self.used_s = 0.0
        """On the virtual clock of the queue, which advances only while it works."""


class FairQueue:
    """Runs large requests in pieces, one piece per turn of the event loop.

    The caller with the lowest used time goes first (start-time fair queueing). A caller waits for the current piece
    and for callers with as little use, not for everything that others have queued.
    """

    def __init__(self, *, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._queue: list[tuple[float, int, Iterator[None], Account]] = []
        """A heap, ordered by the time that the caller had used before."""
        self._numbers = itertools.count()
        self._used_s = 0.0
        """The virtual time: the used time of the next caller, and the minimum charged to a returning caller."""
        self._scheduled = False

    def add(self, work: Iterator[None], account: Account) -> None:
        """Run `work` to its end, up to the next `yield` per turn."""
        account.used_s = max(account.used_s, self._used_s)
        heapq.heappush(self._queue, (account.used_s, next(self._numbers), work, account))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    async def run(self, piece: Callable[[], T], account: Account) -> T:
        """Run `piece` when its turn comes, and return its result."""
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> Iterator[None]:
            if not answered.done():  # else the caller has disconnected
                try:
                    answered.set_result(piece())
                except Exception as error:  # noqa: BLE001 - passed to the caller
                    answered.set_exception(error)
            yield from ()

        self.add(work(), account)
        return await answered

    def _step(self) -> None:
        began_s = self._now_s()
        self._used_s, number, work, account = heapq.heappop(self._queue)
        while self._used_s < account.used_s:  # other work of the caller has run since this was queued
            item = (account.used_s, number, work, account)
            self._used_s, number, work, account = heapq.heappushpop(self._queue, item)
        is_over = True
        try:
            is_over = next(work, _OVER) is _OVER
        except Exception:
            # Process boundary: other callers wait in this queue.
            log.exception("unexpected error while processing a frame")
        took_s = self._now_s() - began_s
        account.used_s += took_s
        if not is_over:
            heapq.heappush(self._queue, (account.used_s, next(self._numbers), work, account))
        self._scheduled = bool(self._queue)
        if self._scheduled:
            pause_s = min(took_s, LONGEST_PAUSE_S) if took_s > PAUSE_AFTER_S else 0.0
            asyncio.get_running_loop().call_later(pause_s, self._step)


# -- callers -------------------------------------------------------------------------------------------------------


class Bucket:
    """A token bucket: `per_s` calls per second, with bursts of one second's worth."""

    __slots__ = ("_per_s", "_room", "_seen_s", "account", "num_calls")

    def __init__(self, per_s: float, now_s: float) -> None:
        self.account = Account()
        """The account of the same caller."""
        self.num_calls = 0
        """Its unary calls in progress."""
        self._per_s = per_s
        self._room = per_s
        self._seen_s = now_s

    def take(self, num: int, now_s: float) -> int:
        """Return how many of `num` calls are admitted, counted from the first."""
        self._room = min(self._per_s, self._room + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        taken = min(num, int(self._room))
        self._room -= taken
        return taken


class AdmissionControl:
    """Decides which calls may run, for unary calls and sessions alike."""

    def __init__(self, guard: Guard, limits: Limits, clock: Clock) -> None:
        self._guard = guard
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        """By machine; the most recent caller last."""
        self._num_calls = 0
        self._bodies = BodySlots(NUM_BODIES)
        self._readers_bodies = BodySlots(NUM_READERS_BODIES)
        self.fair_queue = FairQueue()
        """Where large requests wait for their turn, from all connections."""

    def role(self, context: Context) -> Role:
        """Return the role of the caller from the metadata of its call or stream; reject unknown callers."""
        if self._guard.is_open:
            return Role.ADMIN
        sent = {key: value for key, value in context.invocation_metadata() or () if key == METADATA_KEY}
        return self._guard.role_of(str(sent.get(METADATA_KEY, "")))

    def role_of(self, token: str) -> Role:
        """Return the role of a token that did not arrive as metadata."""
        return self._guard.role_of(bearer(token) if token else "")

    def enter(self, context: Context, method: Method) -> tuple[Role, Bucket]:
        """Admit a unary call before its body is read; return its role and the bucket of its machine. Pass the bucket to
        `leave` when the call is answered. Two methods, because a context manager takes twice as long.

        Raises:
            StrataError: The call is rejected.
        """
        role = self.role(context)
        require(role, method.role, method.name)
        peer = str(context.peer()).rpartition(":")[0]  # without the port: one machine is one peer
        bucket = self._buckets.pop(peer, None) or self.bucket()
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, self._clock.monotonic_s()):
            raise self.too_fast()
        most = self._limits.max_unary_calls
        if self._num_calls >= most or bucket.num_calls >= max(most // 2, 1):
            raise LimitExceeded(
                f"limits.max_unary_calls={most} are in progress, or half of them from this machine; wait for some, or "
                "use a session"
            )
        bucket.num_calls += 1
        self._num_calls += 1
        return role, bucket

    def leave(self, bucket: Bucket) -> None:
        """A call that was admitted has ended."""
        self._num_calls -= 1
        bucket.num_calls -= 1

    def body_slots(self, role: Role) -> BodySlots:
        """Return the slots for the bodies of unary calls of a role."""
        return self._readers_bodies if role <= Role.READER else self._bodies

    def check_size(self, role: Role, num_bytes: int) -> None:
        """Reject a unary request that is too large for the role of its caller."""
        most = receivable_bytes(role, self._limits.max_message_bytes)
        if num_bytes > most:
            raise LimitExceeded(f"the call has {num_bytes} bytes; the role {role.name.lower()} may send {most}")

    def bucket(self) -> Bucket:
        return Bucket(self._limits.max_calls_per_s, self._clock.monotonic_s())

    def too_fast(self) -> LimitExceeded:
        return LimitExceeded(
            f"more than limits.max_calls_per_s={self._limits.max_calls_per_s} calls per second; slow down"
        )
