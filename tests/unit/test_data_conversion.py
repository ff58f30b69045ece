"""Conversion of every type of the policy table, compared with plain Python."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.batch.columns import ArrowColumn, Chunk, Column, Dense, Ragged, gather
from strata.data.batch.conversion import Converter, vocabulary_values
from strata.data.batch.policy import decide
from strata.data.batch.vocabulary import Vocabulary, from_bytes, to_bytes
from strata.errors import InvalidArgument, LimitExceeded, NullsFound, SchemaMismatch

WORDS = ["", "a", "b", "né", "東京", "long " * 5]


def convert(table: pa.Table, where: str = "part-0, row group 3", **options: Any) -> Chunk:
    policies = decide(table.schema, {}, **options)
    vocabularies = {
        policy.name: Vocabulary.found(policy.name, vocabulary_values(policy, table))
        for policy in policies
        if policy.is_coded
    }
    return Converter(policies, vocabularies).convert(table, where)


def as_rows(column: Column) -> list[Any]:
    if isinstance(column, Dense):
        return list(column.values.tolist())
    if isinstance(column, Ragged):
        return [column.values[first:last].tolist() for first, last in itertools.pairwise(column.offsets)]
    assert isinstance(column, ArrowColumn)
    return list(column.array.to_pylist())


def same(found: Any, expected: Any) -> bool:
    """Compare values; NaN equals NaN."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    is_nan = isinstance(found, float) and math.isnan(found)
    return bool(found == expected) or (is_nan and isinstance(expected, float) and math.isnan(expected))


