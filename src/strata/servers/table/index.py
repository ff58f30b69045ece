"""`KeyIndex`: finds the slot of a key, by open addressing.

A cell holds a slot, not a key; the key of a slot is stored once, beside the rows. With between a quarter and three
fifths of the cells in use, this takes between 16 and 25 bytes per row, keys included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import LimitExceeded
from strata.servers.table import native
from strata.servers.table.memory import reserve
from strata.splitmix import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys

    Slots = NDArray[np.int32]

ABSENT = -1
_ABSENT_WORD = 0xFFFF_FFFF
"""`ABSENT` as 32 bits."""
_EMPTY = -1
_REMOVED = -2
_FEWEST_CELLS = 1_024
_FULLEST = 0.6
"""Fraction of cells in use above which the cells are built anew."""
_AFTER_BUILD = 0.5
"""Fraction of cells that may be in use after that; at least half as much is."""
MAX_ROWS = 2**31 - 1


class KeyIndex:
    """Keys and their slots. Slots are dense: removed ones are used again first, the lowest before the others."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.keys: Keys = reserve((max_rows,), np.uint64)
        """By slot."""
        self.used: NDArray[np.uint8] = reserve((max_rows,), np.uint8)
        """By slot: 1 for a row, 0 for none."""
        self._cells = np.full(_FEWEST_CELLS, _EMPTY, np.int32)
        self._num_cells_used = 0
        self._num_slots = 0
        """Slots ever used: those of rows, and the free ones."""
        self._free = np.empty(0, np.int32)
        """Slots of removed rows, descending."""
        self._is_in_order = True
        """Whether the key of every slot is its number, as on the only server of an embedding: no need to look it up."""

    def __len__(self) -> int:
        return self._num_slots - len(self._free)

    @property
    def num_slots(self) -> int:
        """Slots ever used, which rows and removed rows occupy."""
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        return self._cells.nbytes + self._num_slots * (self.keys.itemsize + 1) + self._free.nbytes

    def find(self, keys: Keys) -> Slots:
        """Return the slot of each key, or `ABSENT`."""
        if self._is_in_order:
            return np.where(keys < np.uint64(self._num_slots), keys, np.uint64(_ABSENT_WORD)).astype(np.int32)
        if native.find is not None:
            found: Slots = native.find(self._cells, self.keys, keys)
            return found
        return _find(self._cells, self.keys, keys)

    def add(self, keys: Keys) -> Slots:
        """Give a slot to each key; they must differ and be absent.

        Raises:
            LimitExceeded: There are more rows than `max_rows`. Nothing was added.
        """
        num = len(keys)
        if len(self) + num > self.max_rows:
            raise LimitExceeded(
                f"{len(self)} rows and {num} new ones are more than max_rows={self.max_rows}; raise it, or admit fewer "
                "ids",
                field="max_rows",
            )
        num_free = min(num, len(self._free))
        slots = np.empty(num, np.int32)
        slots[:num_free] = self._free[len(self._free) - num_free :][::-1]
        slots[num_free:] = np.arange(self._num_slots, self._num_slots + num - num_free, dtype=np.int32)
        self._free = self._free[: len(self._free) - num_free].copy()
        self._num_slots += num - num_free
        self._is_in_order = self._is_in_order and bool((slots == keys).all())
        self.keys[slots] = keys
        self.used[slots] = 1
        if self._num_cells_used + num > _FULLEST * len(self._cells):
            self._rebuild()
        else:
            self._place(slots)
        return slots

    def remove(self, slots: Slots) -> None:
        """Free the slots of present rows."""
        self._is_in_order = self._is_in_order and not len(slots)
        self._cells[_cells_of(self._cells, self.keys, slots)] = _REMOVED
        self.used[slots] = 0
        self._free = np.sort(np.concatenate([self._free, slots]))[::-1]

    def swap(self, first: Slots, second: Slots) -> None:
        """Exchange the slots of rows, in pairs. All must be present and differ."""
        self._is_in_order = self._is_in_order and not len(first)
        slots, places = np.concatenate([first, second]), np.concatenate([second, first])
        cells, keys = _cells_of(self._cells, self.keys, slots), self.keys[slots]
        self._cells[cells] = places
        self.keys[places] = keys

    def slots(self) -> Slots:
        """Return the slots of all rows, ascending."""
        return np.flatnonzero(self.used[: self._num_slots]).astype(np.int32)

    def _place(self, slots: Slots) -> None:
        if native.place is not None:
            native.place(self._cells, self.keys, slots)
        else:
            _place(self._cells, self.keys, slots)
        self._num_cells_used += len(slots)

    def _rebuild(self) -> None:
        num_cells = max(_FEWEST_CELLS, 1 << (math.ceil(len(self) / _AFTER_BUILD) - 1).bit_length())
        self._cells = np.full(num_cells, _EMPTY, np.int32)
        self._num_cells_used = 0
        self._place(self.slots())


def _starts(cells: NDArray[Any], keys: Keys) -> NDArray[np.int64]:
    return (mix(keys) & np.uint64(len(cells) - 1)).astype(np.int64)


def _find(cells: Slots, row_keys: Keys, keys: Keys) -> Slots:
    """Follow the probes of all keys at once: each round looks at one more cell of those not settled yet."""
    found = np.full(len(keys), ABSENT, np.int32)
    at, last = _starts(cells, keys), len(cells) - 1
    pending = np.arange(len(keys))
    while len(pending):
        slots = cells[at[pending]]
        is_hit = slots >= 0
        is_hit[is_hit] = row_keys[slots[is_hit]] == keys[pending[is_hit]]
        found[pending[is_hit]] = slots[is_hit]
        pending = pending[(slots != _EMPTY) & ~is_hit]
        at[pending] = (at[pending] + 1) & last
    return found


def _place(cells: Slots, row_keys: Keys, slots: Slots) -> None:
    """Write slots into the first free cells of their keys. Of several that want one cell, the last gets it."""
    at, last = _starts(cells, row_keys[slots]), len(cells) - 1
    pending = np.arange(len(slots))
    while len(pending):
        wanted = at[pending]
        is_free = cells[wanted] < 0
        cells[wanted[is_free]] = slots[pending[is_free]]
        pending = pending[cells[wanted] != slots[pending]]
        at[pending] = (at[pending] + 1) & last


def _cells_of(cells: Slots, row_keys: Keys, slots: Slots) -> NDArray[np.int64]:
    """Return the cell of each slot."""
    at, last = _starts(cells, row_keys[slots]), len(cells) - 1
    pending = np.flatnonzero(cells[at] != slots)
    while len(pending):
        at[pending] = (at[pending] + 1) & last
        pending = pending[cells[at[pending]] != slots[pending]]
    return at
