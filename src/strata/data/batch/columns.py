"""Columns that batches are made of, and the operations on them: slice, gather, deal.

There are three kinds of columns: `Dense` (an array, one row per entry of its first axis), `Ragged` (rows of variable
length) and `ArrowColumn` (any Arrow array, for output as Arrow or Python objects). A `Chunk` holds rows of all columns.

Most columns of a chunk are `Packed` into one Arrow batch until they are delivered, so that one native call slices or
gathers all of them. Column by column, a worker would release and reacquire the interpreter lock twice for every column
of a block, and wait each time for the training loop to release it. Beside a loop that is busy in Python it would hardly
make progress.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.data.arrow_types import enlarged, of_numbers, recast
from strata.data.memory import pool
from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Index = npt.NDArray[np.integer[Any]]
    """Row numbers."""

SCRATCH_BYTES: Final = 16 << 20
"""Scratch memory that a thread keeps for the next gather. A larger gather allocates its own."""
_POOLED_BYTES: Final = 64 << 10
_STAND_IN = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}
"""Arrow types by the size of a number in bytes. Arrow only moves numbers, so a packed number of n bytes has the type
of an unsigned integer of n bytes.
"""


class Column(Protocol):
    """Rows of one column. Immutable, so that slices may share memory."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def slice(self, first: int, last: int) -> Self:
        """Return rows from `first` up to, not including, `last`, without a copy."""
        ...

    @classmethod
    def gather(cls, pieces: Sequence[Self], index: Index | None) -> Self:
        """Return the rows of the concatenated pieces that `index` names; all, in order, if it is None.

        Several threads may call it. The caller has checked that every entry of the index is a row.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Rows of one size: an array with rows along its first axis."""

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
    def gather(cls, pieces: Sequence[Dense], index: Index | None) -> Dense:
        arrays = [piece.values for piece in pieces]
        if index is None:
            return pieces[0] if len(pieces) == 1 else Dense(_concat(arrays))
        return Dense(_take(arrays, index))


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of variable length: the concatenated values, and the offset of each row."""

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
    def gather(cls, pieces: Sequence[Ragged], index: Index | None) -> Ragged:
        if index is None and len(pieces) == 1:
            return pieces[0]
        lengths = np.concatenate([piece.lengths for piece in pieces])
        rows = [piece.rows for piece in pieces]
        if index is None:
            return Ragged.of(_concat(rows), lengths)
        starts = np.cumsum(lengths) - lengths
        taken = lengths[index]
        fresh = Ragged.of(rows[0][:0], taken)
        # Value k of the result is in row r and comes from starts[index[r]] + (k - where row r begins).
        origin = np.repeat(starts[index] - fresh.offsets[:-1], taken)
        origin += np.arange(len(origin))
        return Ragged(_take(rows, origin), fresh.offsets)


@dataclass(frozen=True, slots=True, eq=False)
class ArrowColumn:
    """An Arrow array, kept as it is until a batch is delivered."""

    array: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def __len__(self) -> int:
        return len(self.array)

    def slice(self, first: int, last: int) -> ArrowColumn:
        return ArrowColumn(self.array.slice(first, last - first))

    @classmethod
    def gather(cls, pieces: Sequence[ArrowColumn], index: Index | None) -> ArrowColumn:
        array = join_arrays([piece.array for piece in pieces])
        if index is None:
            return ArrowColumn(array)
        return ArrowColumn(array.take(of_numbers(index.astype(np.int64, copy=False), pa.int64())))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Several columns in one Arrow batch."""

    batch: pa.RecordBatch
    dtypes: tuple[np.dtype[Any] | None, ...]
    """The dtype of each column's numbers; None for a column that is an Arrow array."""

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def slice(self, first: int, last: int) -> Packed:
        return Packed(self.batch.slice(first, last - first), self.dtypes)

    @classmethod
    def gather(cls, pieces: Sequence[Packed], index: Index | None) -> Packed:
        """Return the rows of the concatenated pieces that `index` names; all, in order, if it is None.

        Raises:
            LimitExceeded: Together the pieces exceed what the type of a column can address.
        """
        batches = [piece.batch for piece in pieces]
        if all(batch.schema == batches[0].schema for batch in batches):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowCapacityError):
                if (made := _gather_batch(batches, index)) is not None:
                    return cls(made, pieces[0].dtypes)
        try:
            made = _gather_batch([_enlarge(batch) for batch in batches], index)
        except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
            raise _too_large(batches, str(error)) from error
        if made is None:
            raise _too_large(batches, "a column exceeds what its type can address")
        return cls(made, pieces[0].dtypes)

    def deal(self, indices: Sequence[Index]) -> list[Packed]:
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
            name: ArrowColumn(array) if dtype is None else Dense(_as_numbers(array, dtype))
            for name, array, dtype in zip(self.batch.schema.names, self.batch.columns, self.dtypes, strict=True)
        }


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
        packed, others = _pack(self.columns)
        return self if packed is None else Chunk(others, self.num_rows, packed, tuple(self.columns))

    def unpack(self) -> Chunk:
        """Return the same rows, column by column."""
        if self.packed is None:
            return self
        columns = self.packed.columns() | dict(self.columns)
        return Chunk({name: columns[name] for name in self.names}, self.num_rows)


