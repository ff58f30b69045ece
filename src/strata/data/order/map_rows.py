"""The row order of a map-style dataset, and the position in its epoch. Pure: no torch, no dataset.

A map-style dataset has random access, so a shuffle is one permutation of all rows, and the n-th row of an epoch is a
function of (number of rows, seed, epoch, n) alone. The permutation is computed, not stored: a Feistel network over a
rectangle of a × b ≥ n cells. As an array, three hundred million rows would need 2.4 GB and 20 s per rank and epoch;
computed, any batch of any epoch costs microseconds, and so does a resume.

Ranks, batches and the tail follow `steps.py`, as for files: a global batch is a range of positions, cut into one run
per rank. The state is therefore one position, the same on all ranks, and any number of ranks can resume from it.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from strata.data.order.cursor import MAX_COUNT, check_version
from strata.data.order.order import MAX_SEED
from strata.data.order.steps import Steps
from strata.errors import InvalidArgument, PlanChanged
from strata.splitmix import finalize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from strata.data.order.steps import Tail

    Ints = npt.NDArray[np.int64]

VERSION = 1
_ROUNDS = 8
"""Rounds of the Feistel network: each half of a number is mixed into the other four times."""
_ROWS_AT_ONCE = 32_768
"""Rows whose order is computed together: fewer spend their time in numpy's calls, more delay the first batch."""
_WORD = 2**32 - 1
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = 0xCA01F9DD, 0x4973F715
"""Constants of numpy's `SeedSequence`."""
_ORDER, _SEEDS = 2, 3
"""The first part of a random stream's key, so that no two purposes share a stream; `order.py` uses 0 and 1."""


# -- order -------------------------------------------------------------------------------------------------------------


