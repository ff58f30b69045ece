"""The schedule of one rank: which rows of which row groups each of its batches needs.

A *block* is a run of consecutive batches that are assembled together. Its concatenated pieces contain every row that it
needs, and its index gives the order in which they are delivered. Blocks do not depend on each other, so a schedule can
start at any batch, and resuming needs no replay.

A *window* of the rank is the windows of all its lanes with the same number (`order.py`), one filling of the shuffle
buffer. A block never extends beyond the window in which its first batch ends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from strata.data.order.order import Order
    from strata.data.order.steps import EpochSteps

    Ints = npt.NDArray[np.int64]
    Rows = npt.NDArray[np.integer[Any]]
    """Row numbers; 32 bits wide where the blocks of a window are computed together."""

SPARSE = 0.75
"""If it needs less than this share of a window, a block copies its rows, so that the row groups can be freed."""
SORTED = 1 / 16
"""If it needs less than this share of a window, sorting the rows is faster than marking them in the window."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one row group: all in [first, last), or some of them."""

    row_group: int
    first: int
    last: int
    rows: Rows | None = None
    """Only these row numbers of the row group, ascending; None: all from `first` up to, not including, `last`."""

    @property
    def num_rows(self) -> int:
        return self.last - self.first if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What is known of a block before its rows are located, which is expensive."""

    first_batch: int
    num_batches: int
    row_groups: tuple[int, ...]
    """The row groups that the block needs, without duplicates, in the order of their rows."""
    num_rows: int
    """About how many rows the block has on this rank."""
    ends_window: bool = True
    """Whether this is the last block of its window."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive batches that are assembled together."""

    first_batch: int
    sizes: tuple[int, ...]
    """Rows of each batch on this rank."""
    pieces: tuple[Piece, ...]
    index: Rows | None
    """Which row of the concatenated pieces is delivered first, second, …; None: all of them, in order."""

    @property
    def num_batches(self) -> int:
        return len(self.sizes)

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The row groups of the pieces, without duplicates, in order."""
        return tuple(dict.fromkeys(piece.row_group for piece in self.pieces))


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A window of one lane, cut into the blocks that deliver its rows."""

    borders: Ints
    """The positions in the window at which the blocks begin, and the end of the last block."""
    picked: npt.NDArray[np.uint32]
    """Row numbers in the window, block by block, ascending within a block."""
    places: npt.NDArray[np.uint32]
    """For each position, the index of its row among the picked rows of its block."""

    def part(self, rows: slice) -> tuple[Rows, Rows]:
        """Return the picked rows and the places of the block that covers exactly these positions."""
        assert {rows.start, rows.stop} <= set(self.borders.tolist()), "the positions are not those of one block"
        part = slice(rows.start - int(self.borders[0]), rows.stop - int(self.borders[0]))
        return self.picked[part], self.places[part]


class _Cuts:
    """The windows that several blocks deliver. Each is cut once for all of them, not once per block."""

    def __init__(self, order: Order, borders: Ints) -> None:
        """`borders[b, l]`: the first row of lane l that block b delivers; one more entry per lane for the end."""
        self._order = order
        self._borders = borders
        self._cut: dict[tuple[int, int], _Cut] = {}

    def find(self, lane: int, window: int, num_rows: int) -> _Cut:
        """Return the cut of a lane's window, which has `num_rows` rows."""
        cut = self._cut.get((lane, window))
        if cut is None:
            begin = window * self._order.window_rows
            borders = np.unique(np.clip(self._borders[:, lane] - begin, 0, num_rows))
            cut = self._cut[lane, window] = _cut(self._order.permutation(lane, window, num_rows), borders)
        return cut


