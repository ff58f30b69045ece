"""The core of a coordinator: isolated jobs, one generation per batch, and the same state from the journal."""

from __future__ import annotations

import numpy as np
import pytest
from driving import BAD_IDS, JOB, Driver, ended, generations

from strata.coordinator.config import Limits
from strata.coordinator.state import events as e
from strata.coordinator.state.core import Core
from strata.coordinator.state.job import GenerationChanged
from strata.errors import (
    BarrierBroken,
    InvalidArgument,
    JobInUse,
    LimitExceeded,
    StaleGeneration,
    StaleIncarnation,
    UnknownJob,
    UnknownWorker,
)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def eventful() -> Driver:
    """A job with every kind of state: finished and moved shards, a release, a commit, an attempt, commands."""
    driver = Driver()
    driver.join("w0", "w1", "w2")
    driver.dataset(20, "plain")
    driver.dataset(15, "mixed", shuffle=True, seed=5)
    driver.ack("w0", driver.indices("w0", dataset_id="plain")[:3], dataset_id="plain")
    driver.advance(0, dataset_id="mixed")
    driver.command("w1", "w2", request_id="r-1")
    driver.commit("first")
    driver.notify("w0", "given-up")
    driver.leave("w1")
    driver.replace("w2")
    driver.register("w3", capacity=2.0)
    for worker_id in driver.workers:
        driver.arrive(worker_id, "sync", 4)
    driver.arrive("w0", "named", 4, members=["w0"])
    driver.command(reason="maintenance")
    driver.notify("w0", "second", ack=e.RankAck(size_bytes=8, hashes={"f": "h"}, data_cursor=b"\x00\xff"))
    driver.settle()
    driver.beat("w0", acked=2)
    driver.settle()
    return driver


def check_owners(core: Core) -> None:
    """Every shard belongs to a member, if there are any."""
    for job in core.jobs.values():
        living = [m.incarnation for m in job.membership.members.values()]
        for dataset in job.shards.datasets.values():
            assert np.isin(dataset.owners, living or [0]).all()


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_that_was_never_created_is_unknown(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownJob, "job_id"):
        driver.core.job("other")


@pytest.mark.parametrize("bad", BAD_IDS[1:])
def test_a_bad_job_id_is_refused(driver: Driver, bad: str) -> None:
    driver.register("w0")
    with driver.refused(InvalidArgument, "job_id"):
        driver.core.job(bad)
    with driver.refused(InvalidArgument, "job_id"):
        driver.register_unsealed("w0", job_id=bad)


def test_an_empty_job_id_means_the_default_job(driver: Driver) -> None:
    driver.register("w0", job_id="")
    assert driver.core.job("") is driver.core.job("default")


def test_2_jobs_have_their_own_workers_and_generations(driver: Driver) -> None:
    for job_id in ("a", "a", "b"):
        driver.register(f"w{len(driver.journal)}", job_id=job_id)
    assert {job_id: job.membership.generation for job_id, job in driver.core.jobs.items()} == {"a": 2, "b": 1}
    assert [m.incarnation for m in driver.core.job("b").membership.members.values()] == [1]


def test_2_jobs_that_change_in_one_batch_start_one_generation_each(driver: Driver) -> None:
    for job_id, worker_id in (("a", "w0"), ("b", "w0"), ("a", "w1")):
        driver.register_unsealed(worker_id, job_id=job_id)
    _, notices = driver.settle()
    assert {(n.job_id, n.generation, n.num_workers) for n in notices if isinstance(n, GenerationChanged)} == {
        ("a", 1, 2),
        ("b", 1, 1),
    }


def test_a_third_job_is_refused_with_a_limit_of_2() -> None:
    driver = Driver(limits=Limits(max_jobs=2))
    driver.register("w0", job_id="a")
    driver.dataset(3)
    with driver.refused(LimitExceeded, "job_id"):
        driver.register_unsealed("w0", job_id="c")
    assert driver.register("w1", job_id="a").rank == 1


