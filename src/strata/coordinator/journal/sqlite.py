"""The journal in a SQLite file; a damaged file is rebuilt from its good rows."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
from sqlalchemy import Connection, Engine, QueuePool, create_engine, event, false, insert, update
from sqlalchemy.exc import DBAPIError
from xxhash import xxh3_64_hexdigest

from strata.coordinator.journal.base import Damage
from strata.coordinator.journal.chain import ROOT, Mark, good_prefix
from strata.coordinator.journal.files import FileLock, beside, finish_replacing, make_directory, make_file, replace_file
from strata.coordinator.journal.reader import Broken, Reading, read_state
from strata.coordinator.journal.sql import SqlJournal, chained, check_tables
from strata.coordinator.journal.tables import (
    DATABASE_ERRORS,
    EVENTS,
    META,
    SNAPSHOTS,
    Reader,
    create_tables,
    plain,
    put_setting,
    table_names,
)
from strata.coordinator.journal.wal import hidden_commits
from strata.errors import ConfigError, JournalDamaged, JournalError, JournalWriteFailed

if TYPE_CHECKING:
    from pathlib import Path

    from strata.coordinator.config import JournalConfig
    from strata.coordinator.journal.base import Loaded, Record
    from strata.coordinator.journal.chain import SnapshotRow

_BUSY_TIMEOUT_S = 5.0
"""Seconds to wait for another tool that has the file open."""
_WAL_LIMIT_BYTES = 16 * 1024 * 1024
"""The log is truncated to this size after a checkpoint into the file."""

_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# SQLite errors that concern the machine or another process, not the contents of the file.
_NOT_DAMAGE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
}
_UNREADABLE_DISK = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}

_Mode = Literal["build", "write", "read", "salvage", "salvage without log"]
_URI_QUERY: dict[_Mode, str] = {
    "build": "mode=rw",
    "write": "mode=rw",
    "read": "mode=ro",
    "salvage": "mode=ro",
    "salvage without log": "mode=ro&immutable=1",
}


class SqliteJournal(SqlJournal):
    """`SqlJournal` on a file that only one coordinator can open."""

    def __init__(self, path: Path, lock: FileLock | None, *, config: JournalConfig) -> None:
        """Open the journal; `lock` is held while it is open, and None opens the file read-only."""
        engine = _engine(path, "read" if lock is None else "write")
        super().__init__(engine, name=str(path), config=config, readonly=lock is None)
        self._path = path
        self._lock = lock
        self._is_opened = False
        self._suspicion = ""
        """Why the next load must rebuild the file, even if it seems readable."""

    @classmethod
    def open(
        cls, path: Path, *, config: JournalConfig, readonly: bool = False, lock: FileLock | None = None
    ) -> SqliteJournal:
        """Lock the file unless `lock` already does, create it if it is missing, and finish an interrupted repair.

        Raises:
            JournalLocked: Another coordinator has the file open.
            JournalDamaged: The file is missing or empty, but its log is not.
            ConfigError: The path cannot be used.
        """
        path = path.resolve()
        if path.is_dir() or (readonly and not path.exists()):
            raise ConfigError(f"{path} is {'a directory' if path.is_dir() else 'missing'}; name a file", field="state")
        if readonly:
            return cls(path, None, config=config)
        try:
            make_directory(path.parent)
            lock = lock or FileLock.take(path)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            finish_replacing(path)
            make_file(path, _build_empty)
        except (*DATABASE_ERRORS, OSError) as error:
            lock.release()
            raise _unusable(path, error) from error
        except JournalDamaged:
            lock.release()
            raise
        return cls(path, lock, config=config)

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self._path, beside(self._path, "-wal")) if file.exists())

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.release()

    def _load(self) -> Loaded:
        num_hidden = self._num_hidden_commits()
        reason, self._suspicion = self._suspicion, ""
        if num_hidden:
            reason = "the end of the write-ahead log is truncated or damaged"
        try:
            if not reason:
                self._check_structure()
                loaded = super()._load()
                self._is_opened = True
                return loaded
        except DATABASE_ERRORS as error:
            if not self._is_damage(error):
                raise
            reason = plain(error)
        except Broken as error:
            reason = str(error)
        self._engine.dispose()
        salvaged = _salvage(self._path, reason)
        if salvaged.reading.start == salvaged.reading.tail == ROOT and num_hidden > 1:
            raise Broken(reason)
        if self._readonly:
            return salvaged.reading.loaded(salvaged.damage(f"{self._path} (left in place: opened read-only)", 0))
        # A crash may have cut off the last commit in the log before it was acknowledged, but not the others.
        num_lost = max(num_hidden - 1, 0)
        replace_file(
            self._path, lambda new, kept_at: _build_from(new, salvaged, salvaged.damage(str(kept_at), num_lost))
        )
        loaded = super()._load()
        self._is_opened = True
        return loaded

    def _num_hidden_commits(self) -> int:
        """Return the commits in the log that SQLite will ignore; only before we write to the log ourselves."""
        return 0 if self._is_opened or self._readonly else hidden_commits(beside(self._path, "-wal"))

    def _check_structure(self) -> None:
        """Find damage that reading the newest rows would miss, before a later truncation meets it."""
        if self._readonly:
            return
        with self._engine.begin() as connection:
            answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if answer != "ok":
                raise Broken(" ".join(str(answer).split()))
            check_tables(connection)
            if Reader(connection).settings().get("definitions") != _definitions(connection):
                raise Broken("the definitions of the tables are damaged")
            connection.execute(update(META).where(false()).values(value=""))  # check that it is writable

    def _is_new(self, connection: Connection) -> bool:  # noqa: ARG002
        return False  # `open` created the tables

    def _is_damage(self, error: Exception) -> bool:
        code = _code(error)
        if code is None:
            return isinstance(error, (DBAPIError, UnicodeError))  # undecodable text
        if code & 0xFF == sqlite3.SQLITE_IOERR:
            return code in _UNREADABLE_DISK
        if code & 0xFF == sqlite3.SQLITE_READONLY:
            return os.access(self._path, os.W_OK)  # the file itself claims to be read-only: a damaged header
        return code & 0xFF not in _NOT_DAMAGE

    def _unreadable(self, error: Exception) -> JournalError:
        if self._is_damage(error):
            return JournalDamaged(f"{self._path} is damaged: {plain(error)}; restart the coordinator to repair it")
        return super()._unreadable(error)

    def _write_failed(self, error: Exception) -> JournalWriteFailed:
        if (_code(error) or 0) & 0xFF in _CORRUPT:
            self._suspicion = plain(error)
        return super()._write_failed(error)


@dataclass(frozen=True, slots=True)
class _Salvaged:
    """The good contents of a damaged file."""

    reading: Reading
    history: list[Record]
    """The events between `truncated` and the snapshot; empty if incomplete."""
    truncated: Mark
    older_snapshots: list[SnapshotRow]
    reason: str

    def damage(self, kept_at: str, num_lost: int) -> Damage:
        """Describe the damage; `num_lost` is the number of lost commits known from the log."""
        return Damage(
            seq=self.reading.tail.seq + 1,
            reason=self.reason,
            num_lost=max(self.reading.num_lost, num_lost),
            kept_at=kept_at,
        )


def _salvage(path: Path, reason: str) -> _Salvaged:
    """Read what can be read.

    Tries with the log and without it, and uses the attempt that gets further: pages at the start of a damaged log may
    be older than those in the file.

    Raises:
        Broken: Nothing can be read.
    """
    found: list[_Salvaged] = []
    modes: tuple[_Mode, ...] = ("salvage", "salvage without log")
    for mode in modes:
        engine = _engine(path, mode)
        try:
            with engine.begin() as connection:
                found.append(_read_good(Reader(connection, forgiving=True), path, reason))
        except (*DATABASE_ERRORS, Broken):
            continue
        finally:
            engine.dispose()
    if not found:
        raise Broken(reason)
    return max(found, key=lambda salvaged: salvaged.reading.tail.seq)


def _read_good(reader: Reader, path: Path, reason: str) -> _Salvaged:
    reading = read_state(reader, str(path))
    truncated = reading.truncated or reading.start
    rows = reader.events(after_seq=truncated.seq, last_seq=reading.start.seq)
    history, end, _ = good_prefix(rows, truncated)
    if end != reading.start:
        history, truncated = [], reading.start
    older = [row for row in reading.older_snapshots if row[0] >= truncated.seq]
    reasons = dict.fromkeys(part for part in (reason, reading.reason) if part)
    return _Salvaged(reading, history, truncated, older, "; ".join(reasons))


def _build_empty(path: Path) -> None:
    engine = _engine(path, "build")
    try:
        with engine.begin() as connection:
            _make_tables(connection)
    finally:
        engine.dispose()


def _build_from(path: Path, salvaged: _Salvaged, damage: Damage) -> None:
    reading = salvaged.reading
    rows, tail = chained([*salvaged.history, *reading.records], salvaged.truncated)
    assert tail == reading.tail, "the chain was verified when it was read"
    snapshots = [row for row in (reading.snapshot, *salvaged.older_snapshots) if row is not None]
    columns = [column.name for column in SNAPSHOTS.columns]
    engine = _engine(path, "build")
    try:
        with engine.begin() as connection:
            _make_tables(connection)
            if rows:
                connection.execute(insert(EVENTS), rows)
            if snapshots:
                connection.execute(insert(SNAPSHOTS), [dict(zip(columns, row, strict=True)) for row in snapshots])
            put_setting(connection, "head", str(tail))
            put_setting(connection, "truncated", str(salvaged.truncated))
            put_setting(connection, "damage", msgspec.json.encode(damage).decode())
    finally:
        engine.dispose()


def _make_tables(connection: Connection) -> None:
    create_tables(connection)
    put_setting(connection, "definitions", _definitions(connection))


def _definitions(connection: Connection) -> str:
    """Return a checksum of the table definitions: SQLite would store other values in a column of a changed type."""
    rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return str(xxh3_64_hexdigest(repr([tuple(row) for row in rows if row[0] in table_names()]).encode()))


def _engine(path: Path, mode: _Mode) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.as_uri()}?{_URI_QUERY[mode]}",
            uri=True,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions are started explicitly, below
            check_same_thread=False,
        )
        try:
            if mode.startswith("salvage"):
                # Despite its name, this lets SQLite read a file that is shorter than its header says. It must come
                # first.
                connection.execute("PRAGMA writable_schema=ON")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA cell_size_check=ON")
            if mode == "write":
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(f"PRAGMA journal_size_limit={_WAL_LIMIT_BYTES}")
        except (sqlite3.Error, UnicodeError):
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "begin", _begin)
    return engine


def _code(error: Exception) -> int | None:
    """Return SQLite's extended result code."""
    return getattr(error.orig, "sqlite_errorcode", None) if isinstance(error, DBAPIError) else None


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _unusable(path: Path, error: Exception) -> ConfigError:
    words = error.strerror if isinstance(error, OSError) else plain(error)
    return ConfigError(f"cannot use {path}: {words}; choose another state", field="state")
