"""The same job for torchrun: LOG STEPS. Rank 0 saves with torch.save; all ranks load it at the start."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strata.bench.contenders.recovery_model import BATCH_SIZE, SAVE_EVERY, StepLog, network, rows, train_step

if __name__ == "__main__":
    directory, num_steps = sys.argv[1], int(sys.argv[2])
    step_log = StepLog(directory)
    dist.init_process_group("gloo")
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    dataset = TensorDataset(*rows())
    sampler: DistributedSampler[object] = DistributedSampler(dataset)
    saved = Path(directory) / "model.pt"
    epoch = position = step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, position, step = state["epoch"], state["position"], state["step"]
    while True:
        sampler.set_epoch(epoch)
        for number, (features, targets) in enumerate(DataLoader(dataset, BATCH_SIZE, sampler=sampler)):
            if number < position:
                continue
            train_step(parallel, optimizer, features, targets)
            step += 1
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch, "position": number + 1, "step": step}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            step_log.step(step)
            if step == num_steps:
                sys.exit(0)
        epoch, position = epoch + 1, 0
