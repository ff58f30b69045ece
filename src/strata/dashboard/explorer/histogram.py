"""Histograms of tensors whose bytes arrive in pieces, equal to those of numpy over the whole tensor.

Bin *i* holds the elements with `edges[i] <= x < edges[i + 1]`; the last bin includes its upper edge. Elements of one or
two bytes have at most 65,536 different values, so counting them is exact and needs no range beforehand. For wider
elements, a multiplication finds the bin, and only elements whose result is near a whole number, where rounding might
choose the neighbour, are compared with the edges.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load.statistics import numbers_in

if TYPE_CHECKING:
    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.dtypes import DType

PIECE_ELEMENTS = 1 << 16
"""Processed at a time, so that intermediate results stay in the CPU cache."""
_ROUNDINGS = 8
"""Twice the rounding errors of the multiplication, in units of the last place."""
_MAX_ERROR = 0.01
"""With a larger error of the bin number, the arithmetic uses a wider type."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Histogram:
    edges: tuple[float, ...]
    """One more than `counts`; both are empty if no element is finite."""
    counts: tuple[int, ...]
    num_below: int
    num_above: int
    num_nan: int
    num_inf: int

    @property
    def num_elements(self) -> int:
        return sum(self.counts) + self.num_below + self.num_above + self.num_nan + self.num_inf


