"""Columns packed into one Arrow batch, so that one native call slices, concatenates or gathers all of them.

Column by column, a worker would release and reacquire the interpreter lock twice for every column of a block, and wait
each time for the training loop to release it: beside a loop that is busy in Python it would hardly make progress.

Arrow sees a number of n bytes as an unsigned integer of n bytes, because it only moves it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.data.arrow_types import enlarged, of_numbers, recast
from strata.data.batch.arrow_columns import ArrowColumn
from strata.data.batch.dense import Dense
from strata.data.memory import pool
from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from strata.data.batch.columns import Column

_STAND_IN = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}
"""Arrow types by the size of a number in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    batch: pa.RecordBatch
    dtypes: tuple[np.dtype[Any] | None, ...]
    """The dtype of each column's numbers; None for a column that is an Arrow array."""

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def slice(self, first: int, last: int) -> Packed:
        return Packed(self.batch.slice(first, last - first), self.dtypes)

    @classmethod
    def gather(cls, pieces: Sequence[Packed], index: npt.NDArray[np.integer[Any]] | None) -> Packed:
        """Return the rows of the concatenated pieces that `index` names; all, in order, if it is None.

        Raises:
            LimitExceeded: Together the pieces exceed what the type of a column can address.
        """
        batches = [piece.batch for piece in pieces]
        if all(batch.schema == batches[0].schema for batch in batches):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowCapacityError):
                if (made := _gathered(batches, index)) is not None:
                    return cls(made, pieces[0].dtypes)
        try:
            made = _gathered([_enlarged(batch) for batch in batches], index)
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            raise _too_large(batches, str(error)) from error
        if made is None:
            raise _too_large(batches, "a column exceeds what its type can address")
        return cls(made, pieces[0].dtypes)

    def deal(self, indices: Sequence[npt.NDArray[np.integer[Any]]]) -> list[Packed]:
        """Return, for each index, a copy of the rows that it names."""
        table = pa.Table.from_batches([self.batch])
        rows = pa.chunked_array([_as_arrow(index, table.num_rows) for index in indices])
        made = pc.take(table, rows, boundscheck=False, memory_pool=pool()).to_batches()
        if [batch.num_rows for batch in made] == [len(index) for index in indices]:
            return [Packed(batch, self.dtypes) for batch in made]
        return [Packed.gather([self], index) for index in indices]  # Arrow cut a column at other rows

    def columns(self) -> dict[str, Column]:
        """Return the columns by name."""
        return {
            name: ArrowColumn(array) if dtype is None else Dense(_numbers(array, dtype))
            for name, array, dtype in zip(self.batch.schema.names, self.batch.columns, self.dtypes, strict=True)
        }


def _gathered(batches: Sequence[pa.RecordBatch], index: npt.NDArray[np.integer[Any]] | None) -> pa.RecordBatch | None:
    """Return the rows of the concatenated batches that `index` names, or None if they do not fit into one.

    Raises:
        pa.ArrowInvalid, pa.ArrowCapacityError: The same, found by Arrow.
    """
    table = pa.Table.from_batches(batches)
    if index is not None:
        table = pc.take(table, _as_arrow(index, table.num_rows), boundscheck=False, memory_pool=pool())
    if not table.num_rows:  # Arrow returns no batch for a table without rows
        return batches[0].slice(0, 0)
    made = table.combine_chunks(pool()).to_batches()
    return made[0] if len(made) == 1 else None


def _as_arrow(index: npt.NDArray[np.integer[Any]], num_rows: int) -> pa.Array:
    """Return the index as an Arrow array, 32 bits wide if possible so that more of it fits the cache.

    The caller has checked that every entry is a row.
    """
    if num_rows < 1 << 32:
        return of_numbers(index.astype(np.uint32, copy=False), pa.uint32())
    return of_numbers(index.astype(np.int64, copy=False), pa.int64())


def _enlarged(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [recast(array, enlarged(array.type)) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _too_large(batches: Sequence[pa.RecordBatch], reason: str) -> LimitExceeded:
    return LimitExceeded(
        f"{sum(batch.num_rows for batch in batches):,} rows of a column do not fit into one array: {reason}; lower "
        "shuffle_buffer_size or batch_size"
    )


def pack(columns: Mapping[str, Column]) -> tuple[Packed | None, dict[str, Column]]:
    """Return the columns that can be packed, and those that cannot."""
    arrays: dict[str, pa.Array] = {}
    dtypes: list[np.dtype[Any] | None] = []
    others: dict[str, Column] = {}
    for name, column in columns.items():
        if isinstance(column, ArrowColumn):
            arrays[name] = column.array
            dtypes.append(None)
        elif isinstance(column, Dense) and _is_plain(column.values):
            arrays[name] = of_numbers(column.values, _STAND_IN[column.values.itemsize])
            dtypes.append(column.values.dtype)
        else:
            others[name] = column
    if len(arrays) < 2:
        return None, dict(columns)
    return Packed(pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays)), tuple(dtypes)), others


def _is_plain(values: npt.NDArray[Any]) -> bool:
    return values.ndim == 1 and values.flags.c_contiguous and values.itemsize in _STAND_IN


def _numbers(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        return np.empty(0, dtype)
    first = array.offset * dtype.itemsize
    return np.frombuffer(buffer, dtype, count=len(array), offset=first)
