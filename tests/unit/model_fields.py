"""Fields and encoded batches for the tests of models, without the feature columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainField:
    """Has the attributes that models need, and nothing else."""

    name: str
    kind: str
    num_ids: int = 0
    width: int = 0
    embedding_dim: int = 4
    max_length: int = 0
    combiner: str = "mean"


def sparse(name: str, num_ids: int, *, embedding_dim: int = 4) -> PlainField:
    return PlainField(name, "sparse", num_ids=num_ids, embedding_dim=embedding_dim)


def dense(name: str, width: int = 1) -> PlainField:
    return PlainField(name, "dense", width=width)


def varlen(name: str, num_ids: int, max_length: int, combiner: str = "mean", *, embedding_dim: int = 4) -> PlainField:
    return PlainField(
        name, "varlen", num_ids=num_ids, max_length=max_length, combiner=combiner, embedding_dim=embedding_dim
    )


def random_batch(fields: Sequence[PlainField], num_rows: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return an encoded batch with every id possible, including 0."""
    rng = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    columns = [torch.randint(0, each.num_ids, (num_rows,), generator=rng) for each in fields if each.kind == "sparse"]
    if columns:
        batch["sparse"] = torch.stack(columns, dim=1)
    width = sum(each.width for each in fields if each.kind == "dense")
    if width:
        batch["dense"] = torch.randn(num_rows, width, generator=rng)
    for each in fields:
        if each.kind == "varlen":
            batch[each.name] = torch.randint(0, each.num_ids, (num_rows, each.max_length), generator=rng)
    return batch
