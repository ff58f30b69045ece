"""Which workers make no more steps, found from what the coordinator tells of them. No I/O and no clock here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from strata.coordinator.state.views import WorkerInfo

SILENT_S = 3.0
"""Who was not heard of for longer, and is no member then, has been given up and did not leave."""


class Hung(NamedTuple):
    ranks: tuple[int, ...]
    """One that hangs and, mostly, those that wait for it."""
    silent_s: float
    """For how long the longest of them has made no step."""


@dataclass(slots=True)
class StepWatch:
    """Watches the workers of one attempt. A worker is watched while it reports that it trains: from its first step on,
    or, with `is_start_watched`, from the moment at which the first rank joins. Then ranks that have not joined by that
    moment are watched, too. Imports before `strata.init()` do not count, and a script that never joins is not watched.
    """

    limit_s: float
    """0: a step may take any time."""
    is_start_watched: bool = False
    _joined_s: float | None = None
    """When the first rank was seen to have joined."""
    _since: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By rank: the last step, and when it was first seen."""
    _trained: set[int] = field(default_factory=set)
    """Ranks that have made a step."""
    _silent: set[int] = field(default_factory=set)

    def look(self, members: Mapping[int, WorkerInfo], running: Collection[int], *, now_s: float) -> Hung | None:
        """`members`: who is in the job, by rank. `running`: whose processes have not ended."""
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
        # Who has left by itself may take its time to end; who was silent until it was given up stands still.
        watched = (members.keys() | self._silent) & set(running)
        late_s = {rank: now_s - since_s for rank, (_, since_s) in self._since.items() if rank in watched}
        longest_s = max(late_s.values(), default=0.0)
        if not self.limit_s or longest_s <= self.limit_s:
            return None
        # Those who wait for a hung one stopped a moment after it: they are looked at together.
        return Hung(tuple(sorted(rank for rank, each_s in late_s.items() if each_s > self.limit_s / 2)), longest_s)
