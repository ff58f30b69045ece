"""Strata's shard assignment: times, balance and movement."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.bench.timing import median_ms
from strata.coordinator.state.ring import assign, load_bounds, shard_keys, unavoidable_moves

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_SHARDS = 10_000
SIZES = (100, 1_000)


def names(num: int) -> list[str]:
    return [f"worker-{i:05d}" for i in range(num)]


@dataclass
class Worst:
    max_over_mean: float = 0.0
    max_over_ceiling: float = 0.0
    moved_over_minimum: float = 0.0

    def see_loads(self, loads: NDArray[np.int64], *, at_size: bool) -> None:
        _, hi = load_bounds(NUM_SHARDS, [1.0] * loads.size)
        self.max_over_ceiling = max(self.max_over_ceiling, float((loads / hi).max()))
        if at_size:
            self.max_over_mean = max(self.max_over_mean, float(loads.max() / loads.mean()))

    def see_moves(self, before: NDArray[np.int32], after: NDArray[np.int32], num_workers: int) -> None:
        lo, hi = load_bounds(NUM_SHARDS, [1.0] * num_workers)
        moved = int((after != before).sum())
        # A change that forces no move must move nothing; a move then counts as if one had been allowed.
        self.moved_over_minimum = max(self.moved_over_minimum, moved / max(1, unavoidable_moves(before, lo, hi)))


def fresh_ms(num_shards: int, num_workers: int, *, repetitions: int) -> float:
    workers, capacities = names(num_workers), [1.0] * num_workers
    return median_ms(
        lambda: assign(shard_keys("bench", num_shards, 1), workers=workers, capacities=capacities),
        repetitions=repetitions,
    )


def change_ms(num_workers: int, *, joins: bool, repetitions: int) -> float:
    """Return the time when one worker joins, or the one in the middle leaves."""
    keys = shard_keys("bench", NUM_SHARDS, 1)
    workers = names(num_workers)
    current = assign(keys, workers=workers, capacities=[1.0] * num_workers)
    if joins:
        workers = [*workers, "worker-joined"]
    else:
        leaver = num_workers // 2
        workers.pop(leaver)
        current = _without(current, leaver)
    capacities = [1.0] * len(workers)
    return median_ms(
        lambda: assign(shard_keys("bench", NUM_SHARDS, 1), workers=workers, capacities=capacities, current=current),
        repetitions=repetitions,
    )


def wander(num_workers: int, *, steps: int, worst: Worst) -> None:
    """Make random single joins and leaves around a number of workers and record the worst values."""
    rng = random.Random(num_workers)  # noqa: S311 (a reproducible history)
    keys = shard_keys("bench", NUM_SHARDS, 1)
    workers = names(num_workers)
    owners = assign(keys, workers=workers, capacities=[1.0] * num_workers)
    for step in range(steps):
        worst.see_loads(np.bincount(owners, minlength=len(workers)), at_size=len(workers) == num_workers)
        if rng.random() < 0.5 + 0.05 * (len(workers) - num_workers):
            leaver = rng.randrange(len(workers))
            workers.pop(leaver)
            before = _without(owners, leaver)
        else:
            workers.append(f"worker-joined-{step:05d}")
            before = owners
        owners = assign(keys, workers=workers, capacities=[1.0] * len(workers), current=before)
        worst.see_moves(before, owners, len(workers))


def _without(owners: NDArray[np.int32], leaver: int) -> NDArray[np.int32]:
    before = owners - (owners > leaver).astype(np.int32)
    before[owners == leaver] = -1
    return before


def main() -> None:
    quick = "--quick" in sys.argv
    repetitions, steps = (30, 40) if quick else (300, 400)
    worst = Worst()
    figures = {
        "assign_10k_ms": fresh_ms(NUM_SHARDS, 1_000, repetitions=repetitions),
        "assign_10k_100_workers_ms": fresh_ms(NUM_SHARDS, 100, repetitions=repetitions),
        "reassign_10k_join_ms": change_ms(1_000, joins=True, repetitions=repetitions),
        "reassign_10k_leave_ms": change_ms(1_000, joins=False, repetitions=repetitions),
        "assign_1m_ms": fresh_ms(1_000_000, 1_000, repetitions=3 if quick else 7),
    }
    for num_workers in SIZES:
        wander(num_workers, steps=steps, worst=worst)
    figures |= {
        "shard_max_over_mean": worst.max_over_mean,
        "shard_max_over_ceiling": worst.max_over_ceiling,
        "shard_moved_over_minimum": worst.moved_over_minimum,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
