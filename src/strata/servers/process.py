"""The life of a server process: it restores its rows, serves the workers, and saves when they save.

A server is one of the last ranks of a run, with a context like every rank. It makes no decisions of its own about
checkpoints: the workers agree on a step, save their part, and note it to the servers, which cut their tables at the
same step.
"""

from __future__ import annotations

import logging
import queue
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import StrataError
from strata.launch.environment import METRICS
from strata.scratch import Scratch
from strata.servers import move
from strata.servers.cold_file import ColdFiles
from strata.servers.connection import NUM_PULLS
from strata.servers.copies import COPIES, fetch
from strata.servers.endpoint import TOPIC, Endpoint, Security, address_towards, node_of
from strata.servers.meter import Meter
from strata.servers.placement import Placement
from strata.servers.server import Server
from strata.servers.state import ServerState
from strata.servers.table.snapshot import Part, Saved, Snapshot
from strata.transport.bulk import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from strata.servers.protocol import Note
    from strata.servers.state import Frozen
    from strata.servers.table.keys import Keys
    from strata.servers.table.table import Table, TableSpec
    from strata.train.context import Context

    Notes = queue.SimpleQueue[tuple[Note, bytes]]

log = logging.getLogger(__name__)

SCRATCH = "strata-server-"
"""Prefix of temporary directories with sockets; the next server removes those of a killed process."""
POLL_S = 0.5
"""Interval of progress reports."""
IDLE_S = 30.0
"""Time without a step of the workers after which a server reports that it is idle, and not that it trains."""
SAVING_POLL_S = 0.05
"""The same while a checkpoint is written: once it is committed, this server can be restarted alone."""
STEP_TIMEOUT_S = 900.0
"""Time for all workers to push the step that they save; the agent restarts a run that hangs for longer."""
ABANDONED_S = 60.0
"""Time without any worker after which a server gives up. Its agent ends it sooner if a worker has failed."""
COPY_TIMEOUT_S = 60.0
"""Time for the next server to publish the copy of a server that is restarted."""
PREDECESSOR_TIMEOUT_S = 300.0
"""Time for the server before this one to restore its rows, of which this one keeps a copy."""
RETRY_S = 0.1
NOTED = "noted"
"""Reason for which a server cannot be restarted alone: the workers rely on its part in what they do together."""
SAVED = "servers"
"""Name of the tables in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """Tables that share their clocks."""

    name: str
    tables: tuple[TableSpec, ...]
    staleness: int | None
    is_half: bool = False
    """Whether rows travel between machines in half precision."""
    num_pulls: int = NUM_PULLS
    """Pulls of a worker that may be on their way at a time."""
    has_copies: bool = False
    """Whether the next server keeps a copy of each server's rows."""


