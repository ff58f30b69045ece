"""The watchdog of a run finds hung workers: those that have stopped making steps, by the steps in their heartbeats.

It has no I/O and no clock: times are arguments. The agent calls it, and the supervisor decides what follows. A job
without an agent is watched by the coordinator instead (`step_timeout_s`, `coordinator/state/membership.py`). A worker
that makes steps counts as healthy, however slow it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from strata.coordinator.state.views import WorkerInfo

SILENT_S = 3.0
"""A worker that was silent for longer and is no longer a member was removed; it did not deregister."""


class Hung(NamedTuple):
    ranks: tuple[int, ...]
    """The rank that hangs and, usually, those that wait for it."""
    silent_s: float
    """Longest time without a step among them."""


@dataclass(slots=True)
class StepWatch:
    """Watch the workers of one attempt.

    A worker is watched from its first step on, while it reports that it trains. With `is_start_watched`, all ranks are
    watched from the moment at which the first one joins. Imports before `strata.init()` do not count, and a script that
    never joins is not watched.
    """

    limit_s: float
    """Longest allowed time without a step; 0: no limit."""
    is_start_watched: bool = False
    _joined_s: float | None = None
    """Time at which the first rank had joined."""
    _since: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Last step of each rank, and the time at which it was first seen."""
    _trained: set[int] = field(default_factory=set)
    """Ranks that have made a step."""
    _silent: set[int] = field(default_factory=set)

    def expect(self, ranks: Iterable[int], *, now_s: float) -> None:
        """These ranks are started now, later than the others."""
        for rank in ranks:
            self._since[rank] = (0, now_s)
            self._trained.discard(rank)

    def look(self, members: Mapping[int, WorkerInfo], running: Collection[int], *, now_s: float) -> Hung | None:
        """Return the hung ranks, if any. `members`: the members of the job, by rank; `running`: ranks whose processes
        have not exited.
        """
        if self.is_start_watched and self._joined_s is None and members:
            self._joined_s = now_s
        for rank, worker in members.items():
            is_training = worker.state == "TRAINING"
            if self._joined_s is not None and not is_training and rank not in self._trained:
                self._since.setdefault(rank, (worker.step, self._joined_s))
            elif not is_training or rank not in self._trained or worker.step != self._since[rank][0]:
                self._since[rank] = (worker.step, now_s)
            if is_training:
                self._trained.add(rank)
            (self._silent.add if worker.silent_s > SILENT_S else self._silent.discard)(rank)
        if self._joined_s is not None and members:
            for rank in set(running) - self._since.keys():
                self._since[rank] = (0, self._joined_s)
                self._silent.add(rank)
        # A worker that deregistered may take its time to exit; one that was silent until it was removed hangs.
        watched = (members.keys() | self._silent) & set(running)
        late_s = {rank: now_s - since_s for rank, (_, since_s) in self._since.items() if rank in watched}
        longest_s = max(late_s.values(), default=0.0)
        if not self.limit_s or longest_s <= self.limit_s:
            return None
        # Ranks that wait for a hung one stopped a moment after it: report them together.
        return Hung(tuple(sorted(rank for rank, each_s in late_s.items() if each_s > self.limit_s / 2)), longest_s)
