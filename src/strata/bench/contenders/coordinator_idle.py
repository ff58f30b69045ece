"""A thousand workers that only beat, each over a connection of its own: what the coordinator costs idle."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from strata.bench.servers import CLIENT_CORE, coordinator, cpu_s, pin
from strata.coordinator.client import AsyncCoordinatorClient

NUM_WORKERS = 1_000
AT_ONCE = 50


async def measure(address: str, pid: int, seconds: float) -> dict[str, float]:
    clients = [AsyncCoordinatorClient(address) for _ in range(NUM_WORKERS)]
    for start in range(0, NUM_WORKERS, AT_ONCE):
        some = clients[start : start + AT_ONCE]
        await asyncio.gather(*(client.connect() for client in some))
        await asyncio.gather(*(c.register_worker(f"worker-{start + i:04d}") for i, c in enumerate(some)))
    server = psutil.Process(pid)
    await asyncio.sleep(3.0)  # until the registrations' notices have died down
    before_s, begun_s = cpu_s(server), time.perf_counter()
    await asyncio.sleep(seconds)
    used_s, taken_s = cpu_s(server) - before_s, time.perf_counter() - begun_s
    members = await clients[0].list_workers()
    if len(members.workers) != NUM_WORKERS:
        raise RuntimeError(f"only {len(members.workers)} of {NUM_WORKERS} workers are alive: {members.reason}")
    await asyncio.gather(*(client.close() for client in clients))
    return {"idle_1000_cpu_fraction": used_s / taken_s, "idle_1000_rss_mb": server.memory_info().rss / 1e6}


def main() -> None:
    seconds = 5.0 if "--quick" in sys.argv else 20.0
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, pid),
    ):
        pin(CLIENT_CORE)
        figures = asyncio.run(measure(address, pid, seconds))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
