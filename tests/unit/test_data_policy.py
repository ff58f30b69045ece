"""How each type is delivered, and what is refused before anything is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from strata.data.batch.policy import Kind, Nulls, Policy, decide, describe
from strata.errors import InvalidArgument, NullsFound, SchemaMismatch


def policy_of(kind: pa.DataType, **options: Any) -> Policy:
    (policy,) = decide(pa.schema([("x", kind)]), {}, **options)
    return policy


@pytest.mark.parametrize(
    ("kind", "torch", "numpy", "unit"),
    [
        *((getattr(pa, name)(), name, name, "") for name in ("int8", "int16", "int32", "int64", "uint8")),
        (pa.uint16(), "int32", "uint16", ""),
        (pa.uint32(), "int64", "uint32", ""),
        (pa.uint64(), "int64", "uint64", ""),
        *((getattr(pa, name)(), name, name, "") for name in ("float16", "float32", "float64")),
        (pa.bool_(), "bool", "bool", ""),
        (pa.decimal128(20, 3), "float64", "float64", ""),
        (pa.timestamp("us", "Europe/Zurich"), "int64", "int64", "us"),
        (pa.date32(), "int32", "int32", "days"),
        (pa.date64(), "int64", "int64", "ms"),
        (pa.time32("ms"), "int32", "int32", "ms"),
        (pa.time64("ns"), "int64", "int64", "ns"),
        (pa.duration("s"), "int64", "int64", "s"),
        (pa.dictionary(pa.int8(), pa.uint16()), "int32", "uint16", ""),
        (pa.run_end_encoded(pa.int32(), pa.float32()), "float32", "float32", ""),
    ],
    ids=str,
)
def test_a_number_is_delivered_as(kind: pa.DataType, torch: str, numpy: str, unit: str) -> None:
    for output_format, dtype in (("torch", torch), ("numpy", numpy)):
        alone = policy_of(kind, output_format=output_format)
        assert (alone.kind, alone.dtype, alone.unit, alone.width) == (Kind.DENSE, np.dtype(dtype), unit, None)
        is_float = dtype.startswith("float")
        assert alone.nulls is (Nulls.FILL if is_float else Nulls.ERROR)
        assert alone.nulls_text == ("filled: nan" if is_float else "refused")
        in_list = policy_of(pa.list_(kind), output_format=output_format)
        assert (in_list.kind, in_list.dtype, in_list.nulls) == (Kind.RAGGED, np.dtype(dtype), Nulls.ERROR)
        in_matrix = policy_of(pa.list_(kind, 4), output_format=output_format)
        assert (in_matrix.kind, in_matrix.dtype, in_matrix.width) == (Kind.DENSE, np.dtype(dtype), 4)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.string_view(), pa.binary(4)], ids=str)
def test_strings_are_delivered_as_chosen(kind: pa.DataType) -> None:
    python = policy_of(kind)
    assert (python.kind, python.nulls) == (Kind.PYTHON, Nulls.KEEP)
    codes = policy_of(kind, strings="codes")
    assert (codes.kind, codes.dtype, codes.is_coded, codes.nulls_text) == (
        Kind.DENSE,
        np.dtype("int32"),
        True,
        "code 0",
    )
    padded = policy_of(kind, strings={"x": "bytes"}, string_width=7)
    assert (padded.kind, padded.width, padded.nulls) == (Kind.BYTES, 7, Nulls.ERROR)
    assert policy_of(pa.list_(kind), strings="codes").kind is Kind.RAGGED
    assert policy_of(pa.list_(kind), strings="bytes").kind is Kind.PYTHON
    with pytest.raises(InvalidArgument, match='lists of strings are delivered as "codes"'):
        policy_of(pa.list_(kind), strings={"x": "bytes"})


def test_decimals_are_delivered_as_chosen() -> None:
    kind = pa.decimal128(12, 2)
    cents = policy_of(kind, decimals="int64")
    assert (cents.dtype, cents.unit, cents.nulls) == (np.dtype("int64"), "10^-2", Nulls.ERROR)
    assert policy_of(kind, decimals={"x": "python"}).kind is Kind.PYTHON
    with pytest.raises(SchemaMismatch, match=r"'x' has type decimal128\(12, 2\) and decimals=\"error\": choose"):
        policy_of(kind, decimals="error")


def test_structs_are_flattened_to_names_with_dots() -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.list_(pa.float32()))]))])
    policies = decide(pa.schema([("s", kind), ("y", pa.int8())]), {})
    assert [(policy.name, policy.path) for policy in policies] == [
        ("s.a", ("s", "a")),
        ("s.b.c", ("s", "b", "c")),
        ("y", ("y",)),
    ]
    (whole,) = decide(pa.schema([("s", kind)]), {}, strings={"s": "python"})
    assert whole.kind is Kind.PYTHON


UNSUPPORTED = [
    pa.map_(pa.string(), pa.int64()),
    pa.list_(pa.list_(pa.int64())),
    pa.list_(pa.struct([("a", pa.int64())])),
    pa.dense_union([pa.field("a", pa.int64())]),
    pa.month_day_nano_interval(),
    pa.null(),
]


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=str)
def test_a_type_without_a_tensor_is_refused_with_three_cures(kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        decide(pa.schema([("fine", pa.int64()), ("x", kind)]), {})
    for part in ("'x'", str(kind), "columns=", '{"x": "python"}', 'output_format="arrow"'):
        assert part in str(caught.value)
    assert policy_of(kind, strings={"x": "python"}).kind is Kind.PYTHON
    assert policy_of(kind, output_format="arrow").kind is Kind.ARROW


def test_one_error_names_all_refused_columns() -> None:
    with pytest.raises(SchemaMismatch, match=r"'a' has type null.*'b' has type null"):
        decide(pa.schema([("a", pa.null()), ("b", pa.null())]), {})


def test_nulls_in_null_counts_are_refused_when_planning() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.bool_()), ("c", pa.float32()), ("d", pa.string())])
    with pytest.raises(NullsFound, match=r"a \(int64\), at least 1,200, b \(bool\), at least 3; pass a fill value"):
        decide(schema, {"a": 1200, "b": 3, "c": 5, "d": 6})
    decide(schema, {"a": 0})
    decide(schema, {"a": 1200, "b": 3}, nulls={"a": 0, "b": "mask"})
    with pytest.raises(NullsFound, match=r"c \(float\), at least 5"):
        decide(schema, {"c": 5}, nulls={"c": "error"})
    struct = pa.schema([("s", pa.struct([pa.field("a", pa.int64(), nullable=False)]))])
    with pytest.raises(NullsFound, match=r"s\.a \(int64\), at least 2"):
        decide(struct, {"s": 2})
    required = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    assert decide(required, {"a": 7})[0].nulls is Nulls.ERROR


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        (pa.int32(), 0),
        (pa.float16(), 0.0),
        (pa.bool_(), False),
        (pa.date32(), 0),
        (pa.decimal128(5, 2), 0.0),
        (pa.list_(pa.int64()), 0),
        (pa.list_(pa.uint8(), 2), 0),
        (pa.string(), ""),
        (pa.binary(3), b""),
    ],
    ids=str,
)
def test_fill_is_the_zero_of_a_type(kind: pa.DataType, zero: object) -> None:
    policy = policy_of(kind, nulls="fill")
    assert policy.nulls is policy.value_nulls is Nulls.FILL
    assert policy.fill is not None
    value = policy.fill.value if pa.types.is_date(kind) else policy.fill.as_py()
    assert value == zero


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 300),
        (pa.int64(), 1.5),
        (pa.int64(), True),
        (pa.uint8(), -1),
        (pa.float32(), "0"),
        (pa.bool_(), 1),
        (pa.string(), 0),
        (pa.string(), b"bytes"),
        (pa.binary(), "text"),
        (pa.decimal128(4, 2), 0.5j),
        (pa.timestamp("s"), "yesterday"),
        (pa.list_(pa.int64()), [1]),
    ],
    ids=str,
)
def test_a_fill_value_of_the_wrong_type_is_refused_when_planning(kind: pa.DataType, value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot replace a null of column 'x'") as caught:
        policy_of(kind, nulls={"x": value})
    assert caught.value.field == "nulls"


def test_the_name_of_a_mask_must_not_be_taken() -> None:
    assert policy_of(pa.int64(), nulls="mask").mask == "x_mask"
    assert policy_of(pa.int64()).mask == ""
    with pytest.raises(SchemaMismatch, match=r"would be named 'x_mask'.*rename one"):
        decide(pa.schema([("x", pa.int64()), ("x_mask", pa.int64())]), {}, nulls={"x": "mask"})


def test_names_that_collide_after_flattening_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"would be named 's\.a'"):
        decide(pa.schema([("s", pa.struct([("a", pa.int64())])), ("s.a", pa.int64())]), {})


def test_keep_needs_a_type_that_can_hold_null() -> None:
    assert policy_of(pa.string(), nulls="keep").nulls is Nulls.KEEP
    assert policy_of(pa.float64(), nulls="keep").nulls_text == "filled: nan"
    for kind in (pa.int64(), pa.list_(pa.float32())):
        with pytest.raises(InvalidArgument, match='nulls="keep" for column'):
            policy_of(kind, nulls="keep")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"output_format": "tensorflow"}, "output_format"),
        ({"strings": "code"}, "strings"),
        ({"strings": {"x": "code"}}, "strings"),
        ({"strings": {"z": "codes"}}, "strings"),
        ({"decimals": "float"}, "decimals"),
        ({"nulls": "zero"}, "nulls"),
        ({"nulls": {"z": 0}}, "nulls"),
        ({"strings": {"x": "codes"}}, "strings"),
        ({"decimals": {"x": "int64"}}, "decimals"),
        ({"string_width": 0}, "string_width"),
        ({"string_width": 8}, "string_width"),
        ({"output_format": "arrow", "strings": "codes"}, "strings"),
        ({"output_format": "dict", "decimals": "int64"}, "decimals"),
    ],
    ids=str,
)
def test_an_unknown_option_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        policy_of(pa.int64(), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("output_format", ["arrow", "pandas", "dict"])
def test_other_formats_deliver_every_type_unchanged(output_format: str) -> None:
    kinds = [kind for kind in UNSUPPORTED if output_format != "pandas" or not pa.types.is_union(kind)]
    schema = pa.schema([(f"c{number}", kind) for number, kind in enumerate([*kinds, pa.uint64(), pa.string()])])
    policies = decide(schema, {"c5": 4}, output_format=output_format)
    assert {policy.kind for policy in policies} == {Kind.ARROW}
    assert {policy.nulls for policy in policies} == {Nulls.KEEP}
    assert policy_of(pa.int64(), output_format=output_format, nulls="mask").mask == "x_mask"


def test_a_union_is_refused_for_pandas_before_anything_is_read() -> None:
    kind = pa.list_(pa.dense_union([pa.field("a", pa.int64())]))
    with pytest.raises(SchemaMismatch, match=r"'x' has type list<.*pandas cannot hold.*columns="):
        decide(pa.schema([("x", kind)]), {}, output_format="pandas")


def test_policies_are_described_as_a_table() -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("at", pa.timestamp("ms")),
            ("city", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("e", pa.list_(pa.float32(), 8)),
            ("url", pa.string()),
            ("age", pa.uint16()),
        ]
    )
    rows = describe(
        decide(
            schema, {}, strings={"city": "codes", "tags": "codes", "url": "bytes"}, nulls={"age": "mask", "tags": "x"}
        )
    )
    assert rows[0] == {"column": "id", "type": "int64", "delivered": "int64", "nulls": "refused"}
    assert [(row["column"], row["delivered"], row["nulls"]) for row in rows[1:]] == [
        ("at", "int64 (ms)", "refused"),
        ("city", "int32 codes", "code 0"),
        ("tags", "int32 codes values, offsets", "filled: [] and 'x'"),
        ("e", "float32 × 8", "filled: nan"),
        ("url", "uint8 × longest, lengths", "refused"),
        ("age", "int32", "age_mask, filled: 0"),
    ]
