"""Turn the rows of one data file into rows of the table.

A file keeps the names and types it was written with, while the table's schema evolves. Planning matches columns by
field id (`columns.py`). This module applies the result with pyarrow alone, so that decode processes do not import
pyiceberg: cast columns, rebuild structs whose members changed, add missing columns, and drop deleted rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from strata.data.formats.base import Unit

NO_ROWS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Cast:
    """Keep the values, perhaps in a wider type."""

    type: pa.DataType


@dataclass(frozen=True, slots=True)
class MemberConversion:
    """One member of a struct: its index in the file's struct, or a constant."""

    name: str
    source: int | None
    conversion: Conversion
    constant: pa.Scalar | None = None


@dataclass(frozen=True, slots=True)
class StructConversion:
    type: pa.DataType
    members: tuple[MemberConversion, ...]


@dataclass(frozen=True, slots=True)
class ListConversion:
    type: pa.DataType
    element: Conversion


@dataclass(frozen=True, slots=True)
class MapConversion:
    type: pa.DataType
    key: Conversion
    value: Conversion


Conversion: TypeAlias = "Cast | StructConversion | ListConversion | MapConversion"
"""How an array of the file becomes one of the table; `type` is the resulting type."""


@dataclass(frozen=True, slots=True)
class ColumnProjection:
    """How to read one column of the table from a file."""

    conversion: Conversion
    source: str | None = None
    """The file's column; None if the file lacks it."""
    constant: pa.Scalar | None = None
    """The value of all rows if the file lacks the column; None is null."""

    @property
    def is_plain(self) -> bool:
        """Whether the values in the file are those that are delivered."""
        return self.source is not None and isinstance(self.conversion, Cast)


@dataclass(frozen=True, slots=True, eq=False)
class IcebergProjection:
    """The `Fit` of a data file."""

    columns: Mapping[str, ColumnProjection]
    deleted: npt.NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    """Deleted rows of the file, counted from its first row: sorted and unique."""

    def file_columns(self, columns: Sequence[str]) -> list[str]:
        sources = (self.columns[name].source for name in columns)
        return list(dict.fromkeys(source for source in sources if source is not None))

    def identity(self, columns: Sequence[str]) -> object:
        """Return what decides the result of `apply`, for the keys of the node cache."""
        return [{name: self.columns[name] for name in columns}, self.deleted]

    def num_left(self, unit: Unit) -> int:
        """Return how many rows of the row group are not deleted."""
        return unit.num_rows - len(self._deleted_in(unit))

    def apply(self, table: pa.Table, unit: Unit, columns: Sequence[str]) -> pa.Table:
        deleted = self._deleted_in(unit)
        num_rows = unit.num_rows - len(deleted)
        if len(deleted) and table.num_columns:
            kept = np.ones(unit.num_rows, dtype=np.bool_)
            kept[deleted - unit.first_row] = False
            table = table.filter(pa.array(kept))
        if not columns:
            return pa.table({"rows": pa.nulls(num_rows)}).select([])
        return pa.table([self._column(table, name, num_rows) for name in columns], names=list(columns))

    def _deleted_in(self, unit: Unit) -> npt.NDArray[np.int64]:
        if not len(self.deleted):
            return self.deleted
        first, last = np.searchsorted(self.deleted, [unit.first_row, unit.first_row + unit.num_rows])
        return self.deleted[first:last]

    def _column(self, table: pa.Table, name: str, num_rows: int) -> pa.ChunkedArray | pa.Array:
        column = self.columns[name]
        if column.source is None:
            return _repeat(column.constant, column.conversion.type, num_rows)
        return _convert_chunks(table.column(column.source), column.conversion)


def _repeat(constant: pa.Scalar | None, kind: pa.DataType, num_rows: int) -> pa.Array:
    return pa.nulls(num_rows, kind) if constant is None else pa.repeat(constant, num_rows)


def _convert_chunks(column: pa.ChunkedArray, conversion: Conversion) -> pa.ChunkedArray:
    if isinstance(conversion, Cast):
        return (
            column
            if column.type.equals(conversion.type)
            else pa.chunked_array([_cast(chunk, conversion.type) for chunk in column.chunks], type=conversion.type)
        )
    return pa.chunked_array([convert_array(chunk, conversion) for chunk in column.chunks], type=conversion.type)


def convert_array(array: pa.Array, conversion: Conversion) -> pa.Array:
    """Apply a conversion to an array."""
    if isinstance(conversion, Cast):
        return _cast(array, conversion.type)
    if isinstance(conversion, StructConversion):
        return _convert_struct(array, conversion)
    if isinstance(conversion, ListConversion):
        return _rebuild(array, conversion.type, convert_array(array.values, conversion.element))
    entries = pa.StructArray.from_arrays(
        [convert_array(array.keys, conversion.key), convert_array(array.items, conversion.value)],
        fields=[conversion.type.key_field, conversion.type.item_field],
    )
    return _rebuild(array, conversion.type, entries)


def _convert_struct(array: pa.StructArray, conversion: StructConversion) -> pa.Array:
    members = [
        _repeat(member.constant, member.conversion.type, len(array))
        if member.source is None
        else convert_array(array.field(member.source), member.conversion)
        for member in conversion.members
    ]
    fields = [pa.field(member.name, member.conversion.type) for member in conversion.members]
    return pa.StructArray.from_arrays(members, fields=fields, mask=array.is_null())


def _rebuild(array: pa.Array, kind: pa.DataType, values: pa.Array) -> pa.Array:
    """Return the same lists, or maps, over other values. The offsets are shared, so the array may be a slice."""
    wide = pa.types.is_large_list(array.type)
    if wide != pa.types.is_large_list(kind):
        same_width = pa.large_list(values.type) if wide else pa.list_(values.type)
        return _rebuild(array, same_width, values).cast(kind)
    return pa.Array.from_buffers(
        kind, len(array), array.buffers()[:2], null_count=array.null_count, offset=array.offset, children=[values]
    )


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type.equals(kind):
        return array
    if isinstance(array, pa.ExtensionArray):
        return _cast(array.storage, kind)
    # Tables have microseconds where files may have nanoseconds, which are truncated as everywhere in Iceberg.
    return pc.cast(array, options=pc.CastOptions(target_type=kind, allow_time_truncate=True))
