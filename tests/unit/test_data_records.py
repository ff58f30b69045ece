"""Records end where pyarrow ends them, whatever stretches the text is read in."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata.data.formats.records import CsvRecords, JsonRecords, Records, UnitCutter

SCRAPS = st.sampled_from(["a", "b c", ",", '"', '""', "\n", "\r\n", "\r", "ü", ";", "'"])
TEXTS = st.lists(SCRAPS, max_size=24).map(lambda scraps: "".join(scraps).encode())


def rows_of(records: Records, data: bytes, piece_bytes: int | None = None) -> list[bytes]:
    """Return the records of a text read in pieces, without the empty lines before them."""
    rows, first, size = [], 0, piece_bytes or len(data)
    while first < len(data):
        piece = memoryview(data)[first : first + size]
        is_last = first + size >= len(data)
        ends = records.ends(piece, is_last=is_last)
        assert list(ends.rows) == sorted(set(ends.rows))
        for begin, end in zip([0, *ends.rows], ends.rows, strict=False):
            rows.append(bytes(piece[begin:end]))
        if is_last:
            break
        first, size = first + ends.stop, (piece_bytes or 0) if ends.stop else size + 1
    return rows


def rows_of_pyarrow(data: bytes, quote: str | None) -> int:
    """Return how many records pyarrow finds, with a delimiter that does not occur, so that a record has one field."""
    options = pacsv.ParseOptions(delimiter="|", quote_char=quote or False, newlines_in_values=True)
    if not data:
        return 0
    reading = pacsv.ReadOptions(column_names=["text"], use_threads=False)
    return int(pacsv.read_csv(pa.BufferReader(data), reading, options).num_rows)


@pytest.mark.parametrize("quote", ['"', "'", None])
@given(data=TEXTS)
@example(b'5" nails\n"a\nb"\n')
@example(b'"a""\nb"\n""\n"""\n"\n')
@example(b'""a"\n"\n')
@example(b"\r")
@example(b"a\r\n\r\r\n\nb")
@example(b'"a')
def test_csv_has_as_many_records_as_pyarrow_finds(quote: str | None, data: bytes) -> None:
    assert len(rows_of(CsvRecords("|", quote), data)) == rows_of_pyarrow(data, quote)


@given(data=TEXTS, quote=st.sampled_from(['"', None]))
def test_records_do_not_depend_on_the_size_of_reads(data: bytes, quote: str | None) -> None:
    records = CsvRecords(",", quote)
    whole = rows_of(records, data)
    for piece_bytes in range(1, len(data) + 1):
        assert [row.lstrip(b"\r\n") for row in rows_of(records, data, piece_bytes)] == [
            row.lstrip(b"\r\n") for row in whole
        ], piece_bytes


def test_line_ends_in_quotes_and_doubled_quotes_belong_to_the_record() -> None:
    data = b'1,"a\nb"\r\n\r\n2,"say ""hi\n"""\n3,5" nails\n4,"x"'
    assert rows_of(CsvRecords(), data) == [
        b'1,"a\nb"\r\n',
        b'\r\n2,"say ""hi\n"""\n',
        b'3,5" nails\n',
        b'4,"x"',
    ]


def test_a_stretch_without_a_complete_record_is_empty() -> None:
    for data in (b"", b"a", b'"a\n', b"a\r"):
        assert CsvRecords().ends(memoryview(data), is_last=False).stop == 0
    assert CsvRecords().ends(memoryview(b"a\r"), is_last=True).stop == 2


@given(
    values=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers(), max_size=3), max_size=6),
    between=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", "\n  "]), min_size=6, max_size=6),
    has_end=st.booleans(),
)
def test_json_has_a_record_for_every_line_that_is_not_blank(
    values: list[dict[str, object]], between: list[str], has_end: bool
) -> None:
    lines = [json.dumps(value) + gap for value, gap in zip(values, between, strict=False)]
    data = "".join(lines).encode()
    data = data if has_end else data.rstrip()
    for piece_bytes in (None, 1, 2, 3, 7):
        assert [json.loads(row) for row in rows_of(JsonRecords(), data, piece_bytes)] == values


@given(
    sizes=st.lists(st.integers(1, 9), max_size=30),
    unit_bytes=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 30), max_size=5),
)
def test_row_groups_contain_all_records_and_do_not_depend_on_the_stretches(
    sizes: list[int], unit_bytes: int, cuts: list[int]
) -> None:
    ends = 100 + np.cumsum(np.array(sizes, np.int64))
    at_once, in_parts = UnitCutter(100, unit_bytes), UnitCutter(100, unit_bytes)
    at_once.add(ends)
    for part in np.split(ends, sorted(min(cut, len(ends)) for cut in cuts)):
        in_parts.add(part)
    units = at_once.close()
    assert in_parts.close() == units
    assert sum(num_rows for _, _, num_rows in units) == len(sizes)
    assert [first for first, _, _ in units] == [100, *(last for _, last, _ in units)][: len(units)]
    assert all(last - first >= unit_bytes for first, last, _ in units[:-1])
    assert all(last - first < unit_bytes + 9 for first, last, _ in units)
