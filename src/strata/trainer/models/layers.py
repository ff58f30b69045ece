"""The layers that models combine: perceptrons, and the interactions of features that each paper introduced.

Interactions take vectors `[rows, features, dim]` or rows `[rows, width]`, and none of them loops over features.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class MLP(nn.Sequential):
    """A multilayer perceptron: linear, batch norm if wanted, activation, dropout; then a linear output layer."""

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        *,
        out_features: int | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        """Without `out_features`, the last hidden layer is the output.

        Raises:
            InvalidArgument: There is no hidden layer, or an argument is out of range.
        """
        _check_mlp(hidden, activation=activation, dropout=dropout)
        layers: list[nn.Module] = []
        sizes = (in_features, *hidden)
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers.append(_linear(fan_in, fan_out, activation))
            if batch_norm:
                layers.append(BatchNorm(fan_out))
            layers.append(ACTIVATIONS[activation]())
            if dropout > 0.0:
                layers.append(nn.Dropout(dropout))
        if out_features is not None:
            layers.append(_linear(sizes[-1], out_features, "linear"))
        super().__init__(*layers)
        self.out_features = sizes[-1] if out_features is None else out_features


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that also trains on a batch of one row, which the end of an epoch may be.

    One row has no variance, so it is normalized with the running statistics.
    """

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and rows.shape[0] < 2:
            return functional.batch_norm(
                rows, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        normalized: Tensor = super().forward(rows)
        return normalized


def fm_interaction(vectors: Tensor) -> Tensor:
    """Return Σ_{i<j} ⟨vᵢ, vⱼ⟩ for every row, as ½(‖Σ vᵢ‖² - Σ‖vᵢ‖²), which takes linear time (Rendle, 2010)."""
    total = vectors.sum(dim=1)
    return 0.5 * (total.square().sum(dim=1) - vectors.square().sum(dim=(1, 2)))


class InnerProducts(nn.Module):
    """Returns ⟨vᵢ, vⱼ⟩ for all i < j: `[rows, pairs]`."""

    pairs: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", first * num_vectors + second, persistent=False)

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    def forward(self, vectors: Tensor) -> Tensor:
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.flatten(1).index_select(1, self.pairs)


def outer_product(vectors: Tensor) -> Tensor:
    """Return the superposed outer products of all pairs, flattened: `[rows, dim × dim]`.

    Σᵢ Σⱼ vᵢvⱼᵀ = (Σ vᵢ)(Σ vᵢ)ᵀ, so the sum of all pairs costs as much as one (Qu et al., 2016).
    """
    total = vectors.sum(dim=1)
    return (total.unsqueeze(2) * total.unsqueeze(1)).flatten(1)


class CrossLayer(nn.Module):
    """Returns x₀ ⊙ (W x + b) + x (DCN-V2; Wang et al., 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = _linear(width, width, "linear")

    def forward(self, start: Tensor, rows: Tensor) -> Tensor:
        return torch.addcmul(rows, start, self.linear(rows))


class LowRankCrossLayer(nn.Module):
    """Returns x₀ ⊙ (U Vᵀ x + b) + x, with U and V of `width` × `rank` (DCN-V2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(width, rank, bias=False)
        self.expand = _linear(rank, width, "linear")
        nn.init.xavier_uniform_(self.reduce.weight)

    def forward(self, start: Tensor, rows: Tensor) -> Tensor:
        return torch.addcmul(rows, start, self.expand(self.reduce(rows)))


class MixtureCrossLayer(nn.Module):
    """Returns Σᵢ Gᵢ(x) · x₀ ⊙ (Uᵢ g(Cᵢ g(Vᵢᵀ x)) + b) + x, with low-rank experts (DCN-V2)."""

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.reduce = nn.Parameter(torch.empty(experts, width, rank))
        self.mix = nn.Parameter(torch.empty(experts, rank, rank))
        self.expand = nn.Parameter(torch.empty(experts, rank, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts, bias=False)
        for weights in (self.reduce, self.mix, self.expand):
            for expert in range(experts):
                nn.init.xavier_uniform_(weights[expert])

    def forward(self, start: Tensor, rows: Tensor) -> Tensor:
        reduced = torch.tanh(torch.einsum("nd,kdr->nkr", rows, self.reduce))
        mixed = torch.tanh(torch.einsum("nkr,krs->nks", reduced, self.mix))
        gates = self.gate(rows).softmax(dim=1).unsqueeze(2)
        # The gates sum to 1 and x₀ and b are the same for all experts, so the gates weight the inputs of U instead of
        # the experts' outputs: no tensor of rows × experts × width.
        crossed = torch.einsum("nkr,krd->nd", mixed * gates, self.expand) + self.bias
        return torch.addcmul(rows, start, crossed)


def _linear(fan_in: int, fan_out: int, activation: str) -> nn.Linear:
    """Return a linear layer that keeps the variance of its inputs (He for ReLU, Glorot otherwise)."""
    layer = nn.Linear(fan_in, fan_out)
    if activation == "relu":
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _check_mlp(hidden: Sequence[int], *, activation: str, dropout: float) -> None:
    if not hidden or min(hidden) < 1:
        raise InvalidArgument(
            f"hidden={tuple(hidden)} must have one or more layers of one or more units, such as (400, 400)",
            field="hidden",
        )
    if activation not in ACTIVATIONS:
        raise InvalidArgument(
            f"activation={activation!r} is unknown; use one of {', '.join(map(repr, ACTIVATIONS))}", field="activation"
        )
    if not 0.0 <= dropout < 1.0:
        raise InvalidArgument(f"dropout={dropout} must be at least 0 and below 1", field="dropout")
