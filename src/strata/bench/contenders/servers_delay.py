"""Strata over TCP, with and without a delay in the network: what the prefetch of one batch hides of it."""

from __future__ import annotations

import json
import statistics

from strata.bench.contenders.servers_job import ALLOCATORS, LR, UNITS, Rank, Size, environment, run_ranks
from strata.bench.contenders.servers_proxy import HOST, delayed
from strata.bench.contenders.servers_strata import Worker, serving
from strata.servers.table.optimizers import RowWiseAdagrad

DELAY_S = 0.020
"""In each direction."""
TURNS = 2


def main() -> None:
    size = Size.given()
    with (
        environment(ALLOCATORS[""]),
        serving(size, RowWiseAdagrad(lr=LR), host=HOST) as (address, pid),
        delayed(address, 0.0) as near,
        delayed(address, DELAY_S) as far,
    ):
        print(json.dumps({"figures": run_ranks(train, size, near, far, pid)}))


def train(rank: Rank, near: str, far: str, pid: int) -> dict[str, float]:
    per_s: dict[tuple[str, int], list[float]] = {}
    incarnation = 0
    for _ in range(TURNS):
        for address, prefetch in ((near, 1), (far, 1), (far, 0), (near, 0)):
            incarnation += 1
            worker = Worker(rank, address, incarnation=incarnation, prefetch=prefetch)
            try:
                per_s.setdefault((address, prefetch), []).append(worker.measured(UNITS[-1], pid)[1])
            finally:
                worker.close()
    found = {key: statistics.median(values) for key, values in per_s.items()}
    return {
        "delay_kept_fraction": found[far, 1] / found[near, 1],
        "delay_kept_without_prefetch_fraction": found[far, 0] / found[near, 0],
        "delay_none_samples_per_s": found[near, 1],
        "delay_samples_per_s": found[far, 1],
    }


if __name__ == "__main__":
    main()
