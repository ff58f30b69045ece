"""Row order, batch bounds and what each rank decodes, without files, threads or processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order.mixture import Mixture, SourceSteps, Turns
from strata.data.order.order import Lanes, Order, choose_lanes, choose_window, make_order, sequence_row_groups
from strata.data.order.schedule import Block, Outline, Schedule
from strata.data.order.steps import Steps
from strata.errors import InvalidArgument

Row = tuple[int, int]  # row group, row in it


def plan_of(unit_rows: list[int], units_per_split: int = 1) -> Any:
    starts = [*range(0, len(unit_rows), units_per_split), len(unit_rows)]
    return SimpleNamespace(unit_rows=np.array(unit_rows, dtype=np.int64), split_starts=np.array(starts, dtype=np.int64))


def naive_order(order: Order) -> list[Row]:
    """Compute the order row by row, from its definition."""
    sequence = [
        (int(row_group), row)
        for place, row_group in enumerate(order.row_groups)
        for row in range(int(order.row_group_starts[place + 1] - order.row_group_starts[place]))
    ]
    num_rows, num_lanes = order.num_rows, order.num_lanes
    lanes = []
    for lane in range(num_lanes):
        rows = sequence[lane * num_rows // num_lanes : (lane + 1) * num_rows // num_lanes]
        if order.window_rows:
            shuffled = []
            for window, first in enumerate(range(0, len(rows), order.window_rows)):
                part = rows[first : first + order.window_rows]
                shuffled += [part[i] for i in order.permutation(lane, window, len(part))]
            rows = shuffled
        lanes.append(rows)
    longest = max(map(len, lanes))
    return [lane[turn] for turn in range(longest) for lane in lanes if turn < len(lane)]


def rows_of(schedule: Schedule, outline: Outline) -> Iterator[list[Row]]:
    """Yield the batches of a block, from its pieces and its index."""
    return batches_of(outline, schedule.block(outline))


def batches_of(outline: Outline, block: Block) -> Iterator[list[Row]]:
    assert (outline.first_batch, outline.num_batches) == (block.first_batch, block.num_batches)
    assert set(block.row_groups) <= set(outline.row_groups)
    rows: list[Row] = []
    for piece in block.pieces:
        picked = range(piece.first, piece.last) if piece.rows is None else piece.rows.tolist()
        assert piece.num_rows == len(picked)
        assert all(piece.first <= row < piece.last for row in picked)
        rows += [(piece.row_group, row) for row in picked]
    rows = rows if block.index is None else [rows[i] for i in block.index]
    assert len(rows) == sum(block.sizes)
    for size in block.sizes:
        yield rows[:size]
        rows = rows[size:]


def delivered(schedule: Schedule, from_batch: int = 0, to_batch: int | None = None) -> list[list[Row]]:
    """Return the batches of a rank."""
    batches = [batch for outline in schedule.outlines(from_batch) for batch in rows_of(schedule, outline)]
    return batches[: None if to_batch is None else to_batch - from_batch]


row_groups = st.lists(st.integers(1, 13), min_size=1, max_size=8)
worlds = st.tuples(st.integers(1, 5), st.integers(1, 7))  # ranks, batch size


@st.composite
def orders(draw: st.DrawFn) -> Order:
    rows = draw(row_groups)
    shuffle = draw(st.booleans())
    return make_order(
        plan_of(rows, draw(st.integers(1, 3))),
        seed=draw(st.integers(0, 5)),
        epoch=draw(st.integers(0, 3)),
        shuffle=shuffle,
        num_lanes=draw(st.integers(1, 9)),
        window_rows=draw(st.integers(1, 12)),
    )


def steps_of(order: Order, world: tuple[int, int], first: int = 0, tail: Any = "uneven") -> Steps:
    return Steps(num_rows=order.num_rows, first=first, world_size=world[0], batch_size=world[1], tail=tail)


def test_lanes_take_turns_and_the_longer_ones_have_the_last_rows() -> None:
    lanes = Lanes(num_rows=8, num_lanes=3)  # 2, 3, 3
    assert lanes.starts().tolist() == [0, 2, 5, 8]
    taken = lanes.taken(np.arange(9))
    assert taken.tolist() == [
        *([0, 0, 0], [1, 0, 0], [1, 1, 0]),
        *([1, 1, 1], [2, 1, 1], [2, 2, 1]),
        *([2, 2, 2], [2, 3, 2], [2, 3, 3]),
    ]


@given(num_rows=st.integers(1, 60), num_lanes=st.integers(1, 20))
def test_every_position_takes_one_row_of_one_lane(num_rows: int, num_lanes: int) -> None:
    lanes = Lanes(num_rows, num_lanes)
    taken = lanes.taken(np.arange(num_rows + 1))
    assert taken[0].tolist() == [0] * num_lanes
    assert taken[-1].tolist() == np.diff(lanes.starts()).tolist()
    assert (np.diff(taken, axis=0).sum(axis=1) == 1).all()
    assert (np.diff(taken, axis=0) >= 0).all()


@given(starts=st.lists(st.integers(1, 4), min_size=1, max_size=9), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_a_shuffle_permutes_splits_and_keeps_the_row_groups_of_each_together(
    starts: list[int], seed: int, epoch: int
) -> None:
    split_starts = np.cumsum([0, *starts])
    row_groups = sequence_row_groups(split_starts, seed=seed, epoch=epoch, shuffle=True).tolist()
    assert sorted(row_groups) == list(range(split_starts[-1]))
    for first, end in itertools.pairwise(split_starts):
        place = row_groups.index(first)
        assert row_groups[place : place + end - first] == list(range(first, end))


def test_the_order_is_frozen() -> None:
    """A change of these figures would make every saved position mean other rows."""
    order = make_order(plan_of([4, 3, 5]), seed=42, epoch=1, shuffle=True, num_lanes=2, window_rows=3)
    assert [(int(row_group), row) for row_group, row in naive_order(order)] == FROZEN


@given(order=orders(), world=worlds, tail=st.sampled_from(["uneven", "pad", "drop"]), block_rows=st.integers(1, 30))
def test_all_ranks_together_read_the_order_in_the_same_number_of_batches(
    order: Order, world: tuple[int, int], tail: str, block_rows: int
) -> None:
    expected = naive_order(order)
    assert len(expected) == len(set(expected)) == order.num_rows
    steps = steps_of(order, world, tail=tail)
    by_rank = [delivered(Schedule(order, steps, rank, block_rows)) for rank in range(world[0])]
    assert {len(batches) for batches in by_rank} == {steps.num_batches}
    for number, batches in enumerate(zip(*by_rank, strict=True)):
        start, stop = steps.bounds(number)
        got = Counter(row for batch in batches for row in batch)
        assert set(got) == set(expected[start:stop])
        assert sum(got.values()) - (stop - start) == steps.padded_rows(number)
        assert all(batches), "no rank has an empty batch"
        sizes = [len(batch) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        if number < steps.num_batches - 1 or tail != "uneven":
            assert set(sizes) == {world[1]}
    covered = steps.bounds(steps.num_batches - 1)[1] if steps.num_batches else 0
    assert covered + steps.dropped_rows == order.num_rows
    assert steps.dropped_rows == 0 or tail == "drop"


@given(order=orders(), worlds=st.lists(worlds, min_size=1, max_size=4), data=st.data())
def test_every_row_is_read_once_across_any_sequence_of_world_sizes(
    order: Order, worlds: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each world stops after some batch, and the next, with other ranks and batches, goes on from there."""
    expected = naive_order(order)
    position = 0
    got: list[Row] = []
    padded = 0
    for number, world in enumerate(worlds):
        steps = steps_of(order, world, first=position)
        is_last = number == len(worlds) - 1
        stop_after = steps.num_batches if is_last else data.draw(st.integers(0, steps.num_batches))
        for rank in range(world[0]):
            for batch in delivered(Schedule(order, steps, rank, 9), 0, stop_after):
                got += batch
        padded += sum(steps.padded_rows(batch) for batch in range(stop_after))
        if stop_after:
            position = steps.position_after(stop_after - 1)
    assert position == order.num_rows
    assert set(got) == set(expected)
    assert len(got) - len(expected) == padded


