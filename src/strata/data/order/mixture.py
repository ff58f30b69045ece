"""Mixing sources by weights: which row of which source comes n-th, as a pure function of the weights.

Row j of a source with weight w (weights sum to 1) is due at (j + ½) / w. The mix is all rows of all sources, sorted by
when they are due; of rows that are due together, that of the earlier source comes first. Sources never end here: a
source of N rows continues with the next epoch of its own order at row N.

Of S sources, the first n rows of the mix contain n·w rows of each, give or take ½ + w·S/2. Nothing is drawn at random,
so the mix needs no seed and no state, and any position can be computed without those before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MAX_SOURCES = 1 << 8
MAX_ROWS = 1 << 50
"""Positions up to here are exact: the rounding of floating-point numbers stays far below one row."""


class Mixture:
    """The order in which sources take turns."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: positive and finite; only their ratios matter."""
        assert weights
        assert all(0 < weight < math.inf for weight in weights), "weights must be positive and finite"
        whole = math.fsum(weights)
        self.weights: npt.NDArray[np.float64] = np.array([weight / whole for weight in weights])

    def counts(self, positions: Ints) -> Ints:
        """Return how many rows of each source precede each position: one row per position, one column per source."""
        # What is due this much earlier certainly precedes the position. The few rows that remain are added in order.
        due = np.maximum(positions - (len(self.weights) / 2 + 1), 0)
        counts: Ints = np.floor(due[:, None] * self.weights + 0.5).astype(np.int64)
        left = positions - counts.sum(axis=1)
        every = np.arange(len(positions))
        while (is_short := left > 0).any():
            counts[every, self._due(counts).argmin(axis=1)] += is_short
            left -= is_short
        return counts

    def find(self, source: int, row: int) -> int:
        """Return the position of a row of a source."""
        weights = self.weights.tolist()
        due = (2 * row + 1) / (2 * weights[source])
        position = row
        for other, weight in enumerate(weights):
            if other != source:
                count = max(0, int(due * weight - 0.5) - 1)
                while ((2 * count + 1) / (2 * weight), other) < (due, source):
                    count += 1
                position += count
        return position

    def interleaved(self, firsts: Ints, lasts: Ints) -> Ints:
        """Return the order of rows [first, last) of each source, as indices into these rows listed source by source."""
        due = [
            (2 * np.arange(first, last) + 1) / (2 * weight)
            for weight, first, last in zip(self.weights, firsts.tolist(), lasts.tolist(), strict=True)
        ]
        return np.argsort(np.concatenate(due), kind="stable")

    def _due(self, rows: Ints) -> npt.NDArray[np.float64]:
        due: npt.NDArray[np.float64] = (2 * rows + 1) / (2 * self.weights)
        return due


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """Which rows of each source a mix delivers, from a position on.

    Rows of a source are counted over all its epochs.
    """

    mixture: Mixture
    by_batch: bool
    """Whether a global batch has rows of one source only, so that the sources take turns batch by batch."""
    batch_rows: int
    """Rows of a global batch."""
    since: int = 0
    """Position of the mix from which these turns apply. With `by_batch`, a batch begins here."""
    taken: tuple[int, ...]
    """Rows of each source that precede `since`."""

    def taken_at(self, positions: Ints) -> Ints:
        """Return how many rows of each source precede each position: one row per position, one column per source."""
        passed = positions - self.since
        if not self.by_batch:
            return self.mixture.counts(passed) + np.array(self.taken, np.int64)
        batches, rest = np.divmod(passed, self.batch_rows)
        counts = self.mixture.counts(batches)
        own = self.mixture.counts(batches + 1) - counts
        taken: Ints = counts * self.batch_rows + own * rest[:, None] + np.array(self.taken, np.int64)
        return taken

    def find(self, source: int, row: int) -> int:
        """Return the position of a row of a source; `since` if the row precedes it."""
        row -= self.taken[source]
        if row < 0:
            return self.since
        if not self.by_batch:
            return self.since + self.mixture.find(source, row)
        batch, rest = divmod(row, self.batch_rows)
        return self.since + self.mixture.find(source, batch) * self.batch_rows + rest

    def interleaved(self, firsts: Ints, lasts: Ints) -> Ints:
        """Return the order within a batch of the rows [first, last) of each source, listed source by source."""
        assert not self.by_batch, "a batch of one source keeps the order of that source"
        before = np.array(self.taken, np.int64)
        return self.mixture.interleaved(firsts - before, lasts - before)


class SourceSteps:
    """The batches of one rank that have rows of one epoch of a source; like `Steps`, with batches of any size.

    A batch is the part of a global batch that comes from this epoch of the source. Batches without a row for the rank
    are left out, so ranks may have different numbers of them.
    """

    dropped_rows = 0

    def __init__(
        self,
        turns: Turns,
        source: int,
        *,
        position: int,
        num_steps: int,
        rank: int,
        world_size: int,
        epoch: int,
        num_rows: int,
        taken_at: Callable[[Ints], Ints] | None = None,
    ) -> None:
        """
        Args:
            position: Of the mix, where its first global batch begins.
            num_steps: Global batches of the mix to consider.
            epoch: Of the source, which has `num_rows` rows.
            taken_at: Returns what `turns.taken_at` returns, perhaps from memory.
        """
        taken_at = taken_at or turns.taken_at
        batch_rows = turns.batch_rows
        starts = position + np.arange(num_steps, dtype=np.int64) * batch_rows

        def taken(offset: int) -> Ints:
            found = taken_at(starts + offset)[:, source] - epoch * num_rows
            return np.clip(found, 0, num_rows)

        first, stop = taken(0), taken(batch_rows)
        low = first if rank == 0 else taken(batch_rows // world_size * rank)
        high = stop if rank == world_size - 1 else taken(batch_rows // world_size * (rank + 1))
        mine = np.flatnonzero(high > low)
        self._starts, self._stops = first[mine], stop[mine]
        self._runs = np.stack([low[mine] - first[mine], high[mine] - first[mine]], axis=1)
        self.num_rows = num_rows
        self.world_size = world_size
        self.num_batches = len(mine)
        self.batch_size = int((high - low).max(initial=1))
        """Rows of the largest batch."""

    def bounds(self, batch: int) -> tuple[int, int]:
        return int(self._starts[batch]), int(self._stops[batch])

    def spans(self, batch: int, end: int) -> tuple[Ints, Ints]:
        return self._starts[batch:end], self._stops[batch:end]

    def run(self, batch: int, rank: int) -> tuple[int, int]:  # noqa: ARG002 - the steps are those of one rank
        low, high = self._runs[batch].tolist()
        return low, high

    def runs(self, batch: int, end: int, rank: int) -> Ints:  # noqa: ARG002 - the steps are those of one rank
        return self._runs[batch:end]

    def num_until(self, batch: int, position: int) -> int:
        return int(np.searchsorted(self._stops, position, side="right")) - batch

    def padded_rows(self, batch: int) -> int:  # noqa: ARG002 - no batch repeats rows
        return 0

    def repeated_rows(self, batch: int, rank: int) -> int:  # noqa: ARG002 - no batch repeats rows
        return 0

    def position_after(self, batch: int) -> int:
        return int(self._stops[batch])
