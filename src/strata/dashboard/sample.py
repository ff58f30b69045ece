"""A sample: all jobs of a coordinator at one moment, as plain values.

`take` reads the state once; history, overview and live updates are computed from the sample, so that an open page adds
nothing to the work of the coordinator. Values over ranks keep their minimum, mean and maximum instead of those of rank
0: a loss that diverges on one rank must stay visible. Parameter servers report through the same heartbeats but are not
ranks, so they are left out of these values.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from strata.coordinator.state.server_figures import SERVER, figures_of, total
from strata.launch.environment import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.coordinator.state.core import Core
    from strata.coordinator.state.job import Job
    from strata.coordinator.state.membership import Member, WorkerStateName
    from strata.coordinator.state.server_figures import ServerFigures
    from strata.coordinator.state.time_use import TimeUse

JobState = Literal["waiting", "starting", "loading", "training", "saving", "recovering", "idle", "error"]

METRIC_PREFIX = "metric:"
"""Prefix of the series of reported metrics, so that no script can hide one of ours."""
ROWS_PER_S = "rows_per_s"
SERVER_SERIES = ("rows", "bytes", "pulls_per_s", "pushes_per_s", "staleness", "hit_rate")
"""Figures of parameter servers that have a history, over all servers of a job."""
MAX_METRICS_PER_JOB = 64
"""Metrics of a job that become series; workers could report different names each."""
MAX_MISSING = 3
"""Workers named that have not arrived at a barrier."""
_UNITS = {
    "steps_per_s": "steps/s",
    "rows_per_s": "rows/s",
    "checkpoint_age_s": "s",
    "barrier_p50_s": "s",
    "barrier_p99_s": "s",
    "requests_per_s": "requests/s",
    "servers.bytes": "bytes",
    "servers.staleness": "steps",
}
_UNITS_BY_SUFFIX = (("_per_s", "1/s"), ("_seconds", "s"), ("_ms", "ms"), ("_bytes", "bytes"), ("_s", "s"))
# From the state that matters most: one recovering worker makes a job recover.
_JOB_STATES: tuple[tuple[WorkerStateName, JobState], ...] = (
    ("ERROR", "error"),
    ("RECOVERING", "recovering"),
    ("INITIALIZING", "starting"),
    ("CHECKPOINTING", "saving"),
    ("TRAINING", "training"),
    ("LOADING_DATA", "loading"),
    ("IDLE", "idle"),
)


class Spread(NamedTuple):
    """A value over several ranks, or over several samples."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class WorkerSample:
    worker_id: str
    rank: int
    state: WorkerStateName
    step: int
    epoch: int
    incarnation: int
    attempt: int | None
    silent_s: float
    is_suspect: bool
    is_server: bool
    progress_s: float
    """Monotonic time at which its step last changed, or its state."""
    not_finite: tuple[str, ...] = ()
    """Metrics whose newest value is NaN or infinite."""
    launch_rank: int | None = None
    """The rank that its launcher gave it."""
    time_use: TimeUse | None = None
    time_use_at_s: float = 0.0
    """Monotonic time at which that arrived."""
    joined_s: float | None = None
    """Monotonic; None if that was before a restart of the coordinator."""
    first_step: int | None = None
    """The first step that this process has made."""


@dataclass(frozen=True, slots=True)
class WaitingBarrier:
    """A barrier that some workers have not reached."""

    barrier_id: str
    waited_s: float
    num_missing: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobSample:
    job_id: str
    generation: int
    reason: str
    workers: tuple[WorkerSample, ...]
    metrics: dict[str, Spread] = field(default_factory=dict)
    rows_per_s: float | None = None
    """The sum over ranks."""
    data_fraction: float | None = None
    checkpoint_id: str | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    waiting: WaitingBarrier | None = None
    """The barrier that has waited for longest."""
    left_s: dict[str, float] = field(default_factory=dict)
    """Monotonic time at which a process of a worker last left, by worker."""
    servers: ServerFigures | None = None
    """What its parameter servers report, together; None without any."""

    @property
    def ranks(self) -> list[WorkerSample]:
        return [worker for worker in self.workers if not worker.is_server]


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    """Wall time."""
    monotonic_s: float
    jobs: dict[str, JobSample]
    requests_per_s: float = 0.0
    barrier_p50_s: float | None = None
    barrier_p99_s: float | None = None
    num_sessions: int = 0
    heartbeat_s: float = 1.0
    failure: str = ""
    """Why the journal cannot be written; empty if it can."""


def take(core: Core, *, monotonic_s: float, wall_s: float) -> dict[str, JobSample]:
    """Return all jobs of a core."""
    return {job_id: _job(job, monotonic_s, wall_s) for job_id, job in core.jobs.items()}


def _job(job: Job, monotonic_s: float, wall_s: float) -> JobSample:
    latest = job.checkpoints.latest()
    members = job.membership.members.values()
    per_rank = [member for member in members if SERVER not in member.metrics]
    metrics = spreads(per_rank)
    rows = [member.metrics[ROWS_PER_S].last for member in per_rank if ROWS_PER_S in member.metrics]
    num_shards = sum(each.spec.num_shards for each in job.shards.datasets.values())
    num_done = sum(each.num_done for each in job.shards.datasets.values())
    return JobSample(
        job_id=job.job_id,
        generation=job.membership.generation,
        reason=job.membership.generation_reason,
        workers=tuple(_worker(rank, member, monotonic_s) for rank, member in job.membership.ranked()),
        metrics=metrics,
        rows_per_s=all_rows if rows and math.isfinite(all_rows := sum(rows)) else None,
        data_fraction=num_done / num_shards if num_shards else None,
        checkpoint_id=latest.checkpoint.checkpoint_id if latest else None,
        checkpoint_step=latest.checkpoint.step if latest else None,
        checkpoint_age_s=max(wall_s - latest.committed_at_s, 0.0) if latest else None,
        waiting=_waiting(job, monotonic_s),
        left_s=dict(job.membership.left_s),
        servers=total(found for member in members if (found := server_figures(member)) is not None),
    )


