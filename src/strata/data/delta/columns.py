"""Match the columns of a data file to those of a Delta table.

Without column mapping, columns have the same name in both. With it, the table's schema states for each column and each
member of a struct the name in files (mode `name`) or the field id there (mode `id`). A column that a file lacks is
null: it was added later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from strata.data.plan.projection import (
    Cast,
    ColumnProjection,
    ListConversion,
    MapConversion,
    MemberConversion,
    StructConversion,
    can_read,
    simplest,
)
from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.data.plan.projection import Conversion

NO_MAPPING, BY_NAME, BY_ID = "none", "name", "id"
MODES = (NO_MAPPING, BY_NAME, BY_ID)
"""The values of the table's property `delta.columnMapping.mode`."""
_PHYSICAL_NAME, _ID = b"delta.columnMapping.physicalName", b"delta.columnMapping.id"
_FILE_ID = b"PARQUET:field_id"
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Matches the columns of one file."""

    file_name: str
    mapping: str
    """The mode of the column mapping."""

    @staticmethod
    def has_ids(mapping: str) -> bool:
        """Return whether columns are matched by field id, so that their names in a file are arbitrary."""
        return mapping == BY_ID

    def physical(self, field: pa.Field) -> str:
        """Return the name in files of a column of the table; in mode `id`, files may have another."""
        if self.mapping == NO_MAPPING:
            return str(field.name)
        return str((field.metadata or {}).get(_PHYSICAL_NAME, field.name.encode()).decode())

    def project(
        self, table: pa.Schema, file: pa.Schema, constants: Mapping[str, pa.Scalar]
    ) -> dict[str, ColumnProjection]:
        """Return how to read each column of the table from the file. `constants` are the partition columns.

        Raises:
            SchemaMismatch: A column of the file has an incompatible type.
        """
        found = self._by_key(file)
        columns: dict[str, ColumnProjection] = {}
        for field in table:
            own = found.get(self._key_of(field))
            if field.name in constants:
                value = constants[field.name]
                columns[field.name] = ColumnProjection(Cast(value.type), None, value if value.is_valid else None)
            elif own is None:
                columns[field.name] = ColumnProjection(Cast(self._plain(field.type)))
            else:
                columns[field.name] = ColumnProjection(self._column(field, own[1].type), own[1].name)
        return columns

    def _column(self, field: pa.Field, found: pa.DataType) -> Conversion:
        if _LARGE.get(field.type) == found:  # keeps the offsets of files with large strings
            return Cast(found)
        return self._conversion(field.type, found, field.name)

    def _conversion(self, wanted: pa.DataType, found: pa.DataType, where: str) -> Conversion:
        if pa.types.is_struct(wanted) and pa.types.is_struct(found):
            return self._struct(wanted, found, where)
        if _is_list(wanted) and _is_list(found):
            element = self._conversion(wanted.value_type, found.value_type, f"{where}.element")
            return simplest(ListConversion(pa.list_(pa.field("element", element.type)), element), found)
        if pa.types.is_map(wanted) and pa.types.is_map(found):
            key = self._conversion(wanted.key_type, found.key_type, f"{where}.key")
            value = self._conversion(wanted.item_type, found.item_type, f"{where}.value")
            return simplest(MapConversion(pa.map_(key.type, value.type), key, value), found)
        if not pa.types.is_nested(wanted) and not pa.types.is_nested(found) and can_read(found, wanted):
            return Cast(wanted)
        raise SchemaMismatch(
            f"{self.file_name}: column {where} is {found}, which cannot be read as the table's {wanted}; rewrite the "
            "file, or exclude the column with columns="
        )

    def _struct(self, wanted: pa.StructType, found: pa.StructType, where: str) -> Conversion:
        own = self._by_key(found.field(index) for index in range(found.num_fields))
        members = []
        for index in range(wanted.num_fields):
            field = wanted.field(index)
            member = own.get(self._key_of(field))
            if member is None:
                members.append(MemberConversion(field.name, None, Cast(self._plain(field.type))))
            else:
                conversion = self._conversion(field.type, member[1].type, f"{where}.{field.name}")
                members.append(MemberConversion(field.name, member[0], conversion))
        kind = pa.struct([(member.name, member.conversion.type) for member in members])
        return simplest(StructConversion(kind, tuple(members)), found)

    def _by_key(self, fields: Iterable[pa.Field]) -> dict[str | None, tuple[int, pa.Field]]:
        """Return the fields of a file and their indexes, by name or by id."""
        made: dict[str | None, tuple[int, pa.Field]] = {}
        for index, field in enumerate(fields):
            number = (field.metadata or {}).get(_FILE_ID)
            key = field.name if self.mapping != BY_ID else None if number is None else number.decode()
            if key is not None:
                made[key] = (index, field)
        return made

    def _key_of(self, field: pa.Field) -> str | None:
        """Return the name or the id that a column of the table has in files."""
        if self.mapping != BY_ID:
            return self.physical(field)
        number = (field.metadata or {}).get(_ID)
        return None if number is None else number.decode()

    def _plain(self, kind: pa.DataType) -> pa.DataType:
        """Return the type as `_conversion` of a file that has the column would."""
        if pa.types.is_struct(kind):
            return pa.struct([(kind.field(at).name, self._plain(kind.field(at).type)) for at in range(kind.num_fields)])
        if _is_list(kind):
            return pa.list_(pa.field("element", self._plain(kind.value_type)))
        if pa.types.is_map(kind):
            return pa.map_(self._plain(kind.key_type), self._plain(kind.item_type))
        return kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
