"""Counts of all values of a column, merged from the batches of several threads.

Memory is proportional to the distinct values, not to the rows: each batch is reduced to its distinct values and their
counts before it arrives, and pending batches are merged once they are as large as what is already merged. Integers
from a small range are counted in an array instead, which is ten times as fast.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.data.arrow_types import of_numbers
from strata.errors import LimitExceeded

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
        self._merged = pa.table({"value": pa.array([], kind), "count": pa.array([], pa.int64())})
        self._pending: list[pa.Table] = []
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
            found = pc.value_counts(of_numbers(values, self._kind))
            self.add(found.field("values"), found.field("counts"))

    def add(self, values: pa.Array, counts: pa.Array) -> None:
        """Add values, each of which may be repeated, and the count of each.

        Raises:
            LimitExceeded: There are too many distinct values.
        """
        table = pa.table({"value": values, "count": counts})
        with self._lock:
            self._pending.append(table)
            self._num_pending += len(values)
            if self._num_pending > max(_MIN_PENDING, self._merged.num_rows):
                self._merge()

    def ranking(self, *, min_count: int, max_size: int | None) -> Ranking:
        """Return the values that occur `min_count` times, at most `max_size` of them.

        Raises:
            LimitExceeded: There are too many distinct values.
        """
        with self._lock:
            if self._span is not None:
                self._pending.append(self._span.table(self._kind))
                self._span = None
            self._merge()
            counted = self._merged
        kept = counted if min_count == 1 else counted.filter(pc.greater_equal(counted["count"], min_count))
        kept = kept.take(pc.sort_indices(kept, sort_keys=[("count", "descending"), ("value", "ascending")]))
        kept = kept if max_size is None else kept.slice(0, max_size)
        return Ranking(
            values=_one_array(kept["value"], self._kind),
            num_counted=pc.sum(counted["count"], min_count=0).as_py(),
            num_kept=pc.sum(kept["count"], min_count=0).as_py(),
            num_distinct=counted.num_rows,
        )

    def _add_span(self, counted: _Span) -> None:
        if self._span is None:
            self._span = counted
        elif (joined := self._span.joined(counted)) is not None:
            self._span = joined
        else:
            table = counted.table(self._kind)
            self._pending.append(table)
            self._num_pending += table.num_rows
            if self._num_pending > max(_MIN_PENDING, self._merged.num_rows):
                self._merge()

    def _merge(self) -> None:
        if self._pending:
            together = pa.concat_tables([self._merged, *self._pending])
            summed = together.group_by("value", use_threads=False).aggregate([("count", "sum")])
            self._merged = summed.rename_columns({"value": "value", "count_sum": "count"}).select(["value", "count"])
            self._pending, self._num_pending = [], 0
        if self._merged.num_rows > self._max_values:
            raise LimitExceeded(
                f"column {self._name!r} has more than {self._max_values:,} distinct values, too many for a vocabulary; "
                f"use hash_buckets=, which needs no vocabulary, or raise the limit with max_size=",
                field="columns",
            )


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

    def table(self, kind: pa.DataType) -> pa.Table:
        places = np.flatnonzero(self.counts)
        values = of_numbers(places.astype(np.int64) + self.first, kind)
        return pa.table({"value": values, "count": of_numbers(self.counts[places], pa.int64())})


def _one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], kind)
