"""One schema for all files, and the projection of a file onto it."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.formats.base import Unit
from strata.data.plan.schema import PlainProjection, keeps_values, retyped, unify, widen
from strata.errors import InvalidArgument, SchemaMismatch

CODES = pa.dictionary(pa.int8(), pa.string())

SAME_IN_BOTH_ORDERS = [
    (pa.int32(), pa.int64(), pa.int64()),
    (pa.uint8(), pa.int8(), pa.int16()),
    (pa.uint32(), pa.int64(), pa.int64()),
    (pa.uint16(), pa.uint32(), pa.uint32()),
    (pa.uint64(), pa.int64(), None),
    (pa.float32(), pa.float64(), pa.float64()),
    (pa.float16(), pa.float32(), pa.float32()),
    (pa.int64(), pa.float64(), None),
    (pa.int64(), pa.string(), None),
    (pa.bool_(), pa.int8(), None),
    (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
    (pa.string(), pa.large_string(), pa.large_string()),
    (pa.string(), pa.string_view(), pa.string()),
    (pa.binary(), pa.large_binary(), pa.large_binary()),
    (pa.string(), pa.binary(), None),
    (CODES, pa.string(), pa.string()),
    (CODES, pa.large_string(), pa.large_string()),
    (CODES, pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.string())),
    (CODES, pa.dictionary(pa.int8(), pa.large_string()), pa.dictionary(pa.int8(), pa.large_string())),
    (CODES, pa.int8(), None),
    (pa.date32(), pa.date64(), pa.date64()),
    (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
    (pa.timestamp("ms", "UTC"), pa.timestamp("ns", "UTC"), pa.timestamp("ns", "UTC")),
    (pa.timestamp("ms", "UTC"), pa.timestamp("ms"), None),
    (pa.time32("s"), pa.time64("us"), pa.time64("us")),
    (pa.duration("s"), pa.duration("ms"), pa.duration("ms")),
    (pa.date32(), pa.timestamp("s"), None),
    (pa.decimal128(5, 2), pa.decimal128(6, 4), pa.decimal128(7, 4)),
    (pa.decimal128(38, 0), pa.decimal128(38, 20), pa.decimal256(58, 20)),
    (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
    (pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.large_list(pa.int32())),
    (pa.list_(pa.int32(), 2), pa.list_(pa.int64(), 2), pa.list_(pa.int64(), 2)),
    (pa.list_(pa.int32(), 2), pa.list_(pa.int32(), 3), pa.list_(pa.int32())),
    (pa.list_(pa.int32()), pa.list_(pa.string()), None),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), pa.struct([("a", pa.int16())])),
    (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())]), None),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())]), None),
]


@pytest.mark.parametrize(("a", "b", "wider"), SAME_IN_BOTH_ORDERS)
def test_types_widen_to_a_type_that_holds_both_or_not_at_all(
    a: pa.DataType, b: pa.DataType, wider: pa.DataType | None
) -> None:
    assert widen(a, b) == wider
    assert widen(b, a) == wider
    if wider is not None:
        for one in (a, b):
            assert pa.nulls(1, one).cast(wider).type == wider


@given(st.sampled_from(SAME_IN_BOTH_ORDERS[:5]), st.integers(-(2**63), 2**64 - 1))
def test_a_wider_integer_keeps_every_value(types: tuple[pa.DataType, pa.DataType, pa.DataType], value: int) -> None:
    a, b, wider = types
    for one in (a, b):
        try:
            found = pa.array([value], one)
        except (pa.ArrowInvalid, OverflowError):
            continue
        assert wider is None or found.cast(wider).to_pylist() == [value]


@pytest.mark.parametrize(
    ("found", "wanted", "keeps"),
    [
        (pa.int64(), pa.int64(), True),
        (pa.int32(), pa.int64(), True),
        (pa.float32(), pa.float64(), True),
        (pa.dictionary(pa.int32(), pa.string()), pa.string(), True),
        (pa.timestamp("ms"), pa.timestamp("us"), True),
        (pa.timestamp("us"), pa.timestamp("ms"), False),
        (pa.timestamp("us"), pa.date32(), False),
        (pa.float64(), pa.float32(), False),
        (pa.int64(), pa.float64(), False),
        (pa.int64(), pa.int32(), False),
        (pa.string(), pa.int64(), False),
        (pa.int64(), pa.string(), False),
    ],
)
def test_statistics_hold_after_a_cast_that_only_widens(found: pa.DataType, wanted: pa.DataType, keeps: bool) -> None:
    assert keeps_values(found, wanted) is keeps


def test_guessed_types_of_text_unify_as_numbers() -> None:
    assert widen(pa.int64(), pa.float64(), is_typed=False) == pa.float64()
    dataset = unify([("a", pa.schema([("x", pa.int64())])), ("b", pa.schema([("x", pa.float64())]))], is_typed=False)
    assert dataset.schema.field("x").type == pa.float64()
    assert retyped(pa.schema([("x", pa.int64()), ("y", pa.int8())]), dataset.schema).types == [pa.float64(), pa.int8()]


def test_a_column_that_a_file_lacks_is_null_there_and_listed() -> None:
    found = unify(
        [
            (
                "a.parquet",
                pa.schema([pa.field("x", pa.int32(), nullable=False), pa.field("y", pa.string(), nullable=False)]),
            ),
            (
                "b.parquet",
                pa.schema([pa.field("z", pa.bool_(), nullable=False), pa.field("x", pa.int64(), nullable=False)]),
            ),
        ]
    )
    assert found.columns == ("x", "y", "z")
    assert found.missing == {"y": "b.parquet", "z": "a.parquet"}
    assert found.schema.field("x") == pa.field("x", pa.int64(), nullable=False)
    assert found.schema.field("y") == pa.field("y", pa.string())


@pytest.mark.parametrize("mode", ["unify", "strict"])
def test_a_column_that_no_sample_showed_exists_if_the_user_gives_its_type(mode: Any) -> None:
    schemas = [("a", pa.schema([("x", pa.int64())])), ("b", pa.schema([("x", pa.int64())]))]
    late = pa.schema([("late", pa.int32())])
    found = unify(schemas, is_keyed=True, schema=late, mode=mode, partition_fields=[pa.field("p", pa.int32())])
    assert found.columns == ("x", "late", "p")
    assert (found.schema.field("late").type, dict(found.missing)) == (pa.int32(), {})
    assert retyped(schemas[0][1], found.schema, is_keyed=True, partitions=["p"]).names == ["x", "late"]
    with pytest.raises(SchemaMismatch, match="which no file has"):
        unify(schemas, schema=late)
    with pytest.raises(SchemaMismatch, match=r"no file has a column 'late'.*schema=pa.schema\(\[\('late', …\)\]\)"):
        unify(schemas, is_keyed=True, columns=["late"])


def test_only_columns_that_are_used_must_agree() -> None:
    schemas = [
        ("a.parquet", pa.schema([("x", pa.int64()), ("y", pa.string()), ("z", pa.int8())])),
        ("b.parquet", pa.schema([("x", pa.int64()), ("y", pa.int64()), ("z", pa.int8())])),
    ]
    found = unify(schemas, columns=["z"], condition_columns=["x"])
    assert (found.schema.names, found.columns) == (["z", "x"], ("z",))
    with pytest.raises(SchemaMismatch) as caught:
        unify(schemas)
    for part in ("'y'", "string in a.parquet", "int64 in b.parquet", "columns=", "schema="):
        assert part in str(caught.value)


def test_types_that_the_user_chose_settle_a_disagreement() -> None:
    schemas = [("a", pa.schema([("y", pa.string())])), ("b", pa.schema([("y", pa.int64())]))]
    decided = pa.schema([("y", pa.string())])
    assert unify(schemas, schema=decided).schema.field("y").type == pa.string()
    with pytest.raises(SchemaMismatch, match="cannot be cast"):
        unify(schemas, schema=pa.schema([("y", pa.list_(pa.int8()))]))
    with pytest.raises(SchemaMismatch, match="schema has column 'q', which no file has"):
        unify(schemas, schema=pa.schema([("q", pa.string())]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["ids"], "did you mean 'id'"),
        (["ID"], "did you mean 'id'"),
        (["qqq"], "known names are: id, user"),
        (["user.name"], "'user'"),
    ],
)
def test_an_error_about_a_missing_column_lists_the_existing_ones(columns: list[str], message: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("user", pa.struct([("name", pa.string())]))])
    with pytest.raises(SchemaMismatch) as caught:
        unify([("a", schema)], columns=columns)
    assert message in str(caught.value)


@pytest.mark.parametrize("columns", [[], "id", ["id", "id"]])
def test_columns_must_be_a_list_of_different_names(columns: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        unify([("a", pa.schema([("id", pa.int64())]))], columns=columns)
    assert caught.value.field == "columns"


def test_strict_refuses_every_difference_and_names_the_file() -> None:
    one, other = pa.schema([("x", pa.int32())]), pa.schema([("x", pa.int64())])
    assert unify([("a", one), ("b", one)], mode="strict").columns == ("x",)
    with pytest.raises(SchemaMismatch, match=r"int32 in a and int64 in b.*schema_mode='unify'"):
        unify([("a", one), ("b", other)], mode="strict")
    with pytest.raises(SchemaMismatch, match="'x' is not in b"):
        unify([("a", one), ("b", pa.schema([]))], mode="strict")
    with pytest.raises(InvalidArgument, match="'unify' or 'strict'"):
        unify([("a", one)], mode="loose")  # type: ignore[arg-type]


def test_a_repeated_column_name_is_refused_only_if_it_is_used() -> None:
    twice = pa.schema([("x", pa.int8()), ("x", pa.int8()), ("y", pa.int8())])
    assert unify([("a", twice)], columns=["y"]).columns == ("y",)
    with pytest.raises(SchemaMismatch, match="two columns 'x'"):
        unify([("a", twice)])


def test_partition_columns_come_last_and_override_columns_of_files() -> None:
    schema = pa.schema([("year", pa.string()), ("x", pa.int8())])
    found = unify([("a", schema)], partition_fields=[pa.field("year", pa.int64()), pa.field("c", pa.string())])
    assert found.columns == ("x", "year", "c")
    assert found.schema.field("year").type == pa.int64()


# --- fitting ---

UNIT = Unit(index=0, num_rows=2, first_row=10, offset=0, num_bytes=1)


def test_a_table_that_fits_is_returned_unchanged() -> None:
    schema = pa.schema([("x", pa.int8()), ("y", pa.int8())])
    table = pa.table({"x": [1, 2], "y": [3, 4]}, schema=schema)
    assert PlainProjection(schema, schema).apply(table, UNIT, ["x", "y"]) is table


def test_a_table_is_cast_completed_and_reordered() -> None:
    dataset = pa.schema([("year", pa.int64()), ("x", pa.int64()), ("new", pa.string()), ("c", pa.string())])
    own = pa.schema([("c", CODES), ("x", pa.int8()), ("year", pa.string())])
    projection = pickle.loads(pickle.dumps(PlainProjection(own, dataset, {"year": 2024}, "a.parquet")))
    assert projection.file_columns(dataset.names) == ["x", "c"]
    read = pa.table({"x": pa.array([1, 2], pa.int8()), "c": pa.array(["a", None]).cast(CODES)})
    table = projection.apply(read, UNIT, dataset.names)
    assert table.schema.equals(dataset)
    assert table.to_pydict() == {"year": [2024, 2024], "x": [1, 2], "new": [None, None], "c": ["a", None]}


def test_columns_missing_from_the_file_need_only_its_number_of_rows() -> None:
    projection = PlainProjection(
        pa.schema([("x", pa.int8())]), pa.schema([("p", pa.string()), ("n", pa.int8())]), {"p": None}
    )
    rows_only = pa.table({"": [0, 0]}).select([])
    assert projection.apply(rows_only, UNIT, ["p", "n"]).to_pydict() == {"p": [None, None], "n": [None, None]}
    assert projection.apply(rows_only, UNIT, []).num_rows == 2


def test_an_error_about_a_value_that_does_not_fit_names_file_and_rows() -> None:
    own, dataset = pa.schema([("x", pa.int64())]), pa.schema([("x", pa.int8())])
    with pytest.raises(SchemaMismatch, match=r"a\.parquet: column 'x' \(int64\), rows from 10: .* int8"):
        PlainProjection(own, dataset, {}, "a.parquet").apply(pa.table({"x": [1, 1000]}), UNIT, ["x"])
