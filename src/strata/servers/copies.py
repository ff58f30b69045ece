"""Copies of rows: a server takes over what another process has, over a bulk connection.

With `replicas=1`, the successor of a server keeps a copy of its rows, to which workers send the same pushes. A server
that is restarted alone takes its rows from that copy, and the copy that it keeps itself from the server that owns it.
Both have applied the pushes of each worker up to some step, which the clocks say; workers repeat later ones.

When the number of servers changes, a server takes the rows that it owns from then on from their present owners: once
while the workers train, and then, while they wait, those that have changed since.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strata.servers import protocol
from strata.servers.server import MAX_MESSAGE_BYTES
from strata.servers.state import About, Frozen
from strata.servers.table import sketch
from strata.servers.table.snapshot import Saved
from strata.transport.bulk import ConnectionLost, connect

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

    from strata.servers.table.table import TableSpec
    from strata.transport.bulk import BulkConnection

COPIES = "server-copy"
"""Topic under which a server publishes where its copies listen, once they are complete."""


class Piece(NamedTuple):
    """Some rows of a table."""

    table: str
    rows: Saved
    about: About
    clocks: list[int]
    is_first: bool
    """Whether no piece of this table came before, in this pass."""
    is_whole: bool
    """Whether this pass has all rows, and not only those that changed since the last one."""


def fetch(
    address: str, specs: Sequence[TableSpec], *, token: str = "", context: ssl.SSLContext | None = None
) -> Frozen:
    """Return the rows and clocks of a server, all at the same moment.

    Raises:
        ConnectionLost: It is lost.
        StrataError: It has other tables.
    """
    with opened(address, specs, token=token, context=context) as source:
        pieces = list(source.pieces())
    rows = {
        spec.name: Saved(
            *(
                np.concatenate(arrays)
                for arrays in zip(*(each.rows for each in pieces if each.table == spec.name), strict=True)
            )
        )
        for spec in specs
    }
    about = {each.table: each.about for each in pieces if each.is_first}
    return Frozen(rows, pieces[-1].clocks if pieces else [], about)


@contextmanager
def opened(
    address: str,
    specs: Sequence[TableSpec],
    *,
    token: str = "",
    context: ssl.SSLContext | None = None,
    server: int = 0,
    num_servers: int = 0,
) -> Iterator[Source]:
    """Connect to a server whose rows are copied: those that `server` owns among `num_servers`, or all."""
    with connect(address, token=token, context=context, max_bytes=MAX_MESSAGE_BYTES) as connection:
        yield Source(connection, specs, server, num_servers)


class Source:
    """A server whose rows are copied."""

    def __init__(self, connection: BulkConnection, specs: Sequence[TableSpec], server: int, num_servers: int) -> None:
        self._connection = connection
        self._specs = specs
        self._server = server
        self._num_servers = num_servers

    def pieces(self, step: int = 0) -> Iterator[Piece]:
        """Yield all rows once all workers have pushed this step; after an earlier pass, those that changed since.

        Raises:
            ConnectionLost: The server is lost.
            StrataError: It has other tables, or a worker has not pushed the step in time.
        """
        for spec in self._specs:
            num_rows, num_found = 1, 0
            while num_found < num_rows:
                request = protocol.Fetch(1, spec.name, num_found, self._server, self._num_servers, step)
                piece, num_rows = self._next(spec, request)
                num_found += len(piece.rows.keys)
                yield piece
                if not len(piece.rows.keys):
                    break

    def _next(self, spec: TableSpec, request: protocol.Fetch) -> tuple[Piece, int]:
        self._connection.send(protocol.encode(request))
        message = self._connection.receive()
        if message is None:
            raise ConnectionLost("the server closed the connection")
        answer = protocol.decode_answer(message)
        if answer.error:
            raise protocol.error_of(answer)
        buffers: list[Any] = list(message.buffers)
        keys = protocol.keys_in(buffers[0])
        weights = protocol.rows_in(buffers[1], len(keys), spec.width)
        state = buffers[2].view(np.float32).reshape(len(keys), spec.optimizer.state_width(spec.width))
        rows = Saved(keys, weights, state, buffers[3].view(np.uint32), buffers[4].view(np.uint32))
        seen = buffers[5].view(np.uint8).reshape(sketch.NUM_ROWS, -1) if len(buffers) > 5 else None
        about = About(answer.num_updates, answer.rate, seen)
        return Piece(spec.name, rows, about, answer.clocks, not request.start, answer.is_whole), answer.num_rows
