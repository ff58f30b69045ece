"""Iceberg tables as plans, read by the runtime's decoder and compared with pyiceberg, row by row."""

from __future__ import annotations

import datetime as dt
import pickle
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_tables import Warehouse, read
from pyiceberg.expressions import And, EqualTo, In
from pyiceberg.manifest import FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)
from s3 import ADMIN, S3Server, s3

from strata.data.iceberg import plan_table, table_state
from strata.data.plan.cache import SurveyCache
from strata.data.plan.plan import Plan
from strata.errors import (
    DataError,
    DataFileInvalid,
    DataFileMissing,
    InvalidArgument,
    NoData,
    SchemaMismatch,
    StorageUnavailable,
)

ID, NAME, SCORE = 1, 2, 3
IDS = {"id": ID, "name": NAME, "score": SCORE}
SCHEMA = Schema(
    NestedField(ID, "id", LongType()),
    NestedField(NAME, "name", StringType()),
    NestedField(SCORE, "score", DoubleType()),
)


__all__ = ["s3"]  # a fixture


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    made = Warehouse(tmp_path)
    yield made
    made.close()


def rows(first: int, last: int) -> pa.Table:
    numbers = range(first, last)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "name": pa.array([None if number % 7 == 0 else f"n{number % 5}" for number in numbers], pa.string()),
            "score": pa.array([number / 4 for number in numbers]),
        }
    )


def oracle(table: Table, **options: Any) -> pa.Table:
    """Return the rows that pyiceberg reads."""
    return table.scan(**options).to_arrow()


def assert_same_rows(found: pa.Table, expected: pa.Table, *, by: str = "id") -> None:
    expected = expected.select(found.column_names).cast(
        pa.schema([field.with_nullable(True) for field in found.schema])
    )
    assert found.sort_by(by).combine_chunks().equals(expected.sort_by(by).combine_chunks())


def planned(table: Table, **options: Any) -> tuple[pa.Table, Plan]:
    source, plan = plan_table(table, split_bytes="1MiB", **options)
    return read(source, plan), plan


def groups_of_ten(warehouse: Warehouse, *parts: tuple[int, int]) -> tuple[Table, list[str]]:
    """Create a table of Parquet files with ten rows per row group."""
    table = warehouse.create("numbers", SCHEMA)
    return table, [warehouse.add_parquet(table, rows(*part), ids=IDS, row_group_size=10) for part in parts]


# --- plain reading ---


def test_a_table_is_read_in_commit_order_by_row_groups(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 35), (35, 60))
    found, plan = planned(table)
    assert found["id"].to_pylist() == list(range(60))
    assert plan.unit_rows.tolist() == [10, 10, 10, 5, 10, 10, 5]
    assert (plan.num_splits, plan.pruning.num_units, plan.pruning.num_rows) == (2, 7, 60)
    assert plan.null_counts == {"name": 9}
    assert_same_rows(found, oracle(table))


def test_a_table_that_pyiceberg_wrote_is_found_by_its_name_in_the_catalog(warehouse: Warehouse) -> None:
    table = warehouse.create("clicks", SCHEMA)
    for part in ((0, 50), (50, 80)):
        table.append(rows(*part))
    source, plan = plan_table("db.clicks", warehouse.config, columns=["score", "id"])
    found = read(source, plan)
    assert found.column_names == ["score", "id"]
    assert plan.columns == ("score", "id")
    assert_same_rows(found, oracle(table, selected_fields=("score", "id")))


def test_a_table_is_found_by_its_metadata_file_alone(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20))
    source, plan = plan_table(table.metadata_location)
    assert read(source, plan)["id"].to_pylist() == list(range(20))


def test_overwritten_and_deleted_rows_are_not_read(warehouse: Warehouse) -> None:
    table = warehouse.create("clicks", SCHEMA)
    table.append(rows(0, 50))
    table.delete("id < 10")
    table.overwrite(rows(100, 110), overwrite_filter="id >= 40")
    found, _ = planned(table)
    assert sorted(found["id"].to_pylist()) == [*range(10, 40), *range(100, 110)]


def test_orc_files_are_read_by_stripes_and_by_their_ids(warehouse: Warehouse) -> None:
    table = warehouse.create("orcs", SCHEMA)
    table.update_schema().rename_column("name", "label").commit()
    warehouse.add_orc(table, rows(0, 1000), ids=IDS, stripe_size=1024)
    found, plan = planned(table)
    assert plan.files[0].format == "orc"
    assert plan.num_units > 1
    assert found.column_names == ["id", "label", "score"]
    assert_same_rows(found, oracle(table))
    warehouse.delete_positions(table, {plan.files[0].file.path: [0, 501, 999]})
    filtered, _ = planned(table, scan_filter="label = 'n1' or id > 900")
    assert_same_rows(filtered, oracle(table, row_filter="label = 'n1' or id > 900"))


