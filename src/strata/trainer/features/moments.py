"""Exact sums of floats, and the mean, variance and range that follow from them.

The statistics of a column must not depend on the order in which threads decode its row groups, but the rounding errors
of ordinary float sums do. Here a sum has no rounding error. Each chunk of values is cut into slices of few bits, as
multiples of one power of two, such that the float sum of a slice is exact; Python integers add up the slices. Squares
are exact as well: the rounding error of each product is summed beside it. The variance is therefore correct even for a
column whose mean is a billion times its deviation, such as a timestamp.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

LIMIT: Final = 1e150
"""Larger magnitudes count as infinite: their squares would be."""
CHUNK_ROWS: Final = 1 << 14
"""Values summed at a time: small enough that all buffers fit in the cache."""
_SLICE_BITS: Final = 38
"""Bits per slice: CHUNK_ROWS numbers of this many bits add up to less than 2^53, so a float holds every partial sum."""
_UNIT_BITS: Final = 1074
"""Sums are integers in units of 2^-1074, the smallest float."""
_SPLITTER: Final = float(2**27 + 1)
"""Multiplying by it splits a float into two halves of at most 26 bits, whose products are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The statistics of all finite values."""

    count: int
    mean: float
    std: float
    """The standard deviation of the population, as in scikit-learn's StandardScaler."""
    min: float
    max: float


class Moments:
    """Accumulates values from several threads; the result does not depend on their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._sum = 0
        self._sum_of_squares = 0
        self._min = math.inf
        self._max = -math.inf

    def add(self, values: Floats) -> None:
        """Add values, each of which is finite and at most `LIMIT` in magnitude."""
        if not len(values):
            return
        work = _Workspace.of(min(len(values), CHUNK_ROWS))
        total = squares = 0
        lowest, highest = math.inf, -math.inf
        for first in range(0, len(values), CHUNK_ROWS):
            chunk = values[first : first + CHUNK_ROWS]
            low, high = float(chunk.min()), float(chunk.max())
            lowest, highest = min(lowest, low), max(highest, high)
            total += work.sum(chunk, max(-low, high))
            squares += work.sum_of_squares(chunk)
        with self._lock:
            self._count += len(values)
            self._sum += total
            self._sum_of_squares += squares
            self._min, self._max = min(self._min, lowest), max(self._max, highest)

    def summary(self) -> Summary | None:
        """Return the statistics, each rounded once; None without values."""
        if not self._count:
            return None
        mean = Fraction(self._sum, self._count << _UNIT_BITS)
        variance = Fraction(self._sum_of_squares, self._count << _UNIT_BITS) - mean * mean
        return Summary(
            count=self._count,
            mean=float(mean),
            std=math.sqrt(max(variance, Fraction(0))),
            min=self._min,
            max=self._max,
        )


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Buffers for one chunk, reused for all chunks of a call."""

    rounded: Floats
    rest: Floats
    high: Floats
    low: Floats
    square: Floats

    @classmethod
    def of(cls, num_values: int) -> _Workspace:
        return cls(*np.empty((5, num_values)))

    def sum(self, values: Floats, largest: float) -> int:
        """Return the exact sum in units of 2^-1074; `largest` is the largest magnitude."""
        rounded, rest = self.rounded[: len(values)], self.rest[: len(values)]
        total = 0
        while largest:
            # Adding a number this large, and subtracting it again, rounds to multiples of its last bit.
            last_bit = math.frexp(largest)[1] - _SLICE_BITS
            rounder = math.ldexp(1.5, max(last_bit + 52, -1022))
            np.add(values, rounder, out=rounded)
            np.subtract(rounded, rounder, out=rounded)
            np.subtract(values, rounded, out=rest)
            total += _in_units(float(rounded.sum()))
            values, largest = rest, _largest(rest)
        return total

    def sum_of_squares(self, values: Floats) -> int:
        """Return the exact sum of squares in units of 2^-1074; squares below 1e-280 are rounded, each by itself."""
        high, low, square = self.high[: len(values)], self.low[: len(values)], self.square[: len(values)]
        np.multiply(values, _SPLITTER, out=high)
        np.subtract(high, values, out=low)
        np.subtract(high, low, out=high)
        np.subtract(values, high, out=low)
        np.multiply(values, values, out=square)
        total = self.sum(square, float(square.max()))
        if low.any():  # otherwise the values have at most 26 bits, and their squares are exact
            errors = _square_errors(high, low, square)
            total += self.sum(errors, _largest(errors))
        return total


def _square_errors(high: Floats, low: Floats, square: Floats) -> Floats:
    """Return (high + low)² − square in the memory of `square`; every step is exact."""
    scratch = high * high
    np.subtract(scratch, square, out=square)
    np.multiply(high, low, out=scratch)
    scratch += scratch
    square += scratch
    np.multiply(low, low, out=scratch)
    square += scratch
    return square


def _largest(values: Floats) -> float:
    return max(float(values.max()), -float(values.min()))


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNIT_BITS + 1 - denominator.bit_length())


def is_ordinary(values: npt.NDArray[Any]) -> bool:
    """Return whether all values are finite and at most `LIMIT` in magnitude; false if one is NaN."""
    return bool(len(values) == 0 or (values.max() <= LIMIT and values.min() >= -LIMIT))
