"""What the dashboard of a run reads from its directory: when it was started, its failures and the ends of their logs.

Blocks while it reads, so routes call it on another thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.coordinator.state import events as e
from strata.dashboard.goodput import RunTimes
from strata.dashboard.recovery import GenerationMoment, recoveries
from strata.launch.record.log import last_lines

if TYPE_CHECKING:
    from strata.coordinator.journal import Journal
    from strata.dashboard.recovery import Recovery
    from strata.launch.record.directory import RunDirectory

MAX_LINES = 20
"""Lines at the end of the log of a failed worker."""
MAX_ENTRIES = 10_000
"""Newest entries of the journal that are searched for generations."""
PAGE = 1_000


class RunRecord:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def is_of(self, job_id: str) -> bool:
        return job_id == self._directory.name

    def times(self, job_id: str) -> RunTimes:
        """Return when attempts were started and failed and when the run ended; nothing for other jobs."""
        events = self._directory.events() if self.is_of(job_id) else []
        failed = [each for each in recoveries(events) if each.attempt != each.failed_attempt]
        return RunTimes(
            started_at_s={event.attempt: event.at_s for event in reversed(events) if event.what == "started"},
            failed_at_s={each.failed_attempt: each.at_s["detected"] for each in failed},
            finished_at_s={event.attempt: event.at_s for event in reversed(events) if event.what == "finished"},
        )

    def recoveries(self, job_id: str, journal: Journal) -> list[tuple[Recovery, list[str]]]:
        """Return the recoveries, each with the last lines of the worker that failed first."""
        if not self.is_of(job_id):
            return []
        found = recoveries(self._directory.events(), generations(journal, job_id))
        logs = {(log.attempt, log.rank): log.path for log in self._directory.logs()}
        paths = [logs.get((each.failed_attempt, each.rank)) if each.rank is not None else None for each in found]
        return [
            (each, [] if path is None else last_lines(path, MAX_LINES)) for each, path in zip(found, paths, strict=True)
        ]


def generations(journal: Journal, job_id: str) -> list[GenerationMoment]:
    """Return the generations of a job that the journal still has, oldest first."""
    found: list[GenerationMoment] = []
    after, num_read = 0, 0
    while num_read < MAX_ENTRIES:
        records = journal.read(after_seq=after, limit=PAGE, job_id=job_id)
        for record in records:
            after = record.seq
            event = e.decode(record.payload) if record.kind == "GenerationStarted" else None
            if isinstance(event, e.GenerationStarted):
                found.append(GenerationMoment(at_s=record.at_s, generation=event.generation))
        num_read += len(records)
        if len(records) < PAGE:
            break
    return found
