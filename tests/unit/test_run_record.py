"""What the dashboard of a run reads from its directory and its journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from strata.coordinator.journal import MemoryJournal
from strata.coordinator.journal.base import Entry
from strata.coordinator.state import events as e
from strata.dashboard import run_record
from strata.dashboard.run_record import RunRecord
from strata.launch.record.directory import RunDirectory
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec, Size

if TYPE_CHECKING:
    from pathlib import Path

    from strata.coordinator.journal import Record

JOB = "run"


class CountingJournal(MemoryJournal):
    num_read = 0

    def read(self, *, after_seq: int = 0, limit: int = 1000, job_id: str | None = None) -> list[Record]:
        found = super().read(after_seq=after_seq, limit=limit, job_id=job_id)
        self.num_read += len(found)
        return found


def entry(event: e.Event, at_s: float) -> Entry:
    return Entry(JOB, event.kind, at_s, e.encode(event))


def generation(number: int, at_s: float) -> Entry:
    return entry(e.GenerationStarted(job_id=JOB, generation=number, num_workers=1, reason="x"), at_s)


def record_of(path: Path, *events: RunEvent) -> RunRecord:
    spec = RunSpec(name=JOB, script="/train.py", directory="/", checkpoints="/k", workers=Size.parse("1"))
    directory = RunDirectory(path / JOB, spec)
    directory.path.mkdir(parents=True, exist_ok=True)
    for event in events:
        directory.note(event)
    return RunRecord(directory)


def failure(at_s: float, attempt: int = 0) -> RunEvent:
    return RunEvent(at_s=at_s, monotonic_s=at_s, what="failed", text="rank 0: exit code 1", attempt=attempt, rank=0)


def test_the_newest_entries_of_a_long_journal_have_the_generation_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "MAX_ENTRIES", 20)
    monkeypatch.setattr(run_record, "PAGE", 5)
    journal = CountingJournal()
    skipped = e.NumbersSkipped(job_id=JOB, generation=1, incarnation=1)
    last_seq = journal.append([entry(skipped, 1.0)] * 100 + [generation(7, 500.5)])
    record = record_of(tmp_path, failure(500.0))

    ((found, _),), _ = record.recoveries(JOB, journal, last_seq=last_seq, limit=10)

    assert found.generation == 7
    assert journal.num_read == 20


def test_entries_of_the_journal_are_read_once(tmp_path: Path) -> None:
    journal = CountingJournal()
    last_seq = journal.append([generation(1, 1.0), generation(2, 500.5)])
    record = record_of(tmp_path, failure(500.0), failure(600.0, 1))
    for _ in range(3):
        record.recoveries(JOB, journal, last_seq=last_seq, limit=10)
    assert journal.num_read == 2
    last_seq = journal.append([generation(3, 600.5)])
    found, _ = record.recoveries(JOB, journal, last_seq=last_seq, limit=10)
    assert [each.generation for each, _ in found] == [2, 3]
    assert journal.num_read == 3


def test_only_the_logs_of_the_recoveries_of_an_answer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(tmp_path, *(failure(100.0 * n, n) for n in range(6)))
    for attempt in range(6):
        log = tmp_path / JOB / "logs" / f"attempt-{attempt}" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"end of attempt {attempt}\n")
    read: list[Path] = []
    last_lines = run_record.last_lines
    monkeypatch.setattr(run_record, "last_lines", lambda path, num: read.append(path) or last_lines(path, num))

    found, num_found = record.recoveries(JOB, MemoryJournal(), last_seq=0, limit=2)

    assert ([each.failed_attempt for each, _ in found], num_found) == ([4, 5], 6)
    assert len(read) == 2
