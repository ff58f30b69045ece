"""What a Parquet file says of the pages in its column chunks, which pyarrow does not show.

A page is what is compressed and encoded on its own: some thousand rows of one column. Beside the footer there may be,
for every column chunk, an *offset index* (where its pages are, and with which row each begins) and a *column index*
(the least and the greatest value of each, and how many nulls). parquet-mr, and so Spark, writes them, pyarrow does if
asked.

All that is read is checked against what must hold: pages lie in their chunk one after the other, rows rise, lists have
an entry per page. What does not hold is `IndexDamaged`: then pages are not told apart, and nothing else changes.
Numbers of fields are those of `parquet.thrift`.
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
"""Column chunks of a file whose indexes are looked for: a footer is walked through in Python, some 10 µs for each."""
_REPEATED = 2
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Of values as statistics have them, by physical type: boolean, int32, int64, int96, float, double."""
_TEXT, _FIXED = 6, 7
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3


class Chunk(NamedTuple):
    """Where the indexes of one column chunk are."""

    metadata: int
    """Where its `ColumnMetaData` begins in the footer."""
    offset_index: Range | None
    column_index: Range | None


@dataclass(frozen=True, slots=True)
class Column:
    """A top-level column, as it is stored."""

    elements: tuple[bytes, ...]
    """Of the schema: its own and those of all that is nested in it."""
    leaves: range
    is_repeated: bool
    """Whether a row may have several values."""
    name: bytes
    kind: int
    """The physical type of a column that is not nested."""
    width: int | None
    """Bytes of such a value; None: they differ."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Of a footer, what pyarrow does not tell."""

    data: bytes
    columns: tuple[Column, ...]
    created_by: bytes
    orders: tuple[bytes, ...]
    """By which order each leaf's least and greatest value were found; none if it is not told."""
    groups: tuple[tuple[Chunk, ...], ...]
    """By row group, then by leaf."""


class Page(NamedTuple):
    offset: int
    num_bytes: int
    """With its header."""
    first_row: int
    """Of the row group's."""
    num_rows: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a column index says; one entry per page."""

    null_pages: Sequence[bool]
    """Whether all values are null; then there is no least and no greatest."""
    lows: Sequence[bytes]
    highs: Sequence[bytes]
    null_counts: Sequence[int] | None


class Header(NamedTuple):
    """What stands before a page's values."""

    num_bytes: int
    """Its own."""
    uncompressed_bytes: int
    compressed_bytes: int
    num_values: int
    num_rows: int | None
    """None: it does not tell."""


def read_footer(data: bytes) -> Footer:
    """
    Raises:
        IndexDamaged: It cannot be read, parts of it are encrypted or in other files, or it is too large.
    """
    scan = Scanner(data)
    chunks = 0

    def metadata() -> int:
        at = scan.at
        scan.raw()
        return at

    known = {
        1: (thrift.BINARY, _refused("it is in another file")),
        3: (thrift.STRUCT, metadata),
        4: (thrift.I64, scan.integer),
        5: (thrift.I32, scan.integer),
        6: (thrift.I64, scan.integer),
        7: (thrift.I32, scan.integer),
        8: (thrift.STRUCT, _refused("it is encrypted")),
    }

    def chunk() -> Chunk:
        nonlocal chunks
        chunks += 1
        if chunks > MAX_CHUNKS:
            raise IndexDamaged(f"there are more than {MAX_CHUNKS} column chunks")
        found = scan.struct(known)
        return Chunk(_needed(found, 3), _range(found, 4, 5), _range(found, 6, 7))

    def group() -> tuple[Chunk, ...]:
        listed = (thrift.LIST, lambda: tuple(chunk() for _ in range(scan.items(thrift.STRUCT))))
        made: tuple[Chunk, ...] = _needed(scan.struct({1: listed}), 1)
        return made

    found = scan.struct(
        {
            2: (thrift.LIST, scan.raws),
            4: (thrift.LIST, lambda: tuple(group() for _ in range(scan.items(thrift.STRUCT)))),
            6: (thrift.BINARY, scan.binary),
            7: (thrift.LIST, scan.raws),
            8: (thrift.STRUCT, _refused("it is encrypted")),
        }
    )
    columns = _columns(_needed(found, 2))
    num_leaves = columns[-1].leaves.stop if columns else 0
    if any(len(each) != num_leaves for each in _needed(found, 4)) or len(found.get(7, ())) not in (0, num_leaves):
        raise IndexDamaged("row groups have other columns than the schema")
    return Footer(data, columns, found.get(6, b""), tuple(found.get(7, ())), found[4])


