"""Thrift's compact protocol and page indexes round-trip, and invalid bytes are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.formats.parquet import thrift
from strata.data.formats.parquet.page_index import read_bounds, read_footer, read_header, read_pages
from strata.data.formats.parquet.thrift import Scanner, ThriftDamaged
from strata.data.source.ranges import Range

numbers = st.integers(-(2**63), 2**63 - 1)


@given(numbers)
def test_integers_are_read_as_they_were_written(number: int) -> None:
    assert Scanner(thrift.integer(number)).integer() == number


@given(st.binary(max_size=300), st.lists(numbers, max_size=20), st.lists(st.binary(max_size=5), max_size=20))
def test_a_struct_round_trips_and_unknown_fields_are_skipped(
    data: bytes, integers: list[int], binaries: list[bytes]
) -> None:
    inner = thrift.struct([(1, thrift.I64, thrift.integer(7)), (40, thrift.BINARY, thrift.binary(data))])
    written = thrift.struct(
        [
            (1, thrift.BINARY, thrift.binary(data)),
            (2, thrift.LIST, thrift.listed(thrift.I64, [thrift.integer(each) for each in integers])),
            (3, thrift.LIST, thrift.listed(thrift.BINARY, [thrift.binary(each) for each in binaries])),
            (5, thrift.STRUCT, inner),
            (6, thrift.TRUE, b""),
            (7, thrift.DOUBLE, bytes(8)),
            (8, thrift.MAP, b"\x01" + bytes([thrift.I32 << 4 | thrift.BINARY]) + b"\x02" + thrift.binary(data)),
            (90, thrift.LIST, thrift.listed(thrift.STRUCT, [inner] * 20)),
        ]
    )
    scan = Scanner(written + b"more")
    assert scan.struct({2: (thrift.LIST, scan.integers), 5: (thrift.STRUCT, scan.raw)}) == {2: integers, 5: inner}
    assert scan.at == len(written)
    scan = Scanner(written)
    found = scan.struct(
        {1: (thrift.BINARY, scan.binary), 3: (thrift.LIST, scan.binaries), 90: (thrift.LIST, scan.raws)}
    )
    assert found == {1: data, 3: binaries, 90: [inner] * 20}


@given(st.data())
def test_a_truncated_struct_is_damaged(data: st.DataObject) -> None:
    written = thrift.struct([(1, thrift.BINARY, thrift.binary(b"word")), (2, thrift.I64, thrift.integer(1 << 40))])
    scan = Scanner(written[: data.draw(st.integers(0, len(written) - 1))])
    with pytest.raises(ThriftDamaged):
        scan.struct({2: (thrift.I64, scan.integer)})


@pytest.mark.parametrize(
    "data",
    [
        b"\x1c" * 1000,  # nested structs
        b"\x19" + b"\x19" * 1000,  # nested lists
        b"\x16" + b"\xff" * 20,  # an endless number
        b"\x18\xff\xff\xff\xff\x0f",  # 4 GiB of text
        b"\x19\xf5\xff\xff\xff\xff\x0f",  # 4 billion numbers
        b"\x1b\xff\xff\xff\xff\x0f\x55",  # 4 billion pairs
        b"\x1e\x00",  # an unknown type
        b"\x06\x01\x00",  # a negative field number
    ],
)
def test_endless_values_are_damaged(data: bytes) -> None:
    with pytest.raises(ThriftDamaged):
        Scanner(data).struct({})


@given(st.one_of(st.binary(max_size=200), st.lists(st.integers(0, 63), max_size=200).map(bytes)))
def test_arbitrary_bytes_are_parsed_or_damaged(data: bytes) -> None:
    pages = read_pages(PAGES, Range(4, 300), 30)
    for read in (
        lambda: Scanner(data).struct({}),
        lambda: read_footer(data),
        lambda: read_header(data),
        lambda: read_pages(data, Range(4, 300), 30),
        lambda: read_bounds(data, pages, 3, 1),
    ):
        try:
            read()
        except ThriftDamaged:
            continue


# --- indexes ---


def locations(*pages: tuple[int, int, int]) -> bytes:
    items = [
        thrift.struct(
            [
                (1, thrift.I64, thrift.integer(offset)),
                (2, thrift.I32, thrift.integer(num_bytes)),
                (3, thrift.I64, thrift.integer(first_row)),
            ]
        )
        for offset, num_bytes, first_row in pages
    ]
    return thrift.struct([(1, thrift.LIST, thrift.listed(thrift.STRUCT, items))])


PAGES = locations((10, 90, 0), (100, 100, 10), (200, 104, 25))


def test_pages_are_read_from_an_offset_index() -> None:
    pages = read_pages(PAGES, Range(4, 300), 30)
    assert [tuple(page) for page in pages] == [(10, 90, 0, 10), (100, 100, 10, 15), (200, 104, 25, 5)]


@pytest.mark.parametrize(
    "data",
    [
        locations(),
        locations((3, 90, 0)),  # before its chunk
        locations((10, 295, 0)),  # after its chunk
        locations((10, 90, 0), (99, 90, 10)),  # overlapping pages
        locations((10, 90, 1)),  # does not begin with row 0
        locations((10, 90, 0), (100, 90, 30)),  # a page without rows
        locations((10, 90, 0), (100, 90, 20), (200, 90, 10)),  # descending rows
        locations((10, 0, 0)),
        locations((10, -5, 0)),
        locations((-10, 90, 0)),
    ],
)
def test_inconsistent_pages_are_rejected(data: bytes) -> None:
    with pytest.raises(ThriftDamaged):
        read_pages(data, Range(4, 300), 30)


def bounds(null_pages: list[bool], num_lows: int, null_counts: list[int] | None, low: bytes = b"x") -> bytes:
    values = thrift.listed(thrift.BINARY, [thrift.binary(low), *[thrift.binary(b"x")] * (num_lows - 1)])
    flags = [bytes([thrift.TRUE if each else thrift.FALSE]) for each in null_pages]
    fields = [(1, thrift.LIST, thrift.listed(thrift.TRUE, flags)), (2, thrift.LIST, values), (3, thrift.LIST, values)]
    fields.append((4, thrift.I32, thrift.integer(0)))
    if null_counts is not None:
        counts = [thrift.integer(each) for each in null_counts]
        fields.append((5, thrift.LIST, thrift.listed(thrift.I64, counts)))
    return thrift.struct(fields)


@pytest.mark.parametrize("null_counts", [None, [3, 0, 5]])
def test_bounds_are_read_from_a_column_index(null_counts: list[int] | None) -> None:
    found = read_bounds(bounds([False, False, True], 3, null_counts), read_pages(PAGES, Range(4, 300), 30), 8, 1)
    assert (found.null_pages, found.lows, found.highs) == ([False, False, True], [b"x"] * 3, [b"x"] * 3)
    assert found.null_counts == null_counts


@pytest.mark.parametrize(
    "data",
    [
        bounds([False, False], 2, None),  # two entries for three pages
        bounds([False, False, True], 2, None),
        bounds([False, False, True], 3, [3, 0]),
        bounds([False, False, True], 3, [3, 1, 5]),  # not the sum in the footer
        bounds([False, False, True], 3, [4, 0, 4]),  # not all rows of the null page
        bounds([False, False, False], 3, [3, 0, 5]),
        bounds([False, False, False], 3, [9, -1, 0]),
        bounds([False, False, True], 3, [3, 0, 5], low=b""),  # an empty bound
        bounds([False, False, True], 3, [3, 0, 5], low=b"xx"),
    ],
)
def test_inconsistent_bounds_are_rejected(data: bytes) -> None:
    with pytest.raises(ThriftDamaged):
        read_bounds(data, read_pages(PAGES, Range(4, 300), 30), 8, 1)
