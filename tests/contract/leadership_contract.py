"""The contract of every leadership. An implementation supplies a fixture `state` that several coordinators can
claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest

from strata.coordinator.journal import Leadership
from strata.coordinator.journal.leadership import NEVER_S
from strata.errors import JournalFenced


class ClaimedState(Protocol):
    def claim(self) -> Leadership:
        """Return a coordinator's claim; always to the same state."""
        ...

    def close(self) -> None: ...


class LeadershipContract:
    @pytest.fixture
    def one(self, state: ClaimedState) -> Leadership:
        return state.claim()

    def test_there_is_no_leader_at_first(self, one: Leadership) -> None:
        assert one.leader() is None
        assert one.valid_until_s == NEVER_S
        with pytest.raises(JournalFenced):
            one.renew()
        one.release()

    def test_the_first_candidate_leads_and_publishes_its_address(self, one: Leadership) -> None:
        term = one.try_acquire("process 7 on node", "10.0.0.7:50051")
        assert term is not None
        leader = one.leader()
        assert leader is not None
        assert (leader.term, leader.holder, leader.address) == (term.number, "process 7 on node", "10.0.0.7:50051")
        assert leader.expires_in_s > 0
        assert one.valid_until_s > 0

    def test_a_leader_renews(self, one: Leadership) -> None:
        one.try_acquire("a", "a:1")
        before_s = one.valid_until_s
        one.renew()
        assert one.valid_until_s >= before_s

    def test_a_release_ends_the_leadership_and_the_next_term_is_higher(self, one: Leadership) -> None:
        first = one.try_acquire("a", "a:1")
        one.release()
        one.release()
        assert one.valid_until_s == NEVER_S
        assert one.leader() is None
        with pytest.raises(JournalFenced):
            one.renew()
        second = one.try_acquire("b", "b:1")
        assert first is not None
        assert second is not None
        assert second.number == first.number + 1


class SharedLeadershipContract(LeadershipContract):
    """For a state that several processes can access."""

    @pytest.fixture
    def other(self, state: ClaimedState) -> Iterator[Leadership]:
        other = state.claim()
        yield other
        other.release()

    def test_only_one_leads_and_the_others_know_its_address(self, one: Leadership, other: Leadership) -> None:
        assert one.try_acquire("a", "a:1") is not None
        assert other.try_acquire("b", "b:1") is None
        assert other.valid_until_s == NEVER_S
        leader = other.leader()
        assert leader is not None
        assert (leader.holder, leader.address) == ("a", "a:1")

    def test_after_a_release_the_next_one_leads_at_once(self, one: Leadership, other: Leadership) -> None:
        first = one.try_acquire("a", "a:1")
        one.release()
        second = other.try_acquire("b", "b:1")
        assert first is not None
        assert second is not None
        assert second.number == first.number + 1
        assert one.try_acquire("a", "a:1") is None
        one.release()
        assert other.leader() is not None, "a candidate that does not lead has nothing to release"
