"""Steps per second of each rank, from samples.

The rate counts from the times at which steps were reported, not from the times of the samples, so a job with steps of
three seconds has a steady rate and not 0, 0, 1. A rank that makes no step for longer than its steps usually take slows
down from then on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.dashboard.sample import JobSample, Sample, WorkerSample

WINDOW_S = 10.0
MAX_POINTS = 16
"""Changes of a step that are remembered: one for each second of the window, and some before it."""
PATIENCE = 2.0
"""A rank is late once it has made no step for this many times its usual step time."""

Key = tuple[str, str, int]
"""Job, worker and incarnation."""


class StepRate:
    """The rate of one rank."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=MAX_POINTS)

    def add(self, step: int, progress_s: float) -> None:
        if self._seen:
            last_s, last_step = self._seen[-1]
            if step == last_step:
                return
            if step < last_step:  # set back to a checkpoint
                self._seen.clear()
            elif progress_s <= last_s:
                return
        self._seen.append((progress_s, step))
        while len(self._seen) > 2 and progress_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def per_s(self, now_s: float) -> float | None:
        """Return the rate, or None before two steps were seen."""
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        took_s = (last_s - first_s) / (last - first)
        is_late = now_s - last_s > max(PATIENCE * took_s, PATIENCE)
        return (last - first) / ((now_s if is_late else last_s) - first_s)


class StepRates:
    """The rates of all ranks; those of ranks that left are forgotten."""

    def __init__(self) -> None:
        self._of: dict[Key, StepRate] = {}

    def update(self, sample: Sample) -> None:
        before, self._of = self._of, {}
        for job in sample.jobs.values():
            for worker in job.workers:
                key = (job.job_id, worker.worker_id, worker.incarnation)
                rate = self._of[key] = before.get(key) or StepRate()
                if worker.step:  # 0 until its first report; the steps that it restores are not progress
                    rate.add(worker.step, worker.progress_s)

    def per_s(self, job_id: str, worker: WorkerSample, now_s: float) -> float | None:
        found = self._of.get((job_id, worker.worker_id, worker.incarnation))
        return None if found is None else found.per_s(now_s)

    def of_job(self, job: JobSample, now_s: float) -> dict[str, float]:
        """Return the rates of a job's ranks by worker, as far as they are known."""
        found = ((worker.worker_id, self.per_s(job.job_id, worker, now_s)) for worker in job.ranks)
        return {worker_id: rate for worker_id, rate in found if rate is not None}
