"""Batches by bytes or tokens: which rows form a batch, as pure arithmetic on (lengths, order, limit).

A *bin* is the batch of one rank in one step: whole rows whose cost stays within the limit. The rows of an epoch are
divided into bins before they are divided among ranks. A step takes as many consecutive bins as there are ranks, so all
ranks have equal steps, and any number of ranks can resume after any bin.

The lanes of an order form *tracks*, one for each rank at the start of the epoch. A *pool* is one window of all lanes of
a track: its rows are permuted together and cut into bins, and no bin has rows of two pools. Bins take the tracks in
turn, so a rank reads one track until the number of ranks changes.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.data.order.order import random_state
from strata.data.order.schedule import Block, Outline, Piece
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from strata.data.order.order import Order
    from strata.data.order.steps import Tail

    Ints = npt.NDArray[np.int64]
    Costs = npt.NDArray[np.uint32]

MAX_ROWS = 1 << 27
"""Rows whose lengths are kept: four bytes each in memory, on every rank."""
PLAIN_POOL_ROWS = 1 << 17
"""Rows of a pool without shuffle. The last bin of a pool is not full, so small pools would waste batches."""
_POOLS, _BINS = 4, 5
"""The first part of a random stream's key; `order.py` and `map_rows.py` use 0 to 3."""


