"""Back up the state of a running coordinator, and verify the copy.

A plain copy of the file may be torn, and lacks the data in its `-wal`. SQLite's backup API reads one consistent moment
of the database, including the `-wal`, and writes one file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from strata.coordinator.journal import describe, open_journal
from strata.coordinator.replay import Replay
from strata.errors import ConfigError, JournalDamaged, JournalError


@dataclass(frozen=True, slots=True)
class Backup:
    path: Path
    num_jobs: int
    last_seq: int
    """The newest entry in the backup; 0 without any."""
    num_bytes: int


def back_up(state: str, target: Path) -> Backup:
    """Copy the SQLite state `state` into a new file, and verify the copy as a coordinator would at startup.

    Raises:
        ConfigError: The state is not in SQLite or does not exist, or the target exists.
        JournalDamaged: The copy cannot be read to its end, so the state itself is damaged.
    """
    source = _file_of(state)
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it contains the fences of workers
    except OSError as error:
        raise ConfigError(
            f"cannot create {target} ({error.strerror}); name a new file in an existing directory"
        ) from error
    try:
        _copy(source, target)
        return _checked(target)
    except BaseException:
        target.unlink()
        raise


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{quote(str(source))}?mode=ro", uri=True)) as reading,
            contextlib.closing(sqlite3.connect(target)) as writing,
        ):
            reading.backup(writing)  # in one go: in parts, every write of the coordinator would restart it
            writing.execute("PRAGMA journal_mode=DELETE")  # one file, without a -wal
    except sqlite3.Error as error:
        raise JournalError(f"cannot copy {source} to {target}: {error}") from error
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _checked(target: Path) -> Backup:
    with Replay(str(target)) as story:
        jobs, damage = story.summary()
    if damage is not None:
        raise JournalDamaged(
            f"the copy is damaged from entry {damage.seq} on ({damage.reason}), so the state is damaged, too: stop the "
            "coordinator, keep a copy of all its files, and see docs/running-a-coordinator.md"
        )
    journal = open_journal(str(target), readonly=True)
    try:
        loaded = journal.load()
    finally:
        journal.close()
    last_seq = loaded.records[-1].seq if loaded.records else loaded.snapshot_seq
    return Backup(target, len(jobs), last_seq, target.stat().st_size)


def _file_of(state: str) -> Path:
    if "://" in state:
        try:
            url = make_url(state)
        except (ArgumentError, ValueError):
            url = None
        if url is None or url.get_backend_name() != "sqlite" or not url.database:
            raise ConfigError(
                f"state={describe(state)!r} is not a SQLite file; back up a PostgreSQL database with pg_dump, see "
                "docs/operations.md",
                field="state",
            )
        path = Path(url.database).expanduser()
    elif state == "memory":
        raise ConfigError("state=memory is not stored, so there is nothing to back up", field="state")
    else:
        path = Path(describe(state))
    if not path.is_file():
        raise ConfigError(f"no state at {path}; pass its path with --state", field="state")
    return path
