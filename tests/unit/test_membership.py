"""Membership: joining, leaving, three ways to die, and fencing against predecessors."""

from __future__ import annotations

import math

import pytest
from driving import BAD_COUNTS, BAD_IDS, JOB, Driver, generations, of

from strata.coordinator.config import LeaseConfig, Limits
from strata.coordinator.state.events import GenerationStarted, WorkerJoined, WorkerLeft
from strata.coordinator.state.membership import MAX_DEPARTED
from strata.errors import InvalidArgument, LimitExceeded, StaleGeneration, StaleIncarnation, UnknownWorker, WorkerExists


@pytest.fixture
def driver() -> Driver:
    return Driver()


def causes(events) -> dict[str, str]:
    return {left.worker_id: left.cause for left in of(WorkerLeft, events)}


# -- joining -------------------------------------------------------------------------------------------------------


def test_the_first_worker_is_rank_0_of_1_in_generation_1(driver: Driver) -> None:
    registration = driver.register("w0")
    assert (registration.incarnation, registration.generation) == (1, 1)
    assert (registration.rank, registration.world_size) == (0, 1)


def test_3_workers_that_join_in_one_batch_start_one_generation(driver: Driver) -> None:
    registrations = driver.join("c", "a", "b")
    assert [r.rank for r in registrations] == [0, 1, 2]
    assert [r.incarnation for r in registrations] == [1, 2, 3]
    assert {(r.generation, r.world_size) for r in registrations} == {(1, 3)}


def test_a_process_that_registers_again_keeps_its_incarnation_and_generation(driver: Driver) -> None:
    first = driver.register("w0", instance_id="process-1")
    second = driver.register("w0", instance_id="process-1")
    assert second == first
    assert not driver.core.has_news
    assert len(driver.journal) == 2  # it joined; generation 1


def test_registering_again_renews_the_lease(driver: Driver) -> None:
    driver.register("w0")
    driver.listen(4)
    driver.register("w0")
    driver.listen(4)
    assert driver.workers == ["w0"]


def test_an_id_of_a_live_process_is_refused_to_another_process(driver: Driver) -> None:
    driver.register("w0", instance_id="process-1")
    with driver.refused(WorkerExists, "worker_id"):
        driver.register_unsealed("w0", instance_id="process-2")
    assert driver.member("w0").joined.instance_id == "process-1"


