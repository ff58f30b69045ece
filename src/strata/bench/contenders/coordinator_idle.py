"""One thousand workers that only send heartbeats, each over its own connection: the idle cost of the coordinator.

For a long run set STRATA_BENCH_IDLE_S to its duration in seconds, such as 600. It then also measures how much the
memory grows from the first minute, or from half of the time if that is less, to the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from strata.bench.server_processes import CLIENT_CORE, coordinator, cpu_s, pin
from strata.coordinator.client import AsyncCoordinatorClient
from strata.errors import ConfigError

NUM_WORKERS = 1_000
NUM_QUICK_WORKERS = 50
AT_ONCE = 50
SETTLE_S = 3.0
"""Time until the notices of the registrations are sent."""

LONG_VARIABLE = "STRATA_BENCH_IDLE_S"
LONGEST_S = 600.0
FIRST_LOOK_S = 60.0


def long_look_s(value: str) -> float | None:
    """Return the duration from the variable; None if it is not set."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"{LONG_VARIABLE}={value!r} is invalid; use seconds above 0 and up to {LONGEST_S:g}")
    return seconds


async def measure(address: str, pid: int, seconds: float, *, num_workers: int, is_long: bool) -> dict[str, float]:
    clients = [AsyncCoordinatorClient(address) for _ in range(num_workers)]
    for start in range(0, num_workers, AT_ONCE):
        some = clients[start : start + AT_ONCE]
        await asyncio.gather(*(client.connect() for client in some))
        await asyncio.gather(*(c.register_worker(f"worker-{start + i:04d}") for i, c in enumerate(some)))
    server = psutil.Process(pid)
    await asyncio.sleep(SETTLE_S)
    before_s, begun_s = cpu_s(server), time.perf_counter()
    first_look_s = min(FIRST_LOOK_S, seconds / 2)
    await asyncio.sleep(first_look_s)
    first_bytes = server.memory_info().rss
    await asyncio.sleep(seconds - first_look_s)
    used_s, taken_s = cpu_s(server) - before_s, time.perf_counter() - begun_s
    last_bytes = server.memory_info().rss
    members = await clients[0].list_workers()
    if len(members.workers) != num_workers:
        raise RuntimeError(f"only {len(members.workers)} of {num_workers} workers are alive: {members.reason}")
    await asyncio.gather(*(client.close() for client in clients))
    figures = {"idle_1000_cpu_fraction": used_s / taken_s, "idle_1000_rss_mb": last_bytes / 1e6}
    if is_long:
        figures["idle_1000_rss_first_minute_mb"] = first_bytes / 1e6
        figures["idle_1000_rss_growth_mb"] = (last_bytes - first_bytes) / 1e6
    return figures


def main() -> None:
    quick = "--quick" in sys.argv
    held_s = long_look_s(os.environ.get(LONG_VARIABLE, ""))
    seconds = held_s or (5.0 if quick else 20.0)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, pid),
    ):
        pin(CLIENT_CORE)
        num_workers = NUM_QUICK_WORKERS if quick else NUM_WORKERS
        figures = asyncio.run(measure(address, pid, seconds, num_workers=num_workers, is_long=held_s is not None))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
