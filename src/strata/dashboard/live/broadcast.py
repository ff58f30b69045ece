"""Turn each sample into messages of the feed, and follow the journal."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from strata._version import __version__
from strata.coordinator.http import views
from strata.dashboard.http import models as m
from strata.dashboard.http import overview as o
from strata.dashboard.live import changes
from strata.dashboard.live.changes import Update
from strata.dashboard.live.feed import Feed, frame
from strata.dashboard.live.stream import Clients, EventStream
from strata.errors import StrataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from strata.coordinator.serve.engine import Engine
    from strata.dashboard.sample import Sample
    from strata.dashboard.sampler import Sampler

log = logging.getLogger(__name__)

MAX_JOBS = 50
"""Jobs with live updates, those with workers first; the others are in /api/overview."""
MAX_EVENTS = 200
"""Entries of the journal in one message."""
FOLLOW_EVERY_S = 0.2
"""Seconds between two looks at the journal. A failure reaches a page sooner than with the next sample."""
MAX_BEHIND = 2_000
"""Entries that may be waiting to be sent; if more are, the oldest are left out, and the page loads the list again."""


class Broadcast:
    def __init__(self, engine: Engine, sampler: Sampler) -> None:
        self.feed = Feed(secrets.token_hex(4))
        self.clients = Clients(self.feed)
        self._engine = engine
        self._sampler = sampler
        self._before: Sample | None = None
        self._summaries: dict[str, m.JobSummary] = {}
        self._health: m.HealthState | None = None
        self._seq = engine.last_seq
        """The last entry of the journal that was sent."""
        self._reading: asyncio.Task[None] | None = None
        self._following = asyncio.get_running_loop().create_task(self._follow(), name="strata-live-journal")
        sampler.listeners.append(self.update)

    async def stop(self) -> None:
        self.clients.stop()
        tasks = [task for task in (self._following, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, cursor: str, is_allowed: Callable[[], bool]) -> EventStream:
        """Return the response for a client that has everything up to `cursor`; empty for one that is new."""
        self.clients.check_room()
        feed = self.feed
        seq = feed.seq_of(cursor) if cursor else feed.last_seq
        if seq is not None and feed.has_since(seq):
            hello = m.Hello(cursor=feed.cursor_at(seq), interval_s=self._sampler.interval_s, version=__version__)
            first = frame("hello", hello.model_dump_json().encode(), feed.cursor_at(seq))
            return EventStream(self.clients, first=first, seq=seq, is_allowed=is_allowed)
        why = "the coordinator was restarted" if seq is None else "the page was away for too long"
        reset = m.Reset(cursor=feed.cursor, reason=why)
        first = frame("reset", reset.model_dump_json().encode(), feed.cursor)
        return EventStream(self.clients, first=first, seq=feed.last_seq, is_allowed=is_allowed)

    # -- messages --------------------------------------------------------------------------------------------------

    def update(self, sample: Sample) -> None:
        """Publish what is new in a sample."""
        for event, data, key in self._updates(sample):
            self.feed.publish(event, data.model_dump_json().encode(), key)
        self._before = sample
        self.clients.wake()

    def _updates(self, sample: Sample) -> Iterator[Update]:
        before, sampler = self._before, self._sampler
        yield from changes.gone(before, sample)
        known, self._summaries = self._summaries, {}
        for job in o.in_order(sample)[:MAX_JOBS]:
            values = sampler.values_of(job) if job.workers else {}
            summary = self._summaries[job.job_id] = o.summary(job, values, sampler.health_of(job))
            yield from changes.of_job(
                before.jobs.get(job.job_id) if before is not None else None,
                job,
                at_s=sample.at_s,
                summary=summary,
                summary_before=known.get(job.job_id),
                values=values,
            )
        health = o.health(sampler.health(sample))
        if health != self._health:
            self._health = health
            yield Update("health", health, "health")
        yield from changes.of_coordinator(sample, o.figures(sample))

    # -- journal ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_EVERY_S)
            is_reading = self._reading is not None and not self._reading.done()
            if self._engine.last_seq > self._seq and not is_reading and self._engine.not_leader() is None:
                self._reading = asyncio.get_running_loop().create_task(self._send_events(), name="strata-live-events")

    async def _send_events(self) -> None:
        """Send the next entries of the journal, which are read in a thread."""
        is_complete = True
        if self._engine.last_seq - self._seq > MAX_BEHIND:
            self._seq, is_complete = self._engine.last_seq - MAX_EVENTS, False
        journal, after = self._engine.journal, self._seq
        try:
            found = await asyncio.to_thread(
                views.events, journal, after=after, limit=MAX_EVENTS, job_id=None, kind=None, worker_id=None
            )
        except StrataError as error:
            log.debug("the journal cannot be read for live updates: %s", error)
            return
        self._seq = found.next_after
        if found.items:
            data = m.NewEvents(items=found.items, is_complete=is_complete)
            self.feed.publish("events", data.model_dump_json().encode())
            self.clients.wake()