def test_a_death_in_one_job_does_not_affect_the_other(driver: Driver) -> None:
    driver.register("w0", job_id="a")
    driver.register("w0")
    driver.listen(6, "w0")
    assert {job_id: len(job.membership.members) for job_id, job in driver.core.jobs.items()} == {"a": 0, JOB: 1}


# -- the end of a job ----------------------------------------------------------------------------------------------


def drop(driver: Driver, *, force: bool = False, generation: int = 0, reason: str = "") -> bool:
    return driver.core.drop_job(JOB, force=force, generation=generation, reason=reason)


def test_a_job_with_workers_is_not_dropped_unless_forced(driver: Driver) -> None:
    driver.join("w0", "w1")
    with driver.refused(JobInUse, "job_id", generation=1):
        drop(driver)
    assert drop(driver, force=True)
    events, notices = driver.settle()
    assert [event.words() for event in events] == ["the job was dropped while it had 2 workers: it is finished"]
    assert [(n.generation, n.num_workers) for n in notices if isinstance(n, GenerationChanged)] == [(2, 0)]
    with pytest.raises(UnknownJob):
        driver.beat("w0", incarnation=1)


def test_dropping_a_missing_job_writes_nothing(driver: Driver) -> None:
    driver.register("w0", job_id="other")
    before = driver.core.snapshot()
    assert not drop(driver, force=True)
    assert driver.core.snapshot() == before
    assert not driver.core.has_news
    for bad in BAD_IDS[1:]:
        with driver.refused(InvalidArgument, "job_id"):
            driver.core.drop_job(bad, force=True, generation=0, reason="")


def test_a_dropped_job_makes_room_for_another() -> None:
    driver = Driver(limits=Limits(max_jobs=1))
    driver.dataset(3)
    with driver.refused(LimitExceeded, "job_id"):
        driver.register_unsealed("w0", job_id="other")
    assert drop(driver)
    assert driver.register("w0", job_id="other").rank == 0


def test_a_job_in_a_newer_generation_is_not_dropped(driver: Driver) -> None:
    driver.join("w0")
    driver.register("w1")
    with driver.refused(StaleGeneration, "generation", generation=2):
        drop(driver, force=True, generation=1)
    assert drop(driver, force=True, generation=2)


def test_the_next_job_of_that_name_is_new_and_reuses_no_number() -> None:
    driver = eventful()
    generation, incarnation = driver.generation, driver.membership.last_incarnation
    command_id = driver.job.commands.last_id
    assert drop(driver, force=True)
    driver.settle()
    (joined,) = driver.join("w0")
    assert (joined.generation, joined.incarnation, joined.rank, joined.world_size) == (
        generation + 2,
        incarnation + 1,
        0,
        1,
    )
    assert not driver.job.shards.datasets
    assert driver.job.latest_checkpoint(()) is None
    assert driver.command("w0") == (command_id + 1, 1)
    for old in range(1, incarnation + 1):
        with pytest.raises((StaleIncarnation, UnknownWorker)):
            driver.beat("w0", incarnation=old)
    assert driver.register("w0", job_id="another").generation > generation


def test_a_job_dropped_and_created_again_in_one_batch_replays() -> None:
    driver = eventful()
    late = driver.register_unsealed("late")
    assert drop(driver, force=True)
    again = driver.register_unsealed("w0")
    driver.settle()
    with pytest.raises(UnknownJob, match="was dropped"):
        late()
    assert (again().rank, again().world_size) == (0, 1)
    assert driver.beat("w0").num_workers == 1
    snapshot = driver.core.snapshot()
    assert driver.restarted().snapshot() == snapshot
    restored = Core(driver.config)
    restored.restore(e.decode_snapshot(e.encode_snapshot(snapshot)))
    assert restored.snapshot() == snapshot


