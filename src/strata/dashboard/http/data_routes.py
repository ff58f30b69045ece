"""The route of the page Data."""

from __future__ import annotations

import asyncio
import statistics
from typing import TYPE_CHECKING, Annotated, NamedTuple

from fastapi import Query

from strata.coordinator.http import models as c
from strata.coordinator.http import views
from strata.coordinator.http.app import MAX_OFFSET, query
from strata.dashboard import data as d
from strata.dashboard.http import page_models as m
from strata.dashboard.http.goodput_routes import RequiredJob  # noqa: TC001 - evaluated at run time
from strata.dashboard.http.routes import current
from strata.dashboard.uses import recent

if TYPE_CHECKING:
    from fastapi import APIRouter

    from strata.clock import Clock
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.state.core import Core
    from strata.coordinator.state.shards import Dataset
    from strata.dashboard.sample import Sample
    from strata.dashboard.sampler import Sampler

MAX_DATASETS = 100
MAX_OWNERS = 200
MAX_MOVES = 256
"""Moves that are remembered until the next generation, so that the journal is searched once for each."""

DatasetName = Annotated[str, Query(max_length=128, description="The dataset; by default the first unfinished one.")]
OwnerLimit = Annotated[int, Query(ge=1, le=MAX_OWNERS, description="The maximum number of owners.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of owners to skip.")]


class _Read(NamedTuple):
    datasets: list[c.Dataset]
    num_datasets: int
    shown: c.Dataset | None
    view: d.DatasetView | None


def add_data_routes(router: APIRouter, engine: Engine, sampler: Sampler) -> None:
    moves: dict[tuple[str, str], tuple[int, d.Move | None]] = {}

    async def move_of(job_id: str, view: d.DatasetView) -> d.Move | None:
        key = (job_id, view.dataset_id)
        known = moves.get(key)
        if known is not None and known[0] == view.generation:
            return known[1]
        found = await asyncio.to_thread(d.last_move, engine.journal, job_id, view.dataset_id, engine.last_seq)
        while len(moves) >= MAX_MOVES:
            del moves[next(iter(moves))]
        moves[key] = view.generation, found
        return found

    @router.get("/api/data")
    async def data(
        job: RequiredJob, dataset: DatasetName = "", limit: OwnerLimit = 50, offset: Offset = 0
    ) -> m.JobData:
        """Return the datasets of a job, the shards of one of them by owner, and the ranks that wait for data."""
        sample = await current(engine, sampler)
        read = await query(engine, lambda core, clock: _read(core, clock, job, dataset))
        shards: m.JobShards | None = None
        owned: dict[str, tuple[int, int]] = {}
        if read.view is not None and read.shown is not None:
            found = await asyncio.to_thread(d.shard_map, read.view, limit=limit, offset=offset)
            owned = await asyncio.to_thread(d.owned, read.view)
            shards = _shards(read.shown, found, await move_of(job, read.view), limit=limit, offset=offset)
        ranks = _ranks(sampler, sample, job, owned)
        waits = d.data_waits(ranks)
        return m.JobData(
            job_id=job,
            at_s=sample.at_s,
            datasets=read.datasets,
            num_datasets=read.num_datasets,
            shards=shards,
            waits=[m.RankDataWait(**each._asdict()) for each in waits[: d.MAX_WAITS]],
            num_waits=len(waits),
            num_measured=sum(each.spent is not None for each in ranks),
            num_ranks=len(ranks),
        )


def _read(core: Core, _clock: Clock, job_id: str, dataset_id: str) -> _Read:
    job = core.job(job_id)
    datasets = job.shards.datasets
    shown: Dataset | None
    if dataset_id:
        shown = job.shards.dataset(dataset_id)
    else:
        unfinished = (each for each in datasets.values() if each.num_done < each.spec.num_shards)
        shown = next(unfinished, next(iter(datasets.values()), None))
    return _Read(
        datasets=[views.dataset(job_id, each) for each in list(datasets.values())[:MAX_DATASETS]],
        num_datasets=len(datasets),
        shown=None if shown is None else views.dataset(job_id, shown),
        view=None if shown is None else d.DatasetView.of(shown, job.membership),
    )


def _ranks(sampler: Sampler, sample: Sample, job_id: str, owned: dict[str, tuple[int, int]]) -> list[d.RankData]:
    job = sample.jobs.get(job_id)
    found: list[d.RankData] = []
    for worker in [] if job is None else job.ranks:
        num_shards, num_left = owned.get(worker.worker_id, (None, None))
        rank = worker.rank if worker.launch_rank is None else worker.launch_rank
        spent = recent(sampler.uses.reports(job_id, worker))
        found.append(d.RankData(worker.worker_id, rank, spent, num_shards, num_left))
    return found


def _shards(shown: c.Dataset, found: d.ShardMap, move: d.Move | None, *, limit: int, offset: int) -> m.JobShards:
    items = [
        m.ShardOwner(
            worker_id=None if row.owner is None else row.owner.worker_id,
            rank=None if row.owner is None else row.owner.rank,
            num_shards=row.num_shards,
            num_done=row.num_done,
            num_gained=None if move is None or row.owner is None else move.gained.get(row.owner.incarnation, 0),
            cells=row.cells,
        )
        for row in found.rows
    ]
    end = offset + len(items)
    return m.JobShards(
        dataset=shown,
        shards_per_cell=found.shards_per_cell,
        num_waiting=found.num_waiting,
        min_per_worker=min(found.shards_of, default=None),
        mean_per_worker=statistics.fmean(found.shards_of) if found.shards_of else None,
        max_per_worker=max(found.shards_of, default=None),
        min_left=min(found.left_of, default=None),
        max_left=max(found.left_of, default=None),
        owners=c.Page[m.ShardOwner](
            items=items,
            total=found.num_rows,
            limit=limit,
            offset=offset,
            next_offset=end if end < found.num_rows else None,
        ),
        last_move=None
        if move is None
        else m.ShardMove(
            at_s=move.at_s,
            generation=move.generation,
            reason=move.reason,
            num_moved=move.num_moved,
            num_workers=move.num_workers,
        ),
    )
