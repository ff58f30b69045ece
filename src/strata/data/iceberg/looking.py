"""Into one data file: its format, its units, and which of its columns are the table's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyiceberg.transforms import IdentityTransform

from strata.data.iceberg.resolving import Resolver
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import pyarrow as pa
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table
    from pyiceberg.types import NestedField

    from strata.data.files import DataFile
    from strata.data.filters import Condition
    from strata.data.formats.base import FileFacts, Format, Reader, Unit
    from strata.data.iceberg.locating import Locator
    from strata.data.iceberg.scanning import ScannedFile
    from strata.data.source import Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is wanted of a table: the same for all its files."""

    table: Table
    fields: tuple[NestedField, ...]
    """What is delivered, and what the filter needs."""
    condition: Condition | None
    source: Source
    locator: Locator
    formats: Mapping[str, Format]
    skips: bool
    """Leave out files that cannot be read."""

    def known_names(self) -> list[str]:
        """What the columns were ever called: in which of these ways they are in a file is known when it is open."""
        wanted = {each.field_id for each in self.fields}
        schemas = self.table.schemas().values()
        names = [old.name for schema in schemas for old in schema.fields if old.field_id in wanted]
        return sorted({*names, *(each.name for each in self.fields)})

    def resolver(self, file: DataFile, schema: pa.Schema, partition: Mapping[int, Any]) -> Resolver:
        return Resolver(file.name, schema, self.table.name_mapping(), partition)


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    scanned: ScannedFile
    file: DataFile
    format: Format
    facts: FileFacts
    resolver: Resolver
    source_types: tuple[pa.DataType, ...]
    """Of the file's columns that are wanted."""


def look(request: Request, scanned: ScannedFile, known: FileFacts | None = None) -> Looked:
    """`known`: what was found in the file before.

    Raises:
        DataError: It is of a format that is not read.
        DataFileInvalid, DataFileMissing, StorageError: It cannot be read.
        SchemaMismatch: Nothing tells which of its columns is which.
    """
    file = request.locator.file(scanned.file.file_path, scanned.file.file_size_in_bytes)
    format = _format(request, scanned.file, file)
    guess = request.known_names()
    facts = known or format.inspect(request.source, file, columns=guess, unit_bytes=1)
    resolver = request.resolver(file, facts.schema, _partition(request.table, scanned.file))
    sources = resolver.sources(request.fields)
    exact = {found.name for found in sources.values()}
    if known is None and exact != set(guess) & set(facts.schema.names):
        facts = format.inspect(request.source, file, columns=sorted(exact), unit_bytes=1)
    return Looked(scanned, file, format, facts, resolver, tuple(found.type for found in sources.values()))


def _format(request: Request, file: IcebergFile, found: DataFile) -> Format:
    name = file.file_format.name.lower()
    if name not in request.formats:
        raise DataError(
            f"{found.name} is {name}; Iceberg tables are read from {' and '.join(sorted(request.formats))} files. "
            "Rewrite the table's data files (set write.format.default, then Spark: CALL system.rewrite_data_files)"
        )
    if file.key_metadata:
        raise DataError(f"{found.name} is encrypted, which is not read; rewrite the table without encryption")
    return request.formats[name]


def _partition(table: Table, file: IcebergFile) -> dict[int, Any]:
    """What all rows of the file have in columns that the table is partitioned by as they are."""
    return {
        part.source_id: file.partition[place]
        for place, part in enumerate(table.specs()[file.spec_id].fields)
        if isinstance(part.transform, IdentityTransform)
    }


class LazyReader:
    """Opens the file when something is read: most files are planned without that."""

    def __init__(self, looked: Looked, source: Source) -> None:
        self._looked = looked
        self._source = source
        self._reader: Reader | None = None

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if self._reader is None:
            facts = self._looked.facts
            self._reader = self._looked.format.open(self._source, self._looked.file, facts.schema, facts.version)
        return self._reader.read(unit, columns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()
