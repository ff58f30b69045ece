"""The tail of ORC files, as pyarrow writes them and as nobody should."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import math

import pyarrow as pa
import pyarrow.orc as paorc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.formats.orc_tail import (
    INTEGERS,
    OrcTail,
    Postscript,
    Statistics,
    TailDamaged,
    decompressed,
    fields,
    parse_postscript,
    parse_statistics,
    parse_stripe_footer,
    parse_tail,
)

NUM_ROWS = 30_000


def written(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    paorc.write_table(table, sink, **options)
    return sink.getvalue()


def tail_of(data: bytes) -> OrcTail:
    postscript = parse_postscript(memoryview(data)[-256:], len(data))
    return parse_tail(memoryview(data)[-postscript.tail_bytes :], postscript, len(data))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rows = range(NUM_ROWS)
    return pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "nested": pa.array([{"a": row, "b": [str(row)]} for row in rows]),
            "word": [None if row % 10 == 0 else f"w{row:06}" for row in rows],
        }
    )


@pytest.mark.parametrize("compression", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_stripes_are_where_they_are_and_have_the_rows_they_have(table: pa.Table, compression: str) -> None:
    data = written(table, compression=compression, stripe_size=1)
    tail, native = tail_of(data), paorc.ORCFile(pa.BufferReader(data))
    assert len(tail.stripes) == native.nstripes >= (1 if compression == "zstd" else 2)
    assert [stripe.num_rows for stripe in tail.stripes] == [
        native.read_stripe(index, columns=["id"]).num_rows for index in range(native.nstripes)
    ]
    assert tail.num_rows == NUM_ROWS
    assert tail.column_ids == {"id": range(1, 2), "nested": range(2, 6), "word": range(6, 7)}
    first, end = 3, len(data) - tail.postscript.tail_bytes
    for stripe in tail.stripes:
        assert stripe.offset == first
        first += stripe.num_bytes
        footer = memoryview(data)[stripe.footer_offset : first]
        streams = parse_stripe_footer(footer, tail.postscript, stripe)
        assert {stream.column for stream in streams} <= set(range(7))
        assert sum(stream.num_bytes for stream in streams) == stripe.index_bytes + stripe.data_bytes
        assert sum(stream.num_bytes for stream in streams if stream.is_index) == stripe.index_bytes
    assert first == end
    statistics = tail.stripe_statistics([1, 6])
    assert statistics[0][1].low == 0
    assert statistics[-1][1].high == NUM_ROWS - 1
    assert sum(each[6].num_values for each in statistics) == NUM_ROWS * 9 // 10


def test_statistics_are_those_of_the_rows() -> None:
    day = dt.date(2026, 1, 1)
    time = dt.datetime(1960, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001
    table = pa.table(
        {
            "int": pa.array([-3, None, 2**62], pa.int64()),
            "float": [0.5, -2.0, 8.0],
            "nan": [0.5, math.nan, 8.0],
            "word": ["b", "ä", "a"],
            "bool": [True, True, True],
            "bools": [False, None, True],
            "day": [day, day, None],
            "time": pa.array([time, time, time], pa.timestamp("us")),
            "nothing": pa.array([None] * 3, pa.int64()),
        }
    )
    tail = tail_of(written(table))
    (found,) = tail.stripe_statistics(list(range(1, 10)))
    days = (day - dt.date(1970, 1, 1)).days
    moment_ns = table["time"].cast(pa.timestamp("ns")).cast(pa.int64())[0].as_py()
    assert found[1] == Statistics(2, True, -3, 2**62)
    assert found[2] == Statistics(3, False, -2.0, 8.0)
    assert found[3] == Statistics(3, False)
    assert found[4] == Statistics(3, False, "a", "ä")
    assert found[5] == Statistics(3, False, True, True)
    assert found[6] == Statistics(2, True, False, True)
    assert found[7] == Statistics(2, True, days, days)
    assert found[8].low is not None
    assert found[8].low <= moment_ns <= found[8].high
    assert found[9] == Statistics(0, True)
    assert tail.file_statistics(1) == found[1]
    assert tail.file_statistics(99) is None


def test_statistics_of_the_first_writers_are_not_believed() -> None:
    tail = tail_of(written(pa.table({"id": [1, 2]})))
    old = OrcTail(
        postscript=Postscript(0, 0, "none", 1 << 18, 0, 0),
        num_rows=2,
        stripes=tail.stripes,
        column_ids=tail.column_ids,
        kinds=tail.kinds,
        version="",
        _file_statistics=(memoryview(b""),) * 2,
        _metadata=memoryview(b"\x0a\x00"),
    )
    assert old.stripe_statistics([1]) == [{}]
    assert old.file_statistics(1) is None


def test_bounds_without_a_word_about_nulls_allow_them() -> None:
    found = parse_statistics(memoryview(b"\x08\x02\x12\x04\x08\x01\x10\x04"), min(INTEGERS), has_utc=True)
    assert found == Statistics(2, True, -1, 2)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_be_refused(data: bytes) -> None:
    view = memoryview(data)
    for codec in ("none", "zlib", "snappy", "lz4", "zstd", "lzo"):
        with contextlib.suppress(TailDamaged):
            assert len(decompressed(view, Postscript(0, 0, codec, 1 << 10, 6, 0))) <= 67 << 10
    for kind in range(19):
        with contextlib.suppress(TailDamaged):
            assert parse_statistics(view, kind, has_utc=True).num_values >= 0
    with contextlib.suppress(TailDamaged):
        assert parse_postscript(view, len(data)).tail_bytes < len(data)


@given(data=st.data())
def test_a_tail_with_a_wrong_byte_parses_or_is_refused(data: st.DataObject) -> None:
    whole = bytearray(written(pa.table({"id": list(range(50)), "word": ["a"] * 50, "deep": [[1]] * 50})))
    postscript = parse_postscript(memoryview(whole)[-256:], len(whole))
    place = data.draw(st.integers(len(whole) - postscript.tail_bytes, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TailDamaged):
        tail = tail_of(bytes(whole))
        assert sum(stripe.num_rows for stripe in tail.stripes) == tail.num_rows
        assert all(stripe.offset + stripe.num_bytes <= len(whole) for stripe in tail.stripes)
        assert len(tail.stripe_statistics([0, 1, 2, 3])) == len(tail.stripes)


def test_a_small_chunk_that_becomes_huge_is_refused_or_cut() -> None:
    bomb = pa.Codec("snappy").compress(bytes(10_000_000), asbytes=True)
    section = memoryview((len(bomb) << 1).to_bytes(3, "little") + bomb)
    with pytest.raises(TailDamaged, match="10000000 bytes, but 262144 are allowed"):
        decompressed(section, Postscript(0, 0, "snappy", 1 << 18, 6, 0))


def test_fields_of_every_wire_type_are_passed_over() -> None:
    message = b"\x08\x96\x01" + b"\x11" + bytes(8) + b"\x1a\x02hi" + b"\x25" + bytes(4)
    assert [
        (number, value if isinstance(value, int) else bytes(value)) for number, value in fields(memoryview(message))
    ] == [
        (1, 150),
        (2, bytes(8)),
        (3, b"hi"),
        (4, bytes(4)),
    ]
    for broken in (b"\x08", b"\x1a\x05hi", b"\x0b", b"\x08" + b"\xff" * 11, b"\x11\x00"):
        with pytest.raises(TailDamaged):
            list(fields(memoryview(broken)))
