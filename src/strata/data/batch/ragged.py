"""Columns whose rows have variable length: the concatenated values, and the offset of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.data.batch.dense import join, take

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    values: npt.NDArray[Any]
    """May have more values than these rows: a slice shares the array."""
    offsets: npt.NDArray[np.int64]
    """Row i is `values[offsets[i]:offsets[i + 1]]`; one entry more than rows, and the first may not be 0."""

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.offsets.nbytes

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The values of only these rows."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slice(self, first: int, last: int) -> Ragged:
        return Ragged(self.values, self.offsets[first : last + 1])

    @classmethod
    def of(cls, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Ragged:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @classmethod
    def gather(cls, pieces: Sequence[Ragged], index: npt.NDArray[np.integer[Any]] | None) -> Ragged:
        if index is None and len(pieces) == 1:
            return pieces[0]
        lengths = np.concatenate([piece.lengths for piece in pieces])
        rows = [piece.rows for piece in pieces]
        if index is None:
            return Ragged.of(join(rows), lengths)
        starts = np.cumsum(lengths) - lengths
        taken = lengths[index]
        fresh = Ragged.of(rows[0][:0], taken)
        # Value k of the result is in row r and comes from starts[index[r]] + (k - where row r begins).
        origin = np.repeat(starts[index] - fresh.offsets[:-1], taken)
        origin += np.arange(len(origin))
        return Ragged(take(rows, origin), fresh.offsets)