@dataclass(frozen=True, slots=True)
class Schedule:
    """The blocks of one rank in an epoch."""

    order: Order
    steps: EpochSteps
    rank: int
    block_rows: int
    """Approximate maximum rows of a block on this rank; with shuffle, a block also ends with its window."""
    part_rows: int | None = None
    """Approximate maximum rows of a block whose window is larger than `block_rows`; None: `block_rows`."""
    starts_small: bool = False
    """Without shuffle: start with a block of one batch, which is decoded sooner, and let no block have more batches
    than precede it.
    """
    _permutation: Callable[[int, int, int], Ints] = field(init=False, repr=False, compare=False)
    """`order.permutation`, cached: each block of a window needs it."""

    def __post_init__(self) -> None:
        num_kept = 2 * -(-self.order.num_lanes // self.steps.world_size)
        object.__setattr__(self, "_permutation", functools.lru_cache(num_kept)(self.order.permutation))

    @property
    def has_windows(self) -> bool:
        """Whether rows are shuffled."""
        return self.order.window_rows > 0

    @property
    def shuffle_buffer_rows(self) -> int:
        """Rows of the shuffle buffer on this rank."""
        return self.order.window_rows * self.order.num_lanes // self.steps.world_size

    def outlines(self, batch: int = 0, max_rows: Callable[[], int] | None = None) -> Iterator[Outline]:
        """Yield the outlines of all blocks from this batch on. Much cheaper than the blocks.

        `max_rows`: called before each outline for the maximum rows of the block, because the size of rows is known
        only after some are decoded. The borders of blocks do not change the contents of batches.
        """
        while batch < self.steps.num_batches:
            outline = self._outline(batch, self.block_rows if max_rows is None else min(self.block_rows, max_rows()))
            yield outline
            batch += outline.num_batches

    def blocks(self, batch: int = 0) -> Iterator[Block]:
        for outline in self.outlines(batch):
            yield self.block(outline)

    def block(self, outline: Outline) -> Block:
        """Locate the rows of a block."""
        return self._block(outline, None)

    def blocks_of_window(self, outlines: Sequence[Outline]) -> list[Block]:
        """Return `block` for each of these consecutive outlines; the time depends on the rows, not on their number."""
        cuts = self._cuts(outlines) if len(outlines) > 1 and self.order.window_rows else None
        return [self._block(outline, cuts) for outline in outlines]

    def _block(self, outline: Outline, cuts: _Cuts | None) -> Block:
        batch, end = outline.first_batch, outline.first_batch + outline.num_batches
        begin, counts = self._ranges(batch, end)
        sizes = tuple(np.diff(self.steps.runs(batch, end, self.rank))[:, 0].tolist())
        if self._repeats_rows(batch):
            pieces, index = self._place_rows(*self._delivered_rows(batch, begin, counts), None)
        else:
            placed = self._place_evenly(begin, counts, cuts)
            pieces, index = placed or self._place_rows(*self._delivered_rows(batch, begin, counts), cuts)
        return Block(batch, sizes, tuple(pieces), index)

    def _cuts(self, outlines: Sequence[Outline]) -> _Cuts | None:
        """Return the cut windows of the blocks, or None if other ranks get rows in between."""
        plain = [outline for outline in outlines if not self._repeats_rows(outline.first_batch)]
        if len(plain) < 2:
            return None
        begin, counts = self._ranges(plain[0].first_batch, plain[-1].first_batch + plain[-1].num_batches)
        has_gaps = begin[1:] != begin[:-1] + counts[:-1]
        if has_gaps[:, counts.any(axis=0)].any():
            return None
        firsts = begin[[outline.first_batch - plain[0].first_batch for outline in plain]]
        return _Cuts(self.order, np.vstack([firsts, begin[-1:] + counts[-1:]]))

    def _outline(self, batch: int, max_rows: int) -> Outline:
        """Return the outline of the block that begins with this batch."""
        end = self._end_of_block(batch, max_rows)
        begin, counts = self._ranges(batch, end)
        firsts = np.where(counts > 0, begin, np.iinfo(np.int64).max).min(axis=0).tolist()
        lasts = np.where(counts > 0, begin + counts, 0).max(axis=0).tolist()
        starts = self.order.lanes.starts().tolist()
        window = self.order.window_rows
        row_groups: dict[int, None] = {}
        for lane, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if last:
                if window:  # a row may be anywhere in its window
                    first = first // window * window
                    last = min(-(-last // window) * window, starts[lane + 1] - starts[lane])
                found = self.order.locate(starts[lane] + first, starts[lane] + last)
                row_groups |= dict.fromkeys(row_group for row_group, _, _ in found)
        return Outline(
            batch,
            end - batch,
            tuple(row_groups),
            num_rows=(end - batch) * self.steps.batch_size,
            ends_window=self._window_of(end) != self._window_of(end - 1),
        )

    def _window_of(self, batch: int) -> int:
        """Return the number of the window in which a batch ends; without shuffle, a number of its own."""
        if not self.order.window_rows or batch == self.steps.num_batches:
            return -1 - batch
        return -(-self.steps.bounds(batch)[1] // (self.order.window_rows * self.order.num_lanes))

    def _end_of_block(self, batch: int, max_rows: int) -> int:
        """Return the batch after the block.

        With shuffle, a block has all remaining batches of its window; if these are too many, they are divided evenly.
        """
        steps, num_batches = self.steps, self.steps.num_batches
        max_batches = max(1, max_rows // steps.batch_size)
        if self.order.window_rows:
            if self.part_rows is not None and self.shuffle_buffer_rows > max_rows:
                max_batches = max(1, min(max_rows, self.part_rows) // steps.batch_size)
            window_positions = self.order.window_rows * self.order.num_lanes
            window_end = -(-steps.bounds(batch)[1] // window_positions) * window_positions
            count = max(1, steps.num_until(batch, window_end))
            count = -(-count // -(-count // max_batches))
        else:
            count = min(max_batches, max(1, batch)) if self.starts_small else max_batches  # 1, 1, 2, 4, …
        end = min(batch + count, num_batches)
        # A padded last batch repeats rows from its start, so it gets a block of its own.
        if end == num_batches and end - batch > 1 and steps.padded_rows(end - 1):
            end -= 1
        return end

    def _place_evenly(self, begin: Ints, counts: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Rows | None] | None:
        """Locate rows fast in the usual case: every lane gives each batch the same number of rows, without gaps.

        Return None in any other case, and if the rows of a lane are in two windows.
        """
        present = np.flatnonzero(counts.any(axis=0))
        begin, counts = begin[:, present], counts[:, present]
        each = int(counts[0, 0])
        has_gaps = (begin[1:] != begin[:-1] + counts[:-1]).any()
        firsts, lasts = begin[0].tolist(), (begin[-1] + counts[-1]).tolist()
        starts = self.order.lanes.starts().tolist()
        lanes = present.tolist()
        window = self.order.window_rows
        if has_gaps:
            return None
        if not window and len(lanes) == 1:
            return self._whole_pieces(starts[lanes[0]] + firsts[0], starts[lanes[0]] + lasts[0]), None
        if (counts != each).any():
            return None
        pieces: list[Piece] = []
        index: Rows = np.empty((len(begin), each, len(lanes)), dtype=np.int64 if cuts is None else np.uint32)
        num_placed = 0
        for place, (lane, first, last) in enumerate(zip(lanes, firsts, lasts, strict=True)):
            if window:
                number, within = divmod(first, window)
                if within + last - first > window:
                    return None
                found, order, num_rows = self._place_window(lane, number, slice(within, within + last - first), cuts)
            else:
                found, num_rows = self._whole_pieces(starts[lane] + first, starts[lane] + last), last - first
                order = np.arange(num_rows)
            index[:, :, place] = order.reshape(len(begin), each) + num_placed
            pieces += found
            num_placed += num_rows
        if not window:  # without shuffle, rows are ordered lane by lane
            index = index.transpose(0, 2, 1)
        return pieces, index.reshape(-1)

    def _delivered_rows(self, batch: int, begin: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return the lane of every row of the block, and its number in the lane, in the order of delivery."""
        lanes, rows = _expand_ranges(begin, counts)
        if self.order.window_rows:
            turns = _interleave(counts, rows)
            lanes, rows = lanes[turns], rows[turns]
        if self._repeats_rows(batch):
            low, high = self.steps.run(batch, self.rank)
            repeated = np.arange(low, high) % len(rows)
            return lanes[repeated], rows[repeated]
        return lanes, rows

    def _repeats_rows(self, batch: int) -> bool:
        """Return whether the batch is padded with repeated rows. Every rank then locates the rows of all ranks."""
        return self.steps.padded_rows(batch) > 0

    def _ranges(self, batch: int, end: int) -> tuple[Ints, Ints]:
        """Return the first row and the number of rows that the rank gets of each lane, by batch and lane."""
        starts, stops = self.steps.spans(batch, end)
        begin = self.order.lanes.taken(starts)
        counts = self.order.lanes.taken(stops) - begin
        runs = self.steps.runs(batch, end, self.rank)
        if self._repeats_rows(batch):
            assert end - batch == 1
            return begin, counts
        before = np.cumsum(counts, axis=1) - counts
        low = np.clip(runs[:, :1] - before, 0, counts)
        high = np.clip(runs[:, 1:] - before, 0, counts)
        return begin + low, high - low

    def _place_rows(self, lanes: Ints, rows: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Rows | None]:
        """Return pieces that contain these rows of these lanes, and the index of each row in them."""
        pieces: list[Piece] = []
        index: Rows = np.empty(len(rows), dtype=np.int64 if cuts is None else np.uint32)
        num_placed = 0
        present = np.unique(lanes)
        for lane in present.tolist():
            mine = np.flatnonzero(lanes == lane) if len(present) > 1 else slice(None)
            found, places, num_rows = self._place_lane(lane, rows[mine], cuts)
            index[mine] = places + num_placed
            pieces += found
            num_placed += num_rows
        is_identity = num_placed == len(index) and not self.order.window_rows and _is_identity(index)
        return pieces, None if is_identity else index

    def _place_lane(self, lane: int, rows: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Ints, int]:
        """Return the pieces of one lane, the index of each row in them, and their number of rows."""
        start = int(self.order.lanes.starts()[lane])
        if not self.order.window_rows:
            first, last = int(rows.min()), int(rows.max()) + 1
            return self._whole_pieces(start + first, start + last), rows - first, last - first
        pieces: list[Piece] = []
        places = np.empty_like(rows)
        num_placed = 0
        windows = rows // self.order.window_rows
        for window in np.unique(windows).tolist():
            mine = windows == window
            needed = rows[mine] - window * self.order.window_rows
            # With cuts, the rows are consecutive.
            wanted = needed if cuts is None else slice(int(needed[0]), int(needed[-1]) + 1)
            found, within, num_rows = self._place_window(lane, window, wanted, cuts)
            places[mine] = within + num_placed
            pieces += found
            num_placed += num_rows
        return pieces, places, num_placed

    def _place_window(
        self, lane: int, window: int, rows: Ints | slice, cuts: _Cuts | None
    ) -> tuple[list[Piece], Rows, int]:
        """Return the same for one window; `rows` are positions in the window, a slice if there are `cuts`."""
        starts = self.order.lanes.starts()
        begin = window * self.order.window_rows
        size = min(self.order.window_rows, int(starts[lane + 1] - starts[lane]) - begin)
        first = int(starts[lane]) + begin
        if cuts is not None and isinstance(rows, slice):
            picked, places = cuts.find(lane, window, size).part(rows)
            return self._picked_pieces(first, picked), places, len(picked)
        needed = self._permutation(lane, window, size)[rows]
        if len(needed) >= SPARSE * size:
            return self._whole_pieces(first, first + size), needed, size
        if len(needed) < SORTED * size:
            order = np.argsort(needed)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            return self._picked_pieces(first, needed[order]), places, len(needed)
        is_needed = np.zeros(size, dtype=bool)
        is_needed[needed] = True
        places = np.cumsum(is_needed)[needed] - 1
        picked = np.flatnonzero(is_needed)
        return self._picked_pieces(first, picked), places, len(picked)

    def _whole_pieces(self, first: int, last: int) -> list[Piece]:
        """Return pieces with all rows [first, last) of the sequence."""
        return [Piece(row_group, low, high) for row_group, low, high in self.order.locate(first, last)]

    def _picked_pieces(self, first: int, picked: Rows) -> list[Piece]:
        """Return pieces with only these rows, which are counted from row `first` of the sequence."""
        pieces = []
        place = first + int(picked[0])
        for row_group, low, high in self.order.locate(place, first + int(picked[-1]) + 1):
            num_rows = high - low
            mine = picked[np.searchsorted(picked, place - first) : np.searchsorted(picked, place - first + num_rows)]
            if len(mine):
                rows = mine.astype(np.int64) + (low - (place - first))
                pieces.append(Piece(row_group, low, high, rows.astype(picked.dtype)))
            place += num_rows
        return pieces


def _cut(permutation: Ints, borders: Ints) -> _Cut:
    """Cut a window at these positions, with a sort by block that is linear for up to 65,535 blocks."""
    needed, counts = permutation[borders[0] : borders[-1]], np.diff(borders)
    kind = np.min_scalar_type(len(counts))
    block = np.full(len(permutation), len(counts), kind)
    block[needed] = np.repeat(np.arange(len(counts), dtype=kind), counts)
    picked = np.argsort(block, kind="stable")[: len(needed)].astype(np.uint32)
    ranks = np.empty(len(permutation), np.uint32)
    ranks[picked] = np.arange(len(needed), dtype=np.uint32)
    places = ranks[needed] - np.repeat((borders[:-1] - borders[0]).astype(np.uint32), counts)
    return _Cut(borders, picked, places)


def _expand_ranges(begin: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the lane and the number of each row in these ranges, batch by batch, lane by lane."""
    num_lanes = begin.shape[1]
    starts, lengths = begin.ravel(), counts.ravel()
    lanes = np.repeat(np.tile(np.arange(num_lanes), len(begin)), lengths)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return lanes, np.repeat(starts, lengths) + within


def _interleave(counts: Ints, rows: Ints) -> Ints:
    """Return an order in which lanes take turns within each batch, so that neighbours are from different lanes."""
    given = counts[counts > 0]
    num_lanes = np.count_nonzero(counts, axis=1)
    if (given == given[0]).all() and (num_lanes == num_lanes[0]).all():
        shape = (len(counts), int(num_lanes[0]), int(given[0]))
        return np.arange(len(rows)).reshape(shape).transpose(0, 2, 1).ravel()
    within = np.arange(len(rows)) - np.repeat(np.cumsum(given) - given, given)
    batches = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    return np.lexsort((within, batches))


def _is_identity(index: Rows) -> bool:
    return bool(not len(index) or (index[0] == 0 and np.all(np.diff(index) == 1)))
