"""Messages between workers and servers. Arrays travel as buffers of bulk messages, in the order of `tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from strata import errors
from strata.servers.table.half import from_half
from strata.servers.table.table import NotFiniteGradient

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.transport.bulk import Message

MAX_TABLES = 64
"""Tables in one message; each needs up to two buffers."""
_ERRORS: dict[str, type[errors.StrataError]] = {**errors.BY_KIND, "NotFiniteGradient": NotFiniteGradient}


class Join(msgspec.Struct, tag=True, array_like=True):
    """The first message of a worker."""

    id: int
    rank: int
    attempt: int
    incarnation: int
    clock: int = 0
    """Steps of this worker that the server has acknowledged. A server that was restarted alone knows fewer."""
    saved: tuple[int, int] = (0, 0)
    """The last checkpoint in which the worker took part, as in `Push`."""


class Pull(msgspec.Struct, tag=True, array_like=True):
    """Buffers: keys of each table; with `has_room`, followed by room for the rows of each table, in shared memory."""

    id: int
    clock: int
    tables: list[str]
    has_room: bool = False
    is_half: bool = False
    """Answer in half precision."""


class Push(msgspec.Struct, tag=True, array_like=True):
    """Buffers: keys and gradients of each table."""

    id: int
    clock: int
    tables: list[str]
    rates: list[float] = []
    """Current learning rate of each table; empty if they have not changed."""
    saved: tuple[int, int] = (0, 0)
    """The last checkpoint in which the worker took part: its step, and its number among those of this step. A server
    applies the push after it has made this checkpoint."""


class Note(msgspec.Struct, tag=True, array_like=True):
    """What all workers do together now, sent by one of them, so that the servers take part."""

    id: int
    kind: Literal["save", "resize", "end", "done"]
    step: int


class Measure(msgspec.Struct, tag=True, array_like=True):
    """Asks for the figures of a server; the answer has one buffer, with JSON."""

    id: int


class Fetch(msgspec.Struct, tag=True, array_like=True):
    """From a server that takes over rows. Requests of a connection with the same `step` read the same state; those with
    another one read what has changed since.
    """

    id: int
    table: str
    start: int
    """Rows to skip, in the order of keys."""
    server: int = 0
    num_servers: int = 0
    """Send only the rows that server `server` owns among as many; 0: all rows."""
    step: int = 0
    """Wait until all workers have pushed this step."""


class Answer(msgspec.Struct, tag=True, array_like=True):
    """To the request with this id. Buffers: rows of each table of a pull, unless they were written into its room."""

    id: int
    clock: int = 0
    """To a join: steps that the worker has pushed."""
    num_lost: int = 0
    """To a join: how many of them are not in the rows, because the server was restarted from an earlier checkpoint."""
    error: str = ""
    """Name of an error, or nothing."""
    reason: str = ""
    clocks: list[int] = []
    """To a fetch: completed steps of each worker."""
    num_rows: int = 0
    """To a fetch: all rows of the table."""
    num_updates: int = 0
    rate: float = 0.0
    """To a fetch: the optimizer's updates so far and its learning rate. The first answer about a table that counts keys
    which are not admitted yet has these counts as its last buffer."""
    is_whole: bool = True
    """To a fetch: whether unchanged rows are included."""


Request: TypeAlias = Join | Pull | Push | Note | Measure | Fetch
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Join | Pull | Push | Note | Measure | Fetch)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def decode_request(message: Message) -> Request:
    """
    Raises:
        InvalidArgument: It is not a request.
    """
    try:
        request: Request = _requests.decode(message.header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise errors.InvalidArgument(f"this is not a request to a parameter server: {error}") from None
    if isinstance(request, Pull | Push) and len(request.tables) > MAX_TABLES:
        raise errors.InvalidArgument(f"a request names {len(request.tables)} tables; the limit is {MAX_TABLES}")
    return request


def decode_answer(message: Message) -> Answer:
    """
    Raises:
        InvalidArgument: It is not an answer.
    """
    try:
        return _answers.decode(message.header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise errors.InvalidArgument(f"this is not an answer of a parameter server: {error}") from None


def failed(request_id: int, error: errors.StrataError) -> Answer:
    return Answer(request_id, error=type(error).__name__, reason=error.message)


def error_of(answer: Answer) -> errors.StrataError:
    return _ERRORS.get(answer.error, errors.StrataError)(answer.reason)


def keys_in(buffer: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """
    Raises:
        InvalidArgument: Its length is not a multiple of 8 bytes.
    """
    if buffer.nbytes % 8:
        raise errors.InvalidArgument(f"keys have {buffer.nbytes} bytes, which is not a multiple of 8", field="keys")
    return buffer.view(np.uint64)


def rows_in(buffer: NDArray[np.uint8], num_rows: int, width: int) -> NDArray[np.float32]:
    """Return the rows in a buffer: the buffer itself, or a copy of rows in half precision.

    Raises:
        InvalidArgument: It does not hold as many rows.
    """
    if num_rows and buffer.nbytes == num_rows * width * 2:
        return from_half(buffer.view(np.uint16).reshape(num_rows, width))
    if buffer.nbytes != num_rows * width * 4:
        raise errors.InvalidArgument(
            f"{num_rows} rows of {width} numbers have {num_rows * width * 4} bytes, not {buffer.nbytes}", field="rows"
        )
    rows: NDArray[Any] = buffer.view(np.float32)
    return rows.reshape(num_rows, width)
