"""Iceberg's types as Arrow has them, and which types of a file can be read as which of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg import types as iceberg

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIXED: dict[type[iceberg.IcebergType], pa.DataType] = {
    iceberg.BooleanType: pa.bool_(),
    iceberg.IntegerType: pa.int32(),
    iceberg.LongType: pa.int64(),
    iceberg.FloatType: pa.float32(),
    iceberg.DoubleType: pa.float64(),
    iceberg.DateType: pa.date32(),
    iceberg.TimeType: pa.time64("us"),
    iceberg.TimestampType: pa.timestamp("us"),
    iceberg.TimestamptzType: pa.timestamp("us", "UTC"),
    iceberg.TimestampNanoType: pa.timestamp("ns"),
    iceberg.TimestamptzNanoType: pa.timestamp("ns", "UTC"),
    iceberg.UUIDType: pa.binary(16),
    iceberg.UnknownType: pa.null(),
}

_UTC = ("UTC", "+00:00", "Etc/UTC", "Z")


def arrow_type(kind: iceberg.IcebergType, *, wide: bool) -> pa.DataType | None:
    """The Arrow type for a type of the table; None if there is none.

    `wide`: strings, binaries and lists with 64-bit offsets. All columns of a plan have the one or the other, whatever
    the files have, so that units can be joined.
    """
    if isinstance(kind, iceberg.StringType):
        return pa.large_string() if wide else pa.string()
    if isinstance(kind, iceberg.BinaryType):
        return pa.large_binary() if wide else pa.binary()
    if isinstance(kind, iceberg.FixedType):
        return pa.binary(len(kind))
    if isinstance(kind, iceberg.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, iceberg.StructType | iceberg.ListType | iceberg.MapType):
        return _nested(kind, wide=wide)
    return _FIXED.get(type(kind))


def _nested(kind: iceberg.StructType | iceberg.ListType | iceberg.MapType, *, wide: bool) -> pa.DataType | None:
    if isinstance(kind, iceberg.ListType):
        element = arrow_type(kind.element_type, wide=wide)
        make = pa.large_list if wide else pa.list_
        return None if element is None else make(pa.field("element", element))
    if isinstance(kind, iceberg.MapType):
        key, value = arrow_type(kind.key_type, wide=wide), arrow_type(kind.value_type, wide=wide)
        return None if key is None or value is None else pa.map_(key, value)
    members = [(member.name, arrow_type(member.field_type, wide=wide)) for member in kind.fields]
    return None if any(found is None for _, found in members) else pa.struct(members)


def is_wide(kinds: Iterable[pa.DataType]) -> bool:
    """Whether any of the types has 64-bit offsets, at any depth."""
    return any(_is_wide(kind) for kind in kinds)


def _is_wide(kind: pa.DataType) -> bool:
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind):
        return True
    if pa.types.is_dictionary(kind):
        return _is_wide(kind.value_type)
    return any(_is_wide(kind.field(place).type) for place in range(kind.num_fields))


def can_read(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a file's type can be read as those of a table's: the same kind, and no narrower.

    These are Iceberg's promotions (int to long, float to double, more digits of a decimal), and what writers other than
    Iceberg put into files: small integers, other units of time, dictionaries, strings that are not marked as such.
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
    """A file that has another zone than UTC tells local times: those are not what a table without a zone has."""
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
