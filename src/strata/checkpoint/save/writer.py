"""A staged snapshot into a store: the file, and beside it the hashes of its chunks."""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.layout import chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.checkpoint.format.layout import Layout, Place
    from strata.storage import Store, Watch

HASH_THREADS = 2
_PER_TASK_BYTES = 16 << 20


def file_name(rank: int, number: int = 0) -> str:
    return f"rank-{rank:05d}-{number}.safetensors" if number else f"rank-{rank:05d}.safetensors"


Written = tuple[m.DataFile, dict[str, tuple[str, ...]]]
"""A file's entry in the manifest, and the hashes of each tensor's chunks."""


def write_file(
    store: Store,
    directory: str,
    layout: Layout,
    data: memoryview,
    *,
    rank: int,
    number: int = 0,
    chunk_bytes: int,
    watch: Watch,
) -> Written:
    """Writes a file of one rank."""
    with file_being_written(
        store, directory, layout, data, rank=rank, number=number, chunk_bytes=chunk_bytes, watch=watch
    ) as written:
        return written


@contextlib.contextmanager
def file_being_written(
    store: Store,
    directory: str,
    layout: Layout,
    data: memoryview,
    *,
    rank: int,
    number: int = 0,
    chunk_bytes: int,
    watch: Watch,
) -> Iterator[Written]:
    """Likewise, for who has something to do meanwhile; the file is there when the block ends. The hashes are computed
    while the disk is busy, from the same memory.
    """
    with ThreadPoolExecutor(HASH_THREADS + 1, thread_name_prefix="strata-write") as pool:
        putting = pool.submit(store.put_large, f"{directory}/{file_name(rank, number)}", data, watch=watch)
        try:
            groups = [pool.submit(_hashes, group, data, chunk_bytes, watch) for group in _groups(layout.places)]
            hashes = dict(itertools.chain.from_iterable(group.result() for group in groups))
            entry = m.DataFile(
                path=file_name(rank, number),
                rank=rank,
                size_bytes=layout.size_bytes,
                header_bytes=len(layout.header),
                header_hash=xxh3_128_hexdigest(layout.header),
            )
            yield entry, hashes
        finally:
            putting.result()


def _groups(places: Sequence[Place]) -> list[list[Place]]:
    """Of about equal size, so that many small tensors are one task and not many."""
    groups: list[list[Place]] = [[]]
    room = _PER_TASK_BYTES
    for place in places:
        groups[-1].append(place)
        room -= place.num_bytes
        if room <= 0:
            groups.append([])
            room = _PER_TASK_BYTES
    return groups


def _hashes(
    places: Sequence[Place], data: memoryview, chunk_bytes: int, watch: Watch
) -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for place in places:
        watch.check()
        pieces = chunks(place.offset, place.num_bytes, chunk_bytes)
        found.append((place.name, tuple(xxh3_128_hexdigest(data[start:end]) for start, end in pieces)))
    return found
