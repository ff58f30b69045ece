"""Pages of a Parquet file: which of them a filter rules out, and reading the others alone.

A filter is judged by the bounds of pages as it is by those of row groups: the rows between two page borders are to
`pruning.py` what a unit is. To read some pages of a column, which pyarrow cannot, they are copied as they are, with the
column's dictionary, between a new beginning and a new footer: a file of one column, which it can.

Pages of different columns begin with different rows. What is decoded is therefore cut to the rows that were asked for.
A page is read only if its header agrees with the index, in its length and its number of rows.
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
    Bounds,
    Chunk,
    Column,
    Footer,
    IndexDamaged,
    Page,
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
"""Of a column's bytes, and so many bytes: to read less than this for nothing is quicker than to pick pages."""
MIN_SAVED_BYTES = 64 << 10
MAX_SPANS = 200_000
"""Stretches of rows that are judged at once, about 10 µs each."""
MAX_INDEX_BYTES = 64 << 20
"""Of all indexes that are read at once."""
MAX_OPEN = 256
"""Stretches of a unit that are counted by decoding: each is a chunk of every column."""
_MARK = b"PAR1"
_ARROW_SCHEMA = b"ARROW:schema"
_VERSION = thrift.integer(2)


@dataclass(frozen=True, slots=True)
class Selection:
    """Pages of a column that has one leaf."""

    column: int
    dictionary: Range
    """What lies before the first page; empty if there is none."""
    pages: tuple[Page, ...]

    @property
    def ranges(self) -> list[Range]:
        return [self.dictionary, *(Range(page.offset, page.num_bytes) for page in self.pages)]

    @property
    def num_bytes(self) -> int:
        return self.dictionary.num_bytes + sum(page.num_bytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Choice:
    """How some rows of a row group are read."""

    paged: tuple[Selection, ...]
    whole: tuple[int, ...]
    """Columns whose chunks are read whole, and then cut."""
    saving: Saving


class PagedFile:
    """The pages of one open file. Used by one thread at a time."""

    def __init__(self, data: bytes, metadata: pq.FileMetaData, schema: pa.Schema, read: Read) -> None:
        """`data`: the footer. `schema`: as pyarrow understands it. `read`: gives the bytes of ranges of the file.

        Raises:
            IndexDamaged: Pages cannot be told apart in this file.
        """
        self._metadata = metadata
        self._schema = schema
        self._read = read
        self._footer: Footer = read_footer(data)
        self._pages: dict[tuple[int, int], tuple[Page, ...] | None] = {}
        footer = self._footer
        num_leaves = footer.columns[-1].leaves.stop if footer.columns else 0
        told = (len(footer.columns), num_leaves, len(footer.groups))
        if told != (len(schema), metadata.num_columns, metadata.num_row_groups):
            raise IndexDamaged("the footer is understood in two ways")

    # --- judging ---

    def judge(self, groups: Sequence[int], condition: Node, schema: pa.Schema) -> dict[int, Judged]:
        """What pages say about a filter, for row groups of which they say something. `schema`: as in
        `Format.presence`.
        """
        told = [self._footer.columns[number] for number in self._numbers(schema.names)]
        if any(len(column.elements) != 1 for column in told):
            return {}
        found = self._bounds(groups, told)
        spans: list[tuple[int, int, int]] = []
        places: list[list[tuple[Bounds, int] | None]] = [[] for _ in told]
        for group in groups:
            own = [found.get((group, column.leaves.start)) for column in told]
            pages = [
                self._pages.get((group, column.leaves.start)) if each else None
                for each, column in zip(own, told, strict=True)
            ]
            cuts = _cuts(pages, self._metadata.row_group(group).num_rows)
            if not len(cuts) or len(spans) + len(cuts) > MAX_SPANS:
                continue
            spans += [(group, first, end - first) for first, end in itertools.pairwise(cuts.tolist())]
            for each, bounds, there in zip(places, own, pages, strict=True):
                each += _places(bounds, there, cuts)
        if not spans:
            return {}
        stated = {
            name: parquet_statistics.of_pages(
                self._metadata.schema.column(column.leaves.start), each, schema.field(name).type
            )
            for name, column, each in zip(schema.names, told, places, strict=True)
        }
        answers = pruning.presence(condition, stated, len(spans))
        made: dict[int, Judged] = {}
        for group, few in itertools.groupby(zip(spans, answers, strict=True), key=lambda each: each[0][0]):
            judged = _judged([(first, num_rows, answer) for (_, first, num_rows), answer in few])
            if judged is not None:
                made[group] = judged
        return made

    def _bounds(self, groups: Sequence[int], columns: Sequence[Column]) -> dict[tuple[int, int], Bounds]:
        """By row group and leaf, where they are told and can be true."""
        widths = {column.leaves.start: column.width for column in columns}
        if not self._footer.orders:  # by which order bounds were found is not told
            return {}
        places = [(group, leaf) for group in groups for leaf in widths]
        wanted = {place: self._footer.groups[place[0]][place[1]].column_index for place in places}
        found = self._read_some({place: each for place, each in wanted.items() if each is not None})
        self._find_pages(list(found))
        made = {}
        for place, data in found.items():
            pages = self._pages[place]
            if pages is not None:
                statistics = self._metadata.row_group(place[0]).column(place[1]).statistics
                known = statistics is not None and statistics.has_null_count
                null_count = statistics.null_count if known else None
                try:
                    made[place] = read_bounds(data, pages, null_count, widths[place[1]])
                except IndexDamaged:
                    continue
        return made

    # --- choosing ---

    def choose(self, group: int, columns: Sequence[str], rows: Sequence[Rows]) -> Choice:
        """Which pages hold these rows of these columns, and whether it pays to pick them."""
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
            raise IndexDamaged("there are columns of the same name")
        return numbers

    def _find_pages(self, places: Sequence[tuple[int, int]]) -> None:
        """Of these (row group, leaf); None where they are not told."""
        new = [place for place in places if place not in self._pages]
        wanted = {place: self._footer.groups[place[0]][place[1]].offset_index for place in new}
        found = self._read_some({place: each for place, each in wanted.items() if each is not None})
        for place in new:
            self._pages[place] = None
            if place in found:
                group, leaf = place
                num_rows = self._metadata.row_group(group).num_rows
                try:
                    self._pages[place] = read_pages(found[place], self._chunk_range(group, leaf), num_rows)
                except IndexDamaged:
                    continue

    def _read_some(self, wanted: Mapping[tuple[int, int], Range]) -> dict[tuple[int, int], bytes]:
        if not wanted or sum(each.num_bytes for each in wanted.values()) > MAX_INDEX_BYTES:
            return {}
        return dict(zip(wanted, self._read(list(wanted.values())), strict=True))

    def _chunk_range(self, group: int, leaf: int) -> Range:
        return Range(*range_of(self._metadata.row_group(group).column(leaf)))

    # --- reading ---

    def decode(
        self, group: int, selection: Selection, data: Sequence[memoryview], rows: Sequence[Rows]
    ) -> pa.ChunkedArray:
        """These rows of a column. `data`: the bytes of the selection's ranges.

        Raises:
            IndexDamaged: Pages are not what the index says.
            OSError, pa.ArrowException: They cannot be decoded.
        """
        column = self._footer.columns[selection.column]
        dictionary, contents = data[0], data[1:]
        headers = [read_header(each) for each in contents]
        for page, header in zip(selection.pages, headers, strict=True):
            num_rows = header.num_rows if column.is_repeated else header.num_values
            has_place = header.num_bytes + header.compressed_bytes == page.num_bytes
            if not has_place or num_rows not in (page.num_rows, None) or header.num_values < page.num_rows:
                raise IndexDamaged("a page is not what its index says")
        runs = [list(range(len(contents)))]
        if any(header.num_rows is None for header in headers) and column.is_repeated:
            # Nothing tells the rows of a single page, so those of each run are counted when they are decoded.
            runs = _runs(selection.pages)
        chunk = self._footer.groups[group][column.leaves.start]
        decoded: list[pa.Array] = []
        for run in runs:
            num_rows = sum(selection.pages[place].num_rows for place in run)
            num_values = sum(headers[place].num_values for place in run)
            size = sum(headers[place].num_bytes + headers[place].uncompressed_bytes for place in run)
            made = self._column_file(
                selection.column, chunk, dictionary, [contents[place] for place in run], num_rows, num_values, size
            )
            decoded += _decoded(made, num_rows, self._schema.field(selection.column).type)
        return _cut(pa.chunked_array(decoded, self._schema.field(selection.column).type), selection.pages, rows)

    def _column_file(
        self,
        number: int,
        chunk: Chunk,
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
                # One more than there are, so that a row too many is noticed as well as one that is missing.
                (3, thrift.I64, thrift.integer(num_rows + 1)),
            ]
        )
        schema = pa.schema([self._schema.field(number)])
        return self._file([dictionary, *contents], [column], column.leaves, [group], num_rows + 1, schema)

    def _file(
        self,
        contents: Sequence[bytes | memoryview],
        columns: Sequence[Column],
        leaves: Sequence[int],
        groups: Sequence[bytes],
        num_rows: int,
        schema: pa.Schema,
    ) -> bytes:
        """A file of these columns; its types are understood as those of the file that they are from."""
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
    """The bytes of each, and how many were read for it: near ones come in one read.

    Raises:
        IndexDamaged: The file ends before.
        OSError: They cannot be had.
    """
    size = opened.size()
    if any(each.offset < 0 or each.num_bytes < 0 or each.end > size for each in ranges):
        raise IndexDamaged("an index leads out of the file")
    found: list[tuple[int, memoryview]] = []
    for each in coalesce(ranges, gap_bytes=gap_bytes):
        opened.seek(each.offset)
        data = memoryview(opened.read_buffer(each.num_bytes)).cast("B")
        if len(data) != each.num_bytes:
            raise IndexDamaged("the file has become shorter")
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
    """Where a page of any column begins, and the end; nothing where no column has several."""
    starts = [page.first_row for each in pages if each is not None for page in each]
    cuts = np.unique(np.array([*starts, num_rows], np.int64))
    return cuts if len(cuts) > 2 else cuts[:0]


