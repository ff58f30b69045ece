"""The route of the time of workers: what each rank did in the last minutes, and which one the others wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from strata.coordinator.http.app import MAX_OFFSET, page
from strata.coordinator.http.models import Page
from strata.dashboard.http import page_models as m
from strata.dashboard.http.goodput_routes import RequiredJob  # noqa: TC001 - evaluated at run time
from strata.dashboard.http.routes import current
from strata.dashboard.stragglers import NoVerdict
from strata.dashboard.uses import cells

if TYPE_CHECKING:
    from fastapi import APIRouter

    from strata.coordinator.serve.engine import Engine
    from strata.dashboard.sample import WorkerSample
    from strata.dashboard.sampler import Sampler

MAX_WORKERS = 500
DIGITS = 3
Limit = Annotated[int, Query(ge=1, le=MAX_WORKERS, description="The maximum number of workers.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of workers to skip.")]


def add_time_routes(router: APIRouter, engine: Engine, sampler: Sampler) -> None:
    @router.get("/api/time")
    async def time(job: RequiredJob, limit: Limit = 100, offset: Offset = 0) -> m.JobTime:
        """Return how the ranks of a job spent the last three minutes, as they measured it."""
        sample = await current(engine, sampler)
        found = sample.jobs.get(job)
        ranks = sorted([] if found is None else found.ranks, key=_rank)
        items = page(ranks, lambda worker: _time(sampler, job, worker), limit=limit, offset=offset)
        verdict = sampler.stragglers.of_job(job)
        return m.JobTime(
            job_id=job,
            straggler=None
            if isinstance(verdict, NoVerdict)
            else m.RankStraggler(
                worker_id=verdict.worker_id,
                rank=verdict.rank,
                cause=verdict.cause,
                factor=verdict.factor,
                since_step=verdict.since_step,
                line=verdict.line,
            ),
            no_verdict=verdict.why if isinstance(verdict, NoVerdict) else "",
            workers=Page[m.WorkerTime](**dict(items)),
        )


def _rank(worker: WorkerSample) -> int:
    return worker.rank if worker.launch_rank is None else worker.launch_rank


def _time(sampler: Sampler, job_id: str, worker: WorkerSample) -> m.WorkerTime:
    found = cells(sampler.uses.reports(job_id, worker))
    return m.WorkerTime(
        worker_id=worker.worker_id,
        rank=_rank(worker),
        incarnation=worker.incarnation,
        is_collective_known=bool(found) and found[-1].spent.is_collective_known,
        ended_at_s=[each.ended_at_s for each in found],
        computing=[round(spent.share(spent.computing_s), DIGITS) for _, _, spent in found],
        waiting=[
            round(spent.share(spent.data_s + spent.checkpoint_s + spent.restore_s), DIGITS) for _, _, spent in found
        ],
        blocked=[round(spent.share(spent.blocked_s), DIGITS) for _, _, spent in found],
    )
