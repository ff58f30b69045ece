"""Bounds what a request may cost before it is decoded: bytes that are being received, elements, and turns of the loop.

A few bytes on the wire can become a thousand times as much work, and half a request holds a buffer for as long as its
sender likes. Everything here is shared by all callers of a process; docs/design/hardening.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from strata.errors import InvalidArgument, LimitExceeded
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
"""A request or frame up to this size is carried out at once, and needs no look at its elements. Readers, and whoever
has not said hello, may send nothing larger."""
UNSCANNED_BYTES = 1 << 20
"""A request up to this size is decoded without a look at the wire: 25 ms and 32 MB in the worst case."""
BODY_WITHIN_S = 10.0
"""How long the body of a unary call may take."""
FRAME_WITHIN_S = 10.0
"""How long a frame may take from its first byte to its last."""
LOOK_S = 0.1
"""How often it is checked which bodies are overdue."""
PATIENCE_S = 0.5
"""How long it may take when others wait for its place."""
NUM_BODIES = 64
"""Unary calls whose bodies are received at once; gRPC may hold `max_grpc_message_bytes` of each."""
NUM_READERS_BODIES = 16
"""The same, of readers: they have places of their own, so that they take none from workers."""
PAUSE_AFTER_S = 0.02
"""A piece of work that took longer is followed by a pause as long as itself."""
LONGEST_PAUSE_S = 1.0
MAX_PEERS = 10_000
"""Peers whose rate of unary calls is remembered; the longest silent are forgotten first."""


def receivable_bytes(role: Role, max_bytes: int) -> int:
    """The largest frame or request that a role may send, where the carrier takes `max_bytes`."""
    return min(SMALL_BYTES, max_bytes) if role <= Role.READER else max_bytes


# -- elements --------------------------------------------------------------------------------------------------------


def check_wire(data: bytes, *, levels: int, limits: Limits) -> None:
    """Refuses a message that would hold too many elements when decoded.

    `levels` is how deep its repeated fields lie. What is not protobuf passes: decoding refuses it.
    """
    if len(data) <= UNSCANNED_BYTES:
        return
    most = limits.max_message_elements
    if num_fields(data, levels=levels, most=most) > most:
        raise _too_many(f"the message of {len(data)} bytes holds", limits)


def check_repeated(names: Sequence[str], request: Message, limits: Limits) -> None:
    """Refuses a decoded request with too many elements, before anything looks at each of them."""
    for name in names:
        num = len(getattr(request, name))
        if num > limits.max_message_elements:
            raise _too_many(f"{name} holds {num} and so", limits, field=name)


def _too_many(what: str, limits: Limits, field: str = "") -> LimitExceeded:
    return LimitExceeded(
        f"{what} more than limits.max_message_elements={limits.max_message_elements} elements; send fewer in one call, "
        "or raise it",
        field=field,
    )


def num_fields(data: bytes, *, levels: int, most: int) -> int:
    """How many fields a serialised message has on its first `levels` levels; stops counting just above `most`."""
    try:
        return _count(data, 0, len(data), levels, most)
    except IndexError:  # cut off in the middle of a number
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
        if kind == 2:  # a length, and as many bytes
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
        elif kind == 0:  # a number of as many bytes as it takes
            while data[at] >= 0x80:
                at += 1
            at += 1
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
    return num


# -- bytes that are being received -----------------------------------------------------------------------------------


class Holder(Protocol):
    def displace(self, why: str) -> None:
        """Ends, and lets go of what it holds."""
        ...


class Buffers:
    """What bare connections hold of frames that are not carried out yet: bounded in bytes, and in time.

    When the bytes run out, the connection that has held some for longest is displaced.
    """

    def __init__(self, most_bytes: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._held: dict[Holder, tuple[int, float]] = {}
        """Bytes, and when they have been arriving for too long; who has held some for longest comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    def hold(self, holder: Holder, num_bytes: int, *, is_arriving: bool) -> None:
        """`holder` has so many bytes now. While they arrive, their time counts from the first call on."""
        before, until_s = self._held.get(holder, (0, 0.0))
        if not before:
            until_s = self._now_s() + FRAME_WITHIN_S
        self._held[holder] = (num_bytes, until_s if is_arriving else math.inf)
        self.num_bytes += num_bytes - before
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FRAME_WITHIN_S, self._look)
        while self.num_bytes > self._most_bytes:
            self._displace(next(iter(self._held)), f"limits.max_receive_bytes={self._most_bytes} are in use; try again")

    def release(self, holder: Holder) -> None:
        """It holds nothing any more."""
        num_bytes, _ = self._held.pop(holder, (0, 0.0))
        self.num_bytes -= num_bytes

    def _displace(self, holder: Holder, why: str) -> None:
        self.release(holder)
        holder.displace(why)

    def _look(self) -> None:
        self._timer = None
        now_s = self._now_s()
        for holder in [holder for holder, (_, until_s) in self._held.items() if until_s <= now_s]:
            self._displace(holder, f"a frame took longer than {FRAME_WITHIN_S:g} s to arrive")
        if self._held:
            next_s = min(until_s for _, until_s in self._held.values()) - now_s
            self._timer = asyncio.get_running_loop().call_later(min(next_s, FRAME_WITHIN_S), self._look)


