"""Recipes: how the ids that a lookup gets follow from the batch, learned by comparing values.

Rows can be prefetched only if their ids are known before the forward pass. Most modules look up columns of the batch:
a column, a matrix, some columns of it, several side by side, each perhaps shifted by a constant because all columns
share one table. `matches` finds such columns in one batch, and `Learner` keeps what holds for several. A recipe may be
wrong, so its ids are compared with the actual ones: a wrong guess costs a pull and changes no result.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Ids: TypeAlias = NDArray[np.int64]
    Leaves: TypeAlias = Mapping[str, NDArray[np.integer]]
    """The arrays of whole numbers in a batch, by their places."""

NUM_BATCHES = 2
"""Batches from which a recipe is learned; one may match by chance."""
MIN_ROWS = 2
"""A column of one row matches every other one."""
MAX_COLUMNS = 4_096
"""Columns that are compared; wider batches have no recipe."""
MAX_MISSES = 3
"""Wrong guesses in a row after which a recipe is dropped."""
WHOLE = -1


class Column(NamedTuple):
    """A column of a batch plus a constant."""

    leaf: str
    number: int
    """`WHOLE`: all of its values, whatever its shape."""
    offset: int


class IdLayout(NamedTuple):
    """The order in which the ids of several columns lie."""

    num_columns: int
    """0: an array as a whole."""
    is_by_column: bool = False
    """One column after the other, as `torch.cat` along the rows does; otherwise one row after the other."""


Matches: TypeAlias = "dict[IdLayout, list[frozenset[Column]]]"
"""For each layout that is possible, the columns that each column of ids may be."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Computes the ids of a lookup."""

    layout: IdLayout
    columns: tuple[Column, ...]

    def ids(self, leaves: Leaves) -> Ids | None:
        """Return the ids for a batch as a new array of one dimension; None if the batch lacks a column."""
        parts: list[Ids] = []
        for leaf, group in groupby(self.columns, key=lambda column: column.leaf):
            part = _chosen(leaves.get(leaf), list(group))
            if part is None or (parts and len(part) != len(parts[0])):
                return None
            parts.append(part)
        found = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return (found.T if self.layout.is_by_column else found).flatten()  # a copy: a module may change its inputs


def _chosen(array: NDArray[np.integer] | None, columns: Sequence[Column]) -> Ids | None:
    """Return these columns of an array, `[rows, columns]`, with their offsets."""
    if array is None:
        return None
    found: Ids = array.astype(np.int64, copy=False)
    if columns[0].number == WHOLE:
        found = found.reshape(-1, 1)
    elif not found.size:
        return None
    else:
        found = found.reshape(len(found), -1)
        numbers = [column.number for column in columns]
        if max(numbers) >= found.shape[1]:
            return None
        if numbers != list(range(found.shape[1])):
            found = found[:, numbers]
    offsets = np.array([column.offset for column in columns], np.int64)
    return found + offsets if offsets.any() else found


def matches(leaves: Leaves, ids: Ids) -> Matches:
    """Return the columns of a batch from which ids may have been made."""
    flat = ids.reshape(-1)
    found: Matches = {}
    whole = frozenset(
        Column(name, WHOLE, int(flat[0]) - int(leaf.flat[0]))
        for name, leaf in leaves.items()
        if leaf.size == flat.size and not np.ptp(leaf.reshape(-1).astype(np.int64) - flat)
    )
    if whole:
        found[IdLayout(0)] = [whole]
    for num_rows in sorted({len(leaf) for leaf in leaves.values()}, reverse=True):
        if num_rows < MIN_ROWS or flat.size % num_rows or flat.size // num_rows > MAX_COLUMNS:
            continue
        known = _by_differences({name: leaf for name, leaf in leaves.items() if len(leaf) == num_rows})
        num_columns = flat.size // num_rows
        for is_by_column in (False, True) if num_columns > 1 else (False,):
            by_row = flat.reshape(num_columns, num_rows).T if is_by_column else flat.reshape(num_rows, num_columns)
            columns = [_alike(by_row[:, number], known) for number in range(num_columns)]
            if all(columns):
                found.setdefault(IdLayout(num_columns, is_by_column), columns)
    return found


def _by_differences(leaves: Leaves) -> dict[bytes, list[tuple[str, int, int]]]:
    """Return the columns of arrays and their first values, by the differences between their rows: two columns differ by
    a constant exactly if these are equal.
    """
    found: dict[bytes, list[tuple[str, int, int]]] = {}
    for name, leaf in leaves.items():
        by_row = leaf.reshape(len(leaf), -1)
        if by_row.shape[1] <= MAX_COLUMNS:
            for number in range(by_row.shape[1]):
                column = by_row[:, number].astype(np.int64)
                found.setdefault(np.diff(column).tobytes(), []).append((name, number, int(column[0])))
    return found


def _alike(column: Ids, known: Mapping[bytes, list[tuple[str, int, int]]]) -> frozenset[Column]:
    same = known.get(np.diff(column).tobytes(), ())
    return frozenset(Column(name, number, int(column[0]) - first) for name, number, first in same)


class Learner:
    """Learns the recipe of one lookup, and drops it if it keeps missing."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self._possible: Matches | None = None
        self._num_observed = 0
        self._num_misses = 0
        self.is_done = False
        """Whether nothing more is learned: there is a recipe, or there is none to find."""

    def observe(self, leaves: Leaves, ids: Ids) -> None:
        """Compare the actual ids of a batch with its columns."""
        if self.is_done or not ids.size:
            return
        found = matches(leaves, ids)
        before = found if self._possible is None else self._possible
        both = {
            layout: [old & new for old, new in zip(before[layout], columns, strict=True)]
            for layout, columns in found.items()
            if layout in before
        }
        self._possible = {layout: columns for layout, columns in both.items() if all(columns)}
        self._num_observed += 1
        if not self._possible:
            self.is_done = True
        elif self._num_observed == NUM_BATCHES:
            layout, columns = min(self._possible.items())
            self.recipe = Recipe(layout, tuple(min(each) for each in columns))
            self.is_done = True

    def guessed(self, *, is_right: bool) -> None:
        """Record whether the ids of the recipe were the actual ones."""
        self._num_misses = 0 if is_right else self._num_misses + 1
        if self._num_misses == MAX_MISSES:
            self.recipe = None
