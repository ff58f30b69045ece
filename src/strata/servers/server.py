"""`Server`: a `ServerState` behind a socket. A thread per worker; the state is used by one at a time.

Answers are sent after the lock is released, so that a worker that does not read cannot delay the others.

Checkpoints are cut without stopping the workers: when all of them save after step k, their next pushes say so, and wait
here until this server has saved step k. Pulls are answered meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from strata.coordinator.state.server_figures import ServerFigures
from strata.errors import InvalidArgument, StrataError
from strata.servers import protocol
from strata.servers.clocks import Push
from strata.servers.placement import Placement
from strata.servers.state import Fence
from strata.servers.table.half import to_half
from strata.transport.bulk import BulkServer, ConnectionLost

if TYPE_CHECKING:
    import ssl

    from numpy.typing import NDArray

    from strata.servers.protocol import Request
    from strata.servers.state import About, Frozen, ServerState
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows
    from strata.servers.table.snapshot import Saved
    from strata.transport.bulk import BulkConnection, Message
    from strata.transport.tokens import Guard, Role

MAX_MESSAGE_BYTES = 1 << 30
FETCH_ROWS = 1 << 16
"""Rows in an answer to a server that takes over."""
FETCH_TIMEOUT_S = 900.0
"""Time for all workers to push the step after which rows move."""


Notify = Callable[[protocol.Note, bytes], None]


class _Held(NamedTuple):
    """A push that waits for a checkpoint, or for the other workers."""

    connection: BulkConnection
    fence: Fence
    request: protocol.Push
    message: Message


class _Reply(NamedTuple):
    connection: BulkConnection
    answer: protocol.Answer
    buffers: list[Any]


class Server:
    """Serves workers until it is closed."""

    def __init__(
        self,
        state: ServerState,
        *addresses: str,
        guard: Guard,
        notify: Notify = lambda *_: None,
        announce: Callable[[], None] = lambda: None,
        context: ssl.SSLContext | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        is_copy: bool = False,
    ) -> None:
        """
        Args:
            notify: Receives the notes of workers, in a thread of their connection.
            announce: Called before a note is acknowledged.
            is_copy: It keeps a copy of another server's rows, which takes no part in checkpoints.

        Raises:
            ConfigError: The address cannot be bound, or other machines could reach it without a token and TLS.
        """
        self.state = state
        self._notify = notify
        self._announce = announce
        self._is_copy = is_copy
        self._lock = threading.Lock()
        self._advanced = threading.Condition(self._lock)
        self._saved = (0, 0)
        """The last checkpoint: its step, and its number among those of this step."""
        self._held: list[_Held] = []
        self._num_joined = 0
        self._connections: dict[int, BulkConnection] = {}
        """The connection over which each worker has joined last."""
        self._replies: list[_Reply] = []
        """Answers that the state has given, and that are not sent yet."""
        self.num_pulls = 0
        self.num_pushes = 0
        self.num_pulled_rows = 0
        self.num_pushed_rows = 0
        self._bulk: list[BulkServer] = []
        try:
            for each in addresses:
                self._bulk.append(BulkServer(each, self._serve, guard=guard, context=context, max_bytes=max_bytes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for each in self._bulk:
            each.close()

    @property
    def addresses(self) -> list[str]:
        """Where it listens, in the order in which the addresses were given."""
        return [each.address for each in self._bulk]

    @property
    def num_joined(self) -> int:
        """Workers that are connected."""
        return self._num_joined

    def figures(self) -> ServerFigures:
        """Return what was measured, without rates."""
        with self._lock:
            return self._figures()

    def _figures(self) -> ServerFigures:
        tables = list(self.state.tables.values())
        in_files = [table for table in tables if table.spec.file_bytes]
        return ServerFigures(
            rows=sum(map(len, tables)),
            bytes=sum(table.num_bytes for table in tables),
            evicted=sum(table.num_evicted for table in tables),
            staleness=self.state.clocks.spread,
            hits=sum(table.num_hits for table in in_files) if in_files else None,
            misses=sum(table.num_misses for table in in_files) if in_files else None,
        )

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        """Wait until all workers have pushed this step. No later push is applied if they all save after it.

        Raises:
            StrataError: They have not in time; the message names them.
        """
        with self._advanced:
            self._wait_for_step(step, timeout_s)

    def _wait_for_step(self, step: int, timeout_s: float) -> None:
        if not self._advanced.wait_for(lambda: self.state.step >= step, timeout_s):
            behind = ", ".join(map(str, self.state.clocks.behind()))
            raise StrataError(
                f"step {step} is not complete: rank {behind} has not pushed it within {timeout_s:g} s, and is at "
                f"step {self.state.step}"
            )

    def receive(self, name: str, rows: Saved, about: About) -> None:
        """Add rows that this server owns from now on; see `ServerState.receive`."""
        with self._lock:
            self.state.receive(name, rows, about)

    def keep_only(self, is_own: Callable[[Keys], NDArray[np.bool_]], name: str = "") -> int:
        """Forget rows that other servers own now; see `ServerState.keep_only`."""
        with self._lock:
            return self.state.keep_only(is_own, name)

    def saved(self, step: int) -> None:
        """A checkpoint of this step has been copied: apply the pushes that wait for it."""
        with self._advanced:
            self._saved = (step, self._saved[1] + 1 if step == self._saved[0] else 1)
            self._push_held()
            replies = self._taken_replies()
        for reply in replies:
            self._send(reply)

    def _serve(self, connection: BulkConnection, _role: Role) -> None:
        fence: Fence | None = None
        fetching = _Fetching()
        try:
            while (message := connection.receive()) is not None:
                request = protocol.decode_request(message)
                if isinstance(request, protocol.Fetch):
                    self._send(self._fetched(connection, request, fetching))
                    continue
                with self._advanced:
                    try:
                        fence = self._act(connection, fence, request, message)
                    except StrataError as error:
                        self._replies.append(_Reply(connection, protocol.failed(request.id, error), []))
                    replies = self._taken_replies()
                if isinstance(request, protocol.Note):
                    self._announce()
                for reply in replies:
                    self._send(reply)
                if isinstance(request, protocol.Note):  # answered before it may end this server
                    self._notify(request, b"".join(each.tobytes() for each in message.buffers))
        finally:
            if fence is not None:
                with self._lock:
                    self._num_joined -= 1
                    self._held = [each for each in self._held if each.connection is not connection]
                    if self._connections.get(fence.rank) is connection:  # otherwise the worker has joined anew
                        del self._connections[fence.rank]
                        self.state.leave(fence)

    def _fetched(self, connection: BulkConnection, request: protocol.Fetch, fetching: _Fetching) -> _Reply:
        """Return the next rows of a table, as many as fit into a message."""
        try:
            with self._advanced:
                self.state.width_of(request.table)
                self._wait_for_step(request.step, FETCH_TIMEOUT_S)
                frozen = fetching.update(self.state, request)
        except StrataError as error:
            return _Reply(connection, protocol.failed(request.id, error), [])
        rows, about = frozen.rows[request.table], frozen.about[request.table]
        stop = request.start + FETCH_ROWS
        sent = [np.ascontiguousarray(each[request.start : stop]) for each in rows]
        if about.seen is not None and not request.start:
            sent.append(about.seen)
        answer = protocol.Answer(
            request.id,
            clocks=frozen.clocks,
            num_rows=len(rows.keys),
            num_updates=about.num_updates,
            rate=about.rate,
            is_whole=request.table in frozen.whole,
        )
        return _Reply(connection, answer, sent)

    def _taken_replies(self) -> list[_Reply]:
        replies, self._replies = self._replies, []
        return replies

    def _send(self, reply: _Reply) -> None:
        """Send an answer, perhaps to another worker than the one of this thread, whose loss its own thread notices."""
        try:
            reply.connection.send(protocol.encode(reply.answer), reply.buffers)
        except ConnectionLost:
            reply.connection.close()

    def _act(self, connection: BulkConnection, fence: Fence | None, request: Request, message: Message) -> Fence | None:
        """Carry out a request; return the fence of this connection."""
        if isinstance(request, protocol.Join):
            joined = Fence(request.rank, request.attempt, request.incarnation)
            before = self.state.num_lost
            clock = self.state.join(joined, request.clock)
            self._advanced.notify_all()  # its clock may have leapt to the step that is waited for
            self._saved = max(self._saved, request.saved)
            self._num_joined += fence is None
            self._connections[joined.rank] = connection
            fence = joined
            answer = protocol.Answer(request.id, clock, self.state.num_lost - before)
            self._replies.append(_Reply(connection, answer, []))
        elif fence is None:
            raise InvalidArgument("the first message of a worker must be a join")
        elif isinstance(request, protocol.Pull):
            self._pull(connection, fence, request, message)
        elif isinstance(request, protocol.Push):
            self._push_or_hold(_Held(connection, fence, request, message))
        elif isinstance(request, protocol.Measure):
            encoded = msgspec.json.encode(self._figures())
            self._replies.append(_Reply(connection, protocol.Answer(request.id), [np.frombuffer(encoded, np.uint8)]))
        else:
            self._replies.append(_Reply(connection, protocol.Answer(request.id), []))
        return fence

    def _push_held(self) -> None:
        held, self._held = self._held, []
        for each in held:
            self._push_or_hold(each)

    def _push_or_hold(self, push: _Held) -> None:
        waits_for_save = push.request.saved > self._saved and not self._is_copy
        if waits_for_save or not self.state.clocks.may_push(push.request.clock):
            self._held.append(push)
            return
        try:
            self._push(push.fence, push.request, push.message)
            answer = protocol.Answer(push.request.id)
        except StrataError as error:
            answer = protocol.failed(push.request.id, error)
        self._replies.append(_Reply(push.connection, answer, []))
        self._advanced.notify_all()
        if self._held:  # perhaps for this push
            self._push_held()

    def _pull(self, connection: BulkConnection, fence: Fence, request: protocol.Pull, message: Message) -> None:
        num = len(request.tables)
        if len(message.buffers) != num * (2 if request.has_room else 1):
            raise InvalidArgument(f"a pull from {num} tables has {len(message.buffers)} buffers", field="buffers")
        wanted = dict(zip(request.tables, map(protocol.keys_in, message.buffers[:num]), strict=True))
        room: dict[str, Rows] = {}
        for name, buffer in zip(request.tables, message.buffers[num:], strict=False):
            room[name] = protocol.rows_in(buffer, len(wanted[name]), self.state.width_of(name))
        self.num_pulls += 1
        self.num_pulled_rows += sum(map(len, wanted.values()))

        def answer(rows: dict[str, Rows]) -> None:
            sent: list[Any] = [] if request.has_room else [rows[name] for name in request.tables]
            if request.is_half:
                sent = [to_half(each) for each in sent]
            self._replies.append(_Reply(connection, protocol.Answer(request.id), sent))

        self.state.pull(fence, request.clock, wanted, answer, room)

    def _push(self, fence: Fence, request: protocol.Push, message: Message) -> None:
        if len(message.buffers) != 2 * len(request.tables):
            raise InvalidArgument(
                f"a push to {len(request.tables)} tables has {len(message.buffers)} buffers", field="buffers"
            )
        self.num_pushes += 1
        gradients = {}
        for number, name in enumerate(request.tables):
            keys = protocol.keys_in(message.buffers[2 * number])
            rows = protocol.rows_in(message.buffers[2 * number + 1], len(keys), self.state.width_of(name))
            # A round keeps the arrays until all workers have pushed; the worker reuses its memory after the answer.
            gradients[name] = Push(keys.copy(), rows.copy()) if self.state.clocks.staleness == 0 else Push(keys, rows)
            self.num_pushed_rows += len(keys)
        rates = dict(zip(request.tables, request.rates, strict=False))
        self.state.push(fence, request.clock, gradients, rates)


class _Fetching:
    """What one connection fetches: a copy of rows, at a step."""

    def __init__(self) -> None:
        self.frozen: Frozen | None = None
        self._step = -1

    def update(self, state: ServerState, request: protocol.Fetch) -> Frozen:
        """Return the rows at the step of a request; after an earlier step, only those that changed."""
        if self.frozen is None or request.step != self._step:
            since = {} if self.frozen is None else self.frozen.moments
            self.frozen = None  # its memory is not needed any more
            self.frozen, self._step = state.frozen(_owned_by(request), since), request.step
        return self.frozen


def _owned_by(request: protocol.Fetch) -> Callable[[Keys], NDArray[np.bool_]] | None:
    if not request.num_servers:
        return None
    placement = Placement.of(request.num_servers)

    def is_own(keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = placement.owners_of(keys) == request.server
        return found

    return is_own
