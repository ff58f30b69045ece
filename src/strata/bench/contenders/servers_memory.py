"""The memory of a full table, and what an incremental save of it contains, against its rows and their state."""

from __future__ import annotations

import json
import tempfile

import numpy as np
import psutil

from strata.bench.contenders.servers_job import FIELDS, LR, WIDTH, Size, require_memory, zipf
from strata.bench.contenders.servers_strata import fill_table
from strata.checkpoint import CheckpointManager
from strata.servers.table.keys import unique
from strata.servers.table.optimizers import RowWiseAdagrad
from strata.servers.table.snapshot import Part
from strata.servers.table.table import Table, TableSpec

BATCHES = 10
"""Between a full and an incremental save."""
COPIES = 2.4
"""Memory over the weights: the table, and the staging memory of a save."""


def new_table(rows: int) -> Table:
    return Table(TableSpec(name="table", width=WIDTH, optimizer=RowWiseAdagrad(lr=LR), max_rows=rows))


def push(table: Table, size: Size, random: np.random.Generator, clock: int) -> None:
    keys = unique(zipf(random, size.samples * FIELDS, size.rows).astype(np.uint64)).keys
    table.push(keys, np.full((len(keys), WIDTH), 1e-3, np.float32), clock)


def saved_bytes(manager: CheckpointManager, table: Table, since: int) -> tuple[int, int]:
    """Save a table as a server does; return the bytes of the checkpoint, and the mark for the next save."""
    slots = {name: each for name, each in table.dirty_slots(since).items() if len(each)}
    dirty = {f"{part}.{field}": each for part, each in slots.items() for field in Part._fields}
    snapshot = table.snapshot()
    save = manager.save(snapshot.tree()["parts"], step=snapshot.mark, checkpoint_type="INCREMENTAL", dirty=dirty)
    return save.wait().size_bytes, snapshot.mark


def main() -> None:
    size = Size.given()
    require_memory(COPIES * size.table_bytes)
    random = np.random.default_rng(0)
    push(new_table(size.rows), size, random, 1)  # compiles, imports
    before = psutil.Process().memory_info().rss
    table = new_table(size.rows)
    fill_table(table, size.rows)
    resident_bytes = psutil.Process().memory_info().rss - before
    needed_bytes = size.rows * 4 * (WIDTH + table.spec.optimizer.state_width(WIDTH))
    counted_bytes = table.num_bytes
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as place, CheckpointManager(place) as manager:
        full_bytes, mark = saved_bytes(manager, table, 0)
        for clock in range(1, BATCHES + 1):
            push(table, size, random, clock)
        incremental_bytes, _ = saved_bytes(manager, table, mark)
    figures = {
        "memory_over_rows_and_state": resident_bytes / needed_bytes,
        "counted_over_rows_and_state": counted_bytes / needed_bytes,
        "incremental_bytes_fraction": incremental_bytes / full_bytes,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
