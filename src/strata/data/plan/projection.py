"""Turn the rows of one data file of a table format (Iceberg, Delta Lake) into rows of the table.

A file keeps the names and types it was written with, while the table's schema evolves. Planning matches the columns of
both by the table's rules. This module applies the result with pyarrow alone, so that decode processes do not import the
library of the table: cast columns, rebuild structs whose members changed, add missing columns, and drop deleted rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
class TableProjection:
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


# --- types ---

_UTC = ("UTC", "+00:00", "Etc/UTC", "Z")


def simplest(conversion: StructConversion | ListConversion | MapConversion, found: pa.DataType) -> Conversion:
    """Return a plain cast if every part stays unchanged and in place."""
    return Cast(conversion.type) if conversion.type.equals(found) and _keeps(conversion) else conversion


def _keeps(conversion: Conversion) -> bool:
    if isinstance(conversion, StructConversion):
        return all(
            member.source == index and _keeps(member.conversion) for index, member in enumerate(conversion.members)
        )
    if isinstance(conversion, ListConversion):
        return _keeps(conversion.element)
    if isinstance(conversion, MapConversion):
        return _keeps(conversion.key) and _keeps(conversion.value)
    return True


def can_read(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of a file's type can be read as a table's type: of the same kind, and no narrower.

    This covers the promotions of tables (int to long, float to double, more digits of a decimal) and the types of other
    writers: small integers, other units of time, dictionaries, strings that are not annotated as such.
    """
    if isinstance(found, pa.BaseExtensionType):
        return can_read(found.storage_type, wanted)
    if pa.types.is_dictionary(found):
        return can_read(found.value_type, wanted)
    if found.equals(wanted) or pa.types.is_null(found):
        return True
    if pa.types.is_integer(wanted):
        return _fits_integer(found, wanted)
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(found) and found.bit_width <= wanted.bit_width)
    if pa.types.is_decimal(wanted):
        return bool(pa.types.is_decimal(found) and found.scale == wanted.scale and found.precision <= wanted.precision)
    if pa.types.is_timestamp(wanted):
        return pa.types.is_date32(found) or _fits_timestamp(found, wanted)
    if pa.types.is_time(wanted):
        return bool(pa.types.is_time(found))
    return _is_text(wanted) and _is_text(found)


def _fits_integer(found: pa.DataType, wanted: pa.DataType) -> bool:
    if not pa.types.is_integer(found):
        return False
    return bool(
        found.bit_width < wanted.bit_width
        if pa.types.is_unsigned_integer(found)
        else found.bit_width <= wanted.bit_width
    )


def _fits_timestamp(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether timestamps match. A file with a zone other than UTC does not fit a table without a zone."""
    return bool(pa.types.is_timestamp(found) and (wanted.tz is not None or found.tz in (None, *_UTC)))


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def is_wide(kinds: Iterable[pa.DataType]) -> bool:
    """Return whether any of the types has 64-bit offsets, at any depth."""
    return any(_is_wide(kind) for kind in kinds)


def _is_wide(kind: pa.DataType) -> bool:
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind):
        return True
    if pa.types.is_dictionary(kind):
        return _is_wide(kind.value_type)
    return any(_is_wide(kind.field(index).type) for index in range(kind.num_fields))
