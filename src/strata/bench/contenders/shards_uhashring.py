"""uhashring with its defaults. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections import Counter
from importlib import metadata
from typing import Any

NUM_SHARDS = 10_000


def owners(module: Any, num_workers: int) -> list[str]:
    ring = module.HashRing(nodes=[f"worker-{i:05d}" for i in range(num_workers)])
    return [ring.get_node(f"bench/{shard}") for shard in range(NUM_SHARDS)]


def max_over_mean(module: Any, num_workers: int) -> float:
    return max(Counter(owners(module, num_workers)).values()) / (NUM_SHARDS / num_workers)


def main() -> None:
    try:
        module = importlib.import_module("uhashring")
    except ImportError:
        print(json.dumps({"not_installed": "uhashring"}))
        return
    taken = []
    for _ in range(1 if "--quick" in sys.argv else 3):
        start = time.perf_counter()
        owners(module, 1_000)
        taken.append(time.perf_counter() - start)
    figures = {
        "uhashring_ms": statistics.median(taken) * 1e3,
        "uhashring_max_over_mean": max(max_over_mean(module, 100), max_over_mean(module, 1_000)),
    }
    print(json.dumps({"figures": figures, "versions": {"uhashring": metadata.version("uhashring")}}))


if __name__ == "__main__":
    main()
