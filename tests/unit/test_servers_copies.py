"""A server and its copy: whichever process is lost, no update is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import InvalidArgument
from strata.servers.clocks import Push
from strata.servers.state import Fence, ServerState
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import SGD
from strata.servers.table.table import TableSpec
from strata.train import AllReduce, Hybrid, ParameterServer

NUM_WORKERS = 2
TABLE = TableSpec(
    name="users", width=1, optimizer=SGD(lr=1.0), initial=Initial(kind="zeros"), max_rows=6, evict_after=1_000
)


class Copied:
    """Workers push to a server and to its copy, beside a dictionary. Each process may be lost at any time."""

    def __init__(self) -> None:
        self.processes = [self._new(), self._new()]
        """The server and its copy."""
        self.pushed = [0] * NUM_WORKERS
        self.unacked: list[dict[int, set[int]]] = [{} for _ in range(NUM_WORKERS)]
        """Of each worker: the steps that it keeps, and the processes that have not acknowledged them."""
        self.counts: dict[int, int] = {}
        for process in self.processes:
            self._join(process)

    def _new(self) -> ServerState:
        return ServerState([TABLE], num_workers=NUM_WORKERS, staleness=None)

    def _join(self, process: ServerState) -> None:
        for rank in range(NUM_WORKERS):
            kept = self.unacked[rank] if hasattr(self, "unacked") else {}
            known = min(kept, default=self.pushed[rank] + 1) - 1
            assert process.join(Fence(rank, 0, 0), known) >= known
        assert process.num_lost == 0

    def push(self, rank: int) -> None:
        self.pushed[rank] += 1
        self.unacked[rank][self.pushed[rank]] = {0, 1}
        for key in self._keys(rank, self.pushed[rank]).tolist():
            self.counts[key] = self.counts.get(key, 0) + 1

    def deliver(self, rank: int, number: int) -> None:
        """Let one process apply the next push of a worker that it has not acknowledged."""
        step = next((step for step, missing in sorted(self.unacked[rank].items()) if number in missing), None)
        if step is None:
            return
        keys = self._keys(rank, step)
        gradients = {"users": Push(keys, np.ones((len(keys), 1), np.float32))}
        self.processes[number].push(Fence(rank, 0, 0), step, gradients)
        self.unacked[rank][step].discard(number)
        self.unacked[rank] = {step: missing for step, missing in self.unacked[rank].items() if missing}

    def lose(self, number: int) -> None:
        """Restart one process from the other; workers repeat what they keep and it does not have."""
        process = self.processes[number] = self._new()
        process.take_over(self.processes[1 - number].frozen())
        for kept in self.unacked:
            for missing in kept.values():
                missing.add(number)
        self._join(process)

    def _keys(self, rank: int, step: int) -> np.ndarray[Any, Any]:
        return np.array([rank, 2 + (rank + step) % 4], np.uint64)

    def finish(self) -> None:
        for rank in range(NUM_WORKERS):
            while self.unacked[rank]:
                self.deliver(rank, 0)
                self.deliver(rank, 1)


EVENTS = st.sampled_from(
    ["push 0", "push 1", "deliver 0 0", "deliver 0 1", "deliver 1 0", "deliver 1 1", "lose 0", "lose 1"]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_a_server_and_its_copy_have_every_update_once_whichever_is_lost(events: list[str]) -> None:
    run = Copied()
    for event in events:
        what, *numbers = event.split()
        getattr(run, what)(*map(int, numbers))

    run.finish()

    keys = np.array(sorted(run.counts), np.uint64)
    for process in run.processes:
        table = process.tables["users"]
        assert [-int(row) for row in table.pull(keys)[:, 0]] == [run.counts[key] for key in sorted(run.counts)]
        assert len(table) == len(run.counts)
        assert [process.clocks.of(rank) for rank in range(NUM_WORKERS)] == run.pushed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 1, "servers": 2}, "replicas=1 needs staleness=None, not 0: other runs restart exactly"),
        ({"replicas": 1, "servers": 2, "staleness": 4}, "needs staleness=None, not 4"),
        ({"replicas": 1, "staleness": None}, "needs a second server for the copies; use servers=2 or more"),
        ({"replicas": 2, "servers": 3, "staleness": None}, "replicas=2 is not a whole number, from 0 to 1"),
    ],
)
def test_copies_are_refused_where_they_do_not_help(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ParameterServer(**arguments)


def test_a_hybrid_has_copies_of_both_parts_or_of_none() -> None:
    copied = ParameterServer(servers=2, staleness=None, replicas=1)
    with pytest.raises(InvalidArgument, match="a server restarts alone only if all parameters are asynchronous"):
        Hybrid(dense=AllReduce(), sparse=copied)
    assert Hybrid(dense=copied, sparse=copied).is_asynchronous
