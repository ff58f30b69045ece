"""Decide which pages of a Parquet file a filter excludes, and read only the others.

A filter is decided by the bounds of pages as by those of row groups: `pruning.py` treats the rows between two page
boundaries as a row group. pyarrow cannot read single pages of a column. So the pages are copied unchanged, with the
column's dictionary, between a new magic number and a new footer: a valid Parquet file of one column in memory, which
pyarrow decodes. This relies on the Parquet format only, not on pyarrow's internals.

Pages of different columns begin at different rows, so decoded columns are cut to the requested rows. A page is used
only if its header agrees with the index in length and number of rows, and the decoded column must have the stated
number of rows and the planned type. Otherwise `IndexDamaged` is raised, and the caller reads the row group without its
page index.
"""

from __future__ import annotations

import base64
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from strata.data.filter import pruning
from strata.data.filter.expression import Presence
from strata.data.formats.base import Judged, Saving, join_rows
from strata.data.formats.parquet import statistics as parquet_statistics
from strata.data.formats.parquet import thrift
from strata.data.formats.parquet.page_index import (
    ChunkIndex,
    IndexDamaged,
    IndexedFooter,
    Page,
    PageBounds,
    StoredColumn,
    range_of,
    read_bounds,
    read_chunk,
    read_footer,
    read_header,
    read_pages,
)
from strata.data.memory import pool
from strata.data.pyarrow_private import open_parquet
from strata.data.source.ranges import Range, coalesce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow.parquet as pq

    from strata.data.filter.expression import Node
    from strata.data.formats.base import Rows

    Read = Callable[[Sequence[Range]], Sequence[bytes]]

MIN_SAVED = 0.25
"""The share of a column's bytes to save, and at least `MIN_SAVED_BYTES`: selecting pages to save less does not pay."""
MIN_SAVED_BYTES = 64 << 10
MAX_SPANS = 200_000
"""Stretches of rows that are judged at once, about 10 µs each."""
MAX_INDEX_BYTES = 64 << 20
"""The limit for all indexes that are read at once."""
MAX_OPEN = 256
"""Stretches of a row group that are counted by decoding: each is a chunk of every column."""
_MARK = b"PAR1"
_ARROW_SCHEMA = b"ARROW:schema"
_VERSION = thrift.integer(2)


