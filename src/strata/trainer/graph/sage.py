"""GraphSAGE with the mean aggregator (Hamilton et al., 2017), in torch alone.

Layers of torch_geometric take the same `edge_index` and can replace `SageLayer`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


class SageLayer(nn.Module):
    """Returns W · (hᵥ, mean of hᵤ over the edges u → v) + b for every node v; without neighbors, the mean is 0."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_features, out_features)
        self.neighbors = nn.Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, num_targets: int | None = None) -> Tensor:
        """Return `[num_targets, out_features]`. All edges lead to targets: the first nodes, by default every node."""
        num_targets = x.shape[0] if num_targets is None else num_targets
        source, target = edge_index
        total = x.new_zeros(num_targets, x.shape[1]).index_add(0, target, x[source])
        degree = torch.bincount(target, minlength=num_targets).clamp(min=1).unsqueeze(1)
        output: Tensor = self.own(x[:num_targets]) + self.neighbors(total / degree)
        return output


class GraphSage(nn.Module):
    """Layers of message passing, with ReLU between them: from features of nodes to logits of the seeds.

    Use as many layers as the sampler has hops: `hidden` has a size for each layer but the last.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, hidden: Sequence[int] = (128,), dropout: float = 0.0
    ) -> None:
        """
        Raises:
            InvalidArgument: A size is not positive, or `dropout` is not a probability below 1.
        """
        super().__init__()
        sizes = (in_features, *hidden, num_classes)
        if min(sizes) < 1:
            raise InvalidArgument(
                f"a layer of GraphSage needs at least one unit; the sizes are {sizes}", field="hidden"
            )
        if not 0.0 <= dropout < 1.0:
            raise InvalidArgument(f"dropout={dropout} must be at least 0 and below 1", field="dropout")
        self.layers = nn.ModuleList(SageLayer(*pair) for pair in itertools.pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor, num_seeds: int) -> Tensor:
        """Return `[num_seeds, num_classes]`. Seeds are the first nodes."""
        *others, last = self.layers
        for layer in others:
            x = self.dropout(torch.relu(layer(x, edge_index)))
        # Nothing reads the last layer's output for other nodes.
        into_seeds = edge_index[:, edge_index[1] < num_seeds]
        logits: Tensor = last(x, into_seeds, num_seeds)
        return logits
