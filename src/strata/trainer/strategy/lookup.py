"""Lookups: what stands in a worker's module for an embedding whose table is on parameter servers.

A lookup has no parameters. In a forward pass it gets the rows of its ids from `StepRows`, which pulls each row once,
and passes them to the same torch function that the embedding would have used. In the backward pass the gradients of
these rows collect in `StepRows`, from where they are pushed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.servers.clocks import Push, sum_by_key
from strata.servers.table.keys import unique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows


class RowSource(Protocol):
    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        """Return the current rows of these keys, which ascend, by table."""
        ...


class StepRows:
    """The rows that one step uses, and their gradients."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._used: dict[str, list[tuple[Keys, Tensor]]] = {}

    def rows_of(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the different ids, and for each id the position of its row."""
        flat = ids.detach().reshape(-1).cpu().numpy()
        found = unique(flat.astype(np.uint64))
        positions = torch.from_numpy(found.inverse).to(ids.device).reshape(ids.shape)
        rows = torch.from_numpy(self._source.pull({table: found.keys})[table]).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.setdefault(table, []).append((found.keys, rows))
        return rows, positions

    def take_gradients(self) -> dict[str, Push]:
        """Return the gradient of each used row, by table, and begin a new step.

        A row that was used several times, by tied embeddings or in several forward passes, has the sum.
        """
        used, self._used = self._used, {}
        found = {}
        for table, parts in used.items():
            pushed = [(keys, rows.grad.cpu().numpy()) for keys, rows in parts if rows.grad is not None]
            if not pushed:
                continue
            keys = np.concatenate([each for each, _ in pushed])
            gradients = np.concatenate([each for _, each in pushed])
            if len(pushed) == 1:
                found[table] = Push(keys, gradients)
            else:
                groups = unique(keys)
                found[table] = Push(groups.keys, sum_by_key(gradients, groups))
        return found


class Lookup(nn.Module):
    """Stands for an `nn.Embedding`."""

    def __init__(self, embedding: nn.Embedding, table: str, rows: StepRows) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self._rows = rows

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, which callers may use
        check_ids(self, input)
        rows, positions = self._rows.rows_of(self.table, input)
        found = functional.embedding(positions, rows)
        return found if self.padding_idx is None else _without_gradient(found, input == self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r} on parameter servers"


class BagLookup(nn.Module):
    """Stands for an `nn.EmbeddingBag`."""

    def __init__(self, bag: nn.EmbeddingBag, table: str, rows: StepRows) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings = bag.num_embeddings
        self.embedding_dim = bag.embedding_dim
        self.padding_idx = bag.padding_idx
        self.mode = bag.mode
        self.include_last_offset = bag.include_last_offset
        self._rows = rows

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name, which callers may use
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        check_ids(self, input)
        rows, positions = self._rows.rows_of(self.table, input)
        padding = None
        if self.padding_idx is not None:
            is_padding = input == self.padding_idx
            if bool(is_padding.any()):  # all of them have the same position
                padding = int(positions[is_padding][0])
        return functional.embedding_bag(
            positions,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r} on parameter servers"


def check_ids(lookup: Any, ids: Tensor) -> None:
    """
    Raises:
        InvalidArgument: An id is outside the table.
    """
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= lookup.num_embeddings:
        raise InvalidArgument(
            f"id {low if low < 0 else high} is outside the table {lookup.table}, which has {lookup.num_embeddings} "
            f"rows (0 to {lookup.num_embeddings - 1}); enlarge the table, or fit a vocabulary with SparseFeat in "
            "features=",
            field="data",
        )


def _without_gradient(found: Tensor, is_padding: Tensor) -> Tensor:
    """Return the same values, without a gradient where the id is the padding."""
    return torch.where(is_padding.unsqueeze(-1), found.detach(), found)
