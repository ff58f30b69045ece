"""Rows move to other servers when the number of servers changes, while the run continues.

All workers change over after the same step, on which they agree as for a checkpoint. A server that is new has copied
its rows before, while they trained; now, while they wait, it copies those that have changed since. Each server of the
new layout publishes when it has all its rows. Then the others forget what they do not own any more, servers that are no
longer needed leave, and the workers connect to the servers that there are now.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from strata.errors import StrataError
from strata.servers.copies import opened
from strata.servers.endpoint import TOPIC, Endpoint, node_of
from strata.servers.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from strata.servers.copies import Source
    from strata.servers.process import PartSpec
    from strata.servers.server import Server
    from strata.servers.table.keys import Keys
    from strata.train.context import Context

log = logging.getLogger(__name__)

RESIZE, MOVED = "resize", "moved"
"""Topics, followed by the number of the layout: rank 0 publishes the step after which rows move, and each server that
it has its rows."""
FIND_TIMEOUT_S = 60.0
"""Time for the other servers to publish where they listen; they have done so before."""
MOVE_TIMEOUT_S = 900.0
"""Time for all servers to copy their rows while the workers wait."""
LEAVE_TIMEOUT_S = 60.0
"""Time for the workers to disconnect from a server that leaves."""
POLL_S = 0.5


class Layout(msgspec.Struct, frozen=True):
    """The number of servers after a change, and the number of the change in this attempt."""

    num_servers: int
    number: int

    def topic(self, name: str) -> str:
        return f"{name}/{self.number}"


class Move:
    """What one server gets when the number of servers changes."""

    def __init__(
        self,
        ctx: Context,
        parts: Sequence[PartSpec],
        servers: Mapping[str, Server],
        num_before: int,
        num_servers: int,
        stack: contextlib.ExitStack,
    ) -> None:
        """
        Args:
            servers: The servers of this process, by part.
            stack: Closes the connections to other servers.
        """
        self._own = ctx.roles.server
        self._servers = servers
        self._before, self.placement = Placement.of(num_before), Placement.of(num_servers)
        self._sources: list[tuple[int, Server, Source]] = []
        if self._own >= num_servers:
            return
        first = ctx.roles.num_workers
        for number in self._before.moved_to(self.placement, self._own).tolist():
            found = ctx.membership.collect(TOPIC, [first + number], timeout_s=FIND_TIMEOUT_S)
            endpoint = Endpoint.decode(found[first + number])
            for part in parts:
                source = opened(
                    endpoint.address_for(node_of(ctx.identity), part.name),
                    part.tables,
                    token=endpoint.client_token(),
                    context=endpoint.client_context(),
                    server=self._own,
                    num_servers=num_servers,
                )
                self._sources.append((number, servers[part.name], stack.enter_context(source)))

    def copy(self, step: int = 0) -> None:
        """Copy rows from their present owners, once all workers have pushed this step. A second pass copies only those
        that have changed since.

        Raises:
            ConnectionLost: A server is lost.
            StrataError: There is no room for the rows, or a worker has not pushed the step in time.
        """
        for number, server, source in self._sources:
            for piece in source.pieces(step):
                if piece.is_first and piece.is_whole:  # rows of an earlier pass may have been evicted
                    server.keep_only(self._not_of(number), piece.table)
                server.receive(piece.table, piece.rows, piece.about)

    def num_moved(self) -> int:
        """Return how many rows this server has got from others."""
        owners = [
            self._before.owners_of(table.keys())
            for server in self._servers.values()
            for table in server.state.tables.values()
        ]
        return sum(int((each != self._own).sum()) for each in owners)

    def _not_of(self, number: int) -> Callable[[Keys], NDArray[np.bool_]]:
        def is_kept(keys: Keys) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = self._before.owners_of(keys) != number
            return found

        return is_kept


def join(ctx: Context, parts: Sequence[PartSpec], servers: Mapping[str, Server]) -> None:
    """Take over rows from servers that have run before this one.

    Raises:
        StrataError: Another server is lost.
        SystemExit: The workers have ended before.
    """
    layout = Layout(ctx.roles.num_servers, ctx.layout)
    with contextlib.ExitStack() as stack:
        move = Move(ctx, parts, servers, ctx.servers_before, layout.num_servers, stack)
        move.copy()
        ctx.ready_to_serve()
        step = _agreed_step(ctx, layout)
        move.copy(step)
        for server in servers.values():
            server.state.begin(step)
        ctx.step = step
        _finish(ctx, servers, move, layout)


def take_part(
    ctx: Context, parts: Sequence[PartSpec], servers: Mapping[str, Server], step: int, payload: bytes
) -> None:
    """Get and give up rows after a step, as the workers have noted. A server that is not needed any more leaves.

    Raises:
        StrataError: Another server is lost, or there is no room for the rows.
        SystemExit: This server leaves.
    """
    layout = msgspec.json.decode(payload, type=Layout)
    ctx.end_save()
    with contextlib.ExitStack() as stack:
        move = Move(ctx, parts, servers, ctx.roles.num_servers, layout.num_servers, stack)
        move.copy(step)
        for server in servers.values():
            server.wait_for_step(step, MOVE_TIMEOUT_S)
        _finish(ctx, servers, move, layout)


def _agreed_step(ctx: Context, layout: Layout) -> int:
    """Return the step after which rows move, once rank 0 publishes it. That may take as long as the workers do not make
    steps.
    """
    while True:
        with contextlib.suppress(StrataError):  # nothing is published yet, or the coordinator restarts
            return int(ctx.membership.collect(layout.topic(RESIZE), [0], timeout_s=POLL_S)[0])
        ctx.idle()
        with contextlib.suppress(StrataError):
            if not ctx.membership.has(0):
                ctx.retire("the workers have ended before rows could move here")


def _finish(ctx: Context, servers: Mapping[str, Server], move: Move, layout: Layout) -> None:
    """Wait until all servers have their rows; then forget those of others, or leave."""
    own, first = ctx.roles.server, ctx.roles.num_workers
    if own < layout.num_servers:
        ctx.membership.publish(layout.topic(MOVED), "")
    new = range(first, first + layout.num_servers)
    ctx.membership.collect(layout.topic(MOVED), new, timeout_s=MOVE_TIMEOUT_S)
    if own >= layout.num_servers:
        _await_departure(servers)
        ctx.retire(f"its number of servers is {layout.num_servers} now")
    num_moved = move.num_moved()

    def is_own(keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = move.placement.owners_of(keys) == own
        return found

    num_given = sum(server.keep_only(is_own) for server in servers.values())
    ctx.resized(layout.num_servers, layout.number, num_moved=num_moved)
    log.warning(
        "number of servers: %d; got %d rows from others and gave up %d", layout.num_servers, num_moved, num_given
    )


def _await_departure(servers: Mapping[str, Server]) -> None:
    """Wait until the workers have disconnected, so that none of them takes this server for lost."""
    deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
    while any(server.num_joined for server in servers.values()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 10)