def _range(found: dict[int, Any], offset: int, num_bytes: int) -> Range | None:
    if offset not in found or num_bytes not in found:
        return None
    made = Range(found[offset], found[num_bytes])
    return made if made.offset > 0 and made.num_bytes > 0 else None


def _columns(elements: Sequence[bytes]) -> tuple[Column, ...]:
    """Elements stand as a tree is walked, each before its children; the first is the root."""
    told = [_element(element) for element in elements]
    if not told:
        raise IndexDamaged("there is no schema")
    made: list[Column] = []
    leaf, at = 0, 1
    for _ in range(told[0].num_children):
        start, first_leaf = at, leaf
        left = 1
        while left:
            if at >= len(told):
                raise IndexDamaged("the schema ends within a column")
            num_children = told[at].num_children
            leaf += not num_children
            left += num_children - 1
            at += 1
        is_repeated = any(each.repetition == _REPEATED for each in told[start:at])
        top, leaves = told[start], range(first_leaf, leaf)
        made.append(Column(tuple(elements[start:at]), leaves, is_repeated, top.name, top.kind, _width(top)))
    if at != len(told):
        raise IndexDamaged("the schema goes on after its last column")
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
    """From an offset index. `chunk`: all bytes of the column chunk, its dictionary too.

    Raises:
        IndexDamaged: It cannot be of this chunk.
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
        # A page without rows would be one that begins within a row.
        if offset < end or num_bytes <= 0 or first_row >= end_row or (not pages and first_row != 0):
            raise IndexDamaged("pages do not follow one another")
        end = offset + num_bytes
        pages.append(Page(offset, num_bytes, first_row, end_row - first_row))
    if not pages or end > chunk.end:
        raise IndexDamaged("pages lie outside of their column chunk")
    return tuple(pages)


def read_bounds(data: bytes, pages: Sequence[Page], null_count: int | None, width: int | None) -> Bounds:
    """From a column index of a column that is not nested. `null_count`: what the footer says of all its pages. `width`:
    the bytes of each bound; pyarrow ends the process over one that is too short.

    Raises:
        IndexDamaged: It cannot be of these pages.
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
    made = Bounds(_needed(found, 1), _needed(found, 2), _needed(found, 3), found.get(5))
    if not len(made.null_pages) == len(made.lows) == len(made.highs) == len(pages):
        raise IndexDamaged("a column index has another number of pages")
    if width is not None:
        for low, high, is_null in zip(made.lows, made.highs, made.null_pages, strict=True):
            if not is_null and (len(low) != width or len(high) != width):
                raise IndexDamaged("a bound is no value of its column")
    counts = made.null_counts
    if counts is None:
        return made
    if len(counts) != len(pages) or (null_count is not None and sum(counts) != null_count):
        raise IndexDamaged("nulls are counted in two ways")
    for page, is_null, count in zip(pages, made.null_pages, counts, strict=True):
        if not 0 <= count <= page.num_rows or is_null != (count == page.num_rows):
            raise IndexDamaged("nulls are counted in two ways")
    return made


def read_header(data: bytes | memoryview) -> Header:
    """Of a data page.

    Raises:
        IndexDamaged: It is none.
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
        raise IndexDamaged(f"a page of kind {kind} stands where data should be")
    told = _needed(found, 5 if kind == _DATA_PAGE else 8)
    numbers = (_needed(found, 2), _needed(found, 3), _needed(told, 1), told.get(3, 0))
    if not all(0 <= number < 1 << 31 for number in numbers):
        raise IndexDamaged("a page has less than no values or bytes")
    return Header(scan.at, _needed(found, 2), _needed(found, 3), _needed(told, 1), told.get(3))


def range_of(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Of a column chunk, its dictionary included: where it begins, and its bytes."""
    first = chunk.data_page_offset
    dictionary = chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < first:
        first = dictionary
    return first, chunk.total_compressed_size


def read_chunk(footer: Footer, chunk: Chunk) -> tuple[int, list[int], list[bytes], int]:
    """Of a column chunk's metadata, what is the same for any of its pages: type, encodings, path, codec."""
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


def _refused(reason: str) -> Any:
    def refuse() -> None:
        raise IndexDamaged(reason)

    return refuse
