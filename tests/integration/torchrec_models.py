"""Modules with torchrec's collections for tests; importable in worker processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fbgemm warns of its own modules
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

NUM_USERS, NUM_ITEMS, WIDTH = 200, 40, 8


class Bags(nn.Module):
    """Two tables, one of which has two features; builds the KeyedJaggedTensor from columns."""

    def __init__(
        self, *, is_weighted: bool = False, mean: bool = False, dropout: float = 0.0, device: str = "cpu"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        pooling = PoolingType.MEAN if mean else PoolingType.SUM
        tables = [
            EmbeddingBagConfig(
                name="user", num_embeddings=NUM_USERS, embedding_dim=WIDTH, feature_names=["user"], pooling=pooling
            ),
            EmbeddingBagConfig(
                name="item",
                num_embeddings=NUM_ITEMS,
                embedding_dim=WIDTH,
                feature_names=["item", "seen"],
                pooling=pooling,
            ),
        ]
        self.bags = EmbeddingBagCollection(tables, is_weighted=is_weighted, device=torch.device(device))
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        columns = {"user": user[:, None], "item": item[:, None], "seen": seen}
        features = features_of(columns, is_weighted=self.bags.is_weighted())
        pooled: torch.Tensor = self.bags(features).values()
        score: torch.Tensor = self.top(pooled)
        return score.squeeze(1)


def features_of(columns: dict[str, torch.Tensor], *, is_weighted: bool = False) -> Any:
    """Return the ids of columns [rows, ids per row] as bags; negative ids are left out."""
    values = [ids[ids >= 0] for ids in columns.values()]
    lengths = [(ids >= 0).sum(1) for ids in columns.values()]
    joined = torch.cat(values)
    return KeyedJaggedTensor(
        keys=list(columns),
        values=joined,
        lengths=torch.cat(lengths),
        weights=1.0 / (1 + joined % 3) if is_weighted else None,
    )


def visits(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Users, items, and up to four items seen before."""
    generator = torch.Generator().manual_seed(seed)
    user = torch.randint(0, NUM_USERS, (rows,), generator=generator)
    item = torch.randint(0, NUM_ITEMS, (rows,), generator=generator)
    seen = torch.randint(-2, NUM_ITEMS, (rows, 4), generator=generator).clamp(min=-1)
    return {"user": user, "item": item, "seen": seen, "clicked": ((user + item) % 3 == 0).float()}


class Tower(nn.Module):
    """Embeddings of torch: one with padding, two kinds of bags, and one whose width is not a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(NUM_USERS, WIDTH, padding_idx=3)
        self.item = nn.Embedding(NUM_ITEMS, 6)
        self.seen = nn.EmbeddingBag(NUM_ITEMS + 1, WIDTH, mode="sum", padding_idx=NUM_ITEMS)
        self.flat = nn.EmbeddingBag(NUM_ITEMS + 1, WIDTH, mode="sum")
        self.top = nn.Linear(3 * WIDTH + 6, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ids = torch.where(seen < 0, NUM_ITEMS, seen)
        offsets = torch.arange(0, ids.numel(), ids.shape[1])
        pooled = [self.user(user), self.item(item), self.seen(ids), self.flat(ids.reshape(-1), offsets)]
        score: torch.Tensor = self.top(torch.cat(pooled, 1))
        return score.squeeze(1)
