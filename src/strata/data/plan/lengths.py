"""Lengths of rows, for batches by bytes or tokens: which columns decide them, and how they are counted.

The lengths of all rows are read once and kept with the survey (`runtime/sampling.py`). They are part of what decides
the order, so every rank has the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
import xxhash
import zstandard

from strata.data.arrow_types import is_list, is_stringlike, physical, plain, recast
from strata.errors import DataError, InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    Lengths = npt.NDArray[np.uint32]

_MAX_LENGTH = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """The length of every row of a plan, in the order of its row groups."""

    columns: tuple[str, ...]
    values: Lengths

    @property
    def digest(self) -> str:
        return str(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.values).data))

    def to_bytes(self) -> bytes:
        return zstandard.ZstdCompressor(level=1).compress(self.values.astype("<u4", copy=False).tobytes())

    @classmethod
    def from_bytes(cls, columns: tuple[str, ...], data: bytes, num_rows: int) -> Self:
        """Decode lengths.

        Raises:
            DataError: The number of lengths is not the number of rows.
        """
        try:
            num_bytes = zstandard.frame_content_size(data)
            if num_bytes != 4 * num_rows:
                raise DataError(f"there are {num_bytes} bytes of lengths for {num_rows} rows; create the loader again")
            unpacked = zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            raise DataError(f"the lengths of rows are damaged: {error}; create the loader again") from error
        return cls(columns, np.frombuffer(unpacked, "<u4").astype(np.uint32, copy=False))


def choose_columns(schema: pa.Schema, unit: str, length_column: str | None) -> tuple[str, ...]:
    """Return the columns that decide the length of a row; `schema` has only delivered columns.

    Raises:
        InvalidArgument: The column is unknown, or none can be chosen without `length_column`.
    """
    known = {field.name: plain(field.type) for field in schema}
    lists = [name for name, kind in known.items() if is_list(kind)]
    texts = [name for name, kind in known.items() if is_stringlike(kind)]
    if length_column is not None:
        if length_column not in list(known):  # a list of names has no hash
            raise InvalidArgument(
                f"length_column={length_column!r} is not delivered; use one of {', '.join(known)}, or add it to "
                "columns=",
                field="length_column",
            )
        kind = known[length_column]
        fits = pat.is_integer(kind) or is_list(kind) or (unit == "bytes" and is_stringlike(kind))
        if not fits:
            raise InvalidArgument(
                f"length_column={length_column!r} is {schema.field(length_column).type}, which has no number of "
                f"{unit}; use a list column, an integer column with the lengths"
                + (", or a string or binary column" if unit == "bytes" else ", or batch_bytes= for text"),
                field="length_column",
            )
        return (length_column,)
    if unit == "bytes" and texts:
        return tuple(texts)
    if len(lists) == 1:
        return (lists[0],)
    found = f"the list columns are {', '.join(lists)}" if lists else "there is no list column"
    raise InvalidArgument(
        f"batch_{unit}= needs to know which column has the length of a row: {found}; pass length_column=, the name of "
        "a list column, or of an integer column with lengths",
        field="length_column",
    )


def count_lengths(table: pa.Table, columns: Sequence[str], unit: str, place: str) -> Lengths:
    """Return the length of each row: the sum over these columns; null has the length 0.

    Raises:
        SchemaMismatch: A length in an integer column is null or negative.
    """
    total = np.zeros(table.num_rows, np.int64)
    for name in columns:
        first = 0
        for array in table[name].chunks:
            total[first : first + len(array)] += _lengths_of(array, name, unit, place)
            first += len(array)
    return np.minimum(total, _MAX_LENGTH).astype(np.uint32)


def _lengths_of(array: pa.Array, name: str, unit: str, place: str) -> npt.NDArray[np.int64]:
    kind = plain(array.type)
    if pat.is_integer(kind):
        return _given(array, kind, name, place)
    if is_list(kind):
        found = pc.list_value_length(array if is_list(array.type) else recast(array, kind))
        width = _item_bytes(kind, name) if unit == "bytes" else 1
    else:
        found, width = pc.binary_length(recast(array, kind)), 1
    lengths: npt.NDArray[np.int64] = pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return width * lengths


def cut_lists(table: pa.Table, columns: Sequence[str], known: Collection[str], limit: int) -> pa.Table:
    """Return the table with the rows of these list columns cut to `limit` values.

    Other list columns than the `known` ones come from a transform. They are cut if all of their rows are as long as
    those of the first column.
    """
    lists = [(place, field) for place, field in enumerate(table.schema) if is_list(field.type)]
    like = _list_lengths(table, columns[0]) if any(field.name == columns[0] for _, field in lists) else None
    for place, field in lists:
        is_made_alike = field.name not in known and like is not None and like.equals(_list_lengths(table, field.name))
        if field.name in columns or is_made_alike:
            table = table.set_column(place, field, pc.list_slice(table[field.name], 0, limit).cast(field.type))
    return table


def _list_lengths(table: pa.Table, column: str) -> pa.Array:
    lengths = pc.list_value_length(table[column].combine_chunks())
    return pc.fill_null(lengths, 0).cast(pa.int64())


def _given(array: pa.Array, kind: pa.DataType, name: str, place: str) -> npt.NDArray[np.int64]:
    """Return the values of an integer column with lengths."""
    plain_array = recast(array, kind)
    lowest = pc.min(plain_array).as_py()
    if plain_array.null_count or (lowest is not None and lowest < 0):
        found = "null" if plain_array.null_count else lowest
        raise SchemaMismatch(
            f"{place}: length_column={name!r} has the value {found}; lengths must be 0 or more. Leave out such rows "
            "with filters="
        )
    values: npt.NDArray[Any] = plain_array.to_numpy(zero_copy_only=False)
    capped: npt.NDArray[np.int64] = np.minimum(values.astype(np.uint64), np.uint64(_MAX_LENGTH)).astype(np.int64)
    return capped


def _item_bytes(kind: pa.DataType, name: str) -> int:
    dtype = physical(plain(kind.value_type))
    if dtype is None:
        raise InvalidArgument(
            f"the values of {name!r} ({kind}) differ in size, so its bytes are unknown; pass length_column=, the name "
            "of an integer column with lengths",
            field="length_column",
        )
    return int(dtype.itemsize)