def serve(ctx: Context, parts: Sequence[PartSpec], values: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Serve until the workers are done; return their result.

    Args:
        values: Initial rows of tables, by id; others start by their `Initial`.

    Raises:
        StrataError: The workers are gone, or have not made a step in time.
        SystemExit: The run was asked to stop.
    """
    notes: Notes = queue.SimpleQueue()
    with ExitStack() as stack:
        directory = stack.enter_context(Scratch(SCRATCH)).path
        states = {part.name: _state_of(ctx, part, ColdFiles(directory)) for part in parts}
        tables = _Tables(ctx, [table for state in states.values() for table in state.tables.values()])
        if not ctx.servers_before and not _take_over(ctx, parts, states):
            if ctx.restore({SAVED: tables}).is_fresh:
                tables.fill(values)
            for state in states.values():
                state.begin(ctx.step)
        is_alone = ctx.identity.num_nodes == 1
        host = "" if is_alone else address_towards(ctx.identity.master_addr)
        security = Security.create(directory, host)

        def opened(opening: Mapping[str, ServerState], *, is_copy: bool) -> dict[str, Server]:
            """Serve these states, and publish where."""
            topic, ending = (COPIES, ".copy") if is_copy else (TOPIC, "")
            found: dict[str, Server] = {}
            for name, state in opening.items():
                addresses = [f"unix:{directory / name}{ending}", *([] if is_alone else [f"{host}:0"])]
                found[name] = Server(
                    state,
                    *addresses,
                    guard=security.guard,
                    context=security.context,
                    notify=lambda *note: notes.put(note),
                    announce=lambda: ctx.alone.hold(NOTED),
                    is_copy=is_copy,
                )
                stack.callback(found[name].close)
            endpoint = Endpoint(
                node=node_of(ctx.identity),
                local={name: server.addresses[0] for name, server in found.items()},
                remote={} if is_alone else {name: server.addresses[1] for name, server in found.items()},
                certificate=security.certificate,
                token=security.published_token,
            )
            ctx.membership.publish(topic, endpoint.encode())
            return found

        servers = opened(states, is_copy=False)
        ctx.watch(Meter(list(servers.values())).read)
        if ctx.servers_before:
            move.join(ctx, parts, servers)
        if ctx.may_lose_ranks:
            ctx.alone.begin()
        if _has_copies(parts):
            ctx.watch(lambda: {METRICS.has_copies: 1.0})
            opened(_copies(ctx, parts, ColdFiles(directory)), is_copy=True)

        def resize(note: Note, payload: bytes) -> None:
            move.take_part(ctx, parts, servers, note.step, payload)

        return _follow(ctx, tables, list(servers.values()), notes, resize)


def _state_of(ctx: Context, part: PartSpec, files: ColdFiles) -> ServerState:
    return ServerState(
        part.tables,
        num_workers=ctx.roles.num_workers,
        staleness=part.staleness,
        attempt=ctx.attempt,
        map_file=files,
    )


def _has_copies(parts: Sequence[PartSpec]) -> bool:
    return any(part.has_copies for part in parts)


def _take_over(ctx: Context, parts: Sequence[PartSpec], states: Mapping[str, ServerState]) -> bool:
    """Take the rows of this server from its copy, if it is restarted alone; return whether there is one."""
    if not ctx.identity.incarnation or not _has_copies(parts):
        return False
    try:
        frozen = _fetched(ctx, parts, COPIES, ctx.roles.next_server(1), timeout_s=COPY_TIMEOUT_S)
    except StrataError as error:
        log.warning("the copy of this server is lost, too; it starts from the last checkpoint: %s", error)
        return False
    for name, each in frozen.items():
        states[name].take_over(each)
    return True


def _copies(ctx: Context, parts: Sequence[PartSpec], files: ColdFiles) -> dict[str, ServerState]:
    """Return a copy of the server before this one. It may be about to be restarted, too.

    Raises:
        StrataError: It does not return in time; the message names it.
    """
    deadline_s = time.monotonic() + PREDECESSOR_TIMEOUT_S
    while True:
        try:
            frozen = _fetched(ctx, parts, TOPIC, ctx.roles.next_server(-1), timeout_s=PREDECESSOR_TIMEOUT_S)
            break
        except ConnectionLost:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)
    states = {part.name: _state_of(ctx, part, files) for part in parts}
    for name, each in frozen.items():
        states[name].take_over(each)
    return states


def _fetched(ctx: Context, parts: Sequence[PartSpec], topic: str, rank: int, *, timeout_s: float) -> dict[str, Frozen]:
    endpoint = Endpoint.decode(ctx.membership.collect(topic, [rank], timeout_s=timeout_s)[rank])
    node, token, context = node_of(ctx.identity), endpoint.client_token(), endpoint.client_context()
    return {
        part.name: fetch(endpoint.address_for(node, part.name), part.tables, token=token, context=context)
        for part in parts
    }


def _follow(
    ctx: Context, tables: _Tables, servers: Sequence[Server], notes: Notes, resize: Callable[[Note, bytes], None]
) -> bytes:
    """Take part in what the workers do together, until they are done."""
    had_workers, gone_since_s, stop_reason, stepped_s = False, 0.0, "", time.monotonic()
    while True:
        note, payload = _next(notes, SAVING_POLL_S if ctx.is_saving else POLL_S)
        _report_lost(ctx, servers)
        step = min(server.state.step for server in servers)
        if step > ctx.step:
            stepped_s = time.monotonic()
            ctx.report(step=step)
        elif time.monotonic() - stepped_s > IDLE_S:  # the workers wait for data, or are watched themselves
            ctx.idle()
        if note is not None and note.kind == "save":
            for server in servers:
                server.wait_for_step(note.step, STEP_TIMEOUT_S)
            tables.save(note.step)
            for server in servers:
                server.saved(note.step)
            ctx.alone.release(NOTED)  # the context holds it until the checkpoint is committed
        elif note is not None and note.kind == "resize":
            resize(note, payload)
            ctx.alone.release(NOTED)
        elif note is not None and note.kind == "end":
            ctx.step = note.step
            ctx.membership.ends_together(note.step)
        elif note is not None:
            return payload
        stop_reason = stop_reason or ctx.is_stopping()
        ctx.release_alone()
        is_deserted = had_workers and not any(server.num_joined for server in servers)
        had_workers = had_workers or all(server.num_joined for server in servers)
        gone_since_s = (gone_since_s or time.monotonic()) if is_deserted and note is None else 0.0
        if gone_since_s and stop_reason:
            ctx.stop(stop_reason)
        if gone_since_s and time.monotonic() - gone_since_s > ABANDONED_S:
            raise StrataError(f"no worker has been connected for {ABANDONED_S:g} s; their logs show why")


def _report_lost(ctx: Context, servers: Sequence[Server]) -> None:
    """Report the updates that this server has lost, because it was restarted from the last checkpoint."""
    num_lost = sum(server.state.num_lost for server in servers)
    if num_lost > ctx.num_lost_updates:
        log.warning("restarted from the last checkpoint: %d updates of the workers are lost", num_lost)
        ctx.num_lost_updates = num_lost


def _next(notes: Notes, timeout_s: float) -> tuple[Note | None, bytes]:
    try:
        return notes.get(timeout=timeout_s)
    except queue.Empty:
        return None, b""


class _Tables:
    """The tables of this server, as checkpoints hold them."""

    def __init__(self, ctx: Context, tables: Sequence[Table]) -> None:
        self._tables = {table.spec.name: table for table in tables}
        self._ctx = ctx
        self._marks = dict.fromkeys(self._tables, 0)
        """Of the last snapshots."""

    def _is_own(self, keys: Keys) -> NDArray[np.bool_]:
        roles = self._ctx.roles
        is_own: NDArray[np.bool_] = Placement.of(roles.num_servers).owners_of(keys) == roles.server
        return is_own

    def fill(self, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Start with these rows, whose keys are their positions."""
        for name, table in self._tables.items():
            if name in values:
                keys = np.arange(len(values[name]), dtype=np.uint64)
                own = np.flatnonzero(self._is_own(keys))
                table.put(_fresh_rows(table, keys[own], values[name][own]))

    def save(self, step: int) -> None:
        """Save the tables, and of those that were saved before only the rows that changed since."""
        dirty = {
            f"{SAVED}.{name}.parts.{part}.{field}": slots
            for name, table in self._tables.items()
            for part, slots in table.dirty_slots(self._marks[name]).items()
            for field in Part._fields
            if field != "state" or table.spec.optimizer.state_width(table.spec.width)
        }
        snapshots = {name: table.snapshot() for name, table in self._tables.items()}
        state = {SAVED: {name: snapshot.tree() for name, snapshot in snapshots.items()}}
        self._ctx.checkpoint(state, step=step, checkpoint_type="INCREMENTAL", dirty=dirty)
        self._marks = {name: snapshot.mark for name, snapshot in snapshots.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the rows that one server has saved and this one owns."""
        for name, table in self._tables.items():
            if name in state:
                table.load(Snapshot.of(state[name]), keep=self._is_own)


def _fresh_rows(table: Table, keys: Keys, weights: NDArray[np.float32]) -> Saved:
    optimizer, width = table.spec.optimizer, table.spec.width
    state = np.empty((len(keys), optimizer.state_width(width)), np.float32)
    optimizer.fill_state(weights, state, np.arange(len(keys), dtype=np.int32))
    nothing = np.zeros(len(keys), np.uint32)
    return Saved(keys, weights, state, nothing, nothing)
