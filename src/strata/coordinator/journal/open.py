"""From what a user calls the state to the journal that keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal.memory import MemoryJournal
from strata.coordinator.journal.sql import SqlJournal
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.coordinator.journal.base import Journal

MEMORY = "memory"
_SECRETS = ("password", "sslpassword")


def open_journal(state: str, *, config: JournalConfig | None = None, readonly: bool = False) -> Journal:
    """Open the journal that `state` names; see `CoordinatorConfig.state`.

    Read-only, it takes no lock and changes nothing: a running coordinator's state can be looked at.

    Raises:
        ConfigError: `state` names nothing that can be used.
        JournalLocked: Another coordinator has it open.
        JournalDamaged: A part of it is gone.
    """
    config = config or JournalConfig()
    if state == MEMORY:
        return MemoryJournal(config)
    if "://" not in state:
        return SqliteJournal.open(_path(state), config=config, readonly=readonly)
    url = _url(state)
    if url.get_backend_name() == "sqlite":
        return SqliteJournal.open(_sqlite_path(url), config=config, readonly=readonly)
    try:
        # What is read in one transaction must belong together, as it does on SQLite.
        engine = create_engine(url, isolation_level="REPEATABLE READ")
    except ImportError as error:
        raise ConfigError(
            f"state={describe(state)!r} needs a driver; install it with: pip install 'strata-runtime[postgres]'",
            field="state",
        ) from error
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"state={describe(state)!r}: {error}", field="state") from error
    return SqlJournal(engine, name=describe(state), config=config, readonly=readonly)


def describe(state: str) -> str:
    """Where the state is, for people to read; never a password."""
    if state == MEMORY:
        return MEMORY
    if "://" not in state:
        return str(_path(state).resolve())
    url = _url(state)
    return url.difference_update_query(_SECRETS).render_as_string(hide_password=True)


def _path(state: str) -> Path:
    if not state:
        return platformdirs.user_state_path("strata") / "coordinator.db"
    return Path(state).expanduser()


def _url(state: str) -> URL:
    """The URL, with the driver that we ship for where none was named."""
    try:
        url = make_url(state)
    except (ArgumentError, ValueError):
        # Without the text: a password may be in it.
        raise ConfigError(
            "state is not a database URL; write it as postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, "
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
        raise ConfigError(f"state: {url.drivername}:// names no file; use sqlite:///PATH, or 'memory'", field="state")
    return Path(url.database).expanduser()
