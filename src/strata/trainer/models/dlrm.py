"""The deep learning recommendation model (Naumov et al., 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.trainer.models.embedding import DenseColumns, EmbeddingBlock
from strata.trainer.models.fields import FieldSpec, Layout, one_dimension
from strata.trainer.models.layers import MLP, InnerProducts
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DLRM(Recommender):
    """Dot products between the vectors of sparse fields and one vector of all dense columns, then a perceptron.

    The bottom perceptron (`bottom`, then `embedding_dim` units) turns the dense columns into that vector. The top
    perceptron (`hidden`) sees it again, beside the dot products of all pairs.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        embedding_dim: int | None = 16,
        bottom: Sequence[int] = (512, 256),
        hidden: Sequence[int] = (512, 256),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: There is no dense field, or no sparse or varlen field.
        """
        super().__init__(fields)
        layout = Layout.of(fields)
        if not layout.dense or not layout.embedded:
            missing = "a sparse or varlen field" if layout.dense else "a dense field"
            raise InvalidArgument(
                f"DLRM needs {missing}: it multiplies embeddings with a vector of numbers; add a field, or use DeepFM",
                field="fields",
            )
        dim = one_dimension(layout, embedding_dim, model="DLRM")
        self.embedding = EmbeddingBlock(layout, dim, sparse_gradients=sparse_gradients)
        _reset_table(self.embedding)
        self.dense = DenseColumns(layout)
        self.bottom = MLP(layout.dense_width, (*bottom, dim), activation=activation, batch_norm=batch_norm)
        self.products = InnerProducts(len(layout.embedded) + 1)
        width = dim + self.products.num_pairs
        self.top = MLP(width, hidden, out_features=1, activation=activation, dropout=dropout, batch_norm=batch_norm)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        dense = self.bottom(self.dense(batch))
        vectors = torch.cat([dense.unsqueeze(1), self.embedding(batch)], dim=1)
        logits: Tensor = self.top(torch.cat([dense, self.products(vectors)], dim=1))
        return logits.squeeze(1)


def _reset_table(embedding: EmbeddingBlock) -> None:
    """Draw the rows of a field uniformly from ±1/√(number of its ids), as the paper's code does."""
    for field, first in zip(embedding.ids.layout.embedded, embedding.ids.first_ids, strict=True):
        bound = 1.0 / math.sqrt(field.num_ids)
        nn.init.uniform_(embedding.table.weight[first : first + field.num_ids], -bound, bound)
