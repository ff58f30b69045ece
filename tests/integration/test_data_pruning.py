"""Decisions about a filter by statistics, pages, stripes or paths agree with the rows."""

from __future__ import annotations

import datetime as dt
import decimal
import inspect
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.fs as pafs
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.data import StructuredDataset
from strata.data.filter import expression
from strata.data.filter import filter as filters
from strata.data.filter.expression import Presence
from strata.data.formats.arrow import ArrowFormat
from strata.data.formats.base import Format, PagedReader
from strata.data.formats.orc import OrcFormat
from strata.data.formats.parquet import pages as parquet_pages
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.source.source import DataFile, Source
from strata.errors import NoData, SchemaMismatch

LOCAL = Source(pafs.LocalFileSystem(), is_local=True)
FORMATS: dict[str, Format] = {"parquet": ParquetFormat(), "orc": OrcFormat(), "arrow": ArrowFormat()}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
EDGES = [0, 1, -1, 2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**63 + 1, 2**64 - 1]
FRACTIONS = [0.1, 0.5, -0.5, 1e300, -1e300, math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**24, 2.0**53, 2.0**63]

HAS_PAGE_ROWS = "max_rows_per_page" in inspect.signature(pq.write_table).parameters
TWO_ROWS_PER_PAGE = {"max_rows_per_page": 2} if HAS_PAGE_ROWS else {"write_batch_size": 2, "data_page_size": 1}


def floats(width: int) -> st.SearchStrategy[float]:
    few = [float(np.float32(each)) if width == 32 and abs(each) < 1e38 else each for each in FRACTIONS]
    return st.sampled_from([each for each in few if width == 64 or not 1e38 < abs(each) < math.inf])


def integers(kind: pa.DataType) -> st.SearchStrategy[int]:
    low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
    high = low + 2**kind.bit_width - 1
    return st.sampled_from([each for each in EDGES if low <= each <= high]) | st.integers(-3, 3).filter(
        lambda each: each >= low
    )


def moments(kind: pa.DataType) -> st.SearchStrategy[pa.Scalar]:
    return st.sampled_from([-1500, -1, 0, 1, 999, 1000, 1001, 86_400_000]).map(
        lambda each: pa.scalar(each, pa.int64()).cast(kind)
    )


NUMBERS = st.sampled_from(EDGES).map(lambda each: pa.scalar(each, pa.int64() if each < 2**63 else pa.uint64()))
LITERALS = NUMBERS | st.sampled_from(FRACTIONS).map(pa.scalar)
DECIMALS = st.sampled_from(["0", "0.1", "-0.1", "0.105", "99999999.99", "-99999999.99", "12345678901234567890"]).map(
    decimal.Decimal
)
TEXTS = st.sampled_from(["", "a", "ab", "b" * 80, "b" * 80 + "c", "é", "\U0010ffff" * 20, "\x00"])
DAYS = st.sampled_from([dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(9999, 12, 31)])

COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], st.SearchStrategy[pa.Scalar]]] = {
    **{str(kind): (kind, integers(kind), LITERALS) for kind in (pa.int8(), pa.int32(), pa.int64())},
    **{str(kind): (kind, integers(kind), LITERALS) for kind in (pa.uint8(), pa.uint32(), pa.uint64())},
    "float32": (pa.float32(), floats(32), LITERALS),
    "float64": (pa.float64(), floats(64), LITERALS),
    "bool": (pa.bool_(), st.booleans(), st.booleans().map(pa.scalar)),
    "decimal": (
        pa.decimal128(10, 2),
        DECIMALS.filter(lambda each: each == round(each, 2) and abs(each) < 10**8),
        DECIMALS.map(pa.scalar) | st.sampled_from([0, 1, 2**60]).map(pa.scalar),
    ),
    "string": (pa.string(), TEXTS, TEXTS.map(pa.scalar)),
    "binary": (pa.binary(), TEXTS.map(str.encode), TEXTS.map(str.encode).map(pa.scalar)),
    "date": (pa.date32(), DAYS, DAYS.map(pa.scalar) | moments(pa.timestamp("ns")) | moments(pa.timestamp("us"))),
    "time": (
        pa.timestamp("ms"),
        moments(pa.timestamp("ms")).map(lambda each: each.as_py()) | st.just(dt.datetime(9999, 12, 31)),  # noqa: DTZ001
        moments(pa.timestamp("us")) | moments(pa.timestamp("s")) | moments(pa.timestamp("ns")),
    ),
    "zoned": (
        pa.timestamp("us", "UTC"),
        moments(pa.timestamp("us", "UTC")).map(lambda each: each.as_py()),
        moments(pa.timestamp("ns", "UTC")) | moments(pa.timestamp("ms", "Europe/Berlin")),
    ),
}


