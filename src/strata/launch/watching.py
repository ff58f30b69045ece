"""Which workers make no more steps, found from what the coordinator tells of them. No I/O and no clock here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from strata.coordinator.views import WorkerInfo

SILENT_S = 3.0
"""Who was not heard of for longer, and is no member then, has been given up and did not leave."""


class Hung(NamedTuple):
    ranks: tuple[int, ...]
    """One that hangs and, mostly, those that wait for it."""
    silent_s: float
    """For how long the longest of them has made no step."""


@dataclass(slots=True)
class StepWatch:
    """Of one attempt. A worker is watched from its first step on, while it says that it trains."""

    limit_s: float
    """0: a step may take any time."""
    _since: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By rank: the last step, and when it was first seen."""
    _silent: set[int] = field(default_factory=set)

    def look(self, members: Mapping[int, WorkerInfo], running: Collection[int], *, now_s: float) -> Hung | None:
        """`members`: who is in the job, by rank. `running`: whose processes have not ended."""
        for rank, worker in members.items():
            last = self._since.get(rank)
            if last is None or worker.step != last[0] or worker.state != "TRAINING":
                self._since[rank] = (worker.step, now_s)
            (self._silent.add if worker.silent_s > SILENT_S else self._silent.discard)(rank)
        # Who has left by itself may take its time to end; who was silent until it was given up stands still.
        watched = (members.keys() | self._silent) & set(running)
        late_s = {rank: now_s - since_s for rank, (_, since_s) in self._since.items() if rank in watched}
        longest_s = max(late_s.values(), default=0.0)
        if not self.limit_s or longest_s <= self.limit_s:
            return None
        # Those who wait for a hung one stopped a moment after it: they are looked at together.
        return Hung(tuple(sorted(rank for rank, each_s in late_s.items() if each_s > self.limit_s / 2)), longest_s)
