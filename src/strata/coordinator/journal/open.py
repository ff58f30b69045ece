"""Open the journal and the leadership that a `state` setting names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from strata.clock import SystemClock
from strata.coordinator.config import JournalConfig, LeadershipConfig
from strata.coordinator.journal.leadership import FileLeadership, MemoryLeadership
from strata.coordinator.journal.memory import MemoryJournal
from strata.coordinator.journal.postgres import PostgresLeadership, connect_engine, fence
from strata.coordinator.journal.sql import SqlJournal
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.clock import Clock
    from strata.coordinator.journal.base import Journal
    from strata.coordinator.journal.leadership import Leadership, Term

MEMORY = "memory"
_SECRETS = ("password", "sslpassword")


def open_journal(
    state: str,
    *,
    config: JournalConfig | None = None,
    readonly: bool = False,
    term: Term | None = None,
    leadership: LeadershipConfig | None = None,
) -> Journal:
    """Open the journal that `state` names; see `CoordinatorConfig.state`.

    Read-only, it takes no lock and changes nothing, so the state of a running coordinator can be inspected. With the
    term of a leader, it can be written for as long as that term lasts. Without a term, it locks a file, but not a
    database; this is for tests and repairs.

    Raises:
        ConfigError: `state` cannot be used.
        JournalLocked: Another coordinator has the state open.
        JournalDamaged: A part of the state is missing.
    """
    config = config or JournalConfig()
    if state == MEMORY:
        return MemoryJournal(config)
    if "://" not in state:
        return SqliteJournal.open(_path(state), config=config, readonly=readonly, lock=term.lock if term else None)
    url = _url(state)
    if url.get_backend_name() == "sqlite":
        lock = term.lock if term else None
        return SqliteJournal.open(_sqlite_path(url), config=config, readonly=readonly, lock=lock)
    # Everything read in one transaction must be consistent, as it is with SQLite.
    with _usable(state):
        engine = connect_engine(url, leadership or LeadershipConfig(), isolation_level="REPEATABLE READ")
    name = describe(state)
    return SqlJournal(engine, name=name, config=config, readonly=readonly, fence=fence(term, name) if term else None)


def open_leadership(state: str, *, config: LeadershipConfig | None = None, clock: Clock | None = None) -> Leadership:
    """Return the leadership of the state that `state` names.

    Raises:
        ConfigError: `state` cannot be used.
    """
    if state == MEMORY:
        return MemoryLeadership()
    if "://" not in state:
        return FileLeadership(_path(state))
    url = _url(state)
    if url.get_backend_name() == "sqlite":
        return FileLeadership(_sqlite_path(url))
    with _usable(state):
        return PostgresLeadership(
            url, name=describe(state), config=config or LeadershipConfig(), clock=clock or SystemClock()
        )


@contextlib.contextmanager
def _usable(state: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"state={describe(state)!r} requires a driver; install it with: pip install 'strata-runtime[postgres]'",
            field="state",
        ) from error
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"state={describe(state)!r}: {error}", field="state") from error


def describe(state: str) -> str:
    """Return the location of the state for display, without passwords."""
    if state == MEMORY:
        return MEMORY
    if "://" not in state:
        return str(_path(state).resolve())
    url = _url(state)
    return url.difference_update_query(_SECRETS).render_as_string(hide_password=True)


def file_of(state: str) -> Path | None:
    """Return the path of the journal that `state` names; None if it is in memory or in a database server."""
    if state == MEMORY:
        return None
    if "://" not in state:
        return _path(state)
    url = _url(state)
    return _sqlite_path(url) if url.get_backend_name() == "sqlite" else None


def _path(state: str) -> Path:
    if not state:
        return platformdirs.user_state_path("strata") / "coordinator.db"
    return Path(state).expanduser()


def _url(state: str) -> URL:
    """Parse the URL; add the driver that we support if it names none."""
    try:
        url = make_url(state)
    except (ArgumentError, ValueError):
        # Do not quote the text: it may contain a password.
        raise ConfigError(
            "state is not a valid database URL; write it as postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, "
            "with special characters %-escaped",
            field="state",
        ) from None
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise ConfigError(
            f"state: {url.drivername} is not supported; use a path, sqlite:///PATH or postgresql+psycopg://…",
            field="state",
        )
    return url


def _sqlite_path(url: URL) -> Path:
    if url.database in (None, "", ":memory:"):
        raise ConfigError(f"state: {url.drivername}:// contains no path; use sqlite:///PATH or 'memory'", field="state")
    return Path(url.database).expanduser()
