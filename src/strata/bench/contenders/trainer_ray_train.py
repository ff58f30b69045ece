"""Ray Train with two workers on a running Ray cluster: the same job, with DDP by `prepare_model`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

from strata.bench.contenders.trainer_job import (
    BATCH_SIZE,
    NUM_RANKS,
    NUM_STEPS,
    QUICK_STEPS,
    Rows,
    Timed,
    measured,
    whole_batch,
    write_times,
)


def work(config: dict[str, Any]) -> None:
    """Train on one rank; Ray has created the process group."""
    import torch  # noqa: PLC0415
    from ray import train  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler  # noqa: PLC0415

    torch.set_num_threads(1)
    module = Timed()
    model = train.torch.prepare_model(module)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn = nn.BCEWithLogitsLoss()
    rows = Rows(config["steps"] * BATCH_SIZE * NUM_RANKS)
    sampler: DistributedSampler[Any] = DistributedSampler(rows)
    for x, y in DataLoader(rows, BATCH_SIZE, sampler=sampler, collate_fn=whole_batch):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    if train.get_context().get_world_rank() == 0:
        write_times(module.times, config["out"])


def main() -> None:
    from ray import train  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    from strata.bench.contenders.trainer_ray import start_cluster  # noqa: PLC0415

    start_cluster()
    steps = QUICK_STEPS if "--quick" in sys.argv else NUM_STEPS
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        out = f"{directory}/times.json"
        trainer = TorchTrainer(
            work,
            train_loop_config={"out": out, "steps": steps},
            scaling_config=train.ScalingConfig(num_workers=NUM_RANKS),
            run_config=train.RunConfig(storage_path=str(Path(directory) / "kept")),
        )
        began_s = time.time()
        trainer.fit()
        start_s, per_s = measured(out, began_s)
    figures = {"ray_train_start_s": start_s, "ray_train_samples_per_s": per_s}
    print(json.dumps({"figures": figures, "versions": {"ray": metadata.version("ray")}}))


if __name__ == "__main__":
    if util.find_spec("ray") is None:
        print(json.dumps({"not_installed": "ray"}))
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        main()