@st.composite
def conditions(draw: st.DrawFn, kind: pa.DataType, literals: st.SearchStrategy[pa.Scalar]) -> tuple[pc.Expression, Any]:
    """Draw a filter on `x`, and a function to its outcome on one value: true, false or None."""
    x = pc.field("x")
    made = draw(st.sampled_from(["compare", "compare", "in", "null", "not", "and", "or"]))
    if made in ("and", "or"):
        (a, of_a), (b, of_b) = (draw(conditions(kind, literals)) for _ in range(2))
        return (a & b, lambda v: _and(of_a(v), of_b(v))) if made == "and" else (a | b, lambda v: _or(of_a(v), of_b(v)))
    if made == "not":
        inner, of_inner = draw(conditions(kind, literals))
        return ~inner, lambda v: None if of_inner(v) is None else not of_inner(v)
    if made == "null":
        nan_is_null = draw(st.booleans())
        return x.is_null(nan_is_null=nan_is_null), lambda v: v is None or (nan_is_null and v != v)
    if made == "in":
        first = draw(literals)
        values = [first, *draw(st.lists(literals.filter(lambda each: each.type == first.type), max_size=2))]
        members = [_member(each, kind) for each in values]
        return x.isin(pa.array([each.as_py() for each in values], first.type)), lambda v: _key(v) in members
    name, literal = draw(st.sampled_from([*OPERATORS])), draw(literals)
    compare = OPERATORS[name]
    if draw(st.booleans()):
        return compare(x, literal), lambda v: None if v is None else compare(v, _plain(literal, v))
    return compare(literal, x), lambda v: None if v is None else compare(_plain(literal, v), v)


def _and(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _or(a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


def _plain(literal: pa.Scalar, value: Any) -> Any:
    """Return the literal in the form in which Python compares it with a value of the column."""
    if pa.types.is_timestamp(literal.type):
        exact = literal.cast(pa.timestamp("ns", literal.type.tz)).value / 1000
        epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC if literal.type.tz else None)
        return _Moment(exact, epoch)
    return decimal.Decimal(literal.as_py()) if isinstance(value, decimal.Decimal) else literal.as_py()


class _Moment:
    """A time in microseconds and fractions of them, which compares with days and times."""

    def __init__(self, exact: float, epoch: dt.datetime) -> None:
        self.exact, self._epoch = exact, epoch

    def _other(self, other: dt.date) -> float:
        if not isinstance(other, dt.datetime):
            other = dt.datetime.combine(other, dt.time())
        return (other - self._epoch) / dt.timedelta(microseconds=1)

    def __lt__(self, other: Any) -> bool:
        return self.exact < self._other(other)

    def __le__(self, other: Any) -> bool:
        return self.exact <= self._other(other)

    def __gt__(self, other: Any) -> bool:
        return self.exact > self._other(other)

    def __ge__(self, other: Any) -> bool:
        return self.exact >= self._other(other)

    def __eq__(self, other: object) -> bool:
        return self.exact == self._other(other)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def _key(value: Any) -> Any:
    """Return the outcome of `in`: NaN equals NaN, and 0.0 and -0.0 differ."""
    if isinstance(value, float):
        return ("nan",) if value != value else (value, math.copysign(1, value))
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if isinstance(value, dt.datetime):
        epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC if value.tzinfo else None)
        return (value - epoch) / dt.timedelta(microseconds=1)
    return value


def _member(literal: pa.Scalar, kind: pa.DataType) -> Any:
    value = literal.as_py() if not pa.types.is_timestamp(literal.type) else None
    if value is None:
        return literal.cast(pa.timestamp("ns", literal.type.tz)).value / 1000
    if pa.types.is_floating(kind) and isinstance(value, int):
        exact = float(np.float32(value)) if kind == pa.float32() else float(value)
        return _key(exact) if exact == value else object()
    if kind == pa.float32():
        return _key(
            float(np.float32(value))
            if abs(value) < 1e38 or not math.isfinite(value)
            else math.copysign(math.inf, value)
        )
    if pa.types.is_integer(kind) and isinstance(value, float):
        return int(value) if value.is_integer() else object()
    return _key(value) if not isinstance(value, decimal.Decimal) else value


def parquet(path: Path, tables: list[pa.Table]) -> None:
    with pq.ParquetWriter(
        path / "a.parquet", tables[0].schema, store_decimal_as_integer=len(tables) % 2 == 0
    ) as writer:
        for table in tables:
            writer.write_table(table)


def parquet_with_pages(path: Path, tables: list[pa.Table]) -> None:
    pq.write_table(
        pa.concat_tables(tables), path / "a.parquet", write_page_index=True, use_dictionary=False, **TWO_ROWS_PER_PAGE
    )


