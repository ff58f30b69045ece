"""Barriers: no worker continues until all have arrived, and no worker waits forever."""

from __future__ import annotations

import math

import pytest
from driving import BAD_COUNTS, BAD_IDS, Driver, ended

from strata.coordinator.config import BarrierConfig, Limits
from strata.coordinator.state.barriers import MAX_MISSING_NAMED, Released, Ticket
from strata.coordinator.state.events import BarrierReleased
from strata.errors import (
    BarrierBroken,
    BarrierMismatch,
    InvalidArgument,
    LimitExceeded,
    StaleGeneration,
    StaleIncarnation,
    UnknownWorker,
)

TICKET = Ticket("job", 1, "sync", 0, 0)


@pytest.fixture
def driver() -> Driver:
    """3 workers, generation 1."""
    driver = Driver()
    driver.join("w0", "w1", "w2")
    return driver


def outcomes(notices) -> dict[Ticket, Released | BarrierBroken]:
    """Outcomes by ticket, in whichever round."""
    found = ended(notices)
    assert len({notice.ticket for notice in found}) == len(found)
    return {notice.ticket._replace(round=0): notice.outcome for notice in found}


def broken(notices, ticket: Ticket = TICKET) -> BarrierBroken:
    outcome = outcomes(notices)[ticket]
    assert isinstance(outcome, BarrierBroken)
    return outcome


# -- release -------------------------------------------------------------------------------------------------------


def test_a_barrier_of_3_is_released_by_the_third(driver: Driver) -> None:
    assert driver.arrive("w0") == TICKET
    assert driver.arrive("w1") == TICKET
    assert driver.settle() == ([], [])
    assert driver.arrive("w2") == TICKET
    events, notices = driver.settle()
    assert [(type(ev), ev.num_members) for ev in events] == [(BarrierReleased, 3)]
    assert outcomes(notices) == {TICKET: Released(1, 3)}


def test_arriving_3_times_counts_once(driver: Driver) -> None:
    for _ in range(3):
        assert driver.arrive("w0") == TICKET
    assert driver.arrive("w1") == TICKET
    assert driver.settle() == ([], [])
    assert driver.job.barriers.open["sync", 0].arrived == {"w0", "w1"}


def test_a_worker_that_arrives_again_after_the_release_is_answered_at_once(driver: Driver) -> None:
    for worker_id in driver.workers:
        driver.arrive(worker_id)
    driver.settle()
    assert driver.arrive("w0") == Released(1, 3)
    assert driver.settle() == ([], [])


def test_a_release_survives_a_restart(driver: Driver) -> None:
    for worker_id in driver.workers:
        driver.arrive(worker_id)
    driver.settle()
    driver.core = driver.restarted()
    assert driver.arrive("w1") == Released(1, 3)


def test_arrivals_do_not_survive_a_restart_and_are_made_again(driver: Driver) -> None:
    driver.arrive("w0")
    driver.arrive("w1")
    driver.core = driver.restarted()
    assert driver.arrive("w2") == TICKET
    assert driver.settle() == ([], [])
    driver.arrive("w0")
    driver.arrive("w1")
    assert outcomes(driver.settle()[1]) == {TICKET: Released(1, 3)}


def test_barriers_of_2_names_and_2_steps_are_4_barriers(driver: Driver) -> None:
    for name in ("a", "b"):
        for step in (0, 1):
            driver.arrive("w0", name, step)
    assert len(driver.job.barriers.open) == 4
    driver.arrive("w1", "a", 1)
    driver.arrive("w2", "a", 1)
    assert outcomes(driver.settle()[1]) == {Ticket("job", 1, "a", 1, 0): Released(1, 3)}
    assert len(driver.job.barriers.open) == 3


def test_a_barrier_of_1_is_released_at_once() -> None:
    driver = Driver()
    driver.register("w0")
    driver.arrive("w0")
    assert outcomes(driver.settle()[1]) == {TICKET: Released(1, 1)}


def test_a_limit_of_2_keeps_the_newest_2_of_3_releases() -> None:
    driver = Driver(limits=Limits(max_released_barriers_per_job=2))
    driver.register("w0")
    for step in range(3):
        driver.arrive("w0", step=step)
    driver.settle()
    assert list(driver.job.barriers.released) == [("sync", 1), ("sync", 2)]


# -- a named set ---------------------------------------------------------------------------------------------------


