"""Inspect one data file: its row groups, its columns of the table, and how many rows it will deliver."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import xxhash
from pyiceberg.transforms import IdentityTransform

from strata.data.filter import expression
from strata.data.filter import filter as filters
from strata.data.filter.expression import Presence
from strata.data.iceberg.columns import Resolver
from strata.data.plan.probe import UNREADABLE
from strata.data.plan.projection import TableProjection
from strata.data.plan.schema import keeps_values
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table
    from pyiceberg.types import NestedField

    from strata.data.filter.filter import Condition
    from strata.data.formats.base import FileFacts, Format, Reader, Unit
    from strata.data.iceberg.deletes import EqualityDeletes
    from strata.data.iceberg.scan import Locator, ScannedFile
    from strata.data.plan.projection import ColumnProjection
    from strata.data.source.source import DataFile, Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What to read of a table: the same for all its files."""

    table: Table
    fields: tuple[NestedField, ...]
    """The delivered columns, and those of the filter."""
    condition: Condition | None
    source: Source
    locator: Locator
    formats: Mapping[str, Format]
    skips: bool
    """Whether to leave out files that cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """The shared properties of files with equal columns and partitions, as most files of a table are."""

    schema: pa.Schema
    resolver: Resolver
    sources: Mapping[str, pa.Field]
    """The file's columns, by the table's names."""
    is_guessed: bool
    """Whether the guessed column names were exactly those in the file."""
    _fits: dict[bool, dict[str, ColumnProjection]] = field(default_factory=dict)

    def columns(self, fields: tuple[NestedField, ...], *, wide: bool) -> dict[str, ColumnProjection]:
        """Return how to read these columns.

        Raises:
            SchemaMismatch: The files' columns do not fit the table's.
        """
        if wide not in self._fits:
            self._fits[wide] = replace(self.resolver, wide=wide).project(fields)
        return self._fits[wide]


class FileLayouts:
    """The layouts of a table's files. Used by several threads, which at worst create one twice."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._mapping = request.table.name_mapping()
        self._identities = {
            number: [
                (index, part.source_id)
                for index, part in enumerate(spec.fields)
                if isinstance(part.transform, IdentityTransform)
            ]
            for number, spec in request.table.specs().items()
        }
        wanted = {each.field_id for each in request.fields}
        schemas = request.table.schemas().values()
        old = [each.name for schema in schemas for each in schema.fields if each.field_id in wanted]
        self.names = sorted({*old, *(each.name for each in request.fields)})
        """All names that the columns ever had; which of them a file uses is known once it is open."""
        self._known: dict[str, list[FileLayout]] = defaultdict(list)

    def of(self, file: DataFile, schema: pa.Schema, scanned: IcebergFile) -> FileLayout:
        """Return the layout of a file.

        Raises:
            SchemaMismatch: The file's columns cannot be identified.
        """
        partition = {number: scanned.partition[index] for index, number in self._identities[scanned.spec_id]}
        alike = self._known[repr(partition)]
        for layout in alike:
            if layout.schema is schema or layout.schema.equals(schema, check_metadata=True):
                return layout
        resolver = Resolver(file.name, schema, self._mapping, partition)
        sources = resolver.sources(self._request.fields)
        exact = {source.name for source in sources.values()}
        made = FileLayout(schema, resolver, sources, exact == set(self.names) & set(schema.names))
        alike.append(made)
        return made

    def of_deletes(self, file: DataFile, schema: pa.Schema) -> Resolver:
        """Return the resolver for a delete file."""
        return Resolver(file.name, schema, self._mapping, {})


@dataclass(frozen=True, slots=True, eq=False)
class ProbedFile:
    """A data file and its metadata."""

    scanned: ScannedFile
    file: DataFile
    format: Format
    facts: FileFacts
    layout: FileLayout


def probe_file(
    request: Request, layouts: FileLayouts, scanned: ScannedFile, known: FileFacts | None = None
) -> ProbedFile:
    """Read the metadata of a file, unless it is `known` from a cache.

    Raises:
        DataError: The format of the file is not supported.
        DataFileInvalid, DataFileMissing, StorageError: The file cannot be read.
        SchemaMismatch: The file's columns cannot be identified.
    """
    file = request.locator.file(scanned.file.file_path, scanned.file.file_size_in_bytes)
    format = _format(request, scanned.file, file)
    facts = known or format.inspect(request.source, file, columns=layouts.names, unit_bytes=1)
    layout = layouts.of(file, facts.schema, scanned.file)
    if known is None and not layout.is_guessed:
        exact = sorted({source.name for source in layout.sources.values()})
        facts = format.inspect(request.source, file, columns=exact, unit_bytes=1)
    return ProbedFile(scanned, file, format, facts, layout)


def _format(request: Request, file: IcebergFile, found: DataFile) -> Format:
    name = file.file_format.name.lower()
    if name not in request.formats:
        raise DataError(
            f"{found.name} is {name}; only {' and '.join(sorted(request.formats))} files of Iceberg tables are "
            "supported. Rewrite the table's data files (set write.format.default, then Spark: CALL "
            "system.rewrite_data_files)"
        )
    if file.key_metadata:
        raise DataError(f"{found.name} is encrypted, which is not supported; rewrite the table without encryption")
    return request.formats[name]


class LazyReader:
    """Opens the file at the first read: most files are planned without one."""

    def __init__(self, probed: ProbedFile, source: Source) -> None:
        self._looked = probed
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


# --- counting rows ---


