"""A script as users of torchrun have it, with one step: OUT. Imports nothing of ours. Rank 0 tells when it was made."""

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
