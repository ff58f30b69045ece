"""Histograms of pieces equal those of numpy over the whole tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load.statistics import numbers_in
from strata.dashboard.explorer.histogram import Bins, Extent, ValueCounts, edges_of

Array = np.ndarray[Any, Any]

FLOATS = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    st.integers(1, 300),
    elements={"allow_nan": False, "allow_infinity": False},
)


def counted(pieces: list[Array], low: float, high: float, num_bins: int) -> Any:
    bins = Bins(low, high, num_bins)
    for piece in pieces:
        bins.add(piece)
    return bins.result()


@given(FLOATS, st.integers(1, 200), st.integers(0, 300))
@example(np.linspace(-1, 1, 257, dtype=np.float32), 64, 100)
@example(np.array([1e6, 1e6 + 0.0625, 1e6 + 0.125], np.float32), 7, 1)
@example(np.array([-3.4e38, 0.0, 3.4e38], np.float32), 10, 1)
@example(np.array([-1.7e308, 0.0, 1.7e308]), 10, 1)
@example(np.array([1.7976931348623157e308, 0.0]), 3, 0)
@example(np.array([0.0, 5e-324]), 3, 1)
@example(np.full(5, 0.1, np.float32), 4, 2)
def test_the_histogram_of_pieces_equals_numpys_of_the_whole(whole: Array, num_bins: int, cut: int) -> None:
    low, high = float(whole.min()), float(whole.max())

    found = counted([whole[:cut], whole[cut:]] if 0 < cut < whole.size else [whole], low, high, num_bins)

    edges = edges_of(low, high, num_bins)
    expected = np.minimum(np.searchsorted(edges, whole.astype(np.float64), side="right") - 1, num_bins - 1)
    assert list(found.counts) == np.bincount(expected, minlength=num_bins).tolist()
    assert found.num_elements == whole.size


def test_a_million_normal_numbers_are_counted_as_numpy_counts_them() -> None:
    whole = np.random.default_rng(1).normal(size=1_000_000).astype(np.float32)
    low, high = float(whole.min()), float(whole.max())

    found = counted(np.array_split(whole, 7), low, high, 100)

    counts, edges = np.histogram(whole.astype(np.float64), 100, (low, high))
    assert list(found.counts) == counts.tolist()
    assert np.allclose(found.edges, edges, rtol=1e-15)


def test_elements_outside_the_range_and_not_finite_are_counted_apart() -> None:
    whole = np.array([np.nan, np.inf, -np.inf, -2.0, 0.0, 0.5, 1.0, 3.0, 4.0])

    found = counted([whole], 0.0, 1.0, 2)

    assert found.counts == (1, 2)
    assert (found.num_below, found.num_above, found.num_nan, found.num_inf) == (1, 2, 1, 2)


@pytest.mark.parametrize("name", ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "I16", "U16"])
def test_counting_the_values_of_small_elements_equals_binning_their_numbers(name: str) -> None:
    dtype = BY_NAME[name]
    data = np.random.default_rng(2).integers(0, 256, 4_096, np.uint8)
    if name == "BOOL":
        data &= 1
    with np.errstate(invalid="ignore"):
        numbers = numbers_in(data, dtype).astype(np.float64)
    counts = ValueCounts(dtype)
    counts.add(data[:1_024])
    counts.add(data[1_024:])
    span = counts.range()
    assert span is not None
    bins = Bins(*span, 50)

    counts.add_to(bins)

    found, finite = bins.result(), numbers[np.isfinite(numbers)]
    assert span == (finite.min(), finite.max())
    assert list(found.counts) == np.histogram(finite, 50, span)[0].tolist()
    assert (found.num_nan, found.num_inf) == (np.isnan(numbers).sum(), np.isinf(numbers).sum())
    assert counts.not_finite() == (found.num_nan, found.num_inf)


def test_the_extent_ignores_elements_that_are_not_finite() -> None:
    extent = Extent()

    for piece in (np.array([np.nan, 1.0, -3.0]), np.array([np.inf, np.nan]), np.array([2.0])):
        extent.add(piece)

    assert extent.range() == (-3.0, 2.0)
    assert (extent.num_nan, extent.num_inf) == (2, 1)
    assert Extent().range() is None
