"""Servers that are saved, restored and resized hold what one dictionary holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from test_servers_snapshot import copy_of
from test_servers_state import SPECS, SimulatedWorker, rows_of, train

from strata.servers.clocks import Push
from strata.servers.placement import Placement
from strata.servers.state import Fence, ServerState
from strata.servers.table.optimizers import SGD
from strata.servers.table.snapshot import Snapshot
from strata.servers.table.table import TableSpec

WIDTH = 3
RATE = 0.5
TABLE = "t"
SPEC = TableSpec(name=TABLE, width=WIDTH, optimizer=SGD(lr=RATE))
FENCE = Fence(0, 0, 0)
MAX_SERVERS = 5
keys_drawn = st.sets(st.integers(0, 40), max_size=10)
numbers_of_servers = st.integers(1, MAX_SERVERS)


def keys_of(keys: Any) -> np.ndarray[Any, Any]:
    return np.array(sorted(keys), np.uint64)


class Row(NamedTuple):
    weights: tuple[float, ...]
    version: int
    count: int


class Saved(NamedTuple):
    step: int
    snapshots: list[dict[str, Any]]
    """One per server, as checkpoints hold them."""
    rows: dict[int, Row]


class Copied(NamedTuple):
    """New servers that have copied their rows while training continues, and when."""

    new: list[ServerState]
    moments: dict[tuple[int, int], Any]
    """By the numbers of the server that gives rows and of the one that gets them."""


class ServersMachine(RuleBasedStateMachine):
    """Some servers and the rows that they should have."""

    servers: list[ServerState]
    placement: Placement

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Row] = {}
        self.step = 0
        self.saved: Saved | None = None
        self.copied: Copied | None = None

    @initialize(number=numbers_of_servers)
    def start(self, number: int) -> None:
        self.placement = Placement.of(number)
        self.servers = [self.new_server() for _ in range(number)]

    def new_server(self) -> ServerState:
        server = ServerState([SPEC], num_workers=1, staleness=0, start=self.step)
        server.join(FENCE)
        return server

    def owned(self, keys: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return the positions of the keys of each server."""
        owners = self.placement.owners_of(keys)
        return [np.flatnonzero(owners == number) for number in range(len(self.servers))]

    def expected(self, key: int) -> list[float]:
        if key in self.rows:
            return list(self.rows[key].weights)
        initial: list[float] = SPEC.initial.values(keys_of([key]), WIDTH)[0].tolist()
        return initial

    @rule(keys=keys_drawn, seed=st.integers(0, 99))
    def push(self, keys: set[int], seed: int) -> None:
        self.step += 1
        ids = keys_of(keys)
        gradients = np.random.default_rng(seed).normal(size=(len(ids), WIDTH)).astype(np.float32)
        for server, own in zip(self.servers, self.owned(ids), strict=True):
            assert server.push(FENCE, self.step, {TABLE: Push(ids[own], gradients[own])})
        for key, gradient in zip(ids.tolist(), gradients, strict=True):
            weights = np.array(self.expected(key), np.float32) - np.float32(RATE) * gradient
            before = self.rows.get(key)
            self.rows[key] = Row(tuple(weights.tolist()), self.step, 1 + (before.count if before else 0))

    @rule(keys=keys_drawn)
    def pull(self, keys: set[int]) -> None:
        ids = keys_of(keys)
        found = np.empty((len(ids), WIDTH), np.float32)
        for server, own in zip(self.servers, self.owned(ids), strict=True):
            answers: list[Any] = []
            server.pull(FENCE, self.step, {TABLE: ids[own]}, answers.append)
            found[own] = answers[0][TABLE]
        assert found.tolist() == [self.expected(key) for key in ids.tolist()]

    @rule(keys=keys_drawn)
    def evict(self, keys: set[int]) -> None:
        ids = keys_of(keys)
        for server, own in zip(self.servers, self.owned(ids), strict=True):
            server.tables[TABLE].remove(ids[own])
        for key in keys & self.rows.keys():
            del self.rows[key]

    @rule()
    def save(self) -> None:
        snapshots = [copy_of(server.tables[TABLE].snapshot()).tree() for server in self.servers]
        self.saved = Saved(self.step, snapshots, dict(self.rows))

    @rule(number=numbers_of_servers)
    def restore(self, number: int) -> None:
        """Go back to the last save, on another number of servers."""
        if self.saved is not None:
            self.step, self.rows = self.saved.step, dict(self.saved.rows)
            self.load(Placement.of(number), self.saved.snapshots)

    @rule(number=numbers_of_servers)
    def copy_ahead(self, number: int) -> None:
        """Start more servers, which copy their rows while training continues."""
        if number > len(self.servers):
            new = [self.new_server() for _ in range(number - len(self.servers))]
            self.copied = Copied(new, {})
            self.copy(number, new, self.copied.moments)

    @rule()
    def resize_to_copies(self) -> None:
        """Let the servers that have copied rows take part."""
        if self.copied is not None:
            self.move(len(self.servers) + len(self.copied.new))

    @rule(number=numbers_of_servers)
    def resize(self, number: int) -> None:
        """Continue on another number of servers without copying ahead."""
        self.copied = None
        self.move(number)

    def move(self, number: int) -> None:
        new, moments = self.copied or Copied([self.new_server() for _ in range(number - len(self.servers))], {})
        before, after = self.placement, Placement.of(number)
        owners = before.owners_of(keys_of(self.rows))
        self.copy(number, [*self.servers, *new][:number], moments)
        self.servers, self.placement, self.copied = [*self.servers, *new][:number], after, None
        for own, server in enumerate(self.servers):
            server.keep_only(lambda keys, own=own: after.owners_of(keys) == own)
            server.begin(self.step)
        is_moved = owners != after.owners_of(keys_of(self.rows))
        fewest = min(number, len(before.servers))
        assert (np.maximum(owners, after.owners_of(keys_of(self.rows)))[is_moved] >= fewest).all()

    def copy(self, number: int, receivers: list[ServerState], moments: dict[tuple[int, int], Any]) -> None:
        """Give rows to those that own them among `number` servers; `receivers` are the last of these."""
        before, after = self.placement, Placement.of(number)
        for own, receiver in enumerate(receivers, start=number - len(receivers)):
            for source in before.moved_to(after, own).tolist():
                frozen = self.servers[source].frozen(
                    lambda keys, own=own: after.owners_of(keys) == own, moments.get((source, own), {})
                )
                moments[source, own] = frozen.moments
                if TABLE in frozen.whole:
                    receiver.keep_only(lambda keys, source=source: before.owners_of(keys) != source, TABLE)
                receiver.receive(TABLE, frozen.rows[TABLE], frozen.about[TABLE])

    def load(self, placement: Placement, snapshots: list[dict[str, Any]]) -> None:
        self.placement, self.copied = placement, None
        self.servers = [self.new_server() for _ in placement.servers]
        for number, server in enumerate(self.servers):
            for tree in snapshots:
                server.tables[TABLE].load(
                    Snapshot.of(tree), keep=lambda keys, number=number: placement.owners_of(keys) == number
                )

    @invariant()
    def every_row_is_on_the_server_that_owns_it(self) -> None:
        found: dict[int, Row] = {}
        for number, server in enumerate(self.servers):
            saved = server.tables[TABLE].rows()
            assert (self.placement.owners_of(saved.keys) == number).all()
            for key, weights, version, count in zip(
                saved.keys.tolist(), saved.weights.tolist(), saved.versions.tolist(), saved.counts.tolist(), strict=True
            ):
                assert key not in found
                found[key] = Row(tuple(weights), version, count)
        assert found == self.rows


