"""The model that the jobs of the recovery benchmark train, and the log of their steps. Does not import Strata.

Every rank appends lines to its own file: `pid N` at the start, `step N TIME` after each step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

NUM_ROWS = 20_000
NUM_FEATURES = 16
BATCH_SIZE = 64
SAVE_EVERY = 10
STEP_S = 0.02
"""Every step is padded to this duration."""


class StepLog:
    """The step log of one rank."""

    def __init__(self, directory: str) -> None:
        self._file = (Path(directory) / f"rank-{os.environ['RANK']}").open("a", buffering=1)
        self._file.write(f"pid {os.getpid()}\n")
        self._since_s = time.perf_counter()

    def step(self, number: int) -> None:
        left_s = STEP_S - (time.perf_counter() - self._since_s)
        if left_s > 0:
            time.sleep(left_s)
        self._file.write(f"step {number} {time.time()}\n")
        self._since_s = time.perf_counter()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(NUM_ROWS, NUM_FEATURES, generator=generator)
    return features, features.sum(1).tanh()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def train_step(
    parallel: DistributedDataParallel, optimizer: torch.optim.Optimizer, features: torch.Tensor, targets: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(parallel(features).squeeze(1), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    optimizer.step()
    return loss.item()