def ints(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


Expected = Callable[[Any], Any]
EPOCH = dt.date(1970, 1, 1)
DAY_MS = 86_400_000

# Type, values as pyarrow takes them, and what becomes of one.
NUMBERS: list[tuple[pa.DataType, st.SearchStrategy[Any], Expected]] = [
    *((getattr(pa, f"int{bits}")(), ints(bits), int) for bits in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{bits}")(), ints(bits, signed=False), int) for bits in (8, 16, 32)),
    (pa.uint64(), ints(63, signed=False), int),
    *((getattr(pa, f"float{bits}")(), st.floats(width=bits), float) for bits in (16, 32, 64)),
    (pa.bool_(), st.booleans(), bool),
    (pa.timestamp("us", "UTC"), ints(64), int),
    (pa.duration("ns"), ints(64), int),
    (pa.date32(), st.dates(), lambda day: (day - EPOCH).days),
    (pa.date64(), st.dates(), lambda day: (day - EPOCH).days * DAY_MS),
    (pa.time32("s"), st.integers(0, 86_399), int),
    (pa.time64("us"), st.integers(0, 86_399_999_999), int),
    (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda n: decimal.Decimal(n).scaleb(-2)), float),
    (pa.decimal256(40, 2), st.integers(-(10**9), 10**9).map(lambda n: decimal.Decimal(n).scaleb(-2)), float),
]


def is_floating(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def chunked(values: Sequence[Any], kind: pa.DataType, cuts: Sequence[int], *, before: int = 1) -> pa.ChunkedArray:
    """Return the values as a column of several chunks, each a slice of a larger array."""
    bounds = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    rows = list(values)
    arrays = [pa.array([*rows[:before], *rows[a:b]], kind)[len(rows[:before]) :] for a, b in itertools.pairwise(bounds)]
    return pa.chunked_array(arrays, kind)


cuts = st.lists(st.integers(0, 30), max_size=3)


@pytest.mark.parametrize(("kind", "values", "expected"), NUMBERS, ids=lambda value: str(value)[:20])
@settings(max_examples=10)
@given(data=st.data(), cuts=cuts)
def test_numbers_are_delivered_unchanged(
    kind: pa.DataType, values: st.SearchStrategy[Any], expected: Expected, data: st.DataObject, cuts: list[int]
) -> None:
    rows = data.draw(st.lists(values, max_size=25))
    table = pa.table({"x": chunked(rows, kind, cuts)})
    chunk = convert(table)
    assert chunk.num_rows == len(rows)
    assert same(as_rows(chunk.columns["x"]), [expected(row) for row in rows])
    if pa.types.is_unsigned_integer(kind):
        column = convert(table, output_format="numpy").columns["x"]
        assert isinstance(column, Dense)
        assert str(column.values.dtype) == str(kind)
        assert column.values.tolist() == rows


@pytest.mark.parametrize(("kind", "values", "expected"), NUMBERS, ids=lambda value: str(value)[:20])
@settings(max_examples=10)
@given(data=st.data(), cuts=cuts)
def test_nulls_among_numbers_are_masked_filled_or_nan(
    kind: pa.DataType, values: st.SearchStrategy[Any], expected: Expected, data: st.DataObject, cuts: list[int]
) -> None:
    rows = data.draw(st.lists(st.none() | values, max_size=25))
    table = pa.table({"x": chunked(rows, kind, cuts)})
    zero = False if kind == pa.bool_() else 0
    filled = [zero if row is None else expected(row) for row in rows]
    assert same(as_rows(convert(table, nulls="fill").columns["x"]), filled)
    masked = convert(table, nulls={"x": "mask"})
    assert list(masked.columns) == ["x", "x_mask"]
    assert same(as_rows(masked.columns["x"]), filled)
    assert as_rows(masked.columns["x_mask"]) == [row is not None for row in rows]
    if is_floating(kind):
        natural = [math.nan if row is None else expected(row) for row in rows]
        assert same(as_rows(convert(table).columns["x"]), natural)
    elif None in rows:
        with pytest.raises(NullsFound, match=r"^part-0, row group 3: column 'x' .* nulls, but none are allowed"):
            convert(table)
    else:
        convert(table)


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("kind", "values", "expected"), [NUMBERS[3], NUMBERS[6], NUMBERS[9], NUMBERS[11]], ids=lambda value: str(value)[:20]
)
@settings(max_examples=6)
@given(data=st.data(), cuts=cuts)
def test_lists_become_values_and_offsets(
    make: Callable[[pa.DataType], pa.DataType],
    kind: pa.DataType,
    values: st.SearchStrategy[Any],
    expected: Expected,
    data: st.DataObject,
    cuts: list[int],
) -> None:
    rows = data.draw(st.lists(st.lists(values, max_size=4), max_size=12))
    chunk = convert(pa.table({"x": chunked(rows, make(kind), cuts)}))
    assert same(as_rows(chunk.columns["x"]), [[expected(value) for value in row] for row in rows])
    with_nulls = data.draw(st.lists(st.none() | st.lists(st.none() | values, max_size=4), max_size=12))
    table = pa.table({"x": chunked(with_nulls, make(kind), cuts)})
    zero = False if kind == pa.bool_() else 0
    filled = [[zero if value is None else expected(value) for value in row or []] for row in with_nulls]
    assert same(as_rows(convert(table, nulls="fill").columns["x"]), filled)


def test_values_under_a_null_list_are_not_delivered() -> None:
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    chunk = convert(pa.table({"x": lists}), nulls="mask")
    assert as_rows(chunk.columns["x"]) == [[1, 2], [], [5]]
    assert as_rows(chunk.columns["x_mask"]) == [True, False, True]
    with pytest.raises(NullsFound, match="1 nulls"):
        convert(pa.table({"x": lists}))


def test_nulls_inside_lists_are_nan_or_refused_even_under_a_mask() -> None:
    floats = pa.table({"x": pa.array([[1.0, None], None])})
    assert same(as_rows(convert(floats, nulls="mask").columns["x"]), [[1.0, math.nan], []])
    whole = pa.table({"x": pa.array([[1, None], None])})
    with pytest.raises(NullsFound, match=r"list<.*> *\) has 1 nulls"):
        convert(whole, nulls="mask")
    assert as_rows(convert(whole, nulls={"x": 9}).columns["x"]) == [[1, 9], []]


@settings(max_examples=20)
@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), min_size=3, max_size=3), max_size=12), cuts=cuts
)
def test_fixed_size_lists_become_a_matrix(rows: list[list[int | None] | None], cuts: list[int]) -> None:
    table = pa.table({"x": chunked(rows, pa.list_(pa.int16(), 3), cuts)})
    chunk = convert(table, nulls="mask")
    assert as_rows(chunk.columns["x"]) == [[value or 0 for value in row or [0] * 3] for row in rows]
    assert as_rows(chunk.columns["x_mask"]) == [row is not None and None not in row for row in rows]
    column = chunk.columns["x"]
    assert isinstance(column, Dense)
    assert column.values.shape == (len(rows), 3)
    floats = convert(pa.table({"x": chunked(rows, pa.list_(pa.float32(), 3), cuts)})).columns["x"]
    natural = [[math.nan if value is None else value for value in row or [None] * 3] for row in rows]
    assert same(as_rows(floats), natural)