def padding_waste(lengths: Sequence[int] | npt.NDArray[Any], sizes: Sequence[int] | npt.NDArray[Any]) -> float:
    """Return the share of padding if consecutive rows form batches of these sizes, each as wide as its longest row.

    `lengths` are those of the rows in the order of delivery; `sizes` are rows per batch, together all rows.
    """
    values, counts = np.asarray(lengths, np.int64), np.asarray(sizes, np.int64)
    assert counts.sum() == len(values), "batches must take all rows"
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    widest = np.maximum.reduceat(values, np.cumsum(counts) - counts)
    padded = int((widest * counts).sum())
    return 1 - int(values.sum()) / padded if padded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a bin may hold."""

    limit: int
    """Maximum cost of a bin: the sum of the lengths of its rows, or with `is_padded` rows × the longest row."""
    is_padded: bool = False
    has_buckets: bool = False
    """Whether rows of similar length share a bin."""
    skips_long: bool = False
    """Rows above the limit are in no bin; otherwise they count as `limit`, because they are cut."""

    def costs(self, lengths: Costs) -> Costs:
        """Return what each row costs: at least 1, at most the limit; 0 for rows that are left out."""
        costs = np.clip(lengths, 1, self.limit).astype(np.uint32, copy=False)
        if self.skips_long:
            costs[lengths > self.limit] = 0
        return costs


@dataclass(frozen=True, eq=False)
class Pools:
    """The rows of an epoch, pool by pool."""

    order: Order
    costs: Costs
    """By row, in the order of the plan's row groups."""
    unit_starts: Ints
    """Where each row group of the plan begins in `costs`, and one more entry for the end."""
    num_tracks: int
    budget: Budget

    def __post_init__(self) -> None:
        assert self.order.num_lanes % self.num_tracks == 0, "tracks have equally many lanes"

    @functools.cached_property
    def lane_starts(self) -> Ints:
        """Where lanes begin in the sequence, so that they have about the same cost; one more entry for the end."""
        order, num_lanes = self.order, self.order.num_lanes
        if not order.num_rows:
            return np.zeros(num_lanes + 1, np.int64)
        groups = np.add.reduceat(self.costs, self.unit_starts[:-1], dtype=np.int64)[order.row_groups]
        before = np.concatenate([[0], np.cumsum(groups)])
        starts = [0]
        for lane in range(1, num_lanes):
            target = int(before[-1]) * lane // num_lanes
            place = int(np.searchsorted(before, target, side="right")) - 1
            if place == len(groups):
                starts.append(order.num_rows)
                continue
            first, last = self._unit(int(order.row_groups[place]))
            sums = np.cumsum(self.costs[first:last], dtype=np.int64)
            within = int(np.searchsorted(sums, target - before[place], side="right"))
            starts.append(int(order.row_group_starts[place]) + within)
        return np.array([*starts, order.num_rows], np.int64)

    @functools.cached_property
    def num_windows(self) -> int:
        """Windows of every lane. A longer lane has larger windows, so that all lanes end together."""
        window = self.order.window_rows or PLAIN_POOL_ROWS
        return max(1, -(-int(np.diff(self.lane_starts).max()) // window))

    def rows(self, pool: int) -> tuple[Ints, Ints]:
        """Return the rows of a pool as numbers in the sequence, in the order of delivery, and where its bins begin."""
        order = self.order
        rows, costs = self._in_sequence(pool)
        if order.window_rows:
            turns = random_state(_POOLS, order.seed, order.epoch, pool).permutation(len(rows))
            rows, costs = rows[turns], costs[turns]
        if self.budget.has_buckets:
            longest_first = np.argsort(-costs, kind="stable")
            rows, costs = rows[longest_first], costs[longest_first]
        starts = fill(costs, self.budget)
        if not self.budget.has_buckets or len(starts) < 3:
            return rows, starts
        # Without this, every pool would begin with its longest rows.
        turns = random_state(_BINS, order.seed, order.epoch, pool).permutation(len(starts) - 1)
        sizes = np.diff(starts)[turns]
        moved = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(len(rows)) - np.repeat(moved[:-1], sizes)
        return rows[np.repeat(starts[:-1][turns], sizes) + within], moved

    def _in_sequence(self, pool: int) -> tuple[Ints, Ints]:
        """Return the rows of a pool in the order of the sequence, and their costs, without those that are left out."""
        track, window = divmod(pool, self.num_windows)
        per_track = self.order.num_lanes // self.num_tracks
        rows, costs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for lane in range(track * per_track, (track + 1) * per_track):
            start, end = self.lane_starts[lane : lane + 2].tolist()
            first = start + (end - start) * window // self.num_windows
            last = start + (end - start) * (window + 1) // self.num_windows
            rows.append(np.arange(first, last))
            for row_group, low, high in self.order.locate(first, last):
                begin = int(self.unit_starts[row_group])
                costs.append(self.costs[begin + low : begin + high].astype(np.int64))
        found, paid = np.concatenate(rows), np.concatenate(costs)
        if not self.budget.skips_long:
            return found, paid
        return found[paid > 0], paid[paid > 0]

    def _unit(self, row_group: int) -> tuple[int, int]:
        return int(self.unit_starts[row_group]), int(self.unit_starts[row_group + 1])


def fill(costs: Ints, budget: Budget) -> Ints:
    """Return where bins begin if each takes as many consecutive rows as fit, and one more entry for the end."""
    num_rows, limit = len(costs), budget.limit
    if not budget.is_padded:
        sums = np.concatenate([[0], np.cumsum(costs)])
        return _jumps((np.searchsorted(sums, sums[:-1] + limit, side="right") - 1).tolist())
    if budget.has_buckets:  # the first row of a bin is the longest one
        return _jumps(np.minimum(np.arange(num_rows) + limit // costs, num_rows).tolist())
    starts = [0]
    while (start := starts[-1]) < num_rows:
        ahead = costs[start : start + limit // int(costs[start])]
        padded = np.maximum.accumulate(ahead) * np.arange(1, len(ahead) + 1)
        starts.append(start + int(np.searchsorted(padded, limit, side="right")))
    return np.array(starts, np.int64)


def _jumps(ends: list[int]) -> Ints:
    """Return the starts of bins, given where a bin that begins at each row would end."""
    starts = [0]
    while starts[-1] < len(ends):
        starts.append(ends[starts[-1]])
    return np.array(starts, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """All bins of an epoch, in the order in which steps take them."""

    pools: Pools
    pool: Ints
    first: Ints
    """Index of a bin's first row among the rows of its pool."""
    starts: Ints
    """Rows of all earlier bins, which is the position where a bin begins; and one more entry for the end."""
    _rows_of_pool: Callable[[int], tuple[Ints, Ints]] = field(init=False, repr=False)
    """`pools.rows`, cached: bins take the tracks in turn, so the current pool of each track is needed repeatedly."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows_of_pool", functools.lru_cache(2 * self.pools.num_tracks + 2)(self.pools.rows))

    @classmethod
    def of(cls, pools: Pools) -> Bins:
        pool, first, sizes, number = [], [], [], []
        for track in range(pools.num_tracks):
            num_before = 0
            for window in range(pools.num_windows):
                each = track * pools.num_windows + window
                starts = pools.rows(each)[1]
                num_bins = len(starts) - 1
                pool.append(np.full(num_bins, each))
                first.append(starts[:-1])
                sizes.append(np.diff(starts))
                number.append(np.arange(num_before, num_before + num_bins))
                num_before += num_bins
        pool_of = np.concatenate(pool)
        turns = np.lexsort((pool_of, np.concatenate(number)))
        ends = np.cumsum(np.concatenate(sizes)[turns])
        return cls(pools, pool_of[turns], np.concatenate(first)[turns], np.concatenate([[0], ends]))

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def size(self, number: int) -> int:
        return int(self.starts[number + 1] - self.starts[number])

    def rows(self, number: int, low: int, high: int) -> Ints:
        """Return rows [low, high) of a bin, as numbers in the sequence."""
        first = int(self.first[number])
        return self._rows_of_pool(int(self.pool[number]))[0][first + low : first + high]

    def window(self, number: int) -> int:
        """Return the number of the bin's window, which is the same in all tracks."""
        return int(self.pool[number]) % self.pools.num_windows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinSteps:
    """As `Steps`, for batches by bytes or tokens: a step takes one bin for each rank."""

    bins: Bins
    num_rows: int
    """Rows of the whole epoch, including those that are left out."""
    first: int
    """Position of the first row of the first batch; a bin begins there."""
    world_size: int
    tail: Tail
    first_bin: int = field(init=False)
    num_batches: int = field(init=False)

    def __post_init__(self) -> None:
        starts = self.bins.starts
        is_over = self.first >= self.num_rows
        found = len(self.bins) if is_over else int(np.searchsorted(starts, self.first))
        if not is_over and (found == len(starts) or int(starts[found]) != self.first):
            raise InvalidArgument(
                f"position {self.first} is not where a batch of this epoch ends; load the dictionary as it was saved",
                field="state",
            )
        object.__setattr__(self, "first_bin", found)
        full, rest = divmod(len(self.bins) - found, self.world_size)
        object.__setattr__(self, "num_batches", full + (rest > 0 and self.tail != "drop"))

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the positions of a batch: the first, and one past the last."""
        begin, end = self._bins_of(batch)
        return int(self.bins.starts[begin]), int(self.bins.starts[end])

    @property
    def dropped_rows(self) -> int:
        """Rows of the epoch that no rank gets: those at the end, and those that are longer than a batch."""
        end = self._bins_of(self.num_batches - 1)[1] if self.num_batches else self.first_bin
        return self.num_rows - int(self.bins.starts[end])

    def position_after(self, batch: int) -> int:
        """Return the position to resume at after this batch; after the last batch, the end of the epoch."""
        return self.num_rows if batch == self.num_batches - 1 else self.bounds(batch)[1]

    def part(self, batch: int, rank: int) -> tuple[int, int, int]:
        """Return the bin of a rank's batch and which of its rows: the first, and one past the last."""
        begin, end = self._bins_of(batch)
        if end - begin == self.world_size:
            return begin + rank, 0, self.bins.size(begin + rank)
        parts = self._parts(batch)
        return parts[rank % len(parts)]

    def given_rows(self, batch: int) -> int:
        """Return how many rows all ranks together get, including repeated rows."""
        begin, end = self._bins_of(batch)
        if end - begin == self.world_size:
            return int(self.bins.starts[end] - self.bins.starts[begin])
        parts = self._parts(batch)
        return sum(high - low for _, low, high in (parts[rank % len(parts)] for rank in range(self.world_size)))

    @property
    def fewest_rows(self) -> int:
        """Rows of the smallest batch of a rank; there must be batches."""
        last = self.num_batches - 1
        full = np.diff(self.bins.starts[self.first_bin : self._bins_of(last)[0] + 1])
        rest = [high - low for _, low, high in self._parts(last)]
        return min([*rest, int(full.min(initial=rest[0]))])

    def repeated_rows(self, batch: int, rank: int) -> int:
        """Return how many rows of a rank's batch another rank of the step gets as well."""
        begin, end = self._bins_of(batch)
        if end - begin == self.world_size:
            return 0
        parts = self._parts(batch)
        _, low, high = parts[rank % len(parts)]
        return high - low if rank >= len(parts) else 0

    def _bins_of(self, batch: int) -> tuple[int, int]:
        begin = self.first_bin + batch * self.world_size
        return begin, min(begin + self.world_size, len(self.bins))

    def _parts(self, batch: int) -> list[tuple[int, int, int]]:
        """Return the batches of a step. If fewer bins than ranks are left, the largest ones are divided."""
        begin, end = self._bins_of(batch)
        parts = [(number, 0, self.bins.size(number)) for number in range(begin, end)]
        while self.tail != "pad" and len(parts) < self.world_size:
            number, low, high = max(parts, key=lambda part: part[2] - part[1])
            if high - low == 1:
                break
            place, middle = parts.index((number, low, high)), (low + high) // 2
            parts[place : place + 1] = [(number, low, middle), (number, middle, high)]
        return parts


@dataclass(frozen=True, slots=True)
class BinSchedule:
    """As `Schedule`, for batches by bytes or tokens."""

    steps: BinSteps
    rank: int
    block_rows: int
    """Approximate maximum rows of a block; with shuffle, a block also ends with its window."""
    part_rows: int | None = None
    """As `Schedule.part_rows`."""

    @property
    def order(self) -> Order:
        return self.steps.bins.pools.order

    @property
    def has_windows(self) -> bool:
        return self.order.window_rows > 0

    @property
    def shuffle_buffer_rows(self) -> int:
        """Rows of the shuffle buffer on this rank."""
        return self.order.window_rows * self.order.num_lanes // self.steps.world_size

    def outlines(self, batch: int = 0, max_rows: Callable[[], int] | None = None) -> Iterator[Outline]:
        """Yield the outlines of all blocks from this batch on; `max_rows` is called as in `Schedule.outlines`."""
        while batch < self.steps.num_batches:
            most = self.block_rows if max_rows is None else min(self.block_rows, max_rows())
            end = self._end_of_block(batch, most)
            rows = np.concatenate([self._rows(number) for number in range(batch, end)])
            places = np.searchsorted(self.order.row_group_starts, rows, side="right") - 1
            yield Outline(
                batch,
                end - batch,
                tuple(self.order.row_groups[np.unique(places)].tolist()),
                num_rows=len(rows),
                ends_window=not self.has_windows or self._window(end) != self._window(end - 1),
            )
            batch = end

    def blocks(self, batch: int = 0) -> Iterator[Block]:
        for outline in self.outlines(batch):
            yield self.block(outline)

    def block(self, outline: Outline) -> Block:
        """Locate the rows of a block."""
        batches = range(outline.first_batch, outline.first_batch + outline.num_batches)
        rows = [self._rows(number) for number in batches]
        picked, index = np.unique(np.concatenate(rows), return_inverse=True)
        index = index.reshape(-1)
        is_identity = len(picked) == len(index) and bool((index == np.arange(len(index))).all())
        sizes = tuple(map(len, rows))
        return Block(outline.first_batch, sizes, tuple(self._pieces(picked)), None if is_identity else index)

    def blocks_of_window(self, outlines: Sequence[Outline]) -> list[Block]:
        return [self.block(outline) for outline in outlines]

    def _rows(self, batch: int) -> Ints:
        """Return the rows of a batch as numbers in the sequence."""
        return self.steps.bins.rows(*self.steps.part(batch, self.rank))

    def _window(self, batch: int) -> int:
        return -1 if batch == self.steps.num_batches else self.steps.bins.window(self.steps.part(batch, self.rank)[0])

    def _end_of_block(self, batch: int, max_rows: int) -> int:
        """Return the batch after the block: all batches of its window, or as many as have `max_rows`."""
        if self.has_windows and self.part_rows is not None and self.shuffle_buffer_rows > max_rows:
            max_rows = min(max_rows, self.part_rows)
        # Without shuffle, the first blocks are small, because they are decoded sooner: 1, 1, 2, 4, … batches.
        last = self.steps.num_batches if self.has_windows else min(self.steps.num_batches, batch + max(1, batch))
        num_rows, end = 0, batch
        while end < last and (end == batch or self._window(end) == self._window(batch)):
            _, low, high = self.steps.part(end, self.rank)
            num_rows += high - low
            if end > batch and num_rows > max_rows:
                break
            end += 1
        return end

    def _pieces(self, picked: Ints) -> Iterator[Piece]:
        """Yield pieces with these rows of the sequence, which ascend."""
        order = self.order
        places = np.searchsorted(order.row_group_starts, picked, side="right") - 1
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        for first, last in itertools.pairwise([*firsts.tolist(), len(picked)]):
            place = int(places[first])
            rows = picked[first:last] - order.row_group_starts[place]
            low, high = int(rows[0]), int(rows[-1]) + 1
            yield Piece(int(order.row_groups[place]), low, high, None if high - low == len(rows) else rows)
