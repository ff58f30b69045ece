"""Lookups: what stands in a worker's module for an embedding whose table is on parameter servers.

A lookup has no parameters. In a forward pass it gets the rows of its ids from `StepRows`, which pulls each different
row once. In the backward pass the gradients of these rows collect in `StepRows`, from where they are pushed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.servers.clocks import Push, sum_by_key
from strata.servers.connection import room_beside
from strata.servers.table import native
from strata.servers.table.keys import unique
from strata.trainer.strategy.prefetch import Prefetch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from strata.servers.table.keys import Keys, Unique
    from strata.servers.table.optimizers import Rows
    from strata.trainer.strategy.base import Upcoming
    from strata.trainer.strategy.prefetch import RowSource


class Found(NamedTuple):
    """The rows for the ids of one lookup."""

    rows: Tensor
    """One per different id; a leaf of the graph while training, unless the table is frozen."""
    positions: Tensor
    """The row of each id, in the shape of the ids."""
    groups: Unique
    """The positions by row."""
    room: Rows | None = None
    """Where to write the gradients of the rows; None: anywhere."""

    def gathered(self) -> Tensor:
        """Return the row of each id."""
        if not self.rows.requires_grad or not self.rows.is_cpu:
            return functional.embedding(self.positions, self.rows)
        found: Tensor = _Gather.apply(self.rows, self.positions, self.groups, self.room)  # type: ignore[no-untyped-call]
        return found


class StepRows:
    """The rows that one step uses, and their gradients."""

    def __init__(
        self, source: RowSource, *, frozen: Collection[str] = frozenset(), num_ahead: int | None = None
    ) -> None:
        """
        Args:
            frozen: Tables whose rows never change.
            num_ahead: Batches for which rows that change are prefetched; None: all that are announced.
        """
        self._source = source
        self._frozen = frozen
        self._prefetch = Prefetch(source, frozen=frozen, num_ahead=num_ahead)
        self._used: dict[str, list[tuple[Keys, Tensor]]] = {}

    def prepare(self, batches: Sequence[Upcoming]) -> None:
        """Begin the forward pass of a batch: ask for its rows and those of the batches after it."""
        self._prefetch.begin(batches)

    def rows_of(self, table: str, ids: Tensor) -> Found:
        """Return the rows of the different ids, and for each id the position of its row."""
        flat = ids.detach().reshape(-1).cpu().numpy().astype(np.int64, copy=False)
        if torch.is_grad_enabled():
            groups, pulled = self._prefetch.rows_of(table, flat)
        else:
            groups = unique(flat.view(np.uint64))
            pulled = self._source.pull({table: groups.keys})[table]
        rows = torch.from_numpy(pulled).to(ids.device)
        if torch.is_grad_enabled() and table not in self._frozen:
            rows.requires_grad_()
            self._used.setdefault(table, []).append((groups.keys, rows))
        positions = torch.from_numpy(groups.inverse).to(ids.device).reshape(ids.shape)
        return Found(rows, positions, groups, room_beside(pulled))

    def take_gradients(self) -> dict[str, Push]:
        """Return the gradient of each used row, by table, and begin a new step.

        A row that was used several times, by tied embeddings or in several forward passes, has the sum.
        """
        self._prefetch.end()
        used, self._used = self._used, {}
        found = {}
        for table, parts in used.items():
            pushed = [(keys, rows.grad.cpu().numpy()) for keys, rows in parts if rows.grad is not None]
            if not pushed:
                continue
            if len(pushed) == 1:
                found[table] = Push(*pushed[0])
                continue
            groups = unique(np.concatenate([keys for keys, _ in pushed]))
            gradients = np.concatenate([each for _, each in pushed])
            found[table] = Push(groups.keys, sum_by_key(gradients, groups))
        return found


class _Gather(torch.autograd.Function):
    """Rows by position. Both passes take less than half the time of torch's own: the forward pass loads rows into the
    cache before they are copied, and the backward pass sums over positions that have been grouped for the pull.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor, groups: Unique, room: Rows | None) -> Tensor:
        ctx.groups, ctx.room = groups, room
        if native.pull is None:
            return rows.index_select(0, positions.reshape(-1)).view(*positions.shape, rows.shape[1])
        found = torch.empty(*positions.shape, rows.shape[1])
        native.pull(rows.detach().numpy(), groups.inverse, found.view(-1, rows.shape[1]).numpy())
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values = gradients[0].reshape(-1, gradients[0].shape[-1]).to(torch.float32).contiguous()
        room, ctx.room = ctx.room, None  # a second backward pass through the same graph adds to what is in it
        return torch.from_numpy(sum_by_key(values.numpy(), ctx.groups, room)), None, None, None


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
        found = self._rows.rows_of(self.table, input).gathered()
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
        rows, positions = self._rows.rows_of(self.table, input)[:2]
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