STRING_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int16(), pa.string()),
    pa.run_end_encoded(pa.int32(), pa.string()),
]


def strings_of(rows: Sequence[str | None], kind: pa.DataType, cuts: Sequence[int]) -> pa.ChunkedArray:
    if pa.types.is_run_end_encoded(kind):
        return pa.chunked_array([pc.run_end_encode(chunk) for chunk in chunked(rows, pa.string(), cuts).chunks])
    return chunked(rows, kind, cuts)


@pytest.mark.parametrize("kind", STRING_TYPES, ids=str)
@settings(max_examples=10)
@given(rows=st.lists(st.none() | st.sampled_from(WORDS) | st.text(max_size=4), max_size=15), cuts=cuts)
def test_strings_are_delivered_as_objects_codes_and_bytes(
    kind: pa.DataType, rows: list[str | None], cuts: list[int]
) -> None:
    table = pa.table({"x": strings_of(rows, kind, cuts)})
    assert as_rows(convert(table).columns["x"]) == rows
    masked = convert(table, strings="codes", nulls="mask")
    values = sorted({row for row in rows if row is not None}, key=lambda text: text.encode())
    codes = [0 if row is None else values.index(row) + 1 for row in rows]
    assert as_rows(masked.columns["x"]) == codes == as_rows(convert(table, strings="codes").columns["x"])
    assert as_rows(masked.columns["x_mask"]) == [row is not None for row in rows]
    padded = convert(table, strings="bytes", nulls={"x": "?"}).columns["x"]
    assert [bytes(row) for row in as_rows(padded)] == [("?" if row is None else row).encode() for row in rows]


def test_binaries_and_lists_of_strings_can_have_codes() -> None:
    table = pa.table(
        {
            "b": pa.array([b"y", None, b"x"], pa.binary(1)),
            "t": pa.array([["q", "p"], [], ["p", None]]),
            "f": pa.array([["q"], ["p"], None], pa.list_(pa.string(), 1)),
        }
    )
    chunk = convert(table, strings="codes")
    assert as_rows(chunk.columns["b"]) == [2, 0, 1]
    assert as_rows(chunk.columns["t"]) == [[2, 1], [], [1, 0]]
    assert as_rows(chunk.columns["f"]) == [[2], [1], [0]]
    assert as_rows(convert(table).columns["t"]) == [["q", "p"], [], ["p", None]]


