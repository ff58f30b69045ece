"""When servers answer pulls and apply pushes, and which server owns a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.state import ring
from strata.errors import InvalidArgument
from strata.servers.clocks import Clocks, Push, Rounds, mean, sum_by_key
from strata.servers.placement import Placement
from strata.servers.table import native
from strata.servers.table.keys import NUM_BUCKETS, unique

WIDTH = 4


def push_of(generator: np.random.Generator, *keys: int) -> Push:
    return Push(np.array(keys, np.uint64), generator.normal(size=(len(keys), WIDTH)).astype(np.float32))


# -- clocks ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.one_of(st.none(), st.integers(0, 4)), st.lists(st.integers(0, 4), max_size=60))
def test_no_worker_is_further_ahead_than_the_staleness(workers: int, staleness: int | None, turns: list[int]) -> None:
    clocks = Clocks(workers, staleness=staleness)
    steps = [0] * workers
    for turn in turns:
        rank = turn % workers
        if not clocks.may_pull(steps[rank]):
            assert staleness is not None
            assert steps[rank] - min(steps) > staleness
            assert clocks.behind() == [each for each in range(workers) if steps[each] == min(steps)]
            continue
        steps[rank] += 1
        clocks.advance(rank, steps[rank])
        assert staleness is None or max(steps) - min(steps) <= staleness + 1
    assert [clocks.of(rank) for rank in range(workers)] == steps
    assert clocks.slowest == min(steps)


def test_the_slowest_worker_never_waits() -> None:
    clocks = Clocks(3, staleness=0, start=7)
    assert clocks.may_pull(7)
    clocks.advance(0, 8)
    assert not clocks.may_pull(8)
    assert clocks.may_pull(7)
    clocks.advance(1, 8)
    clocks.advance(2, 8)
    assert clocks.may_pull(8)


@pytest.mark.parametrize("clock", [0, 2, -1])
def test_a_push_that_is_not_the_next_step_is_refused(clock: int) -> None:
    clocks = Clocks(2, staleness=1)
    with pytest.raises(InvalidArgument, match=f"worker 1 pushed step {clock} after step 0"):
        clocks.advance(1, clock)


# -- rounds ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sets(st.integers(0, 12), max_size=8), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.integers(0, 2**32),
)
def test_a_round_has_the_same_bits_in_any_order_of_arrival(sets: list[set[int]], order: Any, seed: int) -> None:
    generator = np.random.default_rng(seed)
    pushes = [push_of(generator, *sorted(keys)) for keys in sets]
    arrivals = list(range(len(pushes)))
    order.shuffle(arrivals)
    rounds = Rounds(len(pushes))

    results = [rounds.add(rank, pushes[rank]) for rank in arrivals]

    assert all(result is None for result in results[:-1])
    found = results[-1]
    assert found is not None
    expected: dict[int, np.ndarray[Any, Any]] = {}
    for push in pushes:  # in the order of ranks
        for key, gradient in zip(push.keys.tolist(), push.gradients, strict=True):
            share = gradient / np.float32(len(pushes))
            expected[key] = expected[key] + share if key in expected else share
    assert found.keys.tolist() == sorted(expected)
    assert found.gradients.tolist() == [expected[key].tolist() for key in sorted(expected)]
    assert rounds.missing == list(range(len(pushes)))


def test_a_second_push_of_a_worker_in_one_round_is_refused() -> None:
    rounds = Rounds(2)
    push = push_of(np.random.default_rng(0), 1)
    rounds.add(1, push)
    assert rounds.missing == [0]
    with pytest.raises(InvalidArgument, match="worker 1 pushed twice"):
        rounds.add(1, push)


def test_a_round_without_any_gradient_is_empty() -> None:
    found = mean([push_of(np.random.default_rng(0)) for _ in range(3)])
    assert found.keys.tolist() == []
    assert found.gradients.shape == (0, WIDTH)


@pytest.mark.skipif(native.sum_rows is None, reason="numba is not installed")
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 2**32))
def test_sums_by_key_have_the_same_bits_with_numba_and_numpy(keys: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(len(keys), WIDTH)).astype(np.float32)
    groups = unique(np.array(keys, np.uint64))
    compiled = sum_by_key(values, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "sum_rows", None)
        assert compiled.tobytes() == sum_by_key(values, groups).tobytes()


# -- placement ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=9), min_size=1, max_size=4))
def test_placement_is_balanced_and_moves_the_least(memberships: list[set[int]]) -> None:
    placement: Placement | None = None
    for members in memberships:
        servers = [f"server-{number}" for number in sorted(members)]
        before = placement
        placement = Placement.first(servers) if before is None else before.changed(servers)
        counts = np.bincount(placement.owners, minlength=len(servers))
        low, high = ring.load_bounds(NUM_BUCKETS, [1.0] * len(servers))
        assert (counts >= low).all()
        assert (counts <= high).all()
        if before is not None:
            index = {name: number for number, name in enumerate(servers)}
            stays = np.array([index.get(before.servers[owner], -1) for owner in before.owners], np.int32)
            moved = int((placement.owners != stays).sum())
            assert moved == ring.unavoidable_moves(stays, low, high)


def test_every_worker_finds_the_same_owner_of_a_key() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, 10_000).astype(np.uint64)
    one, other = Placement.first(["a", "b", "c"]), Placement.first(["a", "b", "c"])

    assert one.owners_of(keys).tolist() == other.owners_of(keys).tolist()
    assert set(one.owners_of(keys).tolist()) == {0, 1, 2}