class BodySlots:
    """Places for unary calls whose bodies are being received.

    gRPC assembles a body where we cannot see it, so the number of them is bounded. Whoever waits for a place hurries
    the one that has been under way for longest. One timer looks after all deadlines: `asyncio.timeout` would cost every
    call a timer of its own, a fifteenth of what it costs in all.
    """

    def __init__(self, num: int) -> None:
        self._places = asyncio.Semaphore(num)
        self._arriving: dict[asyncio.Task[Any], float] = {}
        """Calls that have a place, and since when; the oldest first. Those that were hurried are not in it."""
        self._deadlines_s: dict[asyncio.Task[Any], float] = {}
        """Of all calls that wait for a place or for their body."""
        self._overdue: set[asyncio.Task[Any]] = set()
        self._is_watching = False

    async def receive(self, context: Context) -> bytes:
        """The one message of a unary call.

        Raises:
            StrataError: It did not come, or not in time.
        """
        call, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert call is not None
        if self._places.locked():
            self._hurry(loop.time())
        self._deadlines_s[call] = loop.time() + BODY_WITHIN_S
        if not self._is_watching:
            self._is_watching = True
            loop.call_later(LOOK_S, self._look, loop)
        try:
            async with self._places:
                self._arriving[call] = loop.time()
                body = await context.read()
        except asyncio.CancelledError:
            if call not in self._overdue or call.uncancel() > 0:  # it was cancelled by another, too
                raise
            raise LimitExceeded("the body of the call did not arrive in time; send it again") from None
        finally:
            self._arriving.pop(call, None)
            del self._deadlines_s[call]
            self._overdue.discard(call)
        if not isinstance(body, bytes):
            raise InvalidArgument("the call ended without a message; send one")
        return body

    def _hurry(self, now_s: float) -> None:
        call = next((call for call in self._arriving if call not in self._overdue), None)
        if call is not None:
            self._deadlines_s[call] = max(self._arriving.pop(call) + PATIENCE_S, now_s)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for call, deadline_s in self._deadlines_s.items():
            if deadline_s <= now_s and call not in self._overdue:
                self._overdue.add(call)
                call.cancel()
        self._is_watching = bool(self._deadlines_s)
        if self._is_watching:
            loop.call_later(LOOK_S, self._look, loop)


# -- turns of the loop -----------------------------------------------------------------------------------------------


class Account:
    """How much of the lane a caller has used, so that those who use little come first."""

    __slots__ = ("used_s",)

    def __init__(self) -> None:
        self.used_s = 0.0
        """On the lane's clock, which moves with its work and stands still without."""


