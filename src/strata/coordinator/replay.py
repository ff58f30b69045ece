"""Read a journal: its events in words, and the state that results from them.

Read-only, and safe beside a running coordinator. Events older than the retained history are folded into a snapshot and
can no longer be listed; the state is complete all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.journal import open_journal
from strata.coordinator.state import events as e
from strata.coordinator.state.core import Core
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.coordinator.journal import Damage, Record

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class ReplayLine:
    seq: int
    at_s: float
    job_id: str
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    dataset_id: str
    epoch: int
    num_done: int
    num_shards: int
    shards_by_worker: dict[str, int]


@dataclass(frozen=True, slots=True)
class JobSummary:
    job_id: str
    generation: int
    reason: str
    workers: list[str]
    datasets: list[DatasetSummary] = field(default_factory=list)
    checkpoint_id: str = ""
    checkpoint_step: int = 0


class Replay:
    """A journal opened for reading; use it as a context manager."""

    def __init__(self, state: str) -> None:
        self._journal = open_journal(state, readonly=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def lines(self, *, job_id: str | None = None, after: int = 0, until: int | None = None) -> Iterator[ReplayLine]:
        """Yield the entries after `after`, up to and including `until`, oldest first."""
        for record in self._records(job_id, after, until):
            event = e.decode(record.payload)
            yield ReplayLine(record.seq, record.at_s, record.job_id, record.kind, event.words())

    def events(self, *, job_id: str | None = None) -> Iterator[e.Event]:
        for record in self._records(job_id, 0, None):
            yield e.decode(record.payload)

    def summary(self, *, job_id: str | None = None, until: int | None = None) -> tuple[list[JobSummary], Damage | None]:
        """Return the state after entry `until` (default: the last), and the damage found in the journal."""
        loaded = self._journal.load()
        core = Core(CoordinatorConfig())
        if loaded.snapshot is not None:
            if until is not None and until < loaded.snapshot_seq:
                raise InvalidArgument(
                    f"the state after entry {until} is folded into the snapshot of entry {loaded.snapshot_seq}; "
                    "choose a later entry",
                    field="until",
                )
            core.restore(e.decode_snapshot(loaded.snapshot))
        for record in loaded.records:
            if until is None or record.seq <= until:
                core.apply(e.decode(record.payload))
        jobs = [_job_summary(core, name) for name in core.jobs if job_id in (None, name)]
        return jobs, loaded.damage

    def _records(self, job_id: str | None, after: int, until: int | None) -> Iterator[Record]:
        while page := self._journal.read(after_seq=after, limit=PAGE, job_id=job_id):
            for record in page:
                if until is not None and record.seq > until:
                    return
                yield record
            after = page[-1].seq


def _job_summary(core: Core, job_id: str) -> JobSummary:
    job = core.jobs[job_id]
    latest = job.checkpoints.latest()
    members = job.membership.members.values()
    return JobSummary(
        job_id=job_id,
        generation=job.membership.generation,
        reason=job.membership.generation_reason,
        workers=[m.worker_id for m in members],
        datasets=[
            DatasetSummary(
                dataset_id=d.spec.dataset_id,
                epoch=d.epoch,
                num_done=d.num_done,
                num_shards=d.spec.num_shards,
                shards_by_worker={m.worker_id: int((d.owners == m.incarnation).sum()) for m in members},
            )
            for d in job.shards.datasets.values()
        ],
        checkpoint_id=latest.checkpoint.checkpoint_id if latest else "",
        checkpoint_step=latest.checkpoint.step if latest else 0,
    )
