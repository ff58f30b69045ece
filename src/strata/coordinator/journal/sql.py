"""The journal in a database, through SQLAlchemy Core; the same code for SQLite and PostgreSQL.

One connection stays open for writing. Each append is one transaction: the events, the number of the last event (so that
a missing tail is detected), and optionally a snapshot with the truncation that it allows.
"""

from __future__ import annotations

import errno
import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, Engine, delete, func, insert, inspect, literal, select, text
from sqlalchemy.exc import DBAPIError

from strata.coordinator.journal.base import Damage, Entry, Loaded, Record
from strata.coordinator.journal.chain import ROOT, Mark, check_event, event_checksum, snapshot_checksum
from strata.coordinator.journal.reader import Broken, Reading, nothing_left, read_state
from strata.coordinator.journal.tables import (
    DATABASE_ERRORS,
    EVENT_COLUMNS,
    EVENTS,
    META,
    QUARANTINE,
    SNAPSHOTS,
    Reader,
    create_tables,
    event_row,
    plain,
    put_setting,
    table_names,
)
from strata.errors import JournalDamaged, JournalError, JournalFenced, JournalWriteFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.coordinator.config import JournalConfig


class SqlJournal:
    """Implements `Journal`. `name` stands for the state in messages and must not contain passwords."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        config: JournalConfig,
        readonly: bool = False,
        fence: Callable[[Connection], None] | None = None,
    ) -> None:
        """Create the journal. `fence` runs first in every write transaction: it raises unless our term is the latest,
        and makes a coordinator that wants to start the next term wait for the end of the transaction.
        """
        self._engine = engine
        self._fence = fence
        self._name = name
        self._history_events = config.history_events
        self._readonly = readonly
        self._writer: Connection | None = None
        self._tail: Mark | None = None
        """The last event; None before the first load and after a failed append, when it must be looked up."""
        self._closed = False

    def load(self) -> Loaded:
        self._disconnect()
        try:
            return self._load()
        except Broken as error:
            raise nothing_left(self._name, str(error)) from error
        except (*DATABASE_ERRORS, OSError) as error:
            raise self._unreadable(error) from error

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        if self._readonly or self._closed:
            raise JournalWriteFailed(f"{self._name} is {'closed' if self._closed else 'open for reading only'}")
        try:
            return self._append(entries, snapshot)
        except JournalFenced:
            self._disconnect()
            raise
        except (*DATABASE_ERRORS, OSError) as error:
            self._disconnect()
            raise self._write_failed(error) from error

    def read(self, *, after_seq: int = 0, limit: int = 1000, job_id: str | None = None) -> list[Record]:
        before = EVENTS.alias("before")
        query = (
            select(*EVENT_COLUMNS, before.c.checksum.label("before"))
            .select_from(EVENTS.outerjoin(before, before.c.seq == EVENTS.c.seq - 1))
            .where(EVENTS.c.seq > after_seq)
            .order_by(EVENTS.c.seq)
            .limit(limit)
        )
        if job_id is not None:
            query = query.where(EVENTS.c.job_id == job_id)
        try:
            with self._engine.begin() as connection:
                truncated = Reader(connection).settings().get("truncated")
                rows = connection.execute(query).all()
        except DATABASE_ERRORS as error:
            raise self._unreadable(error) from error
        return [self._checked(tuple(row), Mark.parse(truncated) if truncated else ROOT) for row in rows]

    def size_bytes(self) -> int:
        sizes = " + ".join(f"pg_total_relation_size('{name}')" for name in sorted(table_names()))
        try:
            with self._engine.begin() as connection:
                return int(connection.execute(text(f"SELECT {sizes}")).scalar_one())
        except DATABASE_ERRORS as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        self._closed = True
        self._disconnect()
        self._engine.dispose()

    # Load

    def _load(self) -> Loaded:
        with self._connect() as connection, connection.begin():
            self._check_fence(connection)
            if self._is_new(connection):
                if self._readonly:
                    return Loaded(snapshot=None, snapshot_seq=0, records=[])
                create_tables(connection)
            check_tables(connection)
            reading = read_state(Reader(connection), self._name)
            damage = self._set_aside(connection, reading)
        self._tail = reading.tail
        return reading.loaded(damage)

    def _is_new(self, connection: Connection) -> bool:
        return not table_names() & set(inspect(connection).get_table_names())

    def _set_aside(self, connection: Connection, reading: Reading) -> Damage | None:
        """Move the damaged rows out of the way of later appends, and describe them."""
        if reading.reported and not reading.reason:
            if not self._readonly:
                connection.execute(delete(META).where(META.c.key == "damage"))
            return msgspec.json.decode(reading.reported, type=Damage)
        if not reading.reason:
            return None
        kept_at = f"{self._name} (left in place: opened read-only)"
        if not self._readonly:
            quarantine(connection, reading)
            kept_at = f"table {QUARANTINE.name} in {self._name}"
        return Damage(seq=reading.tail.seq + 1, reason=reading.reason, num_lost=reading.num_lost, kept_at=kept_at)

    # Append

    def _append(self, entries: Sequence[Entry], snapshot: bytes | None) -> int:
        if self._writer is None:
            self._writer = self._connect()
        with self._writer.begin():
            self._check_fence(self._writer)
            tail = self._tail or _stored_tail(self._writer)
            rows, tail = chained(entries, tail)
            if rows:
                self._writer.execute(insert(EVENTS), rows)
                put_setting(self._writer, "head", str(tail))
            if snapshot is not None:
                self._put_snapshot(self._writer, tail, snapshot)
        self._tail = tail
        return tail.seq

    def _put_snapshot(self, connection: Connection, tail: Mark, payload: bytes) -> None:
        older_seq = connection.execute(select(func.max(SNAPSHOTS.c.seq)).where(SNAPSHOTS.c.seq < tail.seq)).scalar()
        dropped = delete(SNAPSHOTS)
        connection.execute(dropped if older_seq is None else dropped.where(SNAPSHOTS.c.seq != older_seq))
        checksum = snapshot_checksum(tail.seq, tail.checksum, payload)
        row = {"seq": tail.seq, "chain": tail.checksum, "payload": payload, "checksum": checksum}
        connection.execute(insert(SNAPSHOTS), [row])
        if older_seq is not None:
            self._truncate(connection, min(tail.seq - self._history_events, older_seq))

    def _truncate(self, connection: Connection, last_seq: int) -> None:
        chain = connection.execute(select(EVENTS.c.checksum).where(EVENTS.c.seq == last_seq)).scalar()
        if chain is None:
            return  # already truncated up to here or further
        put_setting(connection, "truncated", str(Mark(last_seq, chain)))
        connection.execute(delete(EVENTS).where(EVENTS.c.seq <= last_seq))

    def _connect(self) -> Connection:
        connection = self._engine.connect()
        if self._fence is None:
            return connection
        # Behind the fence there is no other writer, so each statement may see the newest rows; and the fence must.
        return connection.execution_options(isolation_level="READ COMMITTED")

    def _check_fence(self, connection: Connection) -> None:
        if self._fence is not None:
            self._fence(connection)

    def _disconnect(self) -> None:
        """Close the connection and forget the state known through it."""
        self._tail = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # Messages

    def _checked(self, row: tuple[Any, ...], truncated: Mark) -> Record:
        """Verify `row`, an event with the checksum of the previous one, which only the oldest lacks."""
        *event, checksum = row
        seq = event[0]
        before = truncated if checksum is None else Mark(seq - 1, checksum)
        if reason := check_event(tuple(event), before):
            raise JournalDamaged(f"{self._name}: {reason}; continue with after_seq={seq}")
        return Record(*event[:5])

    def _unreadable(self, error: Exception) -> JournalError:
        return JournalError(f"cannot read {self._name}: {plain(error)}; check that it is reachable")

    def _write_failed(self, error: Exception) -> JournalWriteFailed:
        if is_disk_full(error):
            return JournalWriteFailed(
                f"cannot write {self._name}: disk full. Free some space; acknowledged data is safe, "
                "and writes resume once there is space"
            )
        return JournalWriteFailed(
            f"cannot write {self._name}: {plain(error)}. Check the disk or the database; acknowledged data is safe"
        )


def check_tables(connection: Connection) -> None:
    if missing := table_names() - set(inspect(connection).get_table_names()):
        raise Broken(f"the tables are missing: {', '.join(sorted(missing))}")


def quarantine(connection: Connection, reading: Reading) -> None:
    """Move the damaged rows into the quarantine table, and end the journal at the good prefix."""
    reason = literal(reading.reason).label("reason")
    beyond = EVENTS.c.seq > reading.tail.seq
    columns = (EVENTS.c.seq, EVENTS.c.job_id, EVENTS.c.kind, EVENTS.c.at_s, EVENTS.c.payload, EVENTS.c.checksum)
    kept = [column.name for column in columns]
    connection.execute(
        insert(QUARANTINE).from_select(
            ["reason", "source", *kept], select(reason, literal("event").label("source"), *columns).where(beyond)
        )
    )
    connection.execute(delete(EVENTS).where(beyond))
    bad = SNAPSHOTS.c.seq.in_([row[0] for row in reading.bad_snapshots])
    connection.execute(
        insert(QUARANTINE).from_select(
            ["reason", "source", "seq", "payload", "checksum"],
            select(
                reason, literal("snapshot").label("source"), SNAPSHOTS.c.seq, SNAPSHOTS.c.payload, SNAPSHOTS.c.checksum
            ).where(bad),
        )
    )
    connection.execute(delete(SNAPSHOTS).where(bad))
    put_setting(connection, "head", str(reading.tail))


def is_disk_full(error: BaseException) -> bool:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(cause, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", "") == "53100"


def chained(entries: Sequence[Entry | Record], tail: Mark) -> tuple[list[dict[str, Any]], Mark]:
    """Return the rows of these entries after `tail`, and the new tail."""
    rows: list[dict[str, Any]] = []
    seq, checksum = tail.seq, tail.checksum
    for entry in entries:
        seq += 1
        checksum = event_checksum(checksum, seq, entry.job_id, entry.kind, entry.at_s, entry.payload)
        rows.append(event_row(seq, entry.job_id, entry.kind, entry.at_s, entry.payload, checksum))
    return rows, Mark(seq, checksum)


def _stored_tail(connection: Connection) -> Mark:
    head = Reader(connection).settings().get("head")
    if head is None:
        raise JournalWriteFailed("the number of the last event cannot be read; reload the journal")
    return Mark.parse(head)
