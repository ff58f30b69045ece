"""The columns of files are matched to those of the table."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.types import (
    DateType,
    DecimalType,
    GeometryType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    UUIDType,
)

from strata.data.formats.base import Unit
from strata.data.iceberg.columns import Resolver, arrow_type
from strata.data.plan.projection import Cast, TableProjection, can_read, is_wide
from strata.errors import SchemaMismatch


def with_id(name: str, kind: pa.DataType, number: int, key: bytes = b"PARQUET:field_id") -> pa.Field:
    return pa.field(name, kind, metadata={key: str(number).encode()})


def resolver(*fields: pa.Field, **more: Any) -> Resolver:
    return Resolver("file.parquet", pa.schema(fields), more.get("mapping"), more.get("partition", {}))


def read(made: Resolver, fields: list[NestedField], rows: pa.Table) -> dict[str, list[Any]]:
    projection = TableProjection(made.project(fields))
    names = [field.name for field in fields]
    read = rows.select(projection.file_columns(names))
    return projection.apply(read, Unit(0, rows.num_rows, 0, 0, 0), names).to_pydict()


@pytest.mark.parametrize("key", [b"PARQUET:field_id", b"iceberg.id"])
def test_columns_are_matched_by_id_and_not_by_name(key: bytes) -> None:
    made = resolver(
        with_id("b", pa.int32(), 1, key), with_id("a", pa.int32(), 2, key), with_id("c", pa.int32(), 9, key)
    )
    fields = [NestedField(1, "a", LongType()), NestedField(2, "b", IntegerType()), NestedField(3, "c", IntegerType())]
    found = read(made, fields, pa.table({"b": [1], "a": [2], "c": [3]}, schema=made.file_schema))
    assert found == {"a": [1], "b": [2], "c": [None]}


def test_in_a_file_with_ids_columns_without_an_id_are_ignored() -> None:
    made = resolver(with_id("a", pa.int32(), 1), pa.field("b", pa.int32()))
    mapped = Resolver(
        made.file_name, made.file_schema, create_mapping_from_schema(Schema(NestedField(2, "b", IntegerType()))), {}
    )
    assert set(mapped.sources([NestedField(1, "a", IntegerType()), NestedField(2, "b", IntegerType())])) == {"a"}


def test_a_missing_column_comes_from_the_partition_then_the_initial_default_then_null() -> None:
    made = resolver(with_id("x", pa.int32(), 99), partition={1: 19_000, 2: None, 5: uuid.UUID(int=7)})
    fields = [
        NestedField(1, "day", DateType(), initial_default=dt.date(1999, 1, 1)),
        NestedField(2, "nothing", StringType(), initial_default="default"),
        NestedField(3, "given", StringType(), required=True, initial_default="default"),
        NestedField(4, "null", StringType()),
        NestedField(5, "who", UUIDType()),
    ]
    found = read(made, fields, pa.table({"x": pa.array([1, 2], pa.int32())}))
    assert found == {
        "day": [dt.date(2022, 1, 8)] * 2,
        "nothing": [None] * 2,
        "given": ["default"] * 2,
        "null": [None] * 2,
        "who": [uuid.UUID(int=7).bytes] * 2,
    }


def test_a_missing_required_column_is_rejected() -> None:
    with pytest.raises(
        SchemaMismatch, match=r"file\.parquet has no column need \(field id 1\), which the table requires"
    ):
        resolver(with_id("x", pa.int32(), 99)).project([NestedField(1, "need", LongType(), required=True)])


NESTED = Schema(
    NestedField(
        1,
        "points",
        ListType(2, StructType(NestedField(3, "x", LongType()), NestedField(4, "new", StringType())), False),
    ),
    NestedField(5, "by_name", MapType(6, StringType(), 7, StructType(NestedField(8, "y", IntegerType())), False)),
)


def test_nested_fields_without_ids_are_found_by_the_name_mapping() -> None:
    mapping = create_mapping_from_schema(NESTED)
    point = pa.struct([("other", pa.int32()), ("x", pa.int32())])
    inner = pa.struct([("y", pa.int32())])
    made = resolver(
        pa.field("points", pa.list_(pa.field("element", point))),
        pa.field("by_name", pa.map_(pa.string(), inner)),
        mapping=mapping,
    )
    rows = pa.table(
        {"points": [[{"other": 1, "x": 2}, None], None], "by_name": [[("k", {"y": 3})], []]}, schema=made.file_schema
    )
    found = read(made, list(NESTED.fields), rows)
    assert found["points"] == [[{"x": 2, "new": None}, None], None]
    assert found["by_name"] == [[("k", {"y": 3})], []]
    assert isinstance(made.project(NESTED.fields)["by_name"].conversion, Cast), "nothing moved, so nothing is rebuilt"


def test_a_member_that_was_dropped_and_added_again_hides_its_old_values() -> None:
    point = pa.struct([with_id("x", pa.int64(), 3), with_id("new", pa.string(), 77)])
    made = resolver(with_id("points", pa.list_(with_id("element", point, 2)), 1))
    rows = pa.table({"points": [[{"x": 1, "new": "old value"}]]}, schema=made.file_schema)
    assert read(made, [NESTED.fields[0]], rows) == {"points": [[{"x": 1, "new": None}]]}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (pa.int64(), IntegerType()),
        (pa.float64(), LongType()),
        (pa.list_(pa.int32()), LongType()),
        (pa.int32(), ListType(9, IntegerType(), False)),
        (pa.decimal128(9, 3), DecimalType(9, 2)),
        (pa.struct([with_id("x", pa.string(), 3)]), StructType(NestedField(3, "x", LongType()))),
    ],
    ids=str,
)
def test_lossy_type_changes_are_rejected(found: pa.DataType, wanted: Any) -> None:
    with pytest.raises(SchemaMismatch, match=r"file\.parquet: column c.* cannot be read as the table's"):
        resolver(with_id("c", found, 1)).project([NestedField(1, "c", wanted)])


def test_unsupported_types_are_rejected_with_the_cure() -> None:
    assert arrow_type(GeometryType(), wide=False) is None
    with pytest.raises(SchemaMismatch, match=r"column g has the type geometry.*exclude it with columns="):
        resolver(with_id("g", pa.binary(), 1)).project([NestedField(1, "g", GeometryType())])


@pytest.mark.parametrize(
    ("found", "wanted", "possible"),
    [
        (pa.uint32(), pa.int64(), True),
        (pa.uint32(), pa.int32(), False),
        (pa.float16(), pa.float32(), True),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), True),
        (pa.binary(), pa.string(), True),
        (pa.timestamp("ns"), pa.timestamp("us"), True),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), True),
        (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us"), False),
        (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us", "UTC"), True),
        (pa.date32(), pa.timestamp("us"), True),
        (pa.string(), pa.date32(), False),
        (pa.bool_(), pa.int32(), False),
        (pa.uuid(), pa.binary(16), True),
    ],
    ids=str,
)
def test_a_files_type_is_read_if_it_is_the_same_kind_and_no_wider(
    found: pa.DataType, wanted: pa.DataType, possible: bool
) -> None:
    assert can_read(found, wanted) is possible


def test_wide_offsets_are_detected_at_any_depth() -> None:
    assert is_wide([pa.int64(), pa.list_(pa.struct([("x", pa.dictionary(pa.int8(), pa.large_string()))]))])
    assert not is_wide([pa.string(), pa.list_(pa.binary()), pa.map_(pa.string(), pa.int8())])