def test_a_barrier_of_2_named_members_does_not_wait_for_the_third(driver: Driver) -> None:
    driver.arrive("w0", members=["w0", "w2"])
    assert driver.settle() == ([], [])
    driver.arrive("w2", members=["w2", "w0"])
    assert outcomes(driver.settle()[1]) == {TICKET: Released(1, 2)}


def test_2_disjoint_sets_wait_separately_under_2_names(driver: Driver) -> None:
    driver.register("w3")
    driver.arrive("w0", "left", members=["w0", "w1"])
    driver.arrive("w2", "right", members=["w2", "w3"])
    driver.arrive("w1", "left", members=["w0", "w1"])
    assert outcomes(driver.settle()[1]) == {Ticket("job", 2, "left", 0, 0): Released(2, 2)}


@pytest.mark.parametrize(
    ("first", "second"),
    [(["w0", "w1"], ["w1", "w2"]), ([], ["w0", "w1"]), (["w0", "w1"], []), ([], ["w0", "w1", "w2"])],
)
def test_callers_that_name_different_members_get_an_error(driver: Driver, first: list[str], second: list[str]) -> None:
    driver.arrive("w0", members=first)
    with driver.refused(BarrierMismatch, "members"):
        driver.arrive("w1", members=second)
    assert driver.job.barriers.open["sync", 0].arrived == {"w0"}


@pytest.mark.parametrize("other", [[], ["w0", "w2"], ["w0", "w1", "w2"]])
def test_the_release_of_one_set_is_not_the_release_of_another(driver: Driver, other: list[str]) -> None:
    driver.arrive("w0", members=["w0", "w1"])
    driver.arrive("w1", members=["w0", "w1"])
    driver.settle()
    with driver.refused(BarrierMismatch, "members"):
        driver.arrive("w0", members=other)
    assert driver.arrive("w0", members=["w1", "w0"]) == Released(1, 2)


def test_the_set_of_a_release_is_known_after_a_restart(driver: Driver) -> None:
    driver.arrive("w0", members=["w0", "w1"])
    driver.arrive("w1", members=["w0", "w1"])
    driver.settle()
    driver.core = driver.restarted()
    assert driver.arrive("w1", members=["w0", "w1"]) == Released(1, 2)
    with driver.refused(BarrierMismatch, "members"):
        driver.arrive("w2")


def test_an_unknown_named_member_is_refused(driver: Driver) -> None:
    with driver.refused(InvalidArgument, "members"):
        driver.arrive("w0", members=["w0", "w9"])
    assert driver.job.barriers.open == {}


def test_a_caller_that_does_not_name_itself_is_refused_before_and_after_the_release(driver: Driver) -> None:
    with driver.refused(InvalidArgument, "members"):
        driver.arrive("w0", members=["w1", "w2"])
    driver.arrive("w1", members=["w1", "w2"])
    driver.arrive("w2", members=["w1", "w2"])
    driver.settle()
    with driver.refused(InvalidArgument, "members"):
        driver.arrive("w0", members=["w1", "w2"])


# -- broken by a change of membership ------------------------------------------------------------------------------


def test_a_death_breaks_the_barrier_for_all_callers_and_names_the_dead_worker(driver: Driver) -> None:
    driver.arrive("w0")
    driver.arrive("w1")
    driver.listen(5, "w0", "w1")
    driver.now_s += 0.5
    driver.core.tick(driver.now_s)
    error = broken(driver.settle()[1])
    assert error.missing == {"w2": "silent for 5.5 s, lease 5.0 s"}
    assert (error.field, error.generation) == ("barrier_id", 2)
    assert "w2: silent for 5.5 s" in error.message
    assert driver.job.barriers.open == {}


def test_a_worker_that_arrived_and_died_is_named_as_well(driver: Driver) -> None:
    driver.arrive("w0")
    driver.arrive("w1")
    _, notices = driver.leave("w1")
    assert broken(notices).missing == {"w1": "it deregistered"}


def test_a_worker_that_left_does_not_count_before_the_generation_is_sealed(driver: Driver) -> None:
    driver.arrive("w0")
    driver.job.deregister_worker("w0", 1, "")
    with pytest.raises(StaleGeneration):
        driver.arrive("w1", generation=1)  # 2 have arrived and 2 are left, but not the same 2
    assert broken(driver.settle()[1]).missing == {"w0": "it deregistered"}


