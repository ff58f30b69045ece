"""The engine: order calls, commit their events, then answer.

While one batch of events is being written, the next one collects (group commit). An answer is held back until
everything that it may have read is durable. Only heartbeats are answered at once, from announced state.

Only a leader may answer: once its lease has expired, every answer, including that of a heartbeat, is `NotLeader`.

If a batch cannot be written, the engine discards the core and rebuilds it from the journal. No caller has seen anything
that was not durable, so only the failed calls notice, and these may be retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.clock import Clock
from strata.coordinator.journal import Entry
from strata.coordinator.serve.metrics import Metrics
from strata.coordinator.state import events as e
from strata.coordinator.state.barriers import BarrierEnded, Released, Ticket
from strata.coordinator.state.core import Core
from strata.errors import JournalError, JournalFenced, JournalWriteFailed, NotLeader, StrataError

if TYPE_CHECKING:
    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.journal import Damage, Journal, Leadership
    from strata.coordinator.state.job import Notice

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
"""Seconds between two attempts to write to a failed journal while no call arrives."""

Decide = Callable[[Core, Clock], Any]
"""A call on the core; the clock is for calls that need the time. Returns the answer, a function that returns it after
the seal, or a ticket to wait for."""
Done = Callable[[Any], None]
"""Receives the answer or the `StrataError`; called exactly once."""


@dataclass(slots=True)
class Batch:
    """Events that are committed together, and the answers to send afterwards."""

    events: list[e.Event]
    notices: list[Notice]
    answers: list[tuple[Any, Done]]
    snapshot: bytes | None = None
    riders: list[tuple[Any, Done]] = field(default_factory=list)
    """Answers without events that may have read the state of this batch."""
    commit_s: float = 0.0
    """Duration of the commit."""
    last_seq: int = 0
    """Number of its last entry in the journal."""
    num_bytes: int = 0


class Engine:
    def __init__(
        self, journal: Journal, config: CoordinatorConfig, clock: Clock, metrics: Metrics | None = None
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics(clock)
        self.core = Core(config)
        self.damage: Damage | None = None
        """Damage found in the journal at startup."""
        self.failure: JournalError | None = None
        """Why the journal cannot be written at present."""
        self.leadership: Leadership | None = None
        """Without one, the engine always leads."""
        self.standby: NotLeader | None = None
        """Set while another coordinator leads: the answer to every call."""
        self.on_fenced: Callable[[JournalFenced], None] | None = None
        """Called when the journal reports that another coordinator leads."""
        self.listeners: list[Callable[[list[Notice]], None]] = []
        self.journal = journal
        self.last_seq = 0
        """Number of the newest entry of the journal."""
        self._clock = clock
        self._probed_s = clock.monotonic_s()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strata-journal")
        self._held: list[tuple[Any, Done]] = []
        self._waiters: dict[Ticket, list[Done]] = {}
        self._in_flight: Batch | None = None
        self._num_since_snapshot = 0
        self._flush_scheduled = False
        self._core_lost = False
        """The last batch failed, and the state before it could not be read back yet."""
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Rebuild the state from the journal and start to watch leases."""
        self._rebuild()
        self.standby = None
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(), name="strata-ticker")
        self._schedule_flush()

    def replay(self) -> None:
        """Rebuild the state of a coordinator that has ended. Nothing is watched, and reads write nothing."""
        self._rebuild()
        self.core.end()

    async def stop_watching(self) -> None:
        """Stop declaring workers dead: connections that close from now on close because we shut down."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None

    async def stop(self) -> None:
        """Answer the calls in progress and close the journal. Members stay registered, for a restarted coordinator."""
        await self.stop_watching()
        await self._idle.wait()
        self._writer.shutdown()
        self.journal.close()

    def not_leader(self) -> NotLeader | None:
        """Why this coordinator may not answer at present; None if it leads."""
        if self.standby is not None:
            return self.standby
        if self.leadership is None or self._clock.monotonic_s() < self.leadership.valid_until_s:
            return None
        return NotLeader(
            "this coordinator's leadership has expired and is not renewed yet; try the next address in your list"
        )

    @property
    def refusal(self) -> StrataError | None:
        """Why calls are rejected at present, for health checks; None if they are not."""
        return self.not_leader() or self.failure

    def _rebuild(self) -> None:
        loaded = self.journal.load()
        core = Core(self.config)
        if loaded.snapshot is not None:
            core.restore(e.decode_snapshot(loaded.snapshot))
        for record in loaded.records:
            core.apply(e.decode(record.payload))
        core.resume(self._clock.monotonic_s(), end_lost=loaded.damage is not None)
        self.core = core
        self.last_seq = loaded.last_seq
        self._num_since_snapshot = len(loaded.records)
        if loaded.damage is not None:
            self.damage = loaded.damage
            log.error(
                "THE JOURNAL IS DAMAGED from entry %d on (%s): %d entries were moved to %s;  "
                "continuing with the state of entry %d",
                loaded.damage.seq,
                loaded.damage.reason,
                loaded.damage.num_lost,
                loaded.damage.kept_at,
                loaded.damage.seq - 1,
            )

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease.tick_s)
            self.metrics.sample()
            if self.not_leader():
                continue
            if self._core_lost:
                self._try_rebuild()
                continue
            if self.failure is not None:
                self._probe()
            self.core.tick(self._clock.monotonic_s())
            if self.core.has_news:
                self._schedule_flush()

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, decide: Decide, done: Done) -> None:
        """Run a call; `done` receives the answer once it may be announced."""
        self._answer(self._decided(decide), done)

    def call_volatile(self, decide: Decide, done: Done) -> None:
        """Run a heartbeat: answered at once, from durable state. An error may depend on new state, so it waits for the
        commit.
        """
        answer = self._decided(decide)
        if isinstance(answer, StrataError):
            self._answer(answer, done)
            return
        done(answer)  # `_decided` has just checked the lease
        if self.core.has_news:
            self._schedule_flush()

    def _answer(self, answer: Any, done: Done) -> None:
        if isinstance(answer, Ticket):
            if answer not in self._waiters:
                self.metrics.barrier_opened(answer)
            self._waiters.setdefault(answer, []).append(done)
            self._schedule_flush()
        elif self.core.has_news or self._held:
            self._held.append((answer, done))
            self._schedule_flush()
        elif self._in_flight is not None:
            self._in_flight.riders.append((_resolved(answer), done))
        else:
            self._send_answers([(_resolved(answer), done)])

    def _decided(self, decide: Decide) -> Any:
        if refusal := self.not_leader():
            return refusal
        if self._core_lost:
            return self.failure
        try:
            return decide(self.core, self._clock)
        except StrataError as error:
            return error
        except Exception as error:
            # Process boundary: a call that fails unexpectedly must not affect other callers.
            log.exception("unexpected error in a call")
            return StrataError(f"the coordinator failed on this call ({type(error).__name__}: {error}); see its log")

    async def journal_bytes(self) -> int:
        """Return the size of the journal, read between two commits in their thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, self.journal.size_bytes)

    @property
    def num_unannounced(self) -> int:
        """The number of answers that wait for a commit."""
        batch = self._in_flight
        return len(self._held) + (len(batch.answers) + len(batch.riders) if batch else 0)

    def suspect(self, job_id: str, worker_id: str, incarnation: int) -> None:
        """Mark a worker as suspect because its connection was reset."""
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
        batch = Batch(events, notices, [(_resolved(answer), done) for answer, done in held])
        if not events:
            self._deliver(batch)
            self._settle()
            return
        self._num_since_snapshot += len(events)
        if self._num_since_snapshot >= self.config.journal.snapshot_every:
            batch.snapshot = e.encode_snapshot(self.core.snapshot())
            self._num_since_snapshot = 0
        self._commit(batch)

    def _probe(self) -> None:
        """Try to write a snapshot, so that the journal recovers even if no call arrives."""
        if self._in_flight is not None or self._flush_scheduled:
            return
        if self._clock.monotonic_s() - self._probed_s < PROBE_EVERY_S:
            return
        self._probed_s = self._clock.monotonic_s()
        self._idle.clear()
        self._commit(Batch([], [], [], snapshot=e.encode_snapshot(self.core.snapshot())))

    def _commit(self, batch: Batch) -> None:
        self._in_flight = batch
        loop = asyncio.get_running_loop()
        try:
            writing = loop.run_in_executor(self._writer, self._write, batch, self._clock.wall_s())
        except RuntimeError as error:  # the interpreter is exiting; answer the waiting calls
            writing = loop.create_future()
            writing.set_exception(JournalWriteFailed(f"the journal is closed: {error}"))
        writing.add_done_callback(self._written)

    def _write(self, batch: Batch, at_s: float) -> None:
        entries = [Entry(job_id=ev.job_id, kind=ev.kind, at_s=at_s, payload=e.encode(ev)) for ev in batch.events]
        began_s = self._clock.monotonic_s()
        batch.last_seq = self.journal.append(entries, snapshot=batch.snapshot)
        batch.commit_s = self._clock.monotonic_s() - began_s
        batch.num_bytes = sum(len(entry.payload) for entry in entries) + len(batch.snapshot or b"")

    def _written(self, writing: asyncio.Future[None]) -> None:
        batch, self._in_flight = self._in_flight, None
        assert batch is not None
        error = writing.exception()
        if error is None:
            self.failure = None
            self.last_seq = max(self.last_seq, batch.last_seq)
            self.metrics.committed(
                batch.events,
                seconds=batch.commit_s,
                num_bytes=batch.num_bytes,
                snapshot=batch.snapshot is not None,
            )
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
        self._send_answers([*batch.answers, *batch.riders])
        for notice in batch.notices:
            if isinstance(notice, BarrierEnded):
                self.metrics.barrier_ended(notice.ticket, released=isinstance(notice.outcome, Released))
                self._send_answers([(notice.outcome, done) for done in self._waiters.pop(notice.ticket, ())])
        if not self.not_leader():
            for listener in self.listeners:
                listener(batch.notices)

    def _send_answers(self, answers: list[tuple[Any, Done]]) -> None:
        """Check the lease once more, as close to the wire as possible. A fact that is held back is durable all the
        same: the next leader will report it.
        """
        refusal = self.not_leader()
        for answer, done in answers:
            done(refusal or answer)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """Discard this batch and everything decided on top of it."""
        failure = error if isinstance(error, JournalError) else JournalWriteFailed(f"the journal failed: {error}")
        if self.failure is None:
            log.error("rejecting calls: %s", failure)
        self.failure = failure
        self._probed_s = self._clock.monotonic_s()
        self.metrics.commit_failed()
        held, self._held = self._held, []
        waiters, self._waiters = self._waiters, {}
        for _, done in [*batch.answers, *batch.riders, *held]:
            done(failure)
        for dones in waiters.values():
            for done in dones:
                done(failure)
        self._try_rebuild()
        if isinstance(failure, JournalFenced) and self.on_fenced is not None:
            self.on_fenced(failure)

    def _try_rebuild(self) -> None:
        try:
            self._rebuild()
            self._core_lost = False
        except JournalError as error:
            self.core = Core(self.config)
            self.failure = error
            self._core_lost = True


def _resolved(answer: Any) -> Any:
    """Resolve an answer that depends on the seal and is therefore a function."""
    if not callable(answer):
        return answer
    try:
        return answer()
    except StrataError as error:
        return error
