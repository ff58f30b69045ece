"""A server's decisions: pulls, pushes and joins in any order keep what the consistency mode promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import InvalidArgument, StaleIncarnation
from strata.servers.clocks import Push
from strata.servers.placement import Placement
from strata.servers.state import Fence, ServerState
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import Adagrad
from strata.servers.table.snapshot import Saved
from strata.servers.table.table import NotFiniteGradient, Table, TableSpec

WIDTH = 2
SPECS = [
    TableSpec(name="users", width=WIDTH, optimizer=Adagrad(lr=0.1), initial=Initial(seed=1)),
    TableSpec(name="items", width=WIDTH, optimizer=Adagrad(lr=0.1), initial=Initial(seed=2)),
]


def keys_of(*keys: int) -> np.ndarray[Any, Any]:
    return np.array(keys, np.uint64)


def gradient_of(rank: int, step: int, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A gradient that depends on the pulled rows, so that a wrong order of updates shows."""
    noise = [np.random.default_rng((rank, step, key)).normal(size=WIDTH) for key in keys.tolist()]
    return (rows * 0.5 + np.reshape(noise, rows.shape)).astype(np.float32)


def wanted_by(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng((7, rank, step))
    return {
        name: np.sort(generator.choice(12, generator.integers(0, 6), replace=False)).astype(np.uint64)
        for name in ("users", "items")
    }


class SimulatedWorker:
    """Trains with servers: pull, gradient, push; keys go to the servers that own them."""

    def __init__(self, rank: int, servers: dict[str, ServerState], start: int = 0) -> None:
        self.fence = Fence(rank, 0, 1)
        self.clock = start
        self._servers = servers
        self._placement = Placement.of(len(servers))
        self._answers: dict[str, dict[str, np.ndarray[Any, Any]]] | None = None
        for server in servers.values():
            server.join(self.fence)

    def act(self) -> None:
        """Pull, or push if the rows are there; nothing while they are not."""
        if self._answers is None:
            self._answers = {}
            for name, server in self._servers.items():
                server.pull(self.fence, self.clock, self._share(name), self._take(name))
        elif len(self._answers) == len(self._servers):
            answers, self._answers = self._answers, None
            self.clock += 1
            for name, server in self._servers.items():
                share = self._share(name, completed=self.clock - 1)
                gradients = {
                    table: Push(keys, gradient_of(self.fence.rank, self.clock, keys, answers[name][table]))
                    for table, keys in share.items()
                }
                assert server.push(self.fence, self.clock, gradients)
                assert not server.push(self.fence, self.clock, gradients)  # repeated after a lost acknowledgement

    def _take(self, name: str) -> Any:
        def take(rows: dict[str, np.ndarray[Any, Any]]) -> None:
            assert self._answers is not None
            self._answers[name] = rows

        return take

    def _share(self, name: str, completed: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
        number = list(self._servers).index(name)
        wanted = wanted_by(self.fence.rank, self.clock if completed is None else completed)
        return {table: keys[self._placement.owners_of(keys) == number] for table, keys in wanted.items()}


def rows_of(servers: dict[str, ServerState]) -> dict[str, list[Any]]:
    found = {}
    for spec in SPECS:
        saved = [server.tables[spec.name].rows() for server in servers.values()]
        keys = np.concatenate([each.keys for each in saved])
        order = np.argsort(keys)
        found[spec.name] = [np.concatenate(arrays)[order].tobytes() for arrays in zip(*saved, strict=True)]
    return found


def train(num_servers: int, num_workers: int, staleness: int | None, turns: list[int], steps: int) -> Any:
    servers = {
        f"server-{number}": ServerState(SPECS, num_workers=num_workers, staleness=staleness)
        for number in range(num_servers)
    }
    workers = [SimulatedWorker(rank, servers) for rank in range(num_workers)]
    for turn in [*turns, *(list(range(num_workers)) * steps * 4)]:
        worker = workers[turn % num_workers]
        if worker.clock < steps:
            worker.act()
    assert [worker.clock for worker in workers] == [steps] * num_workers
    return rows_of(servers)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 3), max_size=40))
def test_synchronous_training_has_the_same_bits_whatever_the_timing_and_the_number_of_servers(
    num_servers: int, num_workers: int, turns: list[int]
) -> None:
    assert train(num_servers, num_workers, 0, turns, 4) == train(1, num_workers, 0, [], 4)


def test_asynchronous_workers_do_not_wait_for_a_slow_one() -> None:
    servers = {"a": ServerState(SPECS, num_workers=2, staleness=None)}
    fast, slow = SimulatedWorker(0, servers), SimulatedWorker(1, servers)
    for _ in range(20):
        fast.act()

    assert (fast.clock, slow.clock) == (10, 0)
    assert servers["a"].waits_for() == []


def test_a_worker_waits_when_it_is_more_than_the_staleness_ahead_and_the_server_names_the_slow_one() -> None:
    servers = {"a": ServerState(SPECS, num_workers=2, staleness=2)}
    fast, slow = SimulatedWorker(0, servers), SimulatedWorker(1, servers)
    for _ in range(20):
        fast.act()
    assert fast.clock == 3
    assert servers["a"].waits_for() == [1]

    slow.act()
    slow.act()
    fast.act()

    assert fast.clock == 4


def test_a_single_worker_makes_the_updates_of_a_plain_table() -> None:
    server = ServerState(SPECS, num_workers=1, staleness=0)
    table = Table(SPECS[0])
    fence = Fence(0, 0, 1)
    server.join(fence)
    keys = keys_of(1, 5, 9)
    for step in range(1, 4):
        gradients = np.full((3, WIDTH), step, np.float32)
        server.push(fence, step, {"users": Push(keys, gradients)})
        table.push(keys, gradients, step)

    assert server.tables["users"].pull(keys).tolist() == table.pull(keys).tolist()


