"""Decisions by page statistics hold for the rows, and reading by pages returns the requested rows."""

from __future__ import annotations

import datetime as dt
import decimal
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("data_format_contract")

from data_format_contract import LOCAL, Faulty, bound, data_file, remote, sample  # noqa: E402

from strata.data.filter import expression as expressions  # noqa: E402
from strata.data.formats.base import FileFacts, Judged, Rows, Saving, join_rows  # noqa: E402
from strata.data.formats.parquet import pages  # noqa: E402
from strata.data.formats.parquet.format import ParquetFormat, ParquetReader  # noqa: E402
from strata.data.source.source import Source  # noqa: E402
from strata.errors import DataFileInvalid  # noqa: E402

FORMAT = ParquetFormat()
READERS: list[ParquetReader] = []
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-9, 9),
    "f": st.sampled_from([math.nan, -0.0, 0.0, 1.5, -2.0, math.inf]),
    "s": st.sampled_from(["", "a", "ab", "b" * 70, "b" * 69 + "c", "z", "\uffff"]),
    "d": st.dates(dt.date(2026, 1, 1), dt.date(2026, 1, 20)),
    "m": st.decimals(-9, 9, places=2),
    "b": st.booleans(),
}
TYPES = {
    "i": pa.int64(),
    "f": pa.float64(),
    "s": pa.string(),
    "d": pa.date32(),
    "m": pa.decimal128(9, 2),
    "b": pa.bool_(),
}
WRITTEN = [
    {},
    {"data_page_version": "2.0", "compression": "zstd"},
    {"use_dictionary": False, "write_page_checksum": True, "compression": "none"},
    {"store_schema": False, "compression": "gzip"},
]


HAS_PAGE_ROWS = "max_rows_per_page" in inspect.signature(pq.write_table).parameters
"""Since pyarrow 23."""


def write(path: Path, table: pa.Table, *, page_rows: int = 10, group_rows: int = 100, **options: Any) -> None:
    options = {"write_page_index": True, "write_batch_size": 1, **options}
    if HAS_PAGE_ROWS:
        options["max_rows_per_page"] = page_rows
    else:  # every batch fills a page
        options |= {"write_batch_size": page_rows, "data_page_size": 1}
    pq.write_table(table, path, row_group_size=group_rows, **options)


def opened(path: Path, source: Source = LOCAL) -> tuple[ParquetReader, FileFacts]:
    file = data_file(path)
    facts = FORMAT.inspect(source, file, columns=None, unit_bytes=1)
    reader = FORMAT.open(source, file, facts.schema, facts.version)
    READERS.append(reader)
    return reader, facts


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pages, "MIN_SAVED_BYTES", 0)  # the files are small
    yield
    while READERS:
        READERS.pop().close()


def cut(table: pa.Table, rows: Sequence[Rows]) -> pa.Table:
    return pa.concat_tables([table.slice(first, num_rows) for first, num_rows in rows])


def places(rows: Sequence[Rows], num_rows: int) -> np.ndarray:
    found = np.zeros(num_rows, int)
    for first, num in rows:
        found[first : first + num] += 1
    return found


def same(left: pa.Table, right: pa.Table) -> bool:
    """Compare tables; NaN equals NaN."""
    return left.schema.equals(right.schema) and repr(left.to_pylist()) == repr(right.to_pylist())


# --- statistics of pages ---


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(1, 60))
    columns = {}
    for name, values in KINDS.items():
        drawn = draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows))
        if draw(st.booleans()):
            drawn.sort(
                key=lambda value: (value is not None, str(value) if value != value else "", value or type(value)())
            )
        columns[name] = pa.array(drawn, TYPES[name])
    return pa.table(columns)


