"""Read the footer of a Parquet file: one read of the file's end gives the rows, column sizes and statistics.

The hash of the footer is the file's version. The footer contains offsets, sizes, encodings and statistics of every
column chunk, so different contents have different footers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import xxhash

from strata.data.formats.base import Unit
from strata.data.formats.damage import CURE, NUM_HEAD_BYTES, UNDECODED, undecodable, wrong_format
from strata.data.formats.parquet import statistics as parquet_statistics
from strata.data.formats.parquet.chunks import FooterDamaged, hidden_leaves
from strata.data.formats.parquet.page_index import MAX_CHUNKS, range_of
from strata.data.formats.parquet.pages import read_ranges
from strata.data.pyarrow_private import open_parquet
from strata.data.source.ranges import GAP_BYTES, Range
from strata.data.source.source import translate_errors
from strata.errors import DataFileChanged, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow.parquet as pq

    from strata.data.pyarrow_private import LowLevelReader
    from strata.data.source.source import DataFile, Source

TAIL_BYTES = 64 << 10
"""Contains the footer of most files: about 70 column chunks with statistics fit in 8 KiB."""
MAX_FOOTER_BYTES = 512 << 20
_MARK = b"PAR1"
_ENCRYPTED_MARK = b"PARE"
_END_BYTES = 8
"""The length of the footer and the magic number."""
_NUM_PROBED = 8
"""Columns that are checked for a page index."""


class ParquetTail:
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


def read_tail(source: Source, file: DataFile, opened: pa.NativeFile, *, version: str | None = None) -> ParquetTail:
    """Read the footer and some bytes before it, in one read, or two if it is large.

    Raises:
        DataFileInvalid: The file does not end in a Parquet footer.
        DataFileChanged: The footer does not have this version.
    """
    with translate_errors(file.name):
        size = opened.size()
        data = opened.read_at(min(size, TAIL_BYTES), max(0, size - TAIL_BYTES))
    if version is not None and size != file.size_bytes:
        raise _changed(file, size)
    num_read = len(data)
    if size < len(_MARK) + _END_BYTES or not data.endswith(_MARK):
        if version is not None:
            raise _changed(file, size)
        with translate_errors(file.name):
            head = opened.read_at(min(size, NUM_HEAD_BYTES), 0)
        raise _not_parquet(file, size, head, data)
    num_footer_bytes = int.from_bytes(data[-_END_BYTES:-4], "little")
    needed = num_footer_bytes + _END_BYTES
    if needed > size - len(_MARK) or num_footer_bytes > MAX_FOOTER_BYTES:
        raise DataFileInvalid(
            f"{file.name}: its parquet footer should have {num_footer_bytes} bytes, "
            f"but the file has {size} and the limit is {MAX_FOOTER_BYTES}; {CURE}",
            path=file.path,
        )
    if needed > len(data):
        with translate_errors(file.name):
            data = opened.read_at(needed, size - needed)
        num_read += len(data)
    source.counter.add(num_read)
    tail = ParquetTail(data, num_footer_bytes, num_read)
    if version is not None and tail.version != version:
        raise _changed(file, size)
    return tail


def _changed(file: DataFile, size: int) -> DataFileChanged:
    return DataFileChanged(
        f"{file.name} has changed since it was planned: it had {file.size_bytes} bytes and now has {size}, "
        "or its footer differs; create the dataset again, and write new data to new files",
        path=file.path,
    )


def _not_parquet(file: DataFile, size: int, head: bytes, data: bytes) -> DataFileInvalid:
    if data.endswith(_ENCRYPTED_MARK):
        return DataFileInvalid(
            f"{file.name} is a parquet file with an encrypted footer; decrypt it first", path=file.path
        )
    if head.startswith(_MARK):
        return DataFileInvalid(
            f"{file.name} ({size} bytes) begins as a parquet file but does not end as one: it was truncated, "
            f"or its writer did not finish; {CURE}",
            path=file.path,
        )
    return wrong_format(file, size, head, "a parquet")


def read_index(opened: pa.NativeFile, tail: ParquetTail, ranges: Sequence[Range]) -> tuple[list[bytes], int]:
    """Return ranges of a page index, and the number of bytes read for them.

    The index precedes the footer, so the tail usually contains it already.
    """
    size = opened.size()
    start = size - len(tail.data)
    if all(start <= each.offset and each.end <= size for each in ranges):
        return [tail.data[each.offset - start : each.end - start] for each in ranges], 0
    found, num_bytes = read_ranges(opened, ranges, GAP_BYTES)
    return [bytes(each) for each in found], num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """The columns of a file. Files of a dataset mostly share them, and comparing is faster than converting."""

    stored: pq.ParquetSchema
    key_values: Mapping[bytes, bytes] | None
    """The key-value metadata of the footer, which contains Arrow's own schema."""
    schema: pa.Schema
    names: list[str]
    flat: frozenset[int]
    """Columns that are not nested."""


_last_shape: _Shape | None = None
"""The last shape that any thread has read."""