def test_nulls_hidden_by_an_encoding_are_found() -> None:
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array([5, None]))
    runs = pc.run_end_encode(pa.array([5, None, 5]))
    tensor = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)).cast(pa.fixed_shape_tensor(pa.int32(), [2]))
    assert hidden.null_count == runs.null_count == 0
    for array in (hidden, runs):
        table = pa.table({"x": array})
        with pytest.raises(NullsFound, match="1 nulls"):
            convert(table)
        chunk = convert(table, nulls="mask")
        assert as_rows(chunk.columns["x"]) == [5, 0, 5]
        assert as_rows(chunk.columns["x_mask"]) == [True, False, True]
    assert as_rows(convert(pa.table({"x": tensor})).columns["x"]) == [[1, 2], [3, 4]]


def test_children_of_a_null_struct_are_null() -> None:
    inner = pa.StructArray.from_arrays([pa.array([1.0, 2.0, 3.0])], ["c"], mask=pa.array([False, False, True]))
    outer = pa.StructArray.from_arrays([pa.array([7, 8, 9]), inner], ["a", "b"], mask=pa.array([False, True, False]))
    table = pa.table({"y": [0, 1, 2], "s": outer})
    chunk = convert(table, nulls={"s.a": -1})
    assert list(chunk.columns) == ["y", "s.a", "s.b.c"]
    assert as_rows(chunk.columns["s.a"]) == [7, -1, 9]
    assert same(as_rows(chunk.columns["s.b.c"]), [1.0, math.nan, math.nan])
    assert as_rows(convert(table.slice(1), nulls={"s.a": -1}).columns["s.a"]) == [-1, 9]
    with pytest.raises(NullsFound, match=r"'s\.a'"):
        convert(table)


@pytest.mark.parametrize(
    "kind", [kind for kind, _, _ in NUMBERS] + STRING_TYPES[:4] + [pa.list_(pa.int8(), 2)], ids=str
)
@pytest.mark.parametrize("how", ["codes", "bytes", "python"])
def test_a_table_without_rows_is_converted(kind: pa.DataType, how: str) -> None:
    schema = pa.schema([("x", kind), ("l", pa.list_(pa.int64())), ("s", pa.struct([("a", kind)]))])
    for table in (schema.empty_table(), pa.Table.from_batches([], schema)):
        chunk = convert(table, strings=how, nulls="mask")
        assert chunk.num_rows == 0
        assert {len(column) for column in chunk.columns.values()} == {0}
        again = gather([chunk, chunk], np.empty(0, np.int64))
        assert again.num_rows == 0


def test_an_unsigned_value_that_int64_cannot_hold_is_refused() -> None:
    table = pa.table({"x": pa.array([1, 2**63], pa.uint64())})
    with pytest.raises(SchemaMismatch, match=r'row group 3: column .x. \(uint64\) .* 9223372036854775808 .*"numpy"'):
        convert(table)
    assert as_rows(convert(table, output_format="numpy").columns["x"]) == [1, 2**63]


@pytest.mark.parametrize(
    "kind", [pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(38, 2), pa.decimal256(50, 2)], ids=str
)
@settings(max_examples=10)
@given(data=st.data())
def test_decimals_as_integers_are_exact(kind: pa.DataType, data: st.DataObject) -> None:
    bits = min(kind.bit_width, 64)
    limit = min(2 ** (bits - 1) - 1, 10**kind.precision - 1)
    unscaled = data.draw(st.lists(st.none() | st.integers(-limit, limit), max_size=10))
    context = decimal.Context(prec=60)
    rows = [None if value is None else decimal.Decimal(value).scaleb(-2, context) for value in unscaled]
    table = pa.table({"x": chunked(rows, kind, [3])})
    assert as_rows(convert(table, decimals="int64", nulls="fill").columns["x"]) == [value or 0 for value in unscaled]
    assert as_rows(convert(table, decimals="python").columns["x"]) == rows


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64 + 5, 10**37])
def test_decimals_that_int64_cannot_hold_are_refused(value: int) -> None:
    table = pa.table({"x": pa.array([decimal.Decimal(value)], pa.decimal128(38, 0))})
    with pytest.raises(SchemaMismatch, match=r'column .x. .* do not fit into an int64.*decimals="float64" or "python"'):
        convert(table, decimals="int64")


