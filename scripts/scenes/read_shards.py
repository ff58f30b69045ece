"""Fit a model to shards that a coordinator assigns: the workers behind the screenshot of the page Data.

    python read_shards.py --coordinator 127.0.0.1:50051 --data flights --worker worker-0

Each worker fits its own logistic regression; the shards of a worker that dies move to the others.
`scripts/screenshots.py` starts several workers and kills one.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from strata import TrainingOrchestrator
from strata.errors import StaleGeneration

DATASET = "flights"
SHARD_ROWS = 10_000
PASSES = 150


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--data", type=Path, required=True, help="directory with train/")
    parser.add_argument("--worker", required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    late, features = read(args.data / "train")
    model = torch.nn.Linear(features.shape[1], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    with TrainingOrchestrator(args.coordinator, job_id="late-flights") as orchestrator:
        orchestrator.register_worker(args.worker)
        orchestrator.register_dataset(DATASET, total_samples=len(late), shard_size=SHARD_ROWS, shuffle=True, seed=7)
        while (shard := orchestrator.get_shard(DATASET)) is not None:
            rows = slice(shard.start, shard.end)
            for _ in range(PASSES):
                loss = binary_cross_entropy_with_logits(model(features[rows]).squeeze(1), late[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
                optimizer.step()
                step += 1
            orchestrator.heartbeat(step=step, loss=loss.item())
            with contextlib.suppress(StaleGeneration):  # a worker came or left, and the shard may have moved
                orchestrator.ack_shards([shard])
        orchestrator.barrier("end of the epoch", timeout_s=600)


def read(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels, and the hour, weekday, month and distance of each flight, scaled to about 1."""
    table = pq.read_table(directory)
    scales = {"hour": 24.0, "weekday": 7.0, "month": 12.0, "distance": 1_000.0}
    columns = [torch.from_numpy(table[name].to_numpy().copy()).float() / scale for name, scale in scales.items()]
    return torch.from_numpy(table["late"].to_numpy().copy()).float(), torch.stack(columns, dim=1)


if __name__ == "__main__":
    main()