def _shape_of(native: LowLevelReader) -> _Shape:
    global _last_shape  # noqa: PLW0603 - always replaced as a whole, and compared before use
    last, stored, key_values = _last_shape, native.metadata.schema, native.metadata.metadata
    if last is not None and last.key_values == key_values and last.stored.equals(stored):
        return last
    schema = native.schema_arrow.remove_metadata()
    flat = frozenset(number for number, kind in enumerate(schema.types) if not parquet_statistics.is_nested(kind))
    _last_shape = shape = _Shape(stored, key_values, schema, schema.names, flat)
    return shape


class Footer:
    """A parsed footer: the columns that users see, and the leaves (stored columns) they consist of."""

    __slots__ = ("_file", "flat", "hidden", "metadata", "names", "schema")

    def __init__(self, file: DataFile, tail: ParquetTail) -> None:
        # `pq.read_metadata` does the same, and then spends half as much again on the paths of all columns, which
        # matters for a plan of 10,000 files.
        try:
            native = open_parquet(pa.BufferReader(tail.data))
            self.hidden = hidden_leaves(tail.footer, tail.version)
            """Leaves whose chunks are encrypted, which pyarrow must not access."""
            self.metadata: pq.FileMetaData = native.metadata
            shape = _shape_of(native)
            self.schema: pa.Schema = shape.schema
            self.names: list[str] = shape.names
            self.flat = shape.flat
        except (*UNDECODED, FooterDamaged) as error:
            raise undecodable(f"{file.name}: its parquet footer", error, file=file) from error
        self._file = file

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """The (leaf, column) pairs of all columns.

        Raises:
            DataFileInvalid: A leaf is encrypted, or the leaves do not match the schema.
        """
        return self._check_readable(self._leaves())

    def _leaves(self) -> list[tuple[int, int]]:
        schema, num_leaves = self.schema, self.metadata.num_columns
        if len(schema) == num_leaves:  # every column has at least one leaf
            return [(leaf, leaf) for leaf in range(num_leaves)]
        columns = [index for index, kind in enumerate(schema.types) for _ in range(_num_leaves(kind))]
        if len(columns) != num_leaves:
            raise DataFileInvalid(
                f"{self._file.name}: {num_leaves} columns are stored but the schema has {len(columns)}; {CURE}",
                path=self._file.path,
            )
        return list(enumerate(columns))

    def leaves_of(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return the (leaf, column) pairs of some columns."""
        wanted = {self.schema.get_field_index(name) for name in names}
        return self._check_readable([(leaf, column) for leaf, column in self._leaves() if column in wanted])

    def _check_readable(self, leaves: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if self.hidden and (encrypted := {column: None for leaf, column in leaves if leaf in self.hidden}):
            named = ", ".join(repr(self.names[column]) for column in encrypted)
            raise DataFileInvalid(
                f"{self._file.name}: encrypted columns ({named}) cannot be read; decrypt the file first, or select "
                "the unencrypted columns with columns=",
                path=self._file.path,
            )
        return leaves

    def ranges_of(self, index: int, names: Sequence[str]) -> list[Range]:
        """Return the byte ranges of these columns of a row group."""
        group = self.metadata.row_group(index)
        return [Range(*range_of(group.column(leaf))) for leaf, _ in self.leaves_of(names)]


def _num_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _num_leaves(kind.storage_type)
    if not kind.num_fields:
        return 1
    return sum(_num_leaves(kind.field(index).type) for index in range(kind.num_fields))


def units_of(footer: Footer, leaves: Sequence[int] | None) -> tuple[Unit, ...]:
    """Return the row groups with the bytes of these leaves, or of all leaves for None."""
    metadata = footer.metadata
    units = []
    first_row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        num_rows = group.num_rows
        if not num_rows:
            continue
        first = 0 if not footer.hidden else next((leaf for leaf in leaves or () if leaf not in footer.hidden), None)
        offset = range_of(group.column(first))[0] if first is not None else 0
        num_bytes = _span(group) if leaves is None else 0
        if num_bytes <= 0:
            chosen = range(metadata.num_columns) if leaves is None else leaves
            num_bytes = sum(group.column(leaf).total_compressed_size for leaf in chosen)
        units.append(Unit(index, num_rows, first_row, offset, num_bytes))
        first_row += num_rows
    return tuple(units)


def _span(group: pq.RowGroupMetaData) -> int:
    """Return the bytes from the first to the end of the last column; 0 or less if the columns have another order.

    Writers store columns one after the other, and asking each for its size would take a tenth of planning time.
    """
    first, (last, num_bytes) = range_of(group.column(0))[0], range_of(group.column(group.num_columns - 1))
    return last + num_bytes - first


def null_counts(footer: Footer, leaves: list[tuple[int, int]]) -> dict[str, int]:
    """Return the null counts of the columns of these leaves, where statistics state them."""
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


def has_pages(footer: Footer) -> bool:
    """Return whether the file may have a page index. Writers write it for all columns or for none."""
    metadata = footer.metadata
    if not metadata.num_row_groups or metadata.num_row_groups * metadata.num_columns > MAX_CHUNKS or footer.hidden:
        return False
    group = metadata.row_group(0)
    return any(group.column(leaf).has_offset_index for leaf in range(min(metadata.num_columns, _NUM_PROBED)))
