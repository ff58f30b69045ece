"""The contract of every journal. An implementation supplies a fixture `state`: where its journal is stored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal import Entry, Journal, Loaded, Record
from strata.errors import JournalWriteFailed


class State(Protocol):
    def open(self, config: JournalConfig) -> Journal:
        """Open the journal of this state, not loaded yet."""
        ...

    def reopen(self, journal: Journal, config: JournalConfig) -> Journal:
        """Open the same state as a restarted coordinator would."""
        ...

    def clear(self) -> None:
        """Close everything and start empty."""
        ...


CONFIG = JournalConfig(history_events=10)


def entries(num: int, *, start: int = 1, job_id: str = "job") -> list[Entry]:
    return [Entry(job_id, "stepped", 1_700_000_000.0 + i, b'{"step":%d}' % i) for i in range(start, start + num)]


def records(batch: list[Entry], *, start: int = 1) -> list[Record]:
    return [Record(seq, e.job_id, e.kind, e.at_s, e.payload) for seq, e in enumerate(batch, start)]


class JournalContract:
    @pytest.fixture
    def journal(self, state: State) -> Journal:
        journal = state.open(CONFIG)
        assert journal.load() == Loaded(snapshot=None, snapshot_seq=0, records=[])
        return journal

    def test_a_new_journal_is_empty(self, journal: Journal) -> None:
        assert journal.load().last_seq == 0
        assert journal.read() == []
        assert journal.size_bytes() >= 0

    def test_events_are_numbered_from_1_without_gaps(self, journal: Journal) -> None:
        assert journal.append(entries(3)) == 3
        assert journal.append(entries(2, start=4)) == 5
        assert journal.read() == records(entries(5))

    def test_appending_nothing_changes_nothing(self, journal: Journal) -> None:
        journal.append(entries(3))
        assert journal.append([]) == 3
        assert journal.read() == records(entries(3))

    def test_a_restart_finds_the_appended_events_and_continues(self, state: State, journal: Journal) -> None:
        journal.append(entries(3))
        journal = state.reopen(journal, CONFIG)
        loaded = journal.load()
        assert loaded == Loaded(snapshot=None, snapshot_seq=0, records=records(entries(3)))
        assert loaded.last_seq == 3
        assert journal.append(entries(1, start=4)) == 4
        assert state.reopen(journal, CONFIG).load().records == records(entries(4))

    @pytest.mark.parametrize(
        "entry",
        [
            Entry("", "", 0.0, b""),
            Entry("jöb/✓", "käfer", -1.5, bytes(range(256))),
            Entry("job", "big", 1e300, b"\x00" * 1_000_000),
            Entry("job", "minus zero", -0.0, b"#"),
            Entry("job", "whole", 7.0, b"'; --"),
        ],
        ids=lambda entry: entry.kind or "empty",
    )
    def test_appended_events_round_trip(self, state: State, journal: Journal, entry: Entry) -> None:
        journal.append([entry])
        assert journal.read() == records([entry])
        loaded = state.reopen(journal, CONFIG).load()
        assert loaded.records == records([entry])
        assert loaded.damage is None

    def test_a_snapshot_replaces_the_events_before_it(self, state: State, journal: Journal) -> None:
        assert journal.append(entries(3), snapshot=b"after 3") == 3
        journal.append(entries(2, start=4))
        loaded = state.reopen(journal, CONFIG).load()
        assert (loaded.snapshot, loaded.snapshot_seq) == (b"after 3", 3)
        assert loaded.records == records(entries(5))[3:]
        assert loaded.last_seq == 5

    def test_a_snapshot_without_events_stands_at_the_last_event(self, state: State, journal: Journal) -> None:
        journal.append(entries(3))
        assert journal.append([], snapshot=b"first") == 3
        assert journal.append([], snapshot=b"second") == 3
        journal = state.reopen(journal, CONFIG)
        assert journal.load() == Loaded(snapshot=b"second", snapshot_seq=3, records=[])
        assert journal.append(entries(1, start=4)) == 4

    def test_an_empty_snapshot_of_an_empty_journal_is_a_snapshot(self, state: State, journal: Journal) -> None:
        assert journal.append([], snapshot=b"") == 0
        assert state.reopen(journal, CONFIG).load() == Loaded(snapshot=b"", snapshot_seq=0, records=[])

    def test_loading_again_gives_the_same_state(self, journal: Journal) -> None:
        journal.append(entries(3), snapshot=b"after 3")
        journal.append(entries(2, start=4))
        assert journal.load() == journal.load()
        assert journal.append(entries(1, start=6)) == 6

    def test_history_includes_events_before_the_snapshot(self, journal: Journal) -> None:
        journal.append(entries(3), snapshot=b"after 3")
        journal.append(entries(2, start=4))
        assert journal.read() == records(entries(5))
        assert journal.read(after_seq=2, limit=2) == records(entries(5))[2:4]
        assert journal.read(after_seq=5) == []
        assert journal.read(limit=0) == []

    def test_history_can_be_read_for_one_job(self, journal: Journal) -> None:
        journal.append([*entries(2, job_id="a"), *entries(2, job_id="b"), *entries(1, job_id="a")])
        assert [r.seq for r in journal.read(job_id="a")] == [1, 2, 5]
        assert [r.seq for r in journal.read(job_id="b", after_seq=3)] == [4]
        assert [r.seq for r in journal.read(job_id="a", limit=1)] == [1]
        assert journal.read(job_id="c") == []

    def test_events_are_dropped_when_no_kept_snapshot_and_no_history_needs_them(
        self, state: State, journal: Journal
    ) -> None:
        """The history is 10 events; the second newest snapshot keeps its events, too."""
        oldest = []
        for snapshot_seq in range(8, 49, 8):
            journal.append(entries(8, start=snapshot_seq - 7), snapshot=b"after %d" % snapshot_seq)
            oldest.append(journal.read()[0].seq)
        assert oldest == [1, 7, 15, 23, 31, 39]
        assert journal.read() == records(entries(48))[38:]
        journal.append(entries(3, start=49))
        journal = state.reopen(journal, CONFIG)
        assert journal.load() == Loaded(snapshot=b"after 48", snapshot_seq=48, records=records(entries(51))[48:])
        assert journal.read() == records(entries(51))[38:]

    def test_a_history_of_0_still_keeps_the_events_since_the_older_snapshot(self, state: State) -> None:
        config = JournalConfig(history_events=0)
        journal = state.open(config)
        journal.load()
        for snapshot_seq in (4, 8, 12):
            journal.append(entries(4, start=snapshot_seq - 3), snapshot=b"after %d" % snapshot_seq)
        assert [r.seq for r in journal.read()] == [9, 10, 11, 12]
        assert state.reopen(journal, config).load() == Loaded(snapshot=b"after 12", snapshot_seq=12, records=[])

    def test_a_reader_in_another_thread_sees_whole_batches_in_order(self, journal: Journal) -> None:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: [journal.append(entries(7, start=1 + 7 * i)) for i in range(30)])
            seen = 0
            while seen < 210:
                assert not writing.done() or writing.exception() is None
                found = journal.read()
                assert len(found) % 7 == 0
                assert len(found) >= seen
                seen = len(found)
            assert found == records(entries(210))

    def test_loading_and_appending_may_happen_in_different_threads(self, journal: Journal) -> None:
        journal.append(entries(1))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(journal.append, entries(1, start=2)).result() == 2
            assert journal.load().last_seq == 2
            assert pool.submit(journal.append, entries(1, start=3)).result() == 3

    def test_a_closed_journal_refuses_appends(self, journal: Journal) -> None:
        journal.append(entries(1))
        journal.close()
        journal.close()
        with pytest.raises(JournalWriteFailed, match="closed"):
            journal.append(entries(1, start=2))

    @settings(
        max_examples=25,
        deadline=None,
        # The state is cleared below, and each implementation has its own executor.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(steps=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=12))
    def test_any_history_of_batches_snapshots_and_restarts_adds_up(
        self, state: State, steps: list[tuple[int, bool, bool]]
    ) -> None:
        state.clear()
        journal = state.open(CONFIG)
        journal.load()
        last_seq, snapshot, snapshot_seq = 0, None, 0
        for num, with_snapshot, with_restart in steps:
            batch = entries(num, start=last_seq + 1)
            last_seq += num
            if with_snapshot:
                snapshot, snapshot_seq = b"after %d" % last_seq, last_seq
            assert journal.append(batch, snapshot=snapshot if with_snapshot else None) == last_seq
            if with_restart:
                journal = state.reopen(journal, CONFIG)
                expected = records(entries(last_seq))[snapshot_seq:]
                assert journal.load() == Loaded(snapshot=snapshot, snapshot_seq=snapshot_seq, records=expected)
            kept = journal.read()
            assert kept == records(entries(last_seq))[last_seq - len(kept) :]
            assert len(kept) >= min(last_seq, CONFIG.history_events)
