"""Barriers of 1,000 workers on 125 relays, and of the same workers without relays.

Without relays, each node sends its arrivals as one call, which measures the coordinator alone. The coordinator has its
own core; relays and workers share the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from strata.bench.crowd import JOB, gathered, meet_often
from strata.bench.server_processes import coordinator, cpu_s, pin_off_server, relays
from strata.bench.timing import quantile
from strata.coordinator.client import AsyncCoordinatorClient

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_NODES = 125


async def measure(
    address: str, nodes_at: Sequence[str], pids: Sequence[int], num_rounds: int, *, folded: bool
) -> tuple[list[float], list[float]]:
    """Return how long each worker waited in each round, and the CPU time of each process per barrier."""
    processes = [psutil.Process(pid) for pid in pids]
    before_s: list[float] = []
    async with gathered(nodes_at) as nodes:
        async with AsyncCoordinatorClient(address) as client:
            members = await client.list_workers(job_id=JOB)
        waits_s = await meet_often(
            nodes,
            members.generation,
            num_rounds,
            folded=folded,
            on_warm=lambda: before_s.extend(map(cpu_s, processes)),
        )
        used_s = [cpu_s(process) - before for process, before in zip(processes, before_s, strict=True)]
    return waits_s, [used / num_rounds for used in used_s]


async def measure_both(
    address: str, nodes_at: Sequence[str], pids: Sequence[int], alone: tuple[str, int], num_rounds: int
) -> dict[str, float]:
    waits_s, used_s = await measure(address, nodes_at, pids, num_rounds, folded=False)
    alone_at, alone_pid = alone
    alone_s, alone_used_s = await measure(alone_at, [alone_at] * len(nodes_at), [alone_pid], num_rounds, folded=True)
    return {
        "barrier_1000_p50_ms": quantile(waits_s, 0.5) * 1e3,
        "barrier_1000_p99_ms": quantile(waits_s, 0.99) * 1e3,
        "barrier_1000_server_cpu_ms": used_s[0] * 1e3,
        "barrier_1000_relays_cpu_ms": sum(used_s[1:]) * 1e3,
        "barrier_1000_without_relays_p50_ms": quantile(alone_s, 0.5) * 1e3,
        "barrier_1000_without_relays_p99_ms": quantile(alone_s, 0.99) * 1e3,
        "barrier_1000_without_relays_server_cpu_ms": alone_used_s[0] * 1e3,
    }


def main() -> None:
    num_nodes, num_rounds = (4, 5) if "--quick" in sys.argv else (NUM_NODES, 100)
    with contextlib.ExitStack() as stack:
        # Start all processes first: a process that has used gRPC must not fork.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")))
        (directory / "alone").mkdir()
        alone = stack.enter_context(coordinator(directory / "alone"))
        address, pid = stack.enter_context(coordinator(directory))
        nodes_at, relay_pids = stack.enter_context(relays(address, num_nodes))
        pin_off_server()
        figures = asyncio.run(measure_both(address, nodes_at, [pid, *relay_pids], alone, num_rounds))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