def test_tables_of_the_first_format_version_are_read(warehouse: Warehouse) -> None:
    table = warehouse.create("first", SCHEMA, properties={"format-version": "1"})
    table.append(rows(0, 30))
    table.append(rows(30, 50))
    found, _ = planned(table, scan_filter="id >= 10")
    assert table.format_version == 1
    assert_same_rows(found, oracle(table, row_filter="id >= 10"))


def test_files_of_several_partition_specs_are_read_together(warehouse: Warehouse) -> None:
    table = warehouse.create("respecified", SCHEMA)
    table.append(rows(0, 30))
    table.update_spec().add_identity("name").commit()
    table.append(rows(30, 60))
    found, plan = planned(table, scan_filter="name = 'n1'")
    assert (plan.pruning.num_files, plan.pruning.num_files_pruned) == (7, 5)
    assert_same_rows(found, oracle(table, row_filter="name = 'n1'"))
    assert_same_rows(planned(table)[0], oracle(table))


def test_orc_and_parquet_files_without_ids_are_read_with_the_name_mapping(warehouse: Warehouse) -> None:
    mapping = '[{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["name", "old"]}]'
    table = warehouse.create("mapped", SCHEMA, properties={"schema.name-mapping.default": mapping})
    warehouse.add_orc(table, rows(0, 20).select(["id", "name"]).rename_columns(["id", "old"]), ids=None)
    warehouse.add_parquet(table, rows(20, 40).select(["name", "id"]), ids=None, row_group_size=10)
    found, _ = planned(table)
    assert found["name"].to_pylist() == rows(0, 40)["name"].to_pylist()
    assert_same_rows(found, oracle(table))
    warehouse.add_parquet(table, rows(40, 50), ids=None, row_group_size=10)
    assert planned(table)[0]["score"].null_count == 50, "no column maps to it, so it is not read"


def test_files_without_ids_and_without_a_mapping_are_rejected_with_the_cure(warehouse: Warehouse) -> None:
    table = warehouse.create("unmapped", SCHEMA)
    warehouse.add_parquet(table, rows(0, 10), ids=None, row_group_size=10)
    with pytest.raises(SchemaMismatch, match=r"files-000\.parquet has no field ids .* schema\.name-mapping\.default"):
        plan_table(table)


EVERY_TYPE = {
    "flag": (BooleanType(), [True, None, False]),
    "small": (IntegerType(), [1, None, -1]),
    "large": (LongType(), [2**40, None, -1]),
    "single": (FloatType(), [0.5, None, -1.25]),
    "double": (DoubleType(), [0.1, None, -1.25]),
    "money": (DecimalType(20, 3), [Decimal("1.125"), None, Decimal("-7.000")]),
    "day": (DateType(), [dt.date(2024, 2, 29), None, dt.date(1969, 1, 1)]),
    "clock": (TimeType(), [dt.time(1, 2, 3, 4), None, dt.time(0)]),
    "moment": (
        TimestampType(),
        [dt.datetime.fromisoformat("2024-01-01T12:00"), None, dt.datetime.fromisoformat("1969-01-01")],
    ),
    "instant": (
        TimestamptzType(),
        [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), None, dt.datetime(1969, 1, 1, tzinfo=dt.UTC)],
    ),
    "text": (StringType(), ["a", None, "ü"]),
    "bytes": (BinaryType(), [b"a", None, b""]),
    "fixed": (FixedType(2), [b"ab", None, b"cd"]),
    "who": (UUIDType(), [uuid.UUID(int=5).bytes, None, uuid.UUID(int=6).bytes]),
    "numbers": (ListType(100, LongType(), element_required=False), [[1, None], None, []]),
    "by_name": (MapType(101, StringType(), 102, LongType(), value_required=False), [[("a", 1)], None, []]),
}


