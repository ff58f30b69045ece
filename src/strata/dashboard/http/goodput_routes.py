"""The routes of goodput and of recoveries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from strata.dashboard import goodput as g
from strata.dashboard.http import models as m
from strata.dashboard.http.routes import current
from strata.launch.record.recovery import MOMENTS

if TYPE_CHECKING:
    from fastapi import APIRouter

    from strata.coordinator.serve.engine import Engine
    from strata.dashboard.run_record import RunRecord
    from strata.dashboard.sampler import Sampler
    from strata.launch.record.recovery import RecoveryTimeline

MAX_ATTEMPTS = 200
"""Newest attempts and recoveries of an answer."""
RequiredJob = Annotated[str, Query(min_length=1, max_length=128, description="The job.")]


def add_goodput_routes(router: APIRouter, engine: Engine, sampler: Sampler, record: RunRecord | None) -> None:
    """`record`: that of the run whose coordinator this is; other coordinators have none."""

    @router.get("/api/goodput")
    async def goodput(job: RequiredJob) -> m.Goodput:
        """Return where the wall time of a job went: parts that add up to its time, multiplied by its ranks."""
        sample = await current(engine, sampler)
        times = None if record is None else await asyncio.to_thread(record.times, job)
        entries = g.ledger(sampler.lives.of_job(job), now_s=sample.at_s, times=times)
        whole = g.total(entries)
        return m.Goodput(
            job_id=job,
            at_s=sample.at_s,
            run=None if whole is None else _entry(whole),
            attempts=[_entry(each) for each in entries[-MAX_ATTEMPTS:]],
            num_attempts=len(entries),
        )

    @router.get("/api/recoveries")
    async def recoveries(job: RequiredJob) -> m.Recoveries:
        """Return every failure of a run, newest first, with its moments from the detection to the first step."""
        await current(engine, sampler)
        found: list[tuple[RecoveryTimeline, list[str]]] = []
        num_found = 0
        if record is not None:
            journal, last_seq = engine.journal, engine.last_seq
            found, num_found = await asyncio.to_thread(
                record.recoveries, job, journal, last_seq=last_seq, limit=MAX_ATTEMPTS
            )
        return m.Recoveries(
            job_id=job,
            is_recorded=record is not None and record.is_of(job),
            items=[_recovery(each, lines) for each, lines in reversed(found)],
            num_recoveries=num_found,
        )


def _entry(entry: g.LedgerEntry) -> m.GoodputEntry:
    return m.GoodputEntry(
        attempt=entry.attempt,
        began_at_s=entry.began_at_s,
        ended_at_s=entry.ended_at_s,
        num_ranks=entry.num_ranks,
        total_s=entry.total_us / 1e6,
        goodput=entry.goodput,
        parts_s={name: us / 1e6 for name, us in entry.parts_us.items()},
    )


def _recovery(found: RecoveryTimeline, lines: list[str]) -> m.RunRecovery:
    detected_s = found.at_s["detected"]
    return m.RunRecovery(
        failed_attempt=found.failed_attempt,
        attempt=found.attempt,
        rank=found.rank,
        cause=found.cause,
        generation=found.generation,
        step=found.step,
        first_step=found.first_step,
        took_s=found.took_s,
        moments=[
            m.RecoveryMoment(
                name=name,
                at_s=found.at_s.get(name),
                after_s=None if name not in found.at_s else found.at_s[name] - detected_s,
            )
            for name in MOMENTS
        ],
        last_lines=lines,
    )
