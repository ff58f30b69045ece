"""Prefetch: reads the bytes of row groups from remote storage before they are needed.

A decoder that reads from an object store waits for round trips. The fetcher therefore requests the bytes of the next
row groups in advance, in parts over several connections, and the decoder finds them in memory. The bytes in flight are
bounded; a row group that does not fit is requested when it is its turn, in parts as well.

All remote reads happen in threads of the fetcher that can be abandoned (`threads.py`), so a loop can be left at once,
whatever the store does.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from strata.data.formats.base import PagedRanged, Ranged
from strata.data.runtime.threads import Threads
from strata.data.source.ranges import Range, RangedFile, coalesce, split_ranges
from strata.data.source.source import ByteCounter, Source, translate_errors
from strata.errors import DataFileChanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.formats.base import UnitRanges
    from strata.data.runtime.decoder import Recipe
    from strata.data.shared.fetched import FetchedBytes
    from strata.data.shared.row_groups import SharedRowGroups
    from strata.data.source.source import DataFile

Fetched: TypeAlias = "pa.Buffer | bytes"

NUM_CONNECTIONS = 16
MAX_FILES_OPEN = 64
MAX_FILES_KNOWN = 256
"""Files whose byte ranges are kept: a lane stays in one file for a while."""
JOIN_S = 0.2
"""How long to wait for running reads when the loop is left; longer ones are abandoned."""


class _Parts:
    """The requested byte ranges of one row group."""

    def __init__(
        self, file: DataFile, ranges: Sequence[Range], futures: Sequence[Future[Fetched]], cached: ByteCounter
    ) -> None:
        self.file = file
        self.ranges = ranges
        self.futures = futures
        self.cached = cached
        """Counts the bytes that needed no request."""
        self._offsets = [each.offset for each in ranges]

    def read(self, offset: int, num_bytes: int) -> pa.Buffer | None:
        """Return these bytes, or None if they were not requested."""
        place = bisect_right(self._offsets, offset) - 1
        if place < 0 or offset >= self.ranges[place].end:
            return None
        found: list[memoryview] = []
        while num_bytes:
            if place == len(self.ranges) or self.ranges[place].offset > offset:
                return None
            part = self.ranges[place]
            first = offset - part.offset
            view = memoryview(self.futures[place].result())[first : first + num_bytes]
            found.append(view)
            offset, num_bytes, place = offset + len(view), num_bytes - len(view), place + 1
        return pa.py_buffer(found[0]) if len(found) == 1 else pa.py_buffer(b"".join(found))


class Fetcher:
    """Fetches for one pass. Any thread may call `ahead`; the decoder of a row group calls the rest."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        prefetch_bytes: int,
        num_connections: int = NUM_CONNECTIONS,
        shared: SharedRowGroups | None = None,
        fetched: FetchedBytes | None = None,
    ) -> None:
        """
        Args:
            shared: Row groups that are not fetched, because they are decoded.
            fetched: Where fetched bytes are kept for other processes, or for the next run.
        """
        self._recipe = recipe
        self._shared = shared
        self._fetched = fetched
        self._is_over = False
        self._prefetch_bytes = prefetch_bytes
        self._lock = threading.RLock()  # re-entrant: garbage collection may end a pass in a thread that holds it
        self._row_groups: dict[int, Future[_Parts]] = {}
        self._by_path: dict[str, list[_Parts]] = {}
        self._files: dict[str, pa.NativeFile] = {}
        self._bytes_ahead = 0
        self._planners = Threads(num_connections // 4 or 1, "strata-data-fetch")
        self._readers = Threads(num_connections, "strata-data-read")
        self._file_ranges: dict[int, Future[UnitRanges]] = {}
        self.source = FetchedSource(recipe.source, self)
        """The source that decoders read from."""

    def ahead(self, number: int) -> None:
        """Request the bytes of a row group if they fit and it is not in the node cache, without waiting."""
        if self._shared is not None and self._shared.has(number):
            return
        size = int(self._recipe.plan.unit_bytes[number])
        with self._lock:
            if number in self._row_groups or self._bytes_ahead + size > self._prefetch_bytes:
                return
            self._begin(number, size)

    def wait(self, number: int) -> int:
        """Wait for all bytes of a row group; return how many of them needed no request.

        Raises:
            DataError, StorageError: They cannot be read.
            CancelledError: The pass is over.
        """
        with self._lock:
            if number not in self._row_groups:
                self._begin(number, int(self._recipe.plan.unit_bytes[number]))
            asked = self._row_groups[number]
        parts = asked.result()
        for future in parts.futures:
            future.result()
        return parts.cached.total

    def release(self, number: int) -> None:
        with self._lock:
            asked = self._row_groups.pop(number, None)
            if asked is None:
                return
            self._bytes_ahead -= int(self._recipe.plan.unit_bytes[number])
            if asked.done() and asked.exception() is None:
                parts = asked.result()
                self._by_path[parts.file.path].remove(parts)

    def discard(self, number: int) -> None:
        """Free what is kept of a row group for other processes, which find its rows instead."""
        with self._lock:
            asked = self._row_groups.get(number)
        if self._fetched is None or self._fetched.cache.persists or asked is None or not asked.done():
            return
        if asked.exception() is not None:
            return
        parts = asked.result()
        for part in parts.ranges:
            self._fetched.discard(self.opened(parts.file), parts.file, part)

    def cancel(self) -> None:
        """End the pass: start no more reads and wake every waiting thread."""
        self._is_over = True
        for threads in (self._planners, self._readers):
            threads.cancel()

    def close(self) -> None:
        self.cancel()
        has_ended = all(threads.join(JOIN_S) for threads in (self._planners, self._readers))
        with self._lock:
            files, self._files = self._files, {}
            self._row_groups.clear()
            self._by_path.clear()
        if has_ended:  # otherwise a thread may still read from them, and the last reference closes the file
            for file in files.values():
                file.close()

    def read(self, path: str, offset: int, num_bytes: int) -> pa.Buffer | None:
        """Return fetched bytes of a file, or None if they were not fetched."""
        with self._lock:
            candidates = list(self._by_path.get(path, ()))
        for parts in candidates:
            found = parts.read(offset, num_bytes)
            if found is not None:
                return found
        return None

    def _begin(self, number: int, size: int) -> None:
        self._bytes_ahead += size
        self._row_groups[number] = self._planners.submit(partial(self._ask, number))

    def _ask(self, number: int) -> _Parts:
        plan = self._recipe.plan
        file_number = int(plan.unit_file[number])
        file = plan.files[file_number].file
        cut = split_ranges(coalesce(self._ranges(number, file_number)))
        opened = self.opened(file)
        cached = ByteCounter()
        futures = [self._readers.submit(partial(self._part, opened, file, each, cached)) for each in cut]
        parts = _Parts(file, cut, futures, cached)
        with self._lock:
            self._by_path.setdefault(file.path, []).append(parts)
        return parts

    def _ranges(self, number: int, file_number: int) -> Sequence[Range]:
        """Return the byte ranges of a row group; none if they are unknown, so that it is read while decoding."""
        planned, row_group = self._recipe.plan.files[file_number], self._recipe.plan.unit(number)
        format = self._recipe.formats[planned.format]
        if not format.is_typed:  # a row group of text is a byte range
            return [Range(row_group.offset, row_group.num_bytes)]
        if not isinstance(format, Ranged):
            return []
        with self._lock:
            known = self._file_ranges.get(file_number)
            is_first = known is None
            if known is None:
                known = self._file_ranges[file_number] = Future()
                if len(self._file_ranges) > MAX_FILES_KNOWN:
                    del self._file_ranges[next(iter(self._file_ranges))]
        if is_first:  # the other threads wait, so that a footer is read once
            try:
                known.set_result(self._ranges_of_file(format, file_number))
            except Exception as error:  # noqa: BLE001 - raised in every thread that needs it
                known.set_exception(error)
        return known.result()(row_group)

    def _ranges_of_file(self, format: Ranged, file_number: int) -> UnitRanges:
        plan, source = self._recipe.plan, self.source
        planned = plan.files[file_number]
        columns = planned.projection.file_columns(self._recipe.columns)
        if plan.parts is not None and isinstance(format, PagedRanged):
            first, last = np.searchsorted(plan.unit_file, [file_number, file_number + 1]).tolist()
            parts = {int(plan.unit_index[number]): plan.parts_of(number) for number in range(first, last)}
            some = {index: rows for index, rows in parts.items() if rows}
            return format.page_ranges(source, planned.file, columns, planned.version, some)
        return format.ranges(source, planned.file, columns, planned.version)

    def opened(self, file: DataFile) -> pa.NativeFile:
        """Return an open file, which is kept open.

        Raises:
            DataFileChanged: Its size has changed since it was planned.
        """
        with self._lock:
            if file.path in self._files:
                return self._files[file.path]
        opened = self._recipe.source.open(file)
        _check_size(opened, file)
        with self._lock:
            while len(self._files) >= MAX_FILES_OPEN:  # not closed: another thread may read from it
                del self._files[next(iter(self._files))]
            kept = self._files.setdefault(file.path, opened)
        if kept is not opened:  # another thread opened it first
            opened.close()
        return kept

    def read_there(self, file: DataFile, part: Range) -> Fetched:
        """Read bytes that were not prefetched. The caller counts them."""
        return self._readers.submit(
            lambda: self._part(self.opened(file), file, part, ByteCounter()), is_urgent=True
        ).result()

    def _part(self, opened: pa.NativeFile, file: DataFile, part: Range, cached: ByteCounter) -> Fetched:
        """Fetch a part of a file, unless it is kept."""
        if self._fetched is None:
            return _read(opened, file, part)
        fetch = partial(_read, opened, file, part)
        data, is_cached = self._fetched.obtain(opened, file, part, fetch, lambda: self._is_over)
        if is_cached:
            cached.add(part.num_bytes)
        return data


def _check_size(opened: pa.NativeFile, file: DataFile) -> None:
    """Check the size once for all formats: decoders always see the size that was planned."""
    with translate_errors(file.name):
        size_bytes = opened.size()
    if size_bytes != file.size_bytes:
        raise DataFileChanged(
            f"{file.name} has {size_bytes:,} bytes, but had {file.size_bytes:,} when planned; "
            "create the loader again, or restore the file"
        )


def _read(opened: pa.NativeFile, file: DataFile, part: Range) -> bytes:
    with translate_errors(file.name):
        found: bytes = opened.read_at(part.num_bytes, part.offset)
    return found


class FetchedSource(Source):
    """A source whose files return prefetched bytes from memory and read the rest from storage."""

    __slots__ = ("_fetcher",)
    _fetcher: Fetcher

    def __init__(self, there: Source, fetcher: Fetcher) -> None:
        super().__init__(there.filesystem, there.is_local, there.timeout_s, there.max_attempts, there.counter)
        object.__setattr__(self, "_fetcher", fetcher)

    @property
    def has_round_trips(self) -> bool:
        return False

    def open(self, file: DataFile) -> pa.NativeFile:
        fetcher = self._fetcher

        def read(offset: int, num_bytes: int) -> pa.Buffer:
            found = fetcher.read(file.path, offset, num_bytes)
            if found is not None:
                return found
            return pa.py_buffer(fetcher.read_there(file, Range(offset, num_bytes)))

        return pa.PythonFile(RangedFile(file.size_bytes, read), mode="r")
