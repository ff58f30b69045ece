"""DDP with the whole table in each of two ranks, and torch's Adagrad. Shared by its two contenders."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strata.bench.contenders.servers_job import (
    ALLOCATORS,
    LOSS,
    LR,
    NUM_RANKS,
    UNITS,
    WARM_UP,
    WIDTH,
    Network,
    Rank,
    Size,
    batches,
    environment,
    fill,
    measure,
    named,
    require_memory,
    run_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARSE_COPIES = 2.1
"""Memory of a rank over the weights of the table: weights and sums."""
DENSE_COPIES = 4.5
"""… weights, sums, the bucket that is reduced, and the gradient or a temporary of the optimizer."""


def figures(system: str, size: Size, *, is_sparse: bool, units: Sequence[int] = UNITS) -> dict[str, float]:
    require_memory(size.table_bytes * NUM_RANKS * (SPARSE_COPIES if is_sparse else DENSE_COPIES))
    found: dict[str, float] = {}
    for suffix, variables in ALLOCATORS.items():
        with environment(variables):
            found |= run_ranks(train, size, system, suffix, is_sparse, tuple(units))
    return found


def train(rank: Rank, system: str, suffix: str, is_sparse: bool, units: Sequence[int]) -> dict[str, float]:
    size = rank.size
    embedding = nn.Embedding(size.rows, WIDTH, sparse=is_sparse, _weight=torch.empty(size.rows, WIDTH))
    fill(embedding.weight)
    return {
        key: value
        for each in units
        for key, value in named(system, each, suffix, _measured(rank, embedding, each)).items()
    }


def _measured(rank: Rank, embedding: nn.Embedding, units: int) -> tuple[float, float]:
    gc.collect()  # the sums of the optimizer before
    given = batches(rank.size, WARM_UP + rank.size.steps, seed=rank.number)
    network = DistributedDataParallel(
        Network(embedding, units),
        init_sync=False,  # the ranks have the same seed
        gradient_as_bucket_view=not embedding.sparse,  # one copy less of the gradient
    )
    optimizer = torch.optim.Adagrad(network.parameters(), lr=LR)

    def step(number: int) -> None:
        optimizer.zero_grad()
        LOSS(network(given[number].ids), given[number].labels).backward()
        optimizer.step()

    found = measure(rank.size, step)
    optimizer.zero_grad()
    return found
