"""A worker of the demo: a real process with a real client; only the training is pretended.

Round by round it takes a few of its shards, "trains", acknowledges them, and meets the others at a barrier. When a
member is lost the barrier breaks; it looks up what is its own now, and goes on.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

from strata.coordinator.client import CoordinatorClient
from strata.errors import BarrierBroken, StaleGeneration

if TYPE_CHECKING:
    from strata.coordinator.client import Worker

SHARDS_PER_ROUND = 4
SHARD_WORK_S = 0.04


def work(client: CoordinatorClient, worker: Worker, *, dataset_id: str) -> None:
    step = 0
    while not _complete(client, worker.job_id, dataset_id):
        try:
            mine = worker.shards(dataset_id)[:SHARDS_PER_ROUND]
            for shard in mine:
                worker.report(state="TRAINING", step=step, loss=math.exp(-step / 40))
                time.sleep(SHARD_WORK_S)  # the pretended training
                worker.ack([shard])
                step += 1
            worker.report(state="IDLE")
            worker.barrier("round", timeout_s=30.0)
        except (BarrierBroken, StaleGeneration):
            worker.report(state="RECOVERING")
            worker.refresh()


def _complete(client: CoordinatorClient, job_id: str, dataset_id: str) -> bool:
    dataset = next(d for d in client.list_datasets(job_id=job_id) if d.dataset_id == dataset_id)
    return dataset.num_done == dataset.num_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--wait-for", type=int, default=1)
    arguments = parser.parse_args()
    with CoordinatorClient(arguments.address) as client:
        worker = client.register_worker(arguments.worker, job_id=arguments.job)
        worker.wait_for_workers(arguments.wait_for)
        work(client, worker, dataset_id=arguments.dataset)
        worker.deregister("the epoch is done")


if __name__ == "__main__":
    main()
