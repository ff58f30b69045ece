"""Hung workers are found; others are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.state.membership import WorkerStateName
from strata.coordinator.state.views import WorkerInfo
from strata.launch.watchdog import Hung, StepWatch

LIMIT_S = 10.0


def worker(rank: int, step: int, *, state: WorkerStateName = "TRAINING", silent_s: float = 0.1) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"rank-{rank}",
        incarnation=1,
        rank=rank,
        state=state,
        step=step,
        epoch=0,
        capacity=1.0,
        hostname="here",
        silent_s=silent_s,
        suspect=False,
        metrics={},
    )


def test_a_hung_worker_is_found_with_those_that_wait_for_it() -> None:
    watch = StepWatch(LIMIT_S)
    for now_s in range(5):  # rank 2 hangs after step 4, the others wait in the collective of step 5
        assert watch.look({rank: worker(rank, now_s) for rank in range(3)}, {0, 1, 2}, now_s=float(now_s)) is None
    stuck = {0: worker(0, 5), 1: worker(1, 5), 2: worker(2, 4)}
    assert watch.look(stuck, {0, 1, 2}, now_s=5.0) is None
    assert watch.look(stuck, {0, 1, 2}, now_s=14.0) is None
    assert watch.look(stuck, {0, 1, 2}, now_s=14.5) == Hung((0, 1, 2), 10.5)


def test_a_stopped_process_is_found_after_the_coordinator_has_removed_it() -> None:
    """It sends no heartbeats, so it is no longer a member; and no other worker waits for it."""
    watch = StepWatch(LIMIT_S)
    watch.look({0: worker(0, 7)}, {0}, now_s=0.0)
    watch.look({0: worker(0, 7, silent_s=4.9)}, {0}, now_s=4.9)
    assert watch.look({}, {0}, now_s=9.0) is None
    assert watch.look({}, {0}, now_s=10.1) == Hung((0,), 10.1)


def test_a_worker_that_has_left_is_not_watched() -> None:
    watch = StepWatch(LIMIT_S)
    watch.look({0: worker(0, 7)}, {0}, now_s=0.0)
    assert watch.look({}, {0}, now_s=1_000.0) is None


def test_a_worker_that_was_silent_and_returned_was_not_removed() -> None:
    watch = StepWatch(LIMIT_S)
    watch.look({0: worker(0, 7, silent_s=5.0)}, {0}, now_s=0.0)
    watch.look({0: worker(0, 8)}, {0}, now_s=1.0)
    assert watch.look({}, {0}, now_s=1_000.0) is None


def test_only_training_is_watched_and_a_limit_of_0_is_none() -> None:
    watch, unlimited = StepWatch(LIMIT_S), StepWatch(0.0)
    for now_s in (0.0, 100.0, 200.0):
        assert watch.look({0: worker(0, 0, state="RECOVERING")}, {0}, now_s=now_s) is None
        assert unlimited.look({0: worker(0, 5)}, {0}, now_s=now_s) is None


@given(st.lists(st.floats(0.01, LIMIT_S), min_size=1, max_size=50))
def test_a_worker_that_steps_within_the_limit_is_never_found(pauses_s: list[float]) -> None:
    watch, now_s = StepWatch(LIMIT_S), 0.0
    for step, pause_s in enumerate(pauses_s):
        assert watch.look({0: worker(0, step)}, {0}, now_s=now_s) is None
        assert watch.look({0: worker(0, step)}, {0}, now_s=now_s + pause_s * 0.999) is None
        now_s += pause_s


@given(st.sets(st.integers(0, 5), min_size=1), st.floats(1.01, 100.0))
def test_whose_process_has_ended_is_not_found(ended: set[int], factor: float) -> None:
    watch = StepWatch(LIMIT_S)
    members = {rank: worker(rank, 3) for rank in range(6)}
    watch.look(members, set(range(6)), now_s=0.0)
    found = watch.look(members, set(range(6)) - ended, now_s=LIMIT_S * factor)
    assert set(found.ranks if found else ()) == set(range(6)) - ended


def test_with_a_limit_of_the_users_own_a_deadlock_before_the_first_step_is_found() -> None:
    watch = StepWatch(LIMIT_S, is_start_watched=True)
    starting = {0: worker(0, 0, state="RECOVERING")}
    assert watch.look({}, {0, 1}, now_s=0.0) is None
    assert watch.look(starting, {0, 1}, now_s=100.0) is None, "imports took 100 s"
    assert watch.look(starting, {0, 1}, now_s=109.0) is None, "rank 1 has not even joined"
    assert watch.look(starting, {0, 1}, now_s=110.5) == Hung((0, 1), 10.5)


def test_after_the_first_step_the_clock_of_the_start_does_not_count() -> None:
    watch = StepWatch(LIMIT_S, is_start_watched=True)
    watch.look({0: worker(0, 0, state="RECOVERING")}, {0}, now_s=101.0)
    assert watch.look({0: worker(0, 0)}, {0}, now_s=109.0) is None
    assert watch.look({0: worker(0, 0)}, {0}, now_s=118.0) is None
    assert watch.look({0: worker(0, 0)}, {0}, now_s=119.5) == Hung((0,), 10.5)


def test_a_script_that_never_joins_is_not_watched() -> None:
    assert StepWatch(LIMIT_S, is_start_watched=True).look({}, {0, 1}, now_s=1_000.0) is None
