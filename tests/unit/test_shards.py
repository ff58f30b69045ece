"""Shards: cut, assigned, finished once per epoch, and moved as little as possible."""

from __future__ import annotations

import numpy as np
import pytest
from driving import BAD_COUNTS, BAD_IDS, Driver, of

from strata.coordinator.config import Limits
from strata.coordinator.state.events import DatasetSpec, EpochAdvanced, ShardEntry, ShardsAssigned, ShardsDone
from strata.coordinator.state.ring import load_bounds
from strata.coordinator.state.shards import MAX_EPOCH, NO_OWNER
from strata.errors import (
    DatasetExists,
    EpochMismatch,
    InvalidArgument,
    LimitExceeded,
    ShardNotLeased,
    StaleGeneration,
    StaleIncarnation,
    UnknownDataset,
    UnknownWorker,
)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def owned(driver: Driver, dataset_id: str = "data") -> dict[str, set[int]]:
    return {w: set(driver.indices(w, dataset_id=dataset_id, include_done=True)) for w in driver.workers}


def with_a_past() -> Driver:
    """3 workers with 100 shards, assigned differently from what the ring alone would do."""
    driver = Driver()
    driver.join("w0", "w1", "w2", *(f"x{num}" for num in range(9)))
    driver.dataset(100)
    for num in range(9):
        driver.leave(f"x{num}")
    return driver


def counted(total_samples: int = 100, shard_size: int = 10, dataset_id: str = "data", **how) -> DatasetSpec:
    return DatasetSpec(dataset_id=dataset_id, total_samples=total_samples, shard_size=shard_size, **how)


def listed(*num_samples: int, dataset_id: str = "data", **how) -> DatasetSpec:
    shards = tuple(ShardEntry(shard_id=f"s{i}", uri=f"/{i}", num_samples=n) for i, n in enumerate(num_samples))
    return DatasetSpec(dataset_id=dataset_id, shards=shards, **how)


# -- datasets ------------------------------------------------------------------------------------------------------


def test_25_samples_in_shards_of_10_are_3_shards_and_the_last_has_5(driver: Driver) -> None:
    driver.register("w0")
    assert driver.register_dataset(counted(25, 10)) == (3, 0)
    shards = driver.page("w0").shards
    assert [(s.shard_id, s.start, s.end) for s in shards] == [
        ("data-000000", 0, 10),
        ("data-000001", 10, 20),
        ("data-000002", 20, 25),
    ]


def test_one_sample_in_shards_of_a_million_is_1_shard_of_1(driver: Driver) -> None:
    driver.register("w0")
    assert driver.register_dataset(counted(1, 1_000_000)) == (1, 0)
    assert [(s.start, s.end) for s in driver.page("w0").shards] == [(0, 1)]


def test_a_list_of_shards_keeps_its_ids_and_uris_and_sums_up_its_samples(driver: Driver) -> None:
    driver.register("w0")
    assert driver.register_dataset(listed(3, 0, 4)) == (3, 0)
    shards = driver.page("w0").shards
    assert [(s.shard_id, s.uri, s.start, s.end) for s in shards] == [
        ("s0", "/0", 0, 3),
        ("s1", "/1", 3, 3),
        ("s2", "/2", 3, 7),
    ]
    assert driver.job.shards.dataset("data").total_samples == 7


def test_registering_the_same_dataset_twice_changes_nothing(driver: Driver) -> None:
    driver.register("w0")
    driver.register_dataset(counted())
    driver.ack("w0", [0])
    driver.settle()
    assert driver.register_dataset(counted()) == (10, 0)
    assert not driver.core.has_news
    assert driver.job.shards.dataset("data").num_done == 1


