"""The connection of a worker to one server: requests in order, rows and gradients in shared memory, pushes that are
kept until they are acknowledged.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from strata.errors import StrataError
from strata.servers import protocol
from strata.servers.server import MAX_MESSAGE_BYTES
from strata.servers.table.half import to_half
from strata.transport.bulk import ConnectionLost, connect
from strata.transport.slab import Slab

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strata.servers.protocol import Request
    from strata.servers.state import Fence
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows
    from strata.transport.bulk import BulkConnection, Message

    Own: TypeAlias = NDArray[np.int64] | slice
    """Positions of the keys of one server among those of a request."""

log = logging.getLogger(__name__)

REGION_BYTES = 32 << 20
"""Shared memory of a message; pages that are never written take none. A larger message is sent through the socket."""
NUM_PULLS, NUM_PUSHES = 5, 2
"""Messages in shared memory at a time; each has a region of the slab. The rows of a step stay in theirs while those of
the next step arrive, and until the server has read the gradients of these rows, which are written beside them. One
region is left for what is pulled in between."""
MAX_UNACKED = 4
"""Pushes that a server may leave unacknowledged, as it does while it waits for a checkpoint."""
ACK_POLL_S = 0.5
ACK_TIMEOUT_S = 900.0
"""Time for a server to acknowledge a push, which may wait for a checkpoint of all workers."""
JOIN_TIMEOUT_S = 60.0
"""Time for a server to admit a worker that joins again."""
SLOW_S = 30.0
"""Time without an answer after which a worker logs the name of the server for which it waits."""
READ_WITHIN_S = 900.0
"""Time in which a server must have read a push out of shared memory."""
_ALIGNMENT = 64


class NotAnswered(ConnectionLost):
    """The connection to a server is open, but it has not answered in time."""


class Part:
    """The answer of one server to a pull. It holds a region of shared memory as long as it exists."""

    def __init__(
        self,
        server: str,
        answer: Future[Any],
        region: _Region | None = None,
        room: list[NDArray[np.uint8]] | None = None,
        others: Sequence[_Region] = (),
    ) -> None:
        """`room`: memory in the region for the rows of each table. It is followed by as much for their gradients."""
        self._server = server
        self.answer = answer
        self._region = region
        self._room = room
        self._others = others

    def buffers(self, timeout_s: float | None) -> list[NDArray[np.uint8]]:
        _await(self.answer, self._server, "answered a pull", timeout_s)
        _, sent = self.answer.result()
        return sent if self._room is None else self._room

    def lasting(self, rows: Rows) -> Rows:
        """Return rows that outlive this object. They stay in shared memory, unless pulls would run out of it."""
        if self._region is None:
            return rows
        if not any(each.is_free for each in self._others):
            return rows.copy()
        gradients = self._region.take_if_it_fits(rows.nbytes)
        beside = None if gradients is None else _Lent(gradients.view(np.float32).reshape(rows.shape), self)
        return np.asarray(_Lent(rows, self, None if beside is None else np.asarray(beside)))

    def __del__(self) -> None:
        if self._region is not None:
            self._region.release()


class _Lent:
    """The base of an array in shared memory: arrays and tensors that use the memory keep its region held."""

    def __init__(self, rows: Rows, part: Part, beside: Rows | None = None) -> None:
        self.__array_interface__ = rows.__array_interface__
        self._kept = rows, part
        self.beside = beside


def room_beside(rows: Rows) -> Rows | None:
    """Return memory for the gradients of rows that were pulled. They can be pushed from there without a copy.

    None: these rows are not in shared memory, or there is no room for as much again.
    """
    base: object = rows.base
    return base.beside if isinstance(base, _Lent) else None


class Link:
    """The connection to one server; a thread receives its answers."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        token: str,
        context: ssl.SSLContext | None,
        region_bytes: int,
        num_pulls: int,
        is_half: bool,
    ) -> None:
        self.name = name
        self.is_patient = False
        self.acked = 0
        """Steps that the server has acknowledged."""
        self._unacked: deque[Unacked] = deque()
        self._region_bytes = region_bytes // _ALIGNMENT * _ALIGNMENT
        self._num_pulls = num_pulls
        self._wants_half = is_half
        self._open(address, token=token, context=context)

    def _open(self, address: str, *, token: str, context: ssl.SSLContext | None) -> None:
        name, size, num_regions = self.name, self._region_bytes, self._num_pulls + NUM_PUSHES
        try:
            self._connection = connect(address, token=token, context=context, max_bytes=MAX_MESSAGE_BYTES)
        except ConnectionLost as error:
            raise ConnectionLost(f"parameter server {name}: {error.message}") from error
        self._is_half = self._wants_half and not self._connection.can_share
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self.lost: ConnectionLost | None = None
        self._slab = Slab.create(size * num_regions) if size and self._connection.can_share else None
        self._regions: dict[str, list[_Region]] = {"pull": [], "push": []}
        if self._slab is not None:
            try:
                self._connection.share(self._slab)
            except ConnectionLost:
                self._connection.close()
                self._slab.close()
                raise
            regions = [_Region(self._slab.view(number * size, size)) for number in range(num_regions)]
            self._regions = {"pull": regions[: self._num_pulls], "push": regions[self._num_pulls :]}
        self._thread = threading.Thread(
            target=self._receive, args=(self._connection,), name=f"strata-pull-{name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._connection.close()
        self._thread.join(10)
        if self._slab is not None:
            self._slab.close()

    def reconnect(
        self, address: str, fence: Fence, *, token: str, context: ssl.SSLContext | None, saved: tuple[int, int]
    ) -> int:
        self.close()
        self._open(address, token=token, context=context)
        try:
            known = min([self.acked, *(each.request.clock - 1 for each in list(self._unacked)[:1])])
            join = self.ask(protocol.Join(0, *fence, clock=known, saved=saved))
            answer: protocol.Answer = join.result(JOIN_TIMEOUT_S)[0]
        except TimeoutError:
            error = ConnectionLost(f"parameter server {self.name} has not admitted this worker in {JOIN_TIMEOUT_S:g} s")
            self._fail(self._connection, error)
            raise error from None
        for each in list(self._unacked):
            if each.request.clock <= answer.clock:
                self._acknowledge(each, None)
            else:
                each.repeat(self)
                self._send_push(each)
        return answer.num_lost

    @property
    def num_pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    def ask(self, request: Request, buffers: list[Any] | None = None) -> Future[Any]:
        """Send a request; the result is the answer and its buffers."""
        request.id = next(self._ids)
        future: Future[Any] = Future()
        with self._lock:
            if self.lost is not None:
                future.set_exception(self.lost)
                return future
            self._pending[request.id] = future
        try:
            self._connection.send(protocol.encode(request), buffers or [])
        except ConnectionLost as error:
            self._fail(self._connection, error)
        return future

    def pull(self, clock: int, tables: list[str], keys: list[Keys], shapes: list[tuple[int, int]]) -> Part:
        num_bytes = sum(each.nbytes for each in keys) + sum(4 * num * width for num, width in shapes)
        region = next((each for each in self._regions["pull"] if each.is_free and each.fits(num_bytes)), None)
        if region is None:
            return Part(self.name, self.ask(protocol.Pull(0, clock, tables, is_half=self._is_half), list(keys)))
        region.begin()
        given = [region.put(each) for each in keys]
        room = [region.take(4 * num * width) for num, width in shapes]
        region.user = self.ask(protocol.Pull(0, clock, tables, has_room=True), [*given, *room])
        return Part(self.name, region.user, region, room, self._regions["pull"])

    def push(self, push: Unacked) -> None:
        """Send a push, unless the server is lost: then `reconnect` sends it."""
        self._unacked.append(push)
        if self.lost is None or not self.is_patient:
            self._send_push(push)
        deadline_s = time.monotonic() + ACK_TIMEOUT_S
        while len(self._unacked) > MAX_UNACKED:
            with contextlib.suppress(IndexError):  # it has been acknowledged in between
                oldest = self._unacked[0]
                if any(link.lost is not None for link in oldest.links):
                    return  # the next call joins the lost one again
                wait([oldest.done], ACK_POLL_S)
            if time.monotonic() > deadline_s:
                raise NotAnswered(
                    f"parameter server {self.name} has not acknowledged a push within {ACK_TIMEOUT_S:g} s; it may be "
                    "stopped, or waiting for a worker that makes no steps"
                )

    def _send_push(self, push: Unacked) -> None:
        sent = self._sent_push(push.request, push.parts)
        sent.add_done_callback(lambda answer: self._acknowledge(push, answer.exception()))

    def _acknowledge(self, push: Unacked, error: BaseException | None) -> None:
        if isinstance(error, ConnectionLost) and self.is_patient:
            return
        if error is None:
            self.acked = max(self.acked, push.request.clock)
        if push.answered(self, error):
            for link in push.links:
                link.forget(push)

    def forget(self, push: Unacked) -> None:
        with contextlib.suppress(ValueError):  # acknowledged before, on the lost connection
            self._unacked.remove(push)

    def _sent_push(self, request: protocol.Push, parts: list[tuple[Any, Own]]) -> Future[Any]:
        copied = [(array, own) for array, own in parts if not self._is_placed(array, own)]
        num_bytes = sum(a.nbytes if isinstance(own, slice) else len(own) * a[:1].nbytes for a, own in copied)
        regions = self._regions["push"]
        if not regions or not regions[0].fits(num_bytes):
            return self.ask(request, [self._on_the_wire(array[own]) for array, own in parts])
        region = regions.pop(0)
        regions.append(region)
        if region.user is not None:  # until the server has read what it holds
            _await(region.user, self.name, "read a push", READ_WITHIN_S)
        region.begin()
        placed = [array if self._is_placed(array, own) else region.gather(array, own) for array, own in parts]
        region.user = self.ask(request, placed)
        region.release()
        return region.user

    def _is_placed(self, array: NDArray[Any], own: Own) -> bool:
        """Whether an array is in shared memory already. `Unacked` keeps it there until the server has read it."""
        return self._slab is not None and isinstance(own, slice) and self._slab.offset_of(array) is not None

    def _on_the_wire(self, array: NDArray[Any]) -> NDArray[Any]:
        return to_half(array) if self._is_half and array.dtype == np.float32 else array

    def _receive(self, connection: BulkConnection) -> None:
        try:
            while (message := connection.receive()) is not None:
                self._answered(message)
            self._fail(connection, ConnectionLost("the server ended, or its machine does not answer"))
        except StrataError as error:
            self._fail(connection, error)

    def _answered(self, message: Message) -> None:
        answer = protocol.decode_answer(message)
        with self._lock:
            future = self._pending.pop(answer.id, None)
        if future is None:
            return
        if answer.error:
            future.set_exception(protocol.error_of(answer))
        else:
            future.set_result((answer, message.buffers))

    def _fail(self, connection: BulkConnection, error: StrataError) -> None:
        lost = ConnectionLost(f"parameter server {self.name}: {error.message}")
        with self._lock:
            if connection is not self._connection:  # it has been replaced
                return
            self.lost = self.lost or lost
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(lost)


class Unacked:
    """A push that a server, or the one that keeps its copy, has not acknowledged."""

    def __init__(self, request: protocol.Push, parts: list[tuple[Any, Own]], links: Sequence[Link]) -> None:
        self.request = request
        self.parts = parts
        """Arrays, and the rows of them that belong to the server."""
        self.links = tuple(links)
        self.done: Future[None] = Future()
        self._missing = set(links)
        self._lock = threading.Lock()

    def answered(self, link: Link, error: BaseException | None) -> bool:
        """Note the answer to one link; return whether the push is complete."""
        with self._lock:
            self._missing.discard(link)
            if self.done.done() or (self._missing and error is None):
                return self.done.done()
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
        return True

    def repeat(self, link: Link) -> None:
        """It is sent to this link again."""
        with self._lock:
            self._missing.add(link)


class _Region:
    """A part of a slab that one message uses at a time."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._used = 0
        self._is_held = False
        self.user: Future[Any] | None = None
        """The answer until which the server uses the memory."""

    @property
    def is_free(self) -> bool:
        return not self._is_held and (self.user is None or self.user.done())

    def fits(self, num_bytes: int) -> bool:
        return num_bytes + _ALIGNMENT * 2 * protocol.MAX_TABLES <= self._memory.nbytes

    def begin(self) -> None:
        """Hold the memory for a new message."""
        self._is_held = True
        self._used = 0

    def release(self) -> None:
        """Let the memory be used again, once the server has answered."""
        self._is_held = False

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start : start + num_bytes]

    def take_if_it_fits(self, num_bytes: int) -> NDArray[np.uint8] | None:
        return self.take(num_bytes) if self._used + num_bytes <= self._memory.nbytes else None

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        place = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        place[...] = array
        return place

    def gather(self, array: NDArray[Any], rows: Own) -> NDArray[Any]:
        """Copy some rows of an array, without a copy in between."""
        if isinstance(rows, slice):
            return self.put(array)
        shape = (len(rows), *array.shape[1:])
        place = self.take(array[:1].nbytes * len(rows)).view(array.dtype).reshape(shape)
        np.take(array, rows, axis=0, out=place, mode="clip")
        return place


def _await(answer: Future[Any], server: str, what: str, timeout_s: float | None) -> None:
    """Wait for an answer, which may be an error, and log the name of a server that takes long.

    Raises:
        NotAnswered: It has not answered in time.
    """
    first_s = SLOW_S if timeout_s is None else min(timeout_s, SLOW_S)
    is_done = bool(wait([answer], first_s).done)
    if not is_done and first_s != timeout_s:
        log.warning("parameter server %s has not %s for %g s; still waiting", server, what, SLOW_S)
        is_done = bool(wait([answer], None if timeout_s is None else timeout_s - first_s).done)
    if not is_done:
        raise NotAnswered(
            f"parameter server {server} has not {what} within {timeout_s:g} s; it may be stopped, or waiting for a "
            "worker that makes no steps"
        )
