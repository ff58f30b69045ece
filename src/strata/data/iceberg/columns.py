"""Match the columns and types of a file to those of the table: by field id, never by name alone.

A column that was dropped and added again under the same name has a new id, and the values of older files under that
name are not read. Files without ids, from other writers, are read with the table's name mapping, which maps names to
ids. Iceberg's specification calls this "Column Projection".
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg import types as iceberg
from pyiceberg.types import ListType, MapType, StructType

from strata.data.plan.projection import (
    Cast,
    ColumnProjection,
    Conversion,
    ListConversion,
    MapConversion,
    MemberConversion,
    StructConversion,
    can_read,
    simplest,
)
from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyiceberg.table.name_mapping import MappedField, NameMapping
    from pyiceberg.types import IcebergType, NestedField

_ID_KEYS = (b"PARQUET:field_id", b"iceberg.id")


@dataclass(frozen=True, slots=True)
class _Found:
    """A field of the file, with the name mapping of its members."""

    index: int
    field: pa.Field
    inside: Sequence[MappedField] | None


@dataclass(frozen=True, slots=True)
class Resolver:
    """Matches the columns of one file to those of the table."""

    file_name: str
    file_schema: pa.Schema
    mapping: NameMapping | None
    """The table's name mapping, used if the file has no ids."""
    partition: Mapping[int, Any]
    """Constants of all rows of the file by field id, where the table is partitioned by the column itself."""
    wide: bool = False

    def project(self, fields: Iterable[NestedField]) -> dict[str, ColumnProjection]:
        """Return how to read these columns of the table from the file.

        Raises:
            SchemaMismatch: A column of the file has an incompatible type, a required column is missing, or the columns
                cannot be identified.
        """
        found = self._top_level()
        return {field.name: self._column(field, found.get(field.field_id)) for field in fields}

    def sources(self, fields: Iterable[NestedField]) -> dict[str, pa.Field]:
        """Return the file's columns for these columns of the table, by the table's names; missing ones are omitted."""
        found = self._top_level()
        return {field.name: found[field.field_id].field for field in fields if field.field_id in found}

    def _top_level(self) -> dict[int, _Found]:
        if any(_own_id(field) is not None for field in self.file_schema):
            return _by_id(self.file_schema, None)
        if self.mapping is None:
            raise SchemaMismatch(
                f"{self.file_name} has no field ids and the table has no name mapping, so its columns cannot be "
                "identified; set the table's property schema.name-mapping.default, or rewrite the file"
            )
        return _by_id(self.file_schema, self.mapping.root)

    def _column(self, field: NestedField, found: _Found | None) -> ColumnProjection:
        if found is not None:
            return ColumnProjection(
                self._conversion(field.field_type, found.field.type, found.inside, field.name), found.field.name
            )
        kind = self._type(field.field_type, field.name)
        return ColumnProjection(Cast(kind), None, self._constant(field, kind, field.name))

    def _constant(self, field: NestedField, kind: pa.DataType, where: str) -> pa.Scalar | None:
        if field.field_id in self.partition:
            return _scalar(self.partition[field.field_id], kind)
        if field.initial_default is None and field.required:
            raise SchemaMismatch(
                f"{self.file_name} has no column {where} (field id {field.field_id}), which the table requires without "
                "an initial default; exclude it with columns=, or make it optional"
            )
        return _scalar(field.initial_default, kind)

    def _conversion(
        self, wanted: IcebergType, found: pa.DataType, inside: Sequence[MappedField] | None, where: str
    ) -> Conversion:
        kind = self._type(wanted, where)
        if isinstance(wanted, StructType) and pa.types.is_struct(found):
            return self._struct(wanted, kind, found, inside, where)
        if isinstance(wanted, ListType) and (pa.types.is_list(found) or pa.types.is_large_list(found)):
            element = self._conversion(
                wanted.element_type, found.value_type, _mapped(inside, "element"), f"{where}.element"
            )
            return simplest(ListConversion(kind, element), found)
        if isinstance(wanted, MapType) and pa.types.is_map(found):
            key = self._conversion(wanted.key_type, found.key_type, _mapped(inside, "key"), f"{where}.key")
            value = self._conversion(wanted.value_type, found.item_type, _mapped(inside, "value"), f"{where}.value")
            return simplest(MapConversion(kind, key, value), found)
        if wanted.is_primitive and not pa.types.is_nested(found) and can_read(found, kind):
            return Cast(kind)
        raise SchemaMismatch(
            f"{self.file_name}: column {where} is {found}, which cannot be read as the table's {wanted}; "
            "rewrite the file, or exclude the column with columns="
        )

    def _struct(
        self,
        wanted: StructType,
        kind: pa.DataType,
        found: pa.DataType,
        inside: Sequence[MappedField] | None,
        where: str,
    ) -> Conversion:
        by_id = _by_id([found.field(index) for index in range(found.num_fields)], inside)
        members = []
        for field in wanted.fields:
            path = f"{where}.{field.name}"
            member = by_id.get(field.field_id)
            if member is not None:
                conversion = self._conversion(field.field_type, member.field.type, member.inside, path)
                members.append(MemberConversion(field.name, member.index, conversion))
            else:
                missing = self._type(field.field_type, path)
                members.append(MemberConversion(field.name, None, Cast(missing), self._constant(field, missing, path)))
        return simplest(StructConversion(kind, tuple(members)), found)

    def _type(self, wanted: IcebergType, where: str) -> pa.DataType:
        kind = arrow_type(wanted, wide=self.wide)
        if kind is None:
            raise SchemaMismatch(
                f"column {where} has the type {wanted}, which is not supported; exclude it with columns="
            )
        return kind


def _own_id(field: pa.Field) -> int | None:
    metadata = field.metadata or {}
    return next((int(metadata[key]) for key in _ID_KEYS if key in metadata), None)


def _by_id(fields: Iterable[pa.Field], mapping: Sequence[MappedField] | None) -> dict[int, _Found]:
    found: dict[int, _Found] = {}
    by_name = {name: mapped for mapped in mapping or () for name in mapped.names}
    for index, field in enumerate(fields):
        if mapping is None:
            number, inside = _own_id(field), None
        else:
            mapped = by_name.get(field.name)
            number, inside = (mapped.field_id, mapped.fields) if mapped is not None else (None, None)
        if number is not None:
            found[number] = _Found(index, field, inside)
    return found


def _mapped(mapping: Sequence[MappedField] | None, name: str) -> Sequence[MappedField] | None:
    if mapping is None:
        return None
    return next((mapped.fields for mapped in mapping if name in mapped.names), [])


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar | None:
    if value is None:
        return None
    return pa.scalar(value.bytes if isinstance(value, uuid.UUID) else value, type=kind)


# --- types ---

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


def arrow_type(kind: iceberg.IcebergType, *, wide: bool) -> pa.DataType | None:
    """Return the Arrow type for a type of the table; None if there is none.

    With `wide`, strings, binaries and lists have 64-bit offsets. All columns of a plan use one width, whatever the
    files have, so that row groups can be joined.
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
