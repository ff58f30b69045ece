"""Into one data file: its format, its units, and which of its columns are the table's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from pyiceberg.transforms import IdentityTransform

from strata.data.iceberg.columns import Resolver
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table
    from pyiceberg.types import NestedField

    from strata.data.filter.filter import Condition
    from strata.data.formats.base import FileFacts, Format, Reader, Unit
    from strata.data.iceberg.location import Locator
    from strata.data.iceberg.projection import FitColumn
    from strata.data.iceberg.scan import ScannedFile
    from strata.data.source.source import DataFile, Source


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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What is the same for all files with the same columns and the same partition: most of a table's are alike."""

    schema: pa.Schema
    resolver: Resolver
    sources: Mapping[str, pa.Field]
    """The file's columns, by the table's names."""
    is_guessed: bool
    """Whether the names that were guessed are the names in the file, and no others."""
    _fits: dict[bool, dict[str, FitColumn]] = field(default_factory=dict)

    def columns(self, fields: tuple[NestedField, ...], *, wide: bool) -> dict[str, FitColumn]:
        """
        Raises:
            SchemaMismatch: The files' columns cannot be read as the table's.
        """
        if wide not in self._fits:
            self._fits[wide] = replace(self.resolver, wide=wide).fit(fields)
        return self._fits[wide]


class Layouts:
    """The layouts of a table's files. Used by several threads: at worst, one is made twice."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._mapping = request.table.name_mapping()
        self._identities = {
            number: [
                (place, part.source_id)
                for place, part in enumerate(spec.fields)
                if isinstance(part.transform, IdentityTransform)
            ]
            for number, spec in request.table.specs().items()
        }
        wanted = {each.field_id for each in request.fields}
        schemas = request.table.schemas().values()
        old = [each.name for schema in schemas for each in schema.fields if each.field_id in wanted]
        self.names = sorted({*old, *(each.name for each in request.fields)})
        """What the columns were ever called: in which of these ways they are in a file is known when it is open."""
        self._known: dict[str, list[Layout]] = defaultdict(list)

    def of(self, file: DataFile, schema: pa.Schema, scanned: IcebergFile) -> Layout:
        """
        Raises:
            SchemaMismatch: Nothing tells which of the file's columns is which.
        """
        partition = {number: scanned.partition[place] for place, number in self._identities[scanned.spec_id]}
        alike = self._known[repr(partition)]
        for layout in alike:
            if layout.schema is schema or layout.schema.equals(schema, check_metadata=True):
                return layout
        resolver = Resolver(file.name, schema, self._mapping, partition)
        sources = resolver.sources(self._request.fields)
        exact = {source.name for source in sources.values()}
        made = Layout(schema, resolver, sources, exact == set(self.names) & set(schema.names))
        alike.append(made)
        return made

    def of_deletes(self, file: DataFile, schema: pa.Schema) -> Resolver:
        """For the rows of a delete file."""
        return Resolver(file.name, schema, self._mapping, {})


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    scanned: ScannedFile
    file: DataFile
    format: Format
    facts: FileFacts
    layout: Layout


def look(request: Request, layouts: Layouts, scanned: ScannedFile, known: FileFacts | None = None) -> Looked:
    """`known`: what was found in the file before.

    Raises:
        DataError: It is of a format that is not read.
        DataFileInvalid, DataFileMissing, StorageError: It cannot be read.
        SchemaMismatch: Nothing tells which of its columns is which.
    """
    file = request.locator.file(scanned.file.file_path, scanned.file.file_size_in_bytes)
    format = _format(request, scanned.file, file)
    facts = known or format.inspect(request.source, file, columns=layouts.names, unit_bytes=1)
    layout = layouts.of(file, facts.schema, scanned.file)
    if known is None and not layout.is_guessed:
        exact = sorted({source.name for source in layout.sources.values()})
        facts = format.inspect(request.source, file, columns=exact, unit_bytes=1)
    return Looked(scanned, file, format, facts, layout)


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
