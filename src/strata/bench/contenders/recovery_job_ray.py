"""The same job for Ray Train: LOG STEPS. Rank 0 saves with torch.save; all ranks load it at the start."""

import os
import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strata.bench.contenders.recovery_model import BATCH_SIZE, SAVE_EVERY, StepLog, network, rows, train_step
from strata.bench.contenders.recovery_watch import NUM_RANKS

OBJECT_STORE_BYTES = 80 << 20


def work(config: dict[str, str]) -> None:
    """Train on one rank; Ray has created the process group."""
    os.environ["RANK"] = str(train.get_context().get_world_rank())
    step_log = StepLog(config["step_log"])
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    dataset = TensorDataset(*rows())
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    epoch = position = step = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "model.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, position, step = state["epoch"], state["position"], state["step"]
    while True:
        sampler.set_epoch(epoch)
        for number, (features, targets) in enumerate(DataLoader(dataset, BATCH_SIZE, sampler=sampler)):
            if number < position:
                continue
            loss = train_step(parallel, optimizer, features, targets)
            step += 1
            if step % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                _save({**state, "epoch": epoch, "position": number + 1, "step": step}, loss)
            step_log.step(step)
            if step == int(config["steps"]):
                return
        epoch, position = epoch + 1, 0


def _save(state: dict[str, object], loss: float) -> None:
    """Report from all ranks; rank 0 adds the checkpoint."""
    if dist.get_rank() != 0:
        train.report({"loss": loss})
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory) / "model.pt")
        train.report({"loss": loss}, checkpoint=train.Checkpoint.from_directory(directory))


if __name__ == "__main__":
    directory, num_steps = sys.argv[1], sys.argv[2]
    ray.init(
        "local",
        num_cpus=NUM_RANKS + 1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    TorchTrainer(
        work,
        train_loop_config={"step_log": directory, "steps": num_steps},
        scaling_config=train.ScalingConfig(num_workers=NUM_RANKS),
        run_config=train.RunConfig(
            storage_path=str(Path(directory) / "kept"), failure_config=train.FailureConfig(max_failures=3)
        ),
    ).fit()