def test_servers_that_are_saved_restored_and_resized_hold_what_a_dictionary_holds() -> None:
    run_state_machine_as_test(ServersMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


def resized(servers: dict[str, ServerState], number: int, *, num_workers: int, step: int) -> dict[str, ServerState]:
    """Return new servers with the rows of these, through snapshots."""
    placement = Placement.of(number)
    made = {}
    for own, name in enumerate(placement.servers):
        made[name] = ServerState(SPECS, num_workers=num_workers, staleness=0, start=step)
        for server in servers.values():
            for table, rows in server.tables.items():
                tree = copy_of(rows.snapshot()).tree()
                made[name].tables[table].load(
                    Snapshot.of(tree), keep=lambda keys, own=own: placement.owners_of(keys) == own
                )
    return made


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.lists(numbers_of_servers, min_size=2, max_size=4))
def test_synchronous_training_has_the_same_bits_while_the_number_of_servers_changes(
    num_workers: int, numbers: list[int]
) -> None:
    servers = {"first": ServerState(SPECS, num_workers=num_workers, staleness=0)}
    for step, number in enumerate(numbers):
        servers = resized(servers, number, num_workers=num_workers, step=step)
        workers = [SimulatedWorker(rank, servers, start=step) for rank in range(num_workers)]
        while any(worker.clock == step for worker in workers):
            for worker in workers:
                if worker.clock == step:
                    worker.act()

    assert rows_of(servers) == train(1, num_workers, 0, [], len(numbers))


@given(numbers_of_servers, numbers_of_servers)
def test_only_buckets_of_servers_that_come_or_go_move_and_the_others_stay_balanced(before: int, after: int) -> None:
    fewest = min(before, after)
    one, other = Placement.of(before).owners, Placement.of(after).owners

    assert (np.maximum(one, other)[one != other] >= fewest).all()
    assert np.bincount(other).max() <= 1.05 * len(other) / after + 1


@pytest.mark.parametrize("number", [1, 3])
def test_a_row_is_loaded_by_exactly_one_of_the_new_servers(number: int) -> None:
    keys = np.arange(1_000, dtype=np.uint64)
    old = ServerState(SPECS, num_workers=1, staleness=0)
    old.tables["users"].push(keys, np.ones((len(keys), SPECS[0].width), np.float32), 1)

    new = resized({"old": old}, number, num_workers=1, step=1)

    found = np.concatenate([server.tables["users"].rows().keys for server in new.values()])
    assert sorted(found.tolist()) == keys.tolist()
