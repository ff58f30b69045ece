"""Logistic regression, factorization machines, and the networks on top of them: LR, FM, FNN and DeepFM.

All of them see features as Rendle does: every id of a sparse or varlen field is a feature, and so is every column of a
dense field. n counts them; m counts those of one row, one per field and dense column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from strata.trainer.models.embedding import FeatureInputs, FeatureVectors, FeatureWeights
from strata.trainer.models.fields import FieldSpec, Layout, one_dimension
from strata.trainer.models.layers import MLP, fm_interaction
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class LR(Recommender):
    """Logistic regression: w₀ + Σ wᵢxᵢ. The weights start at 0."""

    def __init__(self, fields: Sequence[FieldSpec], *, sparse_gradients: bool = False) -> None:
        super().__init__(fields)
        self.inputs = FeatureInputs(Layout.of(fields))
        self.weights = FeatureWeights(self.inputs, sparse_gradients=sparse_gradients)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        linear: Tensor = self.weights(*self.inputs(batch))
        return self.bias + linear


class _FactorModel(Recommender):
    """Has the weights and vectors of a factorization machine."""

    def __init__(
        self, fields: Sequence[FieldSpec], *, embedding_dim: int | None = 16, sparse_gradients: bool = False
    ) -> None:
        super().__init__(fields)
        layout = Layout.of(fields)
        self.embedding_dim = one_dimension(layout, embedding_dim, model=type(self).__name__)
        self.inputs = FeatureInputs(layout)
        self.weights = FeatureWeights(self.inputs, sparse_gradients=sparse_gradients)
        self.vectors = FeatureVectors(self.inputs, self.embedding_dim, sparse_gradients=sparse_gradients)


class FM(_FactorModel):
    """The factorization machine: w₀ + Σ wᵢxᵢ + Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢxⱼ (Rendle, 2010)."""

    def __init__(
        self, fields: Sequence[FieldSpec], *, embedding_dim: int | None = 16, sparse_gradients: bool = False
    ) -> None:
        super().__init__(fields, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids, values = self.inputs(batch)
        linear: Tensor = self.weights(ids, values)
        return self.bias + linear + fm_interaction(self.vectors(ids, values))


class FNN(_FactorModel):
    """The factorization-machine supported neural network (Zhang et al., 2016).

    The first layer is a factorization machine taken apart: z = (w₀, w₁x₁, v₁x₁, …, w_m x_m, v_m x_m), followed by a
    perceptron. The paper trains a factorization machine first and starts from its parameters: `FNN.from_fm`.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "tanh",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        super().__init__(fields, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
        self.bias = nn.Parameter(torch.zeros(1))
        width = 1 + self.inputs.num_features * (self.embedding_dim + 1)
        self.mlp = MLP(width, hidden, out_features=1, activation=activation, dropout=dropout, batch_norm=batch_norm)

    @classmethod
    def from_fm(
        cls,
        fm: FM,
        *,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "tanh",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> Self:
        """Return a network whose first layer starts as a copy of a trained factorization machine."""
        model = cls(
            fm.fields,
            embedding_dim=fm.embedding_dim,
            hidden=hidden,
            activation=activation,
            dropout=dropout,
            batch_norm=batch_norm,
            sparse_gradients=sparse_gradients,
        )
        model.weights.load_state_dict(fm.weights.state_dict())
        model.vectors.load_state_dict(fm.vectors.state_dict())
        with torch.no_grad():
            model.bias.copy_(fm.bias)
        return model

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids, values = self.inputs(batch)
        vectors = self.vectors(ids, values).flatten(1)
        bias = self.bias.expand(vectors.shape[0], 1)
        logits: Tensor = self.mlp(torch.cat([bias, self.weights.each(ids, values), vectors], dim=1))
        return logits.squeeze(1)


class DeepFM(_FactorModel):
    """A factorization machine and a perceptron over the same vectors, summed (Guo et al., 2017).

    As in the paper, the bias is that of the perceptron's output.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        super().__init__(fields, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
        width = self.inputs.num_features * self.embedding_dim
        self.mlp = MLP(width, hidden, out_features=1, activation=activation, dropout=dropout, batch_norm=batch_norm)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids, values = self.inputs(batch)
        vectors = self.vectors(ids, values)
        linear: Tensor = self.weights(ids, values)
        deep: Tensor = self.mlp(vectors.flatten(1))
        return linear + fm_interaction(vectors) + deep.squeeze(1)