@st.composite
def conditions(draw: st.DrawFn) -> tuple[pc.Expression, list[str]]:
    def term() -> tuple[Any, ...]:
        name = draw(st.sampled_from([*KINDS]))
        used.add(name)
        operator = draw(st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "in", "not in"]))
        if operator in ("in", "not in"):
            return name, operator, draw(st.lists(KINDS[name], min_size=1, max_size=3))
        return name, operator, pa.scalar(draw(KINDS[name]), TYPES[name])

    used: set[str] = set()
    terms = [[term() for _ in range(draw(st.integers(1, 2)))] for _ in range(draw(st.integers(1, 2)))]
    made = pq.filters_to_expression(terms)
    if draw(st.booleans()):
        made = ~made
    if draw(st.booleans()):
        name = draw(st.sampled_from([*KINDS]))
        used.add(name)
        made = made | pc.field(name).is_null() if draw(st.booleans()) else made & pc.field(name).is_valid()
    return made, sorted(used)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables(), conditions(), st.integers(1, 20), st.integers(10, 40), st.sampled_from(WRITTEN))
def test_page_decisions_hold_for_every_row(
    tmp_path_factory: pytest.TempPathFactory,
    table: pa.Table,
    condition: tuple[pc.Expression, list[str]],
    page_rows: int,
    group_rows: int,
    written: dict[str, Any],
) -> None:
    path = tmp_path_factory.mktemp("pages") / "a.parquet"
    write(path, table, page_rows=page_rows, group_rows=group_rows, **written)
    reader, facts = opened(path)
    expression, columns = condition
    for unit in facts.units:
        own = table.slice(unit.first_row, unit.num_rows)
        true = np.array([value is True for value in expressions.mask(own, expression).to_pylist()])
        judged = reader.judge([unit], *bound(expression, facts.schema, columns)).get(unit.index)
        if judged is None:
            continue
        passing, open_ = (places(rows, unit.num_rows) for rows in (judged.passing, judged.open))
        assert ((passing + open_) <= 1).all()
        assert true[passing == 1].all()
        assert not true[(passing + open_) == 0].any()


def test_pages_of_a_sorted_column_are_decided_separately(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": range(200), "y": [0] * 200}))
    reader, facts = opened(tmp_path / "a.parquet")
    judged = reader.judge(facts.units, *bound((pc.field("x") >= 35) & (pc.field("x") < 160), facts.schema, ["x"]))
    assert judged == {0: Judged(((40, 60),), ((30, 10),)), 1: Judged(((0, 60),), ())}
    assert reader.judge(facts.units, *bound(pc.field("y") == 0, facts.schema, ["y"])) == {
        0: Judged(((0, 100),), ()),
        1: Judged(((0, 100),), ()),
    }
    assert reader.judge(facts.units, *bound((pc.field("x") == 55) | (pc.field("x") == -1), facts.schema, ["x"]))[
        0
    ] == Judged((), ((50, 10),))


@pytest.mark.skipif(not HAS_PAGE_ROWS, reason="pyarrow before 23 cannot limit the rows of a page")
def test_pages_of_several_columns_are_cut_where_any_begins(tmp_path: Path) -> None:
    table = pa.table({"x": range(100), "wide": [f"{row:0200}" for row in range(100)]})
    write(tmp_path / "a.parquet", table, page_rows=100, data_page_size=1000, use_dictionary=False)
    reader, facts = opened(tmp_path / "a.parquet")
    judged = reader.judge(
        facts.units, *bound((pc.field("x") >= 50) & (pc.field("wide") < f"{20:0200}"), facts.schema, ["wide", "x"])
    )
    ((first, num_rows),) = judged[0].open
    assert first == 0
    assert 20 <= num_rows < 40


def test_pages_that_decide_nothing_give_no_decision(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [0, 1] * 50}))
    reader, facts = opened(tmp_path / "a.parquet")
    assert reader.judge(facts.units, *bound(pc.field("x") == 0, facts.schema, ["x"])) == {}


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (pa.table({"x": range(100)}), {"write_page_index": False}),
        (pa.table({"x": range(100)}), {"page_rows": 1000}),
        (pa.table({"x": range(100)}), {"write_statistics": False}),
        (pa.table({"x": pa.array(range(100)).cast(pa.string()).dictionary_encode()}), {}),
        (pa.table({"x": pa.array([[row] for row in range(100)])}), {}),
    ],
)
def test_columns_without_page_bounds_give_no_decision(tmp_path: Path, table: pa.Table, options: dict[str, Any]) -> None:
    write(tmp_path / "a.parquet", table, **options)
    reader, facts = opened(tmp_path / "a.parquet")
    condition = pc.field("x").is_valid() if pa.types.is_nested(table["x"].type) else pc.field("x") == table["x"][3]
    assert reader.judge(facts.units, *bound(condition, facts.schema, ["x"])) == {}


