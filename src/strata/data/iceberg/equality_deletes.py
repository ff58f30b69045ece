"""Deletes by equality: "all rows with id 7", whatever file they are in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata.data.formats.base import Unit
from strata.data.iceberg.deletes import CURE, read_deletes
from strata.data.iceberg.projection import IcebergFit
from strata.errors import DataFileInvalid, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from pyiceberg.manifest import DataFile as DeleteFile
    from pyiceberg.types import NestedField

    from strata.data.iceberg.probe import Layouts, LazyReader, Looked, Request

    Numbers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ValueDeletes:
    """Rows whose values in some columns are those of any of these rows are gone."""

    keys: pa.Table
    """Named as the rows that will be asked about."""

    def matches(self, rows: pa.Table) -> Flags:
        """Which rows are gone. Null is a value like any other here.

        Column by column, a row gets the number that its value has among the keys' values. What was found so far and the
        next number make one number again, so there is no more to compare than the square of the number of keys.
        """
        key_codes = np.zeros(self.keys.num_rows, dtype=np.int64)
        row_codes = np.zeros(rows.num_rows, dtype=np.int64)
        gone = np.full(rows.num_rows, self.keys.num_rows > 0)
        for name in self.keys.column_names:
            values = pc.unique(self.keys[name])
            numbers, _ = _numbers(self.keys[name], values)
            distinct, key_codes = np.unique(key_codes * len(values) + numbers, return_inverse=True)
            numbers, known = _numbers(rows[name], values)
            row_codes, present = _places(row_codes * len(values) + numbers, distinct)
            gone &= known & present
        return gone


def _numbers(column: pa.ChunkedArray, values: pa.Array) -> tuple[Numbers, Flags]:
    found = pc.index_in(column, value_set=values, skip_nulls=False)
    return pc.fill_null(found, 0).to_numpy().astype(np.int64), pc.is_valid(found).to_numpy()


def _places(codes: Numbers, distinct: Numbers) -> tuple[Numbers, Flags]:
    """Where among `distinct`, which are sorted, and whether at all."""
    if not len(distinct):
        return np.zeros_like(codes), np.zeros(len(codes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(distinct, codes), len(distinct) - 1)
    return places.astype(np.int64), distinct[places] == codes


class EqualityDeletes:
    """The deletes by equality of a scan. Read before data files are asked about; then used by several threads."""

    def __init__(self, request: Request, layouts: Layouts, *, wide: bool) -> None:
        self._request = request
        self._layouts = layouts
        self._wide = wide
        self._read: dict[tuple[str, ...], ValueDeletes] = {}
        """By the files that they are in: most data files have the same."""

    def read(self, deletes: Sequence[DeleteFile]) -> None:
        """
        Raises:
            DataFileInvalid, DataFileMissing, StorageError: A delete file cannot be read. None is ever passed over.
            SchemaMismatch: It is about a column that the table never had.
        """
        for ids, group in _by_columns(deletes).items():
            if _paths(group) not in self._read:
                fields = self._fields(ids, group[0].file_path)
                self._read[_paths(group)] = ValueDeletes(
                    pa.concat_tables([self._values(delete, fields) for delete in group])
                )

    def gone(self, looked: Looked, unit: Unit, reader: LazyReader) -> Numbers:
        """Which rows of the file, among those of the unit, are deleted."""
        gone = np.zeros(unit.num_rows, dtype=np.bool_)
        for ids, group in _by_columns(looked.scanned.equality_deletes).items():
            values = self._read[_paths(group)]
            names = values.keys.column_names
            fit = IcebergFit(
                replace(looked.layout.resolver, wide=self._wide).fit(self._fields(ids, group[0].file_path))
            )
            gone |= values.matches(fit.apply(reader.read(unit, fit.file_columns(names)), unit, names))
        return np.flatnonzero(gone).astype(np.int64) + unit.first_row

    def _values(self, delete: DeleteFile, fields: Sequence[NestedField]) -> pa.Table:
        file = self._request.locator.file(delete.file_path, delete.file_size_in_bytes)
        table = read_deletes(delete, file, self._request.source, None)
        resolver = replace(self._layouts.of_deletes(file, table.schema), wide=self._wide)
        names = [each.name for each in fields]
        return IcebergFit(resolver.fit(fields)).apply(table, Unit(0, table.num_rows, 0, 0, 0), names)

    def _fields(self, ids: Iterable[int], where: str) -> list[NestedField]:
        """Also columns that the table no longer has. Called by their ids, as names may have been given twice."""
        table = self._request.table
        schemas = [*table.schemas().values(), table.schema()]
        known = {each.field_id: each for schema in schemas for each in schema.fields}
        for number in ids:
            if number not in known:
                raise SchemaMismatch(
                    f"{where} deletes rows by the column with field id {number}, which is no top-level column of any "
                    "schema of the table; compact the table (Spark: CALL system.rewrite_data_files), which applies it"
                )
        return [known[number].model_copy(update={"name": f"#{number}", "required": False}) for number in ids]


def _paths(deletes: Iterable[DeleteFile]) -> tuple[str, ...]:
    return tuple(delete.file_path for delete in deletes)


def _by_columns(deletes: Iterable[DeleteFile]) -> dict[tuple[int, ...], list[DeleteFile]]:
    """Delete files that compare the same columns, by the ids of these."""
    groups: dict[tuple[int, ...], list[DeleteFile]] = defaultdict(list)
    for delete in deletes:
        ids = tuple(sorted(delete.equality_ids or ()))
        if not ids:
            raise DataFileInvalid(
                f"{delete.file_path} deletes rows by equality but does not say of which columns; {CURE}"
            )
        groups[ids].append(delete)
    return groups
