"""Sums without rounding errors: the statistics of a column do not depend on the order of its rows."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.trainer.features.moments import CHUNK_ROWS, LIMIT, Moments, Summary, is_ordinary

USUAL = st.floats(-LIMIT, LIMIT, allow_nan=False)
NOT_TINY = USUAL.filter(lambda value: value == 0 or abs(value) > 1e-130)  # the squares of others are rounded


def summary_of(*batches: list[float] | np.ndarray) -> Summary | None:
    moments = Moments()
    for batch in batches:
        moments.add(np.array(batch, np.float64))
    return moments.summary()


@given(st.lists(NOT_TINY, min_size=1, max_size=50))
def test_mean_and_deviation_are_the_exact_ones_rounded_once(values: list[float]) -> None:
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)

    assert summary_of(values) == Summary(
        count=len(values), mean=float(mean), std=math.sqrt(variance), min=min(values), max=max(values)
    )


@given(st.lists(st.lists(USUAL, max_size=8), min_size=1, max_size=6).flatmap(
    lambda batches: st.tuples(st.just(batches), st.permutations([value for batch in batches for value in batch]))
))  # fmt: skip
def test_order_and_batches_do_not_change_a_bit(found: tuple[list[list[float]], list[float]]) -> None:
    batches, permuted = found

    assert summary_of(*batches) == summary_of(permuted)


@pytest.mark.parametrize("num_values", [1, CHUNK_ROWS, CHUNK_ROWS + 1, 5 * CHUNK_ROWS])
def test_chunks_of_equal_extreme_values_add_up(num_values: int) -> None:
    """All mantissa bits set, all at the upper end of a slice: the largest sum that a slice must hold."""
    value = 2.0**20 - 2.0**-32
    found = summary_of(np.full(num_values, value))

    assert found == Summary(count=num_values, mean=value, std=0.0, min=value, max=value)


def test_a_large_mean_does_not_hide_a_small_deviation() -> None:
    seconds = 1_700_000_000.0 + np.array([0.0, 0.25] * 10_000)

    found = summary_of(seconds)

    assert found is not None
    assert found.std == 0.125


def test_random_columns_agree_with_numpy_to_the_last_digits() -> None:
    random = np.random.default_rng(7)
    for values in (random.normal(size=100_000), random.lognormal(0, 9, 100_000), random.integers(-9, 9, 100_000)):
        found = summary_of(values)
        assert found is not None
        assert found.mean == pytest.approx(values.mean(), rel=1e-9)
        assert found.std == pytest.approx(values.std(), rel=1e-9)


def test_threads_give_the_same_sums_as_one() -> None:
    random = np.random.default_rng(8)
    batches = [random.normal(size=1000) for _ in range(16)]
    moments = Moments()
    threads = [threading.Thread(target=moments.add, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert moments.summary() == summary_of(np.concatenate(batches))


def test_no_values_have_no_statistics() -> None:
    assert summary_of([]) is None


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], True), ([1.0, -LIMIT], True), ([1.0, 2e150], False), ([-math.inf], False), ([1.0, math.nan], False)],
)
def test_ordinary_values_are_neither_nan_nor_beyond_the_limit(values: list[float], wanted: bool) -> None:
    assert is_ordinary(np.array(values)) is wanted