def test_every_type_is_read_and_filtered_as_pyiceberg_does(warehouse: Warehouse) -> None:
    fields = [NestedField(number, name, kind) for number, (name, (kind, _)) in enumerate(EVERY_TYPE.items(), start=2)]
    table = warehouse.create("types", Schema(NestedField(1, "id", LongType()), *fields))
    columns = {"id": [0, 1, 2], **{name: values for name, (_, values) in EVERY_TYPE.items()}}
    table.append(pa.table(columns, schema=table.schema().as_arrow()))
    found, _ = planned(table)
    assert found.to_pydict() == columns
    assert found.drop(["who"]).to_pydict() == oracle(table).drop(["who"]).to_pydict(), "UUIDs are bytes here"
    for scan_filter in (
        "flag = true",
        "small < 1",
        "single <= -1.25",
        "money > 1.124",
        "day >= '2024-01-01'",
        "moment < '2024-01-01T12:00:01'",
        "instant > '2020-01-01T00:00:00+00:00'",
        "text >= 'b'",
        "double is null",
    ):
        found, _ = planned(table, columns=["id"], scan_filter=scan_filter)
        assert found.to_pydict() == oracle(table, selected_fields=("id",), row_filter=scan_filter).to_pydict()
    for scan_filter in (f"who = '{uuid.UUID(int=6)}'", f"who in ('{uuid.UUID(int=6)}', '{uuid.UUID(int=7)}')"):
        assert planned(table, scan_filter=scan_filter)[0]["id"].to_pylist() == [2], "pyiceberg does not support it"


# --- schema evolution ---


def test_columns_that_were_added_renamed_reordered_and_widened_are_read(warehouse: Warehouse) -> None:
    schema = Schema(
        NestedField(1, "id", IntegerType()),
        NestedField(2, "name", StringType()),
        NestedField(3, "price", DecimalType(9, 2)),
    )
    table = warehouse.create("evolving", schema)
    first = pa.table({"id": pa.array([1, 2], pa.int32()), "name": ["a", "b"], "price": [Decimal("1.50"), None]})
    table.append(first.cast(table.schema().as_arrow()))
    with table.update_schema() as update:
        update.rename_column("name", "label")
        update.update_column("id", LongType())
        update.update_column("price", DecimalType(18, 2))
        update.add_column("extra", DoubleType())
        update.move_first("extra")
    table.append(
        pa.table({"extra": [0.5], "id": pa.array([2**40]), "label": ["c"], "price": [Decimal("12345678901.25")]}).cast(
            table.schema().as_arrow()
        )
    )
    found, plan = planned(table)
    assert plan.schema.types == [pa.float64(), pa.int64(), pa.large_string(), pa.decimal128(18, 2)]
    assert found["extra"].to_pylist() == [None, None, 0.5]
    assert plan.null_counts["extra"] == 2
    assert_same_rows(found, oracle(table))


def test_a_column_that_was_dropped_and_added_again_hides_its_old_values(warehouse: Warehouse) -> None:
    table = warehouse.create("again", SCHEMA)
    table.append(rows(0, 10))
    table.update_schema().delete_column("name").commit()
    table.update_schema().add_column("name", StringType()).commit()
    table.append(rows(10, 20).select(["id", "score", "name"]))
    found, plan = planned(table)
    assert found["name"].to_pylist() == [None] * 10 + rows(10, 20)["name"].to_pylist()
    assert_same_rows(found, oracle(table))
    passing, plan = planned(table, scan_filter="name = 'n1'")
    assert passing["id"].to_pylist() == [11, 16]
    assert plan.pruning.num_files_pruned + plan.pruning.num_units_pruned == 1


def test_structs_inside_lists_follow_their_own_ids(warehouse: Warehouse) -> None:
    point = StructType(NestedField(3, "x", IntegerType()), NestedField(4, "y", IntegerType()))
    table = warehouse.create("nested", Schema(NestedField(1, "id", LongType()), NestedField(2, "point", point)))
    kind = table.schema().as_arrow()
    table.append(pa.table({"id": [1, 2, 3], "point": [{"x": 1, "y": 2}, None, {"x": 5, "y": 6}]}).cast(kind))
    with table.update_schema() as update:
        update.rename_column(("point", "x"), "east")
        update.update_column(("point", "y"), LongType())
        update.add_column(("point", "z"), StringType())
    found, _ = planned(table)
    assert found["point"].to_pylist() == [
        {"east": 1, "y": 2, "z": None},
        None,
        {"east": 5, "y": 6, "z": None},
    ]
    assert_same_rows(found, oracle(table))


