"""How the ranks of a job spent the last minutes, from the time use that they measure. Pure.

A report holds sums since the first step of its process, so the difference of two reports is what happened between them.
Waits are cut to the time that passed, as in the ledger: whatever a worker sends, the parts add up.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.coordinator.state.time_use import TimeUse
    from strata.dashboard.sample import Sample, WorkerSample

SPACING_S = 5.0
"""Seconds between two reports that are kept."""
NUM_CELLS = 36
"""Differences of a process that are kept: three minutes."""
MAX_PROCESSES = 4_096
"""Processes whose reports are kept; ranks beyond this have none."""
WINDOW_CELLS = 6
"""Cells that make up the recent past: half a minute."""
MIN_RECENT_S = 2 * SPACING_S
"""Less measured time is no basis for a statement."""


class Spent(NamedTuple):
    """A span of time in its parts, which add up to `measured_s`."""

    measured_s: float
    computing_s: float
    data_s: float
    checkpoint_s: float
    restore_s: float
    blocked_s: float
    """At barriers and in collectives, as far as these are measured."""
    is_collective_known: bool
    """False: waits in collectives of torch are part of computing."""

    def share(self, seconds: float) -> float:
        return seconds / self.measured_s


class Report(NamedTuple):
    at_s: float
    """Wall time of the coordinator."""
    step: int
    use: TimeUse


class Cell(NamedTuple):
    """What a process did between two reports."""

    began_at_s: float
    ended_at_s: float
    spent: Spent


class UseHistory:
    """The newest reports of each process; those of processes that left are forgotten."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str, int], deque[Report]] = {}

    def update(self, sample: Sample) -> None:
        before, self._of = self._of, {}
        for job in sample.jobs.values():
            for worker in job.ranks:
                if worker.time_use is None or len(self._of) == MAX_PROCESSES:
                    continue
                key = (job.job_id, worker.worker_id, worker.incarnation)
                reports = self._of[key] = before.get(key) or deque(maxlen=NUM_CELLS + 1)
                at_s = sample.at_s - max(sample.monotonic_s - worker.time_use_at_s, 0.0)
                if not reports or at_s - reports[-1].at_s >= SPACING_S:
                    reports.append(Report(at_s, worker.step, worker.time_use))

    def reports(self, job_id: str, worker: WorkerSample) -> Sequence[Report]:
        """Return the reports of a process, oldest first."""
        return tuple(self._of.get((job_id, worker.worker_id, worker.incarnation), ()))


def spent(before: TimeUse, after: TimeUse) -> Spent | None:
    """Return what happened between two reports of one process; None if no time passed."""
    measured_s = left_s = after.measured_s - before.measured_s
    if measured_s <= 0:
        return None
    parts: list[float] = []
    for sum_s in (
        after.data_s - before.data_s,
        after.checkpoint_s - before.checkpoint_s,
        after.restore_s - before.restore_s,
        after.barrier_s - before.barrier_s + (after.collective_s or 0.0) - (before.collective_s or 0.0),
    ):
        part_s = min(max(sum_s, 0.0), left_s)
        parts.append(part_s)
        left_s -= part_s
    data_s, checkpoint_s, restore_s, blocked_s = parts
    return Spent(
        measured_s=measured_s,
        computing_s=left_s,
        data_s=data_s,
        checkpoint_s=checkpoint_s,
        restore_s=restore_s,
        blocked_s=blocked_s,
        is_collective_known=before.collective_s is not None and after.collective_s is not None,
    )


def cells(reports: Sequence[Report]) -> list[Cell]:
    """Return what a process did between its reports, oldest first."""
    found = [(before, after, spent(before.use, after.use)) for before, after in pairwise(reports)]
    return [Cell(before.at_s, after.at_s, each) for before, after, each in found if each is not None]


def recent(reports: Sequence[Report]) -> Spent | None:
    """Return the last half minute as one span; None if too little of it was measured."""
    newest = reports[-1 - WINDOW_CELLS :]
    found = spent(newest[0].use, newest[-1].use) if len(newest) > 1 else None
    return found if found is not None and found.measured_s >= MIN_RECENT_S else None
