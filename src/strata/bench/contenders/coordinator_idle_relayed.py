"""One thousand workers on 125 relays that only send heartbeats: the idle cost of the coordinator without its relays."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from strata.bench.crowd import JOB, WORKERS_PER_NODE, gathered
from strata.bench.server_processes import coordinator, cpu_s, pin_off_server, relays
from strata.coordinator.client import AsyncCoordinatorClient

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_NODES = 125
SETTLE_S = 3.0
"""Time until the notices of the registrations are sent."""


async def measure(address: str, nodes_at: Sequence[str], pid: int, seconds: float) -> dict[str, float]:
    server = psutil.Process(pid)
    async with gathered(nodes_at):
        await asyncio.sleep(SETTLE_S)
        before_s, begun_s = cpu_s(server), time.perf_counter()
        await asyncio.sleep(seconds)
        used_s, taken_s = cpu_s(server) - before_s, time.perf_counter() - begun_s
        async with AsyncCoordinatorClient(address) as client:
            members = await client.list_workers(job_id=JOB)
        expected = len(nodes_at) * WORKERS_PER_NODE
        if len(members.workers) != expected:
            raise RuntimeError(f"only {len(members.workers)} of {expected} workers are alive: {members.reason}")
    return {"idle_1000_relayed_cpu_fraction": used_s / taken_s}


def main() -> None:
    num_nodes, seconds = (4, 5.0) if "--quick" in sys.argv else (NUM_NODES, 20.0)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, pid),
        relays(address, num_nodes) as (nodes_at, _),
    ):
        pin_off_server()
        figures = asyncio.run(measure(address, nodes_at, pid, seconds))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
