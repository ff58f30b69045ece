"""Read the page index of a Parquet file, which pyarrow does not expose.

A page is a part of a column chunk that is compressed and encoded on its own: some thousand rows. Before the footer, a
file may contain for every column chunk an *offset index* (the offset and the first row of each page) and a *column
index* (minimum, maximum and null count of each page). parquet-mr, and therefore Spark, writes them; pyarrow does on
request.

Everything is validated: pages follow one another within their chunk, rows ascend, lists have one entry per page. A
violation raises `IndexDamaged`, after which the file is read without its page index. Field numbers are those of
`parquet.thrift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.data.formats.parquet import thrift
from strata.data.formats.parquet.thrift import Scanner, ThriftDamaged
from strata.data.source.ranges import Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.parquet as pq

IndexDamaged = ThriftDamaged

MAX_CHUNKS = 50_000
"""Maximum number of column chunks of a file whose index is read: Python scans the footer at about 10 µs per chunk."""
_REPEATED = 2
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value in statistics, by physical type: boolean, int32, int64, int96, float, double."""
_TEXT, _FIXED = 6, 7
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3


class ChunkIndexes(NamedTuple):
    """The locations of the indexes of one column chunk."""

    metadata: int
    """The offset of its `ColumnMetaData` in the footer."""
    offset_index: Range | None
    column_index: Range | None


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A top-level column as it is stored."""

    elements: tuple[bytes, ...]
    """Its own schema element and those of the columns nested in it."""
    leaves: range
    is_repeated: bool
    """Whether a row may have several values."""
    name: bytes
    kind: int
    """The physical type of a column that is not nested."""
    width: int | None
    """Bytes of a value of such a column; None if they vary."""


@dataclass(frozen=True, slots=True)
class IndexedFooter:
    """The parts of a footer that pyarrow does not expose."""

    data: bytes
    columns: tuple[StoredColumn, ...]
    created_by: bytes
    orders: tuple[bytes, ...]
    """The sort order of each leaf's bounds; empty if the file does not state them."""
    groups: tuple[tuple[ChunkIndexes, ...], ...]
    """StoredColumn chunks by row group and leaf."""


class Page(NamedTuple):
    offset: int
    num_bytes: int
    """The size with the header."""
    first_row: int
    """The first row, counted within the row group."""
    num_rows: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


@dataclass(frozen=True, slots=True)
class PageBounds:
    """The contents of a column index, with one entry per page."""

    null_pages: Sequence[bool]
    """Whether all values are null, so that there are no bounds."""
    lows: Sequence[bytes]
    highs: Sequence[bytes]
    null_counts: Sequence[int] | None


class Header(NamedTuple):
    """The header of a page."""

    num_bytes: int
    """The size of the header itself."""
    uncompressed_bytes: int
    compressed_bytes: int
    num_values: int
    num_rows: int | None
    """None if the header does not state it."""


def read_footer(data: bytes) -> IndexedFooter:
    """Parse a footer.

    Raises:
        IndexDamaged: It cannot be parsed, is partly encrypted or in other files, or is too large.
    """
    scan = Scanner(data)
    chunks = 0

    def metadata() -> int:
        at = scan.at
        scan.raw()
        return at

    known = {
        1: (thrift.BINARY, _refuse("a column chunk is in another file")),
        3: (thrift.STRUCT, metadata),
        4: (thrift.I64, scan.integer),
        5: (thrift.I32, scan.integer),
        6: (thrift.I64, scan.integer),
        7: (thrift.I32, scan.integer),
        8: (thrift.STRUCT, _refuse("a column chunk is encrypted")),
    }

    def chunk() -> ChunkIndexes:
        nonlocal chunks
        chunks += 1
        if chunks > MAX_CHUNKS:
            raise IndexDamaged(f"the file has more than {MAX_CHUNKS} column chunks")
        found = scan.struct(known)
        return ChunkIndexes(_needed(found, 3), _range(found, 4, 5), _range(found, 6, 7))

    def group() -> tuple[ChunkIndexes, ...]:
        listed = (thrift.LIST, lambda: tuple(chunk() for _ in range(scan.items(thrift.STRUCT))))
        made: tuple[ChunkIndexes, ...] = _needed(scan.struct({1: listed}), 1)
        return made

    found = scan.struct(
        {
            2: (thrift.LIST, scan.raws),
            4: (thrift.LIST, lambda: tuple(group() for _ in range(scan.items(thrift.STRUCT)))),
            6: (thrift.BINARY, scan.binary),
            7: (thrift.LIST, scan.raws),
            8: (thrift.STRUCT, _refuse("the file is encrypted")),
        }
    )
    columns = _columns(_needed(found, 2))
    num_leaves = columns[-1].leaves.stop if columns else 0
    if any(len(each) != num_leaves for each in _needed(found, 4)) or len(found.get(7, ())) not in (0, num_leaves):
        raise IndexDamaged("row groups and schema have different columns")
    return IndexedFooter(data, columns, found.get(6, b""), tuple(found.get(7, ())), found[4])


