"""The health of jobs, in words: what is wrong now, the most important first; without findings, what is well.

Every finding follows from measured values. A rank is called slow where its steps are counted on their own, or where
the time that all ranks measured names it (`stragglers.py`): in a synchronous strategy all ranks make steps at the pace
of the slowest, so their rates are equal and show nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from strata.dashboard.sample import JobSample, Sample, WorkerSample
    from strata.dashboard.stragglers import Straggler

Level = Literal["ok", "warning", "error"]
FindingKind = Literal["journal", "failed", "disconnected", "silent", "stalled", "barrier", "not_finite", "slow"]
"""The most important first."""

SILENT_BEATS = 2.5
"""Missing heartbeats after which a worker is called silent."""
MIN_SILENT_S = 2.0
STALLED_S = 30.0
"""A training rank without a step for this long is stalled, unless its steps take that long."""
STALLED_STEPS = 10.0
BARRIER_S = 10.0
"""A barrier that waits for longer is worth a line."""
SLOW_FACTOR = 2.0
MIN_RANKS = 3
"""Ranks with a known rate, below which a median means nothing."""
SLOW_FOR_S = 5.0
"""A rank is called slow only after this time: one late step is none."""
MAX_FINDINGS = 8
MAX_ALIKE = 3
"""Findings of one kind in one job that are listed one by one; more are combined."""
_BY_WEIGHT: tuple[FindingKind, ...] = get_args(FindingKind)
_ORDER = {kind: place for place, kind in enumerate(_BY_WEIGHT)}
_TOGETHER: dict[FindingKind, str] = {
    "failed": "are in state ERROR",
    "disconnected": "lost their connection",
    "silent": "are silent",
    "stalled": "make no steps",
    "not_finite": "report values that are not finite",
    "slow": "are slower than the median",
}


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    line: str
    level: Level = "warning"
    job_id: str = ""
    worker_id: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    line: str
    findings: tuple[Finding, ...]
    """At most `MAX_FINDINGS`."""
    num_findings: int


class Slowness(NamedTuple):
    since_step: int
    since_s: float
    factor: float


class SlowRanks:
    """Ranks that make fewer steps than the others, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, int], Slowness] = {}

    def update(self, sample: Sample, rates: Mapping[str, Mapping[str, float]]) -> None:
        """`rates`: steps per second by job and worker."""
        before, self._since = self._since, {}
        for job in sample.jobs.values():
            for worker, factor in _slower(job, rates.get(job.job_id, {})):
                key = (job.job_id, worker.worker_id, worker.incarnation)
                first = before.get(key) or Slowness(worker.step, sample.monotonic_s, factor)
                self._since[key] = first._replace(factor=factor)

    def of_job(self, job: JobSample, now_s: float) -> dict[str, Slowness]:
        """Return the ranks of a job that have been slow for long enough, by worker."""
        return {
            worker.worker_id: slow
            for worker in job.ranks
            if (slow := self._since.get((job.job_id, worker.worker_id, worker.incarnation))) is not None
            and now_s - slow.since_s >= SLOW_FOR_S
        }


def _slower(job: JobSample, rates: Mapping[str, float]) -> Iterator[tuple[WorkerSample, float]]:
    training = [each for each in job.ranks if each.state == "TRAINING" and each.worker_id in rates]
    if len(training) < MIN_RANKS:
        return
    median = statistics.median(rates[each.worker_id] for each in training)
    for worker in training:
        rate = rates[worker.worker_id]
        if rate > 0 and median >= SLOW_FACTOR * rate:
            yield worker, median / rate


def findings(
    job: JobSample,
    *,
    now_s: float,
    heartbeat_s: float,
    rates: Mapping[str, float],
    slow: Mapping[str, Slowness],
    straggler: Straggler | None = None,
) -> list[Finding]:
    """Return what is wrong with a job, the most important first.

    Args:
        slow: Ranks that make fewer steps than the others.
        straggler: The rank that the others wait for.
    """
    found = [
        finding
        for worker in job.workers
        if (finding := _of_worker(job.job_id, worker, now_s, heartbeat_s, rates.get(worker.worker_id), slow))
    ]
    if straggler is not None and all(each.worker_id != straggler.worker_id for each in found):
        found.append(
            Finding("slow", straggler.line, job_id=job.job_id, worker_id=straggler.worker_id, rank=straggler.rank)
        )
    barrier = job.waiting
    if barrier is not None and barrier.waited_s >= BARRIER_S and barrier.num_missing:
        more = barrier.num_missing - len(barrier.missing)
        names = ", ".join(barrier.missing) + (f" and {more} more" if more else "")
        line = f"barrier {barrier.barrier_id} has waited {seconds(barrier.waited_s)} for {names}"
        found.append(Finding("barrier", line, job_id=job.job_id))
    return sorted(_combined(found), key=lambda each: _ORDER[each.kind])


