"""Clocks: when a pull may be answered, and when a push may be applied.

The clock of a worker is the number of steps whose gradients it has pushed. `staleness` bounds how far the workers may
be apart: 0 makes every step a round of all workers, `s` lets a worker be up to s steps ahead of the slowest, and None
does not look at clocks at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strata.errors import InvalidArgument
from strata.servers.table import native
from strata.servers.table.keys import unique

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.servers.table.keys import Keys, Unique
    from strata.servers.table.optimizers import Rows


class Clocks:
    """The clocks of all workers, as one server sees them."""

    def __init__(self, num_workers: int, *, staleness: int | None, start: int = 0) -> None:
        """`start`: the step of the checkpoint from which all workers continue."""
        if num_workers < 1:
            raise InvalidArgument(f"num_workers={num_workers} is less than 1", field="num_workers")
        if staleness is not None and staleness < 0:
            raise InvalidArgument(f"staleness={staleness} is negative; use 0, a number of steps, or None")
        self.staleness = staleness
        self._completed = [start] * num_workers

    @property
    def slowest(self) -> int:
        return min(self._completed)

    @property
    def spread(self) -> int:
        """Steps between the fastest and the slowest worker."""
        return max(self._completed) - min(self._completed)

    def of(self, rank: int) -> int:
        """Return how many steps this worker has pushed."""
        return self._completed[rank]

    def behind(self) -> list[int]:
        """Return the ranks that are behind the others: those for which pulls wait."""
        return [rank for rank, clock in enumerate(self._completed) if clock == self.slowest]

    def may_pull(self, clock: int) -> bool:
        """Whether a pull for the step after `clock` completed steps may be answered now."""
        return self.staleness is None or self.slowest >= clock - self.staleness

    def may_push(self, clock: int) -> bool:
        """Whether a push of step `clock` may be applied now.

        A worker whose batch needs no rows of a server does not wait for the others there, so its push may arrive before
        theirs of the step before.
        """
        return self.staleness != 0 or clock <= self.slowest + 1

    def advance(self, rank: int, clock: int) -> None:
        """Record the push that completes step `clock` of a worker.

        Raises:
            InvalidArgument: It is not the next step of this worker.
        """
        if clock != self._completed[rank] + 1:
            raise InvalidArgument(
                f"worker {rank} pushed step {clock} after step {self._completed[rank]}; steps are pushed in order",
                field="clock",
            )
        self._completed[rank] = clock

    def leap(self, rank: int, clock: int) -> None:
        """Set the clock of a worker that joins again after this server has lost its latest steps."""
        self._completed[rank] = clock


class Push(NamedTuple):
    """The gradients of one worker for one table and step; keys differ and may be none."""

    keys: Keys
    gradients: Rows


class Rounds:
    """Collects the pushes of a step from all workers, for `staleness=0`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pushes: dict[int, Push] = {}

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._num_workers) if rank not in self._pushes]

    def add(self, rank: int, push: Push) -> Push | None:
        """Add a push; return the mean of the round when it is complete, else None."""
        if rank in self._pushes:
            raise InvalidArgument(f"worker {rank} pushed twice in one round", field="rank")
        self._pushes[rank] = push
        if len(self._pushes) < self._num_workers:
            return None
        in_order = [self._pushes[rank] for rank in range(self._num_workers)]
        self._pushes = {}
        return mean(in_order)


def mean(pushes: Sequence[Push]) -> Push:
    """Return the mean gradient of each key, over all workers; those that did not push a key count as zero.

    Gradients are divided first and then added in the order of workers, as in torch's DDP, so the result does not depend
    on the order of arrival.
    """
    if len(pushes) == 1:
        return pushes[0]
    keys = np.concatenate([push.keys for push in pushes])
    gradients = np.concatenate([push.gradients for push in pushes])
    gradients /= np.float32(len(pushes))
    groups = unique(keys)
    return Push(groups.keys, sum_by_key(gradients, groups))


def sum_by_key(values: Rows, groups: Unique, out: Rows | None = None) -> Rows:
    """Return the sum of the rows of each key, added in the order of their positions; into `out` if given."""
    sums = np.empty((len(groups.keys), values.shape[1]), np.float32) if out is None else out
    if native.sum_rows is not None:
        native.sum_rows(values, groups.inverse, sums)
    elif len(groups.keys):
        sizes = np.diff(groups.starts, append=len(groups.positions))
        sums[...] = values[groups.positions[groups.starts]]
        for nth in range(1, int(sizes.max())):  # the nth occurrence of all keys that have one
            more = np.flatnonzero(sizes > nth)
            sums[more] += values[groups.positions[groups.starts[more] + nth]]
    return sums