@given(order=orders(), world=worlds, data=st.data())
def test_a_schedule_that_starts_in_the_middle_returns_the_same_batches(
    order: Order, world: tuple[int, int], data: st.DataObject
) -> None:
    steps = steps_of(order, world)
    rank = data.draw(st.integers(0, world[0] - 1))
    batch = data.draw(st.integers(0, steps.num_batches))
    whole = delivered(Schedule(order, steps, rank, 9))
    assert delivered(Schedule(order, steps, rank, 9), batch) == whole[batch:]
    if batch < steps.num_batches:
        resumed = steps_of(order, world, first=steps.bounds(batch)[0])
        assert delivered(Schedule(order, resumed, rank, 5)) == whole[batch:]


@given(order=orders(), world=worlds, block_rows=st.integers(1, 30), data=st.data())
def test_a_schedule_that_starts_small_returns_the_same_batches_in_growing_blocks(
    order: Order, world: tuple[int, int], block_rows: int, data: st.DataObject
) -> None:
    steps = steps_of(order, world)
    rank = data.draw(st.integers(0, world[0] - 1))
    plain, small = (Schedule(order, steps, rank, block_rows, starts_small=each) for each in (False, True))
    assert delivered(small) == delivered(plain)
    if not order.window_rows:
        full = max(1, block_rows // world[1])
        lengths = [outline.num_batches for outline in small.outlines()]
        begun = list(itertools.accumulate(lengths, initial=0))
        expected = [min(max(1, batch), full) for batch in begun[:-1]]
        assert lengths[:-1] == expected[: len(lengths) - 1]


@given(order=orders(), world=worlds, sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_the_borders_of_blocks_do_not_change_the_contents_of_batches(
    order: Order, world: tuple[int, int], sizes: list[int]
) -> None:
    steps = steps_of(order, world)
    for rank in range(world[0]):
        schedule = Schedule(order, steps, rank, 1000)
        turns = itertools.cycle(sizes)
        outlines = schedule.outlines(max_rows=turns.__next__)
        assert [batch for outline in outlines for batch in rows_of(schedule, outline)] == delivered(schedule)


def together(schedule: Schedule, from_batch: int) -> list[list[Row]]:
    """Return the same as `delivered`, with the blocks of each window computed together."""
    batches: list[list[Row]] = []
    window: list[Outline] = []
    for outline in schedule.outlines(from_batch):
        window.append(outline)
        if outline.ends_window:
            for each, block in zip(window, schedule.blocks_of_window(window), strict=True):
                batches += batches_of(each, block)
            window = []
    assert not window, "the last block ends its window"
    return batches


@given(
    order=orders(),
    world=worlds,
    tail=st.sampled_from(["uneven", "pad", "drop"]),
    block_rows=st.integers(1, 30),
    part_rows=st.integers(1, 30) | st.none(),
    data=st.data(),
)
def test_blocks_of_a_window_computed_together_have_the_same_batches(
    order: Order, world: tuple[int, int], tail: str, block_rows: int, part_rows: int | None, data: st.DataObject
) -> None:
    steps = steps_of(order, world, tail=tail)
    batch = data.draw(st.integers(0, steps.num_batches))
    for rank in range(world[0]):
        whole = delivered(Schedule(order, steps, rank, 1000))
        assert together(Schedule(order, steps, rank, block_rows, part_rows=part_rows), batch) == whole[batch:]


@given(order=orders(), world=worlds, share=st.floats(0.1, 1), by_batch=st.booleans(), block_rows=st.integers(1, 30))
def test_all_ranks_together_read_the_rows_of_a_mixed_source_once_and_in_its_order(
    order: Order, world: tuple[int, int], share: float, by_batch: bool, block_rows: int
) -> None:
    num_ranks, batch_size = world
    turns = Turns(mixture=Mixture([share, 1]), by_batch=by_batch, batch_rows=num_ranks * batch_size, taken=(0, 0))
    num_steps = turns.find(0, order.num_rows - 1) // turns.batch_rows + 1
    got: dict[tuple[int, int], list[Row]] = {}
    for rank in range(num_ranks):
        steps = SourceSteps(
            turns,
            0,
            position=0,
            num_steps=num_steps,
            rank=rank,
            world_size=num_ranks,
            epoch=0,
            num_rows=order.num_rows,
        )
        schedule = Schedule(order, steps, rank, block_rows, part_rows=block_rows // 2 + 1)
        batches = delivered(schedule)
        assert together(schedule, 0) == batches
        for number, batch in enumerate(batches):
            low, high = steps.run(number, rank)
            assert len(batch) == high - low <= steps.batch_size
            got.setdefault(steps.bounds(number), []).extend(batch)
    expected = naive_order(order)
    assert {bounds: set(rows) for bounds, rows in got.items()} == {
        (start, stop): set(expected[start:stop]) for start, stop in got
    }
    assert sorted(row for rows in got.values() for row in rows) == sorted(expected)


def test_only_a_window_that_is_too_large_for_one_block_is_cut_into_small_blocks() -> None:
    order = make_order(plan_of([1000]), seed=1, epoch=0, shuffle=True, num_lanes=2, window_rows=200)

    def sizes(block_rows: int) -> list[int]:
        schedule = Schedule(order, steps_of(order, (1, 10)), 0, block_rows, part_rows=100)
        return [10 * outline.num_batches for outline in schedule.outlines()]

    assert sizes(400) == [400, 400, 200]
    assert sizes(399) == [100] * 10
    assert sizes(50) == [50] * 20


def test_one_rank_without_shuffle_reads_in_file_order_and_copies_nothing() -> None:
    order = make_order(plan_of([4, 3, 5]), seed=1, epoch=2, shuffle=False, num_lanes=1, window_rows=7)
    schedule = Schedule(order, steps_of(order, (1, 5)), 0, 100)
    (block,) = schedule.blocks()
    assert block.index is None
    assert [(p.row_group, p.first, p.last) for p in block.pieces] == [(0, 0, 4), (1, 0, 3), (2, 0, 5)]
    assert block.sizes == (5, 5, 2)


@given(
    rows=st.lists(st.integers(20, 60), min_size=4, max_size=12), world_size=st.integers(1, 4), batch=st.integers(1, 12)
)
def test_with_the_default_lanes_a_row_group_is_read_by_one_rank_or_two_at_a_border(
    rows: list[int], world_size: int, batch: int
) -> None:
    lanes = choose_lanes(
        world_size=world_size, batch_size=batch, num_row_groups=len(rows), shuffle=True, max_lanes_per_rank=4
    )
    window = choose_window(num_lanes=lanes, batch_rows=world_size * batch, shuffle_buffer_size=50)
    order = make_order(plan_of(rows), seed=3, epoch=0, shuffle=True, num_lanes=lanes, window_rows=window)
    steps = steps_of(order, (world_size, batch), tail="drop")
    readers: dict[int, set[int]] = {}
    for rank in range(world_size):
        for block in Schedule(order, steps, rank, 9).blocks():
            for row_group in block.row_groups:
                readers.setdefault(row_group, set()).add(rank)
    # A row group lies in one lane or in adjacent lanes, which belong to the same or to adjacent ranks.
    per_lane = order.num_rows / lanes
    for row_group, ranks in readers.items():
        assert len(ranks) <= 2 + rows[row_group] // (per_lane * lanes / world_size)


def test_a_padded_batch_may_need_only_the_first_and_the_last_window() -> None:
    order = make_order(plan_of([9]), seed=1, epoch=0, shuffle=True, num_lanes=1, window_rows=2)
    # 9 rows for 12 places: the last rank has the last row and the first three.
    steps = steps_of(order, (3, 4), tail="pad")
    batches = [delivered(Schedule(order, steps, rank, 9)) for rank in range(3)]
    expected = naive_order(order)
    assert [row for (batch,) in batches for row in batch] == [*expected, *expected[:3]]


def test_a_window_is_one_lanes_part_of_the_buffer_and_ends_with_a_batch() -> None:
    assert choose_window(num_lanes=8, batch_rows=1024, shuffle_buffer_size=100_000) == 12_416
    assert 12_416 % (1024 // 8) == 0
    assert choose_window(num_lanes=8, batch_rows=1024, shuffle_buffer_size=10) == 128  # never less than a batch
    assert choose_window(num_lanes=3, batch_rows=1024, shuffle_buffer_size=100) == 33
    assert choose_window(num_lanes=3, batch_rows=250, shuffle_buffer_size=2_000) == 500  # 1,500 rows, six batches
    assert choose_window(num_lanes=300, batch_rows=100, shuffle_buffer_size=1) == 1


def test_the_number_of_lanes_divides_the_batch_so_that_no_two_ranks_share_a_lane() -> None:
    def chosen(**more: int) -> int:
        given = {"world_size": 4, "batch_size": 1024, "num_row_groups": 1000, "max_lanes_per_rank": 8} | more
        return choose_lanes(shuffle=True, **given)

    assert chosen() == 32
    assert chosen(batch_size=36) == 4 * 6
    assert chosen(batch_size=7) == 4 * 7
    assert chosen(batch_size=997) == 4
    assert chosen(world_size=1, batch_size=997) == 8
    assert chosen(num_row_groups=8) == 8
    assert chosen(num_row_groups=2) == 4
    assert choose_lanes(world_size=3, batch_size=8, num_row_groups=9, shuffle=False, max_lanes_per_rank=8) == 3


def test_the_last_batch_is_uneven_padded_or_dropped_as_configured() -> None:
    def tail(kind: Any, num_rows: int) -> tuple[list[int], int, int]:
        steps = Steps(num_rows=num_rows, first=0, batch_size=4, world_size=3, tail=kind)
        given = [steps.given_rows(batch) for batch in range(steps.num_batches)]
        return given, sum(steps.padded_rows(batch) for batch in range(steps.num_batches)), steps.dropped_rows

    assert tail("uneven", 29) == ([12, 12, 5], 0, 0)
    assert tail("uneven", 26) == ([12, 14], 0, 0)  # two rows for three ranks: the batch before takes them
    assert tail("uneven", 2) == ([3], 1, 0)  # nothing before it: one row is given twice
    assert tail("pad", 29) == ([12, 12, 12], 7, 0)
    assert tail("drop", 29) == ([12, 12], 0, 5)
    assert tail("drop", 2) == ([], 0, 2)
    assert tail("uneven", 24) == tail("pad", 24) == tail("drop", 24) == ([12, 12], 0, 0)


def test_an_unknown_tail_and_an_empty_batch_are_rejected_with_the_cure() -> None:
    with pytest.raises(InvalidArgument, match="uneven, pad, drop"):
        Steps(num_rows=3, first=0, batch_size=1, world_size=1, tail="cut")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="batch_size=0 must be at least 1"):
        Steps(num_rows=3, first=0, batch_size=0, world_size=1, tail="pad")


FROZEN: list[Row] = [(2, 1), (0, 2), (2, 2), (0, 1), (2, 0), (0, 3), (2, 3), (1, 1), (0, 0), (1, 2), (2, 4), (1, 0)]
