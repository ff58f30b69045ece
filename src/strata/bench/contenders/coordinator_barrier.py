"""Barriers of 100 workers in lock-step, every release durable before it is told.

Once on 13 nodes of 8 workers with a session for each node, and once with a session for each worker.

What is measured is how long a member waits after the last one has arrived.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from strata.bench.servers import CLIENT_CORE, coordinator, pin
from strata.bench.timing import quantile
from strata.coordinator.client import AsyncCoordinatorClient

NUM_WORKERS = 100


async def measure(address: str, num_rounds: int, *, workers_per_session: int) -> list[float]:
    job = f"sessions-of-{workers_per_session}"
    clients = [AsyncCoordinatorClient(address) for _ in range(-(-NUM_WORKERS // workers_per_session))]
    await asyncio.gather(*(client.connect() for client in clients))
    workers = [
        await clients[i // workers_per_session].register_worker(f"worker-{i:03d}", job_id=job)
        for i in range(NUM_WORKERS)
    ]
    await asyncio.gather(*(worker.refresh() for worker in workers))
    waits_s: list[float] = []
    for number in range(num_rounds + 5):
        arrived_s, released_s = [0.0] * NUM_WORKERS, [0.0] * NUM_WORKERS

        async def meet(rank: int, step: int, arrived_s: list[float], released_s: list[float]) -> None:
            arrived_s[rank] = time.perf_counter()
            await workers[rank].barrier("bench", step=step)
            released_s[rank] = time.perf_counter()

        await asyncio.gather(*(meet(rank, number, arrived_s, released_s) for rank in range(NUM_WORKERS)))
        if number >= 5:  # the first rounds warm up
            waits_s += [at_s - max(arrived_s) for at_s in released_s]
    await asyncio.gather(*(client.close() for client in clients))
    return waits_s


def main() -> None:
    num_rounds = 20 if "--quick" in sys.argv else 200
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, _),
    ):
        pin(CLIENT_CORE)
        by_node_s = asyncio.run(measure(address, num_rounds, workers_per_session=8))
        direct_s = asyncio.run(measure(address, num_rounds, workers_per_session=1))
    figures = {
        "barrier_100_p50_ms": quantile(by_node_s, 0.5) * 1e3,
        "barrier_100_p99_ms": quantile(by_node_s, 0.99) * 1e3,
        "barrier_100_direct_p99_ms": quantile(direct_s, 0.99) * 1e3,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
