"""Several workers arrive at a barrier in one call: all are counted, or none."""

from __future__ import annotations

import pytest

from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.state.barriers import BarrierEnded, Released, Ticket
from strata.coordinator.state.job import Job, Outbox
from strata.errors import InvalidArgument, StaleIncarnation, StrataError, UnknownWorker


class Node:
    """A job of a, b and c in generation 1."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.job = Job("j", CoordinatorConfig(state="memory"), self.outbox)
        self.fences = {}
        for worker_id in "abc":
            self.job.register_worker(
                worker_id, instance_id="i", capacity=1.0, hostname="", takeover=False, now_s=0.0, nonce=5
            )
            self.fences[worker_id] = self.job.membership.members[worker_id].joined.fence
        self.job.seal()
        self.outbox.notices.clear()

    def arrive(self, *worker_ids: str, members: str = "", **fences: int) -> Released | Ticket:
        first, *others = [(w, fences.get(w, self.fences.get(w, 1))) for w in worker_ids]
        return self.job.wait_barrier(
            *first, 1, barrier_id="x", step=0, members=frozenset(members), timeout_s=1.0, now_s=0.0, others=others
        )

    @property
    def arrived(self) -> set[str]:
        return {worker for barrier in self.job.barriers.open.values() for worker in barrier.arrived}


def test_several_workers_arrive_in_one_call_and_the_last_call_releases() -> None:
    node = Node()
    ticket = node.arrive("a", "b")
    assert node.arrived == {"a", "b"}
    assert node.arrive("c") == ticket
    assert node.outbox.notices == [BarrierEnded(ticket, Released(1, 3))]
    assert node.arrive("b", "a") == Released(1, 3)


def test_a_repeated_arrival_does_not_reopen_the_barrier() -> None:
    node = Node()
    node.arrive("a", "b", "a")
    node.arrive("c", "a", "b", "c")
    assert node.job.barriers.open == {}
    assert len(node.outbox.notices) == 1


@pytest.mark.parametrize(
    ("others", "fences", "members", "error"),
    [
        (("b",), {"b": 99}, "", StaleIncarnation),
        (("b",), {"b": 0}, "", StaleIncarnation),
        (("b", "z"), {}, "", UnknownWorker),
        (("b", "c"), {}, "ab", InvalidArgument),
        (("a",), {"a": 99}, "", StaleIncarnation),
    ],
)
def test_one_refused_arrival_refuses_the_whole_call(
    others: tuple[str, ...], fences: dict[str, int], members: str, error: type[StrataError]
) -> None:
    node = Node()
    with pytest.raises(error):
        node.arrive("c" if "c" not in others else "a", *others, members=members, **fences)
    assert node.arrived == set()
    assert node.job.barriers.open == {}


def test_a_report_of_suspicion_needs_the_fence_and_changes_nothing_durable() -> None:
    node = Node()
    node.outbox.events.clear()
    node.job.report_suspicion("a", node.fences["a"], "reset", now_s=1.0)
    node.job.report_suspicion("a", node.fences["a"], "reset", now_s=2.0)
    assert node.job.membership.members["a"].suspect_since_s == 1.0
    for fence, error in ((0, InvalidArgument), (node.fences["b"] + 1, StaleIncarnation)):
        with pytest.raises(error):
            node.job.report_suspicion("b", fence, "reset", now_s=1.0)
    with pytest.raises(UnknownWorker):
        node.job.report_suspicion("z", 1, "reset", now_s=1.0)
    assert node.job.membership.members["b"].suspect_since_s is None
    assert node.outbox.events == []
