"""What the dashboard of a run reads from its directory: when it was started, its failures and the ends of their logs.

Blocks while it reads, so routes call it on another thread.
"""

from __future__ import annotations

import math
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from strata.coordinator.state import events as e
from strata.dashboard.goodput import RunTimes
from strata.launch.record.log import last_lines
from strata.launch.record.recovery import GenerationMoment, recoveries

if TYPE_CHECKING:
    from strata.coordinator.journal import Journal
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.recovery import RecoveryTimeline
    from strata.launch.record.timeline import RunEvent

MAX_LINES = 20
"""Lines at the end of the log of a failed worker."""
MAX_ENTRIES = 10_000
"""Newest entries of the journal that are searched for generations, and generations that are remembered."""
PAGE = 1_000


class Ending(NamedTuple):
    """The end of a run that is over, as far as its directory tells."""

    state: str
    """`done`, `failed`, `stopped`, or `interrupted`: its agent was killed."""
    reason: str
    began_at_s: float
    ended_at_s: float
    """The time of its last record."""
    step: int
    num_restarts: int
    log_ranks: list[int]
    missing: list[str]
    """What the directory does not have, and what is therefore not shown."""


class RunRecord:
    def __init__(self, directory: RunDirectory, *, until_s: float = math.inf) -> None:
        """`until_s`: the end of the timeline. A run that is over may be resumed while its page is open."""
        self._directory = directory
        self._until_s = until_s
        self._generations = Generations()
        self._lock = Lock()
        """Several pages may ask at once, each on its own thread."""

    def is_of(self, job_id: str) -> bool:
        return job_id == self._directory.name

    def events(self, job_id: str) -> list[RunEvent]:
        """Return the timeline of the run; nothing for other jobs."""
        if not self.is_of(job_id):
            return []
        return [event for event in self._directory.events() if event.at_s <= self._until_s]

    def times(self, job_id: str) -> RunTimes:
        """Return when attempts were started and failed and when the run ended; nothing for other jobs."""
        events = self.events(job_id)
        failed = [each for each in recoveries(events) if each.attempt != each.failed_attempt]
        return RunTimes(
            started_at_s={event.attempt: event.at_s for event in reversed(events) if event.what == "started"},
            failed_at_s={each.failed_attempt: each.at_s["detected"] for each in failed},
            finished_at_s={event.attempt: event.at_s for event in reversed(events) if event.what == "finished"},
        )

    def recoveries(
        self, job_id: str, journal: Journal, *, last_seq: int, limit: int
    ) -> tuple[list[tuple[RecoveryTimeline, list[str]]], int]:
        """Return the newest recoveries, each with the last lines of the failed worker, and the number of all.

        Args:
            last_seq: The newest entry of the journal.
        """
        if not self.is_of(job_id):
            return [], 0
        with self._lock:
            known = self._generations.read(journal, job_id, last_seq=last_seq)
        found = recoveries(self.events(job_id), known)
        newest = found[max(len(found) - limit, 0) :]
        logs = {(log.attempt, log.rank): log.path for log in self._directory.logs()}
        paths = [logs.get((each.failed_attempt, each.rank)) if each.rank is not None else None for each in newest]
        lines = [[] if path is None else last_lines(path, MAX_LINES) for path in paths]
        return list(zip(newest, lines, strict=True)), len(found)


class Generations:
    """The generations of a job, read from the journal entry by entry, each once."""

    def __init__(self) -> None:
        self._found: deque[GenerationMoment] = deque(maxlen=MAX_ENTRIES)
        self._after = 0
        """The last entry that was read."""

    def read(self, journal: Journal, job_id: str, *, last_seq: int) -> list[GenerationMoment]:
        """Return what is known up to `last_seq`, oldest first. Of entries not read yet, the newest `MAX_ENTRIES` count.

        Raises:
            JournalError: The journal cannot be read.
        """
        after = max(self._after, last_seq - MAX_ENTRIES)
        while after < last_seq:
            records = journal.read(after_seq=after, limit=PAGE, job_id=job_id)
            for record in records:
                event = e.decode(record.payload) if record.kind == "GenerationStarted" else None
                if isinstance(event, e.GenerationStarted):
                    self._found.append(GenerationMoment(at_s=record.at_s, generation=event.generation))
            after = records[-1].seq if records else last_seq
            self._after = after = after if len(records) == PAGE else max(after, last_seq)
        return list(self._found)
