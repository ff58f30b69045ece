"""Heat maps, norms of rows and singular values, against numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.format.shards import Box
from strata.dashboard.explorer import matrix
from strata.dashboard.explorer.contents import boxes_of
from strata.dashboard.explorer.matrix import HeatMap, RowScan

Array = np.ndarray[Any, Any]

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
CUTS = st.lists(st.integers(0, 1_600), max_size=5)


def matrix_of(shape: tuple[int, int], *, with_bad: bool = False) -> Array:
    random = np.random.default_rng(math.prod(shape))
    found = random.normal(size=shape).astype(np.float32)
    found[random.random(shape[0]) < 0.2] = 0.0
    if with_bad:
        found[random.random(shape) < 0.05] = np.nan
        found[random.random(shape) < 0.05] = np.inf
    return found


def pieces(whole: Array, cuts: list[int]) -> list[tuple[int, Array]]:
    flat, edges = whole.reshape(-1), sorted({0, *cuts, whole.size})
    return [(a, flat[a:b]) for a, b in itertools.pairwise(edges) if b <= whole.size]


@given(SHAPES, CUTS, st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_a_heat_map_holds_the_means_of_the_finite_elements_of_its_blocks(
    shape: tuple[int, int], cuts: list[int], rows: int, columns: int, with_bad: bool
) -> None:
    whole = matrix_of(shape, with_bad=with_bad)
    found = HeatMap(*shape, max_rows=rows, max_columns=columns)

    for start, numbers in pieces(whole, cuts):
        found.add(start, numbers)

    means = found.means()
    assert means.shape == (min(rows, shape[0]), min(columns, shape[1]))
    for i, j in np.ndindex(means.shape):
        part = whole[found.row_edges[i] : found.row_edges[i + 1], found.column_edges[j] : found.column_edges[j + 1]]
        finite = part[np.isfinite(part)].astype(np.float64)
        assert found.num_not_finite[i, j] == part.size - finite.size
        assert means[i, j] == pytest.approx(finite.mean()) if finite.size else np.isnan(means[i, j])


@given(SHAPES, CUTS, st.integers(1, 12), st.booleans())
def test_norms_of_rows_equal_numpys_however_the_tensor_is_cut(
    shape: tuple[int, int], cuts: list[int], points: int, with_bad: bool
) -> None:
    whole = matrix_of(shape, with_bad=with_bad)
    scan = RowScan(*shape, max_points=points)

    for start, numbers in pieces(whole, cuts):
        scan.add(start, numbers)

    found = scan.result()
    finite = np.where(np.isfinite(whole), whole, 0).astype(np.float64)
    norms = np.linalg.norm(finite, axis=1)
    blocks = [norms[a:b] for a, b in itertools.pairwise(found.row_edges)]
    assert np.allclose(found.norm_min, [block.min() for block in blocks])
    assert np.allclose(found.norm_mean, [block.mean() for block in blocks])
    assert np.allclose(found.norm_max, [block.max() for block in blocks])
    assert list(found.dead) == np.flatnonzero(~whole.any(axis=1)).tolist()
    assert list(found.with_nan) == np.flatnonzero(np.isnan(whole).any(axis=1)).tolist()
    assert list(found.with_inf) == np.flatnonzero(np.isinf(whole).any(axis=1)).tolist()
    assert found.num_dead == len(found.dead)


def test_at_most_100_dead_rows_are_listed_and_all_are_counted() -> None:
    scan = RowScan(1_000, 2, max_points=4)

    scan.add(0, np.zeros(2_000))

    assert scan.result().num_dead == 1_000
    assert scan.result().dead == tuple(range(100))


def test_singular_values_equal_numpys_and_a_zero_matrix_has_no_rank() -> None:
    whole = np.random.default_rng(3).normal(size=(20, 30)) * 1e-200

    found = matrix.spectrum_of(whole)

    assert np.allclose(found.values, np.linalg.svd(whole, compute_uv=False), rtol=1e-9, atol=0)
    assert found.stable_rank is not None
    assert 1 <= found.stable_rank <= 20
    assert matrix.spectrum_of(np.zeros((3, 2))) == matrix.Spectrum((0.0, 0.0), None, None, None)


@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
def test_boxes_cover_a_tensor_once_in_row_major_order(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)

    boxes = list(boxes_of(shape, itemsize, max_bytes))

    parts = [whole[slices(box)].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, np.intp), *parts]).tolist() == list(range(whole.size))
    assert all(part.size == 1 or part.size * itemsize <= max_bytes for part in parts)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
