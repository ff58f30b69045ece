"""`IcebergDataset`: a table through the loader, exact to the row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from iceberg_tables import Warehouse
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import DoubleType, LongType, NestedField

from strata import IcebergDataset
from strata.data.shared.cache import NodeCache, directory_for
from strata.errors import InvalidArgument, NoData, PlanChanged, SchemaMismatch

SCHEMA = Schema(NestedField(1, "id", LongType()), NestedField(2, "score", DoubleType()))
IDS = {"id": 1, "score": 2}


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    made = Warehouse(tmp_path)
    yield made
    made.close()


def rows(first: int, last: int) -> pa.Table:
    return pa.table({"id": list(range(first, last)), "score": [number / 2 for number in range(first, last)]})


@pytest.fixture
def table(warehouse: Warehouse) -> Table:
    """Parquet and ORC files, and some rows that are deleted."""
    made = warehouse.create("clicks", SCHEMA)
    first = warehouse.add_parquet(made, rows(0, 95), ids=IDS, row_group_size=10)
    warehouse.add_orc(made, rows(95, 130), ids=IDS)
    warehouse.delete_positions(made, {first: [0, 17, 94]})
    return made


LEFT = [number for number in range(130) if number not in (0, 17, 94)]


def load(table: Any, **more: Any) -> Any:
    loader, _ = IcebergDataset.create_dataloader(table, batch_size=8, num_workers=2, **more)
    return loader


def test_a_table_is_shared_without_rows_that_are_deleted_later(warehouse: Warehouse, table: Table) -> None:
    limit = (900 << 20) + os.getpid()
    member = NodeCache(directory_for(limit), max_bytes=limit, linger_s=0.1)
    assert member.join()

    def ids() -> tuple[list[int], Any]:
        loader = load(table.refresh(), shared_bytes=limit)
        found = [number for batch in loader for number in batch["id"].tolist()]
        total = loader.dataset.get_metrics().total
        loader.dataset.close()
        return found, total

    assert ids()[0] == LEFT
    again, taken = ids()
    assert again == LEFT
    assert (taken.units, taken.unshared_units) == (0, 0)
    first = next(path for path in warehouse_files(table) if path.endswith(".parquet"))
    warehouse.delete_positions(table, {first: [1]})
    assert ids()[0] == [number for number in LEFT if number != 1]
    member.leave()


def warehouse_files(table: Table) -> list[str]:
    return [task.file.file_path for task in table.scan().plan_files()]


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_table_is_delivered_by_its_name_without_deleted_rows(
    warehouse: Warehouse, table: Table, worker_type: str
) -> None:
    loader = load("db.clicks", catalog_config=warehouse.config, shuffle=True, worker_type=worker_type)
    ids = [number for batch in loader for number in batch["id"].tolist()]
    loader.dataset.close()
    assert ids != LEFT
    assert sorted(ids) == LEFT


def test_two_ranks_go_on_where_three_stopped(table: Table) -> None:
    seen: list[int] = []
    for rank in range(3):
        loader = load(table, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=3, scan_filter="id >= 5")
        batches = iter(loader)
        seen += [number for _ in range(2) for number in next(batches)["id"].tolist()]
        state = loader.state_dict()
        loader.dataset.close()
    for rank in range(2):
        rest = load(table, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=2, scan_filter="id >= 5")
        rest.load_state_dict(state)
        seen += [number for batch in rest for number in batch["id"].tolist()]
    assert sorted(seen) == [number for number in LEFT if number >= 5]


def test_a_state_outlives_later_writes_if_the_snapshot_is_named(warehouse: Warehouse, table: Table) -> None:
    snapshot = table.current_snapshot().snapshot_id
    loader = load(table)
    batches = iter(loader)
    seen = [number for _ in range(3) for number in next(batches)["id"].tolist()]
    state = loader.state_dict()
    loader.dataset.close()
    warehouse.add_parquet(table, rows(130, 140), ids=IDS, row_group_size=10)
    with table.update_schema() as update:
        update.rename_column("score", "points")
    with pytest.raises(PlanChanged, match="another dataset"):
        load(table).load_state_dict(state)
    rest = load(table, snapshot_id=snapshot)
    rest.load_state_dict(state)
    for batch in rest:
        assert sorted(batch) == ["id", "score"]  # the name of the column at that time
        seen += batch["id"].tolist()
    assert sorted(seen) == LEFT
    assert sorted(next(iter(load(table)))) == ["id", "points"]


@pytest.mark.parametrize(
    "filters",
    [
        "id >= 100 and score < 60.0",
        [("id", ">=", 100), ("score", "<", 60.0)],
        (pc.field("id") >= 100) & (pc.field("score") < 60.0),
        "100 <= id and not score >= 60.0",
        "id in (100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119)",
    ],
)
def test_filters_are_written_as_for_files_and_leave_out_files(warehouse: Warehouse, filters: Any) -> None:
    made = warehouse.create("bounded", SCHEMA)
    made.append(rows(0, 95))
    made.append(rows(95, 130))
    loader = load(made, filters=filters)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(100, 120))
    assert loader.dataset.plan.pruning.num_files_pruned == 1


def test_rows_must_pass_both_filters(table: Table) -> None:
    loader = load(table, filters="id < 20", scan_filter="id >= 10 and score < 8.0")
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == [10, 11, 12, 13, 14, 15]


def test_a_filter_that_cannot_be_asked_is_refused(table: Table) -> None:
    with pytest.raises(SchemaMismatch, match="uses column 'idd', which does not exist; did you mean 'id'") as refused:
        load(table, filters="idd > 3")
    assert refused.value.field == "filters"
    with pytest.raises(InvalidArgument, match="pass a pyarrow expression"):
        load(table, filters=3)


def test_no_file_is_left_out_whose_nan_passes_a_negated_comparison(warehouse: Warehouse) -> None:
    made = warehouse.create("nans", SCHEMA)
    warehouse.add_parquet(made, pa.table({"id": [1, 2], "score": [5.0, float("nan")]}), ids=IDS, row_group_size=10)
    loader = load(made, filters="not score > 3")
    assert [number for batch in loader for number in batch["id"].tolist()] == [2]


@pytest.mark.parametrize("filters", ["id < 0", "score > 1000.5", "id > 50 and score < 0"])
def test_a_filter_that_no_row_passes_returns_an_empty_loader_on_request(table: Table, filters: str) -> None:
    with pytest.raises(NoData, match=r"no row passes the filter.*on_empty='empty'"):
        load(table, filters=filters)
    loader = load(table, filters=filters, on_empty="empty", shuffle=True, shuffle_buffer_size=None)
    assert (len(loader), list(loader)) == (0, [])
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == []
    with pytest.raises(InvalidArgument, match="the state has no version"):
        loader.load_state_dict({name: value for name, value in loader.state_dict().items() if name != "version"})
