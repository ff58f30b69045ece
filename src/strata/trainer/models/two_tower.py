"""Two-tower retrieval: users and items as vectors whose dot product is the score.

Items can be embedded in advance and searched by inner product, which is what makes retrieval from millions of items
fast. Training draws negatives from the batch: for each user, the items of the other rows. Popular items are drawn more
often than rare ones, and the log-q correction removes that bias (Yi et al., 2019).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.trainer.models.embedding import FlatInput
from strata.trainer.models.fields import SPARSE
from strata.trainer.models.layers import MLP
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.trainer.models.fields import FieldSpec


class Tower(nn.Module):
    """Turns the fields of one side into a vector per row: `[rows, output_dim]`."""

    def __init__(self, inputs: FlatInput, mlp: MLP, *, normalize: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.mlp = mlp
        self.normalize = normalize

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors: Tensor = self.mlp(self.inputs(batch))
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


class TwoTower(Recommender):
    """A tower for users and a tower for items.

    `user` and `item` name the fields of the towers. `forward(batch)` scores the user and the item of each row. A batch
    for `embed_users` or `embed_items` may hold the columns of that tower only. Scores are divided by `temperature`;
    with `normalize=True` they lie within ±1/temperature.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        user: Sequence[str],
        item: Sequence[str],
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (256, 128),
        output_dim: int = 64,
        normalize: bool = True,
        temperature: float = 0.05,
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: A tower has no field, a name is unknown, or a number is out of range.
        """
        super().__init__(fields)
        for side, names in (("user", user), ("item", item)):
            if isinstance(names, str) or not names:
                raise InvalidArgument(f"{side}={names!r} must be a list of the names of one or more fields", field=side)
        if output_dim < 1:
            raise InvalidArgument(f"output_dim={output_dim} must be 1 or more", field="output_dim")
        if not temperature > 0.0:
            raise InvalidArgument(f"temperature={temperature} must be above 0", field="temperature")

        def tower(names: Sequence[str]) -> Tower:
            inputs = FlatInput(fields, names, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
            mlp = MLP(
                inputs.width,
                hidden,
                out_features=output_dim,
                activation=activation,
                dropout=dropout,
                batch_norm=batch_norm,
            )
            return Tower(inputs, mlp, normalize=normalize)

        self.temperature = temperature
        self.user_tower = tower(user)
        self.item_tower = tower(item)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (self.embed_users(batch) * self.embed_items(batch)).sum(dim=1) / self.temperature

    def embed_users(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of users: `[rows, output_dim]`."""
        vectors: Tensor = self.user_tower(batch)
        return vectors

    def embed_items(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of items: `[rows, output_dim]`."""
        vectors: Tensor = self.item_tower(batch)
        return vectors

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits of all pairs of embedded users and items: `[users, items]`."""
        return users @ items.T / self.temperature


class InBatchSoftmax(nn.Module):
    """Trains a `TwoTower` on positive pairs: `forward(batch)` returns the loss of each row, `[rows]`.

    A module of its own, so that a strategy can wrap the whole computation. `item` names the sparse field that
    identifies items. Rows with the same item are not negatives of one another. `counts[id]`, how often each id occurs
    in the training data, enables the log-q correction.
    """

    log_q: Tensor | None

    def __init__(self, model: TwoTower, *, item: str, counts: Tensor | None = None) -> None:
        """
        Raises:
            InvalidArgument: `item` is not a sparse field, or `counts` has another length than the field has ids.
        """
        super().__init__()
        sparse = [field for field in model.fields if field.kind == "sparse"]
        names = [field.name for field in sparse]
        if item not in names:
            raise InvalidArgument(
                f"item={item!r} is not a sparse field; the sparse fields are: {', '.join(names) or 'none'}",
                field="item",
            )
        self.model = model
        self._column = names.index(item)
        num_ids = sparse[self._column].num_ids
        if counts is not None and counts.shape != (num_ids,):
            raise InvalidArgument(
                f"counts has shape {list(counts.shape)}, but {item!r} has {num_ids} ids; pass one count per id",
                field="counts",
            )
        # An item without a count still occurs in its own batch, so its probability is not 0.
        log_q = None if counts is None else (counts.clamp(min=1) / counts.sum().clamp(min=1)).float().log()
        self.register_buffer("log_q", log_q, persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        item_ids = batch[SPARSE][:, self._column]
        return in_batch_softmax(
            self.model.embed_users(batch),
            self.model.embed_items(batch),
            temperature=self.model.temperature,
            log_q=None if self.log_q is None else self.log_q[item_ids],
            item_ids=item_ids,
        )


def in_batch_softmax(
    users: Tensor,
    items: Tensor,
    *,
    temperature: float = 1.0,
    log_q: Tensor | None = None,
    item_ids: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of each user's own item among all items of the batch: `[rows]`.

    `users` and `items` are vectors, `[rows, dim]`. `log_q`, `[rows]`, is the logarithm of the probability of drawing
    each item into a batch; it is subtracted from the item's logits. With `item_ids`, `[rows]`, a user's own item is not
    a negative where other rows hold it too.
    """
    logits = users @ items.T / temperature
    if log_q is not None:
        logits = logits - log_q
    if item_ids is not None:
        same = item_ids.unsqueeze(0) == item_ids.unsqueeze(1)
        logits = logits.masked_fill(same.fill_diagonal_(False), -torch.inf)
    return torch.logsumexp(logits, dim=1) - logits.diagonal()
