"""All jobs of a coordinator, without I/O: calls and times in; answers, events and notices out.

State changes in place, for speed. The core is pure in that it reads no clock, socket or disk: the same calls at the
same times give the same state. Ten thousand workers can thus be tested in milliseconds, and a production journal can be
replayed on a laptop.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from strata.coordinator.state import events as e
from strata.coordinator.state import limits
from strata.coordinator.state.barriers import BarrierEnded
from strata.coordinator.state.job import DEFAULT_JOB, CommandQueued, GenerationChanged, Job, Outbox
from strata.errors import UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.state.job import Notice


class Core:
    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.jobs: dict[str, Job] = {}
        self.spent = e.SpentNumbers()
        """The highest numbers used by dropped jobs."""
        self._outbox = Outbox()
        self._last_tick_s: float | None = None
        self._lenient_until_s = 0.0
        """Until then, connections may have been lost because the coordinator itself was paused."""

    # -- jobs ------------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job:
        job = self.jobs.get(job_id or DEFAULT_JOB)
        if job is None:
            limits.check_id(job_id or DEFAULT_JOB, "job_id")
            raise UnknownJob(
                f"job {job_id or DEFAULT_JOB!r} does not exist; register a worker or a dataset to create it",
                field="job_id",
            )
        return job

    @contextmanager
    def job_or_new(self, job_id: str) -> Iterator[Job]:
        """Yield the job; a new one is created only if the call inside succeeds."""
        job_id = job_id or DEFAULT_JOB
        job = self.jobs.get(job_id)
        if job is None:
            limits.check_id(job_id, "job_id")
            limits.check_room(len(self.jobs), self.config.limits.max_jobs, "jobs", "max_jobs", field="job_id")
            job = self._new_job(job_id)
        yield job
        self.jobs[job_id] = job

    def _new_job(self, job_id: str) -> Job:
        return Job(job_id, self.config, self._outbox, self.spent)

    def drop_job(self, job_id: str, *, force: bool, generation: int, reason: str) -> bool:
        """Delete a job; return False if it does not exist. `generation` other than 0 must be the current one."""
        job_id = job_id or DEFAULT_JOB
        limits.check_id(job_id, "job_id")
        limits.check_text(reason, "reason")
        job = self.jobs.get(job_id)
        if job is None:
            return False
        dropped = job.drop(force=force, generation=generation, reason=reason)
        self.apply(dropped)
        self._outbox.unsealed.pop(job_id, None)
        self._outbox.events.append(dropped)
        return True

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Check leases and deadlines. Silence during a pause of the coordinator does not count."""
        last_s = now_s if self._last_tick_s is None else self._last_tick_s
        gap_s = now_s - last_s
        self._last_tick_s = max(last_s, now_s)
        if gap_s > self.config.lease.lease_s / 2:
            self._lenient_until_s = now_s + self.config.lease.lease_s
            for job in self.jobs.values():
                job.membership.excuse(gap_s, now_s)
                job.barriers.excuse(gap_s)
        for job in self.jobs.values():
            job.tick(self._last_tick_s, lenient=self._last_tick_s < self._lenient_until_s)

    def end(self) -> None:
        """Take the members out of a replayed state whose coordinator has ended: none of them runs any more."""
        for job in self.jobs.values():
            job.membership.end()
        self.drain()

    # -- decisions -------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        return bool(self._outbox.events or self._outbox.notices or self._outbox.unsealed)

    def drain(self) -> tuple[list[e.Event], list[Notice]]:
        """Seal the generations and return everything decided since the last call."""
        unsealed, self._outbox.unsealed = self._outbox.unsealed, {}
        for job in unsealed.values():
            job.seal()
        events, notices = self._outbox.events, self._outbox.notices
        self._outbox.events, self._outbox.notices = [], []
        return events, notices

    def announce(self, notices: Iterable[Notice]) -> None:
        """Record that these notices are durable, so heartbeats may report them."""
        for notice in notices:
            job = None if isinstance(notice, BarrierEnded) else self.jobs.get(notice.job_id)
            if job is None:  # the job was dropped meanwhile
                continue
            if isinstance(notice, GenerationChanged):
                job.announced = (notice.generation, notice.num_workers)
            elif isinstance(notice, CommandQueued):
                job.announced_command_id = notice.command.command_id

    # -- durable state ---------------------------------------------------------------------------------------------

    def apply(self, event: e.Event) -> None:
        if isinstance(event, e.JobDropped):
            self._apply_dropped(event)
            return
        job = self.jobs.get(event.job_id)
        if job is None:
            job = self.jobs[event.job_id] = self._new_job(event.job_id)
        job.apply(event)

    def _apply_dropped(self, event: e.JobDropped) -> None:
        del self.jobs[event.job_id]
        self.spent = e.SpentNumbers(
            generation=max(self.spent.generation, event.generation),
            incarnation=max(self.spent.incarnation, event.incarnation),
            command_id=max(self.spent.command_id, event.command_id),
        )

    def snapshot(self) -> e.Snapshot:
        jobs = tuple(job.snapshot() for job in self.jobs.values())
        return (*jobs, self.spent) if self.spent != e.SpentNumbers() else jobs

    def restore(self, snapshots: e.Snapshot) -> None:
        for snapshot in snapshots:
            if isinstance(snapshot, e.SpentNumbers):
                self.spent = snapshot
                continue
            job = self.jobs[snapshot.job_id] = self._new_job(snapshot.job_id)
            job.restore(snapshot)

    def resume(self, now_s: float, *, end_lost: bool = False) -> None:
        """Renew every lease after a replay, and announce the replayed state.

        `end_lost`: the end of the journal was lost, so more had been announced than was replayed.
        """
        self._last_tick_s = now_s
        for job in self.jobs.values():
            job.membership.renew_all(now_s)
            job.announced = (job.membership.generation, len(job.membership.members))
            job.announced_command_id = job.commands.last_id
            if end_lost:
                job.skip_numbers()
            if job.shards.has_orphans(job.membership):
                job.membership.changes.append("the end of the journal was lost, which left shards without an owner")
            if job.membership.changes:
                self._outbox.unsealed[job.job_id] = job