@pytest.mark.parametrize("staleness", [0, None])
def test_a_frozen_table_is_pulled_refuses_gradients_and_is_saved_once(staleness: int | None) -> None:
    features = TableSpec(name="features", width=WIDTH, is_frozen=True)
    server = ServerState([features, SPECS[0]], num_workers=1, staleness=staleness)
    table, keys = server.tables["features"], keys_of(1, 4)
    nothing = np.zeros(2, np.uint32)
    table.put(Saved(keys, np.ones((2, WIDTH), np.float32), np.empty((2, 0), np.float32), nothing, nothing))
    fence = Fence(0, 0, 1)
    server.join(fence)
    assert [len(slots) for slots in table.dirty_slots(since=0).values()] == [2]
    mark = table.snapshot().mark
    push = Push(keys, np.ones((2, WIDTH), np.float32))

    with pytest.raises(InvalidArgument, match="table 'features' is frozen and takes no gradients"):
        server.push(fence, 1, {"users": push, "features": push})
    assert server.push(fence, 1, {"users": push})

    answers: list[Any] = []
    server.pull(fence, 1, {"features": keys}, answers.append)
    assert answers[0]["features"].tolist() == [[1, 1], [1, 1]]
    assert [len(slots) for slots in table.dirty_slots(since=mark).values()] == [0]
    assert table.num_updates == 0
    assert server.tables["users"].num_updates == 1


def test_messages_of_a_replaced_worker_are_refused() -> None:
    server = ServerState(SPECS, num_workers=1, staleness=None, attempt=3)
    old, new = Fence(0, 3, 1), Fence(0, 3, 2)
    server.join(old)
    server.push(old, 1, {})
    assert server.join(new) == 1

    for act in (
        lambda: server.push(old, 2, {}),
        lambda: server.pull(old, 1, {}, lambda _: None),
        lambda: server.join(old),
        lambda: server.join(Fence(0, 2, 9)),
        lambda: server.push(Fence(0, 4, 2), 2, {}),
    ):
        with pytest.raises(StaleIncarnation, match="this server serves attempt 3"):
            act()
    assert server.push(new, 2, {})


def test_the_waiting_pull_of_a_lost_worker_is_not_answered() -> None:
    server = ServerState(SPECS, num_workers=2, staleness=0)
    first, second = Fence(0, 0, 1), Fence(1, 0, 1)
    server.join(first)
    server.join(second)
    server.push(first, 1, {})
    answers: list[Any] = []
    server.pull(first, 1, {"users": keys_of(1)}, answers.append)
    server.leave(first)

    server.push(second, 1, {})

    assert answers == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"visitors": keys_of(1)}, "table 'visitors' is unknown; this server has 'users', 'items'"),
        ({"users": keys_of(2, 1)}, "not ascending 64-bit numbers"),
        ({"users": keys_of(1, 1)}, "not ascending 64-bit numbers"),
        ({"users": np.array([1.0])}, "not ascending 64-bit numbers"),
    ],
)
def test_bad_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    server = ServerState(SPECS, num_workers=1, staleness=0)
    fence = Fence(0, 0, 1)
    server.join(fence)
    with pytest.raises(InvalidArgument, match=message):
        server.pull(fence, 0, keys, lambda _: None)


def test_a_push_with_one_bad_gradient_changes_no_table() -> None:
    server = ServerState(SPECS, num_workers=1, staleness=0)
    fence = Fence(0, 0, 1)
    server.join(fence)
    good = Push(keys_of(1), np.ones((1, WIDTH), np.float32))
    bad = Push(keys_of(4), np.full((1, WIDTH), np.inf, np.float32))

    with pytest.raises(NotFiniteGradient, match="id 4 of table 'items'"):
        server.push(fence, 1, {"users": good, "items": bad})

    assert len(server.tables["users"]) == 0
    assert server.step == 0
    assert server.push(fence, 1, {"users": good})


class PrefetchingWorker:
    """Asks for the rows of its next steps before it completes the current one."""

    def __init__(self, rank: int, server: ServerState, num_ahead: int) -> None:
        self.fence = Fence(rank, 0, 1)
        self.clock = 0
        self._server = server
        self._num_ahead = num_ahead
        self._num_asked = 0
        self._answered: set[int] = set()
        server.join(self.fence)

    def act(self, staleness: int) -> None:
        while self._num_asked <= self.clock + self._num_ahead:
            clock = self._num_asked
            self._num_asked += 1

            def take(_: Any, clock: int = clock) -> None:
                assert self._server.step >= clock - staleness, "rows older than the staleness allows"
                self._answered.add(clock)

            self._server.pull(self.fence, clock, {"users": keys_of(1)}, take)
        if self.clock in self._answered:
            self.clock += 1
            self._server.push(self.fence, self.clock, {"users": Push(keys_of(1), np.ones((1, WIDTH), np.float32))})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.data())
def test_prefetching_neither_exceeds_the_staleness_nor_blocks(num_workers: int, staleness: int, data: Any) -> None:
    server = ServerState(SPECS, num_workers=num_workers, staleness=staleness)
    num_ahead = data.draw(st.integers(0, staleness))
    workers = [PrefetchingWorker(rank, server, num_ahead) for rank in range(num_workers)]
    turns = data.draw(st.lists(st.integers(0, num_workers - 1), max_size=30))
    for turn in [*turns, *range(num_workers)] * 3:
        workers[turn].act(staleness)
    assert server.step >= 3, "workers that take turns make a step each time"
