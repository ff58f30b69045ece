"""Read the state of the coordinator once a second, and hand the sample to everything that shows it.

The sample is taken by an ordinary call of the engine: it waits for the commit of what it has read, so the dashboard
never shows what a crash could undo. Nothing is added to the cost of a heartbeat. The history is written by a thread of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from strata.dashboard import health
from strata.dashboard.goodput import Lives
from strata.dashboard.history.file import HistoryFile
from strata.dashboard.history.store import HistoryStore
from strata.dashboard.rates import StepRates
from strata.dashboard.sample import Sample, coordinator_values, job_values, take
from strata.dashboard.stragglers import Straggler, Stragglers
from strata.dashboard.uses import UseHistory
from strata.errors import StrataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strata.clock import Clock
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.serve.session import SessionHub
    from strata.coordinator.state.core import Core
    from strata.dashboard.health import Finding, Verdict
    from strata.dashboard.run_record import Ending
    from strata.dashboard.sample import JobSample, Spread

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
ANSWER_WITHIN_S = 10.0
"""Longest wait for a sample; the journal may be slow."""
FIRST_WITHIN_S = 5.0
"""Longest wait of a request for the first sample."""
WRITE_EVERY_S = 10.0
STOP_WITHIN_S = 5.0
"""For the last write of the history."""


class Sampler:
    """Samples one coordinator; lives on its event loop."""

    def __init__(self, engine: Engine, hub: SessionHub, *, history: Path | None, interval_s: float) -> None:
        self.interval_s = interval_s
        self.ended: Ending | None = None
        """The end of the run whose state this is; None while it is active."""
        self.store = HistoryStore()
        self.rates = StepRates()
        self.lives = Lives()
        """The processes of all jobs, for the ledger."""
        self.uses = UseHistory()
        self.stragglers = Stragglers()
        self.latest: Sample | None = None
        """None until the first sample; again while another coordinator leads."""
        self.listeners: list[Callable[[Sample], None]] = []
        """Called after each sample, once rates and history are up to date."""
        self._engine = engine
        self._hub = hub
        self._slow = health.SlowRanks()
        self._findings: dict[str, list[Finding]] = {}
        self._rates_of: dict[str, dict[str, float]] = {}
        self._path = history
        self._file: HistoryFile | None = None
        self._is_file_broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strata-history")
        self._written_s = 0.0
        self._sampled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="strata-dashboard")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._write()
                await self._in_thread(self._close_file)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except Exception:
                # Process boundary: a page without new values is better than a coordinator without a dashboard.
                log.exception("unexpected error while sampling for the dashboard")
            await asyncio.sleep(self.interval_s)

    async def _step(self) -> None:
        if self._engine.not_leader() is not None:
            self.latest = None
            self._sampled.clear()
            return
        if self._path is not None and self._file is None and not self._is_file_broken:
            await self._open_file()
        sample = await self.sample()
        if sample is None:
            return
        self.accept(sample)
        if sample.monotonic_s - self._written_s >= WRITE_EVERY_S:
            self._written_s = sample.monotonic_s
            await self._write()

    # -- samples ---------------------------------------------------------------------------------------------------

    async def current(self) -> Sample | None:
        """Return the newest sample; shortly after the start, wait for the first one, which follows the history that is
        read from its file. None if there is none in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WITHIN_S):
                await self._sampled.wait()
        return self.latest

    def age_s(self, sample: Sample) -> float:
        return self._engine.metrics.now_s() - sample.monotonic_s

    async def sample(self) -> Sample | None:
        """Return the state now, or None if this coordinator cannot answer for it."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._engine.call(lambda core, clock: lambda: self._read(core, clock), done)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer = await answered
        except TimeoutError:
            return None
        if isinstance(answer, StrataError):  # the journal failed; requests report it once the last sample is old
            log.debug("no sample for the dashboard: %s", answer)
            return None
        assert isinstance(answer, Sample)
        return answer

    def _read(self, core: Core, clock: Clock) -> Sample | StrataError:
        now_s, wall_s = clock.monotonic_s(), clock.wall_s()
        try:
            return self._sample(take(core, monotonic_s=now_s, wall_s=wall_s), now_s, wall_s)
        except Exception as error:
            # Process boundary: calls of workers run in the same batch and must not fail.
            log.exception("unexpected error while sampling for the dashboard")
            return StrataError(f"the dashboard cannot read the jobs ({type(error).__name__}); see the log")

    def _sample(self, jobs: dict[str, JobSample], now_s: float, wall_s: float) -> Sample:
        metrics = self._engine.metrics
        return Sample(
            at_s=wall_s,
            monotonic_s=now_s,
            jobs=jobs,
            requests_per_s=metrics.calls_per_s(),
            barrier_p50_s=metrics.recent_barrier_s(50),
            barrier_p99_s=metrics.recent_barrier_s(99),
            num_sessions=self._hub.num_sessions,
            heartbeat_s=self._engine.config.lease.heartbeat_s,
            failure=self._engine.failure.message if self._engine.failure is not None else "",
        )

    def accept(self, sample: Sample) -> None:
        """Update everything that is computed from samples."""
        self.rates.update(sample)
        self.lives.update(sample)
        self.uses.update(sample)
        self.stragglers.update(sample, self.uses)
        now_s = sample.monotonic_s
        self._rates_of = {job.job_id: self.rates.of_job(job, now_s) for job in sample.jobs.values() if job.workers}
        self._slow.update(sample, self._rates_of)
        self._findings = {
            job.job_id: health.findings(
                job,
                now_s=now_s,
                heartbeat_s=sample.heartbeat_s,
                rates=self._rates_of[job.job_id],
                slow=self._slow.of_job(job, now_s),
                straggler=found if isinstance(found := self.stragglers.of_job(job.job_id), Straggler) else None,
            )
            for job in sample.jobs.values()
            if job.workers
        }
        self._add_values(sample)
        self.latest = sample
        self._sampled.set()
        for listener in self.listeners:
            listener(sample)

    def _add_values(self, sample: Sample) -> None:
        self.store.add("", sample.at_s, coordinator_values(sample))
        for job in sample.jobs.values():
            if job.workers:
                self.store.add(job.job_id, sample.at_s, self.values_of(job))

    def values_of(self, job: JobSample) -> dict[str, Spread]:
        """Return the newest values of a job's series."""
        return job_values(job, list(self._rates_of.get(job.job_id, {}).values()))

    def health_of(self, job: JobSample) -> Verdict:
        return health.of_job(job, self._findings.get(job.job_id, []))

    def health(self, sample: Sample) -> Verdict:
        return health.of_all(sample, (each for found in self._findings.values() for each in found))

    # -- history ---------------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _open_file(self) -> None:
        assert self._path is not None
        path = self._path
        try:
            self._file = await self._in_thread(lambda: HistoryFile(path))
            self.store.restore(await self._in_thread(self._file.load))
            self.lives.restore(await self._in_thread(self._file.load_lives))
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    async def _write(self) -> None:
        file = self._file
        if file is None:
            return
        changes, lives = self.store.take_changes(), self.lives.take_changes()
        is_written = False
        try:
            await self._in_thread(lambda: file.write(changes, lives.changed, lives.forgotten))
            is_written = True
        except sqlite3.Error as error:
            if not self._is_file_broken:
                log.warning("the history of the dashboard cannot be written to %s: %s", self._path, error)
            self._is_file_broken = True
        else:
            self._is_file_broken = False
        finally:
            if not is_written:
                self.lives.put_back(lives)

    def _give_up(self, error: Exception) -> None:
        """Keep the history in memory alone: a directory that cannot be written must not end the coordinator."""
        log.warning("the history of the dashboard is not saved: %s: %s", self._path, error)
        self._is_file_broken = True

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