def test_a_partition_column_that_files_lack_comes_from_the_table(warehouse: Warehouse) -> None:
    spec = PartitionSpec(PartitionField(NAME, 1000, IdentityTransform(), "name"))
    table = warehouse.create("by_name", SCHEMA, partition_spec=spec)
    for number, name in enumerate(["a", "b", None]):
        part = rows(10 * number, 10 * number + 10).select(["id", "score"])
        warehouse.add_partitioned_parquet(table, part, IDS, Record(name))
    found, plan = planned(table)
    assert found["name"].to_pylist() == ["a"] * 10 + ["b"] * 10 + [None] * 10
    assert plan.files[0].projection.file_columns(["name", "id"]) == ["id"]
    filtered, plan = planned(table, scan_filter="name = 'b' and id > 15")
    assert filtered["id"].to_pylist() == [16, 17, 18, 19]
    assert (plan.pruning.num_files, plan.pruning.num_files_pruned) == (3, 2)
    everything, plan = planned(table, scan_filter="name != 'a'")
    assert everything["id"].to_pylist() == list(range(10, 20))
    assert plan.pruning.num_units_counted == 0, "a constant needs no decoding"


def test_a_file_with_an_incompatible_column_is_rejected_by_name(warehouse: Warehouse) -> None:
    table = warehouse.create("wrong", SCHEMA)
    wrong = pa.table({"id": ["x", "y"], "name": ["a", "b"], "score": [1.0, 2.0]})
    warehouse.add_parquet(table, wrong, ids=IDS, row_group_size=10)
    with pytest.raises(SchemaMismatch, match=r"files-000\.parquet: column id is string, .* the table's long"):
        plan_table(table)
    found, _ = planned(table, columns=["name"])
    assert found["name"].to_pylist() == ["a", "b"]


# --- object storage ---


def test_a_table_on_s3_is_read_with_the_storage_settings_of_its_catalog(tmp_path: Path, s3: S3Server) -> None:
    warehouse = Warehouse(
        tmp_path,
        warehouse=s3.new_url(),
        **{
            "s3.endpoint": s3.endpoint,
            "s3.region": "us-east-1",
            "s3.access-key-id": ADMIN["access_key_id"],
            "s3.secret-access-key": ADMIN["secret_access_key"],
        },
    )
    table = warehouse.create("clicks", SCHEMA)
    for part in ((0, 50), (50, 80)):
        table.append(rows(*part))
    source, plan = plan_table("db.clicks", warehouse.config, scan_filter="id >= 20 and name = 'n1'")
    assert not source.is_local
    copied = pickle.loads(pickle.dumps((source, plan)))
    assert_same_rows(read(*copied), oracle(table, row_filter="id >= 20 and name = 'n1'"))
    assert all(planned.file.name.startswith("data/") for planned in plan.files)
    source.filesystem.delete_file(plan.files[0].file.path)
    with pytest.raises(DataFileMissing, match="data/"):
        plan_table("db.clicks", warehouse.config)
    warehouse.close()


# --- filters ---

FILTERS = [
    "id >= 12 and id < 33",
    "name = 'n1'",
    "name in ('n1', 'n3') or score < 1.5",
    "name not in ('n1', 'n3')",
    "name is null",
    "not (name = 'n2') and id != 14",
    "name like 'n%' and score >= 3.0",
    And(EqualTo("name", "n1"), In("id", {1, 6, 21, 999})),
]


@pytest.mark.parametrize("scan_filter", FILTERS, ids=str)
def test_filters_keep_the_rows_that_pyiceberg_keeps(warehouse: Warehouse, scan_filter: Any) -> None:
    table, paths = groups_of_ten(warehouse, (0, 35), (35, 60))
    warehouse.delete_positions(table, {paths[0]: [1, 12, 13], paths[1]: [24]})
    found, plan = planned(table, scan_filter=scan_filter, columns=["id"])
    assert plan.columns == ("id",)
    assert_same_rows(found, oracle(table, row_filter=scan_filter, selected_fields=("id",)))


def test_statistics_of_renamed_columns_save_decoding(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 50))
    table.update_schema().rename_column("id", "number").commit()
    found, plan = planned(table, scan_filter="number >= 20 and number < 35", columns=["score"])
    assert found["score"].to_pylist() == [number / 4 for number in range(20, 35)]
    assert (plan.pruning.num_units, plan.pruning.num_units_pruned, plan.pruning.num_units_counted) == (5, 3, 1)
    assert plan.schema.names == ["score", "number"]


def test_partitions_and_column_bounds_prune_files(warehouse: Warehouse) -> None:
    spec = PartitionSpec(PartitionField(NAME, 1000, IdentityTransform(), "name"))
    table = warehouse.create("by_name", SCHEMA, partition_spec=spec)
    table.append(rows(0, 100))
    found, plan = planned(table, scan_filter="name = 'n3' and id < 20")
    assert found["id"].to_pylist() == [3, 8, 13, 18]
    assert (plan.pruning.num_files, plan.pruning.num_files_pruned) == (6, 5)
    table.append(rows(1000, 1100))
    found, plan = planned(table, scan_filter="id > 999")
    assert found.num_rows == 100
    assert (plan.pruning.num_files, plan.pruning.num_files_pruned) == (12, 6)
    assert plan.pruning.num_units_counted == 0, "statistics decide that all rows pass"


