"""The job of the contenders with two workers: a network, rows in memory, the measurement. Does not import Strata."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

NUM_RANKS = 2
BATCH_SIZE = 1_024
NUM_STEPS = 300
WARM_UP = 50
"""Steps that are not timed."""
NUM_COLUMNS = 32
QUICK_STEPS = 80


class Rows(Dataset[Any]):
    """Rows in memory that are indexed a batch at a time."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_rows, NUM_COLUMNS, generator=generator)
        self.y = (self.x.sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[rows], self.y[rows]


def whole_batch(batch: Any) -> Any:
    """Collate nothing: `Rows` returns batches."""
    return batch


class Timed(nn.Module):
    """A network that records when rank 0's forward passes begin: the same measurement for every system."""

    def __init__(self, units: int = 256, layers: int = 3) -> None:
        super().__init__()
        sizes = [NUM_COLUMNS, *[units] * layers]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(units, 1))
        self.times: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times.append(time.time())
        out: torch.Tensor = self.net(x).squeeze(-1)
        return out


def write_times(times: list[float], path: str | Path) -> None:
    Path(path).write_text(json.dumps(times))


def measured(path: str | Path, began_s: float) -> tuple[float, float]:
    """Return the time from `began_s` to the end of the first step, and the samples/s of both ranks together."""
    times = json.loads(Path(path).read_text())
    timed = times[WARM_UP:]
    per_s = (len(timed) - 1) * BATCH_SIZE * NUM_RANKS / (timed[-1] - timed[0])
    return times[1] - began_s, per_s
