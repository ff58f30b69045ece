"""Run two workers in one process: they share a dataset, wait at a barrier, and commit a checkpoint.

python examples/two_workers.py                       embeds a coordinator
python examples/two_workers.py localhost:50051       uses yours
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from strata import CoordinatorClient
from strata.coordinator.embedded import EmbeddedCoordinator

if TYPE_CHECKING:
    from strata.coordinator.client import Worker


def train(worker: Worker) -> int:
    """Train one epoch on one worker and return the number of samples."""
    worker.wait_for_workers(2)
    num_samples = 0
    for step, shard in enumerate(worker.shards("numbers")):
        num_samples += shard.end - shard.start
        worker.report(state="TRAINING", step=step, loss=1 / (1 + step))
        worker.ack([shard])
    worker.barrier("epoch-end")
    worker.notify_checkpoint("epoch-0", step=100, epoch=0, path="/checkpoints/epoch-0", size_bytes=1_000)
    worker.barrier("saved")
    return num_samples


def main() -> None:
    with ExitStack() as stack:
        address = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(EmbeddedCoordinator()).address
        client = stack.enter_context(CoordinatorClient(address))
        client.register_dataset("numbers", total_samples=10_000, shard_size=100, shuffle=True, seed=1)
        workers = [client.register_worker(f"worker-{number}") for number in range(2)]
        with ThreadPoolExecutor() as pool:
            seen = list(pool.map(train, workers))
        saved = client.latest_checkpoint()
        print("samples by worker:", seen, "together:", sum(seen))
        print("checkpoint:", saved.checkpoint.path if saved else None)
        for worker in workers:
            worker.deregister("done")


if __name__ == "__main__":
    main()
