"""Shard assignment: within the bounds, with the fewest moves, and deterministic."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata.coordinator.state.ring import assign, load_bounds, shard_keys, unavoidable_moves
from strata.errors import InvalidArgument

QUICK = settings(max_examples=60, deadline=None)

capacity = st.one_of(
    st.just(1.0), st.integers(1, 8).map(float), st.floats(1e-3, 1e3, allow_nan=False, allow_infinity=False)
)
num_shards = st.integers(0, 600)
names = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=40, unique=True)


def named(num: int) -> list[str]:
    return [f"worker-{i:04d}" for i in range(num)]


def loads_of(owners: NDArray[np.int32], num_workers: int) -> NDArray[np.int64]:
    return np.bincount(owners, minlength=num_workers)


def check(
    keys: NDArray[np.uint64],
    workers: Sequence[str],
    capacities: Sequence[float],
    current: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Assign, and check every guarantee."""
    owners = assign(keys, workers=workers, capacities=capacities, current=current)
    lo, hi = load_bounds(keys.size, capacities)
    loads = loads_of(owners, len(workers))
    assert owners.dtype == np.int32
    assert owners.shape == keys.shape
    assert (loads >= lo).all()
    assert (loads <= hi).all()
    if current is not None:
        assert int((owners != current).sum()) == unavoidable_moves(current, lo, hi)
    return owners


def without(owners: NDArray[np.int32], leaver: int) -> NDArray[np.int32]:
    """The current assignment after a worker has left the list."""
    stands = owners.copy()
    stands[owners == leaver] = -1
    stands[owners > leaver] -= 1
    return stands


@QUICK
@given(num_shards, st.lists(capacity, min_size=1, max_size=60))
def test_the_floors_and_ceilings_always_leave_room_for_an_assignment(n: int, capacities: list[float]) -> None:
    lo, hi = load_bounds(n, capacities)
    means = n * np.array(capacities) / sum(capacities)
    assert lo.sum() <= n <= hi.sum()
    assert (lo <= means + 1e-9).all()
    assert (means <= hi + 1e-9).all()
    assert (hi <= np.maximum(np.ceil(means - 1e-9), 1.05 * means + 1e-9)).all()
    assert (lo >= np.minimum(np.floor(means + 1e-9), 0.95 * means - 1e-9)).all()


def test_ten_thousand_shards_over_a_hundred_workers_give_each_95_to_105() -> None:
    lo, hi = load_bounds(10_000, [1.0] * 100)
    assert set(lo.tolist()) == {95}
    assert set(hi.tolist()) == {105}


def test_a_seventh_of_a_hundred_shards_is_14_or_15() -> None:
    lo, hi = load_bounds(100, [0.1] * 7)
    assert set(lo.tolist()) == {14}
    assert set(hi.tolist()) == {15}


@QUICK
@given(num_shards, st.data())
def test_a_fresh_start_keeps_the_bounds_for_any_names_and_weights(n: int, data: st.DataObject) -> None:
    workers = data.draw(names)
    capacities = data.draw(st.lists(capacity, min_size=len(workers), max_size=len(workers)))
    check(shard_keys("d", n, 0), workers, capacities)


@QUICK
@given(num_shards, st.data())
def test_the_order_in_which_workers_are_listed_does_not_matter(n: int, data: st.DataObject) -> None:
    workers = data.draw(names)
    capacities = data.draw(st.lists(capacity, min_size=len(workers), max_size=len(workers)))
    order = data.draw(st.permutations(range(len(workers))))
    keys = shard_keys("d", n, 3)
    one = assign(keys, workers=workers, capacities=capacities)
    shuffled = [workers[i] for i in order]
    other = assign(keys, workers=shuffled, capacities=[capacities[i] for i in order])
    assert [workers[i] for i in one] == [shuffled[i] for i in other]