@pytest.mark.parametrize(
    ("scan_filter", "error", "message"),
    [
        ("id >", InvalidArgument, "cannot be parsed"),
        ("nme = 'a'", SchemaMismatch, "its columns are: id, name, score"),
        ("id = 'a'", SchemaMismatch, "does not fit this table"),
        (7, InvalidArgument, "scan_filter is a int"),
        ("id > 1000", NoData, r"no row passes the filter id > 1000 \(1 files were pruned"),
    ],
)
def test_invalid_filters_are_rejected(
    warehouse: Warehouse, scan_filter: Any, error: type[Exception], message: str
) -> None:
    table = warehouse.create("clicks", SCHEMA)
    table.append(rows(0, 10))
    with pytest.raises(error, match=message):
        plan_table(table, scan_filter=scan_filter)


# --- deletes ---


@pytest.mark.parametrize("as_orc", [False, True], ids=["parquet", "orc"])
def test_position_deletes_remove_rows_from_row_groups_and_counts(warehouse: Warehouse, as_orc: bool) -> None:
    table, paths = groups_of_ten(warehouse, (0, 35), (35, 60))
    warehouse.delete_positions(table, {paths[0]: [*range(10, 20), 3, 34], paths[1]: [0, 24]}, as_orc=as_orc)
    warehouse.delete_positions(table, {paths[0]: [3, 4]}, as_orc=as_orc)
    found, plan = planned(table)
    assert plan.unit_rows.tolist() == [8, 10, 4, 9, 10, 4]
    assert plan.unit_index.tolist() == [0, 2, 3, 0, 1, 2]
    gone = {3, 4, *range(10, 20), 34, 35, 59}
    assert found["id"].to_pylist() == [number for number in range(60) if number not in gone]
    assert_same_rows(found, oracle(table))


def test_position_deletes_do_not_apply_to_later_commits_or_other_partitions(warehouse: Warehouse) -> None:
    spec = PartitionSpec(PartitionField(NAME, 1000, IdentityTransform(), "name"))
    table = warehouse.create("by_name", SCHEMA, partition_spec=spec)
    part = rows(0, 10).select(["id", "score"])
    first = warehouse.add_partitioned_parquet(table, part, IDS, Record("a"))
    second = warehouse.add_partitioned_parquet(table, part, IDS, Record("b"))
    warehouse.delete_positions(table, {first: [0], second: [1]}, partition=Record("a"))
    later = warehouse.path(".parquet")
    warehouse.delete_positions(table, {later: [2]}, partition=Record("a"))
    warehouse.add_partitioned_parquet(table, part.slice(0, 3), IDS, Record("a"), path=later)
    found, _ = planned(table)
    assert found["id"].to_pylist() == [*range(1, 10), *range(10), 0, 1, 2]


def test_deletion_vectors_are_applied(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 35), (35, 60))
    warehouse.delete_by_vector(table, {paths[0]: [0, 9, 30], paths[1]: [5]})
    found, plan = planned(table)
    assert plan.unit_rows.tolist() == [8, 10, 10, 4, 9, 10, 5]
    assert not set(found["id"].to_pylist()) & {0, 9, 30, 40}
    assert_same_rows(found, oracle(table))


def test_a_damaged_delete_file_is_never_skipped(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 35))
    path = warehouse.delete_by_vector(table, {paths[0]: [0, 9, 30]})
    data = bytearray(Path(path).read_bytes())
    data[25] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(DataFileInvalid, match=r"deletes\.puffin: its deletion vectors are damaged"):
        plan_table(table, on_error="skip")


def test_equality_deletes_apply_to_earlier_commits(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 35))
    table.update_schema().rename_column("name", "label").commit()
    keys = pa.table({"name": ["n1", None], "score": [1.5, 7 / 4]})
    warehouse.delete_equal(table, keys, {"name": NAME, "score": SCORE})
    warehouse.delete_equal(table, pa.table({"id": [20, 21, 99]}), {"id": ID})
    warehouse.add_parquet(table, rows(20, 22), ids=IDS, row_group_size=10)
    with pytest.raises(ValueError, match="equality deletes"):
        oracle(table)
    found, plan = planned(table, columns=["id"])
    assert found["id"].to_pylist() == [n for n in range(35) if n not in (6, 7, 20, 21)] + [20, 21]
    assert plan.unit_rows.tolist() == [8, 10, 8, 5, 2]
    filtered, _ = planned(table, columns=["score"], scan_filter="id >= 19 and id < 24")
    assert filtered["score"].to_pylist() == [n / 4 for n in (19, 22, 23, 20, 21)]


