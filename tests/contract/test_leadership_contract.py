"""Every leadership passes the same suite; below it are the promises of a lease in a database."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leadership_contract import LeadershipContract, SharedLeadershipContract
from postgres import PostgresServer

from strata.clock import ManualClock
from strata.coordinator.config import LeadershipConfig
from strata.coordinator.journal import Leadership, open_journal, open_leadership
from strata.coordinator.journal.leadership import NEVER_S
from strata.errors import ConfigError, JournalError, JournalFenced

LEASE_S = 5.0


class Claims:
    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = ManualClock()
        self._claims: list[Leadership] = []

    def claim(self) -> Leadership:
        config = LeadershipConfig(leader_lease_s=LEASE_S)
        self._claims.append(open_leadership(self.url, config=config, clock=self.clock))
        return self._claims[-1]

    def close(self) -> None:
        for claim in self._claims:
            claim.close()


class TestMemory(LeadershipContract):
    @pytest.fixture
    def state(self) -> Claims:
        return Claims("memory")


class TestSqlite(SharedLeadershipContract):
    @pytest.fixture
    def state(self, tmp_path: Path) -> Iterator[Claims]:
        state = Claims(str(tmp_path / "new" / "coordinator.db"))
        yield state
        state.close()

    def test_the_journal_of_a_leader_uses_its_lock(self, state: Claims) -> None:
        one, other = state.claim(), state.claim()
        term = one.try_acquire("a", "a:1")
        journal = open_journal(state.url, term=term)
        assert journal.load().last_seq == 0
        assert other.try_acquire("b", "b:1") is None
        journal.close()
        assert other.try_acquire("b", "b:1") is not None

    def test_a_path_that_cannot_be_used_is_refused_with_the_cure(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="another state"):
            open_leadership(str(tmp_path / "file" / "coordinator.db")).try_acquire("a", "a:1")


class TestPostgres(SharedLeadershipContract):
    @pytest.fixture
    def state(self, postgres: PostgresServer) -> Iterator[Claims]:
        state = Claims(postgres.new_state())
        yield state
        state.close()

    def test_an_expired_lease_is_taken_and_the_old_leader_is_fenced(
        self, state: Claims, postgres: PostgresServer
    ) -> None:
        one, other = state.claim(), state.claim()
        one.try_acquire("a", "a:1")
        expire(postgres, state.url)
        assert other.leader() is None
        term = other.try_acquire("b", "b:1")
        assert term is not None
        assert term.number == 2
        with pytest.raises(JournalFenced, match="term 1 is over"):
            one.renew()
        assert one.valid_until_s == NEVER_S

    def test_an_expired_lease_that_was_not_taken_is_renewed(self, state: Claims, postgres: PostgresServer) -> None:
        one, other = state.claim(), state.claim()
        one.try_acquire("a", "a:1")
        expire(postgres, state.url)
        one.renew()
        assert other.try_acquire("b", "b:1") is None

    def test_the_local_deadline_counts_from_before_the_renewal(self, state: Claims) -> None:
        one = state.claim()
        one.try_acquire("a", "a:1")
        assert one.valid_until_s == state.clock.monotonic_s() + LEASE_S
        state.clock.advance(3.0)
        one.renew()
        assert one.valid_until_s == state.clock.monotonic_s() + LEASE_S

    def test_a_leader_is_not_replaced_in_the_middle_of_an_append(self, state: Claims, postgres: PostgresServer) -> None:
        """The next term starts after the append has finished, and sees what it wrote."""
        one, other = state.claim(), state.claim()
        term = one.try_acquire("a", "a:1")
        journal = open_journal(state.url, term=term)
        journal.load()
        writer = journal._connect()  # type: ignore[attr-defined]
        with writer.begin():
            journal._check_fence(writer)  # type: ignore[attr-defined]
            one.renew()  # does not wait for the append
            expire(postgres, state.url)
            assert other.try_acquire("b", "b:1") is None
        assert other.try_acquire("b", "b:1") is not None
        writer.close()
        journal.close()

    def test_only_one_of_many_concurrent_candidates_leads_on_a_new_database(self, state: Claims) -> None:
        claims = [state.claim() for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            terms = list(pool.map(lambda claim: claim.try_acquire("x", "x:1"), claims))
        assert [term.number for term in terms if term is not None] == [1]

    def test_an_unreachable_database_is_reported_without_its_password(self) -> None:
        claim = open_leadership("postgresql://u:secret@127.0.0.1:1/nowhere")
        with pytest.raises(JournalError, match="cannot reach") as refusal:
            claim.try_acquire("a", "a:1")
        assert "secret" not in str(refusal.value)
        claim.release()


def expire(postgres: PostgresServer, url: str) -> None:
    postgres.sql("UPDATE strata_leader SET expires_at = clock_timestamp() - interval '1 second'", url)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leader_lease_s": 0.1}, "set it to 0.5 or more"),
        ({"poll_s": 0.0}, "greater than 0"),
        ({"poll_s": 6.0}, "at most"),
    ],
)
def test_a_lease_that_cannot_work_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LeadershipConfig(**settings)