def _of_worker(
    job_id: str,
    worker: WorkerSample,
    now_s: float,
    heartbeat_s: float,
    rate: float | None,
    slow: Mapping[str, Slowness],
) -> Finding | None:
    """Return the most important finding about a worker."""
    name, stuck_s = worker.worker_id, now_s - worker.progress_s
    stalled_s = max(STALLED_S, STALLED_STEPS / rate if rate else STALLED_S)
    level: Level = "warning"
    kind: FindingKind
    if worker.state == "ERROR":
        kind, line, level = "failed", f"{name} is in state ERROR", "error"
    elif worker.is_suspect:
        kind, line = "disconnected", f"{name} lost its connection {seconds(worker.silent_s)} after its last heartbeat"
    elif worker.silent_s >= max(SILENT_BEATS * heartbeat_s, MIN_SILENT_S):
        kind, line = "silent", f"{name} silent for {seconds(worker.silent_s)}"
    elif worker.is_server:
        return None
    elif worker.state == "TRAINING" and stuck_s >= stalled_s:
        kind, line = "stalled", f"{name} has made no step for {seconds(stuck_s)}, at step {worker.step}"
    elif worker.not_finite:
        kind, line = "not_finite", f"{worker.not_finite[0]} of {name} is not finite"
    elif (found := slow.get(name)) is not None:
        factor = f"{found.factor:.1f}".removesuffix(".0")
        line = f"rank {worker.rank} is {factor}× slower than the median since step {found.since_step}"
        kind = "slow"
    else:
        return None
    return Finding(kind, line, level, job_id, name, worker.rank)


def _combined(found: Sequence[Finding]) -> Iterator[Finding]:
    """Make one line of many alike: the loss of a rack should not hide everything else."""
    by_kind: dict[FindingKind, list[Finding]] = {}
    for finding in found:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, alike in by_kind.items():
        if len(alike) <= MAX_ALIKE:
            yield from alike
            continue
        names = ", ".join(each.worker_id or "" for each in alike[:MAX_ALIKE])
        line = f"{len(alike)} workers {_TOGETHER[kind]}: {names} and {len(alike) - MAX_ALIKE} more"
        yield Finding(kind, line, alike[0].level, alike[0].job_id)


def of_job(job: JobSample, found: Sequence[Finding]) -> Verdict:
    return _verdict(found, _well(job))


def of_all(sample: Sample, found: Iterable[Finding]) -> Verdict:
    """Return the health of the coordinator and all of its jobs."""
    everything = sorted(found, key=lambda each: _ORDER[each.kind])
    if sample.failure:
        everything.insert(0, Finding("journal", sample.failure, "error"))
    return _verdict(everything, _all_well(sample))


def _verdict(found: Sequence[Finding], well: str) -> Verdict:
    if not found:
        return Verdict("ok", well, (), 0)
    level: Level = "error" if any(each.level == "error" for each in found) else "warning"
    more = len(found) - 1
    line = found[0].line + (f"; and {more} more" if more else "")
    return Verdict(level, line, tuple(found[:MAX_FINDINGS]), len(found))


def _all_well(sample: Sample) -> str:
    active = [job for job in sample.jobs.values() if job.workers]
    if len(active) == 1:
        return _well(active[0])
    if not sample.jobs:
        return "no jobs yet; strata run train.py starts one"
    if not active:
        return f"no workers; {counted(len(sample.jobs), 'job')} without any"
    num = sum(len(job.workers) for job in active)
    return f"all {num} workers of {len(active)} jobs report"


def _well(job: JobSample) -> str:
    if not job.workers:
        return f"no workers: {job.reason}"
    num = len(job.workers)
    report = "the worker reports" if num == 1 else f"all {num} workers report"
    if job.checkpoint_age_s is None:
        return f"{report}; no checkpoint yet"
    return f"{report}; last checkpoint {seconds(job.checkpoint_age_s)} ago"


def seconds(value: float) -> str:
    """Return `4 s`, `3 min` or `2.5 h`: a health line needs no more digits."""
    if value < 120:
        return f"{value:.0f} s"
    if value < 7_200:
        return f"{value / 60:.0f} min"
    return f"{value / 3_600:.1f} h"
