"""From batches to slices of units: what one rank must decode, and how its rows lie in it.

A *block* is a run of batches that are made together. Its pieces, behind one another, contain every row that it needs;
its index says in which order they are delivered. Blocks know nothing of each other: any batch can be the first, which
is why resuming costs no replay.
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
    from strata.data.order.steps import Steps

    Ints = npt.NDArray[np.int64]
    Rows = npt.NDArray[np.integer[Any]]
    """Rows or places of a window: half as wide where many blocks are worked out at once."""

SPARSE = 0.75
"""Below this share of a window, a block takes the rows that it needs out of each unit, which then need not be held."""
SORTED = 1 / 16
"""Below this share of a window, it is quicker to sort the rows that are needed than to mark them in the window."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one unit."""

    unit: int
    first: int
    last: int
    rows: Rows | None = None
    """Only these, counted from the unit's first row, ascending; None: all from `first` to `last`."""

    @property
    def num_rows(self) -> int:
        return self.last - self.first if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What is known of a block without working out where each of its rows is."""

    first_batch: int
    num_batches: int
    units: tuple[int, ...]
    """All that the block needs, each once, in the order of their rows."""
    ends_window: bool = True
    """Whether the next block needs no rows of this one's window."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    first_batch: int
    sizes: tuple[int, ...]
    """Rows that the rank gets, batch by batch."""
    pieces: tuple[Piece, ...]
    index: Rows | None
    """Which row of the pieces comes first, second, …; None: as they lie."""

    @property
    def num_batches(self) -> int:
        return len(self.sizes)

    @property
    def units(self) -> tuple[int, ...]:
        """Each once, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.unit for piece in self.pieces))


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """One lane's window, cut into the blocks that deliver its rows."""

    borders: Ints
    """Positions in the window at which blocks begin, and the end of the last block."""
    picked: npt.NDArray[np.uint32]
    """Rows of the window, block by block, ascending within a block."""
    places: npt.NDArray[np.uint32]
    """Of each position, which of its block's picked rows it takes."""

    def part(self, rows: slice) -> tuple[Rows, Rows]:
        """The picked rows and the places of one block, which covers exactly these positions."""
        assert {rows.start, rows.stop} <= set(self.borders.tolist()), "a part is one block"
        part = slice(rows.start - int(self.borders[0]), rows.stop - int(self.borders[0]))
        return self.picked[part], self.places[part]


