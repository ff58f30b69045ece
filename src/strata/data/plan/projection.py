"""From the columns of one file to those of the dataset: types widened, missing columns and partition values added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from strata.data.arrow_types import recast
from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.data.formats.base import Unit


@dataclass(frozen=True, slots=True, eq=False)
class PlainFit:
    """For files whose columns are called as in the dataset, and of which no row is deleted."""

    file_schema: pa.Schema
    schema: pa.Schema
    """Of the dataset."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Partition columns and their values. They win over columns of the file that are called the same."""
    name: str = ""
    """Of the file, for messages."""

    def file_columns(self, columns: Sequence[str]) -> list[str]:
        there = set(self.file_schema.names)
        return [column for column in columns if column in there and column not in self.constants]

    def apply(self, table: pa.Table, unit: Unit, columns: Sequence[str]) -> pa.Table:
        """Where nothing is to be done, the table itself.

        Raises:
            SchemaMismatch: A value does not fit into the dataset's type.
        """
        kinds = [self.schema.field(column).type for column in columns]
        if table.column_names == list(columns) and table.schema.types == kinds:
            return table
        if not columns:
            return table.select([])
        there = set(self.file_columns(columns))
        arrays = [
            self._cast(table.column(column), kind, column, unit) if column in there
            # What is constant, or not in the file at all, needs no more than its number of rows.
            else self._constant(column, kind, table.num_rows)
            for column, kind in zip(columns, kinds, strict=True)
        ]  # fmt: skip
        return pa.Table.from_arrays(arrays, names=list(columns))

    def _constant(self, column: str, kind: pa.DataType, num_rows: int) -> pa.Array:
        value = self.constants.get(column)
        return pa.nulls(num_rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), num_rows)

    def _cast(self, values: pa.ChunkedArray, kind: pa.DataType, column: str, unit: Unit) -> pa.ChunkedArray:
        if values.type == kind:
            return values
        try:
            return pa.chunked_array([recast(chunk, kind) for chunk in values.chunks], kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise SchemaMismatch(
                f"{self.name}: column {column!r}, {values.type}, rows from {unit.first_row}: does not fit into the "
                f"dataset's {kind}: {error}; say what it shall be (schema=pa.schema([({column!r}, …)])), "
                "or leave it out (columns=…)"
            ) from error