def test_decimals_as_floats_keep_about_fifteen_digits() -> None:
    exact = decimal.Decimal("12345678901234567.89")
    (found,) = as_rows(convert(pa.table({"x": pa.array([exact])})).columns["x"])
    assert found != exact
    assert abs(decimal.Decimal(found) / exact - 1) < decimal.Decimal("1e-15")


def test_numbers_without_nulls_are_not_copied() -> None:
    source = np.arange(1000, dtype=np.int64)
    chunk = convert(pa.table({"x": pa.array(source), "t": pa.array(source, pa.timestamp("s"))}).slice(10, 20))
    for name in ("x", "t"):
        column = chunk.columns[name]
        assert isinstance(column, Dense)
        assert np.shares_memory(column.values, source)
        assert column.values.tolist() == list(range(10, 30))


def test_shared_memory_is_read_only(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(10), "l": [[n] for n in range(10)]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    with pa.memory_map(str(tmp_path / "a.arrow")) as mapped:
        read = pa.ipc.open_file(mapped).read_all()
    policies = decide(table.schema, {})
    ours = Converter(policies).convert(table, "here").columns
    from_file = Converter(policies).convert(read, "here").columns
    from_user = Converter(policies, is_private=False).convert(table, "here").columns
    for name in ("x", "l"):
        writeable = [columns[name].values.flags.writeable for columns in (ours, from_file, from_user)]  # type: ignore[attr-defined]
        assert writeable == [True, False, False], name
        assert as_rows(from_file[name]) == as_rows(ours[name])


def test_a_table_that_is_not_as_planned_is_refused() -> None:
    converter = Converter(decide(pa.schema([("x", pa.int64()), ("s", pa.struct([("a", pa.int8())]))]), {}))
    good = pa.table(
        {"s": [{"a": 1}], "other": ["?"], "x": [5]},
        pa.schema([("s", pa.struct([("b", pa.int8()), ("a", pa.int8())])), ("other", pa.string()), ("x", pa.int64())]),
    )
    assert as_rows(converter.convert(good, "f").columns["s.a"]) == [1]
    with pytest.raises(SchemaMismatch, match="file-9: there is not exactly one column 'x'"):
        converter.convert(good.drop_columns("x"), "file-9")
    with pytest.raises(SchemaMismatch, match="column 'x' is int32, but was planned as int64"):
        converter.convert(good.set_column(2, "x", pa.array([1], pa.int32())), "file-9")
    with pytest.raises(SchemaMismatch, match=r"column 's\.a' is missing, but was planned as int8"):
        converter.convert(good.set_column(0, "s", pa.array([1])), "file-9")


@pytest.mark.parametrize("output_format", ["arrow", "pandas", "dict"])
def test_other_formats_keep_arrays_unchanged(output_format: str) -> None:
    table = pa.table(
        {
            "d": pa.chunked_array([pa.array(["a", None]).dictionary_encode(), pa.array(["z"]).dictionary_encode()]),
            "m": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
            "u": pa.array([1, None, 2**64 - 1], pa.uint64()),
            "v": pa.array(["x", "y" * 20, None], pa.string_view()),
            "r": pc.run_end_encode(pa.array([1, 1, None])),
        }
    )
    policies = decide(table.schema, {}, output_format=output_format, nulls={"u": "mask", "d": "none"})
    chunk = gather([Converter(policies).convert(table, "f")], np.array([2, 1, 0]))
    assert as_rows(chunk.columns["d"]) == ["z", "none", "a"]
    assert as_rows(chunk.columns["m"]) == [[], None, [("k", 1)]]
    assert as_rows(chunk.columns["u"]) == [2**64 - 1, None, 1]
    assert as_rows(chunk.columns["u_mask"]) == [True, False, True]
    assert as_rows(chunk.columns["v"]) == [None, "y" * 20, "x"]
    assert as_rows(chunk.columns["r"]) == [None, 1, 1]


# Vocabularies


@pytest.mark.parametrize("hashed_values", [0, 1000])
@settings(max_examples=40)
@given(known=st.sets(st.text(max_size=3)), rows=st.lists(st.none() | st.text(max_size=3), max_size=20))
def test_a_code_is_the_position_in_the_vocabulary_counted_from_one(
    hashed_values: int, known: set[str], rows: list[str | None]
) -> None:
    given_values = sorted(known, key=hash)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata.data.batch.vocabulary._HASHED_VALUES", hashed_values)
        vocabulary = Vocabulary.given("x", given_values)
        codes = vocabulary.encode(pa.array(rows, pa.string()))
    assert codes.dtype == np.int32
    assert codes.tolist() == [given_values.index(row) + 1 if row in known else 0 for row in rows]
    assert vocabulary.decode(codes) == [row if row in known else None for row in rows]
    assert vocabulary.num_codes == len(known) + 1


@settings(max_examples=40)
@given(pieces=st.lists(st.lists(st.none() | st.text(max_size=3), max_size=6), max_size=5))
def test_a_vocabulary_does_not_depend_on_where_values_are_found(pieces: list[list[str | None]]) -> None:
    arrays = [pa.array(piece, pa.string()) for piece in pieces]
    forth = Vocabulary.found("x", arrays)
    back = Vocabulary.found("x", arrays[::-1])
    merged = Vocabulary.merge("x", [Vocabulary.found("x", [array]) for array in arrays])
    expected = sorted({row for piece in pieces for row in piece if row is not None}, key=lambda text: text.encode())
    assert forth.values.to_pylist() == back.values.to_pylist() == merged.values.to_pylist() == expected


@given(st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), unique=True)))
def test_vocabularies_survive_a_broadcast(given_values: dict[str, list[str]]) -> None:
    made = {column: Vocabulary.given(column, values) for column, values in given_values.items()}
    made["binary"] = Vocabulary.given("binary", [b"\xff", b""])
    found = from_bytes(to_bytes(made.values()))
    assert {name: each.values.to_pylist() for name, each in found.items()} == given_values | {"binary": [b"\xff", b""]}
    assert all(each.column == name and each.digest == made[name].digest for name, each in found.items())
    assert from_bytes(to_bytes([])) == {}