def test_numbers_of_dropped_jobs_are_not_reused_after_a_restart(driver: Driver) -> None:
    driver.join("w0", "w1", "w2")
    assert drop(driver, force=True)
    driver.settle()
    driver.core = driver.restarted()
    assert driver.core.snapshot() == (e.SpentNumbers(generation=2, incarnation=3),)
    (joined,) = driver.join("w0")
    assert (joined.generation, joined.incarnation) == (3, 4)


def test_a_barrier_of_a_dropped_job_breaks(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.arrive("w0")
    assert drop(driver, force=True, reason="a mistake")
    (end,) = ended(driver.settle()[1])
    assert isinstance(end.outcome, BarrierBroken)
    assert "the job was dropped while it had 2 workers: a mistake" in end.outcome.message


# -- a batch -------------------------------------------------------------------------------------------------------


def test_after_a_drain_there_is_no_news(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    driver.notify("w0")
    driver.register_unsealed("w2")
    assert driver.core.has_news
    driver.settle()
    assert not driver.core.has_news
    assert driver.settle() == ([], [])


def test_events_of_a_change_are_ordered_left_aborted_generation_shards(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    driver.notify("w0")
    driver.settle()
    events, notices = driver.leave("w1")
    assert [event.kind for event in events] == [
        "WorkerLeft",
        "CheckpointAborted",
        "GenerationStarted",
        "ShardsAssigned",
    ]
    assert generations(notices) == [2]


def test_a_dataset_registered_in_the_batch_of_a_join_belongs_to_the_new_members(driver: Driver) -> None:
    driver.register("w0")
    driver.register_unsealed("w1")
    driver.dataset(10)
    assert sorted(driver.indices("w0") + driver.indices("w1")) == list(range(10))
    assert len(driver.indices("w1")) == 5


# -- recovery ------------------------------------------------------------------------------------------------------


def test_a_recovery_returns_the_checkpoint_rank_shards_and_reason(driver: Driver) -> None:
    driver.join("w0", "w1", "w2")
    driver.dataset(30)
    driver.commit("c", step=70)
    driver.ack("w2", driver.indices("w2")[:4])
    driver.leave("w0")
    recovery = driver.job.request_recovery("w2", 3)
    assert recovery.checkpoint is not None
    assert (recovery.checkpoint.checkpoint.checkpoint_id, recovery.checkpoint.checkpoint.step) == ("c", 70)
    assert (recovery.registration.rank, recovery.registration.world_size) == (1, 2)
    assert recovery.registration.generation == recovery.page.generation == 2
    assert recovery.page.shards == driver.page("w2").shards
    assert not any(shard.done for shard in recovery.page.shards)
    assert recovery.reason == "w0 left: it deregistered"


def test_a_recovery_without_a_checkpoint_starts_from_scratch(driver: Driver) -> None:
    driver.register("w0")
    recovery = driver.job.request_recovery("w0", 1)
    assert (recovery.checkpoint, recovery.page.shards, recovery.page.next_offset) == (None, [], 0)


def test_a_recovery_of_10_shards_in_pages_of_4_returns_the_next_offset() -> None:
    driver = Driver(limits=Limits(max_shards_per_reply=4))
    driver.register("w0")
    driver.dataset(10)
    page = driver.job.request_recovery("w0", 1).page
    assert (len(page.shards), page.next_offset) == (4, 4)


def test_dead_and_unknown_workers_cannot_recover(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.leave("w1")
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.job.request_recovery("w1", 2)
    with driver.refused(UnknownWorker, "worker_id"):
        driver.job.request_recovery("w9", 1)


# -- the journal ---------------------------------------------------------------------------------------------------


def test_replaying_the_journal_gives_the_same_state() -> None:
    driver = eventful()
    assert driver.restarted().snapshot() == driver.core.snapshot()


def test_a_snapshot_round_trips() -> None:
    driver = eventful()
    snapshot = driver.core.snapshot()
    core = Core(driver.config)
    core.restore(e.decode_snapshot(e.encode_snapshot(snapshot)))
    assert core.snapshot() == snapshot


def test_a_restart_from_a_snapshot_equals_a_full_replay() -> None:
    driver = eventful()
    snapshot, position = e.encode_snapshot(driver.core.snapshot()), len(driver.journal)
    driver.replace("w0")
    driver.leave("w3")
    driver.command()
    driver.settle()
    core = Core(driver.config)
    core.restore(e.decode_snapshot(snapshot))
    for payload in driver.journal[position:]:
        core.apply(e.decode(payload))
    assert core.snapshot() == driver.core.snapshot() == driver.restarted().snapshot()


def test_a_restart_starts_no_generation_and_moves_no_shard() -> None:
    driver = eventful()
    core = driver.restarted()
    assert not core.has_news
    assert core.drain() == ([], [])


def test_every_worker_has_a_full_lease_after_a_restart() -> None:
    driver = eventful()
    driver.now_s += 3_600
    driver.core = driver.restarted()
    assert driver.listen(5) == []
    assert len(driver.listen(1)) > 0
    assert driver.workers == []


def test_heartbeats_after_a_restart_report_the_state_of_the_journal() -> None:
    driver = eventful()
    driver.core = driver.restarted()
    beat = driver.beat("w0")
    assert (beat.generation, beat.num_workers) == (driver.generation, 3)


def test_events_that_were_not_drained_are_lost_with_the_process(driver: Driver) -> None:
    driver.register("w0")
    driver.register_unsealed("w1")
    driver.core = driver.restarted()
    assert driver.workers == ["w0"]
    assert driver.register("w2").incarnation == 2


def test_when_a_worker_joined_is_unknown_after_a_restart() -> None:
    driver = eventful()
    assert all(member.joined_s == driver.now_s for member in driver.job.membership.members.values())
    core = Core(driver.config)
    core.restore(driver.core.snapshot())
    core.resume(driver.now_s)
    members = [member for job in core.jobs.values() for member in job.membership.members.values()]
    assert members
    assert {member.joined_s for member in members} == {None}


def test_wherever_the_journal_is_cut_every_shard_finds_an_owner_again() -> None:
    driver = eventful()
    for num in range(len(driver.journal) + 1):
        core = Core(driver.config)
        for payload in driver.journal[:num]:
            core.apply(e.decode(payload))
        core.resume(driver.now_s)
        core.drain()
        assert not core.has_news
        check_owners(core)


def test_a_journal_cut_before_the_assignment_starts_a_generation_with_that_reason(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    driver.leave("w1")
    assert e.decode(driver.journal.pop()).kind == "ShardsAssigned"
    driver.core = driver.restarted()
    _, notices = driver.settle()
    assert generations(notices) == [3]
    assert "left shards without an owner" in driver.membership.generation_reason
    assert driver.indices("w0") == list(range(10))


def test_a_journal_cut_before_the_generation_seals_it_at_the_restart(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.leave("w1")
    assert e.decode(driver.journal.pop()).kind == "GenerationStarted"
    driver.core = driver.restarted()
    _, notices = driver.settle()
    assert generations(notices) == [2]
    assert driver.workers == ["w0"]


def test_no_number_is_used_twice_after_the_end_of_the_journal_is_lost() -> None:
    driver = Driver()
    driver.join("w0", "w1")
    driver.dataset(10)
    core = driver.restarted()
    core.resume(driver.now_s, end_lost=True)
    events, notices = core.drain()
    job = core.job("job")
    assert job.membership.generation == 1_000_002
    assert job.membership.last_incarnation == 1_000_002
    assert [w.worker_id for w in job.membership.members.values()] == ["w0", "w1"]
    assert "the end of the journal was lost" in job.membership.generation_reason
    assert [notice.generation for notice in notices] == [1_000_002]
    again = driver.restarted()
    for event in events:
        again.apply(e.decode(e.encode(event)))
    assert again.snapshot() == core.snapshot()
