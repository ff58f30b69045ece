"""The arithmetic of docs/server-sizing.md is that of the tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.servers.table import optimizers
from strata.servers.table.snapshot import Saved
from strata.servers.table.table import Table, TableSpec

PAGE = Path(__file__).parents[2] / "docs" / "server-sizing.md"
WIDTH = 64
CELLS = re.compile(r"^\| (?:`(\w+)`|none).* \| (\d+) \*w\*(?: \+ (\d+))? \| (\d+) \| (\d+) \|$", re.MULTILINE)


def spec_of(name: str, max_rows: int = 1) -> TableSpec:
    if not name:
        return TableSpec(name="table", width=WIDTH, max_rows=max_rows, is_frozen=True)
    return TableSpec(name="table", width=WIDTH, max_rows=max_rows, optimizer=getattr(optimizers, name)())


def full(spec: TableSpec) -> Table:
    table, num = Table(spec), spec.max_rows
    nothing = np.zeros(num, np.uint32)
    state = np.zeros((num, spec.optimizer.state_width(WIDTH)), np.float32)
    table.put(Saved(np.arange(num, dtype=np.uint64), np.zeros((num, WIDTH), np.float32), state, nothing, nothing))
    return table


def test_the_page_lists_the_bytes_of_a_row_for_every_optimizer() -> None:
    rows = CELLS.findall(PAGE.read_text(encoding="utf-8"))

    every = {name for name, each in vars(optimizers).items() if hasattr(each, "fill_state")} - {"RowOptimizer"}
    assert {name for name, *_ in rows} == every | {""}
    for name, per_weight, constant, in_memory, saved in rows:
        spec = spec_of(name)
        assert spec.content_bytes == int(per_weight) * WIDTH + int(constant or 0), name
        assert (spec.row_bytes, spec.checkpoint_bytes) == (int(in_memory), int(saved)), name


@pytest.mark.parametrize("name", ["", "Adagrad", "LazyAdam"])
def test_a_full_table_takes_at_most_what_its_spec_states_and_is_saved_in_exactly_that(name: str) -> None:
    spec = spec_of(name, max_rows=40_000)
    table = full(spec)

    assert 0.95 * spec.max_bytes < table.num_bytes <= spec.max_bytes
    parts: dict[str, dict[str, Any]] = table.snapshot().tree()["parts"]
    assert sum(array.nbytes for part in parts.values() for array in part.values()) == spec.checkpoint_bytes
