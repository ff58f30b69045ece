"""What was found in a dataset's files, kept for the next run.

One file per dataset and way of looking at it, in the user's cache directory. It is a convenience and nothing else: an
entry is used for a file whose path, size and modification time are those it knows, and whatever cannot be read, is not
ours, or was written by another version is passed over in silence. A file that changed all the same is noticed when it
is opened, because a plan knows its version.
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
    directory: Path
    max_entries: int = 64
    max_bytes: int = 512 << 20
    """Of all entries together; the ones not used for longest go first."""

    def load(self, key: str) -> Survey | None:
        """What is kept under the key; None if there is nothing that can be trusted."""
        path = self._path(key)
        try:
            # Not through a link, and only what this user alone could have written.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
                told = os.fstat(opened.fileno())
                ours = told.st_uid == os.geteuid() and not told.st_mode & 0o022
                if not ours or not stat.S_ISREG(told.st_mode) or told.st_size > self.max_bytes:
                    return None
                data = opened.read(self.max_bytes)
            found = surveys.from_bytes(data)
        except (OSError, DataError) as error:
            _LOG.debug("no survey from %s: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used: others go first
        return found

    def save(self, key: str, survey: Survey) -> None:
        """Keeps it, if there is room; a cache that cannot be written is no reason to stop."""
        data = surveys.to_bytes(survey)
        if len(data) > self.max_bytes:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(self._path(key), data)
            self._shrink()
        except OSError as error:
            _LOG.debug("the survey is not kept in %s: %s", self.directory, error)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _replace(self, path: Path, data: bytes) -> None:
        descriptor, made = tempfile.mkstemp(prefix=".", suffix=".new", dir=self.directory)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(data)
            Path(made).replace(path)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise

    def _shrink(self) -> None:
        entries = []
        # What a killed process left half written counts and goes as the rest does.
        for path in [*self.directory.glob(f"*{_SUFFIX}"), *self.directory.glob(".*.new")]:
            with contextlib.suppress(OSError):
                told = path.lstat()
                entries.append((told.st_mtime_ns, told.st_size, path))
        total = 0
        for number, (_, size, path) in enumerate(sorted(entries, reverse=True)):
            total += size
            if number >= self.max_entries or total > self.max_bytes:
                path.unlink(missing_ok=True)


def default() -> SurveyCache:
    """In `STRATA_CACHE_DIR`, or where this system keeps users' caches."""
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
    """The name of a dataset and a way of looking at it."""
    known = None if columns is None else sorted(columns)
    told = [surveys.VERSION, source_kind, list(roots), format_name, known, condition_text, unit_bytes]
    return str(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(told)))
