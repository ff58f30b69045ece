"""The journal of a study: what was appended is read again, and only a torn end is forgiven."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.errors import JournalDamaged, JournalLocked, JournalWriteFailed, LimitExceeded
from strata.tune import SearchSpace
from strata.tune import journal as journals
from strata.tune.journal import StudyJournal, read_journal
from strata.tune.state import events as e

SPEC = e.StudySpec(name="study", space=SearchSpace().add_bool("a").to_dict())
FACTS: list[e.Event] = [
    e.Opened(spec=SPEC, at_s=1.5),
    e.Known(source="other/3", config={"a": True}, values=(0.5,)),
    e.Resized(num_slots=2),
    e.Asking(trial=0),
    e.Asked(trial=0, config={"a": True, "b": 1, "c": 0.1, "d": "ü\n", "e": None}),
    e.Leased(trial=0, lease=1, slot=1),
    e.Reported(trial=0, lease=1, step=3, values=(0.5, None)),
    e.Saved(trial=0, lease=1, step=3, checkpoint="/x"),
    e.Ordered(trial=0, order="requeue", reason="asked on the page"),
    e.StopSent(trial=0, lease=1, why="pause", reason="place 2 of 3"),
    e.Stopped(trial=0, lease=1),
    e.Leased(trial=0, lease=2, slot=0, checkpoint="/y", step=7, donor=3, config={"a": False}),
    e.Lost(trial=0, lease=2, reason="killed", is_blameless=True),
    e.Expired(trial=0, lease=3, reason="silent"),
    e.Failed(trial=0, lease=3, reason="no", is_final=True),
    e.Finished(trial=1, lease=1, values=(0.25, 1e300)),
    e.Finished(trial=2, lease=1),
    e.Exhausted(trial=4),
    e.Pruned(trial=3, reason="why"),
    e.Extended(num_trials=9),
    e.StopRequested(reason="timeout"),
    e.Ended(reason="timeout", is_complete=False),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, facts: list[e.Event]) -> None:
    with StudyJournal(path) as journal:
        journal.append(facts)


def test_every_kind_of_fact_is_read_as_it_was_written(path: Path) -> None:
    write(path, FACTS[:5])
    write(path, FACTS[5:])

    assert {type(fact) for fact in FACTS} == set(e.Event.__args__)
    with StudyJournal(path) as journal:
        assert journal.load() == FACTS
    assert path.read_bytes().count(b"\n") == len(FACTS)
    assert path.stat().st_mode & 0o077 == 0


def test_a_new_journal_is_empty(path: Path) -> None:
    with StudyJournal(path) as journal:
        assert journal.load() == []
        journal.append([])
        assert journal.load() == []


def test_a_torn_end_is_dropped_wherever_it_was_torn_and_writing_goes_on(path: Path) -> None:
    write(path, FACTS[:4])
    whole = path.read_bytes()
    before = len(b"".join(whole.splitlines(keepends=True)[:3]))
    for cut in range(before + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with StudyJournal(path) as journal:
            assert journal.load() == FACTS[:3]
            journal.append(FACTS[3:5])
        assert read_journal(path)[0] == FACTS[:5]


def test_a_last_line_of_garbage_is_dropped_too(path: Path) -> None:
    write(path, FACTS[:4])
    with path.open("ab") as file:
        file.write(b"\x00\x00\x00\n")

    with StudyJournal(path) as journal:
        assert journal.load() == FACTS[:4]


def test_damage_before_the_end_is_an_error_that_names_the_line(path: Path) -> None:
    write(path, FACTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[5][:-5] + b"\n", *lines[6:]]))

    with StudyJournal(path) as journal, pytest.raises(JournalDamaged, match=r"journal.jsonl, line 6: .*from a backup"):
        journal.load()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACTS[1:3], "line 1: a journal has one opening fact, in its first line"),
        ([FACTS[0], FACTS[0], FACTS[1]], "line 2: a journal has one opening fact"),
    ],
)
def test_a_file_that_is_not_one_study_is_refused(path: Path, facts: list[e.Event], message: str) -> None:
    write(path, facts)

    with pytest.raises(JournalDamaged, match=message):
        read_journal(path)


def test_a_journal_of_a_newer_version_is_refused_with_the_cure(path: Path) -> None:
    write(path, [e.Opened(spec=e.StudySpec(name="study", space={}, format=e.FORMAT + 1))])

    with pytest.raises(JournalDamaged, match=f"has format 2, this version reads up to {e.FORMAT}; upgrade Strata"):
        read_journal(path)


def test_a_second_driver_is_kept_out(path: Path) -> None:
    with StudyJournal(path), pytest.raises(JournalLocked, match="is in use: the study already runs; stop it first"):
        StudyJournal(path)
    StudyJournal(path).close()


def test_a_fact_that_is_too_large_writes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StudyJournal(path) as journal:
        journal.append(FACTS[:2])
        with pytest.raises(LimitExceeded, match="would exceed 262,144 bytes"):
            journal.append([FACTS[2], e.StopRequested(reason="x" * 300_000)])
        monkeypatch.setattr(journals, "MAX_BYTES", 100)
        with pytest.raises(LimitExceeded, match="report less often"):
            journal.append(FACTS[2:])

    assert read_journal(path)[0] == FACTS[:2]


def test_lines_are_synced_once_and_only_if_that_is_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with StudyJournal(path) as journal:
        journal.append(FACTS[:1])
        journal.sync()
        assert len(synced) == 1, "it was durable already"
        journal.append(FACTS[1:2], is_durable=False)
        assert len(synced) == 1
        journal.sync()
        journal.sync()
        assert len(synced) == 2

        def failing(fd: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", failing)
        journal.append(FACTS[2:3], is_durable=False)
        with pytest.raises(JournalWriteFailed, match="Input/output error"):
            journal.sync()


def test_a_failed_write_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StudyJournal(path) as journal:
        journal.append(FACTS[:2])
        real = os.write

        def full(fd: int, data: bytes) -> int:
            real(fd, bytes(data)[:10])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(JournalWriteFailed, match="No space left on device; free space, then resume the study"):
                journal.append(FACTS[2:])
        journal.append(FACTS[2:3])

    assert read_journal(path)[0] == FACTS[:3]
    with pytest.raises(JournalWriteFailed, match="cannot open"):
        StudyJournal(path / "not" / "a" / "directory")
