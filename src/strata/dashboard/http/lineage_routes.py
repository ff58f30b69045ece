"""The route of the lineage of checkpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from strata.coordinator.http.app import MAX_OFFSET, page, query
from strata.coordinator.http.models import Page
from strata.dashboard.http import page_models as m
from strata.dashboard.http.goodput_routes import RequiredJob  # noqa: TC001 - evaluated at run time
from strata.dashboard.lineage import descents

if TYPE_CHECKING:
    from fastapi import APIRouter

    from strata.coordinator.serve.engine import Engine
    from strata.dashboard.lineage import Descent
    from strata.dashboard.run_record import RunRecord

MAX_LIMIT = 1_000
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="The maximum number of checkpoints.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of checkpoints to skip.")]


def add_lineage_routes(router: APIRouter, engine: Engine, record: RunRecord | None) -> None:
    """`record`: that of the run whose coordinator this is; other coordinators have none."""

    @router.get("/api/lineage")
    async def lineage(job: RequiredJob, limit: Limit = 100, offset: Offset = 0) -> m.JobLineage:
        """Return the committed checkpoints of a job, newest first, with the attempts that made and resumed them."""
        records = await query(engine, lambda core, _clock: tuple(core.job(job).checkpoints.committed.values()))
        events = [] if record is None else await asyncio.to_thread(record.events, job)
        found = await asyncio.to_thread(descents, records, events)
        items = page(reversed(found), _line, limit=limit, offset=offset)
        return m.JobLineage(
            job_id=job,
            is_recorded=record is not None and record.is_of(job),
            checkpoints=Page[m.CheckpointLine](**dict(items)),
        )


def _line(found: Descent) -> m.CheckpointLine:
    spec = found.record.checkpoint
    return m.CheckpointLine(
        checkpoint_id=spec.checkpoint_id,
        type=spec.type,
        step=spec.step,
        epoch=spec.epoch,
        size_bytes=found.record.size_bytes,
        generation=found.record.generation,
        num_ranks=found.record.num_ranks,
        committed_at_s=found.record.committed_at_s,
        attempt=found.attempt,
        resumed_by=[m.CheckpointResume(attempt=each.attempt, at_s=each.at_s) for each in found.resumed_by],
    )
