"""A script for torchrun: OUT STEPS. Trains with DDP; rank 0 writes the times of its steps to OUT. No Strata."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from trainer_job import BATCH_SIZE, NUM_RANKS, Rows, Timed, whole_batch, write_times

if __name__ == "__main__":
    out, num_steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    module = Timed()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn = nn.BCEWithLogitsLoss()
    rows = Rows(num_steps * BATCH_SIZE * NUM_RANKS)
    sampler: DistributedSampler[object] = DistributedSampler(rows)
    for x, y in DataLoader(rows, BATCH_SIZE, sampler=sampler, collate_fn=whole_batch):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        write_times(module.times, out)
    dist.destroy_process_group()
