"""The n-th row of an epoch: a pure function of (rows per split, seed, epoch, lanes, window).

The splits of a plan, permuted by (seed, epoch), form one sequence of N rows. The sequence is cut into L *lanes* of
consecutive rows whose lengths differ by at most one. Each lane is cut into *windows*: a window is one lane's part of
the shuffle buffer, and its rows are permuted. *Position* p of the epoch takes the lanes in turn: it is row ⌊p/L⌋ of
lane p mod L. The last N mod L positions are the last rows of the lanes that are longer by one.

Nothing here depends on ranks, workers or batches: they only decide which process reads a position, and when.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MAX_LANES = 1 << 16
MAX_SEED = (1 << 63) - 1
_SPLITS, _ROWS = 0, 1  # the first part of a random stream's key, so that no two purposes share a stream


def random_state(*key: int) -> np.random.RandomState:
    """Return the random stream of a key. numpy guarantees both parts of it, so an order survives numpy upgrades."""
    return np.random.RandomState(np.random.PCG64(np.random.SeedSequence(key)))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The division of N rows into L lanes."""

    num_rows: int
    num_lanes: int

    def starts(self) -> Ints:
        """Return where each lane begins in the sequence, and one more entry for the end of the last lane."""
        starts: Ints = np.arange(self.num_lanes + 1, dtype=np.int64) * self.num_rows // self.num_lanes
        return starts

    def taken(self, positions: Ints) -> Ints:
        """Return how many rows of each lane precede each position: one row per position, one column per lane."""
        short, num_long = divmod(self.num_rows, self.num_lanes)
        is_long = np.diff(self.starts()) > short
        # A lane's turn is its number in a whole round, and its number among the long lanes in the last round.
        turn_in_round = np.arange(self.num_lanes)
        turn_in_last = np.where(is_long, np.cumsum(is_long) - 1, num_long)
        rounds = np.minimum(positions // self.num_lanes, short)[:, None]
        over = positions[:, None] - rounds * self.num_lanes
        turns = np.where(rounds < short, turn_in_round, turn_in_last)
        taken: Ints = rounds + (turns < over)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The row order of one epoch."""

    num_rows: int
    num_lanes: int
    window_rows: int
    """Rows of one lane's part of the shuffle buffer; 0 if rows are not shuffled."""
    seed: int
    epoch: int
    row_groups: Ints
    """Row group numbers of the plan, in the order of this epoch."""
    row_group_starts: Ints
    """Where each row group begins in the sequence, and one more entry for the end."""

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.num_rows, self.num_lanes)

    def permutation(self, lane: int, window: int, num_rows: int) -> Ints:
        """Return which row of the window comes first, second, …"""
        state = random_state(_ROWS, self.seed, self.epoch, lane, window)
        return state.permutation(num_rows).astype(np.int64, copy=False)

    def locate(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return rows [first, last) of the sequence as (row group, first row in it, last row + 1), in order."""
        if first >= last:
            return []
        found = []
        place = int(np.searchsorted(self.row_group_starts, first, side="right")) - 1
        while first < last:
            start, end = int(self.row_group_starts[place]), int(self.row_group_starts[place + 1])
            stop = min(end, last)
            found.append((int(self.row_groups[place]), first - start, stop - start))
            first, place = stop, place + 1
        return found


class Splits(Protocol):
    """What an order needs to know of a plan."""

    @property
    def split_starts(self) -> Ints:
        """The first row group of each split, and one more entry for the end."""
        ...

    @property
    def unit_rows(self) -> Ints:
        """Rows of each row group."""
        ...


def make_order(splits: Splits, *, seed: int, epoch: int, shuffle: bool, num_lanes: int, window_rows: int) -> Order:
    """Return the order of an epoch over the row groups of a plan."""
    row_groups = sequence_row_groups(splits.split_starts, seed=seed, epoch=epoch, shuffle=shuffle)
    starts = np.zeros(len(row_groups) + 1, dtype=np.int64)
    np.cumsum(splits.unit_rows[row_groups], out=starts[1:])
    return Order(
        num_rows=int(starts[-1]),
        num_lanes=num_lanes,
        window_rows=window_rows if shuffle else 0,
        seed=seed,
        epoch=epoch,
        row_groups=row_groups,
        row_group_starts=starts,
    )


def sequence_row_groups(split_starts: Ints, *, seed: int, epoch: int, shuffle: bool) -> Ints:
    """Return all row groups, split by split, with the splits in the order of this epoch."""
    num_splits = len(split_starts) - 1
    if not shuffle or num_splits < 2:
        return np.arange(split_starts[-1], dtype=np.int64)
    splits = random_state(_SPLITS, seed, epoch).permutation(num_splits)
    lengths = np.diff(split_starts)[splits]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    row_groups: Ints = np.repeat(split_starts[:-1][splits], lengths) + within
    return row_groups


def choose_lanes(
    *, world_size: int, batch_size: int, num_row_groups: int, shuffle: bool, max_lanes_per_rank: int
) -> int:
    """Return the number of lanes, if the user does not set it.

    Without shuffle, each rank gets one lane. With shuffle it gets several, so that a batch has rows from several
    places. Their number divides the batch size: every lane then contributes equally to each batch, and no two ranks
    share a lane.
    """
    if not shuffle:
        return world_size
    most = max(1, min(max_lanes_per_rank, batch_size, num_row_groups // world_size))
    if world_size == 1:
        return most
    return world_size * max(count for count in range(1, most + 1) if batch_size % count == 0)


def choose_window(*, num_lanes: int, batch_rows: int, shuffle_buffer_size: int) -> int:
    """Return the rows of one lane's window, so that all lanes together shuffle about `shuffle_buffer_size` rows.

    A window ends where a batch ends, unless that makes it too large: no batch then needs two windows, which would
    both have to be in memory.
    """
    whole = max(1, shuffle_buffer_size // num_lanes)
    step = batch_rows // math.gcd(batch_rows, num_lanes)
    if step > whole and batch_rows % num_lanes:
        step = 1
    return max(step, whole // step * step)
