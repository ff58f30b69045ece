"""Every failure of a run as a sequence of moments."""

from __future__ import annotations

import pytest

from strata.launch.record.recovery import GenerationMoment, recoveries
from strata.launch.record.timeline import RunEvent


def event(at_s: float, what: str, text: str = "", **more: int) -> RunEvent:
    return RunEvent(at_s=at_s, monotonic_s=at_s, what=what, text=text, **more)  # type: ignore[arg-type]


FAILURE = [
    event(0.0, "started"),
    event(1.0, "first_step", step=1),
    event(10.0, "failed", "rank 1: killed by signal 9"),
    event(10.1, "failed", "rank 0: exit code 1"),
    event(10.5, "started", attempt=1),
    event(11.0, "chosen", attempt=1, step=40),
    event(12.0, "restored", attempt=1, step=40),
    event(13.0, "first_step", attempt=1, step=41),
]


def test_a_failure_has_all_its_moments_in_order() -> None:
    (found,) = recoveries(
        FAILURE, [GenerationMoment(at_s=0.1, generation=1), GenerationMoment(at_s=10.2, generation=2)]
    )
    assert found.at_s == {
        "detected": 10.0,
        "generation": 10.2,
        "started": 10.5,
        "chosen": 11.0,
        "loaded": 12.0,
        "first_step": 13.0,
    }
    assert (found.rank, found.cause, found.step, found.generation) == (1, "rank 1: killed by signal 9", 40, 2)
    assert found.took_s == 3.0


def test_the_checkpoint_that_was_loaded_counts_if_the_first_choice_was_rejected() -> None:
    again = [event(11.5, "chosen", attempt=1, step=30), *FAILURE[6:], event(12.5, "chosen", attempt=1, step=20)]
    (found,) = recoveries([*FAILURE[:6], *again])
    assert (found.at_s["chosen"], found.at_s["loaded"]) == (11.5, 12.0)


def test_a_run_without_failures_has_no_recoveries() -> None:
    assert recoveries(FAILURE[:2]) == []


def test_a_later_cause_replaces_the_first_failure() -> None:
    (found,) = recoveries([*FAILURE[:4], event(10.2, "cause", "rank 0: out of memory"), *FAILURE[4:]])
    assert (found.rank, found.cause) == (0, "rank 0: out of memory")


def test_a_failure_that_ended_the_run_stays_open() -> None:
    (found,) = recoveries(FAILURE[:3])
    assert (found.attempt, found.took_s) == (None, None)


def test_two_failures_are_two_recoveries() -> None:
    second = [event(20.0, "failed", "rank 0: exit code 1", attempt=1), event(21.0, "started", attempt=2)]
    found = recoveries([*FAILURE, *second])
    assert [(each.failed_attempt, each.attempt) for each in found] == [(0, 1), (1, 2)]


def test_a_worker_that_is_restarted_alone_recovers_in_the_same_attempt() -> None:
    alone = [event(10.0, "failed", "rank 2: exit code 1"), event(10.5, "restarted", rank=2)]
    (found,) = recoveries(alone)
    assert (found.failed_attempt, found.attempt, found.at_s["started"]) == (0, 0, 10.5)


def test_the_loss_of_a_worker_before_its_detection_belongs_to_the_failure() -> None:
    (found,) = recoveries(FAILURE, [GenerationMoment(at_s=9.8, generation=2)])
    assert found.at_s["generation"] == 10.0


def test_a_resume_after_the_end_of_a_run_is_not_a_recovery() -> None:
    ended = [*FAILURE[:3], event(10.2, "finished", "failed: no restarts allowed")]
    resumed = [event(500.0, "started", attempt=1), event(502.0, "first_step", attempt=1, step=41)]
    (found,) = recoveries([*ended, *resumed], [GenerationMoment(at_s=501.0, generation=9)])
    assert (found.attempt, found.took_s, found.generation) == (None, None, None)


def test_a_failure_after_a_resume_in_the_same_attempt_is_not_lost() -> None:
    ended = [*FAILURE[:3], event(10.2, "finished", "failed: no restarts allowed")]
    again = [event(500.0, "started", attempt=1), event(510.0, "failed", "rank 0: exit code 1", attempt=1)]
    found = recoveries([*ended, *again])
    assert [(each.failed_attempt, each.at_s["detected"]) for each in found] == [(0, 10.0), (1, 510.0)]


ALONE = [event(10.0, "failed", "server 0: exit code 1", rank=2), event(10.5, "restarted", rank=2)]


def test_a_worker_that_is_restarted_alone_has_recovered_with_its_own_first_step() -> None:
    others = [event(9.9, "first_step", rank=0, step=1), event(10.7, "first_step", rank=0, step=1)]
    (found,) = recoveries([*ALONE, *others])
    assert found.took_s is None
    own = [event(11.0, "restored", rank=2, step=30), event(12.0, "first_step", rank=2, step=31)]
    (found,) = recoveries([*ALONE, *others, *own])
    assert (found.at_s["loaded"], found.step, found.took_s) == (11.0, 30, 2.0)


def test_what_a_worker_did_before_its_failure_is_no_part_of_the_recovery() -> None:
    (found,) = recoveries([*ALONE, event(9.0, "first_step", rank=2, step=1), event(12.0, "first_step", rank=2, step=9)])
    assert (found.first_step, found.took_s) == (9, 2.0)


def test_two_workers_that_are_restarted_alone_are_two_recoveries() -> None:
    both = [
        event(10.0, "failed", "server 0: exit code 1", rank=2),
        event(10.1, "failed", "server 1: exit code 1", rank=3),
        event(10.5, "restarted", rank=3),
        event(10.6, "restarted", rank=2),
        event(12.0, "first_step", rank=2, step=9),
        event(13.0, "first_step", rank=3, step=9),
    ]
    assert [(each.rank, each.took_s) for each in recoveries(both)] == [(2, 2.0), (3, pytest.approx(2.9))]


def test_the_first_step_of_a_restarted_worker_does_not_end_the_recovery_of_its_attempt() -> None:
    late = [
        *FAILURE[:5],
        event(11.0, "failed", "server 0: exit code 1", attempt=1, rank=2),
        event(11.5, "restarted", attempt=1, rank=2),
        event(12.0, "first_step", attempt=1, rank=2, step=41),
        event(13.0, "first_step", attempt=1, rank=0, step=41),
    ]
    whole, alone = recoveries(late)
    assert (whole.took_s, alone.took_s) == (3.0, 1.0)