def test_stretches_beyond_the_limit_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_OPEN", 2)
    write(tmp_path / "a.parquet", pa.table({"x": [value for page in range(10) for value in [page % 2] * 9 + [0]]}))
    reader, facts = opened(tmp_path / "a.parquet")
    judged = reader.judge(facts.units, *bound(pc.field("x") == 1, facts.schema, ["x"]))[0]
    assert not judged.passing
    assert len(judged.open) == 2
    assert {row for row in range(100) if row // 10 % 2 and row % 10 < 9} <= set(places(judged.open, 100).nonzero()[0])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=20), st.integers(1, 5))
def test_joined_rows_cover_the_same_rows_within_the_limit(rows: list[Rows], max_parts: int) -> None:
    made = join_rows(rows, max_parts)
    assert len(made) <= max_parts
    assert all(first + num < after for (first, num), (after, _) in itertools.pairwise(made))
    wanted, found = places(rows, 70) > 0, places(made, 70)
    assert found.max(initial=0) <= 1
    assert found[wanted].all()
    everything = join_rows(rows, 100)
    assert (places(everything, 70) == wanted).all()
    assert made == everything or len(everything) > max_parts


# --- reading pages ---


def lists(num_rows: int) -> pa.Table:
    rows = range(num_rows)
    return pa.table(
        {
            "list": pa.array(
                [None if row % 7 == 0 else [float(row)] * (row % 4) for row in rows], pa.list_(pa.float32())
            ),
            "words": pa.array([[f"{row % 9}"] * (row % 3) for row in rows], pa.large_list(pa.large_string())),
            "deep": pa.array([[[row], None, []] * (row % 3) for row in rows]),
            "fixed": pa.array([[row, 1, 2] for row in rows], pa.list_(pa.int64(), 3)),
            "one": pa.array([None if row % 5 == 0 else {"a": row} for row in rows]),
            "two": pa.array([{"a": row, "b": f"{row}"} for row in rows]),
            "zone": pa.array(rows, pa.timestamp("us", "UTC")),
            "spent": pa.array([dt.timedelta(seconds=row) for row in rows], pa.duration("ms")),
            "big": pa.array([decimal.Decimal(row) for row in rows], pa.decimal256(40, 3)),
            "uint": pa.array(rows, pa.uint32()),
            "half": pa.array(np.arange(num_rows, dtype=np.float16)),
        }
    )


@pytest.fixture(scope="module", params=range(len(WRITTEN)), ids=["plain", "v2", "checked", "no-schema"])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = sample(200)
    for name, column in zip(lists(200).column_names, lists(200).columns, strict=True):
        whole = whole.append_column(name, column)
    path = tmp_path_factory.mktemp("planted") / "a.parquet"
    write(path, whole, page_rows=7, group_rows=120, **WRITTEN[request.param])
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_rows_read_by_pages_equal_those_of_the_row_group(planted: Path, data: st.DataObject) -> None:
    reader, facts = opened(planted)
    unit = data.draw(st.sampled_from(facts.units))
    drawn = data.draw(
        st.lists(st.tuples(st.integers(0, unit.num_rows - 1), st.integers(1, 30)), min_size=1, max_size=5)
    )
    rows = join_rows([(first, min(num, unit.num_rows - first)) for first, num in drawn], 5)
    columns = data.draw(st.lists(st.sampled_from(facts.schema.names), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "MIN_SAVED", 0.0)  # select pages even if it does not pay
        found = reader._read_pages(unit, columns, rows)
    whole = cut(reader.read(unit, columns), rows)
    assert same(found, whole)
    found.validate(full=True)
    assert found.schema.equals(whole.schema, check_metadata=True)


def test_columns_with_one_leaf_are_read_by_pages_and_others_whole(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MIN_SAVED", 0.0)
    reader, facts = opened(planted)
    choice = reader._paged().choose(0, facts.schema.names, [(30, 1)])
    assert {facts.schema.names[number] for number in choice.whole} == {"two", "point", "bag"}


def test_only_the_pages_with_the_rows_are_read_and_counted(tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(0).normal(size=50_000)})
    options: dict[str, Any] = {"write_batch_size": 1000, "use_dictionary": False}
    write(tmp_path / "a.parquet", table, page_rows=1000, group_rows=50_000, **options)
    reader, facts = opened(tmp_path / "a.parquet")
    before, total = reader.bytes_read, LOCAL.counter.total
    rows = [(20_500, 600)]
    saving = reader.saving(facts.units[0], ["x"], rows)
    assert (saving.num_pages, saving.num_pages_skipped) == (50, 48)
    assert reader.bytes_read == before  # the tail contained the index
    assert same(reader.read_rows(facts.units[0], ["x"], rows), table.slice(20_500, 600))
    assert reader.bytes_read - before == saving.num_bytes - saving.bytes_skipped
    assert LOCAL.counter.total - total == saving.num_bytes - saving.bytes_skipped
    assert saving.bytes_skipped > 0.9 * saving.num_bytes


def test_a_column_is_read_whole_if_selecting_pages_does_not_pay(tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(0).normal(size=1000)})
    write(tmp_path / "a.parquet", table, page_rows=100, group_rows=1000, use_dictionary=False)
    reader, facts = opened(tmp_path / "a.parquet")
    assert reader.saving(facts.units[0], ["x"], [(0, 850)]) == Saving(10, 0, facts.units[0].num_bytes, 0)
    assert reader.saving(facts.units[0], ["x"], [(0, 700)]).num_pages_skipped == 3
    for num_rows in (850, 700):
        assert same(reader.read_rows(facts.units[0], ["x"], [(0, num_rows)]), table.slice(0, num_rows))


def test_saving_a_few_bytes_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    write(tmp_path / "a.parquet", pa.table({"x": range(1000)}), page_rows=100, group_rows=1000, use_dictionary=False)
    reader, facts = opened(tmp_path / "a.parquet")
    assert reader.saving(facts.units[0], ["x"], [(0, 10)]).num_pages_skipped == 0
    assert reader.judge(facts.units, *bound(pc.field("x") == 3, facts.schema, ["x"])) == {}


def test_close_pages_of_a_remote_file_take_one_read(tmp_path: Path) -> None:
    table = pa.table({name: np.random.default_rng(0).normal(size=30_000) for name in "xyz"})
    options: dict[str, Any] = {"write_batch_size": 1000, "use_dictionary": False}
    write(tmp_path / "a.parquet", table, page_rows=1000, group_rows=30_000, **options)
    handler = Faulty()
    reader, facts = opened(tmp_path / "a.parquet", remote(handler))
    before = handler.num_reads
    rows = [(5000, 100), (7000, 2000)]
    assert same(reader.read_rows(facts.units[0], ["x", "z"], rows), cut(table.select(["x", "z"]), rows))
    assert handler.num_reads - before <= 3


def test_ranges_cover_all_reads_of_pages(tmp_path: Path) -> None:
    names = ["x", "y"]
    table = pa.table({name: np.random.default_rng(0).normal(size=5000) for name in names})
    write(tmp_path / "a.parquet", table, page_rows=100, group_rows=1000, use_dictionary=False)
    reader, facts = opened(tmp_path / "a.parquet")
    file = data_file(tmp_path / "a.parquet")
    rows = {1: [(250, 10)], 3: [(0, 100), (900, 100)]}
    found = FORMAT.page_ranges(LOCAL, file, names, facts.version, rows)
    whole = FORMAT.ranges(LOCAL, file, names, facts.version)
    for unit in facts.units:
        num_bytes = sum(each.num_bytes for each in found(unit))
        if unit.index in rows:
            saving = reader.saving(unit, names, rows[unit.index])
            assert num_bytes == saving.num_bytes - saving.bytes_skipped
            assert num_bytes < unit.num_bytes
        else:
            assert found(unit) == whole(unit)


# --- damage ---


def index_region(path: Path) -> tuple[int, int]:
    """Return the bytes from the end of the last column chunk to the footer."""
    metadata = pq.read_metadata(path)
    last = metadata.row_group(metadata.num_row_groups - 1)
    ends = [
        last.column(leaf).total_compressed_size + first_of(last.column(leaf)) for leaf in range(metadata.num_columns)
    ]
    return max(ends), path.stat().st_size - 8 - metadata.serialized_size


def first_of(chunk: pq.ColumnChunkMetaData) -> int:
    return min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    st.sampled_from(WRITTEN),
)
def test_a_damaged_index_never_changes_the_rows(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]], written: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.parquet"
    names = ["id", "word", "colour", "tags", "list"]
    table = sample(200, names[:-1]).append_column("list", lists(200)["list"])
    write(path, table, page_rows=9, group_rows=100, **written)
    data = bytearray(path.read_bytes())
    start, end = index_region(path)
    for place, value in changes:
        data[start + int(place * (end - start))] = value
    path.write_bytes(data)
    reader, facts = opened(path)
    rows = [(10, 30), (61, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "MIN_SAVED", 0.0)
        reader.judge(facts.units, *bound(pc.field("id") == 17, facts.schema, ["id"]))
        for unit in facts.units:
            found = reader.read_rows(unit, names, rows)
            assert same(found.cast(table.schema), cut(table.slice(unit.first_row, unit.num_rows), rows))


def test_a_bound_of_the_wrong_size_is_ignored(tmp_path: Path) -> None:
    """pyarrow aborts the process on an integer of seven bytes."""
    path = tmp_path / "a.parquet"
    write(path, pa.table({"x": range(100), "y": range(100)}))
    reader, _ = opened(path)
    place = reader._paged()._footer.groups[0][0].column_index
    assert place is not None
    data = bytearray(path.read_bytes())
    index = bytes(data[place.offset : place.end])
    eight = index.index(b"\x08" + (0).to_bytes(8, "little"))  # the minimum of the first page, after its length
    first, second = index[eight + 1 : eight + 9], index[eight + 10 : eight + 18]
    moved = b"\x07" + first[:7] + b"\x09" + second[:1] + second
    data[place.offset + eight : place.offset + eight + len(moved)] = moved
    path.write_bytes(data)
    reader, facts = opened(path)
    assert reader.judge(facts.units, *bound(pc.field("x") == 3, facts.schema, ["x"])) == {}
    assert reader.judge(facts.units, *bound(pc.field("y") == 3, facts.schema, ["y"]))[0] == Judged((), ((0, 10),))
    assert reader.read_rows(facts.units[0], ["x"], [(3, 2)]).to_pydict() == {"x": [3, 4]}


def test_an_index_that_points_outside_the_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, pa.table({"x": range(100)}))
    reader, facts = opened(path)
    chunk = reader._paged()._footer.groups[0][0]
    assert chunk.offset_index is not None
    object.__setattr__(
        reader._paged()._footer, "groups", ((chunk._replace(column_index=type(chunk.offset_index)(1 << 60, 9)),),)
    )
    assert reader.judge(facts.units, *bound(pc.field("x") == 3, facts.schema, ["x"])) == {}
    assert reader.read_rows(facts.units[0], ["x"], [(3, 2)]).to_pydict() == {"x": [3, 4]}


def test_a_damaged_page_is_reported_as_damage_of_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    write(path, pa.table({"x": range(1000)}), page_rows=100, group_rows=1000, **options)
    reader, facts = opened(path)
    (selection,) = reader._paged().choose(0, ["x"], [(500, 1)]).paged
    (page,) = selection.pages
    data = bytearray(path.read_bytes())
    data[page.offset + page.num_bytes - 3] ^= 0x55
    path.write_bytes(data)
    reader, facts = opened(path)
    assert reader.read_rows(facts.units[0], ["x"], [(300, 1)]).to_pydict() == {"x": [300]}
    with pytest.raises(DataFileInvalid, match=r"row group 0.*damaged.*copy it again"):
        reader.read_rows(facts.units[0], ["x"], [(500, 1)])