def gather(pieces: Sequence[Chunk], index: Index | None) -> Chunk:
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


def deal(chunk: Chunk, indices: Sequence[Index]) -> list[Chunk]:
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


def join_arrays(arrays: Sequence[pa.Array]) -> pa.Array:
    """Concatenate arrays. Strings and lists of more than 2 GiB become large ones.

    Raises:
        LimitExceeded: Together they exceed what their type can address.
    """
    if len(arrays) == 1:
        return arrays[0]
    wide = enlarged(arrays[0].type)
    try:
        if all(array.type == arrays[0].type for array in arrays):
            return pa.concat_arrays(arrays)
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
        if wide == arrays[0].type:
            raise LimitExceeded(
                f"{sum(map(len, arrays)):,} rows of a {arrays[0].type} column do not fit into one array: {error}; "
                "lower shuffle_buffer_size or batch_size"
            ) from error
    return pa.concat_arrays([recast(array, wide) for array in arrays])


def _concat(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate the arrays."""
    return np.concatenate(arrays, out=_allocate(sum(map(len, arrays)), arrays[0]))


def _take(arrays: Sequence[npt.NDArray[Any]], index: Index) -> npt.NDArray[Any]:
    """Return the rows of the concatenated arrays that `index` names.

    The arrays are slices of several row groups, and reading them at random would miss the cache most of the time. They
    are therefore copied into a small scratch buffer first, which stays in the cache from column to column.
    """
    first = arrays[0]
    fresh = _allocate(len(index), first)
    if not len(index):
        return fresh
    source = first
    if len(arrays) > 1:
        source = _scratch(sum(map(len, arrays)), first)
        np.concatenate(arrays, out=source)
    # In any other mode, numpy writes into a temporary buffer first.
    return np.take(source, index, axis=0, out=fresh, mode="clip")


_thread_memory = threading.local()


def _scratch(num_rows: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return memory for this many rows, which the thread reuses in its next gather."""
    num_bytes = num_rows * _row_bytes(like)
    if num_bytes > SCRATCH_BYTES:
        return _allocate(num_rows, like)
    buffer: npt.NDArray[np.uint8] | None = getattr(_thread_memory, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = _thread_memory.buffer = np.empty(max(num_bytes, SCRATCH_BYTES // 16), np.uint8)
    return buffer[:num_bytes].view(like.dtype).reshape(num_rows, *like.shape[1:])


def _allocate(num_rows: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
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


def _gather_batch(batches: Sequence[pa.RecordBatch], index: Index | None) -> pa.RecordBatch | None:
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


def _as_arrow(index: Index, num_rows: int) -> pa.Array:
    """Return the index as an Arrow array, 32 bits wide if possible so that more of it fits the cache.

    The caller has checked that every entry is a row.
    """
    if num_rows < 1 << 32:
        return of_numbers(index.astype(np.uint32, copy=False), pa.uint32())
    return of_numbers(index.astype(np.int64, copy=False), pa.int64())


def _enlarge(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [recast(array, enlarged(array.type)) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _too_large(batches: Sequence[pa.RecordBatch], reason: str) -> LimitExceeded:
    return LimitExceeded(
        f"{sum(batch.num_rows for batch in batches):,} rows of a column do not fit into one array: {reason}; lower "
        "shuffle_buffer_size or batch_size"
    )


def _pack(columns: Mapping[str, Column]) -> tuple[Packed | None, dict[str, Column]]:
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


def _as_numbers(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        return np.empty(0, dtype)
    first = array.offset * dtype.itemsize
    return np.frombuffer(buffer, dtype, count=len(array), offset=first)