def test_a_vocabulary_with_other_codes_has_another_digest() -> None:
    digests = [Vocabulary.given("x", values).digest for values in (["a", "b"], ["b", "a"], ["ab"], ["a"], [])]
    assert len(set(digests)) == 5


def test_a_vocabulary_is_bounded_and_names_the_cure() -> None:
    with pytest.raises(
        LimitExceeded, match=r"'url' has at least 4 distinct values, more than max_vocabulary=3.* \"bytes\""
    ):
        Vocabulary.found("url", [pa.array(["a", "b"]), pa.array(["c", "b", "d"])], max_values=3)


@pytest.mark.parametrize("values", [["a", "a"], ["a", None], ["a", b"b"], [1]])
def test_an_invalid_vocabulary_of_the_user_is_refused(values: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="the vocabulary of column 'x'"):
        Vocabulary.given("x", values)


def test_codes_need_a_vocabulary_of_their_type() -> None:
    policies = decide(pa.schema([("x", pa.string())]), {}, strings="codes")
    with pytest.raises(InvalidArgument, match="'x' is delivered as codes but has no vocabulary"):
        Converter(policies)
    with pytest.raises(InvalidArgument, match="is large_binary, but the column is string"):
        Converter(policies, {"x": Vocabulary.given("x", [b"a"])})
    chunk = Converter(policies, {"x": Vocabulary.given("x", ["b", "a"])}).convert(
        pa.table({"x": ["a", "?", None]}), "f"
    )
    assert as_rows(chunk.columns["x"]) == [2, 0, 0]
