"""Copies of rows: a server takes over what another process has, over a bulk connection.

With `replicas=1`, the successor of a server keeps a copy of its rows, to which workers send the same pushes. A server
that is restarted alone takes its rows from that copy, and the copy that it keeps itself from the server that owns it.
Both have applied the pushes of each worker up to some step, which the clocks say; workers repeat later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.servers import protocol
from strata.servers.server import MAX_MESSAGE_BYTES
from strata.servers.state import Frozen
from strata.servers.table.snapshot import Saved
from strata.transport.bulk import ConnectionLost, connect

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from strata.servers.table.table import TableSpec
    from strata.transport.bulk import BulkConnection

COPIES = "server-copy"
"""Topic under which a server publishes where its copies listen, once they are complete."""


def fetch(
    address: str, specs: Sequence[TableSpec], *, token: str = "", context: ssl.SSLContext | None = None
) -> Frozen:
    """Return the rows and clocks of a server, all at the same moment.

    Raises:
        ConnectionLost: It is lost.
        StrataError: It has other tables.
    """
    clocks: list[int] = []
    rows: dict[str, Saved] = {}
    with connect(address, token=token, context=context, max_bytes=MAX_MESSAGE_BYTES) as connection:
        for spec in specs:
            pieces: list[Saved] = []
            num_rows, num_found = 1, 0
            while num_found < num_rows:
                answer, piece = _next_rows(connection, spec, num_found)
                clocks, num_rows = answer.clocks, answer.num_rows
                num_found += len(piece.keys)
                pieces.append(piece)
                if not len(piece.keys):
                    break
            rows[spec.name] = Saved(*(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))
    return Frozen(rows, clocks)


def _next_rows(connection: BulkConnection, spec: TableSpec, start: int) -> tuple[protocol.Answer, Saved]:
    connection.send(protocol.encode(protocol.Fetch(1, spec.name, start)))
    message = connection.receive()
    if message is None:
        raise ConnectionLost("the server closed the connection")
    answer = protocol.decode_answer(message)
    if answer.error:
        raise protocol.error_of(answer)
    buffers: list[Any] = list(message.buffers)
    keys = protocol.keys_in(buffers[0])
    weights = protocol.rows_in(buffers[1], len(keys), spec.width)
    state = buffers[2].view(np.float32).reshape(len(keys), spec.optimizer.state_width(spec.width))
    return answer, Saved(keys, weights, state, buffers[3].view(np.uint32), buffers[4].view(np.uint32))
