"""A script for torchrun with one step: OUT. Does not import Strata. Rank 0 writes the time of the step to OUT."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(time.time()))
    dist.destroy_process_group()