@QUICK
@given(st.integers(1, 400), st.integers(1, 30), st.data())
def test_only_unavoidable_moves_happen_from_any_assignment(n: int, num: int, data: st.DataObject) -> None:
    current = np.array(data.draw(st.lists(st.integers(-1, num - 1), min_size=n, max_size=n)), dtype=np.int32)
    capacities = data.draw(st.lists(capacity, min_size=num, max_size=num))
    settled = check(shard_keys("d", n, 1), named(num), capacities, current)
    again = check(shard_keys("d", n, 1), named(num), capacities, settled)
    assert (again == settled).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3_000), st.booleans(), st.randoms(use_true_random=False))
def test_any_history_of_joins_and_leaves_moves_the_minimum(n: int, weighted: bool, rng: random.Random) -> None:
    keys = shard_keys("history", n, 5)
    workers = named(rng.randint(1, 25))
    sizes = {w: rng.choice([0.5, 1.0, 2.0, 3.7]) if weighted else 1.0 for w in workers}
    owners = check(keys, workers, [sizes[w] for w in workers])
    for event in range(12):
        if len(workers) > 1 and rng.random() < 0.5:
            leaver = rng.randrange(len(workers))
            workers.pop(leaver)
            stands = without(owners, leaver)
        else:
            joiner = f"late-{event}"
            sizes[joiner] = rng.choice([0.5, 1.0, 2.0, 3.7]) if weighted else 1.0
            workers.append(joiner)
            stands = owners
        owners = check(keys, workers, [sizes[w] for w in workers], stands)


@QUICK
@given(st.lists(st.integers(-1, 2), min_size=1, max_size=6), st.lists(capacity, min_size=3, max_size=3))
def test_no_assignment_moves_fewer_than_the_unavoidable_shards(owners: list[int], capacities: list[float]) -> None:
    current = np.array(owners, dtype=np.int32)
    lo, hi = load_bounds(current.size, capacities)
    every = np.array(list(itertools.product(range(3), repeat=current.size)), dtype=np.int32)
    loads = np.stack([(every == worker).sum(axis=1) for worker in range(3)], axis=1)
    allowed = every[((loads >= lo) & (loads <= hi)).all(axis=1)]
    assert (allowed != current).sum(axis=1).min() == unavoidable_moves(current, lo, hi)


@pytest.mark.parametrize("num_workers", [2, 10, 100, 1_000])
def test_a_leave_moves_exactly_the_leavers_shards(num_workers: int) -> None:
    keys = shard_keys("d", 10_000, 7)
    owners = check(keys, named(num_workers), [1.0] * num_workers)
    leaver = num_workers // 2
    rest = [w for i, w in enumerate(named(num_workers)) if i != leaver]
    stands = without(owners, leaver)
    after = check(keys, rest, [1.0] * len(rest), stands)
    assert int((after != stands).sum()) == int((owners == leaver).sum())


@pytest.mark.parametrize("num_workers", [1, 10, 100, 1_000])
def test_a_join_moves_no_more_than_the_joiners_fair_share_and_only_to_the_joiner(num_workers: int) -> None:
    keys = shard_keys("d", 10_000, 7)
    owners = check(keys, named(num_workers), [1.0] * num_workers)
    after = check(keys, [*named(num_workers), "joiner"], [1.0] * (num_workers + 1), owners)
    moved = after[after != owners]
    fair = 10_000 / (num_workers + 1)
    assert set(moved.tolist()) == {num_workers}
    assert 0.9 * fair <= moved.size <= fair


def test_a_worker_of_twice_the_capacity_gets_twice_the_shards() -> None:
    owners = check(shard_keys("d", 9_000, 0), ["big", "small"], [2.0, 1.0])
    big, small = loads_of(owners, 2)
    assert 1.8 < big / small < 2.2


def test_a_worker_without_capacity_gives_up_all_shards() -> None:
    owners = check(shard_keys("d", 100, 0), ["a", "b"], [1.0, 1.0])
    after = check(shard_keys("d", 100, 0), ["a", "b"], [0.0, 1.0], owners)
    assert set(after.tolist()) == {1}


def test_most_shards_get_the_worker_they_prefer_even_after_another_fresh_start() -> None:
    keys = shard_keys("d", 10_000, 0)
    before = assign(keys, workers=named(100), capacities=[1.0] * 100)
    after = assign(keys, workers=named(101), capacities=[1.0] * 101)
    assert np.mean(before == after) > 0.75


