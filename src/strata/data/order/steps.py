"""Where batches begin and end: the same number of them on every rank, none of them empty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from strata.errors import InvalidArgument

Tail = Literal["uneven", "pad", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The global batches of an epoch from a position on. A global batch is what all ranks together get in one step."""

    num_rows: int
    """Of the whole epoch."""
    first: int
    """The position of the first batch's first row."""
    batch_size: int
    """Of one rank."""
    num_ranks: int
    tail: Tail
    num_batches: int = field(init=False)
    """The same on every rank; asked for at every batch, so it is worked out once."""

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise InvalidArgument(f"tail={self.tail!r}; use one of {', '.join(get_args(Tail))}", field="tail")
        for name in ("batch_size", "num_ranks"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)} must be at least 1", field=name)
        assert 0 <= self.first <= self.num_rows
        object.__setattr__(self, "num_batches", self._count())

    @property
    def batch_rows(self) -> int:
        """Of a whole global batch."""
        return self.batch_size * self.num_ranks

    @property
    def _rest(self) -> int:
        return (self.num_rows - self.first) % self.batch_rows

    def _count(self) -> int:
        full = (self.num_rows - self.first) // self.batch_rows
        if self._rest == 0 or self.tail == "drop":
            return full
        if self.tail == "uneven" and full and self._rest < self.num_ranks:
            return full  # too few rows to give every rank one: the batch before takes them
        return full + 1

    def bounds(self, batch: int) -> tuple[int, int]:
        """Its positions: the first, and one past the last."""
        start = self.first + batch * self.batch_rows
        is_last = batch == self.num_batches - 1
        return start, self.num_rows if is_last and self.tail != "drop" else start + self.batch_rows

    def given_rows(self, batch: int) -> int:
        """How many rows all ranks together get, repeated ones included."""
        start, stop = self.bounds(batch)
        if self.tail == "pad":
            return self.batch_rows
        return max(stop - start, self.num_ranks)

    def padded_rows(self, batch: int) -> int:
        """How many of them are repeated: with `pad`, or when there are fewer rows than ranks in all that is left."""
        start, stop = self.bounds(batch)
        return self.given_rows(batch) - (stop - start)

    @property
    def dropped_rows(self) -> int:
        return self._rest if self.tail == "drop" else 0

    def run(self, batch: int, rank: int) -> tuple[int, int]:
        """Which of the batch's rows, sorted by lane, a rank gets. Beyond the last they begin again with the first."""
        given = self.given_rows(batch)
        return rank * given // self.num_ranks, (rank + 1) * given // self.num_ranks

    def position_after(self, batch: int) -> int:
        """Where to go on when this batch has been delivered; the end of the epoch after the last one."""
        return self.num_rows if batch == self.num_batches - 1 else self.bounds(batch)[1]