@dataclass(frozen=True, slots=True)
class KnownCounts:
    """The counts of an earlier run, valid if the same rows are deleted."""

    deleted_digest: str
    unit_rows: tuple[int, ...]
    num_units_counted: int


@dataclass(frozen=True, slots=True, eq=False)
class CountedFile:
    """A data file, and the rows it will deliver."""

    probed: ProbedFile
    projection: TableProjection
    unit_rows: tuple[int, ...]
    """The number of rows to deliver, per row group."""
    num_units_counted: int = 0
    """The number of row groups whose filter columns were decoded."""
    bad_units: tuple[str, ...] = ()
    """Row groups that were skipped because they could not be read, with the reason."""

    @property
    def deleted_digest(self) -> str:
        return digest_of(self.projection.deleted)


def digest_of(deleted: npt.NDArray[np.int64]) -> str:
    return str(xxhash.xxh3_128_hexdigest(deleted.astype("<i8").tobytes())) if len(deleted) else ""


def count(
    request: Request,
    probed: ProbedFile,
    positions: npt.NDArray[np.int64],
    equality: EqualityDeletes,
    *,
    wide: bool,
    known: KnownCounts | None = None,
) -> CountedFile:
    """Count the rows of each row group that remain after deletes and the filter.

    Raises:
        SchemaMismatch: The file's columns do not fit the table's.
        DataFileInvalid, DataFileMissing: The file cannot be read, and errors are not skipped.
        StorageError: Storage is unreachable, or denies access.
    """
    columns = probed.layout.columns(request.fields, wide=wide)
    bad: dict[int, str] = {}
    if request.condition is None and not probed.scanned.equality_deletes:
        projection = TableProjection(columns, positions)
        return CountedFile(probed, projection, tuple(projection.num_left(unit) for unit in probed.facts.units))
    with LazyReader(probed, request.source) as reader:
        deleted = [positions]
        if probed.scanned.equality_deletes:
            for unit in probed.facts.units:
                with _Skipping(request, unit, probed, bad):
                    deleted.append(equality.deleted_rows(probed, unit, reader))
        projection = TableProjection(columns, np.unique(np.concatenate(deleted)) if len(deleted) > 1 else positions)
        if request.condition is None:
            rows, num_counted = [projection.num_left(unit) for unit in probed.facts.units], 0
        elif known is not None and known.deleted_digest == digest_of(projection.deleted) and not bad:
            rows, num_counted = list(known.unit_rows), known.num_units_counted
        else:
            rows, num_counted = _filtered(request, request.condition, probed, projection, reader, bad)
    unit_rows = [0 if unit.index in bad else num for unit, num in zip(probed.facts.units, rows, strict=True)]
    return CountedFile(probed, projection, tuple(unit_rows), num_counted, tuple(bad.values()))


class _Skipping:
    """Records a row group that cannot be read, if errors are skipped."""

    def __init__(self, request: Request, unit: Unit, probed: ProbedFile, bad: dict[int, str]) -> None:
        self._skips = request.skips
        self._unit = unit
        self._looked = probed
        self._bad = bad

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not self._skips or not isinstance(error, UNREADABLE):
            return False
        self._bad[self._unit.index] = f"{self._looked.format.unit_name} {self._unit.index}: {error}"
        return True


def _filtered(
    request: Request,
    condition: Condition,
    probed: ProbedFile,
    projection: TableProjection,
    reader: LazyReader,
    bad: dict[int, str],
) -> tuple[list[int], int]:
    rows, num_counted = [], 0
    for unit, presence in zip(probed.facts.units, _presence(request, condition, probed, projection), strict=True):
        num_left = projection.num_left(unit) if presence != Presence.NONE and unit.index not in bad else 0
        if presence == Presence.SOME and num_left:
            num_counted += 1
            with _Skipping(request, unit, probed, bad):
                table = reader.read(unit, projection.file_columns(condition.columns))
                place = f"{probed.file.name}, {probed.format.unit_name} {unit.index}"
                num_left = filters.count(condition, projection.apply(table, unit, condition.columns), place)
        rows.append(num_left)
    return rows, num_counted


def _presence(
    request: Request, condition: Condition, probed: ProbedFile, projection: TableProjection
) -> Sequence[Presence]:
    """Return what constants of the file, and then statistics, decide about each row group without decoding."""
    facts = probed.facts
    if not facts.units:
        return []
    tree = condition.tree
    absent = [name for name in condition.columns if projection.columns[name].source is None]
    if absent:
        one_row = replace(facts.units[0], num_rows=1)
        left = expression.resolve(tree, TableProjection(projection.columns).apply(pa.table({}), one_row, absent))[0]
        if left.node is None:
            return [left.presence] * len(facts.units)
        tree = left.node
    names = expression.columns(tree)
    if not all(_keeps_values(facts.schema, projection, name) for name in names):
        return [Presence.SOME] * len(facts.units)
    sources = {name: str(projection.columns[name].source) for name in names}
    types = {sources[name]: projection.columns[name].conversion.type for name in names}
    schema = pa.schema(sorted(types.items()))
    return probed.format.presence(request.source, probed.file, facts, expression.renamed(tree, sources), schema)


def _keeps_values(schema: pa.Schema, projection: TableProjection, name: str) -> bool:
    """Return whether the file's values equal the table's: no time is truncated, no struct is taken apart."""
    column = projection.columns[name]
    return column.is_plain and keeps_values(schema.field(column.source).type, column.conversion.type)
