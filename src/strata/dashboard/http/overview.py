"""The overview of a sample, as the models of the API: pure functions of what was measured."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from strata._version import __version__
from strata.coordinator.http.models import Page
from strata.dashboard.http import models as m
from strata.dashboard.sample import by_state, state_of, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.dashboard.health import Verdict
    from strata.dashboard.run_record import Ending
    from strata.dashboard.sample import JobSample, Sample, Spread

MAX_VALUES = 24
"""Series of a job in the overview."""


def health(verdict: Verdict) -> m.HealthState:
    return m.HealthState(
        level=verdict.level,
        line=verdict.line,
        findings=[
            m.HealthFinding(
                level=each.level,
                kind=each.kind,
                job_id=each.job_id,
                worker_id=each.worker_id,
                rank=each.rank,
                line=each.line,
            )
            for each in verdict.findings
        ],
        num_findings=verdict.num_findings,
    )


def summary(job: JobSample, values: Mapping[str, Spread], verdict: Verdict) -> m.JobSummary:
    ranks = job.ranks
    rate = values.get("steps_per_s")
    attempts = [worker.attempt for worker in ranks if worker.attempt is not None]
    return m.JobSummary(
        job_id=job.job_id,
        state=state_of(job),
        generation=job.generation,
        reason=job.reason,
        attempt=max(attempts, default=None),
        num_workers=len(ranks),
        num_servers=len(job.workers) - len(ranks),
        num_suspects=sum(worker.is_suspect for worker in ranks),
        workers_by_state=by_state(ranks),
        step=min((worker.step for worker in ranks), default=None),
        epoch=min((worker.epoch for worker in ranks), default=None),
        data_fraction=job.data_fraction,
        steps_per_s=None if rate is None else rate.mean,
        rows_per_s=job.rows_per_s,
        checkpoint_id=job.checkpoint_id,
        checkpoint_step=job.checkpoint_step,
        checkpoint_age_s=job.checkpoint_age_s,
        health=health(verdict),
    )


def with_values(found: m.JobSummary, values: Mapping[str, Spread]) -> m.OverviewJob:
    shown = {name: series_value(name, value) for name, value in islice(values.items(), MAX_VALUES)}
    return m.OverviewJob(**dict(found), values=shown, num_values=len(values))


def series_value(name: str, value: Spread) -> m.SeriesValue:
    return m.SeriesValue(min=value.min, mean=value.mean, max=value.max, unit=unit_of(name))


def figures(sample: Sample) -> m.CoordinatorFigures:
    ranks = [worker for job in sample.jobs.values() for worker in job.ranks]
    return m.CoordinatorFigures(
        at_s=sample.at_s,
        requests_per_s=sample.requests_per_s,
        barrier_p50_s=sample.barrier_p50_s,
        barrier_p99_s=sample.barrier_p99_s,
        num_sessions=sample.num_sessions,
        num_jobs=len(sample.jobs),
        num_workers=len(ranks),
        num_suspects=sum(worker.is_suspect for worker in ranks),
        workers_by_state=by_state(ranks),
    )


def in_order(sample: Sample) -> list[JobSample]:
    """Return the jobs with workers first; then the newest."""
    newest_first = list(reversed(sample.jobs.values()))
    return [job for job in newest_first if job.workers] + [job for job in newest_first if not job.workers]


def overview(
    sample: Sample,
    *,
    job: Callable[[JobSample], m.OverviewJob],
    verdict: Verdict,
    cursor: str,
    ended: Ending | None,
    limit: int,
    offset: int,
) -> m.Overview:
    """Return one page of jobs with the figures of the coordinator; only the jobs of the page are built."""
    jobs = in_order(sample)
    items = [job(each) for each in jobs[offset : offset + limit]]
    end = offset + len(items)
    page = Page[m.OverviewJob](
        items=items, total=len(jobs), limit=limit, offset=offset, next_offset=end if end < len(jobs) else None
    )
    return m.Overview(
        **dict(figures(sample)),
        cursor=cursor,
        version=__version__,
        health=health(verdict),
        jobs=page,
        ended=None if ended is None else m.RunEnd(**ended._asdict()),
    )
