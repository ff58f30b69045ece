"""Which rows of a map-style dataset each rank gets, and where its epoch stands. Pure: no torch, no dataset.

A map-style dataset has random access, so a shuffle is one permutation of all rows, and the n-th row of an epoch is a
function of (number of rows, seed, epoch, n) alone. The permutation is computed, not stored: a Feistel network over a
rectangle of a × b ≥ n cells. Three hundred million rows would need 2.4 GB and 20 s per rank and epoch as an array; like
this, any batch of any epoch costs microseconds, and so does a resume.

Ranks, batches and the tail are those of files (`steps.py`): a global batch is a range of positions, cut into one run
per rank. So the state is one position, the same on all ranks, and any number of ranks goes on from it.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from strata.data.order.steps import Tail

    Ints = npt.NDArray[np.int64]

VERSION = 1
_ROUNDS = 8
"""Each half of a number is stirred into the other four times."""
_ROWS_AT_ONCE = 4_096
_ORDER, _SEEDS = 2, 3
"""What a random stream is for, so that no two share one; `order.py` has 0 and 1."""


# -- order -------------------------------------------------------------------------------------------------------------


def permuted(positions: Ints, num_rows: int, *, seed: int, epoch: int) -> Ints:
    """The rows at these positions of the epoch's permutation of `num_rows` rows."""
    columns = np.uint64(math.isqrt(max(num_rows - 1, 0)) + 1)
    height = np.uint64(-(-num_rows // int(columns)))
    keys = np.random.SeedSequence((_ORDER, seed, epoch)).generate_state(_ROUNDS, np.uint64)
    rows = _stirred(positions.astype(np.uint64), columns, height, keys)
    # The rectangle has fewer cells too many than it has columns. Who lands there goes on until it lands on a row;
    # since stirring is one-to-one, no two end on the same.
    while (outside := rows >= num_rows).any():
        rows[outside] = _stirred(rows[outside], columns, height, keys)
    found: Ints = rows.astype(np.int64)
    return found


def _stirred(cells: npt.NDArray[np.uint64], columns: np.uint64, height: np.uint64, keys: Any) -> Any:
    """Each round adds to one coordinate a hash of the other, which can be undone: so no two cells become one."""
    y, x = np.divmod(cells, columns)
    for number, key in enumerate(keys):
        if number % 2:
            x = (x + _hashed(y, key) % columns) % columns
        else:
            y = (y + _hashed(x, key) % height) % height
    return y * columns + x


def _hashed(values: Any, key: np.uint64) -> Any:
    """The finalizer of splitmix64."""
    values = values + key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
    """Rows of the epoch that all ranks together have been given."""

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made


def read_map_cursor(state: Mapping[str, Any]) -> MapCursor:
    """
    Raises:
        InvalidArgument: It is not the state of such a loader.
        PlanChanged: A newer version of Strata wrote it.
    """
    check_version(state, newest=VERSION)
    try:
        cursor = msgspec.convert(dict(state), MapCursor, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(
            f"this is not the state of a loader over a map-style dataset ({error}); was it saved by another kind of "
            "loader? Give each loader its own name",
            field="state",
        ) from error
    limits = {"num_rows": MAX_COUNT, "seed": MAX_SEED, "epoch": MAX_COUNT, "position": cursor.num_rows}
    for name, limit in limits.items():
        count = getattr(cursor, name)
        if not 0 <= count <= limit:
            raise InvalidArgument(f"the state's {name} is {count}; it must be from 0 to {limit}", field="state")
    return cursor


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of one global batch."""

    rows: list[int]
    seed: int
    """For random numbers that are drawn while these rows are read: of the epoch and the share's first position."""


class MapRows:
    """Deals out the rows of a map-style dataset to one rank, and keeps the place of the epoch.

    A pass is taken off `begin()`; the place moves by `delivered()`, which the loader calls when the training loop gets
    a batch, not when a worker prefetches it.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        tail: Tail = "uneven",
    ) -> None:
        """
        Raises:
            InvalidArgument: A number is out of its range.
        """
        if not 0 <= operator.index(seed) <= MAX_SEED:
            raise InvalidArgument(f"shuffle_seed={seed} must be from 0 to {MAX_SEED}", field="shuffle_seed")
        self.num_rows = num_rows
        self._rank = rank
        self._world_size = world_size
        self._batch_size = operator.index(batch_size)
        self._shuffle = bool(shuffle)
        self._seed = seed
        self._tail = tail
        self._cursor = self._start_of(0)
        self._steps = self.steps()
        self._has_moved = False
        """Since the cursor was set: a pass that nothing was taken from begins again where it began."""
        self._num_passes = 0
        """Tells the pass under way from those before it."""

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def position(self) -> int:
        return self._cursor.position

    @property
    def is_last(self) -> bool:
        """Whether the batch that was delivered last ends the epoch."""
        return self._cursor.position == self.num_rows

    @property
    def epoch_seed(self) -> int:
        """For what is drawn once an epoch."""
        return _seed(self._cursor.seed, self.epoch)

    def steps(self, first: int = 0) -> Steps:
        """The batches of the epoch from this position on.

        Raises:
            InvalidArgument: The batch size or the tail is none.
        """
        return Steps(
            num_rows=self.num_rows,
            first=first,
            batch_size=self._batch_size,
            num_ranks=self._world_size,
            tail=self._tail,
        )

    def begin(self) -> int:
        """Goes on from a loaded state; otherwise begins the epoch: the next one if this one was read to its end.
        Returns the number of the pass.
        """
        if self._has_moved:
            self._set(self._start_of(self.epoch + self.is_last))
        self._steps = self.steps(self.position)
        self._num_passes += 1
        return self._num_passes

    def shares(self) -> Iterator[Share]:
        """This rank's part of every batch of the pass that has begun. Safe to run ahead of what is delivered."""
        return _shares(self._steps, self._cursor, self._rank)

    @property
    def num_batches(self) -> int:
        """Of the pass that has begun; the same on every rank."""
        return self._steps.num_batches

    def is_current(self, number: int) -> bool:
        return number == self._num_passes

    def delivered(self, batch: int) -> None:
        """The training loop has this batch of the pass."""
        self._move(self._steps.position_after(batch))

    def ended(self) -> None:
        """The pass has come to its end, also one without batches."""
        self._move(self.num_rows)

    def set_epoch(self, epoch: int) -> None:
        """The next pass reads this epoch, from its beginning, or from where a state that was loaded says.

        Some frameworks call it when the pass has begun and before they take a batch; then it goes on.
        """
        if operator.index(epoch) < 0:
            raise InvalidArgument(f"epoch={epoch} must not be negative", field="epoch")
        if self._has_moved or epoch != self.epoch:
            self._num_passes += 1
            self._set(self._start_of(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks after the same number of batches."""
        return self._cursor.to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        """The next pass goes on with exactly the rows that had not been delivered, on any number of ranks.

        `on_change="accept"`: goes on at this position also if the dataset has another number of rows than it had.

        Raises:
            PlanChanged: The dataset has another number of rows.
            InvalidArgument: It is not the state of such a loader.
        """
        if on_change not in ("refuse", "accept"):
            raise InvalidArgument(f"on_change={on_change!r}; use 'refuse' or 'accept'", field="on_change")
        cursor = read_map_cursor(state)
        if cursor.num_rows != self.num_rows:
            if on_change == "refuse":
                raise PlanChanged(
                    f"the state at row {cursor.position} of epoch {cursor.epoch} belongs to a dataset of "
                    f"{cursor.num_rows} rows, and this one has {self.num_rows}. Bring back the rows that it had, begin "
                    "an epoch anew with set_epoch(), or go on at the same position of the new order (rows may be "
                    "missed or repeated) with load_state_dict(state, on_change='accept')"
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
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=epoch,
            position=0,
        )


def _shares(steps: Steps, cursor: MapCursor, rank: int) -> Iterator[Share]:
    """Rows of several batches at once: numpy takes longer to be called than to work out a small batch."""
    at_once = max(1, _ROWS_AT_ONCE // steps.batch_size)
    for first in range(0, steps.num_batches, at_once):
        batches = range(first, min(first + at_once, steps.num_batches))
        positions = [_positions(steps, batch, rank) for batch in batches]
        rows = np.concatenate(positions)
        if cursor.shuffle:
            rows = permuted(rows, cursor.num_rows, seed=cursor.seed, epoch=cursor.epoch)
        cuts = np.cumsum([len(each) for each in positions[:-1]], dtype=np.int64)
        for own, each in zip(positions, np.split(rows, cuts), strict=True):
            yield Share(each.tolist(), _seed(cursor.seed, cursor.epoch, int(own[0])))


def _positions(steps: Steps, batch: int, rank: int) -> Ints:
    """Of a rank's share of a global batch. What is padded begins again with the batch's first."""
    start, stop = steps.bounds(batch)
    low, high = steps.run(batch, rank)
    positions: Ints = start + np.arange(low, high, dtype=np.int64) % (stop - start)
    return positions


def _seed(*key: int) -> int:
    """64 bits; one key is never the beginning of another with the same stream of numbers."""
    return int(np.random.SeedSequence((_SEEDS, len(key), *key)).generate_state(1, np.uint64)[0])
