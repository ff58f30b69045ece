"""Barriers of 100 workers in 13 processes; every release is durable before it is sent.

Measured with one session per process, as on a node, with one session per worker, as with TCPStore, and with a
coordinator that keeps its state in memory, as TCPStore does.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders.barrier_rounds import NUM_WORKERS, PERIOD_S, Times, measure, quantile, until_s
from strata.bench.server_processes import coordinator
from strata.coordinator.client import AsyncCoordinatorClient, AsyncWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


async def meet(
    address: str,
    ranks: Sequence[int],
    wait_for_all: Callable[[], float],
    num_rounds: int,
    *,
    job: str,
    sessions_each: bool,
) -> Times:
    clients = [AsyncCoordinatorClient(address) for _ in (ranks if sessions_each else ranks[:1])]
    await asyncio.gather(*(client.connect() for client in clients))
    workers = [
        await clients[place % len(clients)].register_worker(f"worker-{rank:03d}", job_id=job)
        for place, rank in enumerate(ranks)
    ]
    await asyncio.gather(*(worker.wait_for_workers(NUM_WORKERS) for worker in workers))
    start_s = await asyncio.to_thread(wait_for_all)  # keep sending heartbeats

    async def meet_once(worker: AsyncWorker, step: int) -> tuple[float, float]:
        arrived_s = time.perf_counter()
        await worker.barrier("bench", step=step)
        return arrived_s, time.perf_counter()

    times: Times = []
    for number in range(num_rounds):
        await asyncio.sleep(until_s(start_s, number))
        times.append(list(await asyncio.gather(*(meet_once(worker, number) for worker in workers))))
    await asyncio.to_thread(wait_for_all)  # a worker that leaves early would end the barrier of the others
    await asyncio.gather(*(client.close() for client in clients))
    return times


def node(
    address: str, sessions_each: bool, ranks: Sequence[int], wait_for_all: Callable[[], float], num_rounds: int
) -> Times:
    job = "a-session-each" if sessions_each else "a-session-a-process"
    return asyncio.run(meet(address, ranks, wait_for_all, num_rounds, job=job, sessions_each=sessions_each))


def flushed_s(path: Path, num_rounds: int) -> list[float]:
    """Return the times of durable 4 KiB writes, as often as barriers need them: the lower limit of a barrier."""
    taken_s = []
    with path.open("wb", buffering=0) as file:
        for _ in range(num_rounds):
            time.sleep(PERIOD_S)
            start_s = time.perf_counter()
            file.write(bytes(4_096))
            os.fdatasync(file.fileno())
            taken_s.append(time.perf_counter() - start_s)
    return taken_s


def main() -> None:
    num_rounds = 20 if "--quick" in sys.argv else 200
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, _),
    ):
        by_node_s = measure(functools.partial(node, address, False), num_rounds)
        direct_s = measure(functools.partial(node, address, True), num_rounds)
        flushes_s = sorted(flushed_s(Path(directory, "flushed"), num_rounds))
        with coordinator(Path(directory), "--state", "memory") as (forgetful, _):
            in_memory_s = measure(functools.partial(node, forgetful, False), num_rounds)
    figures = {
        "barrier_100_in_memory_p50_ms": quantile(in_memory_s, 0.5) * 1e3,
        "barrier_100_in_memory_p99_ms": quantile(in_memory_s, 0.99) * 1e3,
        "disk_flush_p50_ms": quantile(flushes_s, 0.5) * 1e3,
        "disk_flush_p99_ms": quantile(flushes_s, 0.99) * 1e3,
        "barrier_100_p50_ms": quantile(by_node_s, 0.5) * 1e3,
        "barrier_100_p99_ms": quantile(by_node_s, 0.99) * 1e3,
        "barrier_100_direct_p50_ms": quantile(direct_s, 0.5) * 1e3,
        "barrier_100_direct_p99_ms": quantile(direct_s, 0.99) * 1e3,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