def test_equality_deletes_stay_in_their_partition_unless_they_have_none(warehouse: Warehouse) -> None:
    spec = PartitionSpec(PartitionField(NAME, 1000, IdentityTransform(), "name"))
    table = warehouse.create("by_name", SCHEMA, partition_spec=spec)
    part = rows(0, 5).select(["id", "score"])
    for name in ("a", "b"):
        warehouse.add_partitioned_parquet(table, part, IDS, Record(name))
    warehouse.delete_equal(table, pa.table({"id": [1]}), {"id": ID}, partition=Record("b"))
    found, _ = planned(table)
    assert found.select(["name", "id"]).to_pylist() == [
        {"name": name, "id": number} for name in "ab" for number in range(5) if (name, number) != ("b", 1)
    ]


@pytest.mark.parametrize("version", ["1", "2"])
def test_equality_deletes_apply_everywhere_in_a_table_that_is_no_longer_partitioned(
    warehouse: Warehouse, version: str
) -> None:
    """A field removed from a version 1 spec stays in it as a void transform."""
    spec = PartitionSpec(PartitionField(NAME, 1000, IdentityTransform(), "name"))
    table = warehouse.create("by_name", SCHEMA, partition_spec=spec, properties={"format-version": version})
    for name in ("a", "b"):
        warehouse.add_partitioned_parquet(table, rows(0, 5).select(["id", "score"]), IDS, Record(name))
    with table.update_spec() as update:
        update.remove_field("name")
    with table.transaction() as transaction:
        transaction.upgrade_table_version(2)
    assert len(table.spec().fields) == (1 if version == "1" else 0)
    partition = Record(*[None] * len(table.spec().fields))
    warehouse.delete_equal(table, pa.table({"id": [1]}), {"id": ID}, partition=partition)
    assert planned(table)[0]["id"].to_pylist() == [0, 2, 3, 4] * 2
    assert planned(table, scan_filter="name = 'a'")[0]["id"].to_pylist() == [0, 2, 3, 4]


# --- snapshots ---


def test_an_older_snapshot_is_read_by_id_and_by_time_with_its_schema(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20))
    before = table.current_snapshot()
    assert before is not None
    table.update_schema().rename_column("name", "label").commit()
    warehouse.add_parquet(table, rows(20, 30), ids=IDS, row_group_size=10)
    moment = dt.datetime.fromtimestamp(before.timestamp_ms / 1000, tz=dt.UTC)
    for when in ({"snapshot_id": before.snapshot_id}, {"as_of": before.timestamp_ms}, {"as_of": moment.isoformat()}):
        found, _ = planned(table, **when)
        assert found.column_names == ["id", "name", "score"]
        assert found["id"].to_pylist() == list(range(20))
    found, _ = planned(table, snapshot_id=before.snapshot_id, scan_filter="name = 'n1'")
    assert found["id"].to_pylist() == [1, 6, 11, 16]
    assert planned(table)[0].column_names == ["id", "label", "score"]


def test_all_ranks_read_one_state_while_others_write(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20))
    table.update_schema().add_column("later", LongType()).commit()
    asked = table_state("db.numbers", warehouse.config)
    one = plan_table(table)[1]
    warehouse.add_parquet(table, rows(20, 30), ids=IDS, row_group_size=10)
    table.update_schema().delete_column("later").commit()
    other = plan_table(table, snapshot_id=asked.snapshot_id, schema_id=asked.schema_id)[1]
    assert other.columns == one.columns == ("id", "name", "score", "later")
    assert other.fingerprint == one.fingerprint
    assert asked.table_uuid == str(table.metadata.table_uuid)
    with pytest.raises(InvalidArgument, match=r"db\.numbers has no schema 9; it has: 0, 1"):
        plan_table(table, schema_id=9)


