"""An asynchronous server that restarts alone: a push counts once, or is counted as lost."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.servers.clocks import Push
from strata.servers.state import Fence, ServerState
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import SGD
from strata.servers.table.table import TableSpec

COUNTING = [TableSpec(name="users", width=1, optimizer=SGD(lr=1.0), initial=Initial(scale=0.0))]


def keys_of(*keys: int) -> np.ndarray[Any, Any]:
    return np.array(keys, np.uint64)


class Restarting:
    """Two workers and one server that is lost now and then, beside a dictionary that counts what must be applied."""

    def __init__(self) -> None:
        self.server = ServerState(COUNTING, num_workers=2, staleness=None)
        self.acked = [0, 0]
        self.incarnations = [0, 0]
        self.lost_acks: list[int | None] = [None, None]
        """The step that each worker has pushed without an acknowledgement."""
        self.counts: dict[int, int] = {}
        self.clocks = [0, 0]
        self.saved: tuple[Any, dict[int, int], int] = (self.server.tables["users"].rows(), {}, 0)
        self.num_lost = 0
        for rank in (0, 1):
            self.join(rank)

    def fence(self, rank: int) -> Fence:
        return Fence(rank, 0, self.incarnations[rank])

    def join(self, rank: int) -> None:
        """Join, and repeat what was not acknowledged."""
        clock = self.server.join(self.fence(rank), self.acked[rank])
        self.num_lost += max(self.acked[rank] - self.clocks[rank], 0)
        self.clocks[rank] = max(self.clocks[rank], self.acked[rank])
        assert clock == self.clocks[rank]
        step = self.lost_acks[rank]
        if step is not None:
            self.lost_acks[rank] = None
            self.push(rank, step)

    def push(self, rank: int, step: int, *, is_acked: bool = True) -> None:
        keys = keys_of(rank, 2 + step % 4)
        was_new = self.server.push(self.fence(rank), step, {"users": Push(keys, np.ones((2, 1), np.float32))})
        assert was_new == (step > self.clocks[rank])
        if was_new:
            self.clocks[rank] = step
            for key in keys.tolist():
                self.counts[key] = self.counts.get(key, 0) + 1
        if is_acked:
            self.acked[rank] = step
        else:
            self.lost_acks[rank] = step

    def save(self) -> None:
        """Save where all workers are at the same step, as a checkpoint is cut."""
        if self.clocks[0] == self.clocks[1]:
            self.saved = (self.server.tables["users"].rows(), dict(self.counts), self.clocks[0])

    def lose_server(self) -> None:
        rows, counts, step = self.saved
        self.server = ServerState(COUNTING, num_workers=2, staleness=None)
        self.server.tables["users"].put(rows)
        self.server.begin(step)
        self.counts, self.clocks = dict(counts), [step, step]
        for rank in (0, 1):
            self.join(rank)

    def lose_worker(self, rank: int) -> None:
        """A new process does not know what was acknowledged to the last one, and repeats no push of it."""
        self.incarnations[rank] += 1
        self.acked[rank], self.lost_acks[rank] = 0, None
        self.acked[rank] = self.server.join(self.fence(rank))
        assert self.acked[rank] == self.clocks[rank]

    def check(self) -> None:
        table = self.server.tables["users"]
        keys = keys_of(*sorted(self.counts))
        assert [-int(row) for row in table.pull(keys)[:, 0]] == [self.counts[key] for key in sorted(self.counts)]
        assert len(table) == len(self.counts)


EVENTS = st.sampled_from(["push 0", "push 1", "unacked 0", "unacked 1", "save", "server", "worker 0", "worker 1"])


@settings(deadline=None, max_examples=150)
@given(st.lists(EVENTS, max_size=40))
def test_an_acknowledged_push_counts_once_or_is_counted_as_lost(events: list[str]) -> None:
    run = Restarting()
    num_lost = 0
    for event in events:
        what, _, rank = event.partition(" ")
        if what == "save":
            run.save()
        elif what == "server":
            run.lose_server()
            num_lost += run.server.num_lost
        elif what == "worker":
            run.lose_worker(int(rank))
        else:
            if run.lost_acks[int(rank)] is not None:
                run.join(int(rank))  # a worker repeats what was not acknowledged before it continues
            run.push(int(rank), run.clocks[int(rank)] + 1, is_acked=what == "push")
        run.check()
    assert num_lost == run.num_lost