@dataclass(frozen=True, slots=True)
class Selection:
    """Some pages of a column that has one leaf."""

    column: int
    dictionary: Range
    """The bytes before the first page; empty if there are none."""
    pages: tuple[Page, ...]

    @property
    def ranges(self) -> list[Range]:
        return [self.dictionary, *(Range(page.offset, page.num_bytes) for page in self.pages)]

    @property
    def num_bytes(self) -> int:
        return self.dictionary.num_bytes + sum(page.num_bytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Choice:
    """How to read some rows of a row group."""

    paged: tuple[Selection, ...]
    whole: tuple[int, ...]
    """Columns whose chunks are read whole and then cut."""
    saving: Saving


class PagedFile:
    """The pages of one open file. Used by one thread at a time."""

    def __init__(self, data: bytes, metadata: pq.FileMetaData, schema: pa.Schema, read: Read) -> None:
        """`data` is the footer, `schema` pyarrow's schema of it, and `read` returns byte ranges of the file.

        Raises:
            IndexDamaged: The page index of this file cannot be used.
        """
        self._metadata = metadata
        self._schema = schema
        self._read = read
        self._footer: IndexedFooter = read_footer(data)
        self._pages: dict[tuple[int, int], tuple[Page, ...] | None] = {}
        footer = self._footer
        num_leaves = footer.columns[-1].leaves.stop if footer.columns else 0
        sizes = (len(footer.columns), num_leaves, len(footer.groups))
        if sizes != (len(schema), metadata.num_columns, metadata.num_row_groups):
            raise IndexDamaged("pyarrow parses the footer differently")

    # --- judging ---

    def judge(self, groups: Sequence[int], condition: Node, schema: pa.Schema) -> dict[int, Judged]:
        """Return what page bounds decide about a filter, by row group, where they decide anything.

        `schema` is that of `Format.presence`.
        """
        columns = [self._footer.columns[number] for number in self._numbers(schema.names)]
        if any(len(column.elements) != 1 for column in columns):
            return {}
        found = self._bounds(groups, columns)
        spans: list[tuple[int, int, int]] = []
        span_bounds: list[list[tuple[PageBounds, int] | None]] = [[] for _ in columns]
        for group in groups:
            own = [found.get((group, column.leaves.start)) for column in columns]
            pages = [
                self._pages.get((group, column.leaves.start)) if each else None
                for each, column in zip(own, columns, strict=True)
            ]
            cuts = _cuts(pages, self._metadata.row_group(group).num_rows)
            if not len(cuts) or len(spans) + len(cuts) > MAX_SPANS:
                continue
            spans += [(group, first, end - first) for first, end in itertools.pairwise(cuts.tolist())]
            for each, bounds, known in zip(span_bounds, own, pages, strict=True):
                each += _bounds_of_spans(bounds, known, cuts)
        if not spans:
            return {}
        stated = {
            name: parquet_statistics.of_pages(
                self._metadata.schema.column(column.leaves.start), each, schema.field(name).type
            )
            for name, column, each in zip(schema.names, columns, span_bounds, strict=True)
        }
        answers = pruning.presence(condition, stated, len(spans))
        made: dict[int, Judged] = {}
        for group, few in itertools.groupby(zip(spans, answers, strict=True), key=lambda each: each[0][0]):
            judged = _judged([(first, num_rows, answer) for (_, first, num_rows), answer in few])
            if judged is not None:
                made[group] = judged
        return made

    def _bounds(self, groups: Sequence[int], columns: Sequence[StoredColumn]) -> dict[tuple[int, int], PageBounds]:
        """Return page bounds by (row group, leaf), where they are stated and consistent."""
        widths = {column.leaves.start: column.width for column in columns}
        if not self._footer.orders:  # the sort order of the bounds is unknown
            return {}
        keys = [(group, leaf) for group in groups for leaf in widths]
        wanted = {key: self._footer.groups[key[0]][key[1]].column_index for key in keys}
        found = self._read_indexes({key: each for key, each in wanted.items() if each is not None})
        self._find_pages(list(found))
        made = {}
        for key, data in found.items():
            pages = self._pages[key]
            if pages is not None:
                statistics = self._metadata.row_group(key[0]).column(key[1]).statistics
                known = statistics is not None and statistics.has_null_count
                null_count = statistics.null_count if known else None
                try:
                    made[key] = read_bounds(data, pages, null_count, widths[key[1]])
                except IndexDamaged:
                    continue
        return made

    # --- choosing ---

    def choose(self, group: int, columns: Sequence[str], rows: Sequence[Rows]) -> Choice:
        """Return which pages contain these rows, and for which columns reading only those pays."""
        numbers = self._numbers(columns)
        stored = [self._footer.columns[number] for number in numbers]
        self._find_pages([(group, column.leaves.start) for column in stored if len(column.leaves) == 1])
        paged, whole = [], []
        saving = Saving()
        for number, column in zip(numbers, stored, strict=True):
            num_bytes = sum(self._chunk_range(group, leaf).num_bytes for leaf in column.leaves)
            pages = self._pages.get((group, column.leaves.start)) if len(column.leaves) == 1 else None
            if pages is None:
                whole.append(number)
                saving += Saving(num_bytes=num_bytes)
                continue
            chunk = self._chunk_range(group, column.leaves.start)
            selected = Selection(
                number, Range(chunk.offset, pages[0].offset - chunk.offset), tuple(_holding(pages, rows))
            )
            if num_bytes - selected.num_bytes >= max(MIN_SAVED * num_bytes, MIN_SAVED_BYTES):
                paged.append(selected)
                saving += Saving(
                    len(pages), len(pages) - len(selected.pages), num_bytes, num_bytes - selected.num_bytes
                )
            else:
                whole.append(number)
                saving += Saving(num_pages=len(pages), num_bytes=num_bytes)
        return Choice(tuple(paged), tuple(whole), saving)

    def _numbers(self, columns: Sequence[str]) -> list[int]:
        numbers = [self._schema.get_field_index(name) for name in columns]
        if any(number < 0 for number in numbers):
            raise IndexDamaged("two columns have the same name")
        return numbers

    def _find_pages(self, keys: Sequence[tuple[int, int]]) -> None:
        """Read the pages of these (row group, leaf) keys; None where the offset index is missing or damaged."""
        new = [key for key in keys if key not in self._pages]
        wanted = {key: self._footer.groups[key[0]][key[1]].offset_index for key in new}
        found = self._read_indexes({key: each for key, each in wanted.items() if each is not None})
        for key in new:
            self._pages[key] = None
            if key in found:
                group, leaf = key
                num_rows = self._metadata.row_group(group).num_rows
                try:
                    self._pages[key] = read_pages(found[key], self._chunk_range(group, leaf), num_rows)
                except IndexDamaged:
                    continue

    def _read_indexes(self, wanted: Mapping[tuple[int, int], Range]) -> dict[tuple[int, int], bytes]:
        if not wanted or sum(each.num_bytes for each in wanted.values()) > MAX_INDEX_BYTES:
            return {}
        return dict(zip(wanted, self._read(list(wanted.values())), strict=True))

    def _chunk_range(self, group: int, leaf: int) -> Range:
        return Range(*range_of(self._metadata.row_group(group).column(leaf)))

    # --- reading ---

    def decode(
        self, group: int, selection: Selection, data: Sequence[memoryview], rows: Sequence[Rows]
    ) -> pa.ChunkedArray:
        """Return these rows of a column. `data` holds the bytes of the selection's ranges.

        Raises:
            IndexDamaged: The pages contradict the index.
            OSError, pa.ArrowException: The pages cannot be decoded.
        """
        column = self._footer.columns[selection.column]
        dictionary, contents = data[0], data[1:]
        headers = [read_header(each) for each in contents]
        for page, header in zip(selection.pages, headers, strict=True):
            num_rows = header.num_rows if column.is_repeated else header.num_values
            has_size = header.num_bytes + header.compressed_bytes == page.num_bytes
            if not has_size or num_rows not in (page.num_rows, None) or header.num_values < page.num_rows:
                raise IndexDamaged("a page contradicts its index")
        runs = [list(range(len(contents)))]
        if any(header.num_rows is None for header in headers) and column.is_repeated:
            # The headers do not state the rows of a page, so decoding checks the rows of each run of pages.
            runs = _runs(selection.pages)
        chunk = self._footer.groups[group][column.leaves.start]
        decoded: list[pa.Array] = []
        for run in runs:
            num_rows = sum(selection.pages[index].num_rows for index in run)
            num_values = sum(headers[index].num_values for index in run)
            size = sum(headers[index].num_bytes + headers[index].uncompressed_bytes for index in run)
            made = self._column_file(
                selection.column, chunk, dictionary, [contents[index] for index in run], num_rows, num_values, size
            )
            decoded += _decode_file(made, num_rows, self._schema.field(selection.column).type)
        return _cut(pa.chunked_array(decoded, self._schema.field(selection.column).type), selection.pages, rows)

    def _column_file(
        self,
        number: int,
        chunk: ChunkIndex,
        dictionary: memoryview,
        contents: Sequence[memoryview],
        num_rows: int,
        num_values: int,
        num_uncompressed_bytes: int,
    ) -> bytes:
        column = self._footer.columns[number]
        kind, encodings, path, codec = read_chunk(self._footer, chunk)
        start = len(_MARK)
        num_bytes = len(dictionary) + sum(map(len, contents))
        metadata = [
            (1, thrift.I32, thrift.integer(kind)),
            (2, thrift.LIST, thrift.listed(thrift.I32, [thrift.integer(each) for each in encodings])),
            (3, thrift.LIST, thrift.listed(thrift.BINARY, [thrift.binary(each) for each in path])),
            (4, thrift.I32, thrift.integer(codec)),
            (5, thrift.I64, thrift.integer(num_values)),
            (6, thrift.I64, thrift.integer(num_uncompressed_bytes + len(dictionary))),
            (7, thrift.I64, thrift.integer(num_bytes)),
            (9, thrift.I64, thrift.integer(start + len(dictionary))),
        ]
        if dictionary:
            metadata.append((11, thrift.I64, thrift.integer(start)))
        columns = [thrift.struct([(2, thrift.I64, thrift.integer(0)), (3, thrift.STRUCT, thrift.struct(metadata))])]
        group = thrift.struct(
            [
                (1, thrift.LIST, thrift.listed(thrift.STRUCT, columns)),
                (2, thrift.I64, thrift.integer(num_uncompressed_bytes)),
                # One row too many, so that a surplus row is detected as well as a missing one.
                (3, thrift.I64, thrift.integer(num_rows + 1)),
            ]
        )
        schema = pa.schema([self._schema.field(number)])
        return self._file([dictionary, *contents], [column], column.leaves, [group], num_rows + 1, schema)

    def _file(
        self,
        contents: Sequence[bytes | memoryview],
        columns: Sequence[StoredColumn],
        leaves: Sequence[int],
        groups: Sequence[bytes],
        num_rows: int,
        schema: pa.Schema,
    ) -> bytes:
        """Return a file of these columns, with the type annotations of the original file."""
        footer = self._footer
        root = thrift.struct(
            [(4, thrift.BINARY, thrift.binary(b"schema")), (5, thrift.I32, thrift.integer(len(columns)))]
        )
        elements = [root, *(element for column in columns for element in column.elements)]
        fields = [
            (1, thrift.I32, _VERSION),
            (2, thrift.LIST, thrift.listed(thrift.STRUCT, elements)),
            (3, thrift.I64, thrift.integer(num_rows)),
            (4, thrift.LIST, thrift.listed(thrift.STRUCT, groups)),
        ]
        if _ARROW_SCHEMA in (self._metadata.metadata or {}):
            note = [
                (1, thrift.BINARY, thrift.binary(_ARROW_SCHEMA)),
                (2, thrift.BINARY, thrift.binary(base64.b64encode(schema.serialize()))),
            ]
            fields.append((5, thrift.LIST, thrift.listed(thrift.STRUCT, [thrift.struct(note)])))
        fields.append((6, thrift.BINARY, thrift.binary(footer.created_by)))
        if footer.orders:
            orders = [footer.orders[leaf] for leaf in leaves]
            fields.append((7, thrift.LIST, thrift.listed(thrift.STRUCT, orders)))
        end = thrift.struct(fields)
        return b"".join([_MARK, *contents, end, len(end).to_bytes(4, "little"), _MARK])


def read_ranges(opened: pa.NativeFile, ranges: Sequence[Range], gap_bytes: int) -> tuple[list[memoryview], int]:
    """Return the bytes of each range, and how many were read in all: close ranges are coalesced.

    Raises:
        IndexDamaged: A range lies outside the file.
        OSError: The bytes cannot be read.
    """
    size = opened.size()
    if any(each.offset < 0 or each.num_bytes < 0 or each.end > size for each in ranges):
        raise IndexDamaged("an index points outside the file")
    found: list[tuple[int, memoryview]] = []
    for each in coalesce(ranges, gap_bytes=gap_bytes):
        opened.seek(each.offset)
        data = memoryview(opened.read_buffer(each.num_bytes)).cast("B")
        if len(data) != each.num_bytes:
            raise IndexDamaged("the file was truncated")
        found.append((each.offset, data))
    offsets = [offset for offset, _ in found]
    made = []
    for each in ranges:
        if not each.num_bytes:
            made.append(memoryview(b""))
            continue
        offset, data = found[bisect_right(offsets, each.offset) - 1]
        made.append(data[each.offset - offset : each.end - offset])
    return made, sum(len(data) for _, data in found)


# --- rows ---


def _cuts(pages: Sequence[Sequence[Page] | None], num_rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the first rows of the pages of all columns, and the end; empty if no column has several pages."""
    starts = [page.first_row for each in pages if each is not None for page in each]
    cuts = np.unique(np.array([*starts, num_rows], np.int64))
    return cuts if len(cuts) > 2 else cuts[:0]


def _bounds_of_spans(
    bounds: PageBounds | None, pages: Sequence[Page] | None, cuts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[tuple[PageBounds, int] | None]:
    """Return, for the rows between two cuts, the bounds of the page that contains them."""
    if bounds is None or pages is None:
        return [None] * (len(cuts) - 1)
    starts = np.array([page.first_row for page in pages])
    return [(bounds, index) for index in (np.searchsorted(starts, cuts[:-1], "right") - 1).tolist()]


def _judged(spans: Sequence[tuple[int, int, Presence]]) -> Judged | None:
    """Return the decision about a row group; None if it decides nothing."""
    passing = join_rows([(first, num) for first, num, presence in spans if presence is Presence.ALL], len(spans))
    open_ = join_rows([(first, num) for first, num, presence in spans if presence is Presence.SOME], len(spans))
    if len(open_) > MAX_OPEN:
        passing, open_ = (), join_rows([*passing, *open_], MAX_OPEN)
    num_rows = sum(num for _, num, _ in spans)
    return None if open_ == ((0, num_rows),) else Judged(passing, open_)


def _holding(pages: Sequence[Page], rows: Sequence[Rows]) -> list[Page]:
    """Return the pages that contain some of these rows."""
    starts = np.array([page.first_row for page in pages])
    kept = np.zeros(len(pages), np.bool_)
    for first, num_rows in rows:
        low = int(np.searchsorted(starts, first, "right")) - 1
        high = int(np.searchsorted(starts, first + num_rows, "left"))
        kept[low:high] = True
    return [pages[index] for index in np.flatnonzero(kept).tolist()]


def _runs(pages: Sequence[Page]) -> list[list[int]]:
    """Return the indexes of pages, grouped by runs of adjacent pages."""
    made: list[list[int]] = []
    for index, page in enumerate(pages):
        if index and pages[index - 1].end_row == page.first_row:
            made[-1].append(index)
        else:
            made.append([index])
    return made


def _decode_file(data: bytes, num_rows: int, kind: pa.DataType) -> list[pa.Array]:
    reader = open_parquet(pa.BufferReader(data), memory_pool=pool(), verify_checksums=True)
    column = reader.read_row_group(0, use_threads=False).column(0)
    if len(column) != num_rows or column.type != kind:
        raise IndexDamaged(f"the pages have {len(column)} rows of {column.type}, not {num_rows} of {kind}")
    return list(column.chunks)


def _cut(column: pa.ChunkedArray, pages: Sequence[Page], rows: Sequence[Rows]) -> pa.ChunkedArray:
    """Return these rows of the decoded pages."""
    starts = np.array([page.first_row for page in pages])
    before = np.cumsum([0, *(page.num_rows for page in pages)])
    made: list[pa.Array] = []
    for first, num_rows in rows:
        page = int(np.searchsorted(starts, first, "right")) - 1
        made += column.slice(int(before[page]) + first - pages[page].first_row, num_rows).chunks
    return pa.chunked_array(made, column.type)
