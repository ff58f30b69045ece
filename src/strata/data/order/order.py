"""Which row comes n-th: a pure function of (rows per split, seed, epoch, lanes, window).

The splits of a plan, permuted by (seed, epoch), are one long sequence of N rows. It is cut into L *lanes* of
consecutive rows whose lengths differ by at most one. A lane is a row of *windows*; within a window, rows are permuted.
*Position* p of the epoch takes the lanes in turn, so it is row ⌊p/L⌋ of lane p mod L, and the last N mod L positions
are the last rows of the lanes that are longer by one.

Nothing here knows of ranks, workers or batches: they only decide who reads a position, and when.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from strata.data.plan.plan import Plan

    Ints = npt.NDArray[np.int64]

MAX_LANES = 1 << 16
MAX_SEED = (1 << 63) - 1
_SPLITS, _ROWS = 0, 1  # what a random stream is for, so that no two share one


def random_state(*key: int) -> np.random.RandomState:
    """A stream of its own for every key. Both parts of it are frozen by numpy, so that orders outlive its versions."""
    return np.random.RandomState(np.random.PCG64(np.random.SeedSequence(key)))


@dataclass(frozen=True, slots=True)
class Lanes:
    """N rows in L lanes."""

    num_rows: int
    num_lanes: int

    def starts(self) -> Ints:
        """Where each lane begins in the sequence; one more entry for the end of the last."""
        starts: Ints = np.arange(self.num_lanes + 1, dtype=np.int64) * self.num_rows // self.num_lanes
        return starts

    def taken(self, positions: Ints) -> Ints:
        """How many rows of each lane come before each position: one row per position, one column per lane."""
        short, num_long = divmod(self.num_rows, self.num_lanes)
        is_long = np.diff(self.starts()) > short
        # When a lane has its turn: by its number in a whole round, by its number among the long lanes in the last.
        turn_in_round = np.arange(self.num_lanes)
        turn_in_last = np.where(is_long, np.cumsum(is_long) - 1, num_long)
        rounds = np.minimum(positions // self.num_lanes, short)[:, None]
        over = positions[:, None] - rounds * self.num_lanes
        turns = np.where(rounds < short, turn_in_round, turn_in_last)
        taken: Ints = rounds + (turns < over)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One epoch's order over one plan."""

    num_rows: int
    num_lanes: int
    window_rows: int
    """Rows of one lane that are permuted among themselves; 0: rows stay in their order."""
    seed: int
    epoch: int
    units: Ints
    """Unit numbers of the plan in this epoch's sequence."""
    unit_starts: Ints
    """Where each of them begins in the sequence; one more entry for the end."""

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.num_rows, self.num_lanes)

    def permutation(self, lane: int, window: int, num_rows: int) -> Ints:
        """Which row of the window comes first, second, …"""
        state = random_state(_ROWS, self.seed, self.epoch, lane, window)
        return state.permutation(num_rows).astype(np.int64, copy=False)

    def locate(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Rows [first, last) of the sequence as (unit, its first row, its last row + 1), in order."""
        if first >= last:
            return []
        found = []
        place = int(np.searchsorted(self.unit_starts, first, side="right")) - 1
        while first < last:
            start, end = int(self.unit_starts[place]), int(self.unit_starts[place + 1])
            stop = min(end, last)
            found.append((int(self.units[place]), first - start, stop - start))
            first, place = stop, place + 1
        return found


def make_order(plan: Plan, *, seed: int, epoch: int, shuffle: bool, num_lanes: int, window_rows: int) -> Order:
    units = sequence_of_units(plan.split_starts, seed=seed, epoch=epoch, shuffle=shuffle)
    starts = np.zeros(len(units) + 1, dtype=np.int64)
    np.cumsum(plan.unit_rows[units], out=starts[1:])
    return Order(
        num_rows=int(starts[-1]),
        num_lanes=num_lanes,
        window_rows=window_rows if shuffle else 0,
        seed=seed,
        epoch=epoch,
        units=units,
        unit_starts=starts,
    )


def sequence_of_units(split_starts: Ints, *, seed: int, epoch: int, shuffle: bool) -> Ints:
    """The units of the splits, splits in the order of this epoch."""
    num_splits = len(split_starts) - 1
    if not shuffle or num_splits < 2:
        return np.arange(split_starts[-1], dtype=np.int64)
    splits = random_state(_SPLITS, seed, epoch).permutation(num_splits)
    lengths = np.diff(split_starts)[splits]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    units: Ints = np.repeat(split_starts[:-1][splits], lengths) + within
    return units


def choose_lanes(*, num_ranks: int, batch_size: int, num_units: int, shuffle: bool, max_lanes_per_rank: int) -> int:
    """How many lanes, where the user does not say.

    Without shuffle, one per rank. Otherwise several per rank, so that a batch has rows from several places. As many as
    divide the batch: every lane then gives each batch the same number of rows, and no lane is shared by two ranks.
    """
    if not shuffle:
        return num_ranks
    most = max(1, min(max_lanes_per_rank, batch_size, num_units // num_ranks))
    if num_ranks == 1:
        return most
    return num_ranks * max(count for count in range(1, most + 1) if batch_size % count == 0)


def choose_window(*, num_lanes: int, batch_rows: int, buffer_rows: int) -> int:
    """Rows of a lane that are shuffled together, so that all lanes together shuffle about `buffer_rows`.

    Windows end where batches end, if such windows are not too large: then no batch needs two of them, which both would
    have to be in memory.
    """
    whole = max(1, buffer_rows // num_lanes)
    step = batch_rows // math.gcd(batch_rows, num_lanes)
    if step > whole and batch_rows % num_lanes:
        step = 1
    return max(step, whole // step * step)