@pytest.mark.parametrize("other", [counted(101), counted(seed=1), counted(shuffle=True), listed(100)])
def test_different_contents_under_a_registered_id_are_refused(driver: Driver, other: DatasetSpec) -> None:
    driver.register_dataset(counted())
    with driver.refused(DatasetExists, "dataset_id"):
        driver.register_dataset(other)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        *[(counted(dataset_id=bad), "dataset_id") for bad in BAD_IDS],
        *[(counted(bad), "total_samples") for bad in (*BAD_COUNTS, 0)],
        *[(counted(100, bad), "shard_size") for bad in (*BAD_COUNTS, 0)],
        *[(counted(seed=bad), "seed") for bad in (-1, 2**63)],
        *[(listed(bad), "shards.num_samples") for bad in BAD_COUNTS],
        *[(DatasetSpec(dataset_id="data", shards=(ShardEntry(shard_id=bad),)), "shards.shard_id") for bad in BAD_IDS],
        (
            DatasetSpec(dataset_id="data", shards=(ShardEntry(shard_id="a"), ShardEntry(shard_id="a"))),
            "shards.shard_id",
        ),
        (DatasetSpec(dataset_id="data", shards=(ShardEntry(shard_id="a", uri="u" * 4097),)), "shards.uri"),
        (listed(2**53, 1), "shards.num_samples"),  # each is allowed, their sum is not
        (listed(1, total_samples=1), "shards"),
        (listed(1, shard_size=1), "shards"),
        (DatasetSpec(dataset_id="data"), "total_samples"),
    ],
)
def test_a_bad_dataset_is_refused_with_its_field(driver: Driver, spec: DatasetSpec, field: str) -> None:
    driver.join("w0", "w1")
    with driver.refused(InvalidArgument, field):
        driver.register_dataset(spec)


def test_a_bad_dataset_leaves_no_job_behind(driver: Driver) -> None:
    with pytest.raises(InvalidArgument):
        driver.register_dataset(counted(0))
    assert driver.core.jobs == {}


@pytest.mark.parametrize(("spec", "field"), [(counted(2**53, 1), "shard_size"), (listed(*[1] * 21), "shards")])
def test_more_shards_than_the_limit_of_20_are_refused(spec: DatasetSpec, field: str) -> None:
    driver = Driver(limits=Limits(max_shards_per_dataset=20))
    driver.register("w0")
    with driver.refused(LimitExceeded, field):
        driver.register_dataset(spec)


def test_a_third_dataset_is_refused_with_a_limit_of_2() -> None:
    driver = Driver(limits=Limits(max_datasets_per_job=2))
    driver.dataset(5, "a")
    driver.dataset(5, "b")
    with driver.refused(LimitExceeded, "dataset_id"):
        driver.dataset(5, "c")


# -- ownership -----------------------------------------------------------------------------------------------------


def test_shards_of_a_job_without_workers_have_no_owner_until_the_first_joins(driver: Driver) -> None:
    driver.dataset(10)
    assert set(driver.job.shards.dataset("data").owners.tolist()) == {NO_OWNER}
    driver.register("w0")
    assert driver.indices("w0") == list(range(10))


def test_100_shards_over_3_workers_have_one_owner_each_within_the_bounds(driver: Driver) -> None:
    driver.join("w0", "w1", "w2")
    driver.dataset(100)
    parts = owned(driver).values()
    assert sorted(i for part in parts for i in part) == list(range(100))
    lo, hi = load_bounds(100, [1.0] * 3)
    assert all(lo[0] <= len(part) <= hi[0] for part in parts)


def test_a_worker_of_3_times_the_capacity_owns_3_times_the_shards() -> None:
    driver = Driver()
    driver.register("small", capacity=1.0)
    driver.register("large", capacity=3.0)
    driver.dataset(1_000)
    assert len(owned(driver)["large"]) == pytest.approx(750, rel=0.05)
    assert len(owned(driver)["small"]) == pytest.approx(250, rel=0.05)


