"""The textbook algorithm: a consistent-hash ring with 150 virtual nodes per worker and no bounds, in numpy."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from strata.bench.timing import median_ms
from strata.coordinator.state.ring import shard_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_SHARDS = 10_000
VIRTUAL_NODES = 150


def plain_ring(keys: NDArray[np.uint64], workers: list[str]) -> NDArray[np.intp]:
    """Return the owner of each shard: the worker of the next virtual node."""
    hashes = np.array([xxhash.xxh3_64_intdigest(worker.encode()) for worker in workers], dtype=np.uint64)
    nodes = (hashes[:, None] + np.arange(VIRTUAL_NODES, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).ravel()
    nodes = (nodes ^ (nodes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    nodes = (nodes ^ (nodes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    nodes ^= nodes >> np.uint64(31)
    order = np.argsort(nodes)
    at = np.searchsorted(nodes[order], keys)
    return order[at % order.size] // VIRTUAL_NODES


def max_over_mean(num_workers: int) -> float:
    workers = [f"worker-{i:05d}" for i in range(num_workers)]
    loads = np.bincount(plain_ring(shard_keys("bench", NUM_SHARDS, 1), workers), minlength=num_workers)
    return float(loads.max() / loads.mean())


def main() -> None:
    workers = [f"worker-{i:05d}" for i in range(1_000)]
    taken_ms = median_ms(
        lambda: plain_ring(shard_keys("bench", NUM_SHARDS, 1), workers), repetitions=10 if "--quick" in sys.argv else 50
    )
    worst = max(max_over_mean(100), max_over_mean(1_000))
    print(json.dumps({"figures": {"plain_ring_ms": taken_ms, "plain_ring_max_over_mean": worst}}))


if __name__ == "__main__":
    main()
