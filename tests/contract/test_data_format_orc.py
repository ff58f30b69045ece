"""ORC files pass the contract of every format; the other tests are specific to ORC."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orc_files
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as paorc
import pytest
from data_format_contract import ALL_COLUMNS, LOCAL, Faulty, FormatContract, bound, data_file, remote, same, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.formats.base import FileFacts
from strata.data.formats.orc import GAP_BYTES_REMOTE, TAIL_BYTES, OrcFormat
from strata.data.source.source import Source
from strata.errors import DataFileInvalid, SchemaMismatch


def _rows(table: pa.Table, first: int, num_rows: int) -> pa.Table:
    """Return a copy, because the writer ignores the offset of sliced structs."""
    return table.take(pa.array(range(first, min(first + num_rows, table.num_rows)), pa.int64()))


class TestOrc(FormatContract):
    format = OrcFormat()
    columns = tuple(name for name in ALL_COLUMNS if name != "colour")  # ORC has no dictionaries

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        with paorc.ORCWriter(path, stripe_size=1, batch_size=rows_per_unit) as writer:
            for first in range(0, max(1, table.num_rows), rows_per_unit):
                writer.write(_rows(table, first, rows_per_unit))

    def as_stored(self, table: pa.Table) -> pa.Table:
        """Return the table with times in nanoseconds."""
        place = table.schema.get_field_index("time")
        return table if place < 0 else table.set_column(place, "time", table["time"].cast(pa.timestamp("ns")))


FORMAT = OrcFormat()


def facts_of(path: Path, columns: list[str] | None = None, source: Source = LOCAL) -> FileFacts:
    return FORMAT.inspect(source, data_file(path), columns=columns, unit_bytes=1)


def stripes(path: Path, *tables: pa.Table) -> Path:
    with paorc.ORCWriter(path, stripe_size=1, batch_size=10_000) as writer:
        for table in tables:
            writer.write(table)
    return path


def presences(path: Path, condition: pc.Expression, *columns: str) -> list[str]:
    facts = facts_of(path)
    asked = bound(condition, facts.schema, columns)
    return [each.name for each in FORMAT.presence(LOCAL, data_file(path), facts, *asked)]


@pytest.mark.parametrize("compression", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_every_compression_is_read_stripe_by_stripe(tmp_path: Path, compression: str) -> None:
    table = sample(2_000, ["id", "word", "tags", "point"]).take(pa.array(np.arange(40_000) * 7 % 2_000))
    path = tmp_path / "part.orc"
    paorc.write_table(table, path, compression=compression, stripe_size=1)
    facts = facts_of(path)
    reader = FORMAT.open(LOCAL, data_file(path), facts.schema, facts.version)
    found = [reader.read(unit, ["point", "id", "word", "tags"]) for unit in facts.units]
    reader.close()
    assert len(found) > 1
    assert pa.concat_tables(found).equals(table.select(["point", "id", "word", "tags"]))
    assert dict(facts.null_counts) == {name: table[name].null_count for name in table.column_names}


def test_a_tail_takes_one_request_and_a_large_one_two(tmp_path: Path) -> None:
    handler = Faulty()
    small = stripes(tmp_path / "small.orc", sample(10, ["id", "word"]))
    assert facts_of(small, source=remote(handler)) == facts_of(small)
    assert handler.num_reads == 1
    wide = pa.table({f"column {number} " * 30: [number] for number in range(300)})
    large = stripes(tmp_path / "large.orc", wide)
    handler.num_reads = 0
    facts = facts_of(large, source=remote(handler))
    assert large.stat().st_size > TAIL_BYTES
    assert handler.num_reads == 2
    assert len(facts.schema) == 300
    assert [unit.num_rows for unit in facts.units] == [1]


def test_a_remote_stripe_takes_two_requests_for_any_columns(tmp_path: Path) -> None:
    path = stripes(tmp_path / "part.orc", *[sample(10_000, ["id", "word", "price", "tags"])] * 3)
    facts = facts_of(path)
    handler = Faulty()
    reader = FORMAT.open(remote(handler), data_file(path), facts.schema, facts.version)
    reader.read(facts.units[0], ["id"])
    for columns in (["id"], ["word", "id", "tags"], ["price"]):
        handler.num_reads = 0
        assert reader.read(facts.units[1], columns).num_rows == 10_000
        assert handler.num_reads <= 2
    reader.close()
    assert path.stat().st_size < 3 * GAP_BYTES_REMOTE


def test_the_bytes_of_early_stripes_are_estimated_from_the_last_ones(tmp_path: Path) -> None:
    table = sample(10_000, ["id", "word", "price"])
    path = stripes(tmp_path / "part.orc", table, table, table)
    whole, part = facts_of(path), facts_of(path, ["word"])
    assert whole.units[1].offset < path.stat().st_size - TAIL_BYTES
    exact = part.units[-1].num_bytes
    assert all(abs(unit.num_bytes - exact) < exact * 0.1 for unit in part.units)
    assert exact < whole.units[-1].num_bytes * 0.6


def test_statistics_exclude_stripes_or_pass_them_entirely(tmp_path: Path) -> None:
    tables = [
        pa.table({"id": [first, first + 1], "word": [f"w{first}", f"w{first}"], "flag": [first > 2] * 2})
        for first in (0, 2, 4)
    ]
    path = stripes(tmp_path / "part.orc", *tables)
    assert presences(path, pc.field("id") >= 3, "id") == ["NONE", "SOME", "ALL"]
    assert presences(path, pc.field("word") == "w2", "word") == ["NONE", "ALL", "NONE"]
    assert presences(path, ~pc.field("flag"), "flag") == ["ALL", "ALL", "NONE"]
    assert presences(path, (pc.field("id") < 2) | (pc.field("word") > "w3"), "id", "word") == ["ALL", "NONE", "ALL"]
    assert presences(path, pc.field("id").isin([1, 5]), "id") == ["SOME", "NONE", "SOME"]


def test_dates_times_and_nulls_have_statistics_too(tmp_path: Path) -> None:
    first = dt.datetime(2026, 1, 1)  # noqa: DTZ001
    tables = [
        pa.table(
            {
                "day": pa.array([first.date() + dt.timedelta(days=day)] * 2),
                "time": pa.array([first + dt.timedelta(days=day)] * 2, pa.timestamp("ns")),
                "some": pa.array([day, None]),
                "none": pa.array([None, None], pa.int32()),
                "word": ["so that a stripe", "is not empty to its writer"],
            }
        )
        for day in range(3)
    ]
    path = stripes(tmp_path / "part.orc", *tables)
    second = first + dt.timedelta(days=1)
    assert presences(path, pc.field("day") >= second.date(), "day") == ["NONE", "ALL", "ALL"]
    assert presences(path, pc.field("time") < second - dt.timedelta(hours=1), "time") == ["ALL", "NONE", "NONE"]
    assert presences(path, pc.field("some") >= 1, "some") == ["NONE", "SOME", "SOME"]
    assert presences(path, pc.field("some").is_valid(), "some") == ["SOME"] * 3
    assert presences(path, pc.field("none").is_valid(), "none") == ["NONE"] * 3
    assert presences(path, pc.field("none") > 0, "none") == ["NONE"] * 3


def test_floats_never_pass_entirely_and_nan_hides_no_row(tmp_path: Path) -> None:
    path = stripes(
        tmp_path / "part.orc",
        pa.table({"x": [1.0, 2.0]}),
        pa.table({"x": [1.0, math.nan]}),
        pa.table({"x": [math.nan, math.nan]}),
        pa.table({"x": pa.array([3.0, None])}),
    )
    assert presences(path, pc.field("x") < 9, "x") == ["SOME"] * 4
    assert presences(path, pc.field("x") > 9, "x") == ["NONE", "SOME", "SOME", "NONE"]
    assert presences(path, ~(pc.field("x") < 9), "x")[1:3] == ["SOME", "SOME"]


def test_a_filter_that_statistics_cannot_decide_keeps_all_stripes(tmp_path: Path) -> None:
    path = stripes(tmp_path / "part.orc", sample(10, ["id", "point", "tags"]), sample(5, ["id", "point", "tags"]))
    assert presences(path, pc.field("point", "x") > 1e9, "point") == ["SOME", "SOME"]
    assert presences(path, pc.list_value_length(pc.field("tags")) > 5, "tags") == ["SOME", "SOME"]
    assert presences(path, pc.field("id") == "a string", "id") == ["SOME", "SOME"]


def test_names_with_dots_are_plain_columns(tmp_path: Path) -> None:
    table = pa.table({"a.b": [1, 2], "a": [{"b": 3}, {"b": 4}], "ü": ["x", "y"]})
    path = stripes(tmp_path / "part.orc", table)
    facts = facts_of(path)
    reader = FORMAT.open(LOCAL, data_file(path), facts.schema, facts.version)
    for columns in (["a"], ["a.b"], ["ü", "a.b"], ["a", "a.b"]):
        assert same(reader.read(facts.units[0], columns), table.select(columns)), columns
    with pytest.raises(SchemaMismatch, match=r"part\.orc has no column 'b'"):
        reader.read(facts.units[0], ["b"])
    reader.close()


@settings(max_examples=60)
@given(data=st.data())
def test_a_tail_with_wrong_bytes_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = stripes(tmp_path_factory.mktemp("wrong") / "part.orc", sample(20, ["id", "word", "tags"]))
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        contents[data.draw(st.integers(3, len(contents) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents)
    with contextlib.suppress(DataFileInvalid, SchemaMismatch), contextlib.ExitStack() as stack:
        facts = facts_of(path)
        answers = FORMAT.presence(LOCAL, data_file(path), facts, *bound(pc.field("id") > 3, facts.schema, ["id"]))
        assert len(answers) == len(facts.units)
        reader = stack.enter_context(
            contextlib.closing(FORMAT.open(LOCAL, data_file(path), facts.schema, facts.version))
        )
        for unit in facts.units:
            assert reader.read(unit, ["id", "word", "tags"]).num_rows == unit.num_rows


@pytest.mark.parametrize("compressed", [orc_files.stored, orc_files.lzo])
def test_files_compressed_with_lzo_are_read_as_pyarrow_reads_them(
    tmp_path: Path, compressed: Callable[[bytes], bytes]
) -> None:
    table = pa.table(
        {"a_column_name": range(1000), "another_column_name": [f"row {number % 7}" for number in range(1000)]}
    )
    path = tmp_path / "a.orc"
    paorc.write_table(table, path, compression="uncompressed")
    orc_files.recompress(path, compressed)
    assert paorc.read_table(path).equals(table)
    facts = facts_of(path)
    (unit,) = facts.units
    reader = FORMAT.open(LOCAL, data_file(path), facts.schema, facts.version)
    assert reader.read(unit, table.column_names).equals(table)
    reader.close()
    assert presences(path, pc.field("a_column_name") > 5000, "a_column_name") == ["NONE"]
