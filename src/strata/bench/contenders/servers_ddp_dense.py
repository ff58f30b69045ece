"""DDP with dense gradients: a step reduces and updates the whole table. With a smaller table if memory is short."""

from __future__ import annotations

import json
from dataclasses import replace

import psutil

from strata.bench.contenders.servers_ddp import DENSE_COPIES, figures
from strata.bench.contenders.servers_job import NUM_RANKS, QUICK_ROWS, UNITS, Size

MAX_STEPS = 3
SPARE = 1.2
"""Memory that must be available, over what the contender needs."""


def rows_that_fit(size: Size, available_bytes: float) -> int:
    """Return the rows of the table: all, or as often half of them as is necessary."""
    rows = size.rows
    while (
        rows > QUICK_ROWS and SPARE * replace(size, rows=rows).table_bytes * NUM_RANKS * DENSE_COPIES > available_bytes
    ):
        rows //= 2
    return rows


def main() -> None:
    size = Size.given()
    rows = rows_that_fit(size, psutil.virtual_memory().available)
    smaller = replace(size, rows=rows, steps=min(size.steps, MAX_STEPS))
    found = figures("ddp_dense", smaller, is_sparse=False, units=UNITS[:1])
    print(json.dumps({"figures": {**found, "ddp_dense_rows": rows}}))


if __name__ == "__main__":
    main()
