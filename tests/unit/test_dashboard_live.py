"""The feed of live messages and what is put into it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from strata.dashboard.live.changes import MAX_CHANGED_WORKERS, worker_changes
from strata.dashboard.live.feed import Feed, frame
from strata.dashboard.sample import JobSample, WorkerSample

PUBLISHED = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 40)), max_size=50)
"""Keys and sizes of messages."""


def test_a_frame_is_a_named_event_with_its_cursor() -> None:
    assert frame("job", b"{}", "8f3a-7") == b"event: job\nid: 8f3a-7\ndata: {}\n\n"


@given(PUBLISHED, st.integers(0, 50))
def test_a_client_gets_every_message_after_its_cursor_unless_a_later_one_replaces_it(
    published: list[tuple[str, int]], seq: int
) -> None:
    feed = Feed("boot")
    for key, size in published:
        feed.publish("x", b"1" * size, key)

    got = [message.seq for message in feed.since(min(seq, feed.last_seq))]

    later = [(number, key) for number, (key, _) in enumerate(published, start=1) if number > seq]
    newest = {key: number for number, key in later}
    assert got == [number for number, key in later if not key or newest[key] == number]


@given(PUBLISHED, st.integers(0, 50))
def test_the_feed_stays_within_its_bounds_and_knows_who_missed_something(
    published: list[tuple[str, int]], seq: int
) -> None:
    feed = Feed("boot", max_messages=5, max_bytes=300)
    for key, size in published:
        feed.publish("x", b"1" * size, key)

    kept = feed.since(0)
    sizes = [len(frame("x", b"1" * size, f"boot-{n}")) for n, (_, size) in enumerate(published, start=1)]
    num_kept, total = 0, 0
    for size in reversed(sizes):
        if num_kept == 5 or total + size > 300:
            break
        num_kept, total = num_kept + 1, total + size
    assert len(kept) <= num_kept
    assert feed.has_since(seq) == (seq >= len(published) - num_kept)


def test_only_cursors_of_this_process_are_understood() -> None:
    feed = Feed("8f3a")
    feed.publish("x", b"1")

    assert (feed.cursor, feed.seq_of(feed.cursor), feed.seq_of("8f3a-0")) == ("8f3a-1", 1, 0)
    for strange in ("", "1", "other-1", "8f3a-2", "8f3a--1", "8f3a-x", "8f3a-²", "8f3a-" + "1" * 5_000):
        assert feed.seq_of(strange) is None, strange


# -- workers -----------------------------------------------------------------------------------------------------------


def job(num_workers: int, **changes: object) -> JobSample:
    workers = (
        WorkerSample(f"w{number}", number, "TRAINING", 5, 0, number + 1, None, 0.1, False, False, 0.0)
        for number in range(num_workers)
    )
    return JobSample("job", 1, "", tuple(replace(each, **changes) for each in workers))  # type: ignore[arg-type]


def test_a_worker_that_only_makes_steps_is_no_change() -> None:
    assert worker_changes(job(3), job(3, step=6, silent_s=0.9), 1.0) is None


def test_workers_that_join_leave_or_change_their_state_are_listed() -> None:
    joined = worker_changes(None, job(2), 1.0)
    left = worker_changes(job(3), job(2), 1.0)
    changed = worker_changes(job(2), job(2, is_suspect=True), 1.0)

    assert joined is not None
    assert ([each.worker_id for each in joined.changed], joined.gone) == (["w0", "w1"], [])
    assert left is not None
    assert (left.changed, left.gone, left.is_complete) == ([], ["w2"], True)
    assert changed is not None
    assert [each.suspect for each in changed.changed] == [True, True]


def test_more_changes_than_fit_are_marked_as_incomplete() -> None:
    found = worker_changes(None, job(MAX_CHANGED_WORKERS + 1), 1.0)

    assert found is not None
    assert (len(found.changed), found.is_complete) == (MAX_CHANGED_WORKERS, False)
