"""The product-based neural network (Qu et al., 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strata.errors import InvalidArgument
from strata.trainer.models.embedding import FeatureInputs, FeatureVectors
from strata.trainer.models.fields import FieldSpec, Layout, one_dimension
from strata.trainer.models.layers import MLP, InnerProducts, outer_product
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PRODUCTS = ("inner", "outer", "both")


class PNN(Recommender):
    """A perceptron over the vectors of features and their products.

    `product="inner"` is the paper's IPNN, with a weight of its own for the product of every pair. `"outer"` is OPNN
    with superposition: the outer products of all pairs are summed before they are weighted. `"both"` is PNN*.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        product: str = "inner",
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: The product is unknown, or there is only one feature and so no pair.
        """
        super().__init__(fields)
        if product not in PRODUCTS:
            raise InvalidArgument(
                f"product={product!r} is unknown; use one of {', '.join(map(repr, PRODUCTS))}", field="product"
            )
        layout = Layout.of(fields)
        dim = one_dimension(layout, embedding_dim, model="PNN")
        self.inputs = FeatureInputs(layout)
        if self.inputs.num_features < 2:
            raise InvalidArgument(
                f"PNN multiplies pairs of features, but {fields[0].name!r} is the only one; add a field, or use LR",
                field="fields",
            )
        self.vectors = FeatureVectors(self.inputs, dim, sparse_gradients=sparse_gradients)
        self.inner = InnerProducts(self.inputs.num_features) if product in ("inner", "both") else None
        self.has_outer = product in ("outer", "both")
        width = self.inputs.num_features * dim + self.has_outer * dim * dim
        width += 0 if self.inner is None else self.inner.num_pairs
        self.mlp = MLP(width, hidden, out_features=1, activation=activation, dropout=dropout, batch_norm=batch_norm)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors = self.vectors(*self.inputs(batch))
        signals = [vectors.flatten(1)]
        if self.inner is not None:
            signals.append(self.inner(vectors))
        if self.has_outer:
            signals.append(outer_product(vectors))
        logits: Tensor = self.mlp(torch.cat(signals, dim=1))
        return logits.squeeze(1)