def orc(path: Path, tables: list[pa.Table]) -> None:
    with paorc.ORCWriter(path / "a.orc", stripe_size=1, batch_size=10_000) as writer:
        for table in tables:
            writer.write(table)


def arrow(path: Path, tables: list[pa.Table]) -> None:
    for number, table in enumerate(tables):
        feather.write_feather(table, path / f"{number:03}.arrow")


WRITERS: dict[str, tuple[str, Callable[[Path, list[pa.Table]], None]]] = {
    "parquet": ("parquet", parquet),
    "pages": ("parquet", parquet_with_pages),
    "orc": ("orc", orc),
    "arrow": ("arrow", arrow),
}
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Planted:
    """Rows of a column `x`, numbered by `id`, in several row groups of one dataset."""

    path: Path
    format: str
    x: list[Any]
    kind: pa.DataType
    literals: st.SearchStrategy[pa.Scalar]


@st.composite
def planted(draw: st.DrawFn, written: str, directory: Path) -> Planted:
    # ORC has no unsigned integers, and only the machine's time zone.
    names = [each for each in COLUMNS if written != "orc" or not each.startswith(("uint", "zoned"))]
    name = draw(st.sampled_from(names))
    kind, values, literals = COLUMNS[name]
    if written == "orc" and name == "time":
        kind, values = pa.timestamp("ns"), moments(pa.timestamp("ms")).map(lambda each: each.as_py())
    x = draw(st.lists(st.none() | values, min_size=1, max_size=12))
    if draw(st.booleans()):
        x = [x[0]] * len(x)
    rows_per_unit = draw(st.integers(1, 4))
    path = directory / f"{next(_NUMBERS)}"
    path.mkdir()
    firsts = range(0, len(x), rows_per_unit)
    units = [(first, x[first : first + rows_per_unit]) for first in firsts]
    kind_of_file, write = WRITERS[written]
    write(path, [pa.table({"x": pa.array(own, kind), "id": range(first, first + len(own))}) for first, own in units])
    stored = x if pa.types.is_timestamp(kind) else pa.array(x, kind).to_pylist()
    return Planted(path, kind_of_file, stored, kind, literals)


def delivered(path: Path, file_format: str, condition: Any) -> list[int]:
    with mock.patch.object(parquet_pages, "MIN_SAVED_BYTES", 0):
        try:
            loader, _ = StructuredDataset.create_dataloader(
                str(path), format=file_format, columns=["id"], filters=condition, output_format="arrow", cache=False
            )
        except NoData:
            return []
        return [row for batch in loader for row in batch.column("id").to_pylist()]


def check_every_unit(found: Planted, condition: pc.Expression, passing: set[int]) -> None:
    """Compare the decisions for each row group and its pages with the rows that pass."""
    first_row = 0
    for path in sorted(found.path.iterdir()):
        form = FORMATS[found.format]
        file = DataFile(str(path), path.name, path.stat().st_size, 0)
        facts = form.inspect(LOCAL, file, columns=None, unit_bytes=1 << 20)
        used = pa.schema([facts.schema.field("x")])
        asked = filters.bind(filters.parse(condition), used).expression
        tree = expression.decode(asked)
        decisions = form.presence(LOCAL, file, facts, tree, used)
        reader = form.open(LOCAL, file, facts.schema, facts.version)
        judged = {}
        if isinstance(reader, PagedReader):
            with mock.patch.object(parquet_pages, "MIN_SAVED_BYTES", 0):
                judged = dict(reader.judge(facts.units, tree, used))
        for unit, presence in zip(facts.units, decisions, strict=True):
            own = range(first_row + unit.first_row, first_row + unit.first_row + unit.num_rows)
            rows = expression.mask(reader.read(unit, ["x"]), asked).to_pylist()
            assert {row for row, is_true in zip(own, rows, strict=True) if is_true} == passing & set(own), condition
            assert presence is not Presence.NONE or not passing & set(own), condition
            assert presence is not Presence.ALL or passing >= set(own), condition
            if unit.index in judged:
                pages = judged[unit.index]
                sure = {own[first + row] for first, num_rows in pages.passing for row in range(num_rows)}
                left = {own[first + row] for first, num_rows in pages.open for row in range(num_rows)}
                assert sure <= passing & set(own) <= sure | left, condition
        reader.close()
        first_row += sum(unit.num_rows for unit in facts.units)


