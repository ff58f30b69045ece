"""Which rank the others wait for, and why; only where that follows from what the ranks measured. Pure.

In a synchronous strategy all ranks make steps at the pace of the slowest, so step rates show nothing. What differs is
the time that each spends waiting for the others: the culprit is the rank that waits least. Its excess of data waits,
saves or computing over the median names the cause.

Waits in collectives of torch that a worker cannot measure, such as those on accelerators, are part of computing. An
excess of computing is no evidence in that case; an excess of data waits or saves is, if the others wait at barriers.
Waits for a loader that measures none are part of computing, too. The verdict then leaves open which of the two it is.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Literal, NamedTuple

from strata.dashboard.uses import MIN_RECENT_S, WINDOW_CELLS, recent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.dashboard.sample import JobSample, Sample
    from strata.dashboard.uses import Spent, UseHistory

StragglerCause = Literal["data", "compute", "checkpoint"]

MIN_BLOCKED = 0.2
"""Share of its time that the median of the other ranks must wait; less is normal."""
LEAST_RATIO = 0.5
"""The culprit waits less than this fraction of the rank that waits least after it."""
EXPLAINED = 0.5
"""A cause must explain this fraction of the difference in waiting."""
_CAUSES: dict[StragglerCause, str] = {
    "data": "it waits for data",
    "compute": "its steps compute longer",
    "checkpoint": "its saves take longer",
}
_COMPUTE_OR_DATA = "its steps take longer, in computing or in a loader that measures no waits"


class RankSpent(NamedTuple):
    worker_id: str
    rank: int
    spent: Spent | None
    """Its recent past; None if it has not measured enough."""


class Straggler(NamedTuple):
    """The rank that the others wait for."""

    worker_id: str
    rank: int
    cause: StragglerCause
    factor: float
    """Its own time, without waiting for others, as a multiple of the median."""
    excess: float
    """Share of the time by which its cause exceeds the median of the others."""
    since_step: int | None = None
    is_data_known: bool = True
    """False: it has measured no wait for data, which may be part of computing."""

    @property
    def line(self) -> str:
        factor = f"{self.factor:.1f}".removesuffix(".0")
        since = "" if self.since_step is None else f" since step {self.since_step}"
        is_open = self.cause == "compute" and not self.is_data_known
        why = _COMPUTE_OR_DATA if is_open else _CAUSES[self.cause]
        return f"rank {self.rank} is {factor}× slower than the median{since}: {why}"


class NoVerdict(NamedTuple):
    why: str


def attribute(ranks: Sequence[RankSpent]) -> Straggler | NoVerdict:
    """Return the rank that the others wait for, or why none can be named."""
    if len(ranks) < 2:
        return NoVerdict("a single rank waits for no other")
    known = [(each, each.spent) for each in ranks if each.spent is not None]
    if len(known) < len(ranks):
        missing = len(ranks) - len(known)
        return NoVerdict(f"{missing} of {len(ranks)} ranks have not measured the last {MIN_RECENT_S:.0f} s yet")
    blocked = [(spent.share(spent.blocked_s), each, spent) for each, spent in known]
    blocked.sort(key=lambda one: (one[0], one[1].rank))
    (least, culprit, its), *others = blocked
    is_collective_known = all(spent.is_collective_known for _, spent in known)
    median = statistics.median(share for share, _, _ in others)
    if median < MIN_BLOCKED:
        if is_collective_known:
            return NoVerdict("no rank waits long for the others")
        return NoVerdict(
            "waits in collectives of torch are not measured and are part of busy, and no rank waits long at barriers"
        )
    if least >= LEAST_RATIO * others[0][0]:
        return NoVerdict("several ranks wait equally little, so the others wait for no single one")
    excess: dict[StragglerCause, float] = {
        "data": its.share(its.data_s) - statistics.median(s.share(s.data_s) for _, _, s in others),
        "checkpoint": its.share(its.checkpoint_s) - statistics.median(s.share(s.checkpoint_s) for _, _, s in others),
    }
    if is_collective_known:
        excess["compute"] = its.share(its.computing_s) - statistics.median(s.share(s.computing_s) for _, _, s in others)
    cause = max(excess, key=lambda name: excess[name])
    if excess[cause] < EXPLAINED * (median - least):
        if is_collective_known:
            return NoVerdict(f"rank {culprit.rank} waits least, but neither data, computing nor saves explain it")
        return NoVerdict(
            f"rank {culprit.rank} waits least, but waits in collectives of torch are not measured, so its computing "
            "cannot be compared"
        )
    own = statistics.median(1.0 - share for share, _, _ in others)
    factor = (1.0 - least) / max(own, 1e-3)
    return Straggler(culprit.worker_id, culprit.rank, cause, factor, excess[cause], is_data_known=its.data_s > 0)


class Stragglers:
    """The verdicts of all jobs, each with the step since which it holds."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Straggler | NoVerdict] = {}

    def update(self, sample: Sample, uses: UseHistory) -> None:
        before, self._verdicts = self._verdicts, {}
        for job in sample.jobs.values():
            if not job.workers:
                continue
            verdict = attribute(spent_by_rank(job, uses))
            if isinstance(verdict, Straggler):
                verdict = verdict._replace(since_step=_since(verdict, before.get(job.job_id), job, uses))
            self._verdicts[job.job_id] = verdict

    def of_job(self, job_id: str) -> Straggler | NoVerdict:
        return self._verdicts.get(job_id, NoVerdict("the job has no workers"))


def spent_by_rank(job: JobSample, uses: UseHistory) -> list[RankSpent]:
    return [
        RankSpent(
            worker.worker_id,
            worker.rank if worker.launch_rank is None else worker.launch_rank,
            recent(uses.reports(job.job_id, worker)),
        )
        for worker in job.ranks
    ]


def _since(verdict: Straggler, before: Straggler | NoVerdict | None, job: JobSample, uses: UseHistory) -> int | None:
    """Return the step at which the verdict began: that of the one before, or the first step of the measured span."""
    if isinstance(before, Straggler) and (before.worker_id, before.cause) == (verdict.worker_id, verdict.cause):
        return before.since_step
    for worker in job.ranks:
        if worker.worker_id == verdict.worker_id:
            newest = uses.reports(job.job_id, worker)[-1 - WINDOW_CELLS :]
            return newest[0].step if newest else None
    return None
