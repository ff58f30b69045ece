"""Lookups: what stands in a worker's module for an embedding whose table is on parameter servers.

A lookup has no parameters. In a forward pass it gets the rows of its ids from `StepRows`, which pulls each different
row once. In the backward pass the gradients of these rows collect in `StepRows`, from where they are pushed.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.servers.clocks import Push, sum_by_key
from strata.servers.table.keys import unique

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.servers.table.keys import Keys, Unique
    from strata.servers.table.optimizers import Rows


class RowSource(Protocol):
    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]:
        """Return the current rows of these keys, which ascend, by table."""
        ...


class _Rows(NamedTuple):
    """Rows of a table that were pulled together."""

    rows: Tensor
    """One per different id; a leaf of the graph while training."""
    groups: Unique
    """Of all ids for which they were pulled."""


class _Call(NamedTuple):
    """A lookup that is expected, with its place among the ids of its table."""

    ids: Tensor
    pulled: _Rows
    start: int


class Found(NamedTuple):
    """The rows for the ids of one lookup."""

    rows: Tensor
    positions: Tensor
    """The row of each id, in the shape of the ids."""
    groups: Unique | None
    """The positions by row, if the rows were pulled for this lookup alone."""

    def gathered(self) -> Tensor:
        """Return the row of each id."""
        if self.groups is None or not self.rows.requires_grad or not self.rows.is_cpu:
            return functional.embedding(self.positions, self.rows)
        found: Tensor = _Gather.apply(self.rows, self.positions, self.groups)  # type: ignore[no-untyped-call]
        return found


class StepRows:
    """The rows that one step uses, and their gradients."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._used: dict[str, list[tuple[Keys, Tensor]]] = {}
        self._expected: dict[str, deque[_Call]] = {}

    def expect(self, calls: Sequence[tuple[str, Tensor]]) -> None:
        """Pull the rows for the lookups of the next forward pass, all at once. Those of other ids are pulled then."""
        by_table: dict[str, list[Tensor]] = {}
        for table, ids in calls:
            by_table.setdefault(table, []).append(ids)
        groups = {table: _different(parts) for table, parts in by_table.items()}
        rows = self._source.pull({table: each.keys for table, each in groups.items()})
        self._expected = {}
        for table, parts in by_table.items():
            pulled = _Rows(self._leaf(table, groups[table].keys, rows[table], parts[0].device), groups[table])
            starts = itertools.accumulate((part.numel() for part in parts), initial=0)
            self._expected[table] = deque(_Call(*each) for each in zip(parts, itertools.repeat(pulled), starts))

    def rows_of(self, table: str, ids: Tensor) -> Found:
        """Return the rows of the different ids, and for each id the position of its row."""
        expected = self._expected.get(table)
        call = expected.popleft() if expected else None
        if call is None or not torch.equal(call.ids, ids):  # the forward pass has computed other ids than before it
            groups = _different([ids])
            pulled = self._source.pull({table: groups.keys})[table]
            call = _Call(ids, _Rows(self._leaf(table, groups.keys, pulled, ids.device), groups), 0)
        rows, groups = call.pulled
        is_whole = len(groups.inverse) == ids.numel()
        positions = torch.from_numpy(groups.inverse[call.start : call.start + ids.numel()])
        return Found(rows, positions.to(ids.device).reshape(ids.shape), groups if is_whole else None)

    def _leaf(self, table: str, keys: Keys, rows: Rows, device: torch.device) -> Tensor:
        leaf = torch.from_numpy(rows).to(device)
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self._used.setdefault(table, []).append((keys, leaf))
        return leaf

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
            if len(pushed) == 1:
                found[table] = Push(*pushed[0])
                continue
            groups = unique(np.concatenate([keys for keys, _ in pushed]))
            gradients = np.concatenate([each for _, each in pushed])
            found[table] = Push(groups.keys, sum_by_key(gradients, groups))
        return found


def _different(parts: Sequence[Tensor]) -> Unique:
    flat = [part.detach().reshape(-1).cpu().numpy() for part in parts]
    return unique((flat[0] if len(flat) == 1 else np.concatenate(flat)).astype(np.uint64))


class _Gather(torch.autograd.Function):
    """Rows by position. The gradient of a row is summed over the positions that have been grouped for the pull, which
    takes less than half the time of torch's own backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor, groups: Unique) -> Tensor:
        ctx.groups = groups
        return rows.index_select(0, positions.reshape(-1)).view(*positions.shape, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values = gradients[0].reshape(-1, gradients[0].shape[-1]).to(torch.float32).contiguous()
        return torch.from_numpy(sum_by_key(values.numpy(), ctx.groups)), None, None


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
        rows, positions, _ = self._rows.rows_of(self.table, input)
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