def server_figures(member: Member) -> ServerFigures | None:
    """Return what a parameter server has measured; None for other workers."""
    if SERVER not in member.metrics:
        return None
    return figures_of({name: series.last for name, series in member.metrics.items() if math.isfinite(series.last)})


def _worker(rank: int, member: Member, monotonic_s: float) -> WorkerSample:
    return WorkerSample(
        worker_id=member.worker_id,
        rank=rank,
        state=member.state,
        step=member.step,
        epoch=member.epoch,
        incarnation=member.incarnation,
        attempt=member.joined.attempt,
        silent_s=max(monotonic_s - member.last_seen_s, 0.0),
        is_suspect=member.suspect_since_s is not None,
        is_server=SERVER in member.metrics,
        progress_s=member.progress_s,
        not_finite=tuple(name for name, series in member.metrics.items() if not math.isfinite(series.last)),
        launch_rank=member.joined.launch_rank,
        time_use=member.time_use,
        time_use_at_s=member.time_use_at_s,
        joined_s=member.joined_s,
        first_step=member.events["FIRST_STEP"].step if "FIRST_STEP" in member.events else None,
    )


def spreads(members: Iterable[Member]) -> dict[str, Spread]:
    """Return the spread over ranks of the newest value of each metric, without those that are not finite."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, series in member.metrics.items():
            if METRICS.is_ours(name):
                continue
            found = values.get(name)
            if found is None:
                if len(values) == MAX_METRICS_PER_JOB:
                    continue
                found = values[name] = []
            if math.isfinite(last := series.last):
                found.append(last)
    return {name: spread(found) for name, found in values.items() if found}


def spread(values: list[float]) -> Spread:
    """Return the spread of finite values; the mean lies between the others, whatever rounding does."""
    least, most = min(values), max(values)
    mean = math.fsum(value / len(values) for value in values)  # divided first: the sum could overflow
    return Spread(least, min(max(mean, least), most), most)


def _waiting(job: Job, monotonic_s: float) -> WaitingBarrier | None:
    oldest = min(job.barriers.open.values(), key=lambda each: each.opened_s, default=None)
    if oldest is None:
        return None
    awaited = job.membership.members if oldest.members is None else oldest.members
    missing = sorted(worker for worker in awaited if worker not in oldest.arrived)
    return WaitingBarrier(
        oldest.ticket.barrier_id, max(monotonic_s - oldest.opened_s, 0.0), len(missing), tuple(missing[:MAX_MISSING])
    )


def state_of(job: JobSample) -> JobState:
    """Return what a job is doing: the state that matters most among its ranks."""
    found = {worker.state for worker in job.ranks}
    return next((state for name, state in _JOB_STATES if name in found), "waiting")


def by_state(workers: Iterable[WorkerSample]) -> dict[WorkerStateName, int]:
    return dict(Counter(worker.state for worker in workers))


def job_values(job: JobSample, rates: list[float]) -> dict[str, Spread]:
    """Return the values of a job's series; `rates` has the steps per second of its ranks, as far as known."""
    ranks = job.ranks
    values = {METRIC_PREFIX + name: value for name, value in job.metrics.items()}
    if rates:
        values["steps_per_s"] = spread(rates)
    if ranks:
        values["step"] = spread([float(worker.step) for worker in ranks])
        values["epoch"] = spread([float(worker.epoch) for worker in ranks])
        for state, num in by_state(ranks).items():
            values[f"workers.{state}"] = single(num)
        values["workers.suspect"] = single(sum(worker.is_suspect for worker in ranks))
    if job.rows_per_s is not None:
        values["rows_per_s"] = single(job.rows_per_s)
    if job.servers is not None:
        figures = {**job.servers.as_metrics(), "hit_rate": job.servers.hit_rate}
        values |= {
            f"servers.{name}": single(value) for name in SERVER_SERIES if (value := figures.get(name)) is not None
        }
    if ranks and job.checkpoint_age_s is not None:  # a chart of a job that ended would grow for ever
        values["checkpoint_age_s"] = single(job.checkpoint_age_s)
    return values


def coordinator_values(sample: Sample) -> dict[str, Spread]:
    """Return the values of the coordinator's own series."""
    values = {"requests_per_s": single(sample.requests_per_s)}
    if sample.barrier_p50_s is not None and sample.barrier_p99_s is not None:
        values |= {"barrier_p50_s": single(sample.barrier_p50_s), "barrier_p99_s": single(sample.barrier_p99_s)}
    return values


def single(value: float) -> Spread:
    return Spread(float(value), float(value), float(value))


def unit_of(name: str) -> str:
    """Return the unit of a series; of a reported metric, what its name says."""
    if name.startswith("workers."):
        return "workers"
    plain = name.removeprefix(METRIC_PREFIX)
    return _UNITS.get(plain) or next((unit for suffix, unit in _UNITS_BY_SUFFIX if plain.endswith(suffix)), "")
