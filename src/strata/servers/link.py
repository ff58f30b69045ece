"""`WorkerLink`: a worker's side of the parameter servers of its run.

It finds the servers through the coordinator when rows are first needed, counts this worker's steps, and notes to the
servers when all workers save or end.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from strata.coordinator.state.server_figures import total
from strata.errors import StrataError, Unauthenticated
from strata.servers.client import ServersClient
from strata.servers.connection import NotAnswered
from strata.servers.copies import COPIES
from strata.servers.endpoint import TOPIC, Endpoint, node_of
from strata.servers.move import MOVE_TIMEOUT_S, MOVED, RESIZE, Layout
from strata.servers.placement import server_names
from strata.servers.protocol import MAX_TABLES
from strata.servers.state import Fence
from strata.transport.bulk import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from strata.coordinator.state.server_figures import ServerFigures
    from strata.servers.client import Pulled
    from strata.servers.clocks import Push
    from strata.servers.process import PartSpec
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows
    from strata.train.context import Context

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 300.0
"""Time for the servers to restore their rows and publish where they listen."""
RECOVER_TIMEOUT_S = 300.0
"""Time for a lost server of an asynchronous run to restart and restore its rows."""
RETRY_S = 0.1
WAIT_S = 900.0
"""Time for an answer of a server, which may wait for the slowest worker."""


class AskedRows:
    """Rows that are on their way from the servers of all parts."""

    def __init__(
        self,
        pulled: Sequence[Pulled],
        again: Callable[[ConnectionLost], Sequence[Pulled]] | None = None,
        renew: Callable[[], Sequence[Pulled] | None] = lambda: None,
    ) -> None:
        """
        Args:
            again: Asks once more after a server was lost, or raises.
            renew: Asks once more if rows have moved to other servers since; otherwise returns None.
        """
        self._pulled = pulled
        self._again = again
        self._renew = renew

    def rows(self) -> dict[str, Rows]:
        """Wait for the rows; return them by table. Call it once.

        Raises:
            StrataError: A server is lost, does not answer, or refuses the pull; the message names it.
        """
        self._pulled = self._renew() or self._pulled
        while True:
            found: dict[str, Rows] = {}
            try:
                for each in self._pulled:
                    found |= each.rows(WAIT_S)
            except ConnectionLost as error:
                if self._again is None:
                    raise
                self._pulled = self._again(error)
            else:
                return found


class WorkerLink:
    """Pulls and pushes of one worker. Use it from one thread."""

    def __init__(self, ctx: Context, parts: Sequence[PartSpec]) -> None:
        self._ctx = ctx
        self._parts = {part.name: part for part in parts}
        self._part_of = {spec.name: part.name for part in parts for spec in part.tables}
        self._rates = {spec.name: spec.optimizer.lr for part in parts for spec in part.tables}
        """Learning rates that the servers use."""
        self._clients: dict[str, ServersClient] = {}
        self._copies: dict[str, ServersClient] = {}
        """Where the rows of each server are kept a second time, for parts that have copies."""
        self._clock = 0
        self._saved = (0, 0)
        """The last checkpoint: its step, and its number among those of this step."""
        self._pushed: list[Future[None]] = []
        """Pushes that may not be applied yet."""
        self._layout = ctx.layout
        """How often the number of servers has changed."""
        self.num_lost = 0
        """Pushes of this worker that a restarted server has lost."""

    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        """Return the rows of these keys, which ascend, by table.

        Raises:
            StrataError: A server is lost, does not answer, or refuses a push or the pull; the message names it.
        """
        return self.ask(wanted).rows()

    def ask(self, wanted: Mapping[str, Keys], steps_ahead: int = 0) -> AskedRows:
        """Ask for the rows of these keys, for the current step or a later one; return before they arrive.

        Raises:
            StrataError: A server is lost, or refuses a push; the message names it.
        """
        self._connect()
        self._recover()
        self._check_pushed()
        clock, layout = self._clock + steps_ahead, self._layout

        def renew() -> list[Pulled] | None:
            return None if layout == self._layout else self._asked(wanted, clock)

        def again(error: ConnectionLost) -> list[Pulled]:
            if isinstance(error, NotAnswered):
                raise error
            self._recover()  # nothing to do if an earlier request has joined the server again
            return self._asked(wanted, clock)

        return AskedRows(self._asked(wanted, clock), again, renew)

    def _asked(self, wanted: Mapping[str, Keys], clock: int) -> list[Pulled]:
        pulled = []
        for part, client in self._clients.items():
            tables = [name for name in wanted if self._part_of[name] == part]
            for start in range(0, len(tables), MAX_TABLES):
                chosen = {name: wanted[name] for name in tables[start : start + MAX_TABLES]}
                pulled.append(client.pull(clock, chosen))
        return pulled

    def push(self, gradients: Mapping[str, Push], rates: Mapping[str, float]) -> None:
        """Complete a step with these gradients. Return before the servers have applied them.

        Args:
            rates: Current learning rates, by table.

        Raises:
            StrataError: A server is lost or has refused an earlier push; the message names it.
        """
        self._connect()
        self._recover()
        self._check_pushed()
        self._clock += 1
        changed = any(self._rates[name] != rate for name, rate in rates.items())
        self._rates |= rates
        for part, client in self._clients.items():
            tables = [spec.name for spec in self._parts[part].tables]
            chosen = {name: gradients[name] for name in tables if name in gradients}
            sent = {name: self._rates[name] for name in chosen} if changed else None
            copies = self._copies.get(part)
            self._pushed.append(client.push(self._clock, chosen, sent, saved=self._saved, copies=copies))

    def completed_steps(self) -> int:
        """Return how many steps of this worker all servers have applied. A worker that is restarted alone continues
        after them; a server that has applied one more recognizes it when it is repeated.
        """
        self._connect()
        return self._clock

    def saving(self, step: int) -> None:
        """All workers save after this step: the servers do, too, before they apply a later push.

        Raises:
            StrataError: A server was lost before it had all pushes of this step; the message names it.
        """
        if self._ctx.may_lose_ranks:  # a server that is lost now would wait for a push that it does not get
            self.wait()
        self._saved = (step, self._saved[1] + 1 if step == self._saved[0] else 1)
        self._notify("save", step)

    def resizing(self, step: int, num_servers: int, layout: int) -> None:
        """Rows move to another number of servers after this step; return when all of them have their rows.

        Raises:
            StrataError: A server is lost, or has not copied its rows in time; the message names it.
        """
        self._connect()
        self.wait()
        ctx, chosen = self._ctx, Layout(num_servers, layout)
        if ctx.rank == 0:
            ctx.membership.publish(chosen.topic(RESIZE), str(step))
            self._notify("resize", step, msgspec.json.encode(chosen))
            self._pushed.pop().result(WAIT_S)
        new = range(ctx.roles.num_workers, ctx.roles.num_workers + num_servers)
        ctx.membership.collect(chosen.topic(MOVED), new, timeout_s=MOVE_TIMEOUT_S)

    def resized(self) -> None:
        """Connect to the servers that there are now. Rows that are on their way are asked for once more."""
        self.close()
        self._layout = self._ctx.layout
        self._connect()

    def ending(self, step: int) -> None:
        """All workers have reached the end of their training."""
        self._notify("end", step)

    def finish(self, step: int, result: bytes) -> None:
        """The run is over: rank 0 sends the result, and the servers end, perhaps before the other ranks are here."""
        self._check_pushed()
        if self._pushed:
            self.wait()
        if self._ctx.rank != 0:
            return
        self._notify("done", step, result)
        noted, self._pushed = self._pushed, []
        for each in noted:
            try:
                each.result(WAIT_S)
            except TimeoutError:
                raise StrataError(f"a parameter server has not answered within {WAIT_S:g} s") from None

    def figures(self) -> list[ServerFigures]:
        """Return what each server has measured, with the pushes of this worker.

        Raises:
            StrataError: A server is lost, has refused a push, or does not answer in time.
        """
        self._connect()
        self.wait()
        by_part = [client.figures(WAIT_S) for client in self._clients.values()]
        found = (total(own) for own in zip(*by_part, strict=True))
        return [each for each in found if each is not None]

    def wait(self) -> None:
        """Wait until the servers have applied all pushes.

        Raises:
            StrataError: A server is lost, has refused a push, or does not answer in time.
        """
        deadline_s = time.monotonic() + WAIT_S
        self._recover()  # a restarted server learns the step of this worker when it joins
        while self._pushed:
            self._recover()
            try:
                self._pushed[0].result(RETRY_S)
            except TimeoutError:
                if time.monotonic() > deadline_s:
                    silent = sorted({name for client in self._clients.values() for name in client.unanswered()})
                    raise StrataError(
                        f"parameter server {', '.join(silent)} has not answered within {WAIT_S:g} s; it may be "
                        "stopped, or waiting for a worker that makes no steps"
                    ) from None
            else:
                self._check_pushed()

    def close(self) -> None:
        for client in [*self._clients.values(), *self._copies.values()]:
            client.close()
        self._clients, self._copies = {}, {}

    def _notify(self, kind: Literal["save", "resize", "end", "done"], step: int, payload: bytes = b"") -> None:
        """Note something to the servers, for all workers: rank 0 does."""
        self._connect()
        if self._ctx.rank == 0:
            first = next(iter(self._clients.values()))
            self._pushed.append(first.notify(kind, step, payload))

    def _recover(self) -> None:
        """Join lost servers again once they are restarted.

        Raises:
            ConnectionLost: A server is lost in a run that restarts as a whole, or it does not return; the message names
                it. If it was lost while all ranks rely on it, the agent ends this process meanwhile.
        """
        for topic, clients in ((TOPIC, self._clients), (COPIES, self._copies)):
            for part, client in clients.items():
                for number, error in client.lost.items():
                    if not self._ctx.alone.is_begun:
                        raise error
                    self._rejoin(topic, part, client, number)

    def _rejoin(self, topic: str, part: str, client: ServersClient, number: int) -> None:
        ctx, ranks = self._ctx, self._ctx.roles.server_ranks
        rank = ranks[number] if topic == TOPIC else ranks[(number + 1) % len(ranks)]
        log.warning("server-%d (rank %d) is lost; waiting up to %g s for its return", number, rank, RECOVER_TIMEOUT_S)
        deadline_s = time.monotonic() + RECOVER_TIMEOUT_S
        while True:
            endpoint = Endpoint.decode(ctx.membership.collect(topic, [rank], timeout_s=FIND_TIMEOUT_S)[rank])
            try:
                lost = client.reconnect(
                    number,
                    endpoint.address_for(node_of(ctx.identity), part),
                    token=endpoint.client_token(),
                    context=endpoint.client_context(),
                    saved=self._saved,
                )
            except (ConnectionLost, Unauthenticated) as error:  # the address of the lost process, perhaps taken over
                if time.monotonic() > deadline_s:
                    raise ConnectionLost(
                        f"parameter server server-{number} (rank {rank}) has not returned within "
                        f"{RECOVER_TIMEOUT_S:g} s: {error.message}"
                    ) from error
                time.sleep(RETRY_S)
            else:
                self.num_lost += lost if topic == TOPIC else 0
                return

    def _check_pushed(self) -> None:
        """Raise the error of a push that was refused."""
        done = [each for each in self._pushed if each.done()]
        self._pushed = [each for each in self._pushed if not each.done()]
        for each in done:
            each.result()

    def _connect(self) -> None:
        if self._clients:
            return
        ctx, roles = self._ctx, self._ctx.roles
        published = ctx.membership.collect(TOPIC, roles.server_ranks, timeout_s=FIND_TIMEOUT_S)
        endpoints = [Endpoint.decode(published[rank]) for rank in roles.server_ranks]
        for part in self._parts.values():
            if part.has_copies:
                found = ctx.membership.collect(COPIES, roles.server_ranks, timeout_s=FIND_TIMEOUT_S)
                of_copies = [Endpoint.decode(found[rank]) for rank in roles.server_ranks]
                self._copies[part.name] = self._client(part, [*of_copies[1:], of_copies[0]])
            self._clients[part.name] = client = self._client(part, endpoints)
            if client.clock != ctx.step and not ctx.identity.incarnation:
                raise StrataError(
                    f"the parameter servers are at step {client.clock} and this worker is at step {ctx.step}; this is "
                    "a bug in Strata, please report it"
                )
        self._clock = min(client.clock for client in [*self._clients.values(), *self._copies.values()])

    def _client(self, part: PartSpec, endpoints: Sequence[Endpoint]) -> ServersClient:
        ctx = self._ctx
        node = node_of(ctx.identity)
        named = dict(zip(server_names(len(endpoints)), endpoints, strict=True))
        return ServersClient(
            {name: each.address_for(node, part.name) for name, each in named.items()},
            Fence(ctx.rank, ctx.attempt, ctx.identity.incarnation),
            {spec.name: spec.width for spec in part.tables},
            tokens={name: each.client_token() for name, each in named.items()},
            contexts={name: each.client_context() for name, each in named.items()},
            is_half=part.is_half,
            num_pulls=part.num_pulls,
            is_patient=ctx.may_lose_ranks,
            saved=self._saved,
        )
