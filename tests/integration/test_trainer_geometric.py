"""Layers of torch_geometric train on sampled neighborhoods without a change."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strata import Trainer
from strata.trainer.graph import Graph, NeighborDataset, SageLayer

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it compiles some of its classes with torch.jit
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

NUM_NODES, NUM_CLASSES, WIDTH = 240, 3, 8


def community_graph() -> tuple[Graph, Any, Any]:
    """Three groups with many edges inside and few between; a node's features hardly tell its group."""
    generator = np.random.default_rng(0)
    labels = np.arange(NUM_NODES) % NUM_CLASSES
    source = generator.integers(0, NUM_NODES, 4_000)
    target = generator.integers(0, NUM_NODES, 4_000)
    is_kept = (labels[source] == labels[target]) | (generator.random(4_000) < 0.05)
    graph = Graph.from_edges(source[is_kept], target[is_kept], NUM_NODES)
    features = generator.normal(size=(NUM_NODES, WIDTH)).astype(np.float32)
    features[np.arange(NUM_NODES), labels] += 0.5
    return graph, features, labels


class TwoLayers(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = layer(WIDTH, 16), layer(16, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, num_seeds: int) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x, edge_index)), edge_index)[:num_seeds]
        return out


@pytest.mark.parametrize("layer", [GATConv, GCNConv, SAGEConv])
def test_a_layer_of_torch_geometric_learns_from_sampled_neighbors(
    layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph, features, labels = community_graph()
    nodes = np.random.default_rng(1).permutation(NUM_NODES)
    train, test = nodes[:160], nodes[160:]
    torch.manual_seed(0)
    trainer = Trainer(
        TwoLayers(layer),
        nn.CrossEntropyLoss(),
        torch.optim.Adam,
        ["accuracy"],
        optimizer_args={"lr": 0.02},
        checkpoint_options={"saver": "thread"},
    )

    seeds = NeighborDataset(graph, train, features=features, labels=labels, fanouts=(10, 10))
    trainer.fit(seeds, label="y", epochs=15, batch_size=32)

    whole = NeighborDataset(graph, test, features=features, labels=labels, fanouts=(-1, -1))
    assert trainer.evaluate(whole)["accuracy"] > 0.7  # guessing reaches 0.33, the best guess from features 0.49


def test_the_sage_layer_computes_what_that_of_torch_geometric_computes() -> None:
    ours, theirs = SageLayer(5, 4), SAGEConv(5, 4)
    theirs.lin_l.weight.data.copy_(ours.neighbors.weight)
    theirs.lin_l.bias.data.copy_(ours.own.bias)
    theirs.lin_r.weight.data.copy_(ours.own.weight)
    x = torch.randn(7, 5)
    edges = torch.tensor([[0, 1, 2, 3, 3, 6], [1, 1, 0, 4, 0, 2]])

    torch.testing.assert_close(ours(x, edges), theirs(x, edges))
