"""From batches to slices of units: what one rank must decode, and how its rows lie in it.

A *block* is a run of batches that are made together. Its pieces, behind one another, contain every row that it needs;
its index says in which order they are delivered. Blocks know nothing of each other: any batch can be the first, which
is why resuming costs no replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from strata.data.order import Order
    from strata.data.steps import Steps

    Ints = npt.NDArray[np.int64]

SPARSE = 0.25
"""Below this share of a window, the rows that are needed are picked out before anything is copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one unit."""

    unit: int
    first: int
    last: int
    rows: Ints | None = None
    """Only these, counted from the unit's first row, ascending; None: all from `first` to `last`."""

    @property
    def num_rows(self) -> int:
        return self.last - self.first if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    first_batch: int
    sizes: tuple[int, ...]
    """Rows that the rank gets, batch by batch."""
    pieces: tuple[Piece, ...]
    index: Ints | None
    """Which row of the pieces comes first, second, …; None: as they lie."""

    @property
    def num_batches(self) -> int:
        return len(self.sizes)

    @property
    def units(self) -> tuple[int, ...]:
        """Each once, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.unit for piece in self.pieces))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's way through an epoch."""

    order: Order
    steps: Steps
    rank: int
    block_rows: int
    """About how many rows of the rank make a block where windows do not say."""

    def blocks(self, batch: int = 0) -> Iterator[Block]:
        while batch < self.steps.num_batches:
            block = self.block(batch)
            yield block
            batch += block.num_batches

    def block(self, batch: int) -> Block:
        """The one that begins with this batch."""
        end = self._end_of_block(batch)
        lanes, rows = self._rows(batch, end)
        sizes = tuple(high - low for low, high in (self.steps.run(b, self.rank) for b in range(batch, end)))
        pieces, index = self._place(lanes, rows)
        return Block(batch, sizes, tuple(pieces), index)

    def _end_of_block(self, batch: int) -> int:
        """One past the last batch: all that end in the window in which the first one ends."""
        steps, num_batches = self.steps, self.steps.num_batches
        if self.order.window_rows:
            window_positions = self.order.window_rows * self.order.num_lanes
            first_stop = steps.bounds(batch)[1]
            window_end = -(-first_stop // window_positions) * window_positions
            count = max(1, (window_end - steps.bounds(batch)[0]) // steps.batch_rows)
        else:
            count = max(1, self.block_rows // steps.batch_size)
        end = min(batch + count, num_batches)
        # The last batch may be of another size: it is on its own when its rows begin again with the first.
        if end == num_batches and end - batch > 1 and steps.padded_rows(end - 1):
            end -= 1
        return end

    def _rows(self, batch: int, end: int) -> tuple[Ints, Ints]:
        """Lane, and number in the lane, of every row that the rank gets in these batches, in order."""
        bounds = np.array([self.steps.bounds(b) for b in range(batch, end)], dtype=np.int64)
        runs = np.array([self.steps.run(b, self.rank) for b in range(batch, end)], dtype=np.int64)
        begin = self.order.lanes.taken(bounds[:, 0])
        counts = self.order.lanes.taken(bounds[:, 1]) - begin
        before = np.cumsum(counts, axis=1) - counts
        totals = (bounds[:, 1] - bounds[:, 0])[:, None]
        if (runs[:, 1:] > totals).any():
            assert end - batch == 1
            lanes, rows = _expand(begin, counts)
            repeated = np.arange(runs[0, 0], runs[0, 1]) % len(rows)
            return lanes[repeated], rows[repeated]
        low = np.clip(runs[:, :1] - before, 0, counts)
        high = np.clip(runs[:, 1:] - before, 0, counts)
        return _expand(begin + low, high - low)

    def _place(self, lanes: Ints, rows: Ints) -> tuple[list[Piece], Ints | None]:
        """Pieces that contain these rows of these lanes, and where in them each row is."""
        pieces: list[Piece] = []
        index = np.empty(len(rows), dtype=np.int64)
        num_placed = 0
        present = np.unique(lanes)
        for lane in present.tolist():
            mine = np.flatnonzero(lanes == lane) if len(present) > 1 else slice(None)
            found, places, num_rows = self._place_lane(lane, rows[mine])
            index[mine] = places + num_placed
            pieces += found
            num_placed += num_rows
        is_identity = num_placed == len(index) and not self.order.window_rows and _counts_up(index)
        return pieces, None if is_identity else index

    def _place_lane(self, lane: int, rows: Ints) -> tuple[list[Piece], Ints, int]:
        start = int(self.order.lanes.starts()[lane])
        if not self.order.window_rows:
            first, last = int(rows.min()), int(rows.max()) + 1
            return self._whole(start + first, start + last), rows - first, last - first
        pieces: list[Piece] = []
        places = np.empty_like(rows)
        num_placed = 0
        windows = rows // self.order.window_rows
        for window in range(int(windows.min()), int(windows.max()) + 1):
            mine = windows == window
            found, within, num_rows = self._place_window(lane, window, rows[mine])
            places[mine] = within + num_placed
            pieces += found
            num_placed += num_rows
        return pieces, places, num_placed

    def _place_window(self, lane: int, window: int, rows: Ints) -> tuple[list[Piece], Ints, int]:
        starts = self.order.lanes.starts()
        begin = window * self.order.window_rows
        size = min(self.order.window_rows, int(starts[lane + 1] - starts[lane]) - begin)
        needed = self.order.permutation(lane, window, size)[rows - begin]
        first = int(starts[lane]) + begin
        if len(needed) >= SPARSE * size:
            return self._whole(first, first + size), needed, size
        picked, places = np.unique(needed, return_inverse=True)
        return self._picked(first, picked), places, len(picked)

    def _whole(self, first: int, last: int) -> list[Piece]:
        return [Piece(unit, low, high) for unit, low, high in self.order.locate(first, last)]

    def _picked(self, first: int, picked: Ints) -> list[Piece]:
        """Only these rows, counted from `first`."""
        pieces = []
        place = first + int(picked[0])
        for unit, low, high in self.order.locate(place, first + int(picked[-1]) + 1):
            num_rows = high - low
            mine = picked[np.searchsorted(picked, place - first) : np.searchsorted(picked, place - first + num_rows)]
            if len(mine):
                pieces.append(Piece(unit, low, high, mine + (low - (place - first))))
            place += num_rows
        return pieces


def _expand(begin: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Ranges per batch and lane → lane and number of each row: batch by batch, lane by lane."""
    num_lanes = begin.shape[1]
    starts, lengths = begin.ravel(), counts.ravel()
    lanes = np.repeat(np.tile(np.arange(num_lanes), len(begin)), lengths)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return lanes, np.repeat(starts, lengths) + within


def _counts_up(index: Ints) -> bool:
    return bool(len(index) == 0 or (index[0] == 0 and np.all(np.diff(index) == 1)))
