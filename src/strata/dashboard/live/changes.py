"""What is new in a sample, compared with the one before: the messages of the live stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from strata.dashboard.http import models as m
from strata.dashboard.sample import coordinator_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel

    from strata.dashboard.sample import JobSample, Sample, Spread, WorkerSample

MAX_CHANGED_WORKERS = 200
"""Workers in one message; the page loads the list again if more changed."""


class Update(NamedTuple):
    event: str
    data: BaseModel
    key: str = ""


def worker_changes(before: JobSample | None, job: JobSample, at_s: float) -> m.WorkersChanged | None:
    """Return the workers that joined, left, or changed their state, rank or connection; None if none did."""
    known = {} if before is None else {worker.worker_id: worker for worker in before.workers}
    changed = [worker for worker in job.workers if _differs(known.pop(worker.worker_id, None), worker)]
    gone = list(known)
    if not changed and not gone:
        return None
    shown = changed[:MAX_CHANGED_WORKERS]
    return m.WorkersChanged(
        at_s=at_s,
        job_id=job.job_id,
        changed=[_change(worker) for worker in shown],
        gone=gone[:MAX_CHANGED_WORKERS],
        is_complete=len(shown) == len(changed) and len(gone) <= MAX_CHANGED_WORKERS,
    )


def _differs(before: WorkerSample | None, worker: WorkerSample) -> bool:
    return before is None or (before.state, before.is_suspect, before.incarnation, before.rank) != (
        worker.state,
        worker.is_suspect,
        worker.incarnation,
        worker.rank,
    )


def _change(worker: WorkerSample) -> m.WorkerChange:
    return m.WorkerChange(
        worker_id=worker.worker_id,
        rank=worker.rank,
        state=worker.state,
        suspect=worker.is_suspect,
        step=worker.step,
        epoch=worker.epoch,
        incarnation=worker.incarnation,
        attempt=worker.attempt,
        silent_s=worker.silent_s,
    )


def points(at_s: float, job_id: str, values: Mapping[str, Spread]) -> m.Points:
    return m.Points(
        at_s=at_s, job_id=job_id, values={name: (each.min, each.mean, each.max) for name, each in values.items()}
    )


def gone(before: Sample | None, sample: Sample) -> Iterator[Update]:
    for job_id in before.jobs if before is not None else ():
        if job_id not in sample.jobs:
            yield Update("gone", m.JobGone(at_s=sample.at_s, job_id=job_id), f"job:{job_id}")


def of_coordinator(sample: Sample, figures: m.CoordinatorFigures) -> Iterator[Update]:
    yield Update("coordinator", figures, "coordinator")
    yield Update("points", points(sample.at_s, "", coordinator_values(sample)))


def of_job(
    before: JobSample | None,
    job: JobSample,
    *,
    at_s: float,
    summary: m.JobSummary,
    summary_before: m.JobSummary | None,
    values: Mapping[str, Spread],
) -> Iterator[Update]:
    """Yield the updates of one job. A job without workers does not change, except that its checkpoint grows old."""
    if (workers := worker_changes(before, job, at_s)) is not None:
        yield Update("workers", workers)
    if summary_before is None or _lasting(summary) != _lasting(summary_before):
        yield Update("job", m.JobChanged(at_s=at_s, job=summary), f"job:{job.job_id}")
    if job.workers and values:
        yield Update("points", points(at_s, job.job_id, values))


def _lasting(summary: m.JobSummary) -> m.JobSummary:
    return summary if summary.num_workers else summary.model_copy(update={"checkpoint_age_s": None})
