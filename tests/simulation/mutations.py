"""Coordinators with a deliberate bug, each of which the simulation must detect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.coordinator.serve.engine import Engine
from strata.coordinator.state.barriers import Barriers, Ticket
from strata.coordinator.state.commands import Commands
from strata.coordinator.state.membership import Membership
from strata.coordinator.state.shards import ShardBook

Patch = pytest.MonkeyPatch


def a_barrier_that_counts_arrivals(patch: Patch) -> None:
    arrive = Barriers.arrive

    def counted(
        self: Barriers, membership: Any, worker_id: str, barrier_id: str, step: int, *rest: Any, **how: Any
    ) -> Any:
        standing = self.open.get((barrier_id, step))
        name = f"{worker_id}#{len(standing.arrived)}" if standing else worker_id
        return arrive(self, membership, name, barrier_id, step, *rest, **how)

    patch.setattr(Barriers, "arrive", counted)


def answers_before_the_commit(patch: Patch) -> None:
    call = Engine.call

    def early(self: Engine, decide: Any, done: Callable[[Any], None]) -> None:
        answered: list[Any] = []

        def decided(core: Any, clock: Any) -> Any:
            answer = decide(core, clock)
            if not callable(answer) and not isinstance(answer, Ticket):
                answered.append(answer)
                done(answer)
            return answer

        call(self, decided, lambda answer: None if answered else done(answer))

    patch.setattr(Engine, "call", early)


def no_check_of_the_generation(patch: Patch) -> None:
    patch.setattr(Membership, "fenced", lambda self, worker_id, fence, generation: self.member(worker_id, fence))


def no_check_of_the_incarnation(patch: Patch) -> None:
    member = Membership.member
    patch.setattr(Membership, "member", lambda self, worker_id, fence: member(self, worker_id, 0))


def suspicion_without_incarnation(patch: Patch) -> None:
    def suspect(self: Membership, worker_id: str, fence: int, now_s: float) -> None:
        if worker_id in self.members:
            self.members[worker_id].suspect_since_s = now_s

    patch.setattr(Membership, "suspect", suspect)


def releases_that_a_snapshot_forgets(patch: Patch) -> None:
    patch.setattr(Barriers, "snapshot", lambda self: ())


def shards_that_stay_with_the_dead(patch: Patch) -> None:
    assign = ShardBook.assign
    patch.setattr(
        ShardBook,
        "assign",
        lambda self, dataset, members, successors=None: [] if successors else assign(self, dataset, members),
    )


def silence_that_counts_while_we_stood_still(patch: Patch) -> None:
    patch.setattr(Membership, "excuse", lambda self, seconds, now_s: None)


def commands_that_may_be_sent_twice(patch: Patch) -> None:
    sent = Commands.apply_sent

    def forgetful(self: Commands, event: Any) -> None:
        sent(self, event)
        self.requests.clear()

    patch.setattr(Commands, "apply_sent", forgetful)


def notices_without_the_command_before(patch: Patch) -> None:
    patch.setattr(Commands, "previous_id", lambda self, worker_id: 0)


MUTATIONS = (
    a_barrier_that_counts_arrivals,
    answers_before_the_commit,
    no_check_of_the_generation,
    no_check_of_the_incarnation,
    suspicion_without_incarnation,
    releases_that_a_snapshot_forgets,
    shards_that_stay_with_the_dead,
    silence_that_counts_while_we_stood_still,
    commands_that_may_be_sent_twice,
    notices_without_the_command_before,
)
