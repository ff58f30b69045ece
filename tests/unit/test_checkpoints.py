"""Checkpoints: every rank of a generation agrees on them, or they do not exist."""

from __future__ import annotations

import pytest
from driving import BAD_COUNTS, BAD_IDS, Driver, of

from strata.coordinator.config import Limits
from strata.coordinator.state.checkpoints import CheckpointProgress
from strata.coordinator.state.events import CheckpointAborted, CheckpointAcked, CheckpointCommitted, RankAck
from strata.errors import (
    CheckpointMismatch,
    InvalidArgument,
    LimitExceeded,
    StaleGeneration,
    StaleIncarnation,
    UnknownWorker,
)


@pytest.fixture
def driver() -> Driver:
    """3 workers, generation 1."""
    driver = Driver()
    driver.join("w0", "w1", "w2")
    return driver


def latest(driver: Driver, *kinds) -> str | None:
    record = driver.job.latest_checkpoint(kinds)
    return record.checkpoint.checkpoint_id if record else None


# -- agreement -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_3_ranks_is_committed_by_the_third(driver: Driver) -> None:
    assert driver.notify("w0") == CheckpointProgress(committed=False, num_acked=1, num_ranks=3)
    assert driver.notify("w2") == CheckpointProgress(committed=False, num_acked=2, num_ranks=3)
    assert latest(driver) is None
    assert of(CheckpointCommitted, driver.settle()[0]) == []
    assert driver.notify("w1") == CheckpointProgress(committed=True, num_acked=3, num_ranks=3)
    assert [type(event) for event in driver.settle()[0]] == [CheckpointAcked, CheckpointCommitted]
    assert latest(driver) == "ckpt"


def test_a_rank_that_acknowledges_3_times_is_counted_once(driver: Driver) -> None:
    for _ in range(3):
        assert driver.notify("w0").num_acked == 1
    assert len(driver.settle()[0]) == 1


def test_acknowledging_a_committed_checkpoint_returns_the_commit(driver: Driver) -> None:
    driver.commit("ckpt")
    assert driver.notify("w1") == CheckpointProgress(committed=True, num_acked=3, num_ranks=3)
    assert driver.settle() == ([], [])


def test_a_commit_sums_the_sizes_and_merges_the_reports_of_the_ranks(driver: Driver) -> None:
    driver.notify("w0", ack=RankAck(size_bytes=10, metadata={"loss": "0.5"}))
    driver.notify("w1", ack=RankAck(size_bytes=20, model_hash="abc", data_cursor=b"cursor"))
    driver.notify("w2", ack=RankAck(size_bytes=12, metadata={"lr": "0.1"}), wall_s=1_700_000_000.0)
    record = driver.job.latest_checkpoint(())
    assert record is not None
    assert (record.size_bytes, record.num_ranks, record.generation) == (42, 3, 1)
    assert (record.model_hash, record.data_cursor) == ("abc", b"cursor")
    assert record.metadata == {"loss": "0.5", "lr": "0.1"}
    assert record.committed_at_s == 1_700_000_000.0
    assert (record.checkpoint.step, record.checkpoint.epoch, record.checkpoint.path) == (100, 1, "/ckpt")


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("other", [{"step": 101}, {"epoch": 2}, {"path": "/other"}, {"kind": "INCREMENTAL"}])
def test_a_rank_that_reports_another_checkpoint_under_the_same_id_is_refused(
    driver: Driver, other: dict, committed: bool
) -> None:
    for worker_id in driver.workers if committed else ["w0"]:
        driver.notify(worker_id)
    driver.settle()
    with driver.refused(CheckpointMismatch, "checkpoint_id"):
        driver.notify("w1", **other)


def test_a_commit_of_another_process_with_the_same_acks_is_the_same(driver: Driver) -> None:
    driver.notify("w0", ack=RankAck(size_bytes=1))
    driver.notify("w1", ack=RankAck(size_bytes=2))
    driver.settle()
    driver.core = driver.restarted()
    assert driver.notify("w2", ack=RankAck(size_bytes=4)).committed
    assert driver.job.latest_checkpoint(()).size_bytes == 7