def edges_of(low: float, high: float, num_bins: int) -> Array:
    """Return the edges of equal bins. A range without width is widened by one half on both sides, as numpy does."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    if math.isfinite(2 * (high - low)):
        return np.linspace(low, high, num_bins + 1)
    return np.linspace(low / 4, high / 4, num_bins + 1) * 4  # the width overflows, or does when it is rounded


class Bins:
    """Counts numbers in bins."""

    def __init__(self, low: float, high: float, num_bins: int) -> None:
        self.edges = edges_of(low, high, num_bins)
        self._counts = np.zeros(num_bins + 2, np.int64)
        self._below = self._above = self._nan = self._inf = 0
        self._scales: dict[np.dtype[Any], _Scale | None] = {}

    def add(self, numbers: Array) -> None:
        numbers = numbers.reshape(-1)
        if numbers.dtype.kind != "f":
            numbers = numbers.astype(np.float64)
        with np.errstate(all="ignore"):
            for start in range(0, numbers.size, PIECE_ELEMENTS):
                self._add(numbers[start : start + PIECE_ELEMENTS])

    def add_values(self, values: Array, counts: Array) -> None:
        """Add each value as often as its count says."""
        finite = np.isfinite(values)
        self._nan += int(counts[np.isnan(values)].sum())
        self._inf += int(counts[np.isinf(values)].sum())
        values, counts = values[finite], counts[finite]
        self._below += int(counts[values < self.edges[0]].sum())
        self._above += int(counts[values > self.edges[-1]].sum())
        inside = (values >= self.edges[0]) & (values <= self.edges[-1])
        np.add.at(self._counts, self._search(values[inside]), counts[inside])

    def result(self) -> Histogram:
        return Histogram(
            tuple(self.edges.tolist()),
            tuple(self._counts[: self.edges.size - 1].tolist()),
            self._below,
            self._above,
            self._nan,
            self._inf,
        )

    def _add(self, piece: Array) -> None:
        low, high = piece.min(), piece.max()
        if not (low >= self.edges[0] and high <= self.edges[-1]):  # also if one is NaN
            piece = self._inside(piece)
            if not piece.size:
                return
        scale = self._scale(piece.dtype)
        if scale is None:
            numbers = self._search(piece)
        else:
            numbers, uncertain = scale.bins_of(piece)
            if uncertain.size:
                numbers[uncertain] = self._search(piece[uncertain])
        self._counts += np.bincount(numbers, minlength=self._counts.size)

    def _inside(self, piece: Array) -> Array:
        """Count the elements outside the range and return the others."""
        num_nan = int(np.count_nonzero(np.isnan(piece)))
        num_inf = int(np.count_nonzero(np.isinf(piece)))
        self._nan += num_nan
        self._inf += num_inf
        is_below, is_above = piece < self.edges[0], piece > self.edges[-1]
        self._below += int(np.count_nonzero(is_below)) - int(np.count_nonzero(piece == -np.inf))
        self._above += int(np.count_nonzero(is_above)) - int(np.count_nonzero(piece == np.inf))
        return np.asarray(piece[(piece >= self.edges[0]) & (piece <= self.edges[-1])])

    def _search(self, values: Array) -> Array:
        """Return the bins of finite values inside the range, by comparing them with the edges."""
        found = np.searchsorted(self.edges, values.astype(np.float64), side="right") - 1
        return np.minimum(found, self.edges.size - 2)

    def _scale(self, dtype: np.dtype[Any]) -> _Scale | None:
        if dtype not in self._scales:
            self._scales[dtype] = _scale(self.edges, dtype)
        return self._scales[dtype]


class _Scale:
    """Computes bin numbers in one floating-point type."""

    def __init__(self, low: Any, factor: Any, error: Any) -> None:
        self._low, self._factor, self._error = low, factor, error
        self._number = np.empty(PIECE_ELEMENTS, low.dtype)
        self._rest = np.empty(PIECE_ELEMENTS, low.dtype)
        self._bin = np.empty(PIECE_ELEMENTS, np.int32)

    def bins_of(self, piece: Array) -> tuple[Array, Array]:
        """Return the bin of each element, and the indices of those that may belong to a neighbour."""
        number, rest, found = self._number[: piece.size], self._rest[: piece.size], self._bin[: piece.size]
        np.subtract(piece, self._low, out=number)
        np.multiply(number, self._factor, out=number)
        np.copyto(found, number, casting="unsafe")
        np.rint(number, out=rest)
        np.subtract(number, rest, out=rest)
        np.abs(rest, out=rest)
        return found, np.flatnonzero(rest < self._error)


def _scale(edges: Array, dtype: np.dtype[Any]) -> _Scale | None:
    """Return the arithmetic for a dtype; None if its error would be too large for every type."""
    low, width, num_bins = float(edges[0]), float(edges[-1]) - float(edges[0]), edges.size - 1
    if not math.isfinite(width) or width <= 0:
        return None
    for kind in (np.float32, np.float64) if dtype == np.float32 else (np.float64,):
        factor = kind(num_bins / width)
        start = kind(low)
        unit = float(np.finfo(kind).eps)
        # Rounding of both operations and of the factor, of the first edge, and of the other edges by linspace.
        error = num_bins * _ROUNDINGS * unit + abs(low - float(start)) * float(factor)
        error += _ROUNDINGS * float(np.finfo(np.float64).eps) * max(abs(low), abs(low + width)) * float(factor)
        fits = math.isfinite(float(factor)) and float(factor) >= float(np.finfo(kind).tiny)
        if fits and error < _MAX_ERROR and width < float(np.finfo(kind).max) / 4:
            return _Scale(start, factor, kind(error))
    return None


# -- few different values ------------------------------------------------------------------------------------------


def has_few_values(dtype: DType) -> bool:
    """Return whether an element has at most two bytes."""
    return dtype.itemsize <= 2


class ValueCounts:
    """Counts how often each value of one or two bytes occurs."""

    def __init__(self, dtype: DType) -> None:
        assert has_few_values(dtype)
        self._dtype = dtype
        self._unsigned = np.dtype(f"u{dtype.itemsize}")
        self._counts = np.zeros(1 << 8 * dtype.itemsize, np.int64)

    def add(self, data: Bytes) -> None:
        patterns = np.ascontiguousarray(data).reshape(-1).view(self._unsigned)
        for start in range(0, patterns.size, PIECE_ELEMENTS * 4):
            self._counts += np.bincount(patterns[start : start + PIECE_ELEMENTS * 4], minlength=self._counts.size)

    def range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest finite value; None if there is none."""
        values = _values(self._dtype.name)[self._counts > 0]
        values = values[np.isfinite(values)]
        return (float(values.min()), float(values.max())) if values.size else None

    def add_to(self, bins: Bins) -> None:
        found = self._counts > 0
        bins.add_values(_values(self._dtype.name)[found], self._counts[found])

    def not_finite(self) -> tuple[int, int]:
        """Return the numbers of NaN and infinite elements."""
        values = _values(self._dtype.name)
        return int(self._counts[np.isnan(values)].sum()), int(self._counts[np.isinf(values)].sum())


@functools.cache
def _values(name: str) -> Array:
    """Return the value of each bit pattern."""
    dtype = BY_NAME[name]
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        return numbers_in(patterns.view(np.uint8), dtype).astype(np.float64)


class Extent:
    """The range of finite numbers, and how many are not finite."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self.num_nan = self.num_inf = 0

    def add(self, numbers: Array) -> None:
        if not numbers.size:
            return
        low, high = float(numbers.min()), float(numbers.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = numbers[np.isfinite(numbers)]
            num_nan = int(np.count_nonzero(np.isnan(numbers)))
            self.num_nan += num_nan
            self.num_inf += numbers.size - finite.size - num_nan
            numbers = finite
            if not numbers.size:
                return
            low, high = float(numbers.min()), float(numbers.max())
        self.low, self.high = min(self.low, low), max(self.high, high)

    def range(self) -> tuple[float, float] | None:
        return (self.low, self.high) if self.low <= self.high else None
