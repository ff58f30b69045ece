"""A format whose files are tables in memory, so that surveys and plans are tested without a disk."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import xxhash

from strata.data.filter import expression
from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Unit
from strata.data.source.partitions import hive_partition
from strata.data.source.source import DataFile, Source
from strata.errors import DataFileInvalid

SOURCE = Source(pafs.LocalFileSystem(), is_local=True)


@dataclass
class FakeFormat:
    """A format whose row groups have a fixed number of rows. A file of None is unreadable."""

    tables: dict[str, pa.Table | None] = field(default_factory=dict, repr=False)
    unit_rows: int = 4
    is_typed: bool = True
    bad_units: set[tuple[str, int]] = field(default_factory=set, repr=False)
    name: str = "fake"
    unit_name: str = "chunk"

    def __post_init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """(call, file) → number of calls."""
        self._lock = threading.Lock()

    def add(
        self, name: str, table: pa.Table | dict[str, Any] | None, *, root: str = "/data", mtime_ns: int = 1
    ) -> DataFile:
        made = pa.table(table) if isinstance(table, dict) else table
        path = f"{root}/{name}"
        self.tables[path] = made
        return DataFile(path, name, 100 if made is None else made.nbytes + 1, mtime_ns, hive_partition(name))

    def inspect(
        self, source: Source, file: DataFile, *, columns: Any, unit_bytes: int, with_nulls: bool = True
    ) -> FileFacts:
        self._note("inspect", file)
        table = self.tables[file.path]
        if table is None:
            raise DataFileInvalid(f"{file.name} is damaged")
        wanted = [name for name in table.column_names if columns is None or name in columns]
        units = []
        for index, first in enumerate(range(0, table.num_rows, self.unit_rows)):
            part = table.slice(first, self.unit_rows)
            units.append(Unit(index, part.num_rows, first, 8 * first, part.select(wanted).nbytes))
        nulls = {name: table[name].null_count for name in wanted} if with_nulls else {}
        return FileFacts(table.schema, tuple(units), version_of(table), nulls)

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: expression.Node, schema: pa.Schema
    ) -> list[Presence]:
        """Exact where a unit has one row: as good as statistics can be."""
        self._note("presence", file)
        assert set(schema.names) <= set(facts.schema.names), "only columns of the file may be asked for"
        found = []
        for unit in facts.units:
            part = self._part(file, unit)
            passing = part.filter(expression.encode(condition)).num_rows
            clear = part.num_rows == 1
            found.append(Presence.SOME if not clear else Presence.ALL if passing else Presence.NONE)
        return found

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> FakeReader:
        self._note("open", file)
        return FakeReader(self, file, schema)

    def _part(self, file: DataFile, unit: Unit) -> pa.Table:
        table = self.tables[file.path]
        assert table is not None
        return table.slice(unit.first_row, unit.num_rows)

    def _note(self, what: str, file: DataFile) -> None:
        with self._lock:
            self.calls[what, file.name] += 1


class FakeReader:
    bytes_read = 0

    def __init__(self, fake: FakeFormat, file: DataFile, schema: pa.Schema) -> None:
        self._format, self._file, self._schema = fake, file, schema

    def read(self, unit: Unit, columns: Any) -> pa.Table:
        if (self._file.name, unit.index) in self._format.bad_units:
            raise DataFileInvalid(f"{self._file.name}, chunk {unit.index}: damaged")
        part = self._format._part(self._file, unit).select(list(columns))
        return part if self._format.is_typed else part.cast(pa.schema([self._schema.field(name) for name in columns]))

    def close(self) -> None: ...


def version_of(table: pa.Table) -> str:
    return str(xxhash.xxh3_128_hexdigest(repr((table.schema, table.to_pydict())).encode()))
