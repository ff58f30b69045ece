"""The same job for Ray Train: DIARY STEPS. Rank 0 saves with torch.save, all load it when they begin."""

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

from strata.bench.contenders.recovery_model import BATCH_SIZE, SAVE_EVERY, Diary, network, rows, train_step
from strata.bench.contenders.recovery_watch import NUM_RANKS

OBJECT_STORE_BYTES = 80 << 20


def work(told: dict[str, str]) -> None:
    """On each rank; Ray has made the process group."""
    os.environ["RANK"] = str(train.get_context().get_world_rank())
    diary = Diary(told["diary"])
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
        for number, (features, wanted) in enumerate(DataLoader(dataset, BATCH_SIZE, sampler=sampler)):
            if number < position:
                continue
            loss = train_step(parallel, optimizer, features, wanted)
            step += 1
            if step % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                _save({**state, "epoch": epoch, "position": number + 1, "step": step}, loss)
            diary.step(step)
            if step == int(told["steps"]):
                return
        epoch, position = epoch + 1, 0


def _save(state: dict[str, object], loss: float) -> None:
    """All ranks report, rank 0 with what there is to keep."""
    if dist.get_rank() != 0:
        train.report({"loss": loss})
        return
    with tempfile.TemporaryDirectory() as place:
        torch.save(state, Path(place) / "model.pt")
        train.report({"loss": loss}, checkpoint=train.Checkpoint.from_directory(place))


if __name__ == "__main__":
    place, num_steps = sys.argv[1], sys.argv[2]
    ray.init(
        "local",
        num_cpus=NUM_RANKS + 1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    TorchTrainer(
        work,
        train_loop_config={"diary": place, "steps": num_steps},
        scaling_config=train.ScalingConfig(num_workers=NUM_RANKS),
        run_config=train.RunConfig(
            storage_path=str(Path(place) / "kept"), failure_config=train.FailureConfig(max_failures=3)
        ),
    ).fit()