def permuted(positions: Ints, num_rows: int, *, seed: int, epoch: int) -> Ints:
    """Return the rows at these positions of the epoch's permutation of `num_rows` rows."""
    columns = np.uint64(math.isqrt(max(num_rows - 1, 0)) + 1)
    height = np.uint64(-(-num_rows // int(columns)))
    keys = np.random.SeedSequence((_ORDER, seed, epoch)).generate_state(_ROUNDS, np.uint64)
    rows = _mix(positions.astype(np.uint64), columns, height, keys)
    # The rectangle has up to `columns` - 1 cells more than there are rows. A number that lands on such a cell is mixed
    # again until it lands on a row. Mixing is one-to-one, so no two numbers end on the same row.
    while (outside := rows >= num_rows).any():
        rows[outside] = _mix(rows[outside], columns, height, keys)
    found: Ints = rows.astype(np.int64)
    return found


def _mix(cells: npt.NDArray[np.uint64], columns: np.uint64, height: np.uint64, keys: Any) -> npt.NDArray[np.uint64]:
    """Permute the cells. Each round adds a hash of one coordinate to the other, which is reversible."""
    y = cells // columns
    x = cells - y * columns
    for number, key in enumerate(keys):
        if number % 2:
            _add(x, finalize(y + key), columns)
        else:
            _add(y, finalize(x + key), height)
    y *= columns
    y += x
    return y


def _add(values: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64], modulus: np.uint64) -> None:
    """Add hashes to numbers below `modulus`, in place and modulo `modulus`. Overwrites the hashes."""
    # numpy divides by one number with SIMD, but computes remainders one by one.
    quotients = hashes // modulus
    quotients *= modulus
    hashes -= quotients
    values += hashes
    # The smaller one of the sum and the sum minus `modulus`: below zero, unsigned numbers wrap to huge ones.
    np.subtract(values, modulus, out=hashes)
    np.minimum(values, hashes, out=values)


# -- state -------------------------------------------------------------------------------------------------------------


class MapCursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole state of a loader over a map-style dataset."""

    version: int
    kind: Literal["map"] = "map"
    num_rows: int
    seed: int
    shuffle: bool
    epoch: int
    position: int
    """Rows of the epoch delivered so far, summed over all ranks."""

    def to_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state


def read_map_cursor(state: Mapping[str, Any]) -> MapCursor:
    """Parse the `state_dict()` of a loader over a map-style dataset.

    Raises:
        InvalidArgument: It is not the state of such a loader.
        PlanChanged: A newer version of Strata wrote it.
    """
    check_version(state, newest=VERSION)
    try:
        cursor = msgspec.convert(dict(state), MapCursor, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(
            f"this is not the state of a loader over a map-style dataset ({error}); if another loader saved it, give "
            "each loader its own name",
            field="state",
        ) from error
    limits = {"num_rows": MAX_COUNT, "seed": MAX_SEED, "epoch": MAX_COUNT, "position": cursor.num_rows}
    for name, limit in limits.items():
        count = getattr(cursor, name)
        if not 0 <= count <= limit:
            raise InvalidArgument(f"the state has {name}={count}, which is not from 0 to {limit}", field="state")
    return cursor


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of one global batch."""

    indices: Ints
    key: tuple[int, int, int]
    """The shuffle seed, the epoch and the first position."""

    @property
    def rows(self) -> list[int]:
        """The indices as a list, which most datasets expect."""
        found: list[int] = self.indices.tolist()
        return found

    @property
    def seed(self) -> int:
        """Seeds the random numbers drawn while these rows are read."""
        return batch_seed(*self.key)


class MapRows:
    """Selects the rows of one rank from a map-style dataset, and keeps the position in the epoch.

    `begin()` starts a pass. `delivered()` advances the position: the loader calls it when the training loop gets a
    batch, not when a worker prefetches one.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        shuffle: bool,
        shuffle_seed: int,
        tail: Tail = "uneven",
    ) -> None:
        """
        Raises:
            InvalidArgument: A number is out of range.
        """
        if not 0 <= operator.index(shuffle_seed) <= MAX_SEED:
            raise InvalidArgument(f"shuffle_seed={shuffle_seed} must be from 0 to {MAX_SEED}", field="shuffle_seed")
        self.num_rows = num_rows
        self._rank = rank
        self._world_size = world_size
        self._batch_size = operator.index(batch_size)
        self._shuffle = bool(shuffle)
        self._shuffle_seed = shuffle_seed
        self._tail = tail
        self._cursor = self._start_of(0)
        self._steps = self.steps()
        self._has_moved = False
        """Whether the cursor has advanced since it was set. A pass without a delivered batch starts over."""
        self._num_passes = 0
        """Identifies the current pass."""

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def position(self) -> int:
        return self._cursor.position

    @property
    def is_last(self) -> bool:
        """Whether the last delivered batch ends the epoch."""
        return self._cursor.position == self.num_rows

    @property
    def epoch_seed(self) -> int:
        """Seeds what is drawn once per epoch."""
        return seed_of(self._cursor.seed, self.epoch)

    def steps(self, first: int = 0) -> Steps:
        """Return the batches of the epoch from this position on.

        Raises:
            InvalidArgument: The batch size or the tail is invalid.
        """
        return Steps(
            num_rows=self.num_rows,
            first=first,
            batch_size=self._batch_size,
            world_size=self._world_size,
            tail=self._tail,
        )

    def begin(self) -> int:
        """Start a pass and return its number.

        The pass resumes from a loaded state; otherwise it starts this epoch, or the next if this one is complete.
        """
        if self._has_moved:
            self._set(self._start_of(self.epoch + self.is_last))
        self._steps = self.steps(self.position)
        self._num_passes += 1
        return self._num_passes

    def shares(self) -> Iterator[Share]:
        """Yield this rank's share of every batch of the current pass. May run ahead of delivery."""
        return _shares(self._steps, self._cursor, self._rank)

    @property
    def num_batches(self) -> int:
        """Batches of the current pass, the same on every rank."""
        return self._steps.num_batches

    def is_current(self, number: int) -> bool:
        return number == self._num_passes

    def delivered(self, batch: int) -> None:
        """Record that the training loop received this batch of the pass."""
        self._move(self._steps.position_after(batch))

    def ended(self) -> None:
        """Record that the pass is complete, including one without batches."""
        self._move(self.num_rows)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read this epoch, from its start or from the position of a loaded state.

        Some frameworks call it after the pass has started and before they take a batch; the pass then continues.
        """
        if operator.index(epoch) < 0:
            raise InvalidArgument(f"epoch={epoch} must be 0 or more", field="epoch")
        if self._has_moved or epoch != self.epoch:
            self._num_passes += 1
            self._set(self._start_of(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on all ranks after the same number of batches."""
        return self._cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """Resume with exactly the rows that were not delivered, on any number of ranks.

        `on_change="accept"` resumes at this position even if the number of rows of the dataset has changed.

        Raises:
            PlanChanged: The number of rows of the dataset has changed.
            InvalidArgument: It is not the state of such a loader.
        """
        if on_change not in ("refuse", "accept"):
            raise InvalidArgument(f"on_change={on_change!r} is unknown; use 'refuse' or 'accept'", field="on_change")
        cursor = read_map_cursor(state)
        if cursor.num_rows != self.num_rows:
            if on_change == "refuse":
                raise PlanChanged(
                    f"the state at row {cursor.position} of epoch {cursor.epoch} belongs to a dataset of "
                    f"{cursor.num_rows} rows, but this one has {self.num_rows}. Restore the rows, start an epoch with "
                    "set_epoch(), or resume at the same position of the new order (which may miss or repeat rows) "
                    "with load_state_dict(state, on_change='accept')"
                )
            fresh = self._start_of(cursor.epoch)
            cursor = msgspec.structs.replace(fresh, position=min(cursor.position, self.num_rows))
        self._num_passes += 1
        self._set(cursor)

    def _set(self, cursor: MapCursor) -> None:
        self._cursor, self._has_moved = cursor, False

    def _move(self, position: int) -> None:
        self._cursor, self._has_moved = msgspec.structs.replace(self._cursor, position=position), True

    def _start_of(self, epoch: int) -> MapCursor:
        return MapCursor(
            version=VERSION,
            num_rows=self.num_rows,
            seed=self._shuffle_seed,
            shuffle=self._shuffle,
            epoch=epoch,
            position=0,
        )


def _shares(steps: Steps, cursor: MapCursor, rank: int) -> Iterator[Share]:
    """Yield shares, computed for several batches at a time: for a small batch the numpy calls would dominate."""
    at_once = max(1, _ROWS_AT_ONCE // steps.batch_size)
    for first in range(0, steps.num_batches, at_once):
        batches = range(first, min(first + at_once, steps.num_batches))
        positions = [_positions(steps, batch, rank) for batch in batches]
        rows = np.concatenate(positions)
        if cursor.shuffle:
            rows = permuted(rows, cursor.num_rows, seed=cursor.seed, epoch=cursor.epoch)
        cuts = np.cumsum([len(each) for each in positions[:-1]], dtype=np.int64)
        for own, each in zip(positions, np.split(rows, cuts), strict=True):
            yield Share(each, (cursor.seed, cursor.epoch, int(own[0])))


def _positions(steps: Steps, batch: int, rank: int) -> Ints:
    """Return the positions of a rank's share of a global batch. Padding repeats the batch from its first row."""
    start, stop = steps.bounds(batch)
    low, high = steps.run(batch, rank)
    positions: Ints = start + np.arange(low, high, dtype=np.int64) % (stop - start)
    return positions


# -- seeds -------------------------------------------------------------------------------------------------------------


def seed_of(*key: int) -> int:
    """Return a 64-bit seed. The key includes its length, so no key is a prefix of another."""
    return int(np.random.SeedSequence((_SEEDS, len(key), *key)).generate_state(1, np.uint64)[0])


def batch_seed(seed: int, epoch: int, position: int) -> int:
    """Return `seed_of(seed, epoch, position)` in a fraction of the time: most of the work is the same in an epoch.

    A `SeedSequence` mixes the 32-bit words of its key into a pool of four words, one word after the other. The pool of
    the key without the position is kept, and the position is mixed into it here. numpy guarantees the algorithm.
    """
    pool, factor = _pool_of(seed, epoch)
    for word in (position,) if position <= _WORD else (position & _WORD, position >> 32):
        mixed = []
        for each in pool:
            hashed, factor = _hash(word, factor, _MULT_A)
            combined = _MIX_LEFT * each - _MIX_RIGHT * hashed & _WORD
            mixed.append(combined ^ combined >> 16)
        pool = mixed
    low, factor = _hash(pool[0], _INIT_B, _MULT_B)
    high, _ = _hash(pool[1], factor, _MULT_B)
    return high << 32 | low


def _hash(word: int, factor: int, multiplier: int) -> tuple[int, int]:
    """Return the hash of a word, and the factor for the next one."""
    following = factor * multiplier & _WORD
    hashed = (word ^ factor) * following & _WORD
    return hashed ^ hashed >> 16, following


@functools.lru_cache(maxsize=16)
def _pool_of(seed: int, epoch: int) -> tuple[list[int], int]:
    """Return the pool of a key that lacks only the position, and the factor with which its next word is hashed."""
    key = (_SEEDS, 3, seed, epoch)
    num_words = sum(max(-(-number.bit_length() // 32), 1) for number in key)
    # The factor changes with every hash: 4 of the first words, 12 of the pool itself, and 4 of each further word.
    factor = _INIT_A * pow(_MULT_A, 4 * num_words, _WORD + 1) & _WORD
    return np.random.SeedSequence(key).pool.tolist(), factor
