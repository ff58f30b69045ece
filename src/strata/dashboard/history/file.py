"""The history on disk: a SQLite file beside the journal, which one thread writes every ten seconds.

It is a cache of the store, not part of the journal: losing the last seconds of a chart is harmless, so nothing waits
for it. Buckets of ten seconds and longer are kept, and each resolution only for as long as its ring remembers, which
bounds the size. A file that cannot be used is set aside, and the history starts anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from typing import TYPE_CHECKING

import msgspec

from strata.dashboard.goodput import MAX_LIVES, Life
from strata.dashboard.history.rings import MAX_TIME_S, RESOLUTIONS, Bucket
from strata.dashboard.history.store import MAX_SERIES, Row, SeriesKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from strata.dashboard.history.store import Changes

log = logging.getLogger(__name__)

_LIFE = msgspec.json.Decoder(Life)

VERSION = 1
SUFFIX = ".history.db"
DAMAGED = ".damaged"
BUSY_S = 5.0
MAX_ROWS_OF_LIVES = 2 * MAX_LIVES
"""More than are remembered: those that were forgotten shortly before a crash are still stored."""
MAX_BYTES = 256 * 1024 * 1024
"""A file that is larger was not written by us, or cannot be read in reasonable time."""
_TABLES = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, job TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (job, name));
CREATE TABLE IF NOT EXISTS buckets (
    series INTEGER NOT NULL, interval_s INTEGER NOT NULL, start_s INTEGER NOT NULL,
    count INTEGER NOT NULL, mean REAL NOT NULL, min REAL NOT NULL, max REAL NOT NULL,
    PRIMARY KEY (series, interval_s, start_s)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lives (key TEXT PRIMARY KEY, joined_at_s REAL NOT NULL, life BLOB NOT NULL);
"""


class HistoryFile:
    """One thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[SeriesKey, int] = {}
        self._database = self._open_or_start_anew()

    def load(self) -> list[Row]:
        """Return what is stored, the least recently updated series first; nothing if the file is damaged."""
        try:
            return list(self._read())
        except (sqlite3.Error, ValueError, OverflowError) as error:
            self._start_anew(str(error))
            return []

    def load_lives(self) -> list[Life]:
        """Return the processes that are stored, the oldest first; without those that cannot be read."""
        try:
            rows = self._database.execute(
                "SELECT life FROM lives ORDER BY joined_at_s DESC LIMIT ?", (MAX_ROWS_OF_LIVES,)
            ).fetchall()
        except sqlite3.Error as error:
            self._start_anew(str(error))
            return []
        found = []
        for (blob,) in reversed(rows):
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(_LIFE.decode(blob))
        return found

    def write(self, changes: Changes, lives: Sequence[Life] = (), forgotten: Sequence[str] = ()) -> None:
        """Store changes, and drop what no ring remembers and the lives with the keys in `forgotten`.

        Raises:
            sqlite3.Error: The disk is full, or the file is gone.
        """
        with self._database:
            for key in changes.removed:
                self._remove(key)
            self._database.executemany(
                "INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (self._id_of(key), interval_s, bucket.start_s, bucket.num, bucket.mean, bucket.min, bucket.max)
                    for key, interval_s, bucket in changes.rows
                ],
            )
            self._database.executemany(
                "INSERT OR REPLACE INTO lives VALUES (?, ?, ?)",
                [(life.key, life.joined_at_s, msgspec.json.encode(life)) for life in lives],
            )
            self._database.executemany("DELETE FROM lives WHERE key = ?", [(key,) for key in forgotten])
            self._database.execute(
                "DELETE FROM lives WHERE joined_at_s < "
                "(SELECT joined_at_s FROM lives ORDER BY joined_at_s DESC LIMIT 1 OFFSET ?)",
                (MAX_ROWS_OF_LIVES,),
            )
            self._prune(changes)

    def close(self) -> None:
        self._database.close()

    def _prune(self, changes: Changes) -> None:
        """Drop buckets that left their rings: a ring has at most `capacity` of them, the oldest goes first."""
        capacities = {each.interval_s: each.capacity for each in RESOLUTIONS}
        for key, interval_s in {(key, interval_s) for key, interval_s, _ in changes.rows}:
            self._database.execute(
                "DELETE FROM buckets WHERE series = ?1 AND interval_s = ?2 AND start_s <= (SELECT start_s FROM buckets "
                "WHERE series = ?1 AND interval_s = ?2 ORDER BY start_s DESC LIMIT 1 OFFSET ?3)",
                (self._id_of(key), interval_s, capacities[interval_s]),
            )

    def _remove(self, key: SeriesKey) -> None:
        number = self._ids.pop(key, None)
        if number is not None:
            self._database.execute("DELETE FROM buckets WHERE series = ?", (number,))
            self._database.execute("DELETE FROM series WHERE id = ?", (number,))

    def _id_of(self, key: SeriesKey) -> int:
        number = self._ids.get(key)
        if number is None:
            made = self._database.execute("INSERT INTO series (job, name) VALUES (?, ?)", key)
            assert made.lastrowid is not None
            number = self._ids[key] = made.lastrowid
        return number

    def _read(self) -> Iterator[Row]:
        found = self._database.execute(
            "SELECT id, job, name, (SELECT MAX(start_s) FROM buckets WHERE series = id) AS newest FROM series "
            "ORDER BY newest DESC LIMIT ?",
            (MAX_SERIES,),
        ).fetchall()
        self._ids = {SeriesKey(job, name): number for number, job, name, _ in found}
        for number, job, name, _ in reversed(found):
            for resolution in RESOLUTIONS[1:]:
                rows = self._database.execute(
                    "SELECT start_s, count, mean, min, max FROM buckets WHERE series = ? AND interval_s = ? "
                    "ORDER BY start_s DESC LIMIT ?",
                    (number, resolution.interval_s, resolution.capacity),
                ).fetchall()
                yield from (Row(SeriesKey(job, name), resolution.interval_s, _checked(row)) for row in reversed(rows))

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open_or_start_anew(self) -> sqlite3.Connection:
        try:
            return _open(self._path)
        except (sqlite3.Error, ValueError) as error:
            self._set_aside(str(error))
            return _open(self._path)

    def _start_anew(self, reason: str) -> None:
        self._database.close()
        self._set_aside(reason)
        self._ids = {}
        self._database = _open(self._path)

    def _set_aside(self, reason: str) -> None:
        aside = self._path.with_name(self._path.name + DAMAGED)
        log.warning("the history of the dashboard starts anew: %s (%s), moved to %s", self._path, reason, aside)
        with contextlib.suppress(FileNotFoundError):
            self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _open(path: Path) -> sqlite3.Connection:
    # Created here with its mode, so that no other user can ever read it, whatever the umask.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
    database = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # a lost tail is harmless, a damaged file is not
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ValueError(f"written by another version ({version})")  # noqa: TRY301 - closes the database
        database.executescript(_TABLES)
        database.execute(f"PRAGMA user_version={VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def _checked(row: tuple[int, int, float, float, float]) -> Bucket:
    """Return the bucket, unless the file contains what we never write."""
    bucket = Bucket(*row)
    if not (0 <= bucket.start_s <= MAX_TIME_S and 0 < bucket.num < 2**63 and bucket.min <= bucket.mean <= bucket.max):
        raise ValueError(f"invalid bucket {row}")
    return bucket


def path_beside(journal: Path) -> Path:
    """Return the path of the history of a journal: `coordinator.db` → `coordinator.history.db`."""
    return journal.with_name(journal.name.removesuffix(".db") + SUFFIX)
