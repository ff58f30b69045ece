"""Find what changed since the previous snapshot, in units: rows of a table, or blocks of bytes.

Comparing costs as much as copying, so it replaces the copy: the staging memory still holds the previous snapshot, and
only units that differ are written to it.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strata.checkpoint.format.buffers import is_raw, pieces, raw_bytes, rows_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.layout import Layout, Place
    from strata.checkpoint.format.tree import Leaf

BLOCK_BYTES = 4_096
MIN_ROW_BYTES, MAX_ROW_BYTES = 64, 1 << 16
"""Comparing smaller rows one by one is slow; a larger row seldom changes as a whole."""
INDEX_BYTES = 4
"""Of a changed unit, in most files."""
_WINDOW_BYTES = 1 << 20
"""Compared at a time, so that the result stays in the CPU cache."""
_TASK_BYTES = 16 << 20
_NUM_FETCHERS = 2
_WORTH_A_THREAD = 4_096

Bits = np.ndarray[Any, np.dtype[np.bool_]]
"""One per unit of a tensor: whether it changed."""
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Changes(NamedTuple):
    """Which units of a tensor changed: rows, or blocks of bytes of which the last may be short."""

    unit_bytes: int
    bits: Bits

    @classmethod
    def none(cls, place: Place, *, is_dirty: bool = False) -> Changes:
        """Return changes of nothing yet, in the units that fit the tensor.

        Args:
            is_dirty: Whether the caller reports the rows that changed. A small row is a unit then: a block around it
                would hold hundreds of rows that did not change.
        """
        row = row_bytes(place)
        unit = row if (1 if is_dirty else MIN_ROW_BYTES) <= row <= MAX_ROW_BYTES else BLOCK_BYTES
        return cls(unit, np.zeros(-(-place.num_bytes // unit), np.bool_))

    def joined(self, other: Changes, num_bytes: int) -> Changes:
        """Return what changed in either, of a tensor of this size."""
        if self.unit_bytes == other.unit_bytes:
            return Changes(self.unit_bytes, self.bits | other.bits)
        return self.in_blocks(num_bytes).joined(other.in_blocks(num_bytes), num_bytes)

    def in_blocks(self, num_bytes: int) -> Changes:
        """Return the blocks that these units touch."""
        if self.unit_bytes == BLOCK_BYTES:
            return self
        bits = np.zeros(-(-num_bytes // BLOCK_BYTES), np.bool_)
        _mark_blocks(bits, np.flatnonzero(self.bits), self.unit_bytes)
        return Changes(BLOCK_BYTES, bits)


def row_bytes(place: Place) -> int:
    return place.num_bytes // place.shape[0] if place.shape and place.shape[0] else place.num_bytes


def _mark_blocks(bits: Bits, rows: Rows, row: int) -> None:
    """Set the bits of the blocks of these rows: a row may span several blocks, and a block may hold several rows."""
    first, last = rows * row // BLOCK_BYTES, ((rows + 1) * row - 1) // BLOCK_BYTES
    for offset in range(int((last - first).max(initial=0)) + 1):
        bits[np.minimum(first + offset, last)] = True


# -- comparing -----------------------------------------------------------------------------------------------------


def stage_changes(
    pool: ThreadPoolExecutor,
    layout: Layout,
    leaves: Sequence[Leaf],
    memory: Bytes,
    dirty: Mapping[str, Rows],
) -> dict[str, Changes]:
    """Update the snapshot in `memory`; return which units of each tensor changed.

    For tensors in `dirty`, only these rows are copied, without a comparison.
    """
    by_name = {leaf.name: leaf for leaf in leaves}
    places = [place for place in layout.places if place.num_bytes]
    marked = _marked([place for place in places if place.name in dirty], dirty)
    changed = {place.name: Changes.none(place) for place in places if place.name not in dirty}
    waiting: list[Future[None]] = []
    try:
        for place in places:
            leaf, target = by_name[place.name], memory[place.offset : place.end]
            if place.name in dirty:
                changed[place.name], rows = marked[place.name]
                waiting.append(pool.submit(_copy_rows, leaf, row_bytes(place), rows, target))
                continue
            unit, bits = changed[place.name]
            for start, piece in pieces(leaf, max(_TASK_BYTES // unit, 1) * unit, unit):
                part = target[start : start + len(piece)]
                waiting.append(pool.submit(_copy_changes, piece, part, unit, bits[start // unit :]))
                if not is_raw(leaf):
                    waiting[-1].result()  # a fetched piece takes memory
    finally:
        finish_all(waiting)
    return changed


def _copy_changes(new: Bytes, old: Bytes, unit: int, bits: Bits) -> None:
    """Compare everything before copying: few long calls, so that threads seldom wait for each other."""
    window = max(_WINDOW_BYTES // unit, 1) * unit
    scratch = np.empty(window // 8, np.bool_)
    for start in range(0, len(new), window):
        a, b = new[start : start + window], old[start : start + window]
        _compare(a, b, unit, bits[start // unit : start // unit - (-len(a) // unit)], scratch)
    changed = np.flatnonzero(bits[: -(-len(new) // unit)])
    if len(changed):
        copy_units(new, old, unit, changed)


def _compare(a: Bytes, b: Bytes, unit: int, bits: Bits, scratch: Bits) -> None:
    """Set the bit of each unit in which two pieces of equal length differ; the last unit may be short."""
    count, rest = divmod(len(a), unit)
    whole = count * unit
    if rest:
        bits[count] = bool((a[whole:] != b[whole:]).any())
    if not count:
        return
    if unit % 64 or not (_is_aligned(a) and _is_aligned(b)):
        wide = np.uint64 if unit % 8 == 0 and _is_aligned(a) and _is_aligned(b) else np.uint8
        bits[:count] = (a[:whole].view(wide) != b[:whole].view(wide)).reshape(count, -1).any(axis=1)
        return
    # Compare eight bytes at a time and view eight results as one number: a row of 256 bytes becomes four numbers.
    each = np.not_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64), out=scratch[: whole // 8])
    differ = each.view(np.uint64).reshape(count, -1)
    if differ.shape[1] > 8:
        bits[:count] = differ.any(axis=1)
        return
    folded = differ[:, 0].copy()
    for column in range(1, differ.shape[1]):
        folded |= differ[:, column]
    np.not_equal(folded, 0, out=bits[:count])


def _is_aligned(data: Bytes) -> bool:
    return data.ctypes.data % 8 == 0


def copy_units(source: Bytes, target: Bytes, unit: int, indices: np.ndarray[Any, Any]) -> None:
    """Copy the units with these indices from one piece to another of the same length."""
    count = len(source) // unit
    whole = indices[indices < count]
    rows_of(target, unit)[whole] = rows_of(source, unit)[whole]
    if len(indices) > len(whole):
        target[count * unit :] = source[count * unit :]


def rows_of(data: Bytes, unit: int) -> np.ndarray[Any, Any]:
    """View all whole units as one element each, so that numpy copies units and not single bytes."""
    count = len(data) // unit
    return data[: count * unit].view(np.dtype((np.void, unit)))


def _marked(places: Sequence[Place], dirty: Mapping[str, Rows]) -> dict[str, tuple[Changes, Rows]]:
    """Return the changes of each tensor, and its rows to copy.

    The arrays of one table have the same rows, and then the same bits, which are computed once.
    """
    found: dict[str, tuple[Changes, Rows]] = {}
    known: dict[tuple[int, int], tuple[Bits, Rows]] = {}
    for place in places:
        changes, rows = Changes.none(place, is_dirty=True), dirty[place.name]
        if changes.unit_bytes != row_bytes(place):
            _mark_blocks(changes.bits, rows, row_bytes(place))
            found[place.name] = changes, rows
            continue
        key = id(rows), len(changes.bits)
        if key not in known:
            changes.bits[rows] = True
            known[key] = changes.bits, np.flatnonzero(changes.bits)  # sorted and unique, without a sort
        bits, rows = known[key]
        found[place.name] = Changes(changes.unit_bytes, bits), rows
    return found


def _copy_rows(leaf: Leaf, row: int, rows: Rows, target: Bytes) -> None:
    source = raw_bytes(leaf)
    if source is None:
        _copy_fetched_rows(leaf, rows, target, row)
        return
    old, new = rows_of(target, row), rows_of(source, row)
    in_threads(rows, lambda some: old.__setitem__(some, new[some]))


def in_threads(numbers: Rows, work: Callable[[Rows], None]) -> None:
    """Run `work` on halves of the indices in two threads: random access to memory is bound by latency."""
    if len(numbers) < _WORTH_A_THREAD:
        work(numbers)
        return
    finish_all([_fetchers().submit(work, half) for half in np.array_split(numbers, _NUM_FETCHERS)])


@functools.cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_FETCHERS, thread_name_prefix="strata-fetch")


def _copy_fetched_rows(leaf: Leaf, rows: Rows, target: Bytes, row: int) -> None:
    """Copy rows of a tensor that is on another device or strided."""
    for start in range(0, len(rows), max(_TASK_BYTES // row, 1)):
        some = rows[start : start + max(_TASK_BYTES // row, 1)]
        rows_of(target, row)[some] = rows_of(rows_from(leaf, some), row)


# -- threads -------------------------------------------------------------------------------------------------------


def finish_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all futures. Raise the first error, or an interrupt, only when none of them is running."""
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