# -- the end of an attempt -----------------------------------------------------------------------------------------


def test_a_new_generation_ends_the_attempt_and_the_old_acks_do_not_count(driver: Driver) -> None:
    driver.notify("w0")
    driver.notify("w1")
    driver.settle()
    events, _ = driver.leave("w2")
    assert [(a.checkpoint_id, a.num_acked) for a in of(CheckpointAborted, events)] == [("ckpt", 2)]
    assert driver.job.checkpoints.attempts == {}
    assert driver.notify("w0") == CheckpointProgress(committed=False, num_acked=1, num_ranks=2)


def test_an_id_whose_attempt_was_aborted_may_be_used_again(driver: Driver) -> None:
    driver.notify("w0", step=100)
    driver.leave("w2")
    assert driver.notify("w0", step=200).num_acked == 1


def test_the_ack_of_a_worker_that_left_does_not_count_before_the_generation_is_sealed(driver: Driver) -> None:
    driver.notify("w0")
    driver.job.deregister_worker("w0", 1, "")
    with pytest.raises(StaleGeneration):
        driver.notify("w1", generation=1)  # 2 acks and 2 members, but not the same 2
    driver.settle()
    assert latest(driver) is None


def test_a_committed_checkpoint_outlives_its_generation(driver: Driver) -> None:
    driver.commit("ckpt")
    driver.leave("w2")
    assert latest(driver) == "ckpt"
    assert driver.notify("w0") == CheckpointProgress(committed=True, num_acked=3, num_ranks=3)


def test_an_ack_of_an_old_generation_a_dead_process_or_an_unknown_worker_is_refused(driver: Driver) -> None:
    driver.leave("w2")
    with driver.refused(StaleGeneration, "generation", generation=2):
        driver.notify("w0", generation=1)
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.notify("w2", incarnation=3)
    with driver.refused(UnknownWorker, "worker_id"):
        driver.notify("w9", incarnation=9)


# -- the latest ----------------------------------------------------------------------------------------------------


def test_a_job_without_checkpoints_has_no_latest(driver: Driver) -> None:
    assert latest(driver) is None


def test_the_latest_is_the_one_committed_last_whatever_its_step(driver: Driver) -> None:
    driver.commit("a", step=200)
    driver.commit("b", step=100)
    assert latest(driver) == "b"


def test_the_latest_is_in_the_order_of_commits_not_of_first_acks(driver: Driver) -> None:
    driver.notify("w0", "slow")
    driver.commit("fast")
    driver.commit("slow")
    assert latest(driver) == "slow"


@pytest.mark.parametrize("kind", ["MODEL_ONLY", "OPTIMIZER_ONLY"])
def test_a_partial_checkpoint_is_not_used_for_recovery(driver: Driver, kind) -> None:
    driver.commit("whole", "INCREMENTAL")
    driver.commit("half", kind)
    assert latest(driver) == "whole"
    assert driver.job.request_recovery("w0", 1).checkpoint.checkpoint.checkpoint_id == "whole"
    assert latest(driver, kind) == "half"


def test_the_latest_of_some_kinds_is_the_newest_among_these(driver: Driver) -> None:
    driver.commit("full", "FULL")
    driver.commit("delta", "INCREMENTAL")
    driver.commit("model", "MODEL_ONLY")
    assert latest(driver, "FULL") == "full"
    assert latest(driver, "FULL", "MODEL_ONLY") == "model"
    assert latest(driver, "OPTIMIZER_ONLY") is None
    assert latest(driver) == "delta"


# -- bounds --------------------------------------------------------------------------------------------------------


def test_a_limit_of_3_keeps_the_newest_3_of_5_checkpoints() -> None:
    driver = Driver(limits=Limits(max_checkpoints_per_job=3))
    driver.register("w0")
    for num in range(5):
        driver.commit(f"c{num}")
    assert list(driver.job.checkpoints.committed) == ["c2", "c3", "c4"]


