"""CSV and JSON files pass the contract of every format; the other tests are specific to text."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pytest
import zstandard
from data_format_contract import LOCAL, PLAIN, FormatContract, bound, data_file
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.data.filter.expression import Presence
from strata.data.formats.base import Format, Unit
from strata.data.formats.csv import CsvFormat
from strata.data.formats.json import JsonFormat, JsonlFormat
from strata.errors import ConfigError, DataFileChanged, DataFileInvalid, SchemaMismatch


class TextContract(FormatContract):
    is_columnar = False
    has_exact_units = False
    has_marks = False
    test_statistics_never_contradict_the_rows = None  # text has no statistics, see below


class TestCsv(TextContract):
    format = CsvFormat(null_values=("",), strings_can_be_null=True)
    columns = PLAIN

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        pacsv.write_csv(table, path)

    def as_stored(self, table: pa.Table) -> pa.Table:
        return table.set_column(1, "small", table["small"].cast(pa.int64())) if "small" in table.schema.names else table


class JsonContract(TextContract):
    columns = (*PLAIN, "tags", "point")

    def as_stored(self, table: pa.Table) -> pa.Table:
        return table.set_column(1, "small", table["small"].cast(pa.int64())) if "small" in table.schema.names else table


class TestJsonl(JsonContract):
    format = JsonlFormat()

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


class TestJsonLines(TestJsonl):
    format = JsonFormat()


class ReadFile:
    """A file read by a format."""

    def __init__(self, form: Format, path: Path, *, unit_bytes: int = 100, schema: pa.Schema | None = None) -> None:
        self.file = data_file(path)
        self.facts = form.inspect(LOCAL, self.file, columns=None, unit_bytes=unit_bytes)
        self.schema = schema or self.facts.schema
        reader = form.open(LOCAL, self.file, self.schema, self.facts.version)
        with contextlib.closing(reader):
            self.parts = [reader.read(unit, self.schema.names) for unit in self.facts.units]
        self.table = pa.concat_tables(self.parts) if self.parts else self.schema.empty_table()


def planted(folder: Path, name: str, contents: bytes) -> Path:
    path = folder / name
    path.write_bytes(contents)
    return path


FIELDS = st.text(st.sampled_from('ab" ,\n\rü;0'), max_size=5)


@st.composite
def csv_texts(draw: st.DrawFn) -> bytes:
    """Draw well-formed CSV with needed and with superfluous quotes."""
    ends = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    num_columns = draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(FIELDS, min_size=num_columns, max_size=num_columns), max_size=12))
    lines = [",".join(f"c{number}" for number in range(num_columns))]
    for row in rows:
        cells = []
        for cell in row:
            is_quoted = any(character in cell for character in '",\n\r') or draw(st.booleans())
            cells.append('"' + cell.replace('"', '""') + '"' if is_quoted else cell)
        lines.append(",".join(cells) + (ends if draw(st.integers(0, 5)) == 0 else ""))
    text = ends.join(lines) + (ends if draw(st.booleans()) else "")
    return (b"\xef\xbb\xbf" if draw(st.booleans()) else b"") + text.encode()


@settings(max_examples=60)
@given(text=csv_texts(), unit_bytes=st.integers(1, 60), piece_bytes=st.integers(1, 80))
def test_csv_row_groups_add_up_to_what_pyarrow_reads(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, unit_bytes: int, piece_bytes: int
) -> None:
    path = planted(tmp_path_factory.mktemp("csv"), "part.csv", text)
    names = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")[0].split(b"\r")[0].decode().split(",")
    strings = pa.schema([(name, pa.string()) for name in names])
    found = ReadFile(CsvFormat(piece_bytes=piece_bytes), path, unit_bytes=unit_bytes, schema=strings)
    expected = pacsv.read_csv(
        pa.BufferReader(text + b"\n"),
        pacsv.ReadOptions(use_threads=False),
        pacsv.ParseOptions(newlines_in_values=True),
        pacsv.ConvertOptions(column_types=strings),
    )
    assert found.table.to_pylist() == expected.to_pylist()
    assert found.facts == CsvFormat().inspect(LOCAL, found.file, columns=None, unit_bytes=unit_bytes)
    for unit in found.facts.units[:-1]:
        assert unit.num_bytes >= unit_bytes


@settings(max_examples=40)
@given(
    rows=st.lists(st.fixed_dictionaries({"a": st.integers(-9, 9), "b": st.text(max_size=4)}), min_size=1, max_size=9),
    unit_bytes=st.integers(1, 90),
    piece_bytes=st.integers(1, 90),
    ends=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_jsonl_row_groups_add_up_to_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], unit_bytes: int, piece_bytes: int, ends: str
) -> None:
    text = ends.join(json.dumps(row) for row in rows)
    path = planted(tmp_path_factory.mktemp("jsonl"), "part.jsonl", text.encode())
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    found = ReadFile(JsonlFormat(piece_bytes=piece_bytes), path, unit_bytes=unit_bytes, schema=schema)
    assert found.table.to_pylist() == rows


def test_text_has_no_statistics(tmp_path: Path) -> None:
    found = ReadFile(CsvFormat(), planted(tmp_path, "part.csv", b"a\n1\n2\n"), unit_bytes=1)
    answers = CsvFormat().presence(LOCAL, found.file, found.facts, *bound(pc.field("a") > 5, found.facts.schema, ["a"]))
    assert answers == [Presence.SOME, Presence.SOME]


@pytest.mark.parametrize(
    ("contents", "names"),
    [
        (b"", []),
        (b"\xef\xbb\xbf", []),
        (b"\n\r\n\n", []),
        (b"a,b", ["a", "b"]),
        (b"a,b\n", ["a", "b"]),
        (b'\n"a\nx",b\r\n\n', ["a\nx", "b"]),
    ],
)
def test_csv_without_rows_has_no_row_groups(tmp_path: Path, contents: bytes, names: list[str]) -> None:
    facts = ReadFile(CsvFormat(), planted(tmp_path, "part.csv", contents)).facts
    assert facts.units == ()
    assert facts.schema.names == names


@pytest.mark.parametrize("contents", [b"", b"\n \n", b"[]", b" [ ]\n"])
def test_json_without_rows_has_no_row_groups(tmp_path: Path, contents: bytes) -> None:
    facts = ReadFile(JsonFormat(), planted(tmp_path, "part.json", contents)).facts
    assert (facts.units, facts.schema.names) == ((), [])


def test_columns_are_named_by_the_header_by_the_user_or_numbered(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.csv", b"x;y\n1;2\n3;4\n")
    assert ReadFile(CsvFormat(delimiter=";"), path).table.to_pylist() == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    assert ReadFile(CsvFormat(delimiter=";", column_names=("p", "q")), path).table.column_names == ["p", "q"]
    numbered = ReadFile(CsvFormat(delimiter=";", header=False), path)
    assert numbered.table.to_pylist()[0] == {"f0": "x", "f1": "y"}
    assert numbered.table.num_rows == 3
    named = ReadFile(CsvFormat(delimiter=";", header=False, column_names=("p", "q")), path, unit_bytes=1)
    assert named.table.to_pylist()[2] == {"p": "3", "q": "4"}


def test_a_byte_order_mark_in_the_middle_of_text_is_part_of_a_value(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.csv", "\ufeffa\n\ufeffx\n\ufeffy\n".encode())
    assert ReadFile(CsvFormat(), path, unit_bytes=1).table.to_pylist() == [{"a": "\ufeffx"}, {"a": "\ufeffy"}]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("gz", gzip.compress), ("bz2", bz2.compress), ("zst", zstandard.ZstdCompressor().compress)],
)
def test_a_compressed_file_is_one_row_group(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    text = b'id,word\n"1","a\nb"\n' + b"".join(b"%d,word %d\n" % (row, row) for row in range(2, 3_000))
    plain = ReadFile(CsvFormat(), planted(tmp_path, "part.csv", text)).table
    found = ReadFile(CsvFormat(piece_bytes=1_000), planted(tmp_path, f"part.csv.{suffix}", compress(text)))
    assert found.table.equals(plain)
    (unit,) = found.facts.units
    assert unit == Unit(0, 2_999, 0, 0, found.file.size_bytes)
    lines = b"".join(b'{"id": %d}\n' % row for row in range(3_000))
    for name, form in (("part.jsonl", JsonlFormat()), ("part.json", JsonFormat())):
        assert ReadFile(form, planted(tmp_path, f"{name}.{suffix}", compress(lines))).table.num_rows == 3_000
    array = compress(b'[{"id": 1}, {"id": 2}]')
    assert ReadFile(JsonFormat(), planted(tmp_path, f"array.json.{suffix}", array)).table.num_rows == 2


def test_a_truncated_or_uncompressed_gz_file_is_rejected(tmp_path: Path) -> None:
    whole = gzip.compress(b"id\n" + b"1\n" * 9_000)
    for contents in (whole[:-10], whole[: len(whole) // 2], b"id\n1\n"):
        with pytest.raises(DataFileInvalid, match=r"part\.csv\.gz is not a complete gzip file: .*; copy it again"):
            ReadFile(CsvFormat(), planted(tmp_path, "part.csv.gz", contents))


def test_a_rewritten_compressed_file_of_the_same_size_is_detected(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.csv.gz", gzip.compress(b"id\n1\n2\n", mtime=0))
    found = ReadFile(CsvFormat(), path)
    path.write_bytes(gzip.compress(b"id\n1\n3\n", mtime=0))
    assert path.stat().st_size == found.file.size_bytes
    reader = CsvFormat().open(LOCAL, found.file, found.schema, found.facts.version)
    with pytest.raises(DataFileChanged, match=r"part\.csv\.gz was rewritten since it was planned"):
        reader.read(found.facts.units[0], ["id"])
    reader.close()


def test_an_invalid_value_is_reported_with_its_position_and_the_cure(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.csv", b"id\n1\n2\n3\nfour\n")
    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(DataFileInvalid) as caught:
        ReadFile(CsvFormat().informed(decided=["id"], is_chosen=False), path, unit_bytes=4, schema=schema)
    assert "part.csv, byte range 1 (bytes 7 to 14, from row 2)" in str(caught.value)
    assert "column #0: Row #2: CSV conversion error to int64: invalid value 'four'" in str(caught.value)
    assert "null_values" in str(caught.value)
    as_text = ReadFile(CsvFormat(), path, schema=pa.schema([("id", pa.string())])).table
    assert as_text.to_pylist()[-1] == {"id": "four"}
    nulls = ReadFile(CsvFormat(null_values=("four",)), path).table
    assert nulls["id"].to_pylist() == [1, 2, 3, None]


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess columns from the first one or two records."""
    monkeypatch.setattr("strata.data.formats.text.SAMPLE_BYTES", 20)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize(
    ("form", "contents", "message"),
    [
        (CsvFormat(), b"id,v\n" + b"1000,1\n" * 9 + b"2,1.5\n", r"column 'v' was guessed as int64.*1\.5.*null_values"),
        (CsvFormat(), b"id,v\n" + b"1000,1\n" * 9 + b"2,x\n", r"column 'v' .*\('v', …\)"),
        (JsonlFormat(), b'{"id": 1, "v": 1}\n' * 9 + b'{"id": 2, "v": 1.5}\n', r"column 'v' was guessed as int64"),
        (JsonFormat(), b'{"id": 1, "v": 1}\n' * 9 + b'{"id": 2, "v": "x"}\n', r"column 'v' .*write them in one type"),
        (JsonlFormat(), b'{"id": 1, "v": null}\n' * 9 + b'{"id": 2, "v": "x"}\n', r"column 'v' was guessed as null"),
        (JsonlFormat(), b'{"id": 1, "v": 1}\n' * 9 + b'{"id": 2, "w": 1}\n', r"the key 'w' .*\('w', …\).*columns="),
        (JsonFormat(), b'{"id": 1, "o": {"a": 1}}\n' * 9 + b'{"o": {"b": 1}}\n', r"the key 'o\.b' .*\('o', …\)"),
        (JsonFormat(), b'{"id": 1, "o": [{"a": 1}]}\n' * 9 + b'{"o": [{"b": 1}]}\n', r"the key 'o\.b'"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_wrong_guess_is_reported_with_the_cure_and_not_as_damage(
    tmp_path: Path, form: Format, contents: bytes, message: str, suffix: str
) -> None:
    path = planted(tmp_path, f"part{suffix}", gzip.compress(contents) if suffix else contents)
    with pytest.raises(SchemaMismatch, match=rf"part{suffix}, byte range .*{message}"):
        ReadFile(form, path)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize(
    ("form", "contents"),
    [
        (CsvFormat(), b"id,v\n" + b"1000,1\n" * 9 + b"2\n"),
        (CsvFormat(), b"id,v\n" + b"1000,x\n" * 9 + b"2,\xff\xfe\n"),
        (JsonlFormat(), b'{"id": 1, "v": 1}\n' * 9 + b'{"id": 2, "w": 1\n'),
        (JsonlFormat(), b'{"id": 1, "v": 1}\n' * 9 + b'{"id": 2, "id": 3}\n'),
        (JsonFormat(), b'{"id": 1, "v": 1}\n' * 9 + b"17\n"),
        (JsonlFormat().informed(decided=["v"], is_chosen=True), b'{"id": 1, "v": 1}\n' * 9 + b'{"v": "x"}\n'),
    ],
)
def test_invalid_records_and_values_that_do_not_fit_the_users_types_are_damage(
    tmp_path: Path, form: Format, contents: bytes
) -> None:
    with pytest.raises(DataFileInvalid, match=r"part, byte range"):
        ReadFile(form, planted(tmp_path, "part", contents))


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9) | st.none()), min_size=1, max_size=12))
def test_no_key_is_lost_wherever_it_first_occurs(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, int | None]]
) -> None:
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path = planted(tmp_path_factory.mktemp("keys"), "part.jsonl", lines)
    everything = [{key: record.get(key) for key in "abc"} for record in records]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata.data.formats.text.SAMPLE_BYTES", 20)
        try:
            found = ReadFile(JsonlFormat(), path, unit_bytes=30).table
        except SchemaMismatch:
            pass
        else:
            if found.num_columns:
                assert found.to_pylist() == [{key: row[key] for key in found.column_names} for row in everything]
            assert {key for record in records for key in record} == set(found.column_names)
        decided = ReadFile(JsonlFormat(), path, unit_bytes=30, schema=pa.schema([(key, pa.int64()) for key in "abc"]))
        assert decided.table.to_pylist() == everything


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        (b"a,a\n1,2\n", "two columns are named 'a'"),
        (b"a\n\xff\xfe\x00\n", "part.csv"),
    ],
)
def test_invalid_csv_is_rejected(tmp_path: Path, contents: bytes, message: str) -> None:
    with pytest.raises(DataFileInvalid) as caught:
        ReadFile(CsvFormat(), planted(tmp_path, "part.csv", contents), schema=pa.schema([("a", pa.string())]))
    assert message in str(caught.value)


