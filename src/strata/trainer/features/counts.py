"""Counts of all values of a column, merged from the batches of several threads.

Memory is proportional to the distinct values, not to the rows: each batch is reduced to its distinct values and their
counts before it arrives, and pending batches are merged once they are twice as large as what is already merged.
Integers from a small range are counted in an array instead, which is ten times as fast.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.data.arrow_types import of_numbers
from strata.data.memory import pool
from strata.errors import LimitExceeded
from strata.trainer.features.values import view

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_SPAN: Final = 1 << 22
"""Integers between the smallest and the largest value, up to which they are counted in an array."""
_MAX_SPARSITY: Final = 4
"""… if that array has at most this many entries per row of a batch."""
_MIN_PENDING: Final = 1 << 18
"""Values that are merged at a time, at least."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The values that a vocabulary keeps."""

    values: pa.Array
    """By descending count, then by value; strings in the order of their bytes."""
    num_counted: int
    """Rows that were counted."""
    num_kept: int
    """Rows whose value was kept."""
    num_distinct: int


class ValueCounter:
    """Counts values; the result does not depend on the order or the size of batches."""

    def __init__(self, kind: pa.DataType, max_values: int, name: str) -> None:
        """`kind`: int64, uint64, large_string or large_binary."""
        self._kind = kind
        self._max_values = max_values
        self._name = name
        self._lock = threading.Lock()
        self._values = pa.nulls(0, kind)
        self._counts = np.empty(0, np.int64)
        self._pending: list[tuple[pa.Array, npt.NDArray[np.int64]]] = []
        self._num_pending = 0
        self._span: _Span | None = None

    def add_integers(self, values: npt.NDArray[np.int64]) -> None:
        """Count integers; uint64 as the int64 of the same bits."""
        if not len(values):
            return
        first, last = int(values.min()), int(values.max())
        if last - first < min(_MAX_SPAN, max(_MAX_SPARSITY * len(values), 1 << 10)):
            counted = _Span(first, np.bincount(values - first).astype(np.int64, copy=False))
            with self._lock:
                self._add_span(counted)
        else:
            self.add(*count_values(of_numbers(values, self._kind)))

    def add(self, values: pa.Array, counts: npt.NDArray[np.int64]) -> None:
        """Add values, each of which may be repeated, and the count of each.

        Raises:
            LimitExceeded: There are too many distinct values.
        """
        with self._lock:
            self._add(values, counts)

    def ranking(self, *, min_count: int, max_size: int | None) -> Ranking:
        """Return the values that occur `min_count` times, at most `max_size` of them.

        Raises:
            LimitExceeded: There are too many distinct values.
        """
        with self._lock:
            if self._span is not None:
                self._pending.append(self._span.pairs(self._kind))
                self._span = None
            self._merge()
        counted = pa.table({"value": self._values, "count": of_numbers(self._counts, pa.int64())})
        if min_count == 1:
            kept = counted
        else:
            kept = counted.take(of_numbers(np.flatnonzero(self._counts >= min_count), pa.int64()))
        kept = kept.take(pc.sort_indices(kept, sort_keys=[("count", "descending"), ("value", "ascending")]))
        kept = kept if max_size is None else kept.slice(0, max_size)
        return Ranking(
            values=pa.concat_arrays([self._values.slice(0, 0), *kept["value"].chunks]),
            num_counted=int(self._counts.sum()),
            num_kept=pc.sum(kept["count"], min_count=0).as_py(),
            num_distinct=len(self._values),
        )

    def _add_span(self, counted: _Span) -> None:
        if self._span is None:
            self._span = counted
        elif (joined := self._span.joined(counted)) is not None:
            self._span = joined
        else:
            self._add(*counted.pairs(self._kind))

    def _add(self, values: pa.Array, counts: npt.NDArray[np.int64]) -> None:
        self._pending.append((values, counts))
        self._num_pending += len(values)
        if self._num_pending > max(_MIN_PENDING, 2 * len(self._values)):
            self._merge()

    def _merge(self) -> None:
        if self._pending:
            # Five times as fast for strings as Arrow's group_by.
            values = pa.concat_arrays([self._values, *(values for values, _ in self._pending)])
            encoded = pc.dictionary_encode(values, memory_pool=pool())
            counts = np.concatenate([self._counts, *(counts for _, counts in self._pending)])
            summed = np.bincount(view(encoded.indices, np.dtype(np.int32)), counts)  # floats, exact up to 2^53 rows
            self._values, self._counts = encoded.dictionary, summed.astype(np.int64)
            self._pending, self._num_pending = [], 0
        if len(self._values) > self._max_values:
            raise LimitExceeded(
                f"column {self._name!r} has more than {self._max_values:,} distinct values, too many for a vocabulary; "
                f"use hash_buckets=, which needs no vocabulary, or raise the limit with max_size=",
                field="columns",
            )


def count_values(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the distinct values of an array, null included, and their counts."""
    found = pc.value_counts(array, memory_pool=pool())
    return found.field("values"), view(found.field("counts"), np.dtype(np.int64))


@dataclass(frozen=True, slots=True)
class _Span:
    """The counts of consecutive integers."""

    first: int
    counts: npt.NDArray[np.int64]

    def joined(self, other: _Span) -> _Span | None:
        """Return the sum of both; None if they are too far apart."""
        first = min(self.first, other.first)
        size = max(self.first + len(self.counts), other.first + len(other.counts)) - first
        if size > _MAX_SPAN:
            return None
        if size == len(self.counts):
            counts = self.counts  # ours: nothing else refers to it
        else:
            counts = np.zeros(size, np.int64)
            counts[self.first - first :][: len(self.counts)] = self.counts
        counts[other.first - first :][: len(other.counts)] += other.counts
        return _Span(first, counts)

    def pairs(self, kind: pa.DataType) -> tuple[pa.Array, npt.NDArray[np.int64]]:
        """Return the integers that occur, and their counts."""
        places = np.flatnonzero(self.counts)
        return of_numbers(places.astype(np.int64) + self.first, kind), self.counts[places]
