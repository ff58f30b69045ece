"""Columns that batches are made of, and the operations on them: slice, concatenate, gather, deal.

There are three kinds: `Dense` (an array, one row per entry of its first axis), `Ragged` (rows of variable length) and
`ArrowColumn` (any Arrow array). All columns of a chunk have the same number of rows; most of them are *packed* into one
Arrow batch (`packed.py`) until they are delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from strata.data.batch.packed import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt


class Column(Protocol):
    """Rows of one column. Immutable, so that slices may share memory."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def slice(self, first: int, last: int) -> Self:
        """Return rows from `first` up to, not including, `last`, without a copy."""
        ...

    @classmethod
    def gather(cls, pieces: Sequence[Self], index: npt.NDArray[np.integer[Any]] | None) -> Self:
        """Return the rows of the concatenated pieces that `index` names; all, in order, if it is None.

        Several threads may call it. The caller has checked that every entry of the index is a row.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of all columns."""

    columns: Mapping[str, Column]
    num_rows: int
    packed: Packed | None = None
    """Further columns, packed into one Arrow batch."""
    names: tuple[str, ...] = ()
    """The order of all columns, if some are packed."""

    @property
    def nbytes(self) -> int:
        packed = 0 if self.packed is None else self.packed.nbytes
        return packed + sum(column.nbytes for column in self.columns.values())

    def slice(self, first: int, last: int) -> Chunk:
        if first == 0 and last == self.num_rows:
            return self
        return Chunk(
            {name: column.slice(first, last) for name, column in self.columns.items()},
            last - first,
            None if self.packed is None else self.packed.slice(first, last),
            self.names,
        )

    def pack(self) -> Chunk:
        """Return the same rows packed, which are faster to slice and gather."""
        packed, others = pack(self.columns)
        return self if packed is None else Chunk(others, self.num_rows, packed, tuple(self.columns))

    def unpack(self) -> Chunk:
        """Return the same rows, column by column."""
        if self.packed is None:
            return self
        columns = self.packed.columns() | dict(self.columns)
        return Chunk({name: columns[name] for name in self.names}, self.num_rows)


def gather(pieces: Sequence[Chunk], index: npt.NDArray[np.integer[Any]] | None) -> Chunk:
    """Return the rows of the concatenated pieces that `index` names; all, in order, if it is None."""
    if index is None and len(pieces) == 1:
        return pieces[0]
    total = sum(piece.num_rows for piece in pieces)
    # Checked once for all columns: they gather without bounds checks, and would deliver a wrong row.
    assert index is None or not len(index) or (index.min() >= 0 and index.max() < total), "no such row"
    columns: dict[str, Column] = {}
    for name, column in pieces[0].columns.items():
        columns[name] = type(column).gather([piece.columns[name] for piece in pieces], index)
    packed = [piece.packed for piece in pieces if piece.packed is not None]
    gathered = Packed.gather(packed, index) if packed else None
    return Chunk(columns, total if index is None else len(index), gathered, pieces[0].names)


def deal(chunk: Chunk, indices: Sequence[npt.NDArray[np.integer[Any]]]) -> list[Chunk]:
    """Return, for each index, a copy of the rows that it names. Each copy is freed on its own; no index may be empty.

    One native call gathers all packed columns, column by column, so that a column stays in the cache for all indices.
    Calling `gather` for each index would read the whole chunk every time.
    """
    for index in indices:
        assert len(index), "an index is empty"
        assert index.min() >= 0, "no such row"
        assert index.max() < chunk.num_rows, "no such row"
    packed = [None] * len(indices) if chunk.packed is None else chunk.packed.deal(indices)
    return [
        Chunk(
            {name: type(column).gather([column], index) for name, column in chunk.columns.items()},
            len(index),
            dealt,
            chunk.names,
        )
        for index, dealt in zip(indices, packed, strict=True)
    ]