def test_a_missing_snapshot_is_rejected_with_the_existing_ones(warehouse: Warehouse) -> None:
    empty = warehouse.create("empty", SCHEMA)
    with pytest.raises(NoData, match="has no snapshot"):
        plan_table(empty)
    table, _ = groups_of_ten(warehouse, (0, 20))
    current = table.current_snapshot()
    assert current is not None
    with pytest.raises(InvalidArgument, match=rf"no snapshot 17; .* its 1 snapshots: {current.snapshot_id} \(20"):
        plan_table(table, snapshot_id=17)
    with pytest.raises(InvalidArgument, match="no snapshot as old as 2001"):
        plan_table(table, as_of="2001-01-01T00:00:00+00:00")
    with pytest.raises(InvalidArgument, match=r"has no time zone; add one, as in 2001-01-01T00:00:00\+00:00"):
        plan_table(table, as_of="2001-01-01T00:00:00")
    with pytest.raises(InvalidArgument, match="pass one of them"):
        plan_table(table, as_of=5, snapshot_id=current.snapshot_id)


# --- fingerprints ---


def test_the_fingerprint_identifies_the_rows_and_not_the_snapshot(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 20))
    first = planned(table)[1].fingerprint
    assert planned(table)[1].fingerprint == first
    table.append(rows(100, 101))
    assert planned(table)[1].fingerprint != first
    table.delete("id = 100")
    assert planned(table)[1].fingerprint == first, "the same files again"
    warehouse.delete_positions(table, {paths[0]: [5]})
    fifth = planned(table)[1].fingerprint
    warehouse.delete_positions(table, {paths[0]: [6]})
    assert len({first, fifth, planned(table)[1].fingerprint}) == 3


def test_the_fingerprint_includes_which_rows_are_deleted_even_with_equal_counts(
    warehouse: Warehouse,
) -> None:
    table, paths = groups_of_ten(warehouse, (0, 20))
    plain = table.current_snapshot()
    assert plain is not None
    warehouse.delete_positions(table, {paths[0]: [5]})
    one = planned(table)[1]
    table.manage_snapshots().rollback_to_snapshot(plain.snapshot_id).commit()
    warehouse.delete_positions(table, {paths[0]: [6]})
    other = planned(table)[1]
    assert one.unit_rows.tolist() == other.unit_rows.tolist()
    assert one.fingerprint != other.fingerprint
    table.manage_snapshots().rollback_to_snapshot(plain.snapshot_id).commit()
    warehouse.delete_positions(table, {paths[0]: [5]})
    assert planned(table)[1].fingerprint == one.fingerprint, "another snapshot, the same rows"


def test_a_plan_can_be_pickled_for_other_processes(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 20))
    warehouse.delete_positions(table, {paths[0]: [5]})
    source, plan = plan_table(table, scan_filter="name in ('n1', 'n2')")
    copied = pickle.loads(pickle.dumps((source, plan)))
    assert read(*copied).equals(read(source, plan))


# --- the cache ---


def test_file_metadata_is_cached_until_other_rows_are_deleted(
    warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SurveyCache(directory=tmp_path / "cache")
    table, paths = groups_of_ten(warehouse, (0, 20), (20, 40))
    asked = {"scan_filter": "name = 'n1'", "cache": cache}
    first = planned(table, **asked)[1]

    from strata.data.formats.parquet.format import ParquetFormat

    opened: list[str] = []
    for name in ("inspect", "open"):
        original: Callable[..., Any] = getattr(ParquetFormat, name)

        def noting(self: Any, source: Any, file: Any, *args: Any, _of: Any = original, **more: Any) -> Any:
            opened.append(Path(file.path).name)
            return _of(self, source, file, *args, **more)

        monkeypatch.setattr(ParquetFormat, name, noting)
    again = plan_table(table, split_bytes="1MiB", **asked)[1]
    assert (opened, again.fingerprint) == ([], first.fingerprint)
    warehouse.delete_positions(table, {paths[1]: [6]})
    changed = plan_table(table, split_bytes="1MiB", **asked)[1]
    assert opened == ["files-001.parquet"], "counted again, but not inspected again"
    assert changed.num_rows == first.num_rows - 1


# --- errors ---


def test_missing_or_damaged_files_are_named_or_skipped(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 20), (20, 40), (40, 60))
    Path(paths[0]).unlink()
    with pytest.raises(DataFileMissing, match="files-000"):
        plan_table(table)
    Path(paths[1]).write_bytes(b"PAR1 not really" * 100)
    source, plan = plan_table(table, on_error="skip")
    assert read(source, plan)["id"].to_pylist() == list(range(40, 60))
    assert [Path(name).name for name, _ in plan.pruning.skipped] == ["files-000.parquet", "files-001.parquet"]
    assert (plan.pruning.num_files_skipped, plan.pruning.num_units_skipped) == (2, 0)
    Path(paths[2]).unlink()
    with pytest.raises(NoData, match="none of its 3 files can be read"):
        plan_table(table, on_error="skip")


