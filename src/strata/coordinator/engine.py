"""The one loop around the core: it puts calls in an order, makes what they decided durable, and answers after that.

While one batch of events is on its way to the disk the next gathers; that is the group commit. An answer is held until
everything that it may have seen is durable. Heartbeats alone are answered at once, from what has been announced.

If a batch cannot be written, the core is thrown away and folded again from the journal: nobody has been told anything
that was not durable, so nobody notices but those whose calls fail, and they may repeat them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.clock import Clock, Moment, look
from strata.coordinator import events as e
from strata.coordinator.barriers import BarrierEnded, Ticket
from strata.coordinator.core import Core
from strata.coordinator.journal import Entry
from strata.errors import JournalError, JournalWriteFailed, StrataError

if TYPE_CHECKING:
    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.job import Notice
    from strata.coordinator.journal import Damage, Journal

log = logging.getLogger(__name__)

Decide = Callable[[Core, Moment], Any]
"""A call on the core at a time: gives the answer, a function that gives it after the seal, or a ticket to wait for."""
Done = Callable[[Any], None]
"""Takes the answer, or the `StrataError`; called exactly once."""


@dataclass(slots=True)
class Batch:
    """What becomes durable together, and what is told after that."""

    events: list[e.Event]
    notices: list[Notice]
    answers: list[tuple[Any, Done]]
    snapshot: bytes | None = None
    riders: list[tuple[Any, Done]] = field(default_factory=list)
    """Answers that decided nothing but may have seen this batch."""


class Engine:
    def __init__(self, journal: Journal, config: CoordinatorConfig, clock: Clock) -> None:
        self.config = config
        self.core = Core(config)
        self.damage: Damage | None = None
        """What was found broken in the journal at start."""
        self.failure: JournalError | None = None
        """Why the journal cannot be written at present."""
        self.listeners: list[Callable[[list[Notice]], None]] = []
        self.journal = journal
        self._clock = clock
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strata-journal")
        self._held: list[tuple[Any, Done]] = []
        self._waiters: dict[Ticket, list[Done]] = {}
        self._in_flight: Batch | None = None
        self._num_since_snapshot = 0
        self._flush_scheduled = False
        self._core_lost = False
        """The last batch failed and the state before it could not be read back yet."""
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Folds the state from the journal and begins to watch the leases."""
        self._rebuild()
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(), name="strata-ticker")
        self._schedule_flush()

    async def stop_watching(self) -> None:
        """From here on nobody is declared dead: connections that end now end because we leave."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None

    async def stop(self) -> None:
        """Answers what is under way and lets go of the journal. The members stay: a restart finds them."""
        await self.stop_watching()
        await self._idle.wait()
        self._writer.shutdown()
        self.journal.close()

    def _rebuild(self) -> None:
        loaded = self.journal.load()
        core = Core(self.config)
        if loaded.snapshot is not None:
            core.restore(e.decode_snapshot(loaded.snapshot))
        for record in loaded.records:
            core.apply(e.decode(record.payload))
        core.resume(self._clock.monotonic_s(), end_lost=loaded.damage is not None)
        self.core = core
        self._num_since_snapshot = len(loaded.records)
        if loaded.damage is not None:
            self.damage = loaded.damage
            log.error(
                "THE JOURNAL IS DAMAGED from entry %d on (%s): %d entries were set aside at %s; "
                "the state of entry %d is used",
                loaded.damage.seq,
                loaded.damage.reason,
                loaded.damage.num_lost,
                loaded.damage.kept_at,
                loaded.damage.seq - 1,
            )

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease.tick_s)
            if self._core_lost:
                self._try_rebuild()
                continue
            self.core.tick(self._clock.monotonic_s())
            if self.core.has_news:
                self._schedule_flush()

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, decide: Decide, done: Done) -> None:
        """Carries out a call; `done` hears the answer when it may be told."""
        answer = self._decided(decide)
        if isinstance(answer, Ticket):
            self._waiters.setdefault(answer, []).append(done)
            self._schedule_flush()
        elif self.core.has_news or self._held:
            self._held.append((answer, done))
            self._schedule_flush()
        elif self._in_flight is not None:
            self._in_flight.riders.append((_taken(answer), done))
        else:
            done(_taken(answer))

    def call_volatile(self, decide: Decide, done: Done) -> None:
        """For heartbeats: answered at once, from what is durable already."""
        done(self._decided(decide))
        if self.core.has_news:
            self._schedule_flush()

    def _decided(self, decide: Decide) -> Any:
        if self._core_lost:
            return self.failure
        try:
            return decide(self.core, look(self._clock))
        except StrataError as error:
            return error
        except Exception as error:
            # The edge of the process: a message that we stumble over must not take the other callers with it.
            log.exception("a call failed in a way that was not foreseen")
            return StrataError(
                f"the coordinator failed on this call ({type(error).__name__}: {error}); its log says where"
            )

    def suspect(self, job_id: str, worker_id: str, incarnation: int) -> None:
        """A worker's connection was reset."""
        job = self.core.jobs.get(job_id)
        if job is not None:
            job.membership.suspect(worker_id, incarnation, self._clock.monotonic_s())

    # -- group commit ----------------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and self._in_flight is None:
            self._flush_scheduled = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        events, notices = self.core.drain()
        held, self._held = self._held, []
        batch = Batch(events, notices, [(_taken(answer), done) for answer, done in held])
        if not events:
            self._deliver(batch)
            self._settle()
            return
        self._num_since_snapshot += len(events)
        if self._num_since_snapshot >= self.config.journal.snapshot_every:
            batch.snapshot = e.encode_snapshot(self.core.snapshot())
            self._num_since_snapshot = 0
        self._in_flight = batch
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write, batch, self._clock.wall_s())
        writing.add_done_callback(self._written)

    def _write(self, batch: Batch, at_s: float) -> None:
        entries = [Entry(job_id=ev.job_id, kind=ev.kind, at_s=at_s, payload=e.encode(ev)) for ev in batch.events]
        self.journal.append(entries, snapshot=batch.snapshot)

    def _written(self, writing: asyncio.Future[None]) -> None:
        batch, self._in_flight = self._in_flight, None
        assert batch is not None
        error = writing.exception()
        if error is None:
            self.failure = None
            self._deliver(batch)
        else:
            self._fail(batch, error)
        self._settle()

    def _settle(self) -> None:
        if self.core.has_news or self._held:
            self._schedule_flush()
        elif self._in_flight is None and not self._flush_scheduled:
            self._idle.set()

    def _deliver(self, batch: Batch) -> None:
        self.core.announce(batch.notices)
        for answer, done in batch.answers:
            done(answer)
        for answer, done in batch.riders:
            done(answer)
        for notice in batch.notices:
            if isinstance(notice, BarrierEnded):
                for done in self._waiters.pop(notice.ticket, ()):
                    done(notice.outcome)
        for listener in self.listeners:
            listener(batch.notices)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Nothing of this batch, nor of what was decided on top of it, has happened."""
        failure = error if isinstance(error, JournalError) else JournalWriteFailed(f"the journal failed: {error}")
        if self.failure is None:
            log.error("calls are refused: %s", failure)
        self.failure = failure
        held, self._held = self._held, []
        waiters, self._waiters = self._waiters, {}
        for _, done in [*batch.answers, *batch.riders, *held]:
            done(failure)
        for dones in waiters.values():
            for done in dones:
                done(failure)
        self._try_rebuild()

    def _try_rebuild(self) -> None:
        try:
            self._rebuild()
            self._core_lost = False
        except JournalError as error:
            self.core = Core(self.config)
            self.failure = error
            self._core_lost = True


def _taken(answer: Any) -> Any:
    """Answers that depend on the seal come as functions."""
    if not callable(answer):
        return answer
    try:
        return answer()
    except StrataError as error:
        return error
