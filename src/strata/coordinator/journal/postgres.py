"""Leadership in PostgreSQL: one row with the leader, its expiry by the database's clock, and its term.

A renewal changes only the expiry, which does not conflict with the fence of an append (`FOR KEY SHARE`). A new term
changes the key `term`: it waits for appends in progress, and later appends of an older term do not find their row.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sqlalchemy import URL, Engine, create_engine, event, text

from strata.coordinator.journal.leadership import NEVER_S, Leader, Term
from strata.coordinator.journal.tables import DATABASE_ERRORS, plain
from strata.errors import JournalError, JournalFenced

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sqlalchemy import Connection

    from strata.clock import Clock
    from strata.coordinator.config import LeadershipConfig

_CREATION_LOCK = 0x5354_5241_5441
"""Serialises the creation of the table by two standbys; PostgreSQL's IF NOT EXISTS does not."""

_CREATE = """
CREATE TABLE IF NOT EXISTS strata_leader (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    term BIGINT NOT NULL UNIQUE,
    holder TEXT NOT NULL,
    address TEXT NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
)"""
_FIRST_ROW = """
INSERT INTO strata_leader VALUES (1, 0, '', '', '-infinity') ON CONFLICT DO NOTHING"""
_LOOK = """
SELECT term, holder, address, EXTRACT(EPOCH FROM expires_at - clock_timestamp())::float8
FROM strata_leader WHERE expires_at > clock_timestamp()"""
# SKIP LOCKED: another coordinator is taking it, or an append of the last leader is in progress.
_LOCK = """
SELECT term FROM strata_leader WHERE id = 1 AND expires_at <= clock_timestamp() FOR UPDATE SKIP LOCKED"""
_TAKE = """
UPDATE strata_leader SET term = term + 1, holder = :holder, address = :address,
    expires_at = clock_timestamp() + make_interval(secs => :lease_s)
WHERE id = 1 RETURNING term"""
_RENEW = """
UPDATE strata_leader SET expires_at = clock_timestamp() + make_interval(secs => :lease_s)
WHERE id = 1 AND term = :term RETURNING term"""
_RELEASE = """
UPDATE strata_leader SET expires_at = '-infinity' WHERE id = 1 AND term = :term"""
_FENCE = """
SELECT term FROM strata_leader WHERE id = 1 AND term = :term FOR KEY SHARE"""


class PostgresLeadership:
    def __init__(self, url: URL, *, name: str, config: LeadershipConfig, clock: Clock) -> None:
        self.valid_until_s = NEVER_S
        self.renew_every_s = config.leader_lease_s / 3
        self._name = name
        self._lease_s = config.leader_lease_s
        self._clock = clock
        self._engine = connect_engine(url, config, isolation_level="READ COMMITTED", answer_within_s=self._lease_s / 2)
        self._term: int | None = None
        self._has_table = False

    def try_acquire(self, holder: str, address: str) -> Term | None:
        with self._reaching(), self._engine.begin() as connection:
            self._make_table(connection)
            asked_s = self._clock.monotonic_s()
            if connection.execute(text(_LOCK)).first() is None:
                return None
            values = {"holder": holder, "address": address, "lease_s": self._lease_s}
            number = int(connection.execute(text(_TAKE), values).scalar_one())
        self._term = number
        self.valid_until_s = asked_s + self._lease_s
        return Term(number)

    def renew(self) -> None:
        # Read the clock before sending: by the database's clock the lease starts later, so it cannot end before ours.
        asked_s = self._clock.monotonic_s()
        with self._reaching(), self._engine.begin() as connection:
            renewed = connection.execute(text(_RENEW), {"term": self._term, "lease_s": self._lease_s}).first()
        if renewed is None:
            self.valid_until_s = NEVER_S
            raise fenced(self._name, self._term)
        self.valid_until_s = asked_s + self._lease_s

    def release(self) -> None:
        self.valid_until_s = NEVER_S
        term, self._term = self._term, None
        if term is None:
            return
        with contextlib.suppress(JournalError), self._reaching(), self._engine.begin() as connection:
            connection.execute(text(_RELEASE), {"term": term})

    def leader(self) -> Leader | None:
        with self._reaching(), self._engine.begin() as connection:
            self._make_table(connection)
            row = connection.execute(text(_LOOK)).first()
        return Leader(*row) if row is not None else None

    def close(self) -> None:
        self._engine.dispose()

    def _make_table(self, connection: Connection) -> None:
        if not self._has_table:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CREATION_LOCK})
            connection.execute(text(_CREATE))
            connection.execute(text(_FIRST_ROW))
            self._has_table = True

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        try:
            yield
        except (*DATABASE_ERRORS, OSError) as error:
            self._has_table = False  # it may have been created by a transaction that was rolled back
            raise JournalError(f"cannot reach {self._name}: {plain(error)}") from error


def fenced(name: str, term: int | None) -> JournalFenced:
    return JournalFenced(
        f"another coordinator leads {name}: term {term} is over, and this coordinator has stopped writing and "
        "answering; restart it with --standby"
    )


def fence(term: Term, name: str) -> Callable[[Connection], None]:
    """Return the fence of a term; see `SqlJournal`."""

    def check(connection: Connection) -> None:
        if connection.execute(text(_FENCE), {"term": term.number}).first() is None:
            raise fenced(name, term.number)

    return check


def connect_engine(
    url: URL, config: LeadershipConfig, *, isolation_level: Any, answer_within_s: float | None = None
) -> Engine:
    """Create an engine that detects a lost database, and whose transactions cannot outlive a paused process."""
    lease_s = config.leader_lease_s
    defaults = {
        "connect_timeout": max(2, round(lease_s / 2)),
        "tcp_user_timeout": round(lease_s * 1_000),
        "keepalives_idle": max(1, round(lease_s / 2)),
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "application_name": "strata coordinator",
    }
    connect_args = {key: value for key, value in defaults.items() if key not in url.query}
    engine = create_engine(
        url,
        isolation_level=isolation_level,
        connect_args=connect_args,
        pool_pre_ping=True,
    )

    def prepare(connection: Any, _: Any) -> None:
        settings = {"idle_in_transaction_session_timeout": lease_s / 3, "statement_timeout": answer_within_s}
        for setting, seconds in settings.items():
            if seconds is not None:
                connection.execute(f"SET {setting} = {max(1, round(seconds * 1_000))}")
        connection.commit()

    event.listen(engine, "connect", prepare)
    return engine