def _range(found: dict[int, Any], offset: int, num_bytes: int) -> Range | None:
    if offset not in found or num_bytes not in found:
        return None
    made = Range(found[offset], found[num_bytes])
    return made if made.offset > 0 and made.num_bytes > 0 else None


def _columns(elements: Sequence[bytes]) -> tuple[StoredColumn, ...]:
    """Return the columns of a schema, whose elements are stored depth first, beginning with the root."""
    parsed = [_element(element) for element in elements]
    if not parsed:
        raise IndexDamaged("the schema is empty")
    made: list[StoredColumn] = []
    leaf, at = 0, 1
    for _ in range(parsed[0].num_children):
        start, first_leaf = at, leaf
        left = 1
        while left:
            if at >= len(parsed):
                raise IndexDamaged("the schema ends within a column")
            num_children = parsed[at].num_children
            leaf += not num_children
            left += num_children - 1
            at += 1
        is_repeated = any(each.repetition == _REPEATED for each in parsed[start:at])
        top, leaves = parsed[start], range(first_leaf, leaf)
        made.append(StoredColumn(tuple(elements[start:at]), leaves, is_repeated, top.name, top.kind, _width(top)))
    if at != len(parsed):
        raise IndexDamaged("the schema continues after its last column")
    return tuple(made)


class _Element(NamedTuple):
    name: bytes
    num_children: int
    repetition: int
    kind: int
    fixed_width: int


def _width(element: _Element) -> int | None:
    if element.kind == _TEXT:
        return None
    return element.fixed_width if element.kind == _FIXED else _WIDTHS.get(element.kind, -1)


def _element(data: bytes) -> _Element:
    scan = Scanner(data)
    numbers = dict.fromkeys((1, 2, 3, 5), (thrift.I32, scan.integer))
    found = scan.struct({**numbers, 4: (thrift.BINARY, scan.binary)})
    num_children = found.get(5, 0)
    if not 0 <= num_children <= MAX_CHUNKS:
        raise IndexDamaged(f"a column has {num_children} children")
    return _Element(found.get(4, b""), num_children, found.get(3, 0), found.get(1, -1), found.get(2, -1))


def read_pages(data: bytes, chunk: Range, num_rows: int) -> tuple[Page, ...]:
    """Return the pages in an offset index. `chunk` is the range of the column chunk, dictionary included.

    Raises:
        IndexDamaged: The index does not fit this chunk.
    """
    scan = Scanner(data)

    def location() -> tuple[int, int, int]:
        found = scan.struct(
            {1: (thrift.I64, scan.integer), 2: (thrift.I32, scan.integer), 3: (thrift.I64, scan.integer)}
        )
        return _needed(found, 1), _needed(found, 2), _needed(found, 3)

    listed = (thrift.LIST, lambda: [location() for _ in range(scan.items(thrift.STRUCT))])
    locations: list[tuple[int, int, int]] = _needed(scan.struct({1: listed}), 1)
    pages: list[Page] = []
    ends = [*(first_row for _, _, first_row in locations[1:]), num_rows] if locations else []
    end = chunk.offset
    for (offset, num_bytes, first_row), end_row in zip(locations, ends, strict=True):
        # A page without rows would begin within a row.
        if offset < end or num_bytes <= 0 or first_row >= end_row or (not pages and first_row != 0):
            raise IndexDamaged("pages do not follow one another")
        end = offset + num_bytes
        pages.append(Page(offset, num_bytes, first_row, end_row - first_row))
    if not pages or end > chunk.end:
        raise IndexDamaged("pages lie outside their column chunk")
    return tuple(pages)


