"""The survey cache: the survey of a dataset and the lengths of its rows, kept on disk for the next run.

Each dataset, with the columns and the filter that are read, has one file in the user's cache directory. An entry is
used for a data file only if the path, size and modification time match. A cache file that is unreadable, belongs to
another user or was written by another version is ignored. A data file that changed anyway is detected when it is
opened, because a plan contains its version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import platformdirs
import xxhash

from strata.data.plan import survey as surveys
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.plan.survey import Survey

_LOG = logging.getLogger(__name__)
_SUFFIX = ".survey"
DIRECTORY_VARIABLE = "STRATA_CACHE_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyCache:
    """A directory of surveys, bounded in number and size."""

    directory: Path
    max_entries: int = 64
    max_bytes: int = 512 << 20
    """Limit of all entries together; the least recently used are deleted first."""

    def load(self, key: str) -> Survey | None:
        """Return the survey of a key, or None if there is none that can be trusted."""
        data = self.load_bytes(key)
        try:
            return None if data is None else surveys.from_bytes(data)
        except DataError as error:
            _LOG.debug("ignoring the cached survey %s: %s", key, error)
            return None

    def load_bytes(self, key: str) -> bytes | None:
        """Return what was saved for a key, or None if there is nothing that this user alone could write."""
        path = self._path(key)
        try:
            # Never follow a link, and accept only a file that this user alone can write.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
                status = os.fstat(opened.fileno())
                is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not is_ours or not stat.S_ISREG(status.st_mode) or status.st_size > self.max_bytes:
                    return None
                data = opened.read(status.st_size)  # `read` allocates as much as it may return
        except OSError as error:
            _LOG.debug("ignoring the cache entry %s: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # mark it as recently used
        return data

    def save(self, key: str, survey: Survey) -> None:
        """Store a survey if it fits. A cache that cannot be written is not an error."""
        self.save_bytes(key, surveys.to_bytes(survey))

    def save_bytes(self, key: str, data: bytes) -> None:
        """As `save`, for data that the caller checks when it loads them."""
        if len(data) > self.max_bytes:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(self._path(key), data)
            self._shrink()
        except OSError as error:
            _LOG.debug("cannot store an entry in %s: %s", self.directory, error)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _replace(self, path: Path, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=self.directory)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(data)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _shrink(self) -> None:
        entries = []
        # Files that a killed process left half written are counted and deleted like the others.
        for path in [*self.directory.glob(f"*{_SUFFIX}"), *self.directory.glob(".*.new")]:
            with contextlib.suppress(OSError):
                status = path.lstat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = 0
        for number, (_, size, path) in enumerate(sorted(entries, reverse=True)):
            total += size
            if number >= self.max_entries or total > self.max_bytes:
                path.unlink(missing_ok=True)


def default() -> SurveyCache:
    """Return the cache in `STRATA_CACHE_DIR`, or in the cache directory of the user."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    parent = Path(chosen) if chosen else platformdirs.user_cache_path("strata")
    return SurveyCache(directory=parent / "surveys")


def key(
    *,
    source_kind: str,
    roots: Sequence[str],
    format_name: str,
    columns: Sequence[str] | None,
    condition_text: str,
    unit_bytes: int,
) -> str:
    """Return the cache key of a dataset, read with these columns and this filter."""
    names = None if columns is None else sorted(columns)
    parts = [surveys.VERSION, source_kind, list(roots), format_name, names, condition_text, unit_bytes]
    return str(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts)))
