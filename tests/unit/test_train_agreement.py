"""Ranks agree on a step: every interleaving of training and the threads beside it."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.train.agreement import Agreement, Due

DEADLINE_S = 30.0


def test_nothing_is_due_without_a_request() -> None:
    agreement = Agreement()
    assert all(agreement.take_due(step, timeout_s=0.0) == [] for step in range(5))


def test_what_was_agreed_is_due_once_and_after_its_step() -> None:
    agreement = Agreement()
    agreement.take_due(3, timeout_s=0.0)
    assert agreement.set_limit() == 4
    due = Due("stop", 6, "asked")
    agreement.agree(due)
    assert [agreement.take_due(step, timeout_s=0.0) for step in (4, 5, 6, 7)] == [[], [], [due], []]


def test_what_was_agreed_while_a_checkpoint_was_loaded_is_due_after_the_next_step() -> None:
    agreement = Agreement()
    assert agreement.set_limit() == 1
    due = Due("stop", 1, "asked")
    agreement.agree(due)
    agreement.restored(40)
    assert agreement.take_due(41, timeout_s=0.0) == [due]


def test_training_waits_at_its_limit_until_the_step_is_known() -> None:
    agreement = Agreement()
    agreement.take_due(3, timeout_s=0.0)
    agreement.set_limit()
    found: list[list[Due]] = []
    training = threading.Thread(target=lambda: found.append(agreement.take_due(4, timeout_s=DEADLINE_S)))
    training.start()
    due = Due("checkpoint", 4, "asked")
    agreement.agree(due)
    training.join(DEADLINE_S)
    assert found == [[due]]


def test_training_continues_when_an_agreement_fails() -> None:
    agreement = Agreement()
    agreement.set_limit()
    agreement.give_up()
    assert agreement.take_due(100, timeout_s=DEADLINE_S) == []


def test_steps_that_are_not_looked_at_one_by_one_are_still_due_alike() -> None:
    agreement = Agreement()
    agreement.set_limit()
    due = Due("stop", 7, "asked")
    agreement.agree(due)
    assert agreement.take_due(5, timeout_s=0.0) == []
    assert agreement.take_due(10, timeout_s=0.0) == [due]


class World:
    """Ranks that train in lockstep: none begins step n + 1 before all have begun step n."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = [Agreement() for _ in range(num_ranks)]
        self.done = [0] * num_ranks
        self.limits: dict[int, int] = {}
        self.agreed: set[int] = set()
        self.found: dict[int, int] = {}

    def answer(self, rank: int) -> None:
        """Let the thread beside a rank's training run."""
        if rank not in self.limits:
            self.limits[rank] = self.ranks[rank].set_limit()
        elif len(self.limits) == len(self.ranks) and rank not in self.agreed:
            self.agreed.add(rank)
            self.ranks[rank].agree(Due("stop", max(self.limits.values()), "asked"))

    def train(self, rank: int) -> None:
        """Make one step, unless it would have to wait."""
        step = self.done[rank] + 1
        is_held = rank in self.limits and rank not in self.agreed and step >= self.limits[rank]
        if rank in self.found or is_held or self.done[rank] > min(self.done):
            return
        self.done[rank] = step
        if self.ranks[rank].take_due(step, timeout_s=0.0):
            self.found[rank] = step


@settings(max_examples=300)
@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=100))
def test_all_ranks_find_it_due_after_the_same_step_in_any_interleaving(
    num_ranks: int, turns: list[tuple[bool, int]]
) -> None:
    world = World(num_ranks)
    for is_training, number in turns:
        (world.train if is_training else world.answer)(number % num_ranks)
    for _ in range(2 * num_ranks + max(world.done) + 2):  # lets every rank catch up
        for rank in range(num_ranks):
            world.answer(rank)
            world.train(rank)
    assert world.found == dict.fromkeys(range(num_ranks), max(world.limits.values()))


def test_a_rank_that_waits_between_steps_sees_a_stop_and_leaves_it_to_all_ranks() -> None:
    agreement = Agreement()
    agreement.agree(Due("checkpoint", 8, "a minute"))
    assert agreement.reason_of("stop") == ""
    agreement.agree(Due("stop", 8, "strata stop"))
    assert agreement.reason_of("stop") == "strata stop"
    assert [due.wish for due in agreement.take_due(8, timeout_s=0)] == ["checkpoint", "stop"]