def test_takeover_replaces_a_live_process_with_a_new_incarnation_in_one_generation(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.register_unsealed("w0", instance_id="process-2", takeover=True)
    events, notices = driver.settle()
    assert [type(event) for event in events] == [WorkerLeft, WorkerJoined, GenerationStarted]
    assert causes(events) == {"w0": "replaced"}
    assert generations(notices) == [2]
    assert driver.incarnation("w0") == 3


def test_a_suspect_is_replaced_without_takeover(driver: Driver) -> None:
    driver.register("w0", instance_id="process-1")
    driver.suspect("w0")
    assert driver.register("w0", instance_id="process-2").incarnation == 2


def test_a_worker_that_joins_after_its_death_gets_a_new_incarnation(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.leave("w0")
    assert driver.register("w0").incarnation == 3


def test_a_job_limited_to_2_workers_refuses_a_third_but_not_a_replacement() -> None:
    driver = Driver(limits=Limits(max_workers_per_job=2))
    driver.join("w0", "w1")
    with driver.refused(LimitExceeded, "worker_id"):
        driver.register_unsealed("w2")
    assert driver.replace("w1").incarnation == 3


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("field", ["worker_id", "instance_id"])
def test_a_bad_id_is_refused_with_its_field(driver: Driver, field: str, bad: str) -> None:
    driver.register("w0")
    ids = {"worker_id": "w1", "instance_id": "process"} | {field: bad}
    with driver.refused(InvalidArgument, field):
        driver.membership.register(**ids, capacity=1.0, hostname="", takeover=False)


@pytest.mark.parametrize("capacity", [-1.0, 1e-4, 1e7, math.nan, math.inf, -math.inf])
def test_a_capacity_out_of_range_is_refused(driver: Driver, capacity: float) -> None:
    driver.register("w0")
    with driver.refused(InvalidArgument, "capacity"):
        driver.register_unsealed("w1", capacity=capacity)


def test_no_capacity_means_1(driver: Driver) -> None:
    driver.register("w0", capacity=0.0)
    assert driver.member("w0").joined.capacity == 1.0


def test_a_hostname_of_4097_characters_is_refused(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(InvalidArgument, "hostname"):
        driver.register_unsealed("w1", hostname="h" * 4097)


def test_a_first_worker_that_is_refused_leaves_no_job_behind(driver: Driver) -> None:
    with pytest.raises(InvalidArgument):
        driver.register_unsealed("bad id")
    assert driver.core.jobs == {}
    assert not driver.core.has_news


# -- leaving -------------------------------------------------------------------------------------------------------


def test_a_deregistration_starts_a_generation_with_its_reason(driver: Driver) -> None:
    driver.join("w0", "w1")
    answer = driver.job.deregister_worker("w0", 1, "preempted")
    events, _ = driver.settle()
    assert answer() == 2
    assert [left.reason for left in of(WorkerLeft, events)] == ["preempted"]
    assert driver.membership.generation_reason == "w0 left: preempted"


def test_deregistering_twice_changes_nothing(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.leave("w0")
    answer = driver.job.deregister_worker("w0", 1, "")
    assert driver.settle() == ([], [])
    assert answer() == 2


def test_a_deregistration_of_a_predecessor_does_not_end_its_successor(driver: Driver) -> None:
    driver.register("w0")
    driver.replace("w0")
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.job.deregister_worker("w0", 1, "")


def test_an_unknown_worker_cannot_deregister(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownWorker, "worker_id"):
        driver.job.deregister_worker("w9", 1, "")


def test_the_last_worker_leaves_an_empty_job(driver: Driver) -> None:
    driver.register("w0")
    _, notices = driver.leave("w0")
    assert [(n.generation, n.num_workers) for n in notices] == [(2, 0)]


# -- the lease -----------------------------------------------------------------------------------------------------


def test_a_worker_silent_for_exactly_its_lease_of_5_s_lives_and_a_moment_later_is_dead(driver: Driver) -> None:
    driver.register("w0")
    driver.listen(5)
    assert driver.workers == ["w0"]
    events, _ = driver.after(0.001)
    assert causes(events) == {"w0": "lease"}
    assert of(WorkerLeft, events)[0].reason == "silent for 5.0 s, lease 5.0 s"


def test_a_beat_renews_the_lease(driver: Driver) -> None:
    driver.register("w0")
    assert driver.listen(60, "w0") == []


def test_3_workers_that_die_in_one_tick_are_one_generation(driver: Driver) -> None:
    driver.join("w0", "w1", "w2", "w3")
    events = driver.listen(6, "w2")
    assert causes(events) == {"w0": "lease", "w1": "lease", "w3": "lease"}
    assert [g.generation for g in of(GenerationStarted, events)] == [2]
    assert driver.workers == ["w2"]


def test_workers_that_fall_silent_within_a_heartbeat_die_together(driver: Driver) -> None:
    """The last heartbeats of the workers of a disconnected node differ."""
    driver.join("w0", "w1", "w2", "well")
    for worker_id in ("w0", "w1", "w2"):
        driver.beat(worker_id)
        driver.after(0.3)
    events = driver.listen(4, "well")
    for _ in range(30):
        driver.beat("well")
        events += driver.after(0.1)[0]
    assert causes(events) == {"w0": "lease", "w1": "lease", "w2": "lease"}
    assert [g.generation for g in of(GenerationStarted, events)] == [2]


def test_a_death_is_delayed_by_at_most_one_heartbeat(driver: Driver) -> None:
    """This holds however many workers fall silent one after another."""
    names = [f"w{i}" for i in range(20)]
    driver.join(*names)
    silent_s: dict[str, float] = {}
    died_s: dict[str, float] = {}
    for tick in range(400):
        for worker_id in names[tick // 10 :]:
            driver.beat(worker_id)
            silent_s[worker_id] = driver.now_s
        for left in of(WorkerLeft, driver.after(0.05)[0]):
            died_s[left.worker_id] = driver.now_s
    assert sorted(died_s) == sorted(names)
    assert all(5.0 <= died_s[name] - silent_s[name] <= 5.0 + 1.0 + 0.1 for name in names)


def test_a_single_death_is_not_delayed(driver: Driver) -> None:
    driver.join("w0", "w1")
    events = driver.listen(5, "w1")
    assert events == []
    driver.beat("w1")
    assert causes(driver.after(0.001)[0]) == {"w0": "lease"}


def test_the_reason_of_6_deaths_names_4_and_counts_2(driver: Driver) -> None:
    driver.join(*(f"w{i}" for i in range(6)))
    driver.listen(6)
    assert driver.membership.generation_reason.count("left") == 4
    assert driver.membership.generation_reason.endswith("; and 2 more")


def test_joins_and_deaths_of_one_batch_are_one_generation(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.listen(5, "w1")
    driver.now_s += 0.5
    driver.core.tick(driver.now_s)
    driver.register_unsealed("w2")
    events, notices = driver.settle()
    assert causes(events) == {"w0": "lease"}
    assert generations(notices) == [2]
    assert driver.workers == ["w1", "w2"]


def test_a_worker_that_joins_and_leaves_in_one_batch_is_one_generation_too(driver: Driver) -> None:
    driver.register("w0")
    answer = driver.register_unsealed("w1")
    driver.job.deregister_worker("w1", 2, "")
    _, notices = driver.settle()
    assert generations(notices) == [2]
    assert driver.workers == ["w0"]
    assert (answer().generation, answer().world_size) == (2, 1)


def test_survivors_keep_their_order_and_joiners_come_last(driver: Driver) -> None:
    driver.join("d", "c", "b", "a")
    driver.leave("c")
    assert driver.register("e").rank == 3
    assert driver.replace("d").rank == 3
    assert [(rank, m.worker_id) for rank, m in driver.membership.ranked()] == [(0, "b"), (1, "a"), (2, "e"), (3, "d")]
    assert [driver.membership.rank(w) for w in "baed"] == [0, 1, 2, 3]


# -- suspicion -----------------------------------------------------------------------------------------------------


def test_a_reset_connection_is_death_after_half_a_second(driver: Driver) -> None:
    driver.register("w0")
    driver.suspect("w0")
    assert driver.after(0.5) == ([], [])
    events, _ = driver.after(0.001)
    assert causes(events) == {"w0": "connection"}


def test_connections_lost_one_after_the_other_are_one_generation(driver: Driver) -> None:
    """A busy coordinator notices the loss of a rack over several ticks."""
    driver.join("w0", "w1", "w2", "well")
    for worker_id in ("w0", "w1", "w2"):
        driver.suspect(worker_id)
        driver.after(0.1)
    events = [event for _ in range(10) for event in driver.after(0.05)[0]]
    assert causes(events) == {"w0": "connection", "w1": "connection", "w2": "connection"}
    assert [g.generation for g in of(GenerationStarted, events)] == [2]


def test_the_death_of_a_suspect_is_delayed_by_at_most_half_the_suspicion(driver: Driver) -> None:
    """This holds however many connections are lost one after another."""
    names = [f"w{i}" for i in range(20)]
    driver.join(*names, "well")
    lost_s: dict[str, float] = {}
    died_s: dict[str, float] = {}
    for tick in range(80):
        if tick < len(names):
            driver.suspect(names[tick])
            lost_s[names[tick]] = driver.now_s
        for left in of(WorkerLeft, driver.after(0.05)[0]):
            died_s[left.worker_id] = driver.now_s
    assert sorted(died_s) == sorted(names)
    assert all(0.5 <= died_s[name] - lost_s[name] <= 0.5 + 0.25 + 0.06 for name in names)


def test_the_reason_of_a_suspicion_is_part_of_the_reason_of_the_death(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.job.report_suspicion("w0", driver.incarnation("w0"), "the node's power failed", now_s=driver.now_s)
    driver.job.report_suspicion("w1", driver.incarnation("w1"), "x" * 4_096, now_s=driver.now_s)
    events, _ = driver.after(0.6)
    first, second = of(WorkerLeft, events)
    assert first.reason == "connection lost and not restored within 0.5 s (the node's power failed)"
    assert len(second.reason) < 300


def test_a_heartbeat_in_time_clears_a_suspect(driver: Driver) -> None:
    driver.register("w0")
    driver.suspect("w0")
    driver.after(0.4)
    driver.beat("w0")
    assert driver.listen(4) == []


def test_registering_again_clears_a_suspect(driver: Driver) -> None:
    driver.register("w0")
    driver.suspect("w0")
    driver.register("w0")
    assert driver.listen(4) == []


def test_a_second_reset_does_not_give_a_suspect_more_time(driver: Driver) -> None:
    driver.register("w0")
    driver.suspect("w0")
    driver.after(0.4)
    driver.suspect("w0")
    events, _ = driver.after(0.2)
    assert causes(events) == {"w0": "connection"}


def test_the_reset_of_a_predecessors_connection_does_not_make_its_successor_suspect(driver: Driver) -> None:
    driver.register("w0")
    driver.replace("w0")
    driver.membership.suspect("w0", 1, driver.now_s)
    driver.membership.suspect("w9", 1, driver.now_s)
    assert driver.member("w0").suspect_since_s is None
    assert driver.listen(4) == []


# -- the step watchdog ---------------------------------------------------------------------------------------------

WATCHFUL = LeaseConfig(step_timeout_s=10.0)


def test_a_training_worker_without_a_step_for_10_s_is_hung_despite_heartbeats() -> None:
    driver = Driver(lease=WATCHFUL)
    driver.register("w0")
    driver.beat("w0", state="TRAINING", step=7)
    assert driver.listen(10, "w0") == []
    events = driver.listen(1, "w0")
    assert causes(events) == {"w0": "hung"}
    assert of(WorkerLeft, events)[0].reason == "hung at step 7 for 11.0 s, limit 10.0 s"


@pytest.mark.parametrize("state", ["INITIALIZING", "IDLE", "LOADING_DATA", "CHECKPOINTING", "RECOVERING", "ERROR"])
def test_a_worker_that_is_not_training_is_never_hung(state) -> None:
    driver = Driver(lease=WATCHFUL)
    driver.register("w0")
    driver.beat("w0", state=state)
    assert driver.listen(60, "w0") == []


def test_every_step_gives_another_10_s() -> None:
    driver = Driver(lease=WATCHFUL)
    driver.register("w0")
    driver.beat("w0", state="TRAINING")
    for step in range(1, 5):
        assert driver.listen(9, "w0") == []
        driver.beat("w0", step=step)
    assert causes(driver.listen(11, "w0")) == {"w0": "hung"}


def test_time_spent_loading_does_not_count_as_training() -> None:
    driver = Driver(lease=WATCHFUL)
    driver.register("w0")
    driver.beat("w0", state="LOADING_DATA")
    driver.listen(30, "w0")
    driver.beat("w0", state="TRAINING")
    assert driver.listen(10, "w0") == []


def test_a_worker_watched_by_another_process_is_never_hung_even_after_a_restart() -> None:
    driver = Driver(lease=WATCHFUL)
    driver.register("w0", is_watched=True)
    driver.beat("w0", state="TRAINING", step=7)
    assert driver.listen(1_000, "w0") == []
    assert driver.restarted().job(JOB).membership.members["w0"].joined.is_watched


def test_a_watchdog_of_0_s_is_off() -> None:
    driver = Driver(lease=LeaseConfig(step_timeout_s=0.0))
    driver.register("w0")
    driver.beat("w0", state="TRAINING")
    assert driver.listen(3_600, "w0") == []


# -- the coordinator's own clock -----------------------------------------------------------------------------------


def test_no_worker_dies_because_the_coordinator_paused_for_an_hour(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.listen(1)
    assert driver.after(3_600) == ([], [])
    assert driver.workers == ["w0", "w1"]


def test_a_pause_excuses_its_own_length_and_no_more(driver: Driver) -> None:
    driver.register("w0")
    driver.listen(3)
    driver.after(3_600)
    driver.listen(2)
    assert driver.workers == ["w0"]
    assert causes(driver.listen(1)) == {"w0": "lease"}


def test_a_pause_excuses_suspects_and_the_watchdog_too() -> None:
    driver = Driver(lease=WATCHFUL)
    driver.join("w0", "w1")
    driver.beat("w0", state="TRAINING")
    driver.suspect("w1")
    assert driver.after(3_600) == ([], [])


def test_connections_lost_during_a_pause_count_only_as_silence(driver: Driver) -> None:
    driver.register("w0")
    driver.listen(1)
    driver.after(3_600)
    driver.suspect("w0")
    assert driver.listen(4) == []
    assert causes(driver.listen(2)) == {"w0": "lease"}


def test_no_worker_is_last_seen_in_the_future_after_a_pause(driver: Driver) -> None:
    driver.register("w0")
    driver.now_s += 3_600
    driver.beat("w0")  # before the tick that notices the pause
    driver.after(0)
    assert driver.member("w0").last_seen_s == driver.now_s
    driver.listen(5)
    assert causes(driver.listen(1)) == {"w0": "lease"}


def test_a_tick_late_by_half_a_lease_excuses_no_silence(driver: Driver) -> None:
    driver.register("w0")
    driver.after(2.5)
    driver.after(2.5)
    assert causes(driver.after(2.5)[0]) == {"w0": "lease"}


def test_a_clock_that_goes_back_an_hour_kills_no_worker(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.suspect("w1")
    assert driver.after(-3_600) == ([], [])
    driver.beat("w0")
    assert driver.member("w0").last_seen_s == 1_000.0
    assert driver.after(1) == ([], [])


# -- fencing -------------------------------------------------------------------------------------------------------


def test_a_call_in_an_old_generation_gets_the_current_one(driver: Driver) -> None:
    driver.register("w0")
    driver.register("w1")
    with driver.refused(StaleGeneration, "generation", generation=2):
        driver.membership.fenced("w0", 1, 1)


def test_a_call_from_the_future_is_refused_as_well(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(StaleGeneration, "generation", generation=1):
        driver.membership.fenced("w0", 1, 2)


def test_a_generation_ends_with_the_first_change_and_the_error_names_the_next(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.job.deregister_worker("w1", 2, "")
    for generation in (1, 2):
        with pytest.raises(StaleGeneration, match="w1 left") as caught:
            driver.membership.fenced("w0", 1, generation)
        assert caught.value.generation == 2
    driver.settle()
    assert driver.membership.fenced("w0", 1, 2).worker_id == "w0"


def test_a_replaced_process_learns_that_another_process_uses_its_id(driver: Driver) -> None:
    driver.register("w0")
    driver.replace("w0")
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.beat("w0", incarnation=1)
    with pytest.raises(StaleIncarnation, match="another process uses its id"):
        driver.beat("w0", incarnation=1)


def test_a_dead_process_learns_the_reason(driver: Driver) -> None:
    driver.register("w0")
    driver.listen(6)
    with pytest.raises(StaleIncarnation, match=r"silent for 6\.0 s") as caught:
        driver.beat("w0", incarnation=1)
    assert (caught.value.field, caught.value.generation) == ("incarnation", 2)


def test_an_unknown_worker_is_asked_to_register(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownWorker, "worker_id"):
        driver.beat("w9", incarnation=1)


def test_a_fenced_call_without_an_incarnation_is_refused(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(StaleIncarnation, "incarnation"):
        driver.membership.fenced("w0", 0, 1)


@pytest.mark.parametrize("incarnation", [-1, 2, 2**64 - 1])
def test_an_incarnation_that_never_existed_is_stale(driver: Driver, incarnation: int) -> None:
    driver.register("w0")
    with driver.refused(StaleIncarnation, "incarnation", generation=1):
        driver.beat("w0", incarnation=incarnation)


def test_the_first_of_1001_departed_workers_is_forgotten() -> None:
    driver = Driver()
    for num in range(MAX_DEPARTED + 1):
        driver.register_unsealed(f"w{num}")
        driver.job.deregister_worker(f"w{num}", num + 1, "")
    driver.settle()
    with driver.refused(StaleIncarnation, "incarnation"):
        driver.beat("w1", incarnation=2)
    with driver.refused(UnknownWorker, "worker_id"):
        driver.beat("w0", incarnation=1)


# -- heartbeats ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_reports_the_announced_generation_not_the_pending_one(driver: Driver) -> None:
    driver.register("w0")
    driver.register_unsealed("w1")
    events, notices = driver.core.drain()
    assert of(GenerationStarted, events)
    assert (driver.beat("w0").generation, driver.beat("w0").num_workers) == (1, 1)
    driver.core.announce(notices)
    assert (driver.beat("w0").generation, driver.beat("w0").num_workers) == (2, 2)


def test_fields_omitted_from_a_heartbeat_stay_unchanged(driver: Driver) -> None:
    driver.register("w0")
    driver.beat("w0", state="TRAINING", step=5, epoch=2)
    driver.beat("w0")
    member = driver.member("w0")
    assert (member.state, member.step, member.epoch) == ("TRAINING", 5, 2)


def test_a_beat_writes_nothing_to_the_journal(driver: Driver) -> None:
    driver.register("w0")
    driver.beat("w0", state="TRAINING", step=5, metrics={"loss": 1.0})
    assert not driver.core.has_news


def test_a_series_of_4_keeps_the_newest_of_10_points() -> None:
    driver = Driver(limits=Limits(max_points_per_series=4))
    driver.register("w0")
    for step in range(10):
        driver.beat("w0", step=step, metrics={"loss": step / 10})
    assert driver.member("w0").metrics["loss"].points() == [(6, 0.6), (7, 0.7), (8, 0.8), (9, 0.9)]


def test_a_third_series_is_refused_with_a_limit_of_2_and_changes_nothing() -> None:
    driver = Driver(limits=Limits(max_series_per_worker=2))
    driver.register("w0")
    driver.beat("w0", step=1, metrics={"loss": 1.0})
    driver.suspect("w0")
    driver.now_s += 0.1
    with driver.refused(LimitExceeded, "metrics"):
        driver.beat("w0", state="TRAINING", step=2, metrics={"loss": 2.0, "lr": 0.1, "extra": 3.0})
    member = driver.member("w0")
    assert {name: series.points() for name, series in member.metrics.items()} == {"loss": [(1, 1.0)]}
    assert (member.state, member.step, member.last_seen_s) == ("INITIALIZING", 1, 1_000.0)
    assert member.suspect_since_s == 1_000.0


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_metric_with_a_bad_name_is_refused(driver: Driver, bad: str) -> None:
    driver.register("w0")
    with driver.refused(InvalidArgument, "metrics"):
        driver.beat("w0", metrics={bad: 1.0})
    assert driver.member("w0").metrics == {}


@pytest.mark.parametrize("bad", BAD_COUNTS)
@pytest.mark.parametrize("field", ["step", "epoch"])
def test_a_step_or_epoch_out_of_range_is_refused_and_changes_nothing(driver: Driver, field: str, bad: int) -> None:
    driver.register("w0")
    driver.now_s += 1
    with driver.refused(InvalidArgument, field):
        driver.beat("w0", **{field: bad}, metrics={"loss": 1.0})
    member = driver.member("w0")
    assert (member.step, member.epoch, member.metrics, member.last_seen_s) == (0, 0, {}, 1_000.0)


def test_deregistration_requires_an_incarnation(driver: Driver) -> None:
    driver.join("w0")
    with driver.refused(InvalidArgument, "incarnation"):
        driver.job.deregister_worker("w0", 0, "")
