"""Row order of a map-style dataset: assignment to ranks, and resuming anywhere on any number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order.map_rows import MapRows, batch_seed, permuted, seed_of
from strata.errors import InvalidArgument, PlanChanged

TAILS = ("uneven", "pad", "drop")


def rows_of(num_rows: int, *, rank: int = 0, world_size: int = 1, **arguments: Any) -> MapRows:
    settings: dict[str, Any] = {"batch_size": 3, "shuffle": True, "shuffle_seed": 5, **arguments}
    return MapRows(num_rows, rank=rank, world_size=world_size, **settings)


def delivered(ranks: list[MapRows], num_batches: int) -> list[int]:
    """Return the rows of the next batches on all ranks; prefetched batches do not count."""
    seen: list[int] = []
    for each in ranks:
        each.begin()
        fetched = list(each.shares())
        for number in range(min(num_batches, len(fetched))):
            seen += fetched[number].rows
            each.delivered(number)
        if num_batches > len(fetched):
            each.ended()
    return seen


@given(num_rows=st.integers(0, 3_000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 50))
def test_every_row_has_one_position_in_the_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = permuted(np.arange(num_rows), num_rows, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_rows))


def test_one_position_of_many_is_computed_alone() -> None:
    positions = np.arange(299_999_000, 300_000_000)
    order = permuted(positions, 300_000_000, seed=1, epoch=2)
    assert len(set(order.tolist())) == 1_000
    assert order.min() >= 0
    assert order.max() < 300_000_000
    assert permuted(positions[7:8], 300_000_000, seed=1, epoch=2).tolist() == order[7:8].tolist()


def test_the_permutation_never_changes_between_versions() -> None:
    """A state saved years ago must resume at the same rows."""
    assert permuted(np.arange(12), 12, seed=0, epoch=0).tolist() == [11, 6, 2, 7, 1, 3, 9, 10, 0, 5, 8, 4]
    assert permuted(np.array([0, 1, 999_999_999]), 1_000_000_000, seed=7, epoch=3).tolist() == [
        822002165,
        275343529,
        307118284,
    ]


def test_rows_are_spread_evenly_over_positions() -> None:
    num_rows, num_orders = 50, 2_000
    counts = np.zeros((num_rows, num_rows))
    for seed in range(num_orders):
        counts[np.arange(num_rows), permuted(np.arange(num_rows), num_rows, seed=seed, epoch=0)] += 1
    expected = num_orders / num_rows
    chi_squared = ((counts - expected) ** 2 / expected).sum() / (num_rows - 1) ** 2
    assert 0.9 < chi_squared < 1.1


@given(data=st.data())
def test_every_row_is_delivered_once_across_failures_and_resizes(data: st.DataObject) -> None:
    """Run attempts with varying world and batch sizes, each from the state of the last checkpoint."""
    num_rows = data.draw(st.integers(1, 200), "rows")
    shuffle = data.draw(st.booleans(), "shuffle")
    kept: list[int] = []
    state: dict[str, Any] | None = None
    for attempt in itertools.count():
        world_size = data.draw(st.integers(1, 5), "ranks")
        batch_size = data.draw(st.integers(1, 7), "batch size")
        ranks = [
            rows_of(num_rows, rank=rank, world_size=world_size, batch_size=batch_size, shuffle=shuffle)
            for rank in range(world_size)
        ]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        is_last = attempt == 4
        num_batches = 1_000 if is_last else data.draw(st.integers(0, 10), "batches until the checkpoint")
        seen = delivered(ranks, num_batches)
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states)
        num_new = states[0]["position"] - len(kept)
        assert len(set(seen)) == num_new  # with fewer rows left than ranks, some get a row that another has, too
        kept += sorted(set(seen))
        state = states[0]
        if is_last:
            break
    assert sorted(kept) == list(range(num_rows))


@given(
    num_rows=st.integers(0, 100),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    tail=st.sampled_from(TAILS),
)
def test_all_ranks_have_the_same_number_of_batches_and_none_is_empty(
    num_rows: int, world_size: int, batch_size: int, tail: Any
) -> None:
    shares = []
    for rank in range(world_size):
        rows = rows_of(num_rows, rank=rank, world_size=world_size, batch_size=batch_size, tail=tail)
        rows.begin()
        shares.append([share.rows for share in rows.shares()])
    assert len({len(each) for each in shares}) == 1
    assert all(len(batch) for each in shares for batch in each)
    seen = [row for each in shares for batch in each for row in batch]
    if tail == "drop":
        assert len(set(seen)) == len(seen) == num_rows // (world_size * batch_size) * world_size * batch_size
    else:
        assert sorted(set(seen)) == list(range(num_rows))
    if tail == "uneven" and num_rows >= world_size:
        assert len(seen) == num_rows


def test_the_order_does_not_depend_on_ranks_and_changes_with_the_epoch() -> None:
    alone = rows_of(60, batch_size=12)
    alone.begin()
    batches = [share.rows for share in alone.shares()]
    ranks = [rows_of(60, rank=rank, world_size=4) for rank in range(4)]
    for each in ranks:
        each.begin()
    shares = zip(*(each.shares() for each in ranks), strict=True)
    together = [[row for share in of_batch for row in share.rows] for of_batch in shares]
    assert together == batches
    alone.set_epoch(1)
    alone.begin()
    assert [share.rows for share in alone.shares()] != batches


def test_without_shuffle_rows_come_in_their_order() -> None:
    rows = rows_of(10, shuffle=False, batch_size=4)
    rows.begin()
    assert [share.rows for share in rows.shares()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_complete_epoch_is_followed_by_the_next_and_an_abandoned_one_restarts() -> None:
    rows = rows_of(10)
    delivered([rows], 2)
    assert (rows.epoch, rows.position) == (0, 6)
    delivered([rows], 1)
    assert (rows.epoch, rows.position) == (0, 3)
    delivered([rows], 100)
    assert (rows.epoch, rows.position, rows.is_last) == (0, 10, True)
    rows.begin()
    assert (rows.epoch, rows.position) == (1, 0)
    rows.set_epoch(7)
    rows.begin()
    assert (rows.epoch, rows.position) == (7, 0)


def test_setting_the_epoch_of_a_loaded_state_keeps_the_position() -> None:
    rows = rows_of(10)
    delivered([rows], 2)
    again = rows_of(10)
    again.load_state_dict(rows.state_dict())
    again.set_epoch(0)
    assert again.position == 6
    again.set_epoch(1)
    assert again.position == 0


def test_a_pass_without_a_delivered_batch_starts_over() -> None:
    rows = rows_of(10)
    delivered([rows], 2)
    again = rows_of(10)
    again.load_state_dict(rows.state_dict())
    number = again.begin()
    again.set_epoch(0)  # Lightning calls it before it takes the first batch
    assert again.is_current(number)
    again.begin()
    assert again.position == 6
    assert not again.is_current(number)


@given(
    seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40), position=st.integers(0, 2**62) | st.integers(0, 2**33)
)
def test_the_seed_of_a_batch_is_that_of_numpys_seed_sequence(seed: int, epoch: int, position: int) -> None:
    assert batch_seed(seed, epoch, position) == seed_of(seed, epoch, position)


def test_the_seeds_of_batches_never_change_between_versions() -> None:
    """A state saved years ago must resume with the same random numbers."""
    assert [batch_seed(5, 2, position) for position in (0, 1, 2**32)] == [
        7579605621065597120,
        690399926757071991,
        9810087020243053567,
    ]


def test_the_seed_of_a_batch_depends_only_on_its_position() -> None:
    whole = rows_of(60, batch_size=5)
    whole.begin()
    seeds = [share.seed for share in whole.shares()]
    resumed = rows_of(60, batch_size=5)
    resumed.load_state_dict({**whole.state_dict(), "position": 20})
    resumed.begin()
    assert [share.seed for share in resumed.shares()] == seeds[4:]
    assert len({*seeds, whole.epoch_seed}) == len(seeds) + 1


def test_a_state_of_another_dataset_is_refused_unless_accepted() -> None:
    state = {**rows_of(10).state_dict(), "position": 9}
    shrunk = rows_of(8)
    with pytest.raises(PlanChanged, match=r"a dataset of 10 rows, but this one has 8\..*on_change='accept'"):
        shrunk.load_state_dict(state)
    shrunk.load_state_dict(state, on_change="accept")
    assert shrunk.position == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0}, "the state has version 0"),
        ({"version": -1}, "the state has version -1"),
        ({"version": "1"}, "not the state of a loader over a map-style dataset"),
        ({"version": None}, "the state has no version"),
        ({"kind": "files"}, "not the state of a loader"),
        ({"position": 11}, "position=11, which is not from 0 to 10"),
        ({"position": -1}, "position=-1"),
        ({"epoch": -1}, "epoch=-1"),
        ({"seed": 2**63}, "seed="),
        ({"fingerprint": "x"}, "if another loader saved it"),
    ],
)
def test_an_impossible_state_is_refused(changes: dict[str, Any], message: str) -> None:
    state = {**rows_of(10).state_dict(), **changes}
    with pytest.raises(InvalidArgument, match=message):
        rows_of(10).load_state_dict(state)
    with pytest.raises(InvalidArgument, match="the state has no version"):
        rows_of(10).load_state_dict({key: value for key, value in state.items() if key != "version"})


def test_an_error_about_a_newer_state_asks_to_upgrade() -> None:
    with pytest.raises(PlanChanged, match="upgrade"):
        rows_of(10).load_state_dict({**rows_of(10).state_dict(), "version": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"tail": "ragged"}, "tail='ragged' is unknown; use one of uneven, pad, drop"),
        ({"shuffle_seed": -1}, "shuffle_seed=-1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        rows_of(10, **arguments)