def _places(
    bounds: Bounds | None, pages: Sequence[Page] | None, cuts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[tuple[Bounds, int] | None]:
    """For the rows from cut to cut: the bounds of the page that they are in, which are theirs too."""
    if bounds is None or pages is None:
        return [None] * (len(cuts) - 1)
    starts = np.array([page.first_row for page in pages])
    return [(bounds, place) for place in (np.searchsorted(starts, cuts[:-1], "right") - 1).tolist()]


def _judged(spans: Sequence[tuple[int, int, Presence]]) -> Judged | None:
    """None: every row may or may not pass, which is no news."""
    passing = join_rows([(first, num) for first, num, told in spans if told is Presence.ALL], len(spans))
    open_ = join_rows([(first, num) for first, num, told in spans if told is Presence.SOME], len(spans))
    if len(open_) > MAX_OPEN:
        passing, open_ = (), join_rows([*passing, *open_], MAX_OPEN)
    num_rows = sum(num for _, num, _ in spans)
    return None if open_ == ((0, num_rows),) else Judged(passing, open_)


def _holding(pages: Sequence[Page], rows: Sequence[Rows]) -> list[Page]:
    """The pages in which there are some of these rows."""
    starts = np.array([page.first_row for page in pages])
    kept = np.zeros(len(pages), np.bool_)
    for first, num_rows in rows:
        low = int(np.searchsorted(starts, first, "right")) - 1
        high = int(np.searchsorted(starts, first + num_rows, "left"))
        kept[low:high] = True
    return [pages[place] for place in np.flatnonzero(kept).tolist()]


def _runs(pages: Sequence[Page]) -> list[list[int]]:
    """Places of pages that follow one another."""
    made: list[list[int]] = []
    for place, page in enumerate(pages):
        if place and pages[place - 1].end_row == page.first_row:
            made[-1].append(place)
        else:
            made.append([place])
    return made


def _decoded(data: bytes, num_rows: int, kind: pa.DataType) -> list[pa.Array]:
    reader = open_parquet(pa.BufferReader(data), memory_pool=pool(), verify_checksums=True)
    column = reader.read_row_group(0, use_threads=False).column(0)
    if len(column) != num_rows or column.type != kind:
        raise IndexDamaged(f"{len(column)} rows of {column.type} instead of {num_rows} of {kind}")
    return list(column.chunks)


def _cut(column: pa.ChunkedArray, pages: Sequence[Page], rows: Sequence[Rows]) -> pa.ChunkedArray:
    """Of what the pages hold, these rows."""
    starts = np.array([page.first_row for page in pages])
    before = np.cumsum([0, *(page.num_rows for page in pages)])
    made: list[pa.Array] = []
    for first, num_rows in rows:
        page = int(np.searchsorted(starts, first, "right")) - 1
        made += column.slice(int(before[page]) + first - pages[page].first_row, num_rows).chunks
    return pa.chunked_array(made, column.type)
