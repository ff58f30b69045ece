"""Surveys of files, packing of row groups into splits, and reports on a plan."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import operator
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from data_fakes import SOURCE, FakeFormat, FakeReader, version_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from strata.config import parse_bytes
from strata.data.filter import filter as filters
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.plan import report, surveyor
from strata.data.plan.plan import Plan
from strata.data.plan.planner import build, pack_splits, parse_rows
from strata.data.plan.report import MAX_FILES, explain, summary
from strata.data.plan.survey import Survey
from strata.data.plan.surveyor import survey
from strata.data.source.partitions import partition_fields
from strata.data.source.source import DataFile
from strata.errors import (
    DataFileInvalid,
    InvalidArgument,
    NoData,
    SchemaMismatch,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)


def look(fake: FakeFormat, files: list[DataFile], filter_: Any = None, **options: Any) -> Survey:
    condition = None if filter_ is None else filters.parse(filter_)
    fields = partition_fields(files)
    return survey(SOURCE, files, fake, condition=condition, partition_fields=fields, **{"num_threads": 1} | options)


def plan(
    fake: FakeFormat,
    files: list[DataFile],
    filter_: Any = None,
    *,
    columns: list[str] | None = None,
    on_error: Any = "raise",
    **options: Any,
) -> Plan:
    found = look(fake, files, filter_, columns=columns, on_error=on_error)
    return build(found, columns=columns, condition=filters.parse(filter_) if filter_ else None, **options)


# --- packing ---


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 120)), max_size=8), max_size=6),
    st.integers(1, 100),
    st.none() | st.integers(1, 60),
)
def test_splits_cover_every_row_group_once_in_order_within_the_limits(
    files: list[list[tuple[int, int]]], split_bytes: int, split_rows: int | None
) -> None:
    unit_file = np.array([number for number, units in enumerate(files) for _ in units], np.int64)
    rows = np.array([rows for units in files for rows, _ in units], np.int64)
    num_bytes = np.array([size for units in files for _, size in units], np.int64)
    starts = pack_splits(unit_file, rows, num_bytes, split_bytes=split_bytes, split_rows=split_rows).tolist()

    def fits(first: int, last: int) -> bool:
        within = num_bytes[first:last].sum() <= split_bytes and (
            split_rows is None or rows[first:last].sum() <= split_rows
        )
        return bool(within and len(set(unit_file[first:last])) == 1)

    assert (starts[0], starts[-1]) == (0, len(rows))
    for first, last in itertools.pairwise(starts):
        assert first < last
        assert last == first + 1 or fits(first, last)
        assert last == len(rows) or not fits(first, last + 1), "a split takes as much as it may"


def test_sizes_are_read_as_people_write_them() -> None:
    written = ["128MiB", "1GB", "1.5 GiB", "10_000", " 3kb ", 77]
    assert [parse_bytes(size) for size in written] == [2**27, 10**9, 3 * 2**29, 10_000, 3000, 77]
    assert [parse_rows(rows) for rows in (None, 1, 10**9)] == [None, 1, 10**9]


@pytest.mark.parametrize("size", ["128M", "much", "", 0, -1, True, 1.5, None, "1e3", "2TiB", "9" * 50])
def test_an_ambiguous_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_bytes(size)
    assert caught.value.field == "split_bytes"


@pytest.mark.parametrize("rows", [0, -1, True, "5", 1.0])
def test_an_invalid_number_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(InvalidArgument, match="split_rows"):
        parse_rows(rows)


# --- plans ---


def test_a_plan_has_all_row_groups_in_the_order_of_file_names() -> None:
    fake = FakeFormat(unit_rows=2)
    files = [fake.add(name, {"x": list(range(rows))}) for name, rows in (("b", 3), ("a", 5), ("empty", 0), ("c", 2))]
    made = plan(fake, files, split_bytes=32)
    assert [file.file.name for file in made.files] == ["a", "b", "c"]
    assert made.unit_file.tolist() == [0, 0, 0, 1, 1, 2]
    assert made.unit_rows.tolist() == [2, 2, 1, 2, 1, 2]
    assert made.unit_first_row.tolist() == [0, 2, 4, 0, 2, 0]
    assert made.split_starts.tolist() == [0, 2, 3, 5, 6]
    assert (made.num_rows, made.null_counts, made.columns) == (10, {}, ("x",))
    assert made.unit(4).num_rows == 1
    assert (made.pruning.num_files, made.pruning.num_units, made.pruning.bytes_planned) == (4, 6, 80)
    assert plan(fake, files, split_rows=2).split_starts.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_nulls_are_counted_if_files_have_null_counts() -> None:
    fake = FakeFormat()
    files = [
        fake.add("y=1/a", {"x": [1, None], "z": [1, 2]}),
        fake.add("y=2/b", {"x": [None, None, 3]}),
    ]
    made = plan(fake, files)
    assert made.null_counts == {"x": 3, "z": 3}
    assert made.schema.names == ["x", "z", "y"]
    assert plan(fake, files, columns=["x"]).null_counts == {"x": 3}


def test_of_many_files_an_even_sample_is_read_for_null_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(surveyor, "MAX_ASKED_FOR_NULLS", 4)
    fake = FakeFormat()
    files = [fake.add(f"f{number}", {"x": [None] * (number + 1)}) for number in range(9)]
    assert plan(fake, files).null_counts == {"x": 1 + 4 + 7}
    assert plan(fake, files[:4]).null_counts == {"x": 1 + 2 + 3 + 4}


def test_files_whose_partition_cannot_pass_are_not_opened() -> None:
    fake = FakeFormat()
    files = [fake.add(f"year={year}/c={c}/f", {"x": [1, 2, 3]}) for year in (2023, 2024) for c in ("de", "fr")]
    made = plan(fake, files, "year > 2023 and (c == 'de' or x > 2)")
    assert {name for what, name in fake.calls if what == "inspect"} == {"year=2024/c=de/f", "year=2024/c=fr/f"}
    assert {name for what, name in fake.calls if what != "inspect"} == {"year=2024/c=fr/f"}
    assert made.unit_rows.tolist() == [3, 1]
    assert made.columns == ("x", "year", "c")
    assert made.pruning.num_files_pruned == 2
    assert made.pruning.num_units_counted == 1
    assert made.files[1].projection.file_columns(["year", "x", "c"]) == ["x"]


def test_row_groups_are_counted_only_if_statistics_do_not_decide() -> None:
    fake = FakeFormat(unit_rows=1)
    files = [fake.add("a", {"x": [1, 2, 3]}), fake.add("b", {"y": [1, 2, 3]})]
    made = plan(fake, files, "x > 1")
    assert not [what for what, _ in fake.calls if what == "open"]
    assert made.unit_index.tolist() == [1, 2]
    assert made.pruning.num_units_pruned == 4
    fake.unit_rows = 2
    made = plan(fake, files, "x > 1 or x is None")
    assert made.unit_rows.tolist() == [1, 1, 2, 1]
    assert made.pruning.num_units_counted == 1


def test_rows_are_counted_with_the_types_of_the_dataset() -> None:
    fake = FakeFormat(unit_rows=3)
    files = [
        fake.add("a", {"x": pa.array([1, 2, 3], pa.int8()), "c": pa.array(["u", "v", "u"]).dictionary_encode()}),
        fake.add("b", {"x": pa.array([1000, 2, None], pa.int64()), "c": ["u", "v", None]}),
    ]
    made = plan(fake, files, "x >= 2 and c == 'u'", columns=["x"])
    assert made.unit_rows.tolist() == [1, 1]
    assert (made.columns, made.schema.names) == (("x",), ["x", "c"])


CASTS = [
    (st.floats(-2, 2), pa.float64(), pa.float32()),
    (st.integers(-100, 100).map(lambda seconds: seconds * 1000), pa.timestamp("ms"), pa.timestamp("s")),
    (st.integers(-2 * 86_400, 2 * 86_400), pa.timestamp("s"), pa.date32()),
    (st.integers(-20, 20).map(str), pa.string(), pa.int64()),
    (st.integers(-20, 20), pa.int64(), pa.string()),
    (st.integers(-100, 100), pa.int8(), pa.int64()),
    (st.floats(-2, 2, width=32), pa.float32(), pa.float64()),
]


@given(st.data())
def test_the_filter_applies_to_rows_as_they_are_delivered(data: st.DataObject) -> None:
    """Row groups of one row, whose statistics are exact."""
    values, found, wanted = data.draw(st.sampled_from(CASTS))
    column = pa.array([data.draw(values), *data.draw(st.lists(values | st.none(), max_size=6))], found)
    border = data.draw(st.sampled_from([column[0], column.cast(wanted)[0]]))
    compare = data.draw(st.sampled_from([operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne]))
    try:
        passing = pa.table({"x": column.cast(wanted)}).filter(compare(pc.field("x"), border))
    except pa.ArrowException:
        assume(False)  # compared with something of another kind
    condition = filters.parse(compare(pc.field("x"), border))
    fake = FakeFormat(unit_rows=1)
    files, schema = [fake.add("a", {"x": column})], pa.schema([("x", wanted)])
    looked = look(fake, files, condition.expression, schema=schema)
    if not passing.num_rows:
        with pytest.raises(NoData):
            build(looked, condition=condition, schema=schema)
        return
    made = build(looked, condition=condition, schema=schema)
    assert column.cast(wanted).take(made.unit_index).to_pylist() == passing["x"].to_pylist()


def test_text_is_read_with_the_unified_types_of_all_files() -> None:
    fake = FakeFormat(is_typed=False)
    files = [fake.add("a", {"x": [1, 2]}), fake.add("b", {"x": [1.5, 2.5]})]
    made = plan(fake, files, "x < 2")
    assert [file.schema.field("x").type for file in made.files] == [pa.float64(), pa.float64()]
    assert made.unit_rows.tolist() == [1, 1]


def test_a_filter_that_does_not_fit_is_refused_before_anything_is_counted() -> None:
    fake = FakeFormat()
    files = [fake.add("y=1/a", {"x": [1]})]
    for text, error in (("z > 1", "'z', which does not exist"), ("y == 'a'", "y is int64"), ("x > 'a'", "x is int64")):
        with pytest.raises(SchemaMismatch, match=error):
            look(fake, files, text)
    with pytest.raises(SchemaMismatch, match="no file has a column 'xx'; did you mean 'x'"):
        look(fake, files, "x > 1", columns=["xx"])
    assert not [what for what, _ in fake.calls if what == "open"]
    with pytest.raises(InvalidArgument, match="the survey is for the filter 'x > 0'"):
        build(look(fake, files, "x > 0"), condition=filters.parse("x > 1"))


def test_an_empty_dataset_error_names_the_stage_that_removed_the_rows() -> None:
    fake = FakeFormat()
    with pytest.raises(NoData, match="there are no files"):
        plan(fake, [])
    with pytest.raises(NoData, match=r"no rows: 1 files were read and all are empty\. Check"):
        plan(fake, [fake.add("e", {"x": pa.array([], pa.int64())})])
    with pytest.raises(NoData, match="no row passes the filter x > 9: there were 2 rows in 1 files before it"):
        plan(fake, [fake.add("a", {"x": [1, 2]})], "x > 9")
    with pytest.raises(NoData, match=r"no row passes the filter y == 3: .*1 files were pruned by their partition"):
        plan(fake, [fake.add("y=1/a", {"x": [1, 2]})], "y == 3")
    with pytest.raises(NoData, match="1 were unreadable and skipped, the first: bad: bad is damaged"):
        plan(fake, [fake.add("bad", None)], on_error="skip")


def test_unreadable_data_raise_or_are_skipped_and_named() -> None:
    fake = FakeFormat(unit_rows=2, bad_units={("a", 1)})
    files = [fake.add("z", None), fake.add("a", {"x": [1, 2, 3, 4, 5]}), fake.add("y", None)]
    with pytest.raises(DataFileInvalid, match="z is damaged"):
        look(fake, files)
    with pytest.raises(DataFileInvalid, match="a, chunk 1: damaged"):
        look(fake, files[1:2], "x > 1")
    made = plan(fake, files, "x > 1", on_error="skip")
    assert made.unit_rows.tolist() == [1, 1]
    assert made.pruning.skipped == (("z", "z is damaged"), ("y", "y is damaged"), ("a", "a, chunk 1: damaged"))
    assert (made.pruning.num_files_skipped, made.pruning.num_units_skipped) == (2, 1)


def test_the_log_names_the_first_skipped_files_and_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeFormat()
    files = [fake.add("good", {"x": [1]}), *(fake.add(f"bad{number}", None) for number in range(20))]
    assert plan(fake, files, on_error="skip").pruning.num_files_skipped == 20
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 6
    assert "bad4 is damaged" in warnings[4]
    assert warnings[5].endswith("15 more")


@pytest.mark.parametrize(
    "error", [StorageUnavailable("503"), StorageDenied("403"), StorageError("disk"), SchemaMismatch("of another type")]
)
@pytest.mark.parametrize("when", ["inspect", "presence", "open", "read"])
def test_storage_errors_and_mistakes_are_never_skipped(
    monkeypatch: pytest.MonkeyPatch, error: Exception, when: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    fake = FakeFormat(unit_rows=2)
    files = [fake.add("a", {"x": [1, 2, 3]}), fake.add("b", {"x": [1, 2, 3]})]
    monkeypatch.setattr(FakeReader if when == "read" else FakeFormat, when, fail)
    with pytest.raises(type(error)):
        plan(fake, files, "x > 1", on_error="skip")


def test_of_several_failing_files_the_first_is_reported() -> None:
    both = threading.Barrier(2)

    class Failing(FakeFormat):
        def inspect(self, source: Any, file: DataFile, **options: Any) -> Any:
            both.wait(10)
            raise DataFileInvalid(f"{file.name} is damaged")

    fake = Failing()
    with pytest.raises(DataFileInvalid, match="first is damaged"):
        look(fake, [fake.add("first", None), fake.add("second", None)], num_threads=2)


def test_progress_is_reported_and_an_error_in_it_stops_the_survey() -> None:
    fake = FakeFormat()
    files = [fake.add(f"f{number}", {"x": [1, 2]}) for number in range(20)]
    progress: list[tuple[str, int, int]] = []
    look(fake, files, "x > 1", progress=lambda *args: progress.append(args), num_threads=3)
    steps = ("reading metadata", "reading statistics", "counting rows")
    assert progress == [(what, done, 20) for what in steps for done in range(1, 21)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    fake.calls.clear()
    with pytest.raises(KeyboardInterrupt):
        look(fake, files, progress=stop, num_threads=2)
    assert fake.calls.total() <= 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("strata-survey")]


def test_parquet_files_are_planned_as_pyarrow_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    files = []
    for number in range(6):
        path = tmp_path / f"f{number}.parquet"
        x = pa.array(rng.integers(0, 40, 30) + 10 * number, mask=rng.random(30) < 0.1)
        pq.write_table(pa.table({"x": x, "y": rng.random(30)}), path, row_group_size=8)
        files.append(DataFile(str(path), path.name, path.stat().st_size, path.stat().st_mtime_ns))
    table = pq.read_table(tmp_path)
    everything = build(survey(SOURCE, files, ParquetFormat()), split_bytes=1)
    assert (everything.num_rows, everything.num_splits) == (180, 24)
    assert everything.null_counts == {"x": table["x"].null_count}
    for text in ("x > 30", "not x > 30", "x in (3, 60) or y < 0.1", "x is None", "35 < x and y >= 0"):
        condition = filters.parse(text)
        made = build(
            survey(SOURCE, files, ParquetFormat(), condition=condition, columns=["y"]),
            condition=condition,
            columns=["y"],
        )
        assert made.num_rows == table.filter(condition.expression).num_rows, text
        assert made.num_units + made.pruning.num_units_pruned == 24


# --- fingerprints ---

TABLES = st.dictionaries(
    st.sampled_from(["a", "b", "c/d"]), st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1
)


@settings(deadline=None, max_examples=15)
@given(TABLES, st.permutations(["a", "b", "c/d"]), st.data())
def test_the_fingerprint_depends_only_on_the_data(
    tables: dict[str, list[int]], order: list[str], data: st.DataObject
) -> None:
    fake = FakeFormat()
    first = [fake.add(name, {"x": values}) for name, values in tables.items()]
    moved = [fake.add(name, {"x": tables[name]}, root="/else", mtime_ns=9) for name in order if name in tables]
    made = plan(fake, first)
    assert plan(fake, moved).fingerprint == made.fingerprint

    name = data.draw(st.sampled_from(sorted(tables)))
    place = data.draw(st.integers(0, len(tables[name]) - 1))
    others = {
        "a value": {**tables, name: [value + (number == place) for number, value in enumerate(tables[name])]},
        "a row more": {**tables, name: [*tables[name], 1]},
        "a file more": {**tables, "new": [1]},
        "a name": {f"{file}x" if file == name else file: values for file, values in tables.items()},
    }
    changed = {
        what: plan(fake, [fake.add(file, {"x": values}) for file, values in other.items()]).fingerprint
        for what, other in others.items()
    }
    for file in first:
        fake.add(file.name, {"x": tables[file.name]})
    changed["splits"] = plan(fake, first, split_rows=1).fingerprint if made.num_splits < made.num_units else ""
    changed["a filter"] = plan(fake, first, "x >= 0").fingerprint
    changed["another filter"] = plan(fake, first, "x > -1").fingerprint
    assert len({made.fingerprint, *changed.values()}) == len(changed) + 1


# --- what changed ---


def made_of(fake: FakeFormat, **tables: list[int]) -> Plan:
    return plan(fake, [fake.add(name, {"x": values}) for name, values in tables.items()])


def test_explain_names_what_changed() -> None:
    fake = FakeFormat(unit_rows=2)
    before = json.loads(json.dumps(summary(made_of(fake, a=[1, 2, 3], b=[4], c=[5]))))
    assert before["files"] == [["a", version_of(pa.table({"x": [1, 2, 3]}))[:8], 3], *before["files"][1:]]
    explained = explain(before, made_of(fake, a=[1, 2, 3], b=[9], d=[5]))
    assert explained == "d was added; c was removed; b was rewritten"
    explained = explain(before, made_of(fake, a=[1, 2, 3], b=[4], c=[5], d=[6, 7], e=[8], f=[9], g=[1]))
    assert explained == (
        "d, e, f and 1 more were added; there were 3 files, and now there are 7; "
        "there were 5 rows, and now there are 10"
    )
    files = [fake.add("a", {"x": [1, 2, 3]}), fake.add("b", {"x": [4]}), fake.add("c", {"x": [5]})]
    assert explain(before, plan(fake, files, "x > 1")) == "the filter was none and is now x > 1"
    smaller = plan(fake, files, split_rows=2)
    assert "had 3 splits of up to 24 bytes and now have 4 of up to 16" in explain(before, smaller)
    fake.unit_rows = 1
    assert "had 4 row groups and now have 5" in explain(before, plan(fake, files))


@pytest.mark.parametrize("before", [{}, {"condition": 3, "files": [[1]]}, {"condition": "", "files": None}])
def test_an_invalid_summary_is_explained_as_other_data(before: dict[str, Any]) -> None:
    assert "other data" in explain(before, made_of(FakeFormat(), a=[1]))


def test_the_summary_of_many_files_is_small_and_still_names_changes_among_the_first() -> None:
    fake = FakeFormat()
    files = [fake.add(f"f{number:05}", {"x": [number]}) for number in range(2 * MAX_FILES)]
    made = plan(fake, files)
    before = summary(made)
    assert len(before["files"]) == MAX_FILES
    assert len(json.dumps(before)) < 40 * MAX_FILES
    removed = explain(before, plan(fake, files[1:]))
    assert removed.startswith("f00000 was removed; there were 512 files, and now there are 511")
    last = [*files[:-1], fake.add("f00511", {"x": [-1]})]
    assert "after the first 256" in explain(before, plan(fake, last))


# --- the table ---


def shown(made: Plan) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(report.as_table(made))
    return out.getvalue()


def test_the_table_has_a_line_per_split_and_what_was_pruned() -> None:
    fake = FakeFormat(unit_rows=2)
    files = [fake.add("a", {"x": [1, 2, 3, 4, 9, 9]}), fake.add("z", None)]
    made = plan(fake, files, "x not in (3, 4)", on_error="skip")
    assert report.rows(made) == [
        {"split": 0, "file": "a", "units": "0–2 without 1", "rows": 4, "bytes": 32, "share": 1.0}
    ]
    text = " ".join(shown(made).split())
    for part in ("4 rows in 1 splits", "0–2 without 1", "32 B", "100.0%", "1 of 3 row groups pruned", "z is damaged"):
        assert part in text


def test_file_names_are_printed_and_never_interpreted() -> None:
    fake = FakeFormat()
    names = ["[red]a[/red]", "[/]", "b\x1b[31m\n", "long" * 50 + "end"]
    text = shown(plan(fake, [fake.add(name, {"x": [1]}) for name in names]))
    for part in ("[red]a[/red]", "[/]", r"b\x1b[31m\n", "longend"):
        assert part in text
    assert "\x1b" not in text


def test_a_long_plan_is_shortened() -> None:
    fake = FakeFormat(unit_rows=1)
    made = plan(fake, [fake.add("a", {"x": list(range(100))})], split_rows=1)
    text = shown(made)
    assert "60 more splits" in text
    assert "60.0%" in text
    assert len(text.splitlines()) < 55
    assert len(report.rows(made)) == 100
    nothing = dataclasses.replace(made, split_starts=np.array([0]))
    assert report.rows(nothing) == []
    sizes = [report.size(size) for size in (5, 2**10, 3 * 2**19, 2**30, 2**41)]
    assert sizes == ["5 B", "1.0 KiB", "1.5 MiB", "1.0 GiB", "2.0 TiB"]
