"""`DeltaDataset`: tables that `deltalake` wrote, and logs written by hand for what it does not write."""

from __future__ import annotations

import datetime as dt
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap
from s3 import S3Server, s3

from strata import DeltaDataset
from strata.data.shared.cache import NodeCache, directory_for
from strata.data.source.filesystem import open_source
from strata.errors import (
    ConfigError,
    DataError,
    DataFileInvalid,
    DataFileMissing,
    InvalidArgument,
    NoData,
    PlanChanged,
    SchemaMismatch,
)

__all__ = ["s3"]  # a fixture

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


def rows(first: int, last: int, **more: Any) -> pa.Table:
    numbers = range(first, last)
    columns = {"id": pa.array(numbers, pa.int64()), "score": [number / 2 for number in numbers]}
    return pa.table(columns | {name: [value] * len(numbers) for name, value in more.items()})


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Four versions: two appends of two days each, a delete, and a new column. Row groups have ten rows."""
    uri = str(tmp_path / "click table")
    for first in (0, 100):
        days = [
            rows(first, first + 60, day=dt.date(2026, 1, 1), place="a/b c"),
            rows(first + 60, first + 100, day=None),
        ]
        days[1] = days[1].set_column(2, "day", pa.nulls(40, pa.date32())).append_column("place", pa.array(["é"] * 40))
        write_deltalake(uri, pa.concat_tables(days), mode="append", partition_by=["day", "place"])
    DeltaTable(uri).delete("id >= 10 and id < 20")
    write_deltalake(uri, rows(200, 230, day=dt.date(2026, 1, 2), place="c", note=7), mode="append", schema_mode="merge")
    return uri


LEFT = [*range(10), *range(20, 230)]


def load(uri: str, **more: Any) -> Any:
    loader, _ = DeltaDataset.create_dataloader(uri, **({"batch_size": 8, "num_workers": 2, "columns": ["id"]} | more))
    return loader


def ids(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch["id"].tolist()]


def arrow(uri: str, **more: Any) -> list[dict[str, Any]]:
    loader = load(uri, columns=None, output_format="arrow", **more)
    return sorted((row for batch in loader for row in batch.to_pylist()), key=lambda row: row["id"])


# -- a log written by hand -----------------------------------------------------------------------------------------


def commit(directory: Path, version: int, *actions: dict[str, Any]) -> None:
    log = directory / "_delta_log" / f"{version:020}.json"
    log.parent.mkdir(exist_ok=True)
    log.write_text("\n".join(map(json.dumps, actions)))


def protocol(*features: str) -> dict[str, Any]:
    made = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    return {"protocol": made}


def field(name: str, kind: Any, number: int) -> dict[str, Any]:
    mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapped}


def metadata(fields: list[dict[str, Any]], partitions: Iterable[str] = (), mode: str = "none") -> dict[str, Any]:
    return {
        "metaData": {
            "id": str(UUID(int=7)),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": fields}),
            "partitionColumns": list(partitions),
            "configuration": {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "9"},
            "createdTime": 0,
        }
    }


def add(directory: Path, name: str, written: pa.Table, **more: Any) -> dict[str, Any]:
    pq.write_table(written, directory / name, row_group_size=10)
    size = (directory / name).stat().st_size
    made: dict[str, Any] = {
        "path": name,
        "partitionValues": {},
        "size": size,
        "modificationTime": 5,
        "dataChange": True,
        **more,
    }
    made["stats"] = json.dumps({"numRecords": written.num_rows})
    return {"add": made}


def remove(added: dict[str, Any]) -> dict[str, Any]:
    """Return the action that ends an `add`: one of a path with the same deletion vector."""
    made = {name: added["add"][name] for name in ("path", "deletionVector") if name in added["add"]}
    return {"remove": {**made, "deletionTimestamp": 6, "dataChange": True}}


def z85(data: bytes) -> str:
    text = ""
    for first in range(0, len(data), 4):
        number = int.from_bytes(data[first : first + 4].ljust(4, b"\0"), "big")
        text += "".join(_Z85[number // 85**place % 85] for place in (4, 3, 2, 1, 0))
    return text


def with_deletes(added: dict[str, Any], positions: Iterable[int], directory: Path | None = None) -> dict[str, Any]:
    """Return the action with a deletion vector, inline or in a file."""
    bitmap = BitMap(positions)
    body = struct.pack("<IQI", 1681511377, 1, 0) + bitmap.serialize()
    vector = {"storageType": "i", "pathOrInlineDv": z85(body), "sizeInBytes": len(body), "cardinality": len(bitmap)}
    if directory is not None:
        name = UUID(int=1 + len(list(directory.glob("*.bin"))))
        data = b"\1" + struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))
        (directory / f"deletion_vector_{name}.bin").write_bytes(data)
        vector |= {"storageType": "u", "pathOrInlineDv": z85(name.bytes), "offset": 1}
    return {"add": added["add"] | {"deletionVector": vector}}


PLAIN = [
    {"name": "id", "type": "long", "nullable": True, "metadata": {}},
    {"name": "score", "type": "double", "nullable": True, "metadata": {}},
]


@pytest.fixture
def deleted(tmp_path: Path) -> Path:
    """Version 0 has 60 rows; version 1 deletes two whole row groups and some rows, version 2 one row less."""
    directory = tmp_path / "deleted"
    directory.mkdir()
    added = [add(directory, "a.parquet", rows(0, 35)), add(directory, "b.parquet", rows(35, 60))]
    commit(directory, 0, protocol("deletionVectors"), metadata(PLAIN), *added)
    for version, first in ((1, [0, *range(10, 20), 34]), (2, [1, *range(10, 20), 34])):
        new = [with_deletes(added[0], first), with_deletes(added[1], [*range(10), 12], directory)]
        commit(directory, version, *map(remove, added), *new)
        added = new
    return directory


LEFT_AFTER = [[n for n in range(60) if n not in (gone, *range(10, 20), 34, *range(35, 45), 47)] for gone in (0, 1)]

# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_the_latest_version_is_delivered_once_with_partitions_and_missing_columns(table: str, worker_type: str) -> None:
    found = arrow(table, shuffle=True, worker_type=worker_type)
    assert [row["id"] for row in found] == LEFT
    assert found[0] == {"id": 0, "score": 0.0, "day": dt.date(2026, 1, 1), "place": "a/b c", "note": None}
    assert found[60] == {"id": 70, "score": 35.0, "day": None, "place": "é", "note": None}
    assert found[-1] == {"id": 229, "score": 114.5, "day": dt.date(2026, 1, 2), "place": "c", "note": 7}


def test_an_old_version_has_its_own_rows_and_columns(table: str) -> None:
    found = arrow(table, version=1)
    assert [row["id"] for row in found] == list(range(200))
    assert set(found[0]) == {"id", "score", "day", "place"}
    assert ids(load(table, version=0)) == ids(load(table, version=0, cache=False))


def test_a_time_selects_the_version_that_was_current_then(table: str) -> None:
    made_ms = {entry["version"]: entry["timestamp"] for entry in DeltaTable(table).history()}
    moment = dt.datetime.fromtimestamp(made_ms[1] / 1000, tz=dt.UTC)
    for timestamp in (moment, moment.isoformat()):
        assert len(ids(load(table, timestamp=timestamp))) == 200
    assert len(ids(load(table, timestamp=dt.datetime(2100, 1, 1, tzinfo=dt.UTC)))) == len(LEFT)


@pytest.mark.parametrize(
    ("filters", "expected", "num_pruned"),
    [
        ("id < 5", range(5), 3),
        ("day is None and id >= 160", range(160, 200), 4),
        ("place == 'c'", range(200, 230), 4),
        ("day == date('2026-01-01') and score < 2", range(4), 2),
        ("note == 7 and id > 220", range(221, 230), 4),
        ("note is None and id < 30", [*range(10), *range(20, 30)], 3),
    ],
)
def test_filters_leave_out_files_by_the_log_and_rows_by_their_values(
    table: str, filters: str, expected: Iterable[int], num_pruned: int
) -> None:
    loader = load(table, filters=filters)
    assert sorted(ids(loader)) == list(expected)
    pruning = loader.dataset.plan.pruning
    assert pruning.num_files == 5
    assert pruning.num_files_pruned >= num_pruned


def test_two_ranks_resume_in_the_middle_of_a_shuffled_epoch_of_three(deleted: Path) -> None:
    seen: list[int] = []
    for rank in range(3):
        loader = load(str(deleted), version=1, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=3, batch_size=4)
        seen += next(iter(loader))["id"].tolist()
        state = loader.state_dict()
        loader.dataset.close()
    for rank in range(2):
        rest = load(str(deleted), version=1, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=2, batch_size=6)
        rest.load_state_dict(state)
        seen += ids(rest)
    assert sorted(seen) == LEFT_AFTER[0]


def test_a_state_belongs_to_one_version(table: str) -> None:
    loader = load(table, version=1)
    batches = iter(loader)
    seen = next(batches)["id"].tolist()
    state = loader.state_dict()
    loader.dataset.close()
    with pytest.raises(PlanChanged, match="another dataset"):
        load(table).load_state_dict(state)
    rest = load(table, version=1)
    rest.load_state_dict(state)
    assert sorted(seen + ids(rest)) == list(range(200))


# -- deletion vectors and column mapping ---------------------------------------------------------------------------


def test_rows_in_deletion_vectors_are_neither_counted_nor_delivered(deleted: Path) -> None:
    assert sorted(ids(load(str(deleted), version=0))) == list(range(60))
    for version, left in enumerate(LEFT_AFTER, start=1):
        loader = load(str(deleted), version=version)
        assert loader.dataset.plan.num_rows == len(left)
        assert sorted(ids(loader)) == left
        filtered = load(str(deleted), version=version, filters="score >= 2 and id <= 50", shuffle=True)
        assert sorted(ids(filtered)) == [number for number in left if 4 <= number <= 50]


def test_the_node_cache_tells_versions_with_other_deleted_rows_apart(deleted: Path) -> None:
    limit = (800 << 20) + os.getpid()
    member = NodeCache(directory_for(limit), max_bytes=limit, linger_s=0.1)
    assert member.join()

    def read(version: int) -> tuple[list[int], Any]:
        loader = load(str(deleted), version=version, shared_bytes=limit)
        found = sorted(ids(loader))
        total = loader.dataset.get_metrics().total
        loader.dataset.close()
        return found, total

    assert read(1)[0] == LEFT_AFTER[0]
    again, taken = read(1)
    assert again == LEFT_AFTER[0]
    assert (taken.units, taken.unshared_units) == (0, 0)
    assert read(2)[0] == LEFT_AFTER[1]
    member.leave()


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_have_the_names_of_the_table(tmp_path: Path, mode: str) -> None:
    name = {"name": "col-{}".format, "id": "own {}".format}[mode]
    point = {"type": "struct", "fields": [field("x", "long", 3), field("added", "string", 5)]}
    fields = [field("id", "long", 1), field("a point", point, 2), field("p", "string", 4), field("new", "integer", 6)]

    def mapped(number: int, kind: pa.DataType) -> pa.Field:
        return pa.field(name(number), kind, metadata={"PARQUET:field_id": str(number)})

    schema = pa.schema([mapped(2, pa.struct([mapped(3, pa.int64())])), mapped(1, pa.int32())])
    points = pa.array([{name(3): n * n} for n in range(20)], schema.field(0).type)
    written = pa.table([points, pa.array(range(20), pa.int32())], schema)
    added = add(tmp_path, "f.parquet", written, partitionValues={"col-4": "v"})
    commit(tmp_path, 0, protocol("columnMapping"), metadata(fields, ["p"], mode), added)
    found = arrow(str(tmp_path), filters="p == 'v' and id >= 12")
    assert found[0] == {"id": 12, "a point": {"x": 144, "added": None}, "p": "v", "new": None}
    assert [row["id"] for row in found] == list(range(12, 20))


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selected", "problem"),
    [
        ({"version": 4}, "has no version 4; the latest is 3"),
        ({"version": -1}, "version=-1 is not a version"),
        ({"version": True}, "version=True is not a version"),
        ({"version": 1, "timestamp": "2026-01-01T00:00:00+00:00"}, "pass one of them"),
        ({"timestamp": "yesterday"}, "timestamp='yesterday' is not a time"),
        ({"timestamp": "2026-01-01T00:00:00"}, "has no time zone"),
        ({"timestamp": "2001-01-01T00:00:00+00:00"}, "has no version as old as 2001-01-01.* its log begins at 20"),
    ],
)
def test_a_version_or_time_that_does_not_exist_is_refused(table: str, selected: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        load(table, **selected)


def test_a_log_that_begins_with_a_checkpoint_has_no_earlier_versions(table: str) -> None:
    DeltaTable(table, version=2).create_checkpoint()
    for version in (0, 1):
        (Path(table) / "_delta_log" / f"{version:020}.json").unlink()
    assert sorted(ids(load(table, cache=False))) == LEFT
    with pytest.raises(InvalidArgument, match=r"version 1 of .* cannot be read: .* its log may have been cleaned up"):
        load(table, version=1)


def test_a_log_without_times_is_refused_if_a_time_is_requested(deleted: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not state when its versions were written; pass version= instead"):
        load(str(deleted), timestamp="2100-01-01T00:00:00+00:00")


def test_other_directories_are_no_tables(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidArgument, match="is not a Delta table: it has no _delta_log"):
            load(str(path))


@pytest.mark.parametrize(
    "path",
    [
        "../outside.parquet",
        "sub/%2e%2e/%2E%2E/outside.parquet",
        "%2Foutside.parquet",
        "/outside.parquet",
        "file:///outside.parquet",
        "s3://bucket/outside.parquet",
        "./a.parquet",
        "a%00.parquet",
    ],
)
def test_a_log_that_leads_outside_the_table_is_refused(tmp_path: Path, path: str) -> None:
    directory = tmp_path / "table"
    directory.mkdir()
    outside = add(tmp_path, "outside.parquet", rows(0, 5))
    commit(directory, 0, protocol(), metadata(PLAIN), {"add": outside["add"] | {"path": path}})
    with pytest.raises(DataFileInvalid, match="is not a file below the table"):
        load(str(directory))


def test_a_file_with_two_deletion_vectors_is_refused(deleted: Path) -> None:
    added = json.loads((deleted / "_delta_log" / f"{2:020}.json").read_text().splitlines()[2])
    commit(deleted, 3, with_deletes(added, [5]))
    with pytest.raises(DataFileInvalid, match=r"its log lists a\.parquet twice, so its rows would be read twice"):
        load(str(deleted))


def test_a_missing_file_is_named_or_skipped(deleted: Path) -> None:
    (deleted / "b.parquet").unlink()
    with pytest.raises(DataFileMissing, match=r"b\.parquet"):
        load(str(deleted), version=0)
    loader = load(str(deleted), version=0, on_error="skip")
    assert ids(loader) == list(range(35))
    assert loader.dataset.plan.pruning.num_files_skipped == 1


def test_features_and_types_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    commit(
        tmp_path, 0, protocol(), metadata(PLAIN), add(tmp_path, "a.parquet", rows(0, 5).rename_columns(["score", "id"]))
    )
    with pytest.raises(SchemaMismatch, match=r"a\.parquet: column id is double, which cannot be read as the table's"):
        load(str(tmp_path))
    commit(tmp_path, 1, protocol("variantType"), metadata([*PLAIN, field("v", "variant", 3)]))
    with pytest.raises(DataError, match="needs variantType, which is not supported"):
        load(str(tmp_path))


def test_filters_without_rows_and_unknown_columns_are_explained(table: str) -> None:
    with pytest.raises(NoData, match="no row passes the filter id > 900, because the log excludes every file"):
        load(table, filters="id > 900")
    assert ids(load(table, filters="id > 900", on_empty="empty")) == []
    with pytest.raises(SchemaMismatch, match="did you mean 'score'"):
        load(table, filters="scores > 1")
    with pytest.raises(SchemaMismatch, match="no file has a column 'ids'"):
        load(table, columns=["ids"])


def test_without_deltalake_the_extra_is_named(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    for name in ("strata.data.delta.planner", "strata.data.delta.table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"need the package deltalake.*strata-runtime\[delta\]"):
        load(table)


# -- object stores -------------------------------------------------------------------------------------------------


def test_a_table_on_s3_is_read_with_one_set_of_options(s3: S3Server) -> None:
    url, options = s3.new_url(), s3.options()
    source, root = open_source(url, storage_options=options)
    added = []
    for name, first in (("a b.parquet", 0), ("c.parquet", 50)):
        with source.filesystem.open_output_stream(f"{root}/{name}") as out:
            pq.write_table(rows(first, first + 50), out, row_group_size=10)
        size = source.filesystem.get_file_info(f"{root}/{name}").size
        stats = json.dumps({"numRecords": 50, "minValues": {"id": first}, "maxValues": {"id": first + 49}})
        made = {"path": name.replace(" ", "%20"), "partitionValues": {}, "size": size, "modificationTime": 5}
        added.append({"add": {**made, "dataChange": True, "stats": stats}})
    added[0] = with_deletes(added[0], range(10))
    with source.filesystem.open_output_stream(f"{root}/_delta_log/{0:020}.json") as out:
        out.write("\n".join(map(json.dumps, [protocol("deletionVectors"), metadata(PLAIN), *added])).encode())
    assert sorted(ids(load(url, storage_options=options, shuffle=True))) == list(range(10, 100))
    loader = load(url, storage_options=options, filters="id >= 70")
    assert ids(loader) == list(range(70, 100))
    assert loader.dataset.plan.pruning.num_files_pruned == 1


def test_a_table_forms_batches_by_tokens_without_its_deleted_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "texts")
    tokens = [[number] * (1 + number % 7) for number in range(100)]
    write_deltalake(uri, pa.table({"id": range(100), "tokens": pa.array(tokens, pa.list_(pa.int64()))}))
    DeltaTable(uri).delete("id >= 10 and id < 20")

    by_rank = [
        list(load(uri, rank=rank, num_ranks=2, batch_size=None, batch_tokens=20, columns=None, sequences="padded"))
        for rank in range(2)
    ]

    assert len(by_rank[0]) == len(by_rank[1])
    batches = [batch for batches in by_rank for batch in batches]
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == [*range(10), *range(20, 100)]
    assert all(batch["tokens"].values.numel() <= 20 for batch in batches)
