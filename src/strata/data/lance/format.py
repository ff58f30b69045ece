"""The fragments of a Lance dataset as a format: a row group is a range of the rows that are not deleted.

The ranges are chosen here, so that one has about `unit_bytes` in the columns that are read. Lance stores no statistics
that decide about a filter, so a filter reads its columns of every row.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import xxhash

from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Unit
from strata.data.lance.dataset import attempt
from strata.errors import DataFileChanged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.data.filter.expression import Node
    from strata.data.lance.dataset import Fragment, OpenedDataset
    from strata.data.source.source import DataFile, Source

MAX_UNIT_ROWS = 1 << 16
"""Limit of the rows of a row group: encodings make some columns far smaller in files than in memory."""


class LanceFormat:
    """Reads the fragments of one version of one dataset."""

    name: ClassVar[str] = "lance"
    unit_name: ClassVar[str] = "row range"
    is_typed: ClassVar[bool] = True

    def __init__(self, dataset: OpenedDataset, root: str, fragments: Mapping[str, Fragment]) -> None:
        """
        Args:
            dataset: The version that is read.
            root: The path of the dataset in its file system.
            fragments: The fragments by the path that stands for each.
        """
        self._dataset = dataset
        self._root = root
        self._fragments = fragments

    @cached_property
    def digest(self) -> str:
        """A hash of the schema, the files and the deleted rows: with others, facts about a fragment may differ."""
        made = xxhash.xxh3_128()
        for path in self._fragments:
            made.update(f"{self._version_of(path)}\n".encode())
        return str(made.hexdigest())

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,
        with_nulls: bool = True,  # noqa: ARG002
    ) -> FileFacts:
        dataset, fragment = self._dataset, self._fragments[file.path]
        wanted = [name for name in dataset.schema.names if columns is None or name in columns]

        def measure() -> tuple[int, int]:
            return dataset.num_rows(fragment), dataset.num_bytes(fragment, wanted)

        num_rows, num_bytes = attempt(measure, source=source, root=self._root, fragment=fragment, what=file.name)
        row_bytes = num_bytes / max(1, num_rows)
        size = MAX_UNIT_ROWS if not num_bytes else max(1, min(MAX_UNIT_ROWS, int(unit_bytes / row_bytes)))
        units: list[Unit] = []
        for first in range(0, num_rows, size):
            rows = min(size, num_rows - first)
            units.append(Unit(len(units), rows, first, int(first * row_bytes), int(rows * row_bytes)))
        return FileFacts(dataset.schema, tuple(units), self._version_of(file.path))

    def presence(
        self,
        source: Source,  # noqa: ARG002
        file: DataFile,  # noqa: ARG002
        facts: FileFacts,
        condition: Node,  # noqa: ARG002
        schema: pa.Schema,  # noqa: ARG002
    ) -> list[Presence]:
        """Return SOME for every row group: there are no statistics."""
        return [Presence.SOME] * len(facts.units)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> LanceReader:  # noqa: ARG002
        if version != self._version_of(file.path):
            raise DataFileChanged(
                f"{file.name}: its files, its deleted rows or the dataset's schema differ from the planned ones; "
                "create the dataset again",
                path=file.path,
            )
        return LanceReader(source, file, self._dataset, self._root, self._fragments[file.path])

    def _version_of(self, path: str) -> str:
        return str(xxhash.xxh3_128_hexdigest(f"{self._schema_digest} {self._fragments[path]!r}".encode()))

    @cached_property
    def _schema_digest(self) -> str:
        return str(xxhash.xxh3_64_hexdigest(self._dataset.schema.serialize().to_pybytes()))


class LanceReader:
    """Reads ranges of one fragment's rows."""

    def __init__(self, source: Source, file: DataFile, dataset: OpenedDataset, root: str, fragment: Fragment) -> None:
        self._source = source
        self._file = file
        self._dataset = dataset
        self._root = root
        self._fragment = fragment
        self.bytes_read = 0

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return pa.table({"": pa.nulls(unit.num_rows)}).select([])
        what = f"{self._file.name}: row range {unit.index}, which begins with row {unit.first_row},"
        table, num_bytes = attempt(
            lambda: self._dataset.read(self._fragment, columns, unit.first_row, unit.num_rows),
            source=self._source,
            root=self._root,
            fragment=self._fragment,
            what=what,
        )
        self.bytes_read += num_bytes
        self._source.counter.add(num_bytes)
        if table.num_rows != unit.num_rows:
            raise DataFileChanged(
                f"{what} has {table.num_rows} rows instead of {unit.num_rows}; create the dataset again",
                path=self._file.path,
            )
        return table.select(list(columns)).replace_schema_metadata(None)

    def close(self) -> None:
        """Nothing is open: pylance keeps its own cache of open files."""
