"""Batches by bytes or tokens: every row once, within the limit, in equal steps, on any number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order.bins import Bins, BinSchedule, BinSteps, Budget, Pools, padding_waste
from strata.data.order.order import make_order
from strata.errors import InvalidArgument

LIMIT = 40


def bins_of(
    lengths: list[list[int]],
    *,
    num_tracks: int = 1,
    lanes_per_track: int = 1,
    window: int = 10,
    shuffle: bool = True,
    padded: bool = False,
    buckets: bool = False,
    skips_long: bool = False,
    seed: int = 0,
    epoch: int = 0,
    limit: int = LIMIT,
) -> Bins:
    """Return the bins of row groups with rows of these lengths, each row group a split."""
    rows = np.array([len(each) for each in lengths], np.int64)
    plan: Any = SimpleNamespace(unit_rows=rows, split_starts=np.arange(len(rows) + 1))
    num_lanes = num_tracks * lanes_per_track
    order = make_order(plan, seed=seed, epoch=epoch, shuffle=shuffle, num_lanes=num_lanes, window_rows=window)
    budget = Budget(limit=limit, is_padded=padded, has_buckets=buckets, skips_long=skips_long)
    flat = np.array(list(itertools.chain(*lengths)), np.uint32)
    starts = np.concatenate([[0], np.cumsum(rows)])
    return Bins.of(Pools(order, budget.costs(flat), starts, num_tracks, budget))


def steps_of(bins: Bins, num_ranks: int, first: int = 0, tail: Any = "uneven") -> BinSteps:
    return BinSteps(bins=bins, num_rows=bins.pools.order.num_rows, first=first, world_size=num_ranks, tail=tail)


def batches_of(steps: BinSteps, rank: int, **blocks: Any) -> list[list[tuple[int, int]]]:
    """Return the batches of a rank as (row group, row), from the blocks that a pipeline would assemble."""
    schedule = BinSchedule(steps, rank, **{"block_rows": 25, **blocks})
    found = []
    for outline in schedule.outlines():
        block = schedule.block(outline)
        assert set(block.row_groups) == set(outline.row_groups)
        assert (block.first_batch, block.num_batches, sum(block.sizes)) == (
            *(outline.first_batch, outline.num_batches),
            outline.num_rows,
        )
        rows = [
            (piece.row_group, row)
            for piece in block.pieces
            for row in (range(piece.first, piece.last) if piece.rows is None else piece.rows.tolist())
        ]
        rows = rows if block.index is None else [rows[index] for index in block.index]
        for size in block.sizes:
            found.append(rows[:size])
            rows = rows[size:]
        assert not rows
    assert len(found) == steps.num_batches
    return found


def cost_of(batch: list[tuple[int, int]], lengths: list[list[int]], *, padded: bool) -> int:
    costs = [max(1, lengths[row_group][row]) for row_group, row in batch]
    return len(costs) * max(costs) if padded else sum(costs)


all_lengths = st.lists(st.lists(st.integers(0, LIMIT), min_size=1, max_size=20), min_size=1, max_size=8)
settings_of_bins = st.fixed_dictionaries(
    {
        "num_tracks": st.integers(1, 4),
        "lanes_per_track": st.integers(1, 3),
        "window": st.integers(1, 12),
        "seed": st.integers(0, 3),
        "epoch": st.integers(0, 3),
        "padded": st.booleans(),
    }
).flatmap(
    lambda made: st.sampled_from([(False, False), (True, False), (True, True)]).map(
        lambda order: {**made, "shuffle": order[0], "buckets": order[1]}
    )
)


@given(
    lengths=all_lengths,
    made=settings_of_bins,
    chain=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=4),
    last=st.integers(1, 5),
    blocks=st.fixed_dictionaries({"block_rows": st.integers(1, 60), "part_rows": st.sampled_from([None, 3])}),
)
def test_every_row_is_delivered_once_within_the_limit_however_often_the_number_of_ranks_changes(
    lengths: list[list[int]], made: dict[str, Any], chain: list[tuple[int, int]], last: int, blocks: dict[str, Any]
) -> None:
    bins = bins_of(lengths, **made)
    position, given_rows, num_repeated = 0, Counter[tuple[int, int]](), 0
    worlds: list[tuple[int, int | None]] = [*chain, (last, None)]
    for num_ranks, stop in worlds:
        steps = steps_of(bins, num_ranks, position)
        by_rank = [batches_of(steps, rank, **blocks)[:stop] for rank in range(num_ranks)]
        assert len({len(batches) for batches in by_rank}) == 1, "equal steps"
        for step, batches in enumerate(zip(*by_rank, strict=True)):
            assert all(batches), "no rank has an empty batch"
            assert all(cost_of(batch, lengths, padded=made["padded"]) <= LIMIT for batch in batches)
            num_repeated += sum(steps.repeated_rows(step, rank) for rank in range(num_ranks))
            assert steps.given_rows(step) == sum(map(len, batches))
            given_rows.update(itertools.chain(*batches))
            position = steps.position_after(step)
        if stop is None and steps.num_batches:
            assert steps.fewest_rows == min(len(batch) for batches in by_rank for batch in batches)
    rows = {(row_group, row) for row_group, each in enumerate(lengths) for row in range(len(each))}
    assert set(given_rows) == rows
    assert given_rows.total() - len(rows) == num_repeated
    if last == 1 and not chain:
        assert num_repeated == 0


@given(lengths=all_lengths, made=settings_of_bins, num_ranks=st.integers(1, 5), tail=st.sampled_from(["pad", "drop"]))
def test_the_tail_repeats_or_drops_whole_batches(
    lengths: list[list[int]], made: dict[str, Any], num_ranks: int, tail: str
) -> None:
    bins = bins_of(lengths, **made)
    steps = steps_of(bins, num_ranks, tail=tail)
    given_rows = Counter(itertools.chain(*(itertools.chain(*batches_of(steps, rank)) for rank in range(num_ranks))))
    num_rows = sum(map(len, lengths))
    full, rest = divmod(len(bins), num_ranks)
    assert steps.num_batches == full + (tail == "pad" and rest > 0)
    if tail == "drop":
        assert set(given_rows.values()) <= {1}
        assert given_rows.total() == num_rows - steps.dropped_rows
    else:
        assert len(given_rows) == num_rows
        assert given_rows.total() - num_rows == sum(
            steps.repeated_rows(step, rank) for step in range(steps.num_batches) for rank in range(num_ranks)
        )


@given(lengths=all_lengths, made=settings_of_bins)
def test_bins_have_the_same_rows_in_the_same_order_each_time(lengths: list[list[int]], made: dict[str, Any]) -> None:
    first, again = (batches_of(steps_of(bins_of(lengths, **made), 1), 0, block_rows=rows) for rows in (1, 1000))
    assert first == again


def test_another_epoch_and_another_seed_give_other_batches() -> None:
    lengths = [[5] * 30, [7] * 30]
    found = [
        batches_of(steps_of(bins_of(lengths, seed=seed, epoch=epoch), 1), 0) for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert found[0] != found[1]
    assert found[0] != found[2]


def test_without_shuffle_rows_keep_the_order_of_the_files() -> None:
    lengths = [[10, 20, 30], [5, 5, 5, 40, 1]]
    batches = batches_of(steps_of(bins_of(lengths, shuffle=False), 1), 0)
    assert batches == [[(0, 0), (0, 1)], [(0, 2), (1, 0), (1, 1)], [(1, 2)], [(1, 3)], [(1, 4)]]


def test_padding_counts_towards_the_limit() -> None:
    lengths = [[10, 10, 10, 10, 1, 20]]
    plain = batches_of(steps_of(bins_of(lengths, shuffle=False), 1), 0)
    padded = batches_of(steps_of(bins_of(lengths, shuffle=False, padded=True), 1), 0)
    assert [len(batch) for batch in plain] == [4, 2]  # 40, 21
    assert [len(batch) for batch in padded] == [4, 2]  # 4 × 10, 2 × 20
    assert [
        len(batch) for batch in batches_of(steps_of(bins_of([[10, 10, 20, 1]], shuffle=False, padded=True), 1), 0)
    ] == [
        *(2, 2),  # 2 × 10 and 2 × 20; three rows would take 3 × 20
    ]


def test_rows_above_the_limit_are_left_out_or_count_as_the_limit() -> None:
    lengths = [[10, 41, 10, 900]]
    skipped = bins_of(lengths, shuffle=False, skips_long=True)
    steps = steps_of(skipped, 1)
    assert batches_of(steps, 0) == [[(0, 0), (0, 2)]]
    assert steps.dropped_rows == 2
    assert steps.position_after(0) == 4
    cut = bins_of(lengths, shuffle=False)
    assert batches_of(steps_of(cut, 1), 0) == [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 3)]]


def test_a_plan_without_rows_has_no_batches() -> None:
    assert steps_of(bins_of([], num_tracks=2), 2).num_batches == 0


def test_a_rank_reads_the_row_groups_of_its_own_track() -> None:
    lengths = [[1] * 10 + [30] * 10 for _ in range(16)]
    steps = steps_of(bins_of(lengths, num_tracks=4, lanes_per_track=2, window=20), 4)
    read = [{row_group for batch in batches_of(steps, rank)[:-1] for row_group, _ in batch} for rank in range(4)]
    assert [len(each) for each in read] == [4, 4, 4, 4]
    assert len(set.union(*read)) == 16


def test_tracks_end_together_although_files_differ_in_length() -> None:
    lengths = [[1] * 400, [20] * 400]  # as lanes of equal rows, the second would have twenty times the bins
    bins = bins_of(lengths, num_tracks=2, window=50)
    numbers = np.bincount(bins.pool // bins.pools.num_windows)
    assert max(numbers) - min(numbers) <= 0.1 * len(bins)


def test_buckets_need_less_padding_than_batches_in_shuffled_order() -> None:
    random = np.random.default_rng(0)
    lengths = [np.clip(random.lognormal(4, 1, 500), 1, 1000).astype(int).tolist() for _ in range(8)]
    waste = {}
    for buckets in (False, True):
        made = bins_of(lengths, window=1000, padded=True, buckets=buckets, limit=4096)
        batches = batches_of(steps_of(made, 1), 0, block_rows=1000)
        delivered = [lengths[row_group][row] for batch in batches for row_group, row in batch]
        waste[buckets] = padding_waste(delivered, [len(batch) for batch in batches])
        assert max(cost_of(batch, lengths, padded=True) for batch in batches) <= 4096
    assert waste[True] < 0.15 < 0.5 < waste[False]


def test_batches_of_a_bucket_do_not_come_longest_first() -> None:
    lengths = [list(range(1, 41))]
    batches = batches_of(steps_of(bins_of(lengths, window=40, padded=True, buckets=True), 1), 0)
    longest = [max(lengths[0][row] for _, row in batch) for batch in batches]
    assert longest != sorted(longest, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "sizes", "waste"),
    [([4, 4], [2], 0.0), ([1, 3], [2], 1 / 3), ([1, 3], [1, 1], 0.0), ([2, 4, 6], [1, 2], 2 / 14), ([], [], 0.0)],
)
def test_padding_waste_is_the_share_of_padding(lengths: list[int], sizes: list[int], waste: float) -> None:
    assert padding_waste(lengths, sizes) == pytest.approx(waste)


def test_a_position_within_a_batch_is_refused() -> None:
    bins = bins_of([[10] * 8], shuffle=False)
    with pytest.raises(InvalidArgument, match="position 3 is not where a batch of this epoch ends"):
        steps_of(bins, 1, first=3)


def test_the_order_is_frozen() -> None:
    """A change of these figures would make every saved position mean other rows."""
    lengths = [[7, 21, 3, 14], [9, 30, 12], [2, 18, 25, 6]]
    bins = bins_of(lengths, num_tracks=2, window=4, padded=True, buckets=True, seed=42, epoch=1)
    assert [
        [row for rank in range(2) for row in batches_of(steps_of(bins, 2), rank)[step]] for step in range(4)
    ] == FROZEN


FROZEN = [[(2, 1), (2, 0), (0, 3), (0, 2)], [(0, 0), (2, 3), (0, 1)], [(2, 2), (1, 1)], [(1, 2), (1, 0)]]
