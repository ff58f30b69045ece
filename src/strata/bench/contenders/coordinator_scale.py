"""Ten thousand and a hundred thousand workers on the state machine: the cost of one decision without network and disk.

A cost that grows faster than the number of workers shows what breaks first.
"""

from __future__ import annotations

import gc
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import psutil

from strata.coordinator.config import CoordinatorConfig, Limits
from strata.coordinator.state.core import Core
from strata.coordinator.state.events import DatasetSpec, encode

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"10k": 10_000, "100k": 100_000}
NUM_SHARDS = 100_000
JOB = "scale"
DYING = 0.3
STEP_S = 1.0
"""Time between two ticks, well within a lease."""


class Crowd:
    """One job with many workers."""

    def __init__(self, num_workers: int) -> None:
        self.core = Core(CoordinatorConfig(limits=Limits(max_workers_per_job=2 * num_workers)))
        self.now_s = 1_000.0
        self.fences: dict[str, int] = {}
        self.core.tick(self.now_s)
        with self.core.job_or_new(JOB) as job:
            job.register_dataset(DatasetSpec(dataset_id="data", total_samples=NUM_SHARDS, shard_size=1))
        self.seal()

    def register(self, worker_id: str) -> None:
        with self.core.job_or_new(JOB) as job:
            job.register_worker(
                worker_id,
                instance_id=worker_id,
                capacity=1.0,
                hostname="",
                takeover=False,
                now_s=self.now_s,
            )
            self.fences[worker_id] = job.membership.members[worker_id].joined.fence

    def register_all(self, worker_ids: list[str]) -> None:
        for worker_id in worker_ids:
            self.register(worker_id)

    def beat(self, worker_ids: list[str]) -> None:
        heartbeat, now_s = self.core.job(JOB).heartbeat, self.now_s
        for worker_id in worker_ids:
            heartbeat(
                worker_id,
                self.fences[worker_id],
                state="TRAINING",
                step=int(now_s),
                epoch=0,
                metrics={"loss": 0.5},
                acked_command_id=0,
                now_s=now_s,
            )

    def seal(self) -> int:
        """Seal, encode and announce like the engine, without the disk; return the bytes that it would write."""
        events, notices = self.core.drain()
        num_bytes = sum(len(encode(event)) for event in events)
        self.core.announce(notices)
        return num_bytes

    def tick(self) -> None:
        self.now_s += STEP_S
        self.core.tick(self.now_s)

    def tick_and_seal(self) -> None:
        self.tick()
        self.seal()


def taken_s(work: Callable[[], object]) -> float:
    """Return the CPU time of this process, so that other load on the machine does not count."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def rss_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(num_workers: int) -> dict[str, float]:
    workers = [f"worker-{number:06d}" for number in range(num_workers)]
    before_bytes = rss_bytes()
    crowd = Crowd(num_workers)
    register_s = taken_s(lambda: crowd.register_all(workers))
    seal_all_s = taken_s(crowd.seal)
    crowd.beat(workers)
    grown_bytes = rss_bytes() - before_bytes
    crowd.tick()
    heartbeat_s = taken_s(lambda: crowd.beat(workers))
    tick_s = min(taken_s(crowd.tick) for _ in range(3))
    crowd.register("one-more")
    seal_s = taken_s(crowd.seal)
    living = [*workers[int(DYING * num_workers) :], "one-more"]
    lease_s = crowd.core.config.lease.lease_s
    crowd.beat(workers)
    crowd.beat(["one-more"])
    for _ in range(int(lease_s / STEP_S)):
        crowd.tick()
        crowd.beat(living)
    die_s = taken_s(crowd.tick_and_seal)
    alive = len(crowd.core.job(JOB).membership.members)
    if alive != len(living):
        raise RuntimeError(f"{alive} workers are alive, expected {len(living)}")
    return {
        "heartbeat_us": heartbeat_s / num_workers * 1e6,
        "register_ms": (register_s + seal_all_s) / num_workers * 1e3,
        "tick_ms": tick_s * 1e3,
        "seal_ms": seal_s * 1e3,
        "die_30_percent_ms": die_s * 1e3,
        "worker_bytes": grown_bytes / num_workers,
    }


def main() -> None:
    figures: dict[str, float] = {}
    # One process per size, so that a size does not reuse the memory of another.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, measured in zip(SIZES, pool.map(measure, SIZES.values()), strict=True):
            figures |= {f"pure_{name}_{what}": value for what, value in measured.items()}
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
