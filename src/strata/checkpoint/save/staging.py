"""Snapshots are copied into warm memory, laid out as their file will be.

Fresh pages cost more than the copy into them, so the memory is kept from one save to the next and only ever grows. It
is aligned to pages, so that it can be written as it is. One snapshot at a time: whoever fills it waits until the last
one has been written. It stays there, so that the next one can be compared with it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from strata.checkpoint.format.buffers import copy_strided, raw_bytes
from strata.checkpoint.format.layout import ALIGNMENT
from strata.checkpoint.save import delta
from strata.checkpoint.save.waiting import finish_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.layout import Layout, Place
    from strata.checkpoint.format.tree import Leaf
    from strata.checkpoint.save.memory import Memory

NUM_THREADS = 2
PIECE_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
"""Tensors below this are copied many at a time: handing one to a thread costs more than copying it."""


class Staging:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._places: tuple[Place, ...] = ()
        """Of the snapshot that is in the memory."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-stage")

    def reserve(self, num_bytes: int) -> None:
        """Makes room and touches it, so that the first save is as fast as the others."""
        had = self._memory.size_bytes
        if num_bytes <= had:
            return
        self._memory.grow(num_bytes)
        if not self._memory.keeps_contents:
            had, self._places = 0, ()
        pages = np.frombuffer(self._memory.view(), np.uint8)[had:]
        step = max(len(pages) // (4 * NUM_THREADS) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        starts = range(0, len(pages), step)
        list(self._pool.map(lambda start: pages[start : start + step : ALIGNMENT].fill(0), starts))

    def fill(self, layout: Layout, leaves: Sequence[Leaf]) -> None:
        """Copies a snapshot in, as the bytes of its file. The caller may change its tensors afterwards."""
        self.reserve(layout.size_bytes)
        self._places = ()
        view = self._memory.view()[: layout.size_bytes]
        view[: len(layout.header)] = layout.header
        target = np.frombuffer(view, np.uint8)
        by_name = {leaf.name: leaf for leaf in leaves}
        tasks: list[Callable[[], None]] = []
        small: list[tuple[Leaf, int]] = []
        for place in layout.places:
            leaf = by_name[place.name]
            if place.num_bytes < _SMALL_BYTES:
                small.append((leaf, place.offset))
            else:
                tasks += _copies(leaf, target[place.offset : place.end])
        per_task = max(len(small) // (4 * NUM_THREADS), 64)
        tasks += [_copy_many(small[i : i + per_task], target) for i in range(0, len(small), per_task)]
        finish_all([self._pool.submit(task) for task in tasks])
        self._places = layout.places

    def forget(self) -> None:
        """What is in the memory was not handed over, so nothing may be compared with it."""
        self._places = ()

    @property
    def has_snapshot(self) -> bool:
        return bool(self._places)

    def has_snapshot_like(self, layout: Layout) -> bool:
        """Whether the memory holds a snapshot of the same tensors at the same places."""
        return bool(layout.places) and self._places == layout.places

    def update(self, layout: Layout, leaves: Sequence[Leaf], told: Mapping[str, delta.Rows]) -> dict[str, delta.Bits]:
        """Copies what differs from the snapshot that is there; says which units of each tensor did."""
        self._places = ()
        view = self._memory.view()[: layout.size_bytes]
        view[: len(layout.header)] = layout.header
        changed = delta.stage_changes(self._pool, layout, leaves, np.frombuffer(view, np.uint8), told)
        self._places = layout.places
        return changed

    def close(self) -> None:
        self._pool.shutdown()


def _copies(leaf: Leaf, target: Bytes) -> list[Callable[[], None]]:
    source = raw_bytes(leaf)
    if source is None:
        return [lambda: copy_strided(leaf, target)]

    def copy(start: int, source: Bytes) -> None:
        np.copyto(target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])

    return [
        lambda start=start: copy(start, source)  # type: ignore[misc]  # mypy does not see the default's type
        for start in range(0, len(source), PIECE_BYTES)
    ]


def _copy_many(leaves: Sequence[tuple[Leaf, int]], target: Bytes) -> Callable[[], None]:
    def copy() -> None:
        for leaf, offset in leaves:
            num_bytes = leaf.num_bytes
            if not num_bytes:
                continue
            piece = target[offset : offset + num_bytes]
            source = raw_bytes(leaf)
            if source is None:
                copy_strided(leaf, piece)
            else:
                piece[:] = source

    return copy