@settings(max_examples=60)
@given(contents=st.binary(max_size=80), form=st.sampled_from([CsvFormat(), JsonlFormat(), JsonFormat()]))
@example(contents=b"null\n", form=JsonlFormat())
@example(contents=b"[null]", form=JsonFormat())
@example(contents=b'{"a": 1} null\n', form=JsonlFormat())
@example(contents=b"\xef\xbb\xbfnull", form=JsonFormat())
def test_arbitrary_bytes_are_parsed_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, contents: bytes, form: Format
) -> None:
    path = planted(tmp_path_factory.mktemp("garbage"), "part", contents)
    with contextlib.suppress(DataFileInvalid):
        found = ReadFile(form, path, unit_bytes=7)
        assert found.table.num_rows == sum(unit.num_rows for unit in found.facts.units)


def test_a_record_without_end_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.data.formats.text.RECORD_BYTES_MAX", 1 << 12)
    path = planted(tmp_path, "part.csv", b'a\n1\n"not closed\n' + b"2\n" * 10_000)
    with pytest.raises(
        DataFileInvalid, match=r"the record that begins at byte 4 does not end .* check for an unclosed quote"
    ):
        ReadFile(CsvFormat(piece_bytes=1 << 10), path)


def test_fields_of_json_may_be_missing_nested_or_unknown(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.jsonl", b'{"a": 1, "b": {"c": [1, 2]}}\n{"x": 0, "b": null}\n{}\n')
    schema = pa.schema([("b", pa.struct([("c", pa.list_(pa.int32()))])), ("a", pa.int16()), ("late", pa.string())])
    found = ReadFile(JsonlFormat().informed(decided=[], is_chosen=True), path, unit_bytes=1, schema=schema)
    assert found.table.schema == schema
    assert found.table.to_pylist() == [
        {"b": {"c": [1, 2]}, "a": 1, "late": None},
        {"b": None, "a": None, "late": None},
        {"b": None, "a": None, "late": None},
    ]


def test_a_json_array_is_one_row_group(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x\n"}, {"a": None, "c": [1.5]}, {}]
    path = planted(tmp_path, "part.json", b"\xef\xbb\xbf \n" + json.dumps(rows, indent=1).encode() + b"\n")
    found = ReadFile(JsonFormat(), path, unit_bytes=1)
    assert [unit.num_rows for unit in found.facts.units] == [3]
    assert found.table.to_pylist() == [
        {"a": 1, "b": "x\n", "c": None},
        {"a": None, "b": None, "c": [1.5]},
        {"a": None, "b": None, "c": None},
    ]
    reader = JsonFormat().open(LOCAL, found.file, found.schema, found.facts.version)
    with contextlib.closing(reader):
        assert reader.read(found.facts.units[0], ["c", "a"]).column_names == ["c", "a"]
        path.write_bytes(path.read_bytes().replace(b"1.5", b"2.5"))
        with pytest.raises(DataFileChanged, match=r"part\.json"):
            reader.read(found.facts.units[0], ["c"])


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"[1, 2]", "its elements are int64, not objects"),
        (b'[{"a": 1}', "not a JSON array"),
        (b'[{"a": 1}], "b": [2]', "followed by other data"),
        (b'[{"a": 1}]} {"rows": []', "followed by other data"),
        (b'{\n "a": 1\n}\n', "every record has a line of its own|a record begins with"),
        (b'{"a": 1} {"a": 2}\n', "1 lines with 2 records"),
        (b'{"a": 1}\nnull\n', "a record begins with b'null"),
    ],
)
def test_invalid_json_is_rejected(tmp_path: Path, contents: bytes, message: str) -> None:
    with pytest.raises(DataFileInvalid, match=message):
        ReadFile(JsonFormat(), planted(tmp_path, "part.json", contents))


def test_an_array_that_is_too_large_is_rejected_with_the_cure(tmp_path: Path) -> None:
    path = planted(tmp_path, "part.json", json.dumps([{"a": 1}] * 100).encode())
    with pytest.raises(DataFileInvalid, match=r"more than 500 bytes.*write it as jsonl"):
        ReadFile(JsonFormat(array_bytes_max=500), path)


def test_jsonl_that_contains_an_array_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataFileInvalid, match=r"a record begins with b'\["):
        ReadFile(JsonlFormat(), planted(tmp_path, "part.jsonl", b'[{"a": 1}]\n'))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    found = ReadFile(CsvFormat(), planted(tmp_path, "part.csv", b"a\n1\n"))
    reader = CsvFormat().open(LOCAL, found.file, found.schema, found.facts.version)
    with pytest.raises(SchemaMismatch, match=r"part\.csv has no column 'b'; it has \['a'\]"):
        reader.read(found.facts.units[0], ["b"])


@pytest.mark.parametrize(
    "options", [{"delimiter": ""}, {"delimiter": "||"}, {"quote": "\n"}, {"delimiter": '"'}, {"delimiter": "→"}]
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CsvFormat(**options)
