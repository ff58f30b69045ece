"""The data files of a Delta table as a format: Parquet, with the columns and without the deleted rows of the table.

A row group has the columns and types of the table's schema, partition columns included, and as many rows as are left of
it. A Parquet row group therefore keeps its index, but not its numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import xxhash

from strata.data.delta.columns import NO_MAPPING, FileColumns
from strata.data.filter import expression
from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.plan.projection import NO_ROWS, TableProjection
from strata.data.plan.schema import keeps_values
from strata.errors import DataFileChanged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from strata.data.filter.expression import Node
    from strata.data.formats.base import UnitRanges
    from strata.data.formats.parquet.format import ParquetReader
    from strata.data.plan.projection import ColumnProjection
    from strata.data.source.source import DataFile, Source


@dataclass(frozen=True, slots=True, eq=False)
class TableFile:
    """What the log states about a data file."""

    constants: Mapping[str, pa.Scalar]
    """The values of the partition columns."""
    deleted: npt.NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    """Deleted rows, counted from the first row of the file: sorted and unique."""


class DeltaFormat:
    """Reads the files of one version of one table."""

    name: ClassVar[str] = "delta"
    unit_name: ClassVar[str] = "row group"
    is_typed: ClassVar[bool] = True

    def __init__(self, schema: pa.Schema, files: Mapping[str, TableFile], mapping: str = NO_MAPPING) -> None:
        """
        Args:
            schema: The columns of the table, with the metadata of the column mapping.
            files: What the log states, by the path of the file.
            mapping: The mode of the column mapping.
        """
        self._schema = schema
        self._files = files
        self._mapping = mapping
        self._parquet = ParquetFormat()

    @cached_property
    def digest(self) -> str:
        """A hash of the schema and of all deleted rows: with others, facts about a file may differ."""
        made = xxhash.xxh3_128(self._schema_digest.encode())
        for path, file in sorted(self._files.items()):
            if len(file.deleted):
                made.update(f"{path!r} {self._file_digest(file)}\n".encode())
        return str(made.hexdigest())

    @cached_property
    def _schema_digest(self) -> str:
        return str(xxhash.xxh3_64_hexdigest(self._schema.serialize().to_pybytes() + self._mapping.encode()))

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,
        with_nulls: bool = True,
    ) -> FileFacts:
        wanted = list(self._schema.names) if columns is None else [name for name in columns if name in self._names]
        own = None if self._needs_schema else self._expected(file, wanted)
        facts = self._parquet.inspect(source, file, columns=own, unit_bytes=unit_bytes, with_nulls=with_nulls)
        projection = self._projection(file, facts.schema)
        if own is None:
            own = projection.file_columns(wanted)
            facts = self._parquet.inspect(source, file, columns=own, unit_bytes=unit_bytes, with_nulls=with_nulls)
        units = self._units_left(projection, facts.units)
        num_rows = sum(unit.num_rows for unit in units)
        nulls: dict[str, int] = {}
        for name in wanted:
            column = projection.columns[name]
            if column.source is None:
                nulls[name] = num_rows if column.constant is None else 0
            elif column.is_plain and column.source in facts.null_counts and not len(projection.deleted):
                nulls[name] = facts.null_counts[column.source]
        schema = pa.schema([_field(each, projection.columns[each.name]) for each in self._schema])
        return FileFacts(schema, units, self._version(file, facts.version), nulls)

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: Node, schema: pa.Schema
    ) -> list[Presence]:
        unsure = [Presence.SOME] * len(facts.units)
        if not facts.units:
            return unsure
        own = self._parquet.inspect(source, file, columns=[], unit_bytes=1, with_nulls=False)
        projection = self._projection(file, own.schema)
        names = expression.columns(condition)
        known = [name for name in names if projection.columns[name].source is None]
        if known:
            one_row = TableProjection(projection.columns).apply(
                pa.table({}), replace(facts.units[0], num_rows=1), known
            )
            left = expression.resolve(condition, one_row)[0]
            if left.node is None:
                return [left.presence] * len(facts.units)
            condition, names = left.node, left.columns
        sources: dict[str, str] = {}
        for name in names:
            column = projection.columns[name]
            # Statistics hold for the table's values only if these equal the file's.
            if column.source is None or not column.is_plain:
                return unsure
            if not keeps_values(own.schema.field(column.source).type, schema.field(name).type):
                return unsure
            sources[name] = column.source
        renamed = pa.schema(sorted((sources[name], schema.field(name).type) for name in names))
        left_units = {unit.index for unit in facts.units}
        own = replace(own, units=tuple(unit for unit in own.units if unit.index in left_units))
        return self._parquet.presence(source, file, own, expression.renamed(condition, sources), renamed)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> DeltaReader:
        own = self._own_version(file, version)
        reader = self._parquet.open(source, file, schema, own)
        try:
            return DeltaReader(reader, self._projection(file, reader.schema))
        except BaseException:
            reader.close()
            raise

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        if self._needs_schema:
            facts = self._parquet.inspect(source, file, columns=[], unit_bytes=1, with_nulls=False)
            own = self._projection(file, facts.schema).file_columns(columns)
        else:
            own = self._expected(file, columns)
        return self._parquet.ranges(source, file, own, self._own_version(file, version))

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._schema.names)

    @property
    def _needs_schema(self) -> bool:
        """Whether the names of a file's columns are known only from the file."""
        return FileColumns.has_ids(self._mapping)

    def _expected(self, file: DataFile, columns: Sequence[str]) -> list[str]:
        constants = self._files[file.path].constants
        names = FileColumns(file.name, self._mapping)
        return [names.physical(self._schema.field(name)) for name in columns if name not in constants]

    def _projection(self, file: DataFile, schema: pa.Schema) -> TableProjection:
        """Return how the rows of a file become those of the table.

        Raises:
            SchemaMismatch: A column of the file does not fit the table's.
        """
        known = self._files[file.path]
        columns = FileColumns(file.name, self._mapping).project(self._schema, schema, known.constants)
        return TableProjection(columns, known.deleted)

    @staticmethod
    def _units_left(projection: TableProjection, units: Sequence[Unit]) -> tuple[Unit, ...]:
        left = []
        first_row = 0
        for unit in units:
            num_rows = projection.num_left(unit)
            if num_rows:
                left.append(replace(unit, num_rows=num_rows, first_row=first_row))
            first_row += num_rows
        return tuple(left)

    def _version(self, file: DataFile, own: str) -> str:
        return f"{own}-{self._file_digest(self._files[file.path])}"

    def _file_digest(self, file: TableFile) -> str:
        """Return a hash of everything but the contents of a file that decides its rows."""
        made = xxhash.xxh3_64(self._schema_digest.encode())
        for name, value in sorted(file.constants.items()):
            made.update(f"{name!r}: {value.type} {value.as_py()!r}\n".encode())
        made.update(file.deleted.astype("<i8").tobytes())
        return str(made.hexdigest())

    def _own_version(self, file: DataFile, version: str) -> str:
        own, _, digest = version.rpartition("-")
        if digest != self._file_digest(self._files[file.path]):
            raise DataFileChanged(
                f"{file.name}: its deleted rows, its partition or the table's schema differ from the planned ones; "
                "create the dataset again",
                path=file.path,
            )
        return own


def _field(field: pa.Field, column: ColumnProjection) -> pa.Field:
    """Return a column of the table as one file has it."""
    is_null = column.source is None and column.constant is None
    return pa.field(field.name, column.conversion.type, nullable=field.nullable or is_null)


class DeltaReader:
    """Reads one data file as rows of the table."""

    def __init__(self, reader: ParquetReader, projection: TableProjection) -> None:
        self._reader = reader
        self._projection = projection
        self._units = {unit.index: unit for unit in reader.units} if len(projection.deleted) else {}
        """The row groups with their deleted rows, if there are any."""
        self.bytes_read = reader.bytes_read

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        whole = self._units.get(unit.index, unit)
        table = self._reader.read(whole, self._projection.file_columns(columns))
        self.bytes_read = self._reader.bytes_read
        return self._projection.apply(table, whole, columns)

    def close(self) -> None:
        self._reader.close()
