"""`Server`: a `ServerState` behind a socket. A thread per worker; the state is used by one at a time.

Answers are sent after the lock is released, so that a worker that does not read cannot delay the others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.errors import InvalidArgument, StrataError
from strata.servers import protocol
from strata.servers.clocks import Push
from strata.servers.state import Fence
from strata.transport.bulk import BulkServer, ConnectionLost

if TYPE_CHECKING:
    import ssl

    from strata.servers.protocol import Request
    from strata.servers.state import ServerState
    from strata.servers.table.optimizers import Rows
    from strata.transport.bulk import BulkConnection, Message
    from strata.transport.tokens import Guard, Role

MAX_MESSAGE_BYTES = 1 << 30


class _Reply(NamedTuple):
    connection: BulkConnection
    answer: protocol.Answer
    buffers: list[Any]


class Server:
    """Serves workers until it is closed."""

    def __init__(
        self,
        state: ServerState,
        address: str,
        *,
        guard: Guard,
        context: ssl.SSLContext | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """
        Raises:
            ConfigError: The address cannot be bound, or other machines could reach it without a token and TLS.
        """
        self.state = state
        self._lock = threading.Lock()
        self._replies: list[_Reply] = []
        """Answers that the state has given, and that are not sent yet."""
        self.num_pulled_rows = 0
        self.num_pushed_rows = 0
        self._bulk = BulkServer(address, self._serve, guard=guard, context=context, max_bytes=max_bytes)
        self.address = self._bulk.address

    def close(self) -> None:
        self._bulk.close()

    def _serve(self, connection: BulkConnection, _role: Role) -> None:
        fence: Fence | None = None
        try:
            while (message := connection.receive()) is not None:
                request = protocol.decode_request(message)
                with self._lock:
                    try:
                        fence = self._act(connection, fence, request, message)
                    except StrataError as error:
                        self._replies.append(_Reply(connection, protocol.failed(request.id, error), []))
                    replies, self._replies = self._replies, []
                for reply in replies:
                    self._send(reply)
        finally:
            if fence is not None:
                with self._lock:
                    self.state.leave(fence)

    def _send(self, reply: _Reply) -> None:
        """Send an answer, perhaps to another worker than the one of this thread, whose loss its own thread notices."""
        try:
            reply.connection.send(protocol.encode(reply.answer), reply.buffers)
        except ConnectionLost:
            reply.connection.close()

    def _act(self, connection: BulkConnection, fence: Fence | None, request: Request, message: Message) -> Fence | None:
        """Carry out a request; return the fence of this connection."""
        if isinstance(request, protocol.Join):
            fence = Fence(request.rank, request.attempt, request.incarnation)
            clock = self.state.join(fence)
            self._replies.append(_Reply(connection, protocol.Answer(request.id, clock), []))
        elif fence is None:
            raise InvalidArgument("the first message of a worker is a join")
        elif isinstance(request, protocol.Pull):
            self._pull(connection, fence, request, message)
        else:
            self._push(fence, request, message)
            self._replies.append(_Reply(connection, protocol.Answer(request.id), []))
        return fence

    def _pull(self, connection: BulkConnection, fence: Fence, request: protocol.Pull, message: Message) -> None:
        num = len(request.tables)
        if len(message.buffers) != num * (2 if request.has_room else 1):
            raise InvalidArgument(f"a pull from {num} tables has {len(message.buffers)} buffers", field="buffers")
        wanted = dict(zip(request.tables, map(protocol.keys_in, message.buffers[:num]), strict=True))
        room: dict[str, Rows] = {}
        for name, buffer in zip(request.tables, message.buffers[num:], strict=False):
            room[name] = protocol.rows_in(buffer, len(wanted[name]), self.state.width_of(name))
        self.num_pulled_rows += sum(map(len, wanted.values()))

        def answer(rows: dict[str, Rows]) -> None:
            sent = [] if request.has_room else [rows[name] for name in request.tables]
            self._replies.append(_Reply(connection, protocol.Answer(request.id), sent))

        self.state.pull(fence, request.clock, wanted, answer, room)

    def _push(self, fence: Fence, request: protocol.Push, message: Message) -> None:
        if len(message.buffers) != 2 * len(request.tables):
            raise InvalidArgument(
                f"a push to {len(request.tables)} tables has {len(message.buffers)} buffers", field="buffers"
            )
        gradients = {}
        for number, name in enumerate(request.tables):
            keys = protocol.keys_in(message.buffers[2 * number])
            rows = protocol.rows_in(message.buffers[2 * number + 1], len(keys), self.state.width_of(name))
            # A round keeps the arrays until all workers have pushed; the worker reuses its memory after the answer.
            gradients[name] = Push(keys.copy(), rows.copy()) if self.state.clocks.staleness == 0 else Push(keys, rows)
            self.num_pushed_rows += len(keys)
        self.state.push(fence, request.clock, gradients)