@pytest.mark.parametrize("written", [*WRITERS])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_statistics_decide_only_what_the_rows_would(
    written: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = data.draw(planted(written, tmp_path_factory.getbasetemp()))
    for _ in range(2):
        condition, of_value = data.draw(conditions(found.kind, found.literals))
        check_every_unit(found, condition, {number for number, value in enumerate(found.x) if of_value(value)})


@pytest.mark.parametrize("written", [*WRITERS])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_filtered_dataset_delivers_the_rows_that_pass_and_no_others(
    written: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = data.draw(planted(written, tmp_path_factory.getbasetemp()))
    condition, of_value = data.draw(conditions(found.kind, found.literals))
    expected = [number for number, value in enumerate(found.x) if of_value(value)]
    assert delivered(found.path, found.format, condition) == expected, condition


NAN = math.nan


@pytest.mark.parametrize("written", ["parquet", "pages", "orc"])
@pytest.mark.parametrize(
    ("x", "condition", "expected"),
    [
        (pa.array([0.1, 0.1, 0.5, 0.7], pa.float32()), "x in (0.1, 0.5)", [0, 1, 2]),
        (pa.array([0.1, 0.1, 0.5, 0.7], pa.float32()), "x not in (0.1, 0.5)", [3]),
        (pa.array([0.1, 0.1, 0.5, 0.7], pa.float32()), "x == 0.1", []),
        (pa.array([0.1, 0.3, 9.0, 9.0], pa.float32()), "x in (0.1,)", [0]),
        (pa.array([0.1, 0.3, 9.0, 9.0], pa.float32()), "x not in (0.1,)", [1, 2, 3]),
        (pa.array([1.0, NAN, 2.0, 2.0]), pc.field("x").is_null(nan_is_null=True), [1]),
        (pa.array([1.0, NAN, 2.0, 2.0]), pc.field("x") != NAN, [0, 1, 2, 3]),
        (pa.array([1.0, NAN, 2.0, 2.0]), ~(pc.field("x") < NAN), [0, 1, 2, 3]),
        (pa.array([1.0, NAN, 2.0, 2.0]), pc.field("x").isin([NAN]), [1]),
        (pa.array([1, 2, 5, 9], pa.int32()), pc.field("x") < NAN, []),
        (pa.array([1, 2, 5, 9], pa.int32()), ~(pc.field("x") < NAN), [0, 1, 2, 3]),
        (pa.array([2**24 + 1, 2**53 + 1, 2**63 - 1, 0]), "x > 0.5", [0, 1, 2]),
        (pa.array([2**24 + 1, 2**53 + 1, 2**63 - 1, 0]), "x >= 9007199254740993.0", [1, 2]),
        (pa.array([2**24 + 1, 2**53 + 1, 2**63 - 1, 0]), "x in (0.0, 0.5)", [3]),
    ],
)
def test_cases_that_statistics_once_got_wrong_are_right(
    tmp_path: Path, written: str, x: pa.Array, condition: Any, expected: list[int]
) -> None:
    table = pa.table({"x": x, "id": range(len(x))})
    kind_of_file, write = WRITERS[written]
    write(tmp_path, [table.slice(0, 2), table.slice(2)])
    assert delivered(tmp_path, kind_of_file, condition) == expected


def test_unsigned_integers_beyond_int64_compare_with_any_number(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([2**63 + 1, 2**64 - 1, 1, 0], pa.uint64()), "id": range(4)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for condition, expected in (
        ("x > 0.5", [0, 1, 2]),
        ("x > -1", [0, 1, 2, 3]),
        ("x == -1", []),
        ("x < 1e19", [0, 2, 3]),
    ):
        assert delivered(tmp_path, "parquet", condition) == expected


def test_bounds_are_compared_in_the_type_of_the_dataset_not_of_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([0.1, 0.1], pa.float32()), "id": [0, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([0.1, 0.2], pa.float64()), "id": [2, 3]}), tmp_path / "b.parquet")
    assert delivered(tmp_path, "parquet", "x in (0.1, 0.3)") == [2]
    assert delivered(tmp_path, "parquet", "x not in (0.1, 0.3)") == [0, 1, 3]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_values_in_paths_compare_as_rows_do(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind, values, literals = COLUMNS[data.draw(st.sampled_from(["int64", "string"]))]
    names = data.draw(
        st.lists(values.filter(lambda each: each not in ("", "\x00")), min_size=1, max_size=4, unique=True)
    )
    path = tmp_path_factory.getbasetemp() / f"{next(_NUMBERS)}"
    for number, name in enumerate(names):
        directory = path / f"x={name}"
        directory.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), directory / "a.parquet")
    condition, of_value = data.draw(conditions(kind, literals))
    expected = [number for number, value in enumerate(names) if of_value(value)]
    assert sorted(delivered(path, "parquet", condition)) == expected, condition


def test_a_filter_that_fails_on_a_row_raises_an_error_that_names_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [2**60], "y": [0.5], "id": [0]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatch, match=r"x > y.*x is int64, y is double"):
        delivered(tmp_path, "parquet", pc.field("x") > pc.field("y"))