def test_a_row_group_found_damaged_while_counting_is_named_or_skipped(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 30))
    column = pq.ParquetFile(paths[0]).metadata.row_group(1).column(1)
    data = bytearray(Path(paths[0]).read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    data[first : first + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    Path(paths[0]).write_bytes(data)
    with pytest.raises(DataFileInvalid, match=r"files-000\.parquet: row group 1, which begins with row 10"):
        plan_table(table, scan_filter="name = 'n1'")
    source, plan = plan_table(table, scan_filter="name = 'n1'", on_error="skip")
    assert read(source, plan)["id"].to_pylist() == [1, 6, 26]
    assert [reason.split(":")[0] for _, reason in plan.pruning.skipped] == ["row group 1"]
    assert (plan.pruning.num_files_skipped, plan.pruning.num_units_skipped) == (0, 1)


def test_unreachable_storage_is_an_error_even_if_bad_files_are_skipped(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20), (20, 40))

    def away(*_: object, **__: object) -> Any:
        raise StorageUnavailable("files-001.parquet cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr("strata.data.formats.parquet.format.ParquetFormat.inspect", away)
        with pytest.raises(StorageUnavailable):
            plan_table(table, on_error="skip")
    monkeypatch.setattr("strata.data.iceberg.probe.LazyReader.read", away)
    with pytest.raises(StorageUnavailable):
        plan_table(table, scan_filter="name = 'n1'", on_error="skip")


def test_avro_data_files_are_rejected_with_the_cure(warehouse: Warehouse) -> None:
    table = warehouse.create("avro", SCHEMA)
    path = warehouse.path(".avro")
    Path(path).write_bytes(b"Obj\x01")
    warehouse.add_file(table, path, FileFormat.AVRO, 10)
    with pytest.raises(DataError, match=r"is avro; only orc and parquet files of Iceberg tables are supported"):
        plan_table(table)


def test_columns_are_checked_against_the_table(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20))
    with pytest.raises(SchemaMismatch, match=r"no column 'scor'; did you mean 'score'\?"):
        plan_table(table, columns=["scor"])
    with pytest.raises(InvalidArgument, match="each once"):
        plan_table(table, columns=["id", "id"])


def test_missing_tables_and_catalogs_are_rejected_without_printing_passwords(warehouse: Warehouse) -> None:
    warehouse.create("clicks", SCHEMA)
    with pytest.raises(InvalidArgument, match=r"no table 'db\.click'; did you mean 'db\.clicks'\?"):
        plan_table("db.click", warehouse.config)
    with pytest.raises(InvalidArgument, match="is not the metadata of a table"):
        plan_table(f"{warehouse.directory}/nothing.metadata.json")
    with pytest.raises(InvalidArgument, match=r"the catalog cannot be opened with these settings \(type\)"):
        plan_table("db.clicks", {"type": "sqlite"})
    with pytest.raises(StorageUnavailable, match="cannot be reached") as caught:
        plan_table("db.clicks", {"type": "sql", "uri": "sqlite:////no/such/place/secret-word.db"})
    assert "secret-word" not in str(caught.value)
    assert caught.value.__suppress_context__
    with pytest.raises(InvalidArgument, match="omit catalog_config"):
        plan_table(warehouse.catalog.load_table("db.clicks"), {"type": "sql"})


def test_an_empty_catalog_hints_at_a_wrong_address(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="it is empty: check uri and name"):
        plan_table("db.clicks", {"type": "sql", "uri": f"sqlite:///{tmp_path}/other.db"})


def test_progress_is_reported(warehouse: Warehouse) -> None:
    table, _ = groups_of_ten(warehouse, (0, 20), (20, 40))
    progress: list[tuple[str, int, int]] = []
    plan_table(table, progress=lambda *step: progress.append(step))
    assert progress == [("looking at files", 1, 2), ("looking at files", 2, 2)]
    plan_table(table, progress=lambda *step: progress.append(step), scan_filter="name = 'n1'")
    assert progress[-1] == ("counting rows", 2, 2)


def test_positions_are_numpy_and_sorted(warehouse: Warehouse) -> None:
    table, paths = groups_of_ten(warehouse, (0, 20))
    warehouse.delete_positions(table, {paths[0]: [5, 1]})
    projection: Any = plan_table(table)[1].files[0].projection
    assert projection.deleted.dtype == np.int64
    assert projection.deleted.tolist() == [1, 5]
