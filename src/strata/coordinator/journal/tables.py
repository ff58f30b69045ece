"""The tables of the journal, the same on SQLite and PostgreSQL, and their reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    insert,
    select,
    type_coerce,
    update,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.types import NULLTYPE

from strata.coordinator.journal.chain import ROOT, EventRow, SnapshotRow, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Select

SCHEMA = 1
"""Raised when older versions can no longer read what we write."""

DATABASE_ERRORS = (SQLAlchemyError, UnicodeError)
"""SQLite quotes damaged bytes in its messages, which Python then cannot decode."""

_METADATA = MetaData()
# On SQLite, an INTEGER PRIMARY KEY is the row id: events are stored in order, without an index.
_SEQ = BigInteger().with_variant(Integer, "sqlite")

EVENTS = Table(
    "strata_events",
    _METADATA,
    Column("seq", _SEQ, primary_key=True, autoincrement=False),
    Column("job_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("at_s", Double, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("checksum", BigInteger, nullable=False),
)
SNAPSHOTS = Table(
    "strata_snapshots",
    _METADATA,
    Column("seq", _SEQ, primary_key=True, autoincrement=False),
    Column("chain", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("checksum", BigInteger, nullable=False),
)
META = Table(
    "strata_meta",
    _METADATA,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
QUARANTINE = Table(
    "strata_quarantine",
    _METADATA,
    Column("id", Integer, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("seq", BigInteger),
    Column("job_id", Text),
    Column("kind", Text),
    Column("at_s", Double),
    Column("payload", LargeBinary),
    Column("checksum", BigInteger),
)

# The payload as the driver returns it: SQLAlchemy's conversion would fail on the values of a damaged row.
EVENT_COLUMNS = (
    EVENTS.c.seq,
    EVENTS.c.job_id,
    EVENTS.c.kind,
    EVENTS.c.at_s,
    type_coerce(EVENTS.c.payload, NULLTYPE).label("payload"),
    EVENTS.c.checksum,
)
_SNAPSHOT_COLUMNS = (
    SNAPSHOTS.c.seq,
    SNAPSHOTS.c.chain,
    type_coerce(SNAPSHOTS.c.payload, NULLTYPE).label("payload"),
    SNAPSHOTS.c.checksum,
)


def table_names() -> set[str]:
    return set(_METADATA.tables)


def create_tables(connection: Connection) -> None:
    _METADATA.create_all(connection, checkfirst=False)
    settings = {"schema": str(SCHEMA), "head": str(ROOT), "truncated": str(ROOT)}
    connection.execute(insert(META), [{"key": key, "value": seal(key, value)} for key, value in settings.items()])


def put_setting(connection: Connection, key: str, value: str) -> None:
    sealed = seal(key, value)
    if connection.execute(update(META).where(META.c.key == key).values(value=sealed)).rowcount == 0:
        connection.execute(insert(META).values(key=key, value=sealed))


def plain(error: Exception) -> str:
    """Return the driver's message, without SQLAlchemy's statement and parameters."""
    if isinstance(error, UnicodeError):
        return "undecodable text"
    return str(error.orig) if isinstance(error, DBAPIError) else str(error)


def event_row(seq: int, job_id: str, kind: str, at_s: float, payload: bytes, checksum: int) -> dict[str, Any]:
    return {"seq": seq, "job_id": job_id, "kind": kind, "at_s": at_s, "payload": payload, "checksum": checksum}


class Reader:
    """Reads the tables within one transaction.

    With `forgiving`, a database error ends the readable rows instead of raising; the first error is kept in `broken`.
    """

    def __init__(self, connection: Connection, *, forgiving: bool = False) -> None:
        self._connection = connection
        self._forgiving = forgiving
        self.broken = ""

    def settings(self) -> dict[str, str]:
        """Return the settings whose checksum matches."""
        # Read all rows instead of one by its key: the index may be the damaged part.
        rows = self._rows(select(META.c.key, META.c.value))
        return {key: value for key, sealed in rows if (value := unseal(str(key), sealed)) is not None}

    def snapshots(self) -> list[SnapshotRow]:
        """Return the snapshots, newest first."""
        return list(self._rows(select(*_SNAPSHOT_COLUMNS).order_by(SNAPSHOTS.c.seq.desc())))

    def events(self, *, after_seq: int, last_seq: int | None = None) -> Iterator[EventRow]:
        query = select(*EVENT_COLUMNS).where(EVENTS.c.seq > after_seq).order_by(EVENTS.c.seq)
        if last_seq is not None:
            query = query.where(EVENTS.c.seq <= last_seq)
        return self._rows(query)

    def _rows(self, query: Select[Any]) -> Iterator[Any]:
        try:
            for row in self._connection.execute(query):
                yield tuple(row)
        except DATABASE_ERRORS as error:
            if not self._forgiving:
                raise
            self.broken = self.broken or plain(error)
