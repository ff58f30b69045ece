"""Fetched bytes: parts of remote files that the processes of a machine fetch once, in shared memory or on a disk.

A part is claimed only while one request fetches it, so a process with a slow training loop delays nobody. The key
contains the file's ETag, or its modification time where the store reports none; a part of a replaced file is therefore
never found. Each part ends with a checksum, because a disk may lose the contents of a file that a crash interrupted.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import xxhash

from strata.data.shared.cache import NAME, Claim, NodeCache
from strata.data.shared.keys import VERSION, Unshareable, digest, store_identity
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.data.source.ranges import Range
    from strata.data.source.source import DataFile, Source

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""How long to wait for a part that another process fetches, before fetching it too."""
ATTEMPTS = 2
"""How often a part is looked for: once more after a damaged one was deleted."""
_CHECKSUM_BYTES = 16


def cache_on_disk(directory: str | os.PathLike[str], max_bytes: int) -> NodeCache:
    """Return the cache in a directory of the user's choice, which stays after the last process."""
    return NodeCache(Path(directory) / f"{NAME}{os.geteuid()}", max_bytes=max_bytes, persists=True)


class FetchedBytes:
    """The fetched parts of one source's files. Safe for use by several threads."""

    def __init__(self, cache: NodeCache, source: Source) -> None:
        self.cache = cache
        self._lock = renewed(threading.Lock())
        self._files: dict[str, str | None] = {}
        """The key of each file's contents; None if it has none."""
        self._store: str | None = None
        try:
            self._store = digest(VERSION, "bytes", store_identity(source.filesystem))
        except Unshareable as error:
            log.warning("fetched bytes are not kept: %s", error)

    def obtain(
        self,
        opened: pa.NativeFile,
        file: DataFile,
        part: Range,
        fetch: Callable[[], bytes],
        is_over: Callable[[], bool],
    ) -> tuple[pa.Buffer | bytes, bool]:
        """Return a part of a file, and whether it needed no request.

        Raises:
            Whatever `fetch` raises.
        """
        key = self._key_of(opened, file, part)
        for _ in range(ATTEMPTS):
            if key is None:
                break
            found = self.cache.claim(key, WAIT_S, is_over)
            if found is None:
                break
            if isinstance(found, Claim):
                return self._make(found, fetch), False
            data = _checked(found, part.num_bytes)
            if data is not None:
                return data, True
            log.warning("%s: the kept bytes from %d on are damaged, fetching them again", file.name, part.offset)
            self.cache.discard(key)
        return fetch(), False

    def discard(self, opened: pa.NativeFile, file: DataFile, part: Range) -> None:
        """Free a part that nobody needs any more, because its rows are shared."""
        key = self._key_of(opened, file, part)
        if key is not None:
            self.cache.discard(key)

    def _make(self, claim: Claim, fetch: Callable[[], bytes]) -> bytes:
        try:
            data = fetch()
        except BaseException:
            self.cache.abandon(claim)
            raise
        self.cache.publish(claim, len(data) + _CHECKSUM_BYTES, lambda fd: _write(fd, data))
        return data

    def _key_of(self, opened: pa.NativeFile, file: DataFile, part: Range) -> str | None:
        if self._store is None:
            return None
        with self._lock:
            if file.path not in self._files:
                version = _version(opened, file)
                self._files[file.path] = version and digest(self._store, file.path, file.size_bytes, version)
            known = self._files[file.path]
        return known and digest(known, part.offset, part.num_bytes)


def _version(opened: pa.NativeFile, file: DataFile) -> str | None:
    """Return what changes with the contents of a file: its ETag if the store reports one, or its modification time."""
    try:
        found = opened.metadata() or {}
    except (OSError, NotImplementedError, AttributeError, pa.ArrowException):
        found = {}
    for name, value in found.items():
        if _text(name).lower() == "etag" and value:
            return f"etag {_text(value)}"
    return f"time {file.mtime_ns}" if file.mtime_ns > 0 else None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
        file.write(xxhash.xxh3_128_digest(data))


def _checked(found: pa.Buffer, num_bytes: int) -> pa.Buffer | None:
    """Return the data of an entry without its checksum; None if it is damaged."""
    if found.size != num_bytes + _CHECKSUM_BYTES:
        return None
    data = found.slice(0, num_bytes)
    is_intact = xxhash.xxh3_128_digest(memoryview(data)) == found.slice(num_bytes).to_pybytes()
    return data if is_intact else None
