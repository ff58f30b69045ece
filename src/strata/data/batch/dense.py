"""Columns whose rows have one size: an array with rows along its first axis.

Plain numbers are gathered together (`packed.py`); this is for the others. The rows are in slices of several row groups,
and reading them from there at random would miss the cache all the time. The slices are therefore copied into a small
buffer first, which stays in the cache from column to column, and the rows are taken from it: two calls per column, both
without the interpreter lock.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from strata.data.memory import pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

SCRATCH_BYTES: Final = 16 << 20
"""Scratch memory that a thread keeps for the next gather. A larger gather allocates its own."""
_POOLED_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    values: npt.NDArray[Any]
    """Writable only if the memory is not shared (see `output.py`)."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, first: int, last: int) -> Dense:
        return Dense(self.values[first:last])

    @classmethod
    def gather(cls, pieces: Sequence[Dense], index: npt.NDArray[np.integer[Any]] | None) -> Dense:
        arrays = [piece.values for piece in pieces]
        if index is None:
            return pieces[0] if len(pieces) == 1 else Dense(join(arrays))
        return Dense(take(arrays, index))


def join(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate the arrays."""
    return np.concatenate(arrays, out=_fresh(sum(map(len, arrays)), arrays[0]))


def take(arrays: Sequence[npt.NDArray[Any]], index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
    """Return the rows of the concatenated arrays that `index` names."""
    first = arrays[0]
    fresh = _fresh(len(index), first)
    if not len(index):
        return fresh
    source = first
    if len(arrays) > 1:
        source = _scratch(sum(map(len, arrays)), first)
        np.concatenate(arrays, out=source)
    # In any other mode, numpy writes into a temporary buffer first.
    return np.take(source, index, axis=0, out=fresh, mode="clip")


_kept = threading.local()


def _scratch(num_rows: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return memory for this many rows, which the thread reuses in its next gather."""
    num_bytes = num_rows * _row_bytes(like)
    if num_bytes > SCRATCH_BYTES:
        return _fresh(num_rows, like)
    buffer: npt.NDArray[np.uint8] | None = getattr(_kept, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = _kept.buffer = np.empty(max(num_bytes, SCRATCH_BYTES // 16), np.uint8)
    return buffer[:num_bytes].view(like.dtype).reshape(num_rows, *like.shape[1:])


def _fresh(num_rows: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return memory for this many rows from Arrow's pool, which reuses the memory of freed batches.

    The C library returns blocks of this size to the system, and allocating them again, page by page, takes about as
    long as gathering into them.
    """
    shape = (num_rows, *like.shape[1:])
    num_bytes = num_rows * _row_bytes(like)
    if num_bytes < _POOLED_BYTES:
        return np.empty(shape, like.dtype)
    pooled: npt.NDArray[Any] = np.frombuffer(pa.allocate_buffer(num_bytes, pool()), like.dtype)
    return pooled.reshape(shape)


def _row_bytes(array: npt.NDArray[Any]) -> int:
    return array.dtype.itemsize * math.prod(array.shape[1:])
