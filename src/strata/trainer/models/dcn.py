"""The deep & cross network, version 2 (Wang et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.trainer.models.embedding import FlatInput
from strata.trainer.models.layers import MLP, CrossLayer, LowRankCrossLayer, MixtureCrossLayer
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.trainer.models.fields import FieldSpec

STRUCTURES = ("parallel", "stacked")


class CrossNetwork(nn.Module):
    """Layers that each multiply their input with x₀ once more, so that l layers give interactions of l + 1 features."""

    def __init__(self, width: int, num_layers: int, *, low_rank: int | None = None, experts: int = 1) -> None:
        """
        Raises:
            InvalidArgument: A number is out of range, or there are experts without `low_rank`.
        """
        super().__init__()
        if num_layers < 1:
            raise InvalidArgument(f"cross_layers={num_layers} must be 1 or more", field="cross_layers")
        if low_rank is not None and not 1 <= low_rank <= width:
            raise InvalidArgument(
                f"low_rank={low_rank} must be from 1 to the width of the input, {width}", field="low_rank"
            )
        if experts < 1 or (experts > 1 and low_rank is None):
            raise InvalidArgument(
                f"experts={experts} must be 1 or more; experts are low-rank layers, so more than 1 need low_rank=",
                field="experts",
            )
        self.layers = nn.ModuleList(_cross_layer(width, low_rank, experts) for _ in range(num_layers))

    def forward(self, start: Tensor) -> Tensor:
        rows = start
        for layer in self.layers:
            rows = layer(start, rows)
        return rows


def _cross_layer(width: int, low_rank: int | None, experts: int) -> nn.Module:
    if low_rank is None:
        return CrossLayer(width)
    return LowRankCrossLayer(width, low_rank) if experts == 1 else MixtureCrossLayer(width, low_rank, experts)


class DCNv2(Recommender):
    """A cross network and a perceptron, side by side (`structure="parallel"`) or in sequence (`"stacked"`).

    Cross layers have full matrices by default. `low_rank=r` factorizes them; `experts=k` then mixes k factorizations
    with a gate that depends on the row.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        structure: str = "parallel",
        cross_layers: int = 3,
        low_rank: int | None = None,
        experts: int = 1,
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: The structure is unknown, or a number is out of range.
        """
        super().__init__(fields)
        if structure not in STRUCTURES:
            raise InvalidArgument(
                f"structure={structure!r} is unknown; use one of {', '.join(map(repr, STRUCTURES))}", field="structure"
            )
        self.structure = structure
        self.inputs = FlatInput(fields, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
        width = self.inputs.width
        self.cross = CrossNetwork(width, cross_layers, low_rank=low_rank, experts=experts)
        self.mlp = MLP(width, hidden, activation=activation, dropout=dropout, batch_norm=batch_norm)
        self.logit = nn.Linear(self.mlp.out_features + (width if structure == "parallel" else 0), 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        start = self.inputs(batch)
        crossed = self.cross(start)
        rows = self.mlp(crossed) if self.structure == "stacked" else torch.cat([crossed, self.mlp(start)], dim=1)
        logits: Tensor = self.logit(rows)
        return logits.squeeze(1)