def test_remaining_workers_cannot_complete_a_barrier_that_a_leaver_broke(driver: Driver) -> None:
    driver.arrive("w0")
    driver.arrive("w1")
    driver.job.deregister_worker("w2", 3, "")
    with pytest.raises(StaleGeneration):
        driver.arrive("w1", generation=1)
    assert broken(driver.settle()[1]).missing == {"w2": "it deregistered"}


def test_a_join_breaks_the_barrier_with_no_missing_workers(driver: Driver) -> None:
    driver.arrive("w0")
    driver.register_unsealed("w3")
    error = broken(driver.settle()[1])
    assert error.missing == {}
    assert "generation 2 started: w3 joined" in error.message


def test_a_change_breaks_a_named_barrier_and_names_only_its_own_missing_members(driver: Driver) -> None:
    driver.arrive("w0", "ours", members=["w0", "w1"])
    driver.arrive("w0", "all")
    _, notices = driver.leave("w2")
    assert broken(notices, Ticket("job", 1, "ours", 0, 0)).missing == {}
    assert broken(notices, Ticket("job", 1, "all", 0, 0)).missing == {"w2": "it deregistered"}


def test_a_replaced_worker_is_named_with_its_reason(driver: Driver) -> None:
    driver.arrive("w0")
    driver.register_unsealed("w1", instance_id="another", takeover=True)
    assert broken(driver.settle()[1]).missing == {"w1": "replaced by another process of the same id"}


def test_32_of_40_dead_workers_are_named_and_8_counted() -> None:
    driver = Driver()
    driver.join("waiting", *(f"w{i:02d}" for i in range(40)))
    driver.arrive("waiting")
    driver.listen(5, "waiting")
    driver.now_s += 0.5
    driver.core.tick(driver.now_s)
    error = broken(driver.settle()[1])
    assert len(error.missing) == MAX_MISSING_NAMED == 32
    assert "; and 8 more" in error.message


def test_a_barrier_of_the_old_generation_does_not_count_for_the_new_one(driver: Driver) -> None:
    driver.arrive("w0")
    driver.arrive("w1")
    driver.leave("w2")
    driver.arrive("w0")
    assert driver.settle() == ([], [])
    driver.arrive("w1")
    assert outcomes(driver.settle()[1]) == {Ticket("job", 2, "sync", 0, 0): Released(2, 2)}


def test_a_release_of_the_old_generation_is_forgotten_in_the_new_one(driver: Driver) -> None:
    for worker_id in driver.workers:
        driver.arrive(worker_id)
    driver.settle()
    driver.leave("w2")
    assert driver.job.barriers.released == {}
    assert driver.arrive("w0") == Ticket("job", 2, "sync", 0, 0)


# -- timeouts ------------------------------------------------------------------------------------------------------


def test_a_barrier_that_times_out_names_the_missing_workers_and_their_last_state(driver: Driver) -> None:
    driver.beat("w2", state="LOADING_DATA", step=41)
    driver.arrive("w0", timeout_s=3)
    driver.after(1)
    driver.arrive("w1", timeout_s=3)
    for worker_id in ("w0", "w1"):
        driver.beat(worker_id)
    assert driver.after(1.9) == ([], [])
    events, notices = driver.after(0.1)
    error = broken(notices)
    assert events == []
    assert error.missing == {"w2": "LOADING_DATA at step 41, last heard 3.0 s ago"}
    assert error.generation == 1
    assert "not all members arrived within 3.0 s" in error.message


def test_the_shortest_timeout_sets_the_deadline(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=100)
    driver.arrive("w1", timeout_s=1)
    assert broken(driver.after(1)[1]).missing.keys() == {"w2"}


def test_a_longer_timeout_does_not_move_the_deadline(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=1)
    driver.arrive("w1", timeout_s=100)
    assert broken(driver.after(1)[1]).missing.keys() == {"w2"}


def test_a_caller_without_a_timeout_waits_for_the_configured_6_s() -> None:
    driver = Driver(barrier=BarrierConfig(timeout_s=6.0))
    driver.join("w0", "w1")
    driver.arrive("w0")
    assert driver.listen(4.0, "w0", "w1") == []
    assert driver.after(1.9) == ([], [])
    assert broken(driver.after(0.1)[1]).missing.keys() == {"w1"}


