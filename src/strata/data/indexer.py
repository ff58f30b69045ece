"""Write the indexes of tar shards, in several threads. `strata data index` calls it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.data.formats.text import codec_of
from strata.data.formats.webdataset import index
from strata.data.formats.webdataset.format import find_index, find_outline
from strata.data.source.paths import discover, suffixes_of
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.data.source.source import DataFile, Source

MAX_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """What was done."""

    num_shards: int
    num_samples: int
    num_written: int
    """Shards whose index was written, or is missing or stale if nothing is written."""
    num_kept: int
    """Shards with a valid index."""
    num_compressed: int
    """Compressed shards, which are read whole and have no index."""


def index_shards(
    path: Any,
    *,
    filesystem: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    writes: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Indexed:
    """Write an index beside each shard that has no valid one.

    `on_progress` is called with the shards done and their number, from one thread at a time.

    Raises:
        DataFileInvalid: A shard is damaged.
        NoData, StorageError: See `discover`; or an index cannot be written.
    """
    found = discover(
        path,
        suffixes=suffixes_of("webdataset"),
        filesystem=filesystem,
        storage_options=storage_options,
        partitioning=None,
    )
    shards = [file for file in found.files if codec_of(file) is None]
    lock = renewed(threading.Lock())
    num_done = 0

    def one(file: DataFile) -> tuple[int, bool]:
        nonlocal num_done
        num_samples, is_new = _index_one(found.source, file, writes=writes)
        with lock:
            num_done += 1
            on_progress(num_done, len(shards))
        return num_samples, is_new

    num_threads = min(MAX_THREADS, (os.cpu_count() or 1) if found.source.is_local else MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "strata-data-index") as pool:
        results = list(pool.map(one, shards))
    num_written = sum(is_new for _, is_new in results)
    return Indexed(
        num_shards=len(found.files),
        num_samples=sum(num for num, _ in results),
        num_written=num_written,
        num_kept=len(shards) - num_written,
        num_compressed=len(found.files) - len(shards),
    )


def _index_one(source: Source, file: DataFile, *, writes: bool) -> tuple[int, bool]:
    """Return the samples of a shard, and whether it had no valid index."""
    known = find_index(source, file)
    if known is not None:
        return known.num_samples, False
    outline = find_outline(source, file, uses_index=False)
    if writes:
        index.write(source, file, outline)
    return outline.num_samples, True
