"""`CountSketch`: how often keys were seen, in fixed memory.

A count-min sketch: a count is never too low. It is too high only if a key shares a cell in every row with others; with
`n` different keys in `m` cells per row, that is a fraction of (1 - exp(-n / m))⁴: 2 % for a million keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.errors import InvalidArgument
from strata.splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys

NUM_ROWS = 4
_NUM_CELLS = 1 << 21
_MOST = np.iinfo(np.uint8).max


class CountSketch:
    """Counts that stop at 255."""

    def __init__(self, num_cells: int = _NUM_CELLS) -> None:
        self._cells = np.zeros((NUM_ROWS, num_cells), np.uint8)
        self._salts = mix(np.arange(1, NUM_ROWS + 1, dtype=np.uint64) * GOLDEN)

    @property
    def num_bytes(self) -> int:
        return self._cells.nbytes

    def add(self, keys: Keys) -> NDArray[np.uint8]:
        """Count each of these keys once; they must differ. Return their counts."""
        least = np.full(len(keys), _MOST, np.uint8)
        for cells, salt in zip(self._cells, self._salts, strict=True):
            at = (mix(keys ^ salt) & np.uint64(len(cells) - 1)).astype(np.int64)
            raised = np.minimum(cells[at], _MOST - 1) + np.uint8(1)
            cells[at] = raised
            np.minimum(least, raised, out=least)
        return least

    @property
    def cells(self) -> NDArray[np.uint8]:
        return self._cells

    def merge(self, cells: NDArray[np.uint8]) -> None:
        """Take over the counts of another sketch.

        A key is counted by the server that owns it, so the larger count of two servers is not too low.

        Raises:
            InvalidArgument: It has another size.
        """
        if cells.shape != self._cells.shape:
            raise InvalidArgument(
                f"a sketch of shape {list(cells.shape)} does not fit one of shape {list(self._cells.shape)}",
                field="cells",
            )
        np.maximum(self._cells, cells, out=self._cells)