class _Cuts:
    """The windows of several blocks. Each is sorted once; block by block, it would be gone through for every block."""

    def __init__(self, order: Order, borders: Ints) -> None:
        """`borders`: by block and lane, the first row of the lane that the block delivers; one row more for the end."""
        self._order = order
        self._borders = borders
        self._made: dict[tuple[int, int], _Cut] = {}

    def find(self, lane: int, window: int, num_rows: int) -> _Cut:
        """`num_rows`: of the window."""
        made = self._made.get((lane, window))
        if made is None:
            begin = window * self._order.window_rows
            borders = np.unique(np.clip(self._borders[:, lane] - begin, 0, num_rows))
            made = self._made[lane, window] = _cut(self._order.permutation(lane, window, num_rows), borders)
        return made


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's way through an epoch."""

    order: Order
    steps: Steps
    rank: int
    block_rows: int
    """About how many rows of the rank a block has at most; where there are windows, it ends with its window as well."""
    part_rows: int | None = None
    """About how many rows a block has at most if its window is larger than `block_rows`; None: `block_rows`."""
    starts_small: bool = False
    """Without windows: the first block is one batch, so that it is there soon, and each has no more than there were
    before it.
    """
    _permutation: Callable[[int, int, int], Ints] = field(init=False, repr=False, compare=False)
    """As the order's. Kept for a while: a window that is made in several blocks needs it for each."""

    def __post_init__(self) -> None:
        num_kept = 2 * -(-self.order.num_lanes // self.steps.world_size)
        object.__setattr__(self, "_permutation", functools.lru_cache(num_kept)(self.order.permutation))

    @property
    def window_rows(self) -> int:
        """How many rows of the rank are shuffled among themselves."""
        return self.order.window_rows * self.order.num_lanes // self.steps.world_size

    def outlines(self, batch: int = 0, most_rows: Callable[[], int] | None = None) -> Iterator[Outline]:
        """Of all blocks from the one that begins with this batch. Cheap: for looking ahead.

        `most_rows`: asked before each, for who learns only by and by how large rows are. Where blocks end does not
        change what is in a batch.
        """
        while batch < self.steps.num_batches:
            outline = self._outline(batch, self.block_rows if most_rows is None else min(self.block_rows, most_rows()))
            yield outline
            batch += outline.num_batches

    def blocks(self, batch: int = 0) -> Iterator[Block]:
        for outline in self.outlines(batch):
            yield self.block(outline)

    def block(self, outline: Outline) -> Block:
        return self._block(outline, None)

    def blocks_of_window(self, outlines: Sequence[Outline]) -> list[Block]:
        """The same as `block` for each of these consecutive outlines, in time that does not grow with their number."""
        cuts = self._cuts(outlines) if len(outlines) > 1 and self.order.window_rows else None
        return [self._block(outline, cuts) for outline in outlines]

    def _block(self, outline: Outline, cuts: _Cuts | None) -> Block:
        batch, end = outline.first_batch, outline.first_batch + outline.num_batches
        begin, counts = self._ranges(batch, end)
        low, high = self.steps.run(end - 1, self.rank)
        sizes = (self.steps.batch_size,) * (end - batch - 1) + (high - low,)
        if self._begins_again(batch):
            pieces, index = self._place(*self._rows(batch, begin, counts), None)
        else:
            placed = self._place_evenly(begin, counts, cuts)
            pieces, index = placed or self._place(*self._rows(batch, begin, counts), cuts)
        return Block(batch, sizes, tuple(pieces), index)

    def _cuts(self, outlines: Sequence[Outline]) -> _Cuts | None:
        """None if other ranks get rows between those of a block, or between two blocks."""
        plain = [outline for outline in outlines if not self._begins_again(outline.first_batch)]
        if len(plain) < 2:
            return None
        begin, counts = self._ranges(plain[0].first_batch, plain[-1].first_batch + plain[-1].num_batches)
        has_gaps = begin[1:] != begin[:-1] + counts[:-1]
        if has_gaps[:, counts.any(axis=0)].any():
            return None
        firsts = begin[[outline.first_batch - plain[0].first_batch for outline in plain]]
        return _Cuts(self.order, np.vstack([firsts, begin[-1:] + counts[-1:]]))

    def _outline(self, batch: int, most_rows: int) -> Outline:
        end = self._end_of_block(batch, most_rows)
        begin, counts = self._ranges(batch, end)
        firsts = np.where(counts > 0, begin, np.iinfo(np.int64).max).min(axis=0).tolist()
        lasts = np.where(counts > 0, begin + counts, 0).max(axis=0).tolist()
        starts = self.order.lanes.starts().tolist()
        window = self.order.window_rows
        units: dict[int, None] = {}
        for lane, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if last:
                if window:  # rows may be anywhere in their windows
                    first = first // window * window
                    last = min(-(-last // window) * window, starts[lane + 1] - starts[lane])
                found = self.order.locate(starts[lane] + first, starts[lane] + last)
                units |= dict.fromkeys(unit for unit, _, _ in found)
        return Outline(batch, end - batch, tuple(units), self._window_of(end) != self._window_of(end - 1))

    def _window_of(self, batch: int) -> int:
        """The window in which a batch ends, by its number; without windows, each batch has its own."""
        if not self.order.window_rows or batch == self.steps.num_batches:
            return -1 - batch
        return -(-self.steps.bounds(batch)[1] // (self.order.window_rows * self.order.num_lanes))

    def _end_of_block(self, batch: int, most_rows: int) -> int:
        """One past the last batch: all that end in the window in which the first one ends, or an even share of them."""
        steps, num_batches = self.steps, self.steps.num_batches
        most = max(1, most_rows // steps.batch_size)
        if self.order.window_rows:
            if self.part_rows is not None and self.window_rows > most_rows:
                most = max(1, min(most_rows, self.part_rows) // steps.batch_size)
            window_positions = self.order.window_rows * self.order.num_lanes
            first_stop = steps.bounds(batch)[1]
            window_end = -(-first_stop // window_positions) * window_positions
            count = max(1, (window_end - steps.bounds(batch)[0]) // steps.batch_rows)
            count = -(-count // -(-count // most))
        else:
            # If small: one, one, two, four, …
            count = min(most, max(1, batch)) if self.starts_small else most
        end = min(batch + count, num_batches)
        # The last batch may be of another size: it is on its own when its rows begin again with the first.
        if end == num_batches and end - batch > 1 and steps.padded_rows(end - 1):
            end -= 1
        return end

    def _place_evenly(self, begin: Ints, counts: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Rows | None] | None:
        """The usual case, quickly: every lane gives the same number of rows to each batch, without gaps.

        None: it is not so, or a lane's rows are in two windows.
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
            return self._whole(starts[lanes[0]] + firsts[0], starts[lanes[0]] + lasts[0]), None
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
                found, num_rows = self._whole(starts[lane] + first, starts[lane] + last), last - first
                order = np.arange(num_rows)
            index[:, :, place] = order.reshape(len(begin), each) + num_placed
            pieces += found
            num_placed += num_rows
        if not window:  # lane by lane, as everywhere
            index = index.transpose(0, 2, 1)
        return pieces, index.reshape(-1)

    def _rows(self, batch: int, begin: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Lane, and number in the lane, of every row that the rank gets from a batch on, in order."""
        lanes, rows = _expand(begin, counts)
        if self.order.window_rows:
            turns = _turns(counts, rows)
            lanes, rows = lanes[turns], rows[turns]
        if self._begins_again(batch):
            low, high = self.steps.run(batch, self.rank)
            repeated = np.arange(low, high) % len(rows)
            return lanes[repeated], rows[repeated]
        return lanes, rows

    def _begins_again(self, batch: int) -> bool:
        """Whether there are not enough rows for all ranks: then every rank works out all of the batch."""
        return self.steps.padded_rows(batch) > 0

    def _ranges(self, batch: int, end: int) -> tuple[Ints, Ints]:
        """The rank's rows as ranges: where each begins and how long it is, by batch and lane."""
        # Only the last batch of an epoch may be of another size.
        starts = self.steps.bounds(batch)[0] + np.arange(end - batch, dtype=np.int64) * self.steps.batch_rows
        begin = self.order.lanes.taken(starts)
        counts = self.order.lanes.taken(np.append(starts[1:], self.steps.bounds(end - 1)[1])) - begin
        low, high = self.rank * self.steps.batch_size, (self.rank + 1) * self.steps.batch_size
        runs = np.tile(np.array([[low, high]], dtype=np.int64), (end - batch, 1))
        runs[-1] = self.steps.run(end - 1, self.rank)
        if self._begins_again(batch):
            assert end - batch == 1
            return begin, counts
        before = np.cumsum(counts, axis=1) - counts
        low = np.clip(runs[:, :1] - before, 0, counts)
        high = np.clip(runs[:, 1:] - before, 0, counts)
        return begin + low, high - low

    def _place(self, lanes: Ints, rows: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Rows | None]:
        """Pieces that contain these rows of these lanes, and where in them each row is."""
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
        is_identity = num_placed == len(index) and not self.order.window_rows and _counts_up(index)
        return pieces, None if is_identity else index

    def _place_lane(self, lane: int, rows: Ints, cuts: _Cuts | None) -> tuple[list[Piece], Ints, int]:
        start = int(self.order.lanes.starts()[lane])
        if not self.order.window_rows:
            first, last = int(rows.min()), int(rows.max()) + 1
            return self._whole(start + first, start + last), rows - first, last - first
        pieces: list[Piece] = []
        places = np.empty_like(rows)
        num_placed = 0
        windows = rows // self.order.window_rows
        for window in np.unique(windows).tolist():
            mine = windows == window
            needed = rows[mine] - window * self.order.window_rows
            # With cuts, they follow one another.
            wanted = needed if cuts is None else slice(int(needed[0]), int(needed[-1]) + 1)
            found, within, num_rows = self._place_window(lane, window, wanted, cuts)
            places[mine] = within + num_placed
            pieces += found
            num_placed += num_rows
        return pieces, places, num_placed

    def _place_window(
        self, lane: int, window: int, rows: Ints | slice, cuts: _Cuts | None
    ) -> tuple[list[Piece], Rows, int]:
        """`rows`: counted from the first of the window, in the order of the lane; a slice if there are `cuts`."""
        starts = self.order.lanes.starts()
        begin = window * self.order.window_rows
        size = min(self.order.window_rows, int(starts[lane + 1] - starts[lane]) - begin)
        first = int(starts[lane]) + begin
        if cuts is not None and isinstance(rows, slice):
            picked, places = cuts.find(lane, window, size).part(rows)
            return self._picked(first, picked), places, len(picked)
        needed = self._permutation(lane, window, size)[rows]
        if len(needed) >= SPARSE * size:
            return self._whole(first, first + size), needed, size
        if len(needed) < SORTED * size:
            order = np.argsort(needed)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            return self._picked(first, needed[order]), places, len(needed)
        is_needed = np.zeros(size, dtype=bool)
        is_needed[needed] = True
        places = np.cumsum(is_needed)[needed] - 1
        picked = np.flatnonzero(is_needed)
        return self._picked(first, picked), places, len(picked)

    def _whole(self, first: int, last: int) -> list[Piece]:
        return [Piece(unit, low, high) for unit, low, high in self.order.locate(first, last)]

    def _picked(self, first: int, picked: Rows) -> list[Piece]:
        """Only these rows, counted from `first`."""
        pieces = []
        place = first + int(picked[0])
        for unit, low, high in self.order.locate(place, first + int(picked[-1]) + 1):
            num_rows = high - low
            mine = picked[np.searchsorted(picked, place - first) : np.searchsorted(picked, place - first + num_rows)]
            if len(mine):
                rows = mine.astype(np.int64) + (low - (place - first))
                pieces.append(Piece(unit, low, high, rows.astype(picked.dtype)))
            place += num_rows
        return pieces


def _cut(permutation: Ints, borders: Ints) -> _Cut:
    """`borders`: positions, ascending. A counting sort by block, which is linear for up to 65,535 of them."""
    needed, counts = permutation[borders[0] : borders[-1]], np.diff(borders)
    kind = np.min_scalar_type(len(counts))
    block = np.full(len(permutation), len(counts), kind)
    block[needed] = np.repeat(np.arange(len(counts), dtype=kind), counts)
    picked = np.argsort(block, kind="stable")[: len(needed)].astype(np.uint32)
    ranks = np.empty(len(permutation), np.uint32)
    ranks[picked] = np.arange(len(needed), dtype=np.uint32)
    places = ranks[needed] - np.repeat((borders[:-1] - borders[0]).astype(np.uint32), counts)
    return _Cut(borders, picked, places)


def _expand(begin: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Ranges per batch and lane → lane and number of each row: batch by batch, lane by lane."""
    num_lanes = begin.shape[1]
    starts, lengths = begin.ravel(), counts.ravel()
    lanes = np.repeat(np.tile(np.arange(num_lanes), len(begin)), lengths)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return lanes, np.repeat(starts, lengths) + within


def _turns(counts: Ints, rows: Ints) -> Ints:
    """From lane by lane to lanes in turn, within each batch: so that neighbours come from different places."""
    given = counts[counts > 0]
    num_lanes = np.count_nonzero(counts, axis=1)
    if (given == given[0]).all() and (num_lanes == num_lanes[0]).all():
        shape = (len(counts), int(num_lanes[0]), int(given[0]))
        return np.arange(len(rows)).reshape(shape).transpose(0, 2, 1).ravel()
    within = np.arange(len(rows)) - np.repeat(np.cumsum(given) - given, given)
    batches = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    return np.lexsort((within, batches))


def _counts_up(index: Rows) -> bool:
    return bool(len(index) == 0 or (index[0] == 0 and np.all(np.diff(index) == 1)))
