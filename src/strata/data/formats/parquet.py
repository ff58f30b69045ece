"""Parquet: a unit is a row group.

All that a file says of itself stands in its footer, at its end: one read of the tail is enough to know the rows, the
bytes of each column, and statistics. The footer's hash is the file's version: it holds offsets, sizes, encodings and
statistics of every column, so other contents are another footer.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import xxhash
from pyarrow.parquet.core import ParquetReader as NativeReader

from strata.data.formats import parquet_pages, parquet_statistics
from strata.data.formats.base import FileFacts, Presence, Saving, Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, attempt, kind_of
from strata.data.formats.messages import has_dictionaries
from strata.data.formats.parquet_index import MAX_CHUNKS, IndexDamaged, range_of
from strata.data.formats.parquet_pages import PagedFile, read_ranges
from strata.data.memory import pool
from strata.data.ranges import HOLE_BYTES, Range
from strata.data.source import reaching
from strata.errors import DataFileChanged, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from strata.data.files import DataFile
    from strata.data.formats.base import Judged, Reader, Rows
    from strata.data.source import Source
    from strata.errors import DataError, StorageError

TAIL_BYTES = 64 << 10
"""Holds the footer of most files: about 70 column chunks with statistics fit in 8 KiB."""
MAX_FOOTER_BYTES = 512 << 20
HEAD_COLUMNS = 4
"""Decoded at a time where it is the first rows alone. With 41 columns of pages of 1 MB, a fifth of the pages of fresh
memory, each of which costs up to 90 µs on a virtual machine.
"""
_MARK = b"PAR1"
_ENCRYPTED_MARK = b"PARE"
_END_BYTES = 8
"""The length of the footer, and the mark."""
_NEAR_HOLE_BYTES = 64 << 10
"""Between pages that are read at once from a disk."""
_NUM_ASKED = 8
"""Columns that are asked whether they have a page index."""
_NO_PAGES = (ValueError, OSError, pa.ArrowException)
"""Why pages may not be told apart: `IndexDamaged`, and what pyarrow says of files that are made of damaged pages."""


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

    def inspect_all(
        self, source: Source, files: Sequence[DataFile], *, columns: Sequence[str] | None, with_nulls: Sequence[bool]
    ) -> list[FileFacts | DataError | StorageError]:
        from strata.data.formats import parquet_many  # noqa: PLC0415 - it needs what is here

        return parquet_many.inspect_all(source, files, columns=columns, with_nulls=with_nulls)

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: pc.Expression, columns: Sequence[str]
    ) -> list[Presence]:
        if not parquet_statistics.can_tell(facts.schema, columns):
            return [Presence.SOME] * len(facts.units)
        with source.open(file) as opened:
            tail = _read_tail(source, file, opened, version=facts.version)
        footer = _Footer(file, tail)
        leaves = {footer.names[column]: leaf for leaf, column in footer.leaves_of(columns)}
        stated = parquet_statistics.Stated(tail.data, footer.metadata, footer.schema, leaves)
        answers = parquet_statistics.presence(stated, condition)
        return [answers[unit.index] for unit in facts.units]

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> ParquetReader:  # noqa: ARG002
        return ParquetReader(source, file, version)

    def read_head(self, reader: Reader, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        assert isinstance(reader, ParquetReader)
        return reader.read_head(unit, columns, num_rows)

    def ranges(
        self, source: Source, file: DataFile, columns: Sequence[str], version: str
    ) -> Mapping[int, Sequence[Range]]:
        with source.open(file) as opened:
            footer = _Footer(file, _read_tail(source, file, opened, version=version))
        return {index: footer.ranges_of(index, columns) for index in range(footer.metadata.num_row_groups)}

    def page_ranges(
        self,
        source: Source,
        file: DataFile,
        columns: Sequence[str],
        version: str,
        rows: Mapping[int, Sequence[Rows]],
    ) -> Mapping[int, Sequence[Range]]:
        with source.open(file) as opened:
            tail = _read_tail(source, file, opened, version=version)
            footer = _Footer(file, tail)
            found = {index: footer.ranges_of(index, columns) for index in range(footer.metadata.num_row_groups)}
            if not _has_pages(footer):
                return found

            def read(ranges: Sequence[Range]) -> Sequence[bytes]:
                data, num_bytes = _read_index(opened, tail, ranges)
                source.counter.add(num_bytes)
                return data

            with contextlib.suppress(*_NO_PAGES):  # who reads will find the same
                pages = PagedFile(tail.footer, footer.metadata, footer.schema, read)
                for index, some in rows.items():
                    choice = pages.choose(index, columns, some)
                    whole = footer.ranges_of(index, [footer.names[column] for column in choice.whole])
                    found[index] = [*whole, *(each for selection in choice.paged for each in selection.ranges)]
        return found


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
        self._tail = tail if _has_pages(self._footer) else None
        self._pages: PagedFile | None = None
        self._hole_bytes = _NEAR_HOLE_BYTES if source.is_local else HOLE_BYTES

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return _rows_only(unit.num_rows)
        leaves, ranges = self._where(unit, columns)
        table = attempt(
            lambda: self._decode(unit, leaves),
            lambda: self._decode_anew(lambda: self._decode(unit, leaves)),
            source=self._source,
            file=self._file,
            ranges=ranges,
            what=_named(unit),
        )
        self._add(sum(num_bytes for _, num_bytes in ranges))
        return _only(table, columns)

    def _where(self, unit: Unit, columns: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """The leaves of the columns, and where each lies."""
        wanted = tuple(columns)
        leaves = self._leaves.get(wanted)
        if leaves is None:
            leaves = self._leaves[wanted] = [leaf for leaf, _ in self._footer.leaves_of(wanted)]
        return leaves, [range_of(self._footer.metadata.row_group(unit.index).column(leaf)) for leaf in leaves]

    def read_head(self, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        """The first rows of the unit. What is read is not counted: it will be, with the rest.

        A few columns at a time: pages are large, and the next ones are unpacked into the memory of the last.
        """
        found: list[pa.Table] = []
        for at in range(0, max(len(columns), 1), HEAD_COLUMNS):
            some = columns[at : at + HEAD_COLUMNS]
            leaves, ranges = self._where(unit, some)
            decode = partial(self._decode_head, unit, leaves, num_rows)
            table = attempt(
                decode,
                partial(self._decode_anew, decode),
                source=self._source,
                file=self._file,
                ranges=ranges,
                what=_named(unit),
            )
            found.append(_only(table, some))
        fields = [field for table in found for field in table.schema]
        return pa.table([column for table in found for column in table.columns], pa.schema(fields))

    def judge(self, units: Sequence[Unit], condition: pc.Expression, columns: Sequence[str]) -> Mapping[int, Judged]:
        if self._tail is None or not parquet_statistics.can_tell(self._footer.schema, columns):
            return {}
        large = [unit.index for unit in units if _is_large(self._footer.metadata.row_group(unit.index))]
        try:
            return self._paged().judge(large, condition, columns) if large else {}
        except pa.ArrowMemoryError:
            raise
        except _NO_PAGES:
            self._tail = None
            return {}

    def saving(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> Saving:
        try:
            return self._paged().choose(unit.index, columns, rows).saving
        except _NO_PAGES:
            self._tail = None
            return Saving()

    def read_rows(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> pa.Table:
        assert columns
        assert rows
        try:
            return self._read_pages(unit, columns, rows)
        except pa.ArrowMemoryError:
            raise
        except _NO_PAGES:
            # Whatever is wrong, with the index or with what it leads to: read without it, and told if it still is.
            self._tail = None
        return _cut(self.read(unit, columns), rows)

    def _read_pages(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> pa.Table:
        """
        Raises:
            IndexDamaged: It cannot be done so.
            OSError, pa.ArrowException: Something cannot be read or decoded.
        """
        pages, schema = self._paged(), self._footer.schema
        choice = pages.choose(unit.index, columns, rows)
        made: dict[str, pa.ChunkedArray] = {}
        data, num_bytes = read_ranges(
            self._opened, [each for selection in choice.paged for each in selection.ranges], self._hole_bytes
        )
        left = iter(data)
        for selection in choice.paged:
            own = [next(left) for _ in selection.ranges]
            made[schema.names[selection.column]] = column = pages.decode(unit.index, selection, own, rows)
            _check_codes(column)
        self._add(num_bytes)
        if choice.whole:
            table = _cut(self.read(unit, [schema.names[column] for column in choice.whole]), rows)
            made |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.Table.from_arrays([made[name] for name in columns], schema=pa.schema(map(schema.field, columns)))

    def _paged(self) -> PagedFile:
        """
        Raises:
            IndexDamaged: The file has no page index, or none that can be used.
        """
        if self._tail is None:
            raise IndexDamaged("there is no page index")
        if self._pages is None:
            tail = self._tail

            def read(ranges: Sequence[Range]) -> Sequence[bytes]:
                data, num_bytes = _read_index(self._opened, tail, ranges)
                self._add(num_bytes)
                return data

            self._pages = PagedFile(tail.footer, self._footer.metadata, self._footer.schema, read)
        return self._pages

    def _add(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        self._source.counter.add(num_bytes)

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
            _check_codes(column)
        return table

    def _decode_head(self, unit: Unit, leaves: list[int], num_rows: int) -> pa.Table:
        native = self._open_native()  # one that is stopped midway keeps what it has begun
        found: list[pa.RecordBatch] = []
        for batch in native.iter_batches(num_rows, [unit.index], column_indices=leaves, use_threads=False):
            found.append(batch)
            if sum(each.num_rows for each in found) >= num_rows:
                break
        table = pa.Table.from_batches(found).slice(0, num_rows)
        if table.num_rows != num_rows:
            raise pa.ArrowInvalid(f"{table.num_rows} rows instead of {num_rows}")
        for column in table.columns:
            _check_codes(column)
        return table

    def _decode_anew(self, decode: Callable[[], pa.Table]) -> pa.Table:
        self.close()
        self._opened = self._source.open(self._file)
        self._native = self._open_native()
        return decode()


class _Tail:
    """The end of a file, with the whole footer in it."""

    __slots__ = ("_num_footer_bytes", "data", "num_bytes_read", "version")

    def __init__(self, data: bytes, num_footer_bytes: int, num_bytes_read: int) -> None:
        self.data = data
        self.num_bytes_read = num_bytes_read
        self._num_footer_bytes = num_footer_bytes
        start = len(data) - _END_BYTES - num_footer_bytes
        self.version: str = xxhash.xxh3_128_hexdigest(memoryview(data)[start:])

    @property
    def footer(self) -> bytes:
        return self.data[-_END_BYTES - self._num_footer_bytes : -_END_BYTES]


def _read_index(opened: pa.NativeFile, tail: _Tail, ranges: Sequence[Range]) -> tuple[list[bytes], int]:
    """Ranges of a page index, and how many bytes were read for them. It lies before the footer: most often the tail has
    it already.
    """
    size = opened.size()
    start = size - len(tail.data)
    if all(start <= each.offset and each.end <= size for each in ranges):
        return [tail.data[each.offset - start : each.end - start] for each in ranges], 0
    found, num_bytes = read_ranges(opened, ranges, HOLE_BYTES)
    return [bytes(each) for each in found], num_bytes


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
    flat = frozenset(number for number, kind in enumerate(schema.types) if not parquet_statistics.is_nested(kind))
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

    def ranges_of(self, index: int, names: Sequence[str]) -> list[Range]:
        """Which bytes these columns of a row group are in."""
        group = self.metadata.row_group(index)
        return [Range(*range_of(group.column(leaf))) for leaf, _ in self.leaves_of(names)]


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
        offset = range_of(group.column(0))[0]
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
    first, (last, num_bytes) = range_of(group.column(0))[0], range_of(group.column(group.num_columns - 1))
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


def _has_pages(footer: _Footer) -> bool:
    """Whether it is worth while to look for a page index: a writer has it for all columns, or for none."""
    metadata = footer.metadata
    if not metadata.num_row_groups or metadata.num_row_groups * metadata.num_columns > MAX_CHUNKS:
        return False
    group = metadata.row_group(0)
    return any(group.column(leaf).has_offset_index for leaf in range(min(metadata.num_columns, _NUM_ASKED)))


def _is_large(group: pq.RowGroupMetaData) -> bool:
    """Whether leaving out pages of some column could pay; else it is quicker to decode than to judge them."""
    sizes = (group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
    return any(size >= parquet_pages.MIN_SAVED_BYTES for size in sizes)


def _check_codes(column: pa.ChunkedArray) -> None:
    """They are followed without looking; those of a damaged page lead anywhere."""
    if has_dictionaries(column.type):
        column.validate(full=True)


def _cut(table: pa.Table, rows: Sequence[Rows]) -> pa.Table:
    return pa.concat_tables([table.slice(first, num_rows) for first, num_rows in rows])


def _named(unit: Unit) -> str:
    return f"row group {unit.index}, which begins with row {unit.first_row},"


def _only(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    table = table.select(list(columns)) if table.column_names != list(columns) else table
    return table.replace_schema_metadata(None)


def _rows_only(num_rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(num_rows)}).select([])
