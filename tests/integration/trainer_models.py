"""Small modules and data for the tests of the Trainer; importable in worker processes."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from strata import Trainer
from strata.train import Batch
from strata.trainer.history import TIMINGS


class Regression(nn.Module):
    """Takes its columns by name."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2, generator=generator) * 0.1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * self.weight[0] + b * self.weight[1] + self.bias


def network(seed: int = 0, *, dropout: float = 0.0, inputs: int = 4, batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(nn.Linear(inputs, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def arrays(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [rows, 4] and binary targets that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    score = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.3 * torch.randn(rows, generator=generator)
    return x, (score > 0).float()


def write_parquet(path: Path, rows: int = 1000, files: int = 4, seed: int = 0) -> Path:
    """Columns a, b, c (float64), key (int64), name (string) and the label y = a - 2 b."""
    random = np.random.default_rng(seed)
    path.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        a, b = random.normal(size=len(part)), random.normal(size=len(part))
        table = {
            "a": a,
            "b": b,
            "c": random.normal(size=len(part)),
            "key": part,
            "name": [f"n{key % 7}" for key in part],
            "y": a - 2 * b,
            "late": (a - 2 * b > 0).astype(np.int64),
        }
        pq.write_table(pa.table(table), path / f"{number}.parquet", row_group_size=97)
    return path


def weights(module: nn.Module) -> list[float]:
    return torch.cat([each.detach().reshape(-1) for each in module.state_dict().values()]).tolist()


class Clicks(nn.Module):
    """Two embeddings and a small network; takes its columns by name."""

    def __init__(self, *, dropout: float = 0.0, device: str | None = None, num_users: int = 300) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(num_users, 8, device=device)
        self.item = nn.Embedding(100, 4)
        self.top = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.top(torch.cat([self.user(user), self.item(item)], 1))
        return score.squeeze(1)


def clicks(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(0, 300, (rows,), generator=generator)
    item = torch.randint(0, 100, (rows,), generator=generator)
    return {"user": user, "item": item, "clicked": ((user * 7 + item * 3) % 5 < 2).float()}


class Counts(nn.Module):
    """One number per id. With the sum of the outputs as loss and SGD with a rate of one, it counts the rows that were
    trained on.
    """

    def __init__(self, ids: int) -> None:
        super().__init__()
        self.count = nn.Embedding(ids, 1)
        nn.init.zeros_(self.count.weight)

    def forward(self, id: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the column's name
        return -self.count(id).squeeze(1)


class UserCounts(nn.Module):
    """Its gradient is the same for every row, so that with SGD its rows count how often they were trained."""

    def __init__(self, num_users: int) -> None:
        super().__init__()
        self.user = nn.Embedding(num_users, 4, _weight=torch.zeros(num_users, 4))

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.user(user).sum(1)


def pid_of_server(module: Any) -> int:
    """Return the process at the other end of the last connection of a lookup."""
    client = next(iter(module.user._rows._source._clients.values()))
    sock = client._links[-1]._connection._sock
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid


def without_timings(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a history without what differs between equal fits."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in history]


class Killed(Trainer):
    """Kills processes with -9 in some steps, once each, and leaves a mark for each kill."""

    marks = Path()
    kills: tuple[tuple[int | str, int], ...] = ()
    """(rank that kills itself, or "server": rank 0 kills one; number of the call in the process of that rank)"""
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        rank = int(os.environ.get("RANK", "0"))
        for what, call in self.kills:
            mark = self.marks / f"killed-{what}-{call}"
            if rank == (0 if what == "server" else what) and self.calls == call and not mark.exists():
                mark.touch()
                os.kill(pid_of_server(self.module) if what == "server" else os.getpid(), signal.SIGKILL)
        return super().training_step(module, batch)
