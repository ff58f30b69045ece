"""`IcebergDataset`: a table through the loader, exact to the row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from iceberg_tables import Warehouse
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import DoubleType, LongType, NestedField

from strata import IcebergDataset
from strata.errors import PlanChanged

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
        assert sorted(batch) == ["id", "score"]  # as it was called then
        seen += batch["id"].tolist()
    assert sorted(seen) == LEFT
    assert sorted(next(iter(load(table)))) == ["id", "points"]
