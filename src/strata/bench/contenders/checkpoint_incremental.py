"""Strata: a table with few changed rows, saved incrementally, compared with full saves.

Every save is timed from the call until it is durable. A repetition saves in full, then incrementally with changed rows
found by comparison, then in full again, then incrementally with the changed rows passed. Fractions divide an
incremental save by the full save before it, within a repetition.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.bench.contenders.checkpoint_state import REPETITIONS, SEED, directory, setting, size_bytes
from strata.checkpoint import CheckpointManager
from strata.errors import StrataError

NAME = "emb.weight"
NUM_COLUMNS = 64
DIRTY_PERCENT = 1.0
FULL, INCREMENTAL = "FULL", "INCREMENTAL"


@dataclass(frozen=True, slots=True)
class Timed:
    """One save."""

    total_s: float
    stall_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Repetition:
    full: Timed
    found: Timed
    full_again: Timed
    passed: Timed


class Table:
    """A table of random numbers; `change` changes some of its rows."""

    def __init__(self, num_bytes: int, num_columns: int) -> None:
        self._rng = np.random.default_rng(SEED)
        self.values = self._rng.random((max(num_bytes // (4 * num_columns), 1), num_columns), np.float32)

    @property
    def state(self) -> dict[str, Any]:
        return {NAME: self.values}

    def change(self, percent: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Change random rows and return their indices."""
        num_rows, num_columns = self.values.shape
        rows = self._rng.choice(num_rows, max(int(num_rows * percent / 100), 1), replace=False, shuffle=False)
        self.values[rows] = self._rng.random((len(rows), num_columns), np.float32)
        return rows


class Saves:
    """Saves of one table, with increasing steps; each is durable before the next starts."""

    def __init__(self, manager: CheckpointManager, table: Table) -> None:
        self._manager = manager
        self._table = table
        self._step = 0

    def save(self, kind: str, **arguments: Any) -> Timed:
        """Save the table and return the times.

        Raises:
            StrataError: The checkpoint has another type, so its time is meaningless.
        """
        self._step += 1
        start = time.perf_counter()
        save = self._manager.save(self._table.state, step=self._step, checkpoint_type=kind, **arguments)
        stall_s = time.perf_counter() - start
        metadata = save.wait()
        total_s = time.perf_counter() - start
        self._manager.wait()
        if metadata.why or metadata.checkpoint_type.value != kind:
            raise StrataError(f"expected a save of type {kind}, got {metadata.checkpoint_type.value}: {metadata.why}")
        return Timed(total_s, stall_s, metadata.size_bytes)

    def repetition(self, percent: float) -> Repetition:
        full = self.save(FULL)
        self._table.change(percent)
        found = self.save(INCREMENTAL)
        full_again = self.save(FULL)
        rows = self._table.change(percent)
        passed = self.save(INCREMENTAL, dirty={NAME: rows})
        return Repetition(full, found, full_again, passed)


def figures_of(repetitions: list[Repetition]) -> dict[str, float]:
    """Return the medians; fractions are computed within each repetition."""
    full = [one for r in repetitions for one in (r.full, r.full_again)]
    found, passed = [r.found for r in repetitions], [r.passed for r in repetitions]
    median = statistics.median
    return {
        "incremental_bytes_fraction": median(r.found.size_bytes / r.full.size_bytes for r in repetitions),
        "incremental_time_fraction": median(r.found.total_s / r.full.total_s for r in repetitions),
        "incremental_told_time_fraction": median(r.passed.total_s / r.full_again.total_s for r in repetitions),
        "incremental_full_ms": median(one.total_s for one in full) * 1e3,
        "incremental_ms": median(one.total_s for one in found) * 1e3,
        "incremental_told_ms": median(one.total_s for one in passed) * 1e3,
        "incremental_full_stall_ms": median(one.stall_s for one in full) * 1e3,
        "incremental_stall_ms": median(one.stall_s for one in found) * 1e3,
        "incremental_told_stall_ms": median(one.stall_s for one in passed) * 1e3,
    }


def main() -> None:
    percent = setting("DIRTY_PERCENT", DIRTY_PERCENT)
    table = Table(size_bytes(), int(setting("COLUMNS", NUM_COLUMNS)))
    with directory() as place:
        with CheckpointManager(place, keep_count=1) as manager:
            manager.prepare(table.state)
            saves = Saves(manager, table)
            repetitions = [saves.repetition(percent) for _ in range(REPETITIONS + 1)]
        with CheckpointManager(place) as manager:
            if not np.array_equal(manager.load()[NAME], table.values):
                raise StrataError("the loaded state differs from the saved one; the figures are invalid")
    print(json.dumps({"figures": figures_of(repetitions[1:])}))  # the first repetition is a warm-up


if __name__ == "__main__":
    main()
