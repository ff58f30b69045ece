"""From an encoded batch to vectors: one table, one lookup.

All sparse and varlen fields of a dimension share one table. Field i owns the rows from its offset on, so the offsets
are added once, a batch needs a single lookup whatever the number of fields, and an optimizer updates one parameter
instead of dozens.

`FieldIds` turns a batch into rows of the table, and `FieldEmbedding` is the table. Models use the modules built from
them: `EmbeddingBlock` returns a vector per field, `FlatInput` all values of a row side by side. `FeatureVectors` and
`FeatureWeights` return the vectors and the first-order weights of a factorization machine, where a number has a vector
as well; `FeatureInputs` prepares a batch for both.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.trainer.models.fields import DENSE, PADDING, SPARSE, FieldSpec, Layout, names_by_dimension

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INITIAL_STD = 0.01
"""Standard deviation of new vectors. Products of small vectors are close to 0, so training starts at a logit of 0."""


class FieldIds(nn.Module):
    """Returns the rows of a shared table: int64 `[rows, slots]`, a slot per sparse field and per varlen position."""

    offsets: Tensor
    columns: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        first_ids = list(itertools.accumulate((field.num_ids for field in layout.embedded), initial=0))
        num_sparse = len(layout.sparse)
        self.first_ids = first_ids[:-1]
        """The row of each field's id 0, sparse fields first."""
        self.num_ids = first_ids[-1]
        self.register_buffer("offsets", torch.tensor(first_ids[:num_sparse], dtype=torch.int64), persistent=False)
        self.register_buffer("columns", torch.tensor(layout.sparse_columns, dtype=torch.int64), persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        parts = [self.sparse(batch) + self.offsets] if self.layout.sparse else []
        firsts = self.first_ids[len(self.layout.sparse) :]
        parts += [_varlen(batch, field) + first for field, first in zip(self.layout.varlen, firsts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def sparse(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the ids of the sparse fields without offsets."""
        return _own_columns(batch, SPARSE, self.columns, self.layout.num_sparse_columns)

    def check_ids(self, batch: Mapping[str, Tensor]) -> None:
        """Check that every id of a batch lies within the table of its field.

        The lookup itself does not notice most wrong ids, because they lie within the rows of another field.

        Raises:
            InvalidArgument: The message names the field, the id and the size of its table.
        """
        found = self.sparse(batch).unbind(1) if self.layout.sparse else ()
        for field, ids in zip(self.layout.sparse, found, strict=True):
            _check_range(field, ids)
        for field in self.layout.varlen:
            _check_range(field, _varlen(batch, field))


class DenseColumns(nn.Module):
    """Returns the dense columns of the chosen fields: `[rows, width]`."""

    columns: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.num_columns = layout.num_dense_columns
        self.register_buffer("columns", torch.tensor(layout.dense_columns, dtype=torch.int64), persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return _own_columns(batch, DENSE, self.columns, self.num_columns)


class FieldEmbedding(nn.Embedding):
    """The shared table. Returns `[rows, fields, dim]` for the rows that `FieldIds` gives; varlen fields are pooled."""

    def __init__(self, ids: FieldIds, dim: int, *, sparse_gradients: bool) -> None:
        super().__init__(ids.num_ids, dim, sparse=sparse_gradients)
        self._num_sparse = len(ids.layout.sparse)
        lengths = [field.max_length for field in ids.layout.varlen]
        starts = itertools.accumulate(lengths, initial=self._num_sparse)
        self._bags = [
            (start, start + length, padding, str(field.combiner))
            for start, length, padding, field in zip(
                starts, lengths, ids.first_ids[self._num_sparse :], ids.layout.varlen, strict=False
            )
        ]
        """Of every varlen field: its slots, its row for padding, and its combiner."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)

    def forward(self, ids: Tensor) -> Tensor:
        return self.pooled(look_up(self, ids), ids)

    def pooled(self, vectors: Tensor, ids: Tensor) -> Tensor:
        """Combine the vectors of varlen fields."""
        if not self._bags:
            return vectors
        pooled = [
            pool(vectors[:, start:stop], ids[:, start:stop] != padding, combiner).unsqueeze(1)
            for start, stop, padding, combiner in self._bags
        ]
        return torch.cat([vectors[:, : self._num_sparse], *pooled], dim=1)

    def on_servers(self, lookup: nn.Module) -> nn.Module:
        """Return the module that stands for this one while its rows are on parameter servers."""
        return _Pooled(lookup, self)


class _Pooled(nn.Module):
    """A `FieldEmbedding` whose rows come from a lookup."""

    def __init__(self, lookup: nn.Module, table: FieldEmbedding) -> None:
        super().__init__()
        self.lookup = lookup
        self._pool = table.pooled

    def forward(self, ids: Tensor) -> Tensor:
        return self._pool(self.lookup(ids), ids)


def look_up(table: nn.Module, ids: Tensor) -> Tensor:
    """Return the rows of a table for ids of any shape.

    `embedding` computes its dense gradient row by row. On a CPU the gradient of `index_select` takes half the time for
    rows of 16 values, and a tenth for rows of one.
    """
    if not isinstance(table, nn.Embedding):  # a lookup stands for it
        found: Tensor = table(ids)
        return found
    if table.sparse or not ids.is_cpu:
        return functional.embedding(ids, table.weight, sparse=table.sparse)
    return table.weight.index_select(0, ids.flatten()).view(*ids.shape, table.embedding_dim)


def pool(vectors: Tensor, present: Tensor, combiner: str) -> Tensor:
    """Combine the vectors `[rows, length, dim]` that are present; a row without any gives zeros."""
    if combiner == "max":
        largest = vectors.masked_fill(~present.unsqueeze(2), -torch.inf).amax(dim=1)
        return largest.masked_fill(~present.any(dim=1, keepdim=True), 0.0)
    weights = present.to(vectors.dtype)
    if combiner == "mean":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    return (vectors * weights.unsqueeze(2)).sum(dim=1)


class EmbeddingBlock(nn.Module):
    """Embeds sparse and varlen fields: `[rows, fields, dim]`, sparse fields first."""

    def __init__(self, layout: Layout, dim: int, *, sparse_gradients: bool = False) -> None:
        super().__init__()
        self.ids = FieldIds(layout)
        self.table = FieldEmbedding(self.ids, dim, sparse_gradients=sparse_gradients)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors: Tensor = self.table(self.ids(batch))
        return vectors


class FlatInput(nn.Module):
    """Returns the embeddings of a row and its dense columns side by side: `[rows, width]`.

    With `embedding_dim=None` every field has its own dimension, and there is one table per dimension.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        names: Sequence[str] | None = None,
        *,
        embedding_dim: int | None,
        sparse_gradients: bool = False,
    ) -> None:
        super().__init__()
        layout = Layout.of(fields, names)
        groups = names_by_dimension(layout, embedding_dim)
        self.embeddings = nn.ModuleList(
            EmbeddingBlock(Layout.of(fields, group), dim, sparse_gradients=sparse_gradients)
            for dim, group in groups.items()
        )
        self.dense = DenseColumns(layout) if layout.dense else None
        self.width = sum(dim * len(group) for dim, group in groups.items()) + layout.dense_width

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        parts = [block(batch).flatten(1) for block in self.embeddings]
        if self.dense is not None:
            parts.append(self.dense(batch))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class FeatureInputs(nn.Module):
    """Returns the rows of the table for the fields with ids, and the values of the dense columns; None without any."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.ids = FieldIds(layout) if layout.embedded else None
        self.dense = DenseColumns(layout) if layout.dense else None
        self.dense_width = layout.dense_width
        self.num_features = len(layout.embedded) + layout.dense_width

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        ids = None if self.ids is None else self.ids(batch)
        return ids, None if self.dense is None else self.dense(batch)


class FeatureVectors(nn.Module):
    """Returns vᵢxᵢ for every feature i of a row, `[rows, features, dim]`, as in a factorization machine.

    Features are the sparse fields, the varlen fields and the columns of dense fields, in this order. A categorical
    value has x = 1; a number is its own x.
    """

    def __init__(self, inputs: FeatureInputs, dim: int, *, sparse_gradients: bool = False) -> None:
        super().__init__()
        self.table: FieldEmbedding | None = None
        self.dense: nn.Parameter | None = None
        if inputs.ids is not None:
            self.table = FieldEmbedding(inputs.ids, dim, sparse_gradients=sparse_gradients)
        if inputs.dense is not None:
            self.dense = nn.Parameter(torch.randn(inputs.dense_width, dim) * INITIAL_STD)

    def forward(self, ids: Tensor | None, values: Tensor | None) -> Tensor:
        parts: list[Tensor] = []
        if self.table is not None:
            parts.append(self.table(ids))
        if self.dense is not None and values is not None:
            parts.append(values.unsqueeze(2) * self.dense)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class FeatureWeights(FeatureVectors):
    """Returns Σ wᵢxᵢ, `[rows]`, with weights that start at 0."""

    def __init__(self, inputs: FeatureInputs, *, sparse_gradients: bool = False) -> None:
        super().__init__(inputs, 1, sparse_gradients=sparse_gradients)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def each(self, ids: Tensor | None, values: Tensor | None) -> Tensor:
        """Return wᵢxᵢ for every feature: `[rows, features]`."""
        return super().forward(ids, values).squeeze(2)

    def forward(self, ids: Tensor | None, values: Tensor | None) -> Tensor:
        return self.each(ids, values).sum(dim=1)


def _own_columns(batch: Mapping[str, Tensor], key: str, columns: Tensor, num_columns: int) -> Tensor:
    """Return the chosen columns of a matrix that holds the columns of all fields, or of the chosen ones only.

    Raises:
        InvalidArgument: The matrix is missing or has another width.
    """
    matrix = _entry(batch, key)
    if matrix.ndim != 2 or matrix.shape[1] not in (num_columns, len(columns)):
        raise InvalidArgument(
            f"batch[{key!r}] has shape {list(matrix.shape)}, but the model was built for [rows, {num_columns}]; encode "
            "the batch with the features that gave the model its fields",
            field="batch",
        )
    return matrix if matrix.shape[1] == len(columns) else matrix.index_select(1, columns)


def _varlen(batch: Mapping[str, Tensor], field: FieldSpec) -> Tensor:
    matrix = _entry(batch, field.name)
    if matrix.ndim != 2 or matrix.shape[1] != field.max_length:
        raise InvalidArgument(
            f"batch[{field.name!r}] has shape {list(matrix.shape)}, but the field has max_length={field.max_length}; "
            f"pad or cut its rows to {field.max_length} ids",
            field="batch",
        )
    return matrix


def _entry(batch: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in batch:
        raise InvalidArgument(
            f"the batch has no {key!r}, only {', '.join(sorted(batch)) or 'nothing'}; encode it with the features that "
            "gave the model its fields",
            field="batch",
        )
    return batch[key]


def _check_range(field: FieldSpec, ids: Tensor) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < PADDING or high >= field.num_ids:
        wrong = low if low < PADDING else high
        raise InvalidArgument(
            f"field {field.name!r} has the id {wrong}, but its table has {field.num_ids} ids, from 0 to "
            f"{field.num_ids - 1}; encode the batch with the features that gave the model its fields",
            field=field.name,
        )
