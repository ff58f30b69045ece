"""Parquet: a unit is a row group.

All that a file says of itself stands in its footer, at its end: one read of the tail is enough to know the rows, the
bytes of each column, and statistics. The footer's hash is the file's version: it holds offsets, sizes, encodings and
statistics of every column, so other contents are another footer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyarrow.parquet.core import ParquetReader as NativeReader

from strata.data.formats.base import FileFacts, Presence, Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, attempt, kind_of
from strata.data.formats.messages import has_dictionaries
from strata.data.memory import pool
from strata.data.ranges import Range
from strata.data.source import reaching
from strata.errors import DataFileChanged, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow.parquet as pq

    from strata.data.files import DataFile
    from strata.data.source import Source

TAIL_BYTES = 64 << 10
"""Holds the footer of most files: about 70 column chunks with statistics fit in 8 KiB."""
MAX_FOOTER_BYTES = 512 << 20
MAX_FLOAT_COLUMNS = 3
"""In a filter; each multiplies by four the cases that statistics are asked about."""
_MARK = b"PAR1"
_ENCRYPTED_MARK = b"PARE"
_END_BYTES = 8
"""The length of the footer, and the mark."""


class ParquetFormat:
    name: ClassVar[str] = "parquet"
    unit_name: ClassVar[str] = "row group"
    is_typed: ClassVar[bool] = True

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,  # noqa: ARG002
        with_nulls: bool = True,
    ) -> FileFacts:
        with source.open(file) as opened:
            tail = _read_tail(source, file, opened)
        footer = _Footer(file, tail)
        leaves = footer.leaves if columns is None else footer.leaves_of(columns)
        units = _units(footer, None if columns is None else [leaf for leaf, _ in leaves])
        return FileFacts(footer.schema, units, tail.version, _null_counts(footer, leaves) if with_nulls else {})

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: pc.Expression, columns: Sequence[str]
    ) -> list[Presence]:
        types = [facts.schema.field(name).type for name in columns]
        floats = [name for name, kind in zip(columns, types, strict=True) if pa.types.is_floating(kind)]
        if not all(_has_plain_statistics(kind) for kind in types) or len(floats) > MAX_FLOAT_COLUMNS:
            return [Presence.SOME] * len(facts.units)
        with source.open(file) as opened:
            tail = _read_tail(source, file, opened, version=facts.version)
        footer = _Footer(file, tail)
        never_null = _groups_without_nulls(footer, columns)
        try:
            possible = _groups_that_may_pass(tail, footer, condition, floats)
            # Not `~condition` alone: a condition can be null of itself, and then neither it nor its inverse is true.
            doubtful = _groups_that_may_pass(tail, footer, ~condition | condition.is_null(), floats)
        except (pa.ArrowException, TypeError):  # not to be answered by statistics; evaluating it will say why
            return [Presence.SOME] * len(facts.units)
        return [
            Presence.NONE
            if unit.index not in possible
            else Presence.ALL
            if unit.index in never_null and unit.index not in doubtful
            else Presence.SOME
            for unit in facts.units
        ]

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> ParquetReader:  # noqa: ARG002
        return ParquetReader(source, file, version)

    def ranges(
        self, source: Source, file: DataFile, columns: Sequence[str], version: str
    ) -> Mapping[int, Sequence[Range]]:
        with source.open(file) as opened:
            footer = _Footer(file, _read_tail(source, file, opened, version=version))
        leaves = [leaf for leaf, _ in footer.leaves_of(columns)]
        groups = [footer.metadata.row_group(index) for index in range(footer.metadata.num_row_groups)]
        return {index: [Range(*_range_of(group.column(leaf))) for leaf in leaves] for index, group in enumerate(groups)}


class ParquetReader:
    """Has its own handle: one that is shared by threads hangs."""

    def __init__(self, source: Source, file: DataFile, version: str) -> None:
        self._source = source
        self._file = file
        self._opened = source.open(file)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._opened.close)
            tail = _read_tail(source, file, self._opened, version=version)
            self._footer = _Footer(file, tail)
            self._native = self._open_native()
            on_error.pop_all()
        self.bytes_read = tail.num_bytes_read
        self._leaves: dict[tuple[str, ...], list[int]] = {}

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return _rows_only(unit.num_rows)
        wanted = tuple(columns)
        leaves = self._leaves.get(wanted)
        if leaves is None:
            leaves = self._leaves[wanted] = [leaf for leaf, _ in self._footer.leaves_of(wanted)]
        ranges = [_range_of(self._footer.metadata.row_group(unit.index).column(leaf)) for leaf in leaves]
        table = attempt(
            lambda: self._decode(unit, leaves),
            lambda: self._decode_anew(unit, leaves),
            source=self._source,
            file=self._file,
            ranges=ranges,
            what=f"row group {unit.index}, which begins with row {unit.first_row},",
        )
        num_bytes = sum(num_bytes for _, num_bytes in ranges)
        self.bytes_read += num_bytes
        self._source.counter.add(num_bytes)
        table = table.select(list(columns)) if table.column_names != list(columns) else table
        return table.replace_schema_metadata(None)

    def close(self) -> None:
        self._native.close()
        self._opened.close()

    def _open_native(self) -> NativeReader:
        native = NativeReader(pool())
        # Far away, the columns of a row group are fetched together, in few and large reads. Nearby they are read, not
        # mapped: a file that is cut off while it is mapped would end the process.
        native.open(
            self._opened,
            metadata=self._footer.metadata,
            pre_buffer=not self._source.is_local,
            page_checksum_verification=True,  # costs nothing where a file has none
        )
        return native

    def _decode(self, unit: Unit, leaves: list[int]) -> pa.Table:
        table = self._native.read_row_group(unit.index, column_indices=leaves, use_threads=False)
        if table.num_rows != unit.num_rows:
            raise pa.ArrowInvalid(f"{table.num_rows} rows instead of {unit.num_rows}")
        for column in table.columns:
            if has_dictionaries(column.type):
                column.validate(full=True)  # codes are followed without looking; those of a damaged page lead anywhere
        return table

    def _decode_anew(self, unit: Unit, leaves: list[int]) -> pa.Table:
        self.close()
        self._opened = self._source.open(self._file)
        self._native = self._open_native()
        return self._decode(unit, leaves)


class _Tail:
    """The end of a file, with the whole footer in it."""

    __slots__ = ("data", "num_bytes_read", "version")

    def __init__(self, data: bytes, num_footer_bytes: int, num_bytes_read: int) -> None:
        self.data = data
        self.num_bytes_read = num_bytes_read
        start = len(data) - _END_BYTES - num_footer_bytes
        self.version: str = xxhash.xxh3_128_hexdigest(memoryview(data)[start:])


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """The columns of a file. Files of a dataset mostly have the same, and to recognise them is quicker than to ask."""

    stored: pq.ParquetSchema
    notes: Mapping[bytes, bytes] | None
    """Beside the schema in the footer; Arrow keeps its own there."""
    schema: pa.Schema
    names: list[str]
    flat: frozenset[int]
    """Columns that are not nested."""


_last_shape: _Shape | None = None
"""That was met; by whichever thread."""


def _shape_of(native: NativeReader) -> _Shape:
    global _last_shape  # noqa: PLW0603 - only ever replaced as a whole, and compared before it is used
    last, stored, notes = _last_shape, native.metadata.schema, native.metadata.metadata
    if last is not None and last.notes == notes and last.stored.equals(stored):
        return last
    schema = native.schema_arrow.remove_metadata()
    flat = frozenset(number for number, kind in enumerate(schema.types) if not _is_nested(kind))
    _last_shape = shape = _Shape(stored, notes, schema, schema.names, flat)
    return shape


class _Footer:
    """A parsed footer: the columns that a user sees, and the leaves (column chunks) that they are stored in."""

    __slots__ = ("_file", "flat", "metadata", "names", "schema")

    def __init__(self, file: DataFile, tail: _Tail) -> None:
        # `pq.read_metadata` does the same, and then spends half as much again on the paths of all columns: a plan of
        # 10,000 files would notice.
        native = NativeReader()
        try:
            native.open(pa.BufferReader(tail.data))
            self.metadata: pq.FileMetaData = native.metadata
            shape = _shape_of(native)
            self.schema: pa.Schema = shape.schema
            self.names: list[str] = shape.names
            self.flat = shape.flat
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise DataFileInvalid(f"{file.name}: its parquet footer is damaged ({error}); {CURE}") from error
        self._file = file

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """Of all columns: (leaf, column)."""
        schema, num_leaves = self.schema, self.metadata.num_columns
        if len(schema) == num_leaves:  # every column has at least one
            return [(leaf, leaf) for leaf in range(num_leaves)]
        columns = [index for index, kind in enumerate(schema.types) for _ in range(_num_leaves(kind))]
        if len(columns) != num_leaves:
            raise DataFileInvalid(
                f"{self._file.name}: {num_leaves} columns are stored but the schema has {len(columns)}; {CURE}"
            )
        return list(enumerate(columns))

    def leaves_of(self, names: Sequence[str]) -> list[tuple[int, int]]:
        wanted = {self.schema.get_field_index(name) for name in names}
        return [(leaf, column) for leaf, column in self.leaves if column in wanted]


def _read_tail(source: Source, file: DataFile, opened: pa.NativeFile, *, version: str | None = None) -> _Tail:
    """The footer and what lies before it, in one read, or two where it is large.

    `version`: what it must be.
    """
    with reaching(file.name):
        size = opened.size()
        data = opened.read_at(min(size, TAIL_BYTES), max(0, size - TAIL_BYTES))
    if version is not None and size != file.size_bytes:
        raise _changed(file, size)
    num_read = len(data)
    if size < len(_MARK) + _END_BYTES or not data.endswith(_MARK):
        if version is not None:
            raise _changed(file, size)
        with reaching(file.name):
            head = opened.read_at(min(size, NUM_HEAD_BYTES), 0)
        raise _not_parquet(file, size, head, data)
    num_footer_bytes = int.from_bytes(data[-_END_BYTES:-4], "little")
    needed = num_footer_bytes + _END_BYTES
    if needed > size - len(_MARK) or num_footer_bytes > MAX_FOOTER_BYTES:
        raise DataFileInvalid(
            f"{file.name}: its parquet footer should have {num_footer_bytes} bytes, "
            f"but the file has {size} and a footer may have {MAX_FOOTER_BYTES}; {CURE}"
        )
    if needed > len(data):
        with reaching(file.name):
            data = opened.read_at(needed, size - needed)
        num_read += len(data)
    source.counter.add(num_read)
    tail = _Tail(data, num_footer_bytes, num_read)
    if version is not None and tail.version != version:
        raise _changed(file, size)
    return tail


def _changed(file: DataFile, size: int) -> DataFileChanged:
    return DataFileChanged(
        f"{file.name} is not the file that was planned: it had {file.size_bytes} bytes, now it has {size}, "
        "or its footer is another one; make the dataset anew, and write new data to new files"
    )


def _not_parquet(file: DataFile, size: int, head: bytes, data: bytes) -> DataFileInvalid:
    if data.endswith(_ENCRYPTED_MARK):
        return DataFileInvalid(f"{file.name} is a parquet file with an encrypted footer; decrypt it first")
    if head.startswith(_MARK):
        return DataFileInvalid(
            f"{file.name} ({size} bytes) begins as a parquet file but does not end as one: it was cut off, "
            f"or its writer did not finish; {CURE}"
        )
    return DataFileInvalid(
        f"{file.name} ({size} bytes) is not a parquet file: it looks {kind_of(head)}; "
        "name its format, or narrow the path so that it is left out"
    )


def _num_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _num_leaves(kind.storage_type)
    if not kind.num_fields:
        return 1
    return sum(_num_leaves(kind.field(index).type) for index in range(kind.num_fields))


def _units(footer: _Footer, leaves: Sequence[int] | None) -> tuple[Unit, ...]:
    """With the bytes of these leaves; None: of all of them."""
    metadata = footer.metadata
    units = []
    first_row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        num_rows = group.num_rows
        if not num_rows:
            continue
        offset = _range_of(group.column(0))[0]
        num_bytes = _span(group) if leaves is None else 0
        if num_bytes <= 0:
            chosen = range(metadata.num_columns) if leaves is None else leaves
            num_bytes = sum(group.column(leaf).total_compressed_size for leaf in chosen)
        units.append(Unit(index, num_rows, first_row, offset, num_bytes))
        first_row += num_rows
    return tuple(units)


def _span(group: pq.RowGroupMetaData) -> int:
    """From the first to the end of the last column: writers put them one after the other. To ask each for its size
    would be a tenth of the time that planning takes. 0 or less if they lie otherwise.
    """
    first, (last, num_bytes) = _range_of(group.column(0))[0], _range_of(group.column(group.num_columns - 1))
    return last + num_bytes - first


def _null_counts(footer: _Footer, leaves: list[tuple[int, int]]) -> dict[str, int]:
    """Of the columns of these leaves, where statistics tell."""
    metadata, names, flat = footer.metadata, footer.names, footer.flat
    counts = {column: 0 for _, column in leaves if column in flat}
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if not group.num_rows:
            continue
        for leaf, column in leaves:
            if column in counts:
                statistics = group.column(leaf).statistics
                if statistics is not None and statistics.has_null_count:
                    counts[column] += statistics.null_count
                else:
                    del counts[column]
    return {names[column]: count for column, count in counts.items()}


def _range_of(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    first = chunk.data_page_offset
    dictionary = chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < first:
        first = dictionary
    return first, chunk.total_compressed_size


def _rows_only(num_rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(num_rows)}).select([])


# -- statistics --------------------------------------------------------------------------------------------------------


def _is_nested(kind: pa.DataType) -> bool:
    return kind.num_fields > 0 or isinstance(kind, pa.BaseExtensionType)


def _has_plain_statistics(kind: pa.DataType) -> bool:
    """Whether the least and the greatest value say all that a filter may ask; else statistics are not asked."""
    return not _is_nested(kind) and not pa.types.is_dictionary(kind) and not pa.types.is_float16(kind)


def _groups_without_nulls(footer: _Footer, columns: Sequence[str]) -> set[int]:
    leaves = [leaf for leaf, _ in footer.leaves_of(columns)]
    found = set()
    for index in range(footer.metadata.num_row_groups):
        group = footer.metadata.row_group(index)
        statistics = [group.column(leaf).statistics for leaf in leaves]
        if all(each is not None and each.has_null_count and each.null_count == 0 for each in statistics):
            found.add(index)
    return found


def _groups_that_may_pass(tail: _Tail, footer: _Footer, condition: pc.Expression, floats: Sequence[str]) -> set[int]:
    """Row groups in which statistics do not rule out that a row passes.

    Statistics of floats do not tell all: they are silent about NaN, which every comparison but `!=` is false for, and
    they do not tell the two zeros apart, as `is_in` does. So for each way in which a row may have such values in these
    columns, the question is asked with that known.
    """
    # Imported late: it takes 20 ms, and only filters need it.
    import pyarrow.dataset as pads  # noqa: PLC0415

    everywhere = set(range(footer.metadata.num_row_groups))
    with_zeros = {name: _groups_with_zeros(footer, name) for name in floats}
    found: set[int] = set()
    for case in itertools.product((None, math.nan, 0.0, -0.0), repeat=len(floats)):
        groups = everywhere
        known = pc.scalar(True)
        for name, value in zip(floats, case, strict=True):
            if value is not None:
                known &= pc.field(name) == pa.scalar(value, footer.schema.field(name).type)
            if value == 0:
                groups = groups & with_zeros[name]
        if groups <= found:
            continue
        fragment = pads.ParquetFileFormat().make_fragment(pa.BufferReader(tail.data), partition_expression=known)
        found |= groups.intersection(_ids(fragment.split_by_row_group(condition, footer.schema)))
    return found


def _groups_with_zeros(footer: _Footer, name: str) -> set[int]:
    """Where a float column may have a zero."""
    ((leaf, _),) = footer.leaves_of([name])
    found = set()
    for index in range(footer.metadata.num_row_groups):
        statistics = footer.metadata.row_group(index).column(leaf).statistics
        if statistics is None or not statistics.has_min_max or statistics.min <= 0 <= statistics.max:
            found.add(index)
    return found


def _ids(fragments: Sequence[object]) -> Iterator[int]:
    for fragment in fragments:
        for group in fragment.row_groups:  # type: ignore[attr-defined]
            yield group.id