class FairQueue:
    """Large work, cut into pieces: one piece in a turn of the event loop.

    Whoever has used it least comes first (start-time fair queueing): a caller waits for the piece under way and for
    those who use it as little, not for all that others have put there.
    """

    def __init__(self, *, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._queue: list[tuple[float, int, Iterator[None], Account]] = []
        """A heap, by what its caller had used before."""
        self._numbers = itertools.count()
        self._used_s = 0.0
        """By whoever comes next: what a caller is taken to have used who has not been here for a while."""
        self._scheduled = False

    def add(self, work: Iterator[None], account: Account) -> None:
        """Carries out `work` to its end, up to its next `yield` at a time."""
        account.used_s = max(account.used_s, self._used_s)
        heapq.heappush(self._queue, (account.used_s, next(self._numbers), work, account))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    async def run(self, piece: Callable[[], T], account: Account) -> T:
        """What `piece` returns or raises, when it is its turn."""
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> Iterator[None]:
            if not answered.done():  # else its caller has hung up
                try:
                    answered.set_result(piece())
                except Exception as error:  # noqa: BLE001 - whoever asked hears it
                    answered.set_exception(error)
            yield from ()

        self.add(work(), account)
        return await answered

    def _step(self) -> None:
        began_s = self._now_s()
        self._used_s, number, work, account = heapq.heappop(self._queue)
        while self._used_s < account.used_s:  # by other work of the same caller, since this was put here
            item = (account.used_s, number, work, account)
            self._used_s, number, work, account = heapq.heappushpop(self._queue, item)
        is_over = True
        try:
            is_over = next(work, _OVER) is _OVER
        except Exception:
            # The edge of the process: others wait in this lane.
            log.exception("a frame failed in a way that was not foreseen")
        took_s = self._now_s() - began_s
        account.used_s += took_s
        if not is_over:
            heapq.heappush(self._queue, (account.used_s, next(self._numbers), work, account))
        self._scheduled = bool(self._queue)
        if self._scheduled:
            pause_s = min(took_s, LONGEST_PAUSE_S) if took_s > PAUSE_AFTER_S else 0.0
            asyncio.get_running_loop().call_later(pause_s, self._step)


# -- callers --------------------------------------------------------------------------------------------------------


class Bucket:
    """So many calls a second, and at most one second's worth at once."""

    __slots__ = ("_per_s", "_room", "_seen_s", "account")

    def __init__(self, per_s: float, now_s: float) -> None:
        self.account = Account()
        """Of the same caller."""
        self._per_s = per_s
        self._room = per_s
        self._seen_s = now_s

    def take(self, num: int, now_s: float) -> int:
        """How many of `num` calls may go on, the first of them."""
        self._room = min(self._per_s, self._room + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        taken = min(num, int(self._room))
        self._room -= taken
        return taken


class AdmissionControl:
    def __init__(self, guard: Guard, limits: Limits, clock: Clock) -> None:
        self._guard = guard
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._calls: dict[str, int] = {}
        """Peer → unary calls under way."""
        self._num_calls = 0
        self._bodies = BodySlots(NUM_BODIES)
        self._readers_bodies = BodySlots(NUM_READERS_BODIES)
        self.fair_queue = FairQueue()
        """Where large requests wait for their turn, through whichever connection they came."""

    def role(self, context: Context) -> Role:
        """The role of whoever opened this call or stream, from its metadata; refuses strangers."""
        if self._guard.is_open:
            return Role.ADMIN
        sent = {key: value for key, value in context.invocation_metadata() or () if key == METADATA_KEY}
        return self._guard.role_of(str(sent.get(METADATA_KEY, "")))

    def role_of(self, token: str) -> Role:
        """The same, of a token that came by itself."""
        return self._guard.role_of(bearer(token) if token else "")

    @contextlib.contextmanager
    def call(self, context: Context, method: Method) -> Iterator[tuple[Role, Account]]:
        """A unary call, from its headers to its answer: who makes it. Its body has not been read yet.

        Raises:
            StrataError: Why it is refused.
        """
        role = self.role(context)
        require(role, method.role, method.name)
        peer = str(context.peer()).rpartition(":")[0]  # without the port: one machine is one peer
        account = self._admit(peer)
        self._calls[peer] = self._calls.get(peer, 0) + 1
        self._num_calls += 1
        try:
            yield role, account
        finally:
            self._num_calls -= 1
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def _admit(self, peer: str) -> Account:
        bucket = self._buckets.pop(peer, None) or self.bucket()
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        if not bucket.take(1, self._clock.monotonic_s()):
            raise self.too_fast()
        most = self._limits.max_unary_calls
        if self._num_calls >= most or self._calls.get(peer, 0) >= max(most // 2, 1):
            raise LimitExceeded(
                f"limits.max_unary_calls={most} are under way, or half of them from this machine; wait for some, or "
                "use a session"
            )
        return bucket.account

    def bodies(self, role: Role) -> BodySlots:
        """Where the bodies of a role's unary calls are received."""
        return self._readers_bodies if role <= Role.READER else self._bodies

    def check_size(self, role: Role, num_bytes: int) -> None:
        """Refuses a unary request that is too large for its caller's role."""
        most = receivable_bytes(role, self._limits.max_message_bytes)
        if num_bytes > most:
            raise LimitExceeded(f"the call holds {num_bytes} bytes; the role {role.name.lower()} may send {most}")

    def bucket(self) -> Bucket:
        return Bucket(self._limits.max_calls_per_s, self._clock.monotonic_s())

    def too_fast(self) -> LimitExceeded:
        return LimitExceeded(
            f"more than limits.max_calls_per_s={self._limits.max_calls_per_s} calls a second; slow down"
        )
