"""The shards of a job by owner, what the last change moved, and who waits for data."""

from __future__ import annotations

import numpy as np
import pytest

from strata.coordinator.journal import Entry, MemoryJournal
from strata.coordinator.state import events as e
from strata.coordinator.state.time_use import TimeUse
from strata.dashboard.data import (
    MAX_CELLS,
    DatasetView,
    Owner,
    RankData,
    data_waits,
    last_move,
    owned,
    shard_map,
)
from strata.dashboard.uses import NUM_CELLS, Report, Spent, cells, recent, spent


def view(owners: list[int], done: list[int] | None = None, *, members: int = 2, shuffle: bool = False) -> DatasetView:
    """Members have the incarnations 1, 2, …, and the launch ranks 10, 11, …"""
    flags = np.zeros(len(owners), dtype=np.bool_)
    flags[done or []] = True
    return DatasetView(
        dataset_id="d",
        num_shards=len(owners),
        total_samples=len(owners),
        shuffle=shuffle,
        seed=1,
        epoch=0,
        generation=1,
        reason="",
        owners=np.array(owners, dtype=np.int64),
        done=flags,
        members=tuple(Owner(f"w{number}", 9 + number, number) for number in range(1, members + 1)),
    )


def test_each_owner_has_its_shards_in_cells_of_one_shard() -> None:
    found = shard_map(view([1, 2, 1, 2, 2], [0, 4]), limit=10, offset=0)

    assert [(row.owner and row.owner.worker_id, row.num_done, row.cells) for row in found.rows] == [
        ("w1", 1, [1, 0]),
        ("w2", 1, [0, 0, 1]),
    ]
    assert (found.shards_per_cell, found.shards_of, found.left_of) == (1, [2, 3], [1, 2])


def test_shards_of_a_worker_that_left_come_first_and_are_nobodys() -> None:
    found = shard_map(view([7, 1, 0], members=1), limit=10, offset=0)

    assert [(row.owner, row.num_shards) for row in found.rows] == [(None, 2), (Owner("w1", 10, 1), 1)]
    assert found.num_waiting == 2


def test_ten_thousand_shards_fit_into_a_bounded_number_of_cells() -> None:
    owners = [1 + number % 3 for number in range(10_000)]
    found = shard_map(view(owners, list(range(5_000)), members=3), limit=2, offset=1)

    assert found.num_rows == 3
    assert [row.owner.worker_id for row in found.rows if row.owner] == ["w2", "w3"]
    assert all(len(row.cells) <= MAX_CELLS for row in found.rows)
    assert [sum(row.cells) for row in found.rows] == [row.num_done for row in found.rows] == [1_667, 1_666]


def test_a_job_without_members_and_a_dataset_without_shards_have_a_map() -> None:
    assert shard_map(view([0, 0], members=0), limit=5, offset=0).num_waiting == 2
    assert shard_map(view([], members=1), limit=5, offset=0).rows[0].cells == []


def test_shuffled_shards_are_shown_in_the_order_in_which_their_owner_reads_them() -> None:
    in_order = view([1] * 50, [3], members=1, shuffle=True)
    (row,) = shard_map(in_order, limit=1, offset=0).rows

    assert sum(row.cells) == 1
    assert row.cells != [0, 0, 0, 1] + [0] * 46


def test_owned_shards_and_those_left_are_counted_per_worker() -> None:
    assert owned(view([1, 1, 2, 9], [0])) == {"w1": (2, 1), "w2": (1, 1)}


def entry(event: e.ShardsAssigned | e.GenerationStarted, at_s: float) -> Entry:
    return Entry(event.job_id, type(event).__name__, at_s, e.encode(event))


def assigned(generation: int, pairs: dict[int, int], dataset: str = "d") -> e.ShardsAssigned:
    return e.ShardsAssigned(
        job_id="j",
        dataset_id=dataset,
        generation=generation,
        num_workers=2,
        num_moved=len(pairs),
        moves=e.pack_ints(np.array([*pairs, *pairs.values()])),
    )


def test_the_last_move_names_its_generation_reason_and_what_each_process_got() -> None:
    journal = MemoryJournal()
    journal.load()
    started = e.GenerationStarted(job_id="j", generation=4, num_workers=2, reason="w3 left: silent 5.2 s, lease 5.0 s")
    last = journal.append(
        [
            entry(assigned(3, {0: 1}), 1.0),
            entry(started, 2.0),
            entry(assigned(4, {1: 7, 2: 7, 5: 8}), 3.0),
            entry(assigned(4, {1: 9}, "other"), 4.0),
        ]
    )

    found = last_move(journal, "j", "d", last)

    assert found is not None
    assert (found.at_s, found.generation, found.num_moved, found.gained) == (3.0, 4, 3, {7: 2, 8: 1})
    assert found.reason == "w3 left: silent 5.2 s, lease 5.0 s"
    assert last_move(journal, "j", "unknown", last) is None


# -- time use ----------------------------------------------------------------------------------------------------------


def report(at_s: float, **sums: float) -> Report:
    return Report(at_s, 0, TimeUse(measured_s=at_s, **sums))


def test_the_parts_of_a_span_add_up_whatever_a_worker_sends() -> None:
    found = spent(TimeUse(measured_s=1.0, data_s=9.0), TimeUse(measured_s=11.0, data_s=2.0, checkpoint_s=99.0))

    assert found == Spent(10.0, 0.0, 0.0, 10.0, 0.0, 0.0, is_collective_known=False)
    assert spent(TimeUse(measured_s=5.0), TimeUse(measured_s=5.0)) is None


def test_the_recent_past_is_the_last_half_minute_and_needs_ten_seconds() -> None:
    reports = [report(5.0 * number, data_s=float(number >= 20)) for number in range(NUM_CELLS)]

    assert len(cells(reports)) == NUM_CELLS - 1
    last = recent(reports)
    assert last is not None
    assert (last.measured_s, last.data_s) == (30.0, 0.0)
    assert recent(reports[:2]) is None
    assert recent([]) is None


def rank(number: int, share: float | None, shards: tuple[int, int] | None = None) -> RankData:
    parts = None if share is None else Spent(10.0, 10.0 * (1 - share), 10.0 * share, 0.0, 0.0, 0.0, False)
    return RankData(f"w{number}", number, parts, *(shards or (None, None)))


def test_a_single_rank_that_waits_is_told_apart_from_a_slow_loader() -> None:
    (one,) = data_waits([rank(0, 0.02), rank(1, 0.6), rank(2, 0.04)])
    assert (one.worker_id, one.share, one.cause) == ("w1", pytest.approx(0.6), "some_ranks")
    assert one.reason == "the median of all ranks is 4 %, so the cause is on this one"

    common = data_waits([rank(0, 0.5), rank(1, 0.6), rank(2, 0.04)])
    assert [(each.worker_id, each.cause) for each in common] == [("w1", "all_ranks"), ("w0", "all_ranks")]
    assert "num_workers=" in common[0].cure


def test_a_rank_without_shards_is_told_to_use_smaller_ones() -> None:
    (found,) = data_waits([rank(0, 0.9, (3, 0)), rank(1, 0.0, (3, 2))])
    assert (found.cause, found.reason) == (
        "no_shards",
        "has finished all of its 3 shards, while 1 other worker has some left",
    )


def test_ranks_that_measured_nothing_or_wait_little_are_not_named() -> None:
    assert data_waits([rank(0, None), rank(1, 0.09)]) == []
    assert data_waits([]) == []
