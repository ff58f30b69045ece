"""Events of a run, and the recoveries that they show."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.launch.record.timeline import RunEvent, failed_rank, hours, in_words, recoveries, time_in_words

WALL_S = 1_700_000_000.0


def event(what: str, at_s: float, attempt: int = 0, **more: object) -> RunEvent:
    fields = {"at_s": WALL_S + at_s, "monotonic_s": 100.0 + at_s, "what": what, "attempt": attempt, **more}
    return msgspec.convert(fields, RunEvent)


def test_a_recovery_is_measured_from_the_moment_at_which_the_failure_was_seen() -> None:
    events = [
        event("started", 0.0),
        event("first_step", 1.0),
        event("failed", 5.0, text="rank 2: killed by SIGKILL"),
        event("started", 5.01, 1),
        event("restored", 5.2, 1, rank=0),
        event("restored", 5.3, 1, rank=1),
        event("first_step", 5.5, 1, rank=1),
        event("first_step", 5.6, 1, rank=0),
        event("restored", 5.7, 1, rank=2),
        event("checkpoint", 6.0, 1),
    ]

    (found,) = recoveries(events)

    assert (found.attempt, found.failure, found.detected_s) == (1, "rank 2: killed by SIGKILL", 105.0)
    assert found.started_ms == pytest.approx(10)
    assert found.restored_ms == pytest.approx(300), "of the last worker that a step was made with"
    assert found.first_step_ms == pytest.approx(500)


def test_an_attempt_that_fails_before_its_first_step_is_a_separate_recovery() -> None:
    events = [
        event("failed", 1.0),
        event("started", 1.1, 1),
        event("failed", 1.3, 1),
        event("waiting", 1.4, 1),
        event("started", 1.5, 2),
        event("first_step", 2.0, 2),
    ]

    first, second = recoveries(events)

    assert (first.attempt, first.first_step_ms, first.restored_ms) == (1, None, None)
    assert second.attempt == 2
    assert second.started_ms == pytest.approx(200)
    assert second.first_step_ms == pytest.approx(700)


def test_the_first_step_of_a_worker_that_was_restarted_alone_is_not_that_of_its_attempt() -> None:
    events = [
        event("failed", 1.0),
        event("started", 1.1, 1),
        event("failed", 1.3, 1, rank=2),
        event("restarted", 1.4, 1, rank=2),
        event("first_step", 1.5, 1, rank=2),
        event("first_step", 2.0, 1, rank=0),
    ]
    (found,) = recoveries(events)
    assert found.first_step_ms == pytest.approx(1_000)


def test_failures_that_follow_from_the_first_are_not_counted() -> None:
    events = [event("failed", 1.0, text="a"), event("failed", 1.5, text="b"), event("started", 2.0, 1)]

    (found,) = recoveries(events)

    assert found.failure == "a"
    assert found.started_ms == pytest.approx(1_000)


def test_an_event_reported_after_the_next_failure_still_counts() -> None:
    events = [
        event("failed", 1.0),
        event("started", 1.1, 1),
        event("failed", 2.0, 1),
        event("first_step", 1.5, 1),
        event("started", 2.1, 2),
    ]

    assert recoveries(events)[0].first_step_ms == pytest.approx(500)
    assert recoveries(events)[1].first_step_ms is None


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event("started", 0), event("failed", 1)],
        [event("started", 0), event("stopping", 1), event("finished", 2), event("started", 9, 1)],
        [event("failed", 1), event("finished", 1), event("started", 9, 1)],
        [event("failed", 1, 2), event("started", 9, 0)],
        [event("failed", 1), msgspec.structs.replace(event("started", 9, 1), monotonic_s=3.0)],
    ],
    ids=["nothing", "no start", "no failure", "resumed", "counted anew", "another boot"],
)
def test_what_is_not_followed_by_an_attempt_of_the_same_life_is_no_recovery(events: list[RunEvent]) -> None:
    assert recoveries(events) == []


WHATS = st.sampled_from(["started", "failed", "chosen", "restored", "first_step", "finished", "checkpoint", "hung"])


@given(st.lists(st.tuples(WHATS, st.integers(0, 4)), max_size=30))
def test_times_of_a_recovery_follow_one_another_whatever_was_noted(noted: list[tuple[str, int]]) -> None:
    found = recoveries(event(what, float(n), attempt) for n, (what, attempt) in enumerate(noted))

    assert len(found) <= sum(what == "failed" for what, _ in noted)
    for each in found:
        times = [each.started_ms, each.restored_ms, each.first_step_ms]
        known = [time for time in times if time is not None]
        assert known == sorted(known)
        assert known[0] > 0


def test_an_event_is_one_line_without_control_characters() -> None:
    line = in_words(event("failed", 12.345, text="rank 2: \x1b[2J\nValueError:\tbad [bold]row 7"), WALL_S)

    assert line == r"   12.35 s  failed: rank 2: \x1b[2J ValueError: bad [bold]row 7"


def test_an_event_without_text_shows_its_fields() -> None:
    assert in_words(event("first_step", 1.0, 1, rank=0, step=51), WALL_S).endswith(
        "first step: attempt 1, rank 0, step 51"
    )
    assert in_words(event("started", 1.0), WALL_S).endswith("started: attempt 0")


def test_times_are_short_while_they_are_and_readable_when_they_are_not() -> None:
    assert time_in_words(0.5) == "0.50 s"
    assert time_in_words(-2) == "-2.00 s"
    assert time_in_words(1_000) == "0:16:40"
    assert time_in_words(-3_600) == "-1:00:00"
    assert hours(59.9) == "0:00:59"
    assert hours(2 * 86_400 + 61) == "2d 0:01:01"


def test_the_failed_rank_is_read_from_the_event_or_its_text() -> None:
    assert failed_rank(event("failed", 1, rank=3, text="rank 2: exit code 1")) == 3
    assert failed_rank(event("failed", 1, text="rank 12: exit code 1")) == 12
    assert failed_rank(event("failed", 1, text="the node is gone")) is None
