"""`ServerState`: the tables of one server and the clocks of its workers. Every decision of a server, without I/O.

A worker joins, and then alternates between a pull for its next step and a push that completes the step. A message names
all tables that a step needs, so a step is pushed as a whole or not at all. The number of a step doubles as the sequence
number of its push: a push that is repeated after a lost connection is recognized and not applied again.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strata.errors import InvalidArgument, StaleIncarnation
from strata.servers.clocks import Clocks, Push, Rounds
from strata.servers.table.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows
    from strata.servers.table.snapshot import Saved
    from strata.servers.table.storage import MapFile
    from strata.servers.table.table import TableSpec

    Answer = Callable[[dict[str, Rows]], None]


class Fence(NamedTuple):
    """Who sends a message: a server ignores the processes of earlier attempts and earlier incarnations."""

    rank: int
    attempt: int
    incarnation: int


class About(NamedTuple):
    """What belongs to a table beside its rows."""

    num_updates: int
    rate: float
    """The current learning rate."""
    seen: NDArray[np.uint8] | None = None
    """Counts of keys that are not admitted yet, if the table counts them."""


class Moment(NamedTuple):
    """A state of a table, to find later what has changed since."""

    mark: int
    num_removed: int


class Frozen(NamedTuple):
    """Rows of a server, by table, and the completed steps of each worker."""

    rows: dict[str, Saved]
    clocks: list[int]
    about: dict[str, About]
    moments: Mapping[str, Moment] = MappingProxyType({})
    whole: frozenset[str] = frozenset()
    """Tables whose rows are all there, and not only those that changed since a moment."""


class _Waiting(NamedTuple):
    fence: Fence
    clock: int
    wanted: Mapping[str, Keys]
    answer: Answer
    room: Mapping[str, Rows]


class ServerState:
    """Not thread-safe: one caller at a time."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        num_workers: int,
        staleness: int | None,
        attempt: int = 0,
        start: int = 0,
        map_file: MapFile | None = None,
    ) -> None:
        """
        Args:
            start: The step of the checkpoint from which all workers continue.
            map_file: For tables of which only some rows are in memory; see `Table`.
        """
        self.tables = {spec.name: Table(spec, map_file) for spec in specs}
        self.clocks = Clocks(num_workers, staleness=staleness, start=start)
        self._num_workers = num_workers
        self._attempt = attempt
        self._incarnations: dict[int, int] = {}
        self._trained = {name: table for name, table in self.tables.items() if not table.spec.is_frozen}
        self._rounds = {name: Rounds(num_workers) for name in self._trained} if staleness == 0 else None
        self._waiting: list[_Waiting] = []
        self.num_lost = 0
        """Pushes that were acknowledged by an earlier process and are not in the rows."""

    def begin(self, step: int) -> None:
        """Start at the step of a checkpoint, before any worker joins."""
        self.clocks = Clocks(self._num_workers, staleness=self.clocks.staleness, start=step)

    def frozen(
        self,
        keep: Callable[[Keys], NDArray[np.bool_]] | None = None,
        since: Mapping[str, Moment] = MappingProxyType({}),
    ) -> Frozen:
        """Return a copy of rows and clocks, for another process that takes them over.

        Args:
            keep: Return which of these keys to include; None includes all.
            since: Leave out rows that have not changed since these moments. A table from which rows were removed since
                is copied as a whole.
        """
        known = {name: moment for name, moment in since.items() if moment.num_removed == self.tables[name].num_removed}
        rows, about = {}, {}
        for name, table in self.tables.items():
            rows[name] = table.rows(mark=known[name].mark if name in known else 0, keep=keep)
            seen = table.seen
            about[name] = About(table.num_updates, table.spec.optimizer.lr, None if seen is None else seen.copy())
        return Frozen(
            rows,
            [self.clocks.of(rank) for rank in range(self._num_workers)],
            about,
            {name: Moment(table.marked(), table.num_removed) for name, table in self.tables.items()},
            frozenset(self.tables.keys() - known.keys()),
        )

    def take_over(self, frozen: Frozen) -> None:
        """Continue where another process was, before any worker joins."""
        for name, rows in frozen.rows.items():
            self.receive(name, rows, frozen.about[name])
        for rank, clock in enumerate(frozen.clocks):
            self.clocks.leap(rank, clock)

    def receive(self, name: str, rows: Saved, about: About) -> None:
        """Add rows of another server, with what it knows about the table.

        Raises:
            LimitExceeded: There is no room for them.
        """
        self.tables[name].put(rows)
        self.tables[name].merge(about.num_updates, about.seen)
        self._set_rate(name, about.rate)

    def keep_only(self, is_own: Callable[[Keys], NDArray[np.bool_]], name: str = "") -> int:
        """Forget the rows of all other keys, in one table or in all of them; return how many they were."""
        num_removed = 0
        for table in [self.tables[name]] if name else self.tables.values():
            keys = table.keys()
            others = keys[~is_own(keys)]
            table.remove(others)
            num_removed += len(others)
        return num_removed

    @property
    def step(self) -> int:
        """Steps that all workers have pushed."""
        return self.clocks.slowest

    def join(self, fence: Fence, clock: int = 0) -> int:
        """Admit a worker, or a later incarnation of it; return the number of steps that it has pushed.

        Args:
            clock: The steps that were acknowledged to this worker. A server that was restarted alone, from a checkpoint
                of an earlier step, accepts them: what it has lost is `num_lost`.

        Raises:
            StaleIncarnation: A later one has joined.
        """
        if not 0 <= fence.rank < self._num_workers:
            raise InvalidArgument(f"rank {fence.rank} does not exist among {self._num_workers} workers", field="rank")
        if fence.attempt != self._attempt or fence.incarnation < self._incarnations.get(fence.rank, 0):
            raise self._stale(fence)
        self._incarnations[fence.rank] = fence.incarnation
        self._waiting = [each for each in self._waiting if each.fence.rank != fence.rank]
        if self.clocks.staleness is None and clock > self.clocks.of(fence.rank):
            self.num_lost += clock - self.clocks.of(fence.rank)
            self.clocks.leap(fence.rank, clock)
        return self.clocks.of(fence.rank)

    def leave(self, fence: Fence) -> None:
        """Forget the pulls of a worker whose connection is gone."""
        self._waiting = [each for each in self._waiting if each.fence != fence]

    def width_of(self, table: str) -> int:
        """
        Raises:
            InvalidArgument: There is no such table.
        """
        if table not in self.tables:
            raise InvalidArgument(
                f"table {table!r} is unknown; this server has {', '.join(map(repr, self.tables))}", field="table"
            )
        return self.tables[table].spec.width

    def pull(
        self,
        fence: Fence,
        clock: int,
        wanted: Mapping[str, Keys],
        answer: Answer,
        room: Mapping[str, Rows] = MappingProxyType({}),
    ) -> None:
        """Call `answer` with the rows of these keys by table: now, or as soon as the staleness allows it.

        Args:
            clock: Completed steps of the worker.
            room: Where to write the rows of a table, instead of new memory.

        Raises:
            StaleIncarnation, InvalidArgument: The message is refused.
        """
        self._check(fence, wanted)
        if self.clocks.may_pull(clock):
            answer(self._rows(wanted, room))
        else:
            self._waiting.append(_Waiting(fence, clock, wanted, answer, room))

    def push(
        self,
        fence: Fence,
        clock: int,
        gradients: Mapping[str, Push],
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> bool:
        """Complete step `clock` of a worker; return False if it was completed before, which changes nothing.

        With `staleness=0`, the arrays must stay as they are until all workers have pushed the step.

        Args:
            rates: Learning rates by table, from this push on; a schedule on the workers changes them.

        Raises:
            StaleIncarnation, InvalidArgument, NotFiniteGradient: The push is refused; nothing changed.
            LimitExceeded: A table is full, and other tables may have been updated: the server cannot continue.
        """
        self._check(fence, {name: push.keys for name, push in gradients.items()})
        if clock <= self.clocks.of(fence.rank):
            return False
        for name, push in gradients.items():
            self.tables[name].check(push.keys, push.gradients)
        self.clocks.advance(fence.rank, clock)
        for name, rate in rates.items():
            self._set_rate(name, rate)
        for name, table in self._trained.items():
            push = gradients.get(name) or _no_gradients(table.spec.width)
            due = push if self._rounds is None else self._rounds[name].add(fence.rank, push)
            if due is not None:
                table.push(due.keys, due.gradients, clock, is_checked=True)
        self._answer_waiting()
        return True

    def _set_rate(self, name: str, rate: float) -> None:
        table = self.tables[name]
        if rate != table.spec.optimizer.lr:
            table.spec = replace(table.spec, optimizer=replace(table.spec.optimizer, lr=rate))

    def waits_for(self) -> list[int]:
        """Return the ranks for which pulls wait; none if no pull waits."""
        return self.clocks.behind() if self._waiting else []

    def _answer_waiting(self) -> None:
        ready = [each for each in self._waiting if self.clocks.may_pull(each.clock)]
        if ready:
            self._waiting = [each for each in self._waiting if not self.clocks.may_pull(each.clock)]
            for each in ready:
                each.answer(self._rows(each.wanted, each.room))

    def _rows(self, wanted: Mapping[str, Keys], room: Mapping[str, Rows]) -> dict[str, Rows]:
        return {name: self.tables[name].pull(keys, room.get(name)) for name, keys in wanted.items()}

    def _check(self, fence: Fence, keys_by_table: Mapping[str, Keys]) -> None:
        if fence.attempt != self._attempt or self._incarnations.get(fence.rank) != fence.incarnation:
            raise self._stale(fence)
        for name, keys in keys_by_table.items():
            self.width_of(name)
            if keys.dtype != np.uint64 or keys.ndim != 1 or not (keys[1:] > keys[:-1]).all():
                raise InvalidArgument(f"the keys of table {name!r} are not ascending 64-bit numbers", field="keys")

    def _stale(self, fence: Fence) -> StaleIncarnation:
        return StaleIncarnation(
            f"worker {fence.rank} of attempt {fence.attempt} has been replaced; this server serves attempt "
            f"{self._attempt}",
            field="incarnation",
        )


def _no_gradients(width: int) -> Push:
    return Push(np.empty(0, np.uint64), np.empty((0, width), np.float32))
