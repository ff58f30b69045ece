"""Convert the state of the core into the models of the API. Reads only."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from strata.coordinator.http import models as m
from strata.coordinator.state import events as e
from strata.coordinator.state.barriers import OpenBarrier
from strata.coordinator.state.checkpoints import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.coordinator.journal import Journal, Record
    from strata.coordinator.state.core import Core
    from strata.coordinator.state.job import Job
    from strata.coordinator.state.membership import Member
    from strata.coordinator.state.shards import Dataset

MAX_MISSING = 32
MAX_SCANNED = 10_000
SCAN_PAGE = 1_000


def jobs(core: Core, job_id: str | None) -> list[Job]:
    """Return all jobs, or the given one; raise `UnknownJob` if it does not exist."""
    return list(core.jobs.values()) if job_id is None else [core.job(job_id)]


def job(job: Job) -> m.Job:
    latest = job.checkpoints.latest()
    return m.Job(
        job_id=job.job_id,
        generation=job.membership.generation,
        reason=job.membership.generation_reason,
        num_workers=len(job.membership.members),
        num_suspects=sum(w.suspect_since_s is not None for w in job.membership.members.values()),
        num_datasets=len(job.shards.datasets),
        num_open_barriers=len(job.barriers.open),
        num_checkpoints=len(job.checkpoints.committed),
        checkpoint_id=latest.checkpoint.checkpoint_id if latest else None,
        checkpoint_step=latest.checkpoint.step if latest else None,
    )


def status_job(job: Job) -> m.StatusJob:
    return m.StatusJob(
        job_id=job.job_id,
        generation=job.membership.generation,
        num_workers=len(job.membership.members),
        num_datasets=len(job.shards.datasets),
        num_open_barriers=len(job.barriers.open),
    )


def worker(job_id: str, rank: int, member: Member, now_s: float) -> m.Worker:
    return m.Worker(
        job_id=job_id,
        worker_id=member.worker_id,
        rank=rank,
        incarnation=member.incarnation,
        state=member.state,
        step=member.step,
        epoch=member.epoch,
        capacity=member.joined.capacity,
        hostname=member.joined.hostname,
        silent_s=max(now_s - member.last_seen_s, 0.0),
        suspect=member.suspect_since_s is not None,
        metrics={n: s.last if math.isfinite(s.last) else None for n, s in member.metrics.items()},
        launch_rank=member.joined.launch_rank,
        attempt=member.joined.attempt,
    )


def dataset(job_id: str, dataset: Dataset) -> m.Dataset:
    return m.Dataset(
        job_id=job_id,
        dataset_id=dataset.spec.dataset_id,
        num_shards=dataset.spec.num_shards,
        total_samples=dataset.total_samples,
        epoch=dataset.epoch,
        num_done=dataset.num_done,
        complete=dataset.num_done == dataset.spec.num_shards,
        shuffle=dataset.spec.shuffle,
        seed=dataset.spec.seed,
    )


def checkpoints(job: Job) -> Iterator[e.CheckpointRecord | Attempt]:
    """Yield the checkpoints, oldest first; those that are not committed yet come last."""
    yield from job.checkpoints.committed.values()
    yield from job.checkpoints.attempts.values()


def checkpoint(job: Job, found: e.CheckpointRecord | Attempt) -> m.Checkpoint:
    return _attempt(job, found) if isinstance(found, Attempt) else _committed(job.job_id, found)


def _attempt(job: Job, attempt: Attempt) -> m.Checkpoint:
    spec = attempt.spec
    return m.Checkpoint(
        job_id=job.job_id,
        checkpoint_id=spec.checkpoint_id,
        state="open",
        type=spec.type,
        step=spec.step,
        epoch=spec.epoch,
        path=spec.path,
        generation=attempt.generation,
        num_acked=len(attempt.acks),
        num_ranks=len(job.membership.members),
        size_bytes=sum(ack.size_bytes for ack in attempt.acks.values()),
        model_hash="",
        hashes={},
        metadata={},
        data_cursor_bytes=0,
        committed_at_s=None,
    )


def _committed(job_id: str, record: e.CheckpointRecord) -> m.Checkpoint:
    spec = record.checkpoint
    return m.Checkpoint(
        job_id=job_id,
        checkpoint_id=spec.checkpoint_id,
        state="committed",
        type=spec.type,
        step=spec.step,
        epoch=spec.epoch,
        path=spec.path,
        generation=record.generation,
        num_acked=record.num_ranks,
        num_ranks=record.num_ranks,
        size_bytes=record.size_bytes,
        model_hash=record.model_hash,
        hashes=record.hashes,
        metadata=record.metadata,
        data_cursor_bytes=len(record.data_cursor),
        committed_at_s=record.committed_at_s,
    )


def barriers(job: Job) -> Iterator[OpenBarrier | tuple[str, int]]:
    """Yield the waiting barriers, then those released in this generation."""
    yield from job.barriers.open.values()
    yield from job.barriers.released


def barrier(job: Job, found: OpenBarrier | tuple[str, int], now_s: float) -> m.Barrier:
    if isinstance(found, OpenBarrier):
        return _open_barrier(job, found, now_s)
    num_members = job.barriers.released[found].num_members
    return m.Barrier(
        job_id=job.job_id,
        barrier_id=found[0],
        step=found[1],
        state="released",
        generation=job.membership.generation,
        num_members=num_members,
        num_arrived=num_members,
        missing=[],
        waited_s=None,
        remaining_s=None,
    )


def _open_barrier(job: Job, barrier: OpenBarrier, now_s: float) -> m.Barrier:
    awaited = job.membership.members if barrier.members is None else barrier.members
    missing = sorted(worker for worker in awaited if worker not in barrier.arrived)
    return m.Barrier(
        job_id=job.job_id,
        barrier_id=barrier.ticket.barrier_id,
        step=barrier.ticket.step,
        state="open",
        generation=barrier.ticket.generation,
        num_members=len(awaited),
        num_arrived=len(barrier.arrived),
        missing=missing[:MAX_MISSING],
        waited_s=max(now_s - barrier.opened_s, 0.0),
        remaining_s=max(barrier.deadline_s - now_s, 0.0),
    )


def events(
    journal: Journal, *, after: int, limit: int, job_id: str | None, kind: str | None, worker_id: str | None
) -> m.EventPage:
    """Read events from the journal, at most `MAX_SCANNED`. Blocks, so run it in a thread."""
    found: list[m.EventLine] = []
    here, num_scanned, more = after, 0, True
    while more and len(found) < limit and num_scanned < MAX_SCANNED:
        ask = SCAN_PAGE if kind or worker_id else limit - len(found)
        records = journal.read(after_seq=here, limit=ask, job_id=job_id)
        more = len(records) == ask
        num_scanned += len(records)
        for record in records:
            here = record.seq
            if kind is None or record.kind == kind:
                line = _line(record)
                if worker_id is None or _concerns(record, worker_id):
                    found.append(line)
            if len(found) == limit:
                more = more or record is not records[-1]
                break
    return m.EventPage(items=found, limit=limit, after=after, next_after=here, more=more)


def _line(record: Record) -> m.EventLine:
    event = e.decode(record.payload)
    return m.EventLine(
        seq=record.seq,
        at_s=record.at_s,
        at=datetime.fromtimestamp(record.at_s, tz=UTC).isoformat(timespec="milliseconds"),
        job_id=record.job_id,
        kind=record.kind,
        words=event.words(),
        reason=getattr(event, "reason", None),
        worker_id=getattr(event, "worker_id", None),
        generation=getattr(event, "generation", None),
    )


def _concerns(record: Record, worker_id: str) -> bool:
    event = e.decode(record.payload)
    return worker_id == getattr(event, "worker_id", None) or worker_id in getattr(event, "worker_ids", ())