def test_a_limit_of_3_never_drops_the_checkpoint_to_recover_from() -> None:
    driver = Driver(limits=Limits(max_checkpoints_per_job=3))
    driver.register("w0")
    driver.commit("full")
    for num in range(5):
        driver.commit(f"m{num}", "MODEL_ONLY")
    assert list(driver.job.checkpoints.committed) == ["full", "m3", "m4"]
    assert latest(driver) == "full"


def test_a_limit_of_1_keeps_the_newest_and_the_checkpoint_to_recover_from() -> None:
    driver = Driver(limits=Limits(max_checkpoints_per_job=1))
    driver.register("w0")
    driver.notify("w0", "full")
    assert driver.notify("w0", "model", kind="MODEL_ONLY").committed
    assert list(driver.job.checkpoints.committed) == ["full", "model"]
    driver.notify("w0", "full-2")
    assert list(driver.job.checkpoints.committed) == ["full-2"]


def test_a_third_unfinished_checkpoint_is_refused_with_a_limit_of_2() -> None:
    driver = Driver(limits=Limits(max_open_checkpoints_per_job=2))
    driver.join("w0", "w1")
    driver.notify("w0", "a")
    driver.notify("w0", "b")
    driver.settle()
    with driver.refused(LimitExceeded, "checkpoint_id"):
        driver.notify("w0", "c")
    assert driver.notify("w1", "a").committed
    assert driver.notify("w0", "c").num_acked == 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        *[({"checkpoint_id": bad}, "checkpoint_id") for bad in BAD_IDS],
        *[({field: bad}, field) for field in ("step", "epoch") for bad in BAD_COUNTS],
        *[({"ack": RankAck(size_bytes=bad)}, "size_bytes") for bad in BAD_COUNTS],
        ({"path": "p" * 4097}, "path"),
        ({"ack": RankAck(model_hash="h" * 4097)}, "model_hash"),
    ],
)
def test_a_bad_ack_is_refused_with_its_field(driver: Driver, arguments: dict, field: str) -> None:
    with driver.refused(InvalidArgument, field):
        driver.notify("w0", **arguments)
    assert driver.job.checkpoints.attempts == {}


@pytest.mark.parametrize(
    ("ack", "field"),
    [
        (RankAck(hashes={"file": "h" * 100}), "hashes"),
        (RankAck(metadata={"k" * 100: ""}), "metadata"),
        (RankAck(data_cursor=b"c" * 101), "data_cursor"),
    ],
)
def test_an_ack_above_the_limit_of_100_bytes_is_refused(ack: RankAck, field: str) -> None:
    driver = Driver(limits=Limits(max_metadata_bytes=99))
    driver.register("w0")
    with driver.refused(LimitExceeded, field):
        driver.notify("w0", ack=ack)


def test_a_snapshot_does_not_change_when_another_rank_acknowledges(driver: Driver) -> None:
    driver.notify("w0")
    snapshot = driver.core.snapshot()
    driver.notify("w1")
    assert list(snapshot[0].open_checkpoints[0].acks) == ["w0"]


def test_the_commit_contains_the_hashes_of_all_ranks(driver: Driver) -> None:
    for rank, worker_id in enumerate(driver.workers):
        driver.notify(worker_id, ack=RankAck(hashes={f"rank-{rank}.safetensors": f"hash-{rank}"}))
    record = driver.job.latest_checkpoint(())
    assert record is not None
    assert record.hashes == {f"rank-{rank}.safetensors": f"hash-{rank}" for rank in range(3)}


def test_the_reports_of_all_ranks_together_are_bounded() -> None:
    driver = Driver(limits=Limits(max_checkpoint_bytes=100))
    driver.join("w0", "w1")
    driver.notify("w0", ack=RankAck(metadata={"note": "x" * 60}))
    driver.settle()
    with driver.refused(LimitExceeded, "metadata"):
        driver.notify("w1", ack=RankAck(metadata={"note": "x" * 60}))
    assert driver.notify("w1").committed
