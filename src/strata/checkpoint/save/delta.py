"""What has changed since an earlier snapshot, in units: rows of a table, or blocks of bytes.

Comparing costs as much as copying, so it takes the copy's place: the staging memory still has the snapshot before, and
only units that differ are written into it.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

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
"""Smaller rows cost more to number than to store; a larger one is seldom new as a whole."""
_WINDOW_BYTES = 1 << 20
"""Compared at a time: the outcome stays in the cache."""
_TASK_BYTES = 16 << 20
_NUM_FETCHERS = 2
_WORTH_A_THREAD = 4_096

Bits = np.ndarray[Any, np.dtype[np.bool_]]
"""One for each unit of a tensor: it has changed."""
Rows = np.ndarray[Any, np.dtype[np.int64]]


def unit_bytes(place: Place) -> int:
    """A row, if rows are of a handy size; else a block."""
    row = row_bytes(place)
    return row if MIN_ROW_BYTES <= row <= MAX_ROW_BYTES else BLOCK_BYTES


def row_bytes(place: Place) -> int:
    return place.num_bytes // place.shape[0] if place.shape and place.shape[0] else place.num_bytes


def num_units(place: Place) -> int:
    return -(-place.num_bytes // unit_bytes(place))


# -- comparing -----------------------------------------------------------------------------------------------------


def stage_changes(
    pool: ThreadPoolExecutor,
    layout: Layout,
    leaves: Sequence[Leaf],
    memory: Bytes,
    told: Mapping[str, Rows],
) -> dict[str, Bits]:
    """Brings the snapshot in `memory` up to date, and says for each tensor which of its units were different.

    Of the tensors in `told` only these rows are looked at, and believed to have changed.
    """
    by_name = {leaf.name: leaf for leaf in leaves}
    changed = {place.name: np.zeros(num_units(place), np.bool_) for place in layout.places if place.num_bytes}
    waiting: list[Future[None]] = []
    try:
        for place in layout.places:
            if not place.num_bytes:
                continue
            leaf, bits = by_name[place.name], changed[place.name]
            target = memory[place.offset : place.end]
            if place.name in told:
                waiting.append(pool.submit(_copy_rows, leaf, place, told[place.name], target, bits))
                continue
            unit = unit_bytes(place)
            for start, piece in pieces(leaf, max(_TASK_BYTES // unit, 1) * unit, unit):
                part = target[start : start + len(piece)]
                waiting.append(pool.submit(_copy_changes, piece, part, unit, bits[start // unit :]))
                if not is_raw(leaf):
                    waiting[-1].result()  # a piece that had to be fetched takes memory
    finally:
        finish_all(waiting)
    return changed


def _copy_changes(new: Bytes, old: Bytes, unit: int, bits: Bits) -> None:
    """All is compared before anything is copied: few long calls, so that threads do not wait for each other."""
    window = max(_WINDOW_BYTES // unit, 1) * unit
    scratch = np.empty(window // 8, np.bool_)
    for start in range(0, len(new), window):
        a, b = new[start : start + window], old[start : start + window]
        _compare(a, b, unit, bits[start // unit : start // unit - (-len(a) // unit)], scratch)
    changed = np.flatnonzero(bits[: -(-len(new) // unit)])
    if len(changed):
        copy_units(new, old, unit, changed)


def _compare(a: Bytes, b: Bytes, unit: int, bits: Bits, scratch: Bits) -> None:
    """Sets a bit for each unit of two equally long pieces that they differ in; the last unit may be short."""
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
    # Eight bytes to a comparison, eight of its outcomes to a number: a row of 256 bytes is four numbers to look at.
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
    """Copies the numbered units from one piece to another of the same length."""
    count = len(source) // unit
    whole = indices[indices < count]
    rows_of(target, unit)[whole] = rows_of(source, unit)[whole]
    if len(indices) > len(whole):
        target[count * unit :] = source[count * unit :]


def rows_of(data: Bytes, unit: int) -> np.ndarray[Any, Any]:
    """All whole units, one element each, so that numpy moves them with one copy and not byte by byte."""
    count = len(data) // unit
    return data[: count * unit].view(np.dtype((np.void, unit)))


def _copy_rows(leaf: Leaf, place: Place, rows: Rows, target: Bytes, bits: Bits) -> None:
    row, unit = row_bytes(place), unit_bytes(place)
    if unit == row:
        bits[rows] = True
        rows = np.flatnonzero(bits)  # each once and in order, without having to sort them
    else:  # a row may lie in several blocks, and a block hold several rows
        first, last = rows * row // unit, ((rows + 1) * row - 1) // unit
        for offset in range(int((last - first).max(initial=0)) + 1):
            bits[np.minimum(first + offset, last)] = True
    source = raw_bytes(leaf)
    if source is None:
        _copy_fetched_rows(leaf, rows, target, row)
        return
    old, new = rows_of(target, row), rows_of(source, row)
    in_threads(rows, lambda some: old.__setitem__(some, new[some]))


def in_threads(numbers: Rows, work: Callable[[Rows], None]) -> None:
    """Units that lie far apart come from memory one by one, however many there are: two at once take half the time."""
    if len(numbers) < _WORTH_A_THREAD:
        work(numbers)
        return
    finish_all([_fetchers().submit(work, half) for half in np.array_split(numbers, _NUM_FETCHERS)])


@functools.cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_FETCHERS, thread_name_prefix="strata-fetch")


def _copy_fetched_rows(leaf: Leaf, rows: Rows, target: Bytes, row: int) -> None:
    """From another device, or out of order: only the rows that are wanted."""
    for start in range(0, len(rows), max(_TASK_BYTES // row, 1)):
        some = rows[start : start + max(_TASK_BYTES // row, 1)]
        rows_of(target, row)[some] = rows_of(rows_from(leaf, some), row)


# -- threads -------------------------------------------------------------------------------------------------------


def finish_all(futures: Sequence[Future[Any]]) -> None:
    """Returns when all are done. Raises what the first raised, or an interrupt; then, too, none of them is running."""
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
