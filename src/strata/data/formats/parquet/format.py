"""The Parquet implementation of the format port: inspecting, pruning, and reading row groups and pages."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from strata.data.filter import pruning
from strata.data.filter.expression import Presence
from strata.data.formats.arrow_messages import has_dictionaries
from strata.data.formats.base import FileFacts, Saving, Unit
from strata.data.formats.damage import CURE, attempt
from strata.data.formats.parquet import footer_batch, statistics
from strata.data.formats.parquet import pages as parquet_pages
from strata.data.formats.parquet.footer import Footer, has_pages, null_counts, read_index, read_tail, units_of
from strata.data.formats.parquet.page_index import IndexDamaged, range_of
from strata.data.formats.parquet.pages import PagedFile, read_ranges
from strata.data.memory import pool
from strata.data.pyarrow_private import open_parquet
from strata.data.source.ranges import GAP_BYTES, Range
from strata.errors import DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow.parquet as pq

    from strata.data.filter.expression import Node
    from strata.data.formats.base import Judged, Reader, Rows, UnitRanges
    from strata.data.pyarrow_private import LowLevelReader
    from strata.data.source.source import DataFile, Source
    from strata.errors import DataError, StorageError

HEAD_COLUMNS = 4
"""Columns decoded at a time by `read_head`. With 41 columns and pages of 1 MB, this needs a fifth of the new memory
pages, each of which costs up to 90 µs on a virtual machine.
"""
PARTS = (4, 32, 256)
"""The numbers of parts to try for a row group that cannot be decoded at once."""
LOCAL_GAP_BYTES = 64 << 10
"""The largest gap between pages that are read at once from a disk."""
_NO_PAGES = (ValueError, OSError, pa.ArrowException)
"""Errors after which a file is read without its page index: `IndexDamaged`, and pyarrow's about damaged pages."""


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
            tail = read_tail(source, file, opened)
        footer = Footer(file, tail)
        leaves = footer.leaves if columns is None else footer.leaves_of(columns)
        units = units_of(footer, None if columns is None else [leaf for leaf, _ in leaves])
        return FileFacts(footer.schema, units, tail.version, null_counts(footer, leaves) if with_nulls else {})

    def inspect_all(
        self, source: Source, files: Sequence[DataFile], *, columns: Sequence[str] | None, with_nulls: Sequence[bool]
    ) -> list[FileFacts | DataError | StorageError]:
        return footer_batch.inspect_all(source, files, columns=columns, with_nulls=with_nulls)

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: Node, schema: pa.Schema
    ) -> list[Presence]:
        if not statistics.have_bounds(facts.schema, schema):
            return [Presence.SOME] * len(facts.units)
        with source.open(file) as opened:
            tail = read_tail(source, file, opened, version=facts.version)
        footer = Footer(file, tail)
        groups = [unit.index for unit in facts.units]
        bounds = {
            footer.names[column]: statistics.of_groups(
                footer.metadata, groups, leaf, schema.field(footer.names[column]).type
            )
            for leaf, column in footer.leaves_of(schema.names)
        }
        return pruning.presence(condition, bounds, len(groups))

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> ParquetReader:  # noqa: ARG002
        return ParquetReader(source, file, version)

    def read_head(self, reader: Reader, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        assert isinstance(reader, ParquetReader)
        return reader.read_head(unit, columns, num_rows)

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        with source.open(file) as opened:
            footer = Footer(file, read_tail(source, file, opened, version=version))
        return lambda unit: footer.ranges_of(unit.index, columns)

    def page_ranges(
        self,
        source: Source,
        file: DataFile,
        columns: Sequence[str],
        version: str,
        rows: Mapping[int, Sequence[Rows]],
    ) -> UnitRanges:
        with source.open(file) as opened:
            tail = read_tail(source, file, opened, version=version)
            footer = Footer(file, tail)
            found: dict[int, Sequence[Range]] = {}
            if not has_pages(footer):
                return lambda unit: footer.ranges_of(unit.index, columns)

            def read(ranges: Sequence[Range]) -> Sequence[bytes]:
                data, num_bytes = read_index(opened, tail, ranges)
                source.counter.add(num_bytes)
                return data

            with contextlib.suppress(*_NO_PAGES):  # the reader meets the same error
                pages = PagedFile(tail.footer, footer.metadata, footer.schema, read)
                for index, some in rows.items():
                    choice = pages.choose(index, columns, some)
                    whole = footer.ranges_of(index, [footer.names[column] for column in choice.whole])
                    found[index] = [*whole, *(each for selection in choice.paged for each in selection.ranges)]
        return lambda unit: found[unit.index] if unit.index in found else footer.ranges_of(unit.index, columns)


class ParquetReader:
    """Reads one file through its own handle: sharing a handle between threads hangs."""

    def __init__(self, source: Source, file: DataFile, version: str) -> None:
        self._source = source
        self._file = file
        self._opened = source.open(file)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._opened.close)
            tail = read_tail(source, file, self._opened, version=version)
            self._footer = Footer(file, tail)
            self._native = self._open_native()
            on_error.pop_all()
        self.bytes_read = tail.num_bytes_read
        self._leaves: dict[tuple[str, ...], list[int]] = {}
        self._tail = tail if has_pages(self._footer) else None
        self._pages: PagedFile | None = None
        self._gap_bytes = GAP_BYTES if source.has_round_trips else LOCAL_GAP_BYTES

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file."""
        return self._footer.schema

    @property
    def units(self) -> tuple[Unit, ...]:
        """The row groups of the file, with the bytes of all columns."""
        return units_of(self._footer, None)

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        if not columns:
            return _rows_only(unit.num_rows)
        leaves, ranges = self._where(unit, columns)
        table = attempt(
            lambda: self._decode(unit, leaves),
            lambda: self._decode_anew(lambda: self._decode(unit, leaves)),
            source=self._source,
            file=self._file,
            unit=unit,
            ranges=ranges,
            what=_describe(unit),
        )
        self._count(sum(num_bytes for _, num_bytes in ranges))
        return self._select(table, columns)

    def _select(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        if table.column_names != list(columns):
            if missing := set(columns) - set(table.column_names):
                raise DataFileInvalid(
                    f"{self._file.name}: its parquet footer has two schemas ({missing} differ); {CURE}",
                    path=self._file.path,
                )
            table = table.select(list(columns))
        return table.replace_schema_metadata(None)

    def _where(self, unit: Unit, columns: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the leaves of the columns, and the range of each."""
        wanted = tuple(columns)
        leaves = self._leaves.get(wanted)
        if leaves is None:
            leaves = self._leaves[wanted] = [leaf for leaf, _ in self._footer.leaves_of(wanted)]
        return leaves, [range_of(self._footer.metadata.row_group(unit.index).column(leaf)) for leaf in leaves]

    def read_head(self, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        """Return the first rows of the row group. Their bytes are counted later, with the rest.

        A few columns are decoded at a time: pages are large, and the next ones reuse the memory of the last.
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
                unit=unit,
                ranges=ranges,
                what=_describe(unit),
            )
            found.append(self._select(table, some))
        fields = [field for table in found for field in table.schema]
        return pa.table([column for table in found for column in table.columns], pa.schema(fields))

    def judge(self, units: Sequence[Unit], condition: Node, schema: pa.Schema) -> Mapping[int, Judged]:
        if self._tail is None or not statistics.have_bounds(self._footer.schema, schema):
            return {}
        large = [unit.index for unit in units if _is_large(self._footer.metadata.row_group(unit.index))]
        try:
            return self._paged().judge(large, condition, schema) if large else {}
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
            # The index or the pages are damaged. Reading without the index succeeds or reports the damage.
            self._tail = None
        return _cut(self.read(unit, columns), rows)

    def _read_pages(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> pa.Table:
        """Read the pages that contain these rows.

        Raises:
            IndexDamaged: The page index cannot be used.
            OSError, pa.ArrowException: A page cannot be read or decoded.
        """
        pages, schema = self._paged(), self._footer.schema
        choice = pages.choose(unit.index, columns, rows)
        made: dict[str, pa.ChunkedArray] = {}
        data, num_bytes = read_ranges(
            self._opened, [each for selection in choice.paged for each in selection.ranges], self._gap_bytes
        )
        left = iter(data)
        for selection in choice.paged:
            own = [next(left) for _ in selection.ranges]
            made[schema.names[selection.column]] = column = pages.decode(unit.index, selection, own, rows)
            _check_codes(column)
        self._count(num_bytes)
        if choice.whole:
            table = _cut(self.read(unit, [schema.names[column] for column in choice.whole]), rows)
            made |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.Table.from_arrays([made[name] for name in columns], schema=pa.schema(map(schema.field, columns)))

    def _paged(self) -> PagedFile:
        """Return the pages of the file.

        Raises:
            IndexDamaged: The file has no page index, or it cannot be used.
        """
        if self._tail is None:
            raise IndexDamaged("the file has no page index")
        if self._pages is None:
            tail = self._tail

            def read(ranges: Sequence[Range]) -> Sequence[bytes]:
                data, num_bytes = read_index(self._opened, tail, ranges)
                self._count(num_bytes)
                return data

            self._pages = PagedFile(tail.footer, self._footer.metadata, self._footer.schema, read)
        return self._pages

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        self._source.counter.add(num_bytes)

    def close(self) -> None:
        self._native.close()
        self._opened.close()

    def _open_native(self) -> LowLevelReader:
        # With round trips, the columns of a row group are fetched together in few large reads. Local files are read,
        # not memory-mapped: truncating a mapped file would kill the process.
        return open_parquet(
            self._opened,
            metadata=self._footer.metadata,
            memory_pool=pool(),
            pre_buffer=self._source.has_round_trips,
            verify_checksums=True,  # costs nothing for a file without checksums
        )

    def _decode(self, unit: Unit, leaves: list[int]) -> pa.Table:
        try:
            table = self._native.read_row_group(unit.index, column_indices=leaves, use_threads=False)
        except pa.ArrowNotImplementedError:
            table = self._decode_in_parts(unit, leaves)
        if table.num_rows != unit.num_rows:
            raise pa.ArrowInvalid(f"{table.num_rows} rows instead of {unit.num_rows}")
        for column in table.columns:
            _check_codes(column)
        return table

    def _decode_in_parts(self, unit: Unit, leaves: list[int]) -> pa.Table:
        """Decode lists and structs with more than 2 GiB of strings, which do not fit in one array of their type."""
        error: pa.ArrowNotImplementedError | None = None
        for num_parts in PARTS:
            native = self._open_native()
            num_rows = -(-unit.num_rows // num_parts)
            try:
                parts = native.iter_batches(num_rows, [unit.index], column_indices=leaves, use_threads=False)
                return pa.Table.from_batches(list(parts))
            except pa.ArrowNotImplementedError as still:
                error = still
        assert error is not None
        raise error

    def _decode_head(self, unit: Unit, leaves: list[int], num_rows: int) -> pa.Table:
        native = self._open_native()  # a reader that stops midway keeps its state
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


def _is_large(group: pq.RowGroupMetaData) -> bool:
    """Return whether skipping pages of some column could pay; otherwise decoding is faster than judging them."""
    sizes = (group.column(leaf).total_compressed_size for leaf in range(group.num_columns))
    return any(size >= parquet_pages.MIN_SAVED_BYTES for size in sizes)


def _check_codes(column: pa.ChunkedArray) -> None:
    """Check dictionary codes, which later code follows unchecked; those of a damaged page point anywhere."""
    if has_dictionaries(column.type):
        column.validate(full=True)


def _cut(table: pa.Table, rows: Sequence[Rows]) -> pa.Table:
    return pa.concat_tables([table.slice(first, num_rows) for first, num_rows in rows])


def _describe(unit: Unit) -> str:
    return f"row group {unit.index}, which begins with row {unit.first_row},"


def _rows_only(num_rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(num_rows)}).select([])
