"""Where the batches of an epoch begin and end: every rank gets the same number of batches, and none is empty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

Tail = Literal["uneven", "pad", "drop"]


class PassSteps(Protocol):
    """The batches that one pass over an epoch delivers: what the iterator of a pass needs to know."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_batches(self) -> int: ...

    @property
    def dropped_rows(self) -> int: ...

    def bounds(self, batch: int) -> tuple[int, int]: ...

    def repeated_rows(self, batch: int, rank: int) -> int: ...

    def position_after(self, batch: int) -> int: ...


class EpochSteps(PassSteps, Protocol):
    """Batches by rows: what a schedule needs to know as well."""

    @property
    def batch_size(self) -> int:
        """The most rows of a batch on one rank; all but the last may have exactly as many."""
        ...

    @property
    def world_size(self) -> int: ...

    def spans(self, batch: int, end: int) -> tuple[Ints, Ints]: ...

    def run(self, batch: int, rank: int) -> tuple[int, int]: ...

    def runs(self, batch: int, end: int, rank: int) -> Ints: ...

    def num_until(self, batch: int, position: int) -> int: ...

    def padded_rows(self, batch: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The global batches of an epoch from a position on. A global batch is what all ranks read in one step."""

    num_rows: int
    """Rows of the whole epoch."""
    first: int
    """Position of the first row of the first batch."""
    batch_size: int
    """Rows per batch on each rank."""
    world_size: int
    tail: Tail
    num_batches: int = field(init=False)
    """The same on every rank; computed once because it is read at every batch."""

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise InvalidArgument(
                f"tail={self.tail!r} is unknown; use one of {', '.join(get_args(Tail))}", field="tail"
            )
        for name in ("batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be at least 1", field=name)
        assert 0 <= self.first <= self.num_rows
        object.__setattr__(self, "num_batches", self._count())

    @property
    def batch_rows(self) -> int:
        """Rows of a full global batch."""
        return self.batch_size * self.world_size

    @property
    def _rest(self) -> int:
        return (self.num_rows - self.first) % self.batch_rows

    def _count(self) -> int:
        full = (self.num_rows - self.first) // self.batch_rows
        if self._rest == 0 or self.tail == "drop":
            return full
        if self.tail == "uneven" and full and self._rest < self.world_size:
            return full  # too few rows for every rank: the batch before takes them
        return full + 1

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return the positions of a batch: the first, and one past the last."""
        start = self.first + batch * self.batch_rows
        is_last = batch == self.num_batches - 1
        return start, self.num_rows if is_last and self.tail != "drop" else start + self.batch_rows

    def spans(self, batch: int, end: int) -> tuple[Ints, Ints]:
        """Return `bounds` of the batches from `batch` up to, not including, `end`: their starts and their stops."""
        # Only the last batch of an epoch may have a different size.
        starts = self.bounds(batch)[0] + np.arange(end - batch, dtype=np.int64) * self.batch_rows
        return starts, np.append(starts[1:], self.bounds(end - 1)[1])

    def num_until(self, batch: int, position: int) -> int:
        """Return how many full batches, from this one on, end at this position or before it."""
        return (position - self.bounds(batch)[0]) // self.batch_rows

    def given_rows(self, batch: int) -> int:
        """Return how many rows all ranks together get, including repeated rows."""
        start, stop = self.bounds(batch)
        if self.tail == "pad":
            return self.batch_rows
        return max(stop - start, self.world_size)

    def padded_rows(self, batch: int) -> int:
        """Return how many of these rows are repeated: with `pad`, or if fewer rows than ranks are left."""
        start, stop = self.bounds(batch)
        return self.given_rows(batch) - (stop - start)

    @property
    def fewest_rows(self) -> int:
        """Rows of the smallest batch of a rank; there must be batches."""
        return self.given_rows(self.num_batches - 1) // self.world_size  # only the last one may be smaller

    @property
    def dropped_rows(self) -> int:
        """Rows at the end of the epoch that no rank gets."""
        return self._rest if self.tail == "drop" else 0

    def run(self, batch: int, rank: int) -> tuple[int, int]:
        """Return a rank's range of the batch's rows, sorted by lane; beyond the last row it wraps to the first."""
        given = self.given_rows(batch)
        return rank * given // self.world_size, (rank + 1) * given // self.world_size

    def repeated_rows(self, batch: int, rank: int) -> int:
        """Return how many rows of a rank's batch are repeated."""
        if batch != self.num_batches - 1 or not self.padded_rows(batch):
            return 0
        start, stop = self.bounds(batch)
        low, high = self.run(batch, rank)
        return high - max(low, min(high, stop - start))

    def runs(self, batch: int, end: int, rank: int) -> Ints:
        """Return `run` of the batches from `batch` up to, not including, `end`, one row per batch."""
        runs = np.tile(np.array([rank, rank + 1], dtype=np.int64) * self.batch_size, (end - batch, 1))
        runs[-1] = self.run(end - 1, rank)
        return runs

    def position_after(self, batch: int) -> int:
        """Return the position to resume at after this batch; after the last batch, the end of the epoch."""
        return self.num_rows if batch == self.num_batches - 1 else self.bounds(batch)[1]