def test_no_shards_one_worker_more_workers_than_shards_and_no_workers_at_all() -> None:
    keys = shard_keys("d", 5, 0)
    assert assign(shard_keys("d", 0, 0), workers=named(3), capacities=[1.0] * 3).tolist() == []
    assert check(keys, ["only"], [1.0]).tolist() == [0] * 5
    assert sorted(loads_of(check(keys, named(50), [1.0] * 50), 50).tolist())[-6:] == [0, 1, 1, 1, 1, 1]
    assert assign(keys, workers=[], capacities=[]).tolist() == [-1] * 5
    assert assign(keys, workers=[], capacities=[], current=np.full(5, -1, np.int32)).tolist() == [-1] * 5


def test_the_current_assignment_is_not_modified() -> None:
    current = np.zeros(100, dtype=np.int32)
    assign(shard_keys("d", 100, 0), workers=["a", "b"], capacities=[1.0, 1.0], current=current)
    assert not current.any()


def test_keys_differ_between_datasets_and_seeds_and_are_spread_over_the_circle() -> None:
    keys = shard_keys("d", 10_000, 0)
    assert np.unique(keys).size == 10_000
    assert not (keys == shard_keys("d", 10_000, 1)).any()
    assert not (keys == shard_keys("e", 10_000, 0)).any()
    assert (keys == shard_keys("d", 20_000, 0)[:10_000]).all()
    eighths = np.bincount((keys >> np.uint64(61)).astype(np.intp), minlength=8)
    assert eighths.min() > 1_100
    shard_keys("d", 1, -1)  # any integer is a seed


def test_another_process_with_another_hash_seed_gives_the_same_assignment() -> None:
    script = (
        "from strata.coordinator.state.ring import *; import xxhash\n"
        "workers, capacities = [f'w{i}' for i in range(37)], [1.0 + i % 3 for i in range(37)]\n"
        "a = assign(shard_keys('d', 1000, 4), workers=workers, capacities=capacities)\n"
        "print(xxhash.xxh3_64_hexdigest(a.tobytes()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(found) == 1


def test_the_assignment_of_this_version_matches_the_recorded_one() -> None:
    """Journals store assignments, so another algorithm breaks nothing; but it must not change unnoticed."""
    owners = assign(shard_keys("golden", 24, 42), workers=["a", "b", "c", "d"], capacities=[1, 1, 1, 3])
    assert "".join("abcd"[i] for i in owners) == "adacadbdbddacdddccdddbdb"


@pytest.mark.parametrize(
    ("workers", "capacities", "current", "field", "message"),
    [
        (["a", "a"], [1.0, 1.0], None, "workers", "'a' is listed twice"),
        (["a", "b"], [1.0], None, "capacities", "1 capacities for 2 workers"),
        (["a", "b"], [1.0, -1.0], None, "capacities", "at least 0"),
        (["a", "b"], [0.0, 0.0], None, "capacities", "not all 0"),
        (["a", "b"], [1.0, float("nan")], None, "capacities", "finite"),
        (["a", "b"], [1.0, float("inf")], None, "capacities", "finite"),
        (["a", "b"], [1.0, 1.0], [0, 1], "current", "2 owners for 3 shards"),
        (["a", "b"], [1.0, 1.0], [0, 1, 2], "current", "index into the 2 workers"),
        (["a", "b"], [1.0, 1.0], [0, 1, -2], "current", "must be -1 or an index"),
    ],
)
def test_a_refusal_names_the_argument_and_the_cure(
    workers: list[str], capacities: list[float], current: list[int] | None, field: str, message: str
) -> None:
    stands = None if current is None else np.array(current, dtype=np.int32)
    with pytest.raises(InvalidArgument, match=message) as refused:
        assign(shard_keys("d", 3, 0), workers=workers, capacities=capacities, current=stands)
    assert refused.value.field == field


def test_a_negative_number_of_shards_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_shards=-1"):
        shard_keys("d", -1, 0)