def read_bounds(data: bytes, pages: Sequence[Page], null_count: int | None, width: int | None) -> PageBounds:
    """Return the bounds in the column index of a flat column.

    `null_count` is that of the whole chunk in the footer. `width` is the size of each bound in bytes: pyarrow aborts
    the process on a bound that is too short.

    Raises:
        IndexDamaged: The index does not fit these pages.
    """
    scan = Scanner(data)
    found = scan.struct(
        {
            1: (thrift.LIST, scan.booleans),
            2: (thrift.LIST, scan.binaries),
            3: (thrift.LIST, scan.binaries),
            5: (thrift.LIST, scan.integers),
        }
    )
    made = PageBounds(_needed(found, 1), _needed(found, 2), _needed(found, 3), found.get(5))
    if not len(made.null_pages) == len(made.lows) == len(made.highs) == len(pages):
        raise IndexDamaged("a column index has another number of pages")
    if width is not None:
        for low, high, is_null in zip(made.lows, made.highs, made.null_pages, strict=True):
            if not is_null and (len(low) != width or len(high) != width):
                raise IndexDamaged("a bound does not have the size of its column's values")
    counts = made.null_counts
    if counts is None:
        return made
    if len(counts) != len(pages) or (null_count is not None and sum(counts) != null_count):
        raise IndexDamaged("null counts are inconsistent")
    for page, is_null, count in zip(pages, made.null_pages, counts, strict=True):
        if not 0 <= count <= page.num_rows or is_null != (count == page.num_rows):
            raise IndexDamaged("null counts are inconsistent")
    return made


def read_header(data: bytes | memoryview) -> Header:
    """Parse the header of a data page.

    Raises:
        IndexDamaged: The data does not begin with a data page.
    """
    scan = Scanner(data)
    version_1 = {1: (thrift.I32, scan.integer)}
    version_2 = {1: (thrift.I32, scan.integer), 3: (thrift.I32, scan.integer)}
    found = scan.struct(
        {
            1: (thrift.I32, scan.integer),
            2: (thrift.I32, scan.integer),
            3: (thrift.I32, scan.integer),
            5: (thrift.STRUCT, lambda: scan.struct(version_1)),
            8: (thrift.STRUCT, lambda: scan.struct(version_2)),
        }
    )
    kind = _needed(found, 1)
    if kind not in (_DATA_PAGE, _DATA_PAGE_V2):
        raise IndexDamaged(f"a page has the kind {kind}, not that of data")
    details = _needed(found, 5 if kind == _DATA_PAGE else 8)
    numbers = (_needed(found, 2), _needed(found, 3), _needed(details, 1), details.get(3, 0))
    if not all(0 <= number < 1 << 31 for number in numbers):
        raise IndexDamaged("a page has a negative number of values or bytes")
    return Header(scan.at, _needed(found, 2), _needed(found, 3), _needed(details, 1), details.get(3))


def range_of(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the offset and the bytes of a column chunk, dictionary included."""
    first = chunk.data_page_offset
    dictionary = chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < first:
        first = dictionary
    return first, chunk.total_compressed_size


def read_chunk(footer: IndexedFooter, chunk: ChunkIndexes) -> tuple[int, list[int], list[bytes], int]:
    """Return the type, encodings, path and codec of a column chunk, which all its pages share."""
    scan = Scanner(footer.data, chunk.metadata)
    found = scan.struct(
        {
            1: (thrift.I32, scan.integer),
            2: (thrift.LIST, scan.integers),
            3: (thrift.LIST, scan.binaries),
            4: (thrift.I32, scan.integer),
        }
    )
    return _needed(found, 1), _needed(found, 2), _needed(found, 3), _needed(found, 4)


def _needed(found: dict[int, Any], number: int) -> Any:
    if number not in found:
        raise IndexDamaged(f"field {number} is missing")
    return found[number]


def _refuse(reason: str) -> Any:
    def refuse() -> None:
        raise IndexDamaged(reason)

    return refuse