def test_1_shard_leaves_one_of_2_workers_without_shards(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(1)
    assert sorted(len(part) for part in owned(driver).values()) == [0, 1]


def test_the_same_history_gives_the_same_owners() -> None:
    def history() -> dict[str, set[int]]:
        driver = Driver()
        driver.join("w0", "w1", "w2")
        driver.dataset(100)
        driver.leave("w1")
        driver.join("w3", "w4")
        return owned(driver)

    assert history() == history()


def test_a_replaced_worker_keeps_its_shards_and_no_others_move() -> None:
    driver = with_a_past()
    before = owned(driver)
    driver.replace("w1")
    assert owned(driver) == before


def test_a_worker_replaced_twice_in_one_batch_keeps_its_shards() -> None:
    driver = with_a_past()
    before = owned(driver)
    driver.register_unsealed("w1", instance_id="second", takeover=True)
    driver.register_unsealed("w1", instance_id="third", takeover=True)
    driver.settle()
    assert driver.incarnation("w1") == 14
    assert owned(driver) == before


def test_a_worker_that_leaves_and_comes_back_in_one_batch_keeps_its_shards() -> None:
    driver = with_a_past()
    before = owned(driver)
    driver.job.deregister_worker("w1", 2, "")
    driver.register_unsealed("w1", instance_id="again")
    driver.settle()
    assert owned(driver) == before


def test_all_3_workers_replaced_in_one_batch_keep_their_shards() -> None:
    driver = with_a_past()
    before = owned(driver)
    for worker_id in ("w2", "w0", "w1"):
        driver.register_unsealed(worker_id, instance_id="next", takeover=True)
    driver.settle()
    assert owned(driver) == before


def test_only_the_shards_of_a_leaving_worker_move(driver: Driver) -> None:
    driver.join("w0", "w1", "w2", "w3")
    driver.dataset(100)
    before = owned(driver)
    events, _ = driver.leave("w2")
    after = owned(driver)
    assert all(before[w] <= after[w] for w in ("w0", "w1", "w3"))
    assert [moved.num_moved for moved in of(ShardsAssigned, events)] == [len(before["w2"])]


def test_a_join_moves_shards_only_to_the_joining_worker(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(90)
    before = owned(driver)
    driver.register("w2")
    after = owned(driver)
    assert all(after[w] <= before[w] for w in ("w0", "w1"))
    assert 28 <= len(after["w2"]) <= 31


def test_shards_have_no_owner_after_the_last_worker_leaves(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.leave("w0")
    assert set(driver.job.shards.dataset("data").owners.tolist()) == {NO_OWNER}


def test_every_dataset_of_a_job_is_reassigned(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10, "a")
    driver.dataset(20, "b")
    driver.register("w1")
    for dataset_id, num_shards in (("a", 10), ("b", 20)):
        parts = owned(driver, dataset_id).values()
        assert sorted(i for part in parts for i in part) == list(range(num_shards))
        assert all(parts)


# -- reading order -------------------------------------------------------------------------------------------------


def shuffled(seed: int, *, epoch: int | None = None, num_shards: int = 50) -> list[int]:
    driver = Driver()
    driver.register("w0")
    driver.dataset(num_shards, shuffle=True, seed=seed)
    return driver.indices("w0", epoch=epoch)


def test_without_shuffle_shards_are_read_in_order(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(50, seed=7)
    assert driver.indices("w0") == list(range(50))


def test_a_shuffled_order_is_a_permutation_and_no_run() -> None:
    order = shuffled(7)
    assert sorted(order) == list(range(50))
    assert order != list(range(50))


def test_the_same_seed_and_epoch_give_the_same_order() -> None:
    assert shuffled(7) == shuffled(7)
    assert shuffled(7, epoch=3) == shuffled(7, epoch=3)


def test_another_seed_gives_another_order() -> None:
    assert shuffled(7) != shuffled(8)


def test_another_epoch_gives_another_order_of_the_same_shards() -> None:
    orders = [shuffled(7, epoch=epoch) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_a_future_epoch_is_listed_in_its_later_order(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(50, shuffle=True, seed=7)
    ahead = driver.indices("w0", epoch=1)
    driver.advance(0)
    assert driver.indices("w0") == ahead


# -- pages ---------------------------------------------------------------------------------------------------------


def test_10_shards_come_in_pages_of_4_4_and_2() -> None:
    driver = Driver(limits=Limits(max_shards_per_reply=4))
    driver.register("w0")
    driver.dataset(10, shuffle=True)
    pages, offset = [], 0
    while not pages or offset:
        page = driver.page("w0", offset=offset)
        pages.append([s.index for s in page.shards])
        offset = page.next_offset
    assert [len(page) for page in pages] == [4, 4, 2]
    assert sorted(i for page in pages for i in page) == list(range(10))


def test_a_page_that_ends_with_the_last_shard_has_no_next() -> None:
    driver = Driver(limits=Limits(max_shards_per_reply=4))
    driver.register("w0")
    driver.dataset(8)
    assert driver.page("w0", offset=4).next_offset == 0
    assert driver.page("w0", offset=8).shards == []


def test_a_page_runs_on_from_one_dataset_into_the_next() -> None:
    driver = Driver(limits=Limits(max_shards_per_reply=4))
    driver.register("w0")
    driver.dataset(3, "a")
    driver.dataset(3, "b")
    first, second = driver.page("w0"), driver.page("w0", offset=4)
    assert [(s.dataset_id, s.index) for s in first.shards] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert [(s.dataset_id, s.index) for s in second.shards] == [("b", 1), ("b", 2)]
    assert (first.next_offset, second.next_offset) == (4, 0)


@pytest.mark.parametrize("bad", BAD_COUNTS)
def test_an_offset_out_of_range_is_refused(driver: Driver, bad: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    with driver.refused(InvalidArgument, "offset"):
        driver.page("w0", offset=bad)


def test_shards_of_an_unknown_worker_or_dataset_are_refused(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownWorker, "worker_id"):
        driver.page("w9")
    with driver.refused(UnknownDataset, "dataset_id"):
        driver.page("w0", dataset_id="data")


def test_shards_of_an_epoch_that_is_over_are_refused(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.advance(0)
    driver.settle()
    with driver.refused(EpochMismatch, "epoch"):
        driver.page("w0", epoch=0)


@pytest.mark.parametrize("bad", [-1, MAX_EPOCH + 1, 2**64 - 1])
def test_shards_of_an_impossible_epoch_are_refused(driver: Driver, bad: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    with driver.refused(InvalidArgument, "epoch"):
        driver.page("w0", epoch=bad)


# -- progress ------------------------------------------------------------------------------------------------------


def test_done_shards_are_counted_and_not_listed_again(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    assert driver.ack("w0", [3, 1]) == (2, 10)
    assert driver.indices("w0") == [0, 2, 4, 5, 6, 7, 8, 9]
    assert [s.index for s in driver.page("w0", include_done=True).shards if s.done] == [1, 3]


def test_a_repeated_ack_counts_once(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.ack("w0", [3, 3, 1])
    assert [done.indices for done in of(ShardsDone, driver.settle()[0])] == [(1, 3)]
    assert driver.ack("w0", [1, 3]) == (2, 10)
    assert driver.settle() == ([], [])
    driver.ack("w0", [3, 4])
    assert [done.indices for done in of(ShardsDone, driver.settle()[0])] == [(4,)]


def test_a_shard_that_moves_stays_done(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    done = driver.indices("w1")[:2]
    driver.ack("w1", done)
    driver.leave("w1")
    assert sorted(driver.indices("w0")) == sorted(set(range(10)) - set(done))
    assert driver.job.shards.dataset("data").num_done == 2


def test_a_worker_cannot_acknowledge_the_shard_of_another(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    mine, theirs = driver.indices("w0"), driver.indices("w1")
    driver.settle()
    with driver.refused(ShardNotLeased, "indices"):
        driver.ack("w0", [mine[0], theirs[0]])
    assert driver.job.shards.dataset("data").num_done == 0


@pytest.mark.parametrize("bad", [-1, 10, 2**64 - 1])
def test_an_ack_of_a_shard_that_does_not_exist_is_refused(driver: Driver, bad: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    with driver.refused(InvalidArgument, "indices"):
        driver.ack("w0", [0, bad])


def test_an_empty_ack_and_one_above_the_limit_are_refused() -> None:
    driver = Driver(limits=Limits(max_shards_per_ack=3))
    driver.register("w0")
    driver.dataset(10)
    with driver.refused(InvalidArgument, "indices"):
        driver.ack("w0", [])
    with driver.refused(LimitExceeded, "indices"):
        driver.ack("w0", [0, 1, 2, 3])


@pytest.mark.parametrize("epoch", [-1, 0, 2, 2**64 - 1])
def test_the_ack_of_another_epoch_is_refused(driver: Driver, epoch: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.advance(0)
    driver.settle()
    with driver.refused(EpochMismatch, "epoch"):
        driver.ack("w0", [0], epoch=epoch)


def test_the_ack_of_an_unknown_dataset_is_refused(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownDataset, "dataset_id"):
        driver.ack("w0", [0])


def test_an_ack_in_an_old_generation_is_refused_with_the_current_one(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.register("w1")
    with driver.refused(StaleGeneration, "generation", generation=2):
        driver.ack("w0", driver.indices("w0"), generation=1)


def test_the_ack_of_a_replaced_process_is_refused(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.replace("w0")
    with driver.refused(StaleIncarnation, "incarnation", generation=2):
        driver.ack("w0", [0], incarnation=1)


# -- epochs --------------------------------------------------------------------------------------------------------


def test_an_epoch_advanced_by_2_workers_is_advanced_once(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    assert driver.advance(0) == 1
    assert driver.advance(0) == 1
    assert [(ev.epoch, ev.num_done, ev.num_shards) for ev in of(EpochAdvanced, driver.settle()[0])] == [(1, 0, 10)]


def test_a_new_epoch_starts_with_no_shards_done_and_the_same_owners(driver: Driver) -> None:
    driver.join("w0", "w1")
    driver.dataset(10)
    before = owned(driver)
    driver.ack("w0", driver.indices("w0"))
    driver.advance(0)
    assert driver.job.shards.dataset("data").num_done == 0
    assert {w: set(driver.indices(w)) for w in driver.workers} == before


def test_require_complete_does_not_end_an_epoch_with_1_unfinished_shard(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    driver.ack("w0", range(9))
    driver.settle()
    with driver.refused(EpochMismatch, "require_complete"):
        driver.advance(0, require_complete=True)
    driver.ack("w0", [9])
    assert driver.advance(0, require_complete=True) == 1


def test_an_incomplete_epoch_ends_without_require_complete(driver: Driver) -> None:
    driver.register("w0")
    driver.dataset(10)
    assert driver.advance(0) == 1


@pytest.mark.parametrize("from_epoch", [1, 3])
def test_an_epoch_is_advanced_only_from_the_current_one(driver: Driver, from_epoch: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    for epoch in range(2 if from_epoch == 3 else 0):
        driver.advance(epoch)
    driver.settle()
    with driver.refused(EpochMismatch, "from_epoch"):
        driver.advance(from_epoch)


@pytest.mark.parametrize("bad", [-1, MAX_EPOCH + 1, 2**64 - 1])
def test_an_epoch_out_of_range_is_not_advanced(driver: Driver, bad: int) -> None:
    driver.register("w0")
    driver.dataset(10)
    with driver.refused(InvalidArgument, "from_epoch"):
        driver.advance(bad)


def test_the_epoch_of_an_unknown_dataset_is_not_advanced(driver: Driver) -> None:
    driver.register("w0")
    with driver.refused(UnknownDataset, "dataset_id"):
        driver.advance(0)
    with driver.refused(InvalidArgument, "dataset_id"):
        driver.advance(0, dataset_id="")


def test_progress_and_owners_are_replayed_from_the_journal(driver: Driver) -> None:
    driver.join("w0", "w1", "w2")
    driver.dataset(100, shuffle=True, seed=3)
    driver.ack("w1", driver.indices("w1")[:5])
    driver.leave("w0")
    dataset, again = (core.job("job").shards.dataset("data") for core in (driver.core, driver.restarted()))
    assert np.array_equal(dataset.owners, again.owners)
    assert np.array_equal(dataset.done, again.done)
    assert dataset.num_done == again.num_done == 5


def test_an_ack_between_two_pages_hides_no_shard() -> None:
    driver = Driver(limits=Limits(max_shards_per_reply=4))
    driver.join("w0")
    driver.dataset(10)
    first = driver.page("w0")
    driver.ack("w0", [shard.index for shard in first.shards])
    second = driver.page("w0", offset=first.next_offset)
    third = driver.page("w0", offset=second.next_offset)
    assert [s.index for page in (first, second, third) for s in page.shards] == list(range(10))
    assert third.next_offset == 0