def test_a_named_barrier_that_times_out_names_only_its_own_missing_members(driver: Driver) -> None:
    driver.arrive("w0", members=["w0", "w1"], timeout_s=1)
    assert broken(driver.after(1)[1]).missing.keys() == {"w1"}


def test_a_barrier_broken_by_its_deadline_can_be_tried_again(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=1)
    driver.after(1)
    for worker_id in ("w1", "w2"):
        driver.arrive(worker_id)
    assert driver.settle() == ([], [])
    driver.arrive("w0")
    assert outcomes(driver.settle()[1]) == {TICKET: Released(1, 3)}


def test_a_death_at_the_deadline_is_reported_as_a_death(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=6)
    driver.arrive("w1", "named", members=["w1", "w2"], timeout_s=6)
    driver.listen(5, "w0", "w1")
    driver.now_s += 1
    driver.core.tick(driver.now_s)  # the lease of w2 and both deadlines have passed
    _, notices = driver.settle()
    assert len(outcomes(notices)) == 2
    assert broken(notices).missing == {"w2": "silent for 6.0 s, lease 5.0 s"}
    assert broken(notices, Ticket("job", 1, "named", 0, 0)).missing == {"w2": "silent for 6.0 s, lease 5.0 s"}


def test_a_deregistration_before_the_deadline_is_reported_as_a_deregistration(driver: Driver) -> None:
    driver.arrive("w1", members=["w1", "w2"], timeout_s=1)
    driver.job.deregister_worker("w2", 3, "preempted")
    driver.now_s += 1
    driver.core.tick(driver.now_s)
    assert broken(driver.settle()[1]).missing == {"w2": "preempted"}


def test_a_pause_of_the_coordinator_extends_the_deadline_of_a_barrier(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=4)
    driver.after(1)
    assert driver.after(3_600) == ([], [])
    assert driver.after(2) == ([], [])
    assert ended(driver.after(1)[1])


def test_a_clock_that_goes_backwards_breaks_no_barrier(driver: Driver) -> None:
    driver.arrive("w0", timeout_s=4)
    assert driver.after(-3_600) == ([], [])


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_bad_name_is_refused(driver: Driver, bad: str) -> None:
    with driver.refused(InvalidArgument, "barrier_id"):
        driver.arrive("w0", bad)
    assert driver.job.barriers.open == {}


@pytest.mark.parametrize("bad", BAD_COUNTS)
def test_a_step_out_of_range_is_refused(driver: Driver, bad: int) -> None:
    with driver.refused(InvalidArgument, "step"):
        driver.arrive("w0", step=bad)
    assert driver.job.barriers.open == {}


@pytest.mark.parametrize("bad", [-1.0, 1e-6, 86_401.0, math.inf, math.nan])
def test_a_timeout_out_of_range_is_refused(driver: Driver, bad: float) -> None:
    with driver.refused(InvalidArgument, "timeout_s"):
        driver.arrive("w0", timeout_s=bad)
    assert driver.job.barriers.open == {}


def test_an_arrival_in_an_old_generation_gets_the_current_one(driver: Driver) -> None:
    driver.register("w3")
    with driver.refused(StaleGeneration, "generation", generation=2):
        driver.arrive("w0", generation=1)


def test_a_dead_process_and_an_unknown_worker_cannot_arrive(driver: Driver) -> None:
    driver.leave("w2")
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.arrive("w2", incarnation=3)
    with driver.refused(UnknownWorker, "worker_id"):
        driver.arrive("w9", incarnation=9)


def test_a_third_open_barrier_is_refused_with_a_limit_of_2() -> None:
    driver = Driver(limits=Limits(max_open_barriers_per_job=2))
    driver.join("w0", "w1")
    driver.arrive("w0", step=0)
    driver.arrive("w0", step=1)
    with driver.refused(LimitExceeded, "barrier_id"):
        driver.arrive("w0", step=2)
    driver.arrive("w1", step=0)
    assert outcomes(driver.settle()[1]) == {TICKET: Released(1, 2)}
    assert isinstance(driver.arrive("w0", step=2), Ticket)


def test_a_barrier_that_broke_and_is_entered_again_is_another_wait(driver: Driver) -> None:
    first = driver.wait_barrier("w0", timeout_s=1.0)
    (end,) = ended(driver.after(1.0)[1])
    second = driver.wait_barrier("w0", timeout_s=1.0)
    assert end.ticket == first
    assert second != first
    assert second._replace(round=first.round) == first
