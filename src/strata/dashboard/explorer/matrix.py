"""Tensors as matrices: heat maps of block means, norms of rows, singular values.

The first dimension of a tensor is the rows, all others together are the columns. Elements arrive in row-major order in
pieces of any size; a row may span several pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP_ELEMENTS = 1 << 18
"""Elements that are widened to float64 at a time."""
MAX_COLUMNS = (1 << 63) - 1
"""Only a tensor without elements can claim more."""
MAX_LISTED = 100
"""Indices of dead rows and of rows with NaN that are listed."""

Array = np.ndarray[Any, Any]


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns; a vector is one row, a scalar one element."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], min(math.prod(shape[1:]), MAX_COLUMNS)


def as_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns for norms: a vector has a row for each element."""
    return (shape[0], 1) if len(shape) == 1 else as_matrix(shape)


def block_edges(size: int, num_blocks: int) -> Array:
    """Cut `size` items into at most `num_blocks` blocks that are as equal as possible."""
    num_blocks = max(min(size, num_blocks), 1)
    return np.fromiter((number * size // num_blocks for number in range(num_blocks + 1)), np.int64)


def _blocks(start: int, numbers: Array, num_columns: int) -> Iterator[tuple[int, int, Array]]:
    """Yield (row, column, block): the rest of a row that began before, whole rows in groups, and the begin of a row."""
    at, end = start, start + numbers.size
    while at < end:
        row, column = divmod(at, num_columns)
        if column or end - at < num_columns:
            stop = min(at + min(num_columns - column, GROUP_ELEMENTS), end)
            yield row, column, numbers[at - start : stop - start].reshape(1, -1)
        else:
            num_rows = min(max(GROUP_ELEMENTS // num_columns, 1), (end - at) // num_columns)
            stop = at + num_rows * num_columns
            yield row, 0, numbers[at - start : stop - start].reshape(num_rows, num_columns)
        at = stop


def _finite(block: Array) -> tuple[Array, Array | None]:
    """Return the block as float64 with zeros in place of elements that are not finite, and where these are."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = block.astype(np.float64)
    finite = np.isfinite(wide)
    if finite.all():
        return wide, None
    wide[~finite] = 0.0
    return wide, ~finite


def _any(block: Array) -> Array:
    """Return for each row whether an element is not zero."""
    return np.asarray(block.any(axis=1))


# -- heat maps -----------------------------------------------------------------------------------------------------


class HeatMap:
    """Means of the finite elements of blocks."""

    def __init__(self, num_rows: int, num_columns: int, *, max_rows: int, max_columns: int) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self.row_edges, self.column_edges = block_edges(num_rows, max_rows), block_edges(num_columns, max_columns)
        self._sums = np.zeros((self.row_edges.size - 1, self.column_edges.size - 1))
        self.num_not_finite = np.zeros(self._sums.shape, np.int64)

    def add(self, start: int, numbers: Array) -> None:
        """Add the elements from `start` on."""
        for row, column, block in _blocks(start, numbers.reshape(-1), self.num_columns):
            values, bad = _finite(block)
            self._put(self._sums, row, column, values)
            if bad is not None:
                self._put(self.num_not_finite, row, column, bad.astype(np.int64))

    def means(self) -> Array:
        """Return the means; NaN for a block without a finite element."""
        areas = np.outer(np.diff(self.row_edges), np.diff(self.column_edges)) - self.num_not_finite
        with np.errstate(all="ignore"):
            return np.where(areas > 0, self._sums / areas, np.nan)

    def _put(self, target: Array, row: int, column: int, block: Array) -> None:
        first_column, columns = _cuts(self.column_edges, column, column + block.shape[1])
        first_row, rows = _cuts(self.row_edges, row, row + block.shape[0])
        sums = np.add.reduceat(np.add.reduceat(block, columns, axis=1), rows, axis=0)
        target[first_row : first_row + len(rows), first_column : first_column + len(columns)] += sums


def _cuts(edges: Array, start: int, end: int) -> tuple[int, Array]:
    """Return the first block that a range meets, and where in the range each of its blocks begins."""
    first = int(np.searchsorted(edges, start, side="right")) - 1
    last = int(np.searchsorted(edges, end, side="left"))
    return first, np.maximum(edges[first:last] - start, 0)


# -- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowNorms:
    """Norms of blocks of rows, over finite elements, and remarkable rows."""

    num_rows: int
    row_edges: tuple[int, ...]
    norm_min: tuple[float, ...]
    norm_mean: tuple[float, ...]
    norm_max: tuple[float, ...]
    num_dead: int
    """Rows whose elements are all zero."""
    dead: tuple[int, ...]
    """The first of them, as of the others."""
    num_with_nan: int
    with_nan: tuple[int, ...]
    num_with_inf: int
    with_inf: tuple[int, ...]


class _Remarkable:
    def __init__(self) -> None:
        self.num = 0
        self.first: list[int] = []

    def add(self, first_row: int, flags: Array) -> None:
        found = np.flatnonzero(flags)
        self.num += int(found.size)
        self.first += (found[: MAX_LISTED - len(self.first)] + first_row).tolist()


class RowScan:
    """Computes the norms of rows."""

    def __init__(self, num_rows: int, num_columns: int, *, max_points: int) -> None:
        self._num_rows, self._num_columns = num_rows, num_columns
        self._edges = block_edges(num_rows, max_points)
        num_blocks = self._edges.size - 1
        self._min, self._max, self._sum = np.full(num_blocks, np.inf), np.zeros(num_blocks), np.zeros(num_blocks)
        self._dead, self._with_nan, self._with_inf = _Remarkable(), _Remarkable(), _Remarkable()
        self._squares, self._is_zero, self._has_nan, self._has_inf = 0.0, True, False, False
        """Of a row that is not complete yet."""

    def add(self, start: int, numbers: Array) -> None:
        """Add the elements from `start` on."""
        with np.errstate(all="ignore"):
            for row, column, block in _blocks(start, numbers.reshape(-1), self._num_columns):
                values, bad = _finite(block)
                squares = np.einsum("ij,ij->i", values, values)
                is_zero = np.logical_not(_any(values))
                has_nan = has_inf = np.zeros(len(values), np.bool_)
                if bad is not None:
                    is_zero &= ~_any(bad)
                    has_nan, has_inf = _any(np.isnan(block)), _any(np.isinf(block))
                if block.shape[1] == self._num_columns:
                    self._put(row, squares, is_zero, has_nan, has_inf)
                else:
                    self._continue(row, column + block.shape[1], squares, is_zero, has_nan, has_inf)

    def result(self) -> RowNorms:
        if not self._num_columns:  # rows without elements: no norm, and not dead
            self._min[:] = 0.0
        sizes = np.maximum(np.diff(self._edges), 1)
        return RowNorms(
            self._num_rows,
            tuple(self._edges.tolist()),
            tuple(np.where(np.isfinite(self._min), self._min, 0.0).tolist()),
            tuple((self._sum / sizes).tolist()),
            tuple(self._max.tolist()),
            self._dead.num,
            tuple(self._dead.first),
            self._with_nan.num,
            tuple(self._with_nan.first),
            self._with_inf.num,
            tuple(self._with_inf.first),
        )

    def _continue(self, row: int, end: int, squares: Array, is_zero: Array, has_nan: Array, has_inf: Array) -> None:
        self._squares += float(squares[0])
        self._is_zero &= bool(is_zero[0])
        self._has_nan |= bool(has_nan[0])
        self._has_inf |= bool(has_inf[0])
        if end == self._num_columns:
            flags = (np.array([flag]) for flag in (self._is_zero, self._has_nan, self._has_inf))
            self._put(row, np.array([self._squares]), *flags)
            self._squares, self._is_zero, self._has_nan, self._has_inf = 0.0, True, False, False

    def _put(self, row: int, squares: Array, is_zero: Array, has_nan: Array, has_inf: Array) -> None:
        norms = np.sqrt(squares)
        first, cuts = _cuts(self._edges, row, row + norms.size)
        blocks = slice(first, first + len(cuts))
        self._min[blocks] = np.minimum(self._min[blocks], np.minimum.reduceat(norms, cuts))
        self._max[blocks] = np.maximum(self._max[blocks], np.maximum.reduceat(norms, cuts))
        self._sum[blocks] += np.add.reduceat(norms, cuts)
        for found, flags in ((self._dead, is_zero), (self._with_nan, has_nan), (self._with_inf, has_inf)):
            found.add(row, flags)


# -- singular values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The singular values of a matrix, largest first."""

    values: tuple[float, ...]
    condition: float | None
    """The largest over the smallest; None if the smallest is zero."""
    stable_rank: float | None
    """The squared Frobenius norm over the squared largest value; None for a zero matrix."""
    effective_rank: float | None
    """The exponential of the entropy of the normalised values; None for a zero matrix."""


def spectrum_of(matrix: Array) -> Spectrum:
    """Compute the singular values of a finite float64 matrix."""
    scale = float(np.abs(matrix).max()) if matrix.size else 0.0
    if not scale:
        return Spectrum((0.0,) * min(matrix.shape), None, None, None)
    values = np.linalg.svd(matrix / scale, compute_uv=False)
    squares, shares = np.square(values), values / values.sum()
    shares = shares[shares > 0]
    return Spectrum(
        tuple((values * scale).tolist()),
        float(values[0] / values[-1]) if values[-1] > 0 and math.isfinite(values[0] / values[-1]) else None,
        float(squares.sum() / squares[0]),
        float(np.exp(-(shares * np.log(shares)).sum())),
    )
