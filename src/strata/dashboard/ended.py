"""The page of a run that is over: what its directory has left behind, served by the code that serves a live run.

The journal and the history are copied into a private directory when the page is opened, and replayed from there. So
nothing in the run's directory is written or locked, the run can be resumed at any time, and an open page keeps showing
the run as it was. Time stands still at the last record: no heartbeat is late, and the ledger ends there. The workers
of a run whose agent was killed are still members in its journal; none of them runs, so none is shown.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strata.clock import ManualClock, SystemClock
from strata.coordinator.http.app import make_app
from strata.coordinator.journal.open import open_journal
from strata.coordinator.serve.admission import AdmissionControl
from strata.coordinator.serve.backend import EngineBackend
from strata.coordinator.serve.engine import Engine
from strata.coordinator.serve.metrics import Metrics
from strata.coordinator.serve.service import METHODS
from strata.coordinator.serve.session import SessionHub
from strata.dashboard.explorer.part import OpenPlaces
from strata.dashboard.extension import Dashboard
from strata.dashboard.health import Verdict, seconds
from strata.dashboard.history.file import HistoryFile, path_beside
from strata.dashboard.run import DirectoryRun
from strata.dashboard.run_record import Ending, RunRecord
from strata.dashboard.sampler import INTERVAL_S, Sampler
from strata.errors import ConfigError, JournalError
from strata.launch.record.directory import UNDER_WAY, state_now

if TYPE_CHECKING:
    from fastapi import FastAPI

    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.journal import Journal
    from strata.dashboard.explorer.limits import ExplorerConfig
    from strata.dashboard.explorer.places import Places
    from strata.dashboard.goodput import Life
    from strata.dashboard.health import Level
    from strata.dashboard.history.store import Row
    from strata.dashboard.sample import JobSample, Sample
    from strata.dashboard.studies.source import Studies
    from strata.launch.record.directory import RunDirectory
    from strata.transport.tokens import Guard

MAX_LOG_RANKS = 1_000
COPY_TRIES = 5
"""Copies of a database that are started again because it was written meanwhile."""
_LEVELS: dict[str, Level] = {"done": "ok", "stopped": "ok", "interrupted": "warning"}


class EndedRun:
    """A run that is over, copied and read. Close it."""

    def __init__(self, directory: RunDirectory) -> None:
        """
        Raises:
            ConfigError: The run is active, has no journal, or its journal cannot be read.
        """
        self.directory = directory
        self.rows: list[Row] = []
        self.lives: list[Life] = []
        _require_over(directory)
        self._copies = tempfile.TemporaryDirectory(prefix="strata-dashboard-")
        try:
            self.journal = self._read(Path(self._copies.name))
            _require_over(directory)  # while it was copied, too
        except OSError as error:
            self._copies.cleanup()
            raise ConfigError(
                f"the journal of run {directory.name} cannot be copied from {directory.path} to "
                f"{self._copies.name} ({error.strerror}); make it readable, and room for it, or set TMPDIR",
                field="run",
            ) from error
        except BaseException:
            self._copies.cleanup()
            raise

    def _read(self, into: Path) -> Journal:
        directory = self.directory
        copied = _copy(directory.journal, into)
        if copied is None:
            raise ConfigError(
                f"run {directory.name} has no journal in {directory.path}; its coordinator was elsewhere", field="run"
            )
        history = _copy(path_beside(directory.journal), into)
        if history is not None:
            file = HistoryFile(history)
            self.rows, self.lives = file.load(), file.load_lives()
            file.close()
        journal = open_journal(str(copied), readonly=True)
        try:
            self.end = self._end(journal)
        except JournalError as error:
            journal.close()
            raise ConfigError(
                f"the journal of run {directory.name} cannot be read: {error.message}; its checkpoints open alone, as "
                f"{directory.spec.checkpoints}",
                field="run",
            ) from error
        return journal

    def _end(self, journal: Journal) -> Ending:
        directory, status, events = self.directory, self.directory.status, self.directory.events()
        logs = sorted({log.rank for log in directory.logs()})
        loaded = journal.load()
        oldest = journal.read(limit=1)
        newest = journal.read(after_seq=max(loaded.last_seq - 1, 0), limit=1)
        ends = [event.at_s for event in events[-1:]] + [record.at_s for record in newest]
        ends += [float(row.bucket.start_s) for row in self.rows]
        if status is not None:
            ends.append(status.updated_at_s)
        began = [event.at_s for event in events[:1]] + [record.at_s for record in oldest if record.seq == 1]
        began_at_s = min(began, default=directory.created_at_s)
        missing = []
        if not self.rows:
            missing.append("charts: the run has kept no history, as with --dashboard off")
        if not self.lives:
            missing.append("goodput: the run has kept no history, as with --dashboard off")
        if not oldest or oldest[0].seq > 1:
            missing.append("the oldest events: the journal has dropped them")
        if loaded.damage is not None:
            missing.append(f"events from entry {loaded.damage.seq} on: the journal is damaged")
        if not events:
            missing.append("recoveries: the run has no timeline")
        if not logs:
            missing.append("logs: there are none on this machine")
        return Ending(
            state=state_now(status),
            reason="" if status is None else status.reason,
            began_at_s=began_at_s,
            ended_at_s=max(ends, default=began_at_s),
            step=0 if status is None else status.step,
            num_restarts=0 if status is None else status.num_restarts,
            log_ranks=logs[:MAX_LOG_RANKS],
            missing=missing,
        )

    def close(self) -> None:
        self.journal.close()
        self._copies.cleanup()


class EndedSite:
    """What `strata dashboard` serves for one run that is over, and the other places and studies it was given."""

    def __init__(self, run: EndedRun, places: Places, explorer: ExplorerConfig, studies: Studies) -> None:
        self._run = run
        self._dashboard = EndedDashboard(run, OpenPlaces(places, explorer), studies)
        self._engine: Engine | None = None

    def make_app(self, guard: Guard, config: CoordinatorConfig) -> FastAPI:
        run, clock = self._run, SystemClock()
        # Requests are limited by a clock that runs; the state is read by one that stands still.
        frozen = ManualClock(monotonic_s=clock.monotonic_s(), wall_s=run.end.ended_at_s)
        engine = self._engine = Engine(run.journal, config, frozen, Metrics(clock))
        engine.replay()
        admission = AdmissionControl(guard, config.limits, clock)
        hub = SessionHub(EngineBackend(engine), METHODS, admission, engine.metrics)
        self._dashboard.start(engine, hub)
        return make_app(engine, hub, guard, (self._dashboard,))

    async def stop(self) -> None:
        if self._engine is not None:
            await self._dashboard.stop()
            await self._engine.stop()
        self._run.close()


class EndedDashboard(Dashboard):
    def __init__(self, run: EndedRun, places: OpenPlaces, studies: Studies) -> None:
        super().__init__(
            parts=[places],
            run=DirectoryRun(run.directory, is_over=True),
            record=RunRecord(run.directory, until_s=run.end.ended_at_s),
            studies=studies,
        )
        self._ended = run

    def _make_sampler(self, engine: Engine, hub: SessionHub) -> Sampler:
        return EndedSampler(engine, hub, self._ended)


class EndedSampler(Sampler):
    """Takes one sample, which never grows old, and adds nothing to the history."""

    def __init__(self, engine: Engine, hub: SessionHub, run: EndedRun) -> None:
        super().__init__(engine, hub, history=None, interval_s=INTERVAL_S)
        self.ended = self._end = run.end
        self.store.restore(run.rows)
        self.lives.restore(run.lives)

    async def _run(self) -> None:
        sample = await self.sample()
        if sample is not None:
            self.accept(sample)

    def age_s(self, sample: Sample) -> float:  # noqa: ARG002
        return 0.0

    async def sample(self) -> Sample | None:
        """Return the state at the end, without ages, which would be those of a moment that is long over."""
        sample = await super().sample()
        if sample is None:
            return None
        jobs = {name: replace(job, checkpoint_age_s=None) for name, job in sample.jobs.items()}
        return replace(sample, jobs=jobs)

    def _add_values(self, sample: Sample) -> None:
        pass

    def health_of(self, job: JobSample) -> Verdict:  # noqa: ARG002
        return self._verdict

    def health(self, sample: Sample) -> Verdict:  # noqa: ARG002
        return self._verdict

    @property
    def _verdict(self) -> Verdict:
        end = self._end
        took = seconds(max(end.ended_at_s - end.began_at_s, 0.0))
        line = f"this run is over: {end.state} after {took}" + (f", {end.reason}" if end.reason else "")
        return Verdict(_LEVELS.get(end.state, "error"), line, (), 0)


def _require_over(directory: RunDirectory) -> None:
    status = directory.status
    if status is None or state_now(status) not in UNDER_WAY:
        return
    page = f"its page is {status.page}" if status.page else "it has no page (--dashboard off)"
    raise ConfigError(f"run {directory.name} is active; {page}", field="run")


def _copy(path: Path, into: Path) -> Path | None:
    """Copy a database with its log; None if it does not exist.

    Raises:
        ConfigError: It is being written: the last moments of a run, or a resume.
    """
    if not path.is_file():
        return None
    sources = (path, path.with_name(path.name + "-wal"))
    for _ in range(COPY_TRIES):
        before = [_version(source) for source in sources]
        for source in sources:
            (into / source.name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source, into / source.name)
        if [_version(source) for source in sources] == before:
            return into / path.name
    raise ConfigError(f"{path} is being written; try again in a moment", field="run")


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)
