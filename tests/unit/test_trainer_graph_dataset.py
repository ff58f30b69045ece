"""Subgraphs through the exact loader for map-style datasets, and a network that learns from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strata.data.map_style import map_loader
from strata.errors import InvalidArgument
from strata.identity import Identity
from strata.trainer.graph import Graph, GraphSage, NeighborDataset, SageLayer


def planted_partition(
    num_nodes: int = 600, num_classes: int = 3, *, seed: int = 0
) -> tuple[Graph, np.ndarray[Any, Any]]:
    """Return a graph in which nine of ten edges stay within a class, and the classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, num_classes, num_nodes)
    by_class = [np.flatnonzero(classes == each) for each in range(num_classes)]
    sources = rng.integers(0, num_nodes, num_nodes * 8)
    inside = np.array([rng.choice(by_class[classes[source]]) for source in sources])
    targets = np.where(rng.random(len(sources)) < 0.9, inside, rng.integers(0, num_nodes, len(sources)))
    return Graph.from_edges(sources, targets, num_nodes, undirected=True), classes


def dataset(*, features: Any = None, **options: Any) -> NeighborDataset:
    graph, classes = planted_partition()
    if features is None:
        features = np.random.default_rng(1).normal(size=(600, 4)).astype(np.float32)
    return NeighborDataset(
        graph, np.arange(0, 600, 2), labels=classes, features=features, **{"fanouts": (4, 3), **options}
    )


def loader_of(source: NeighborDataset, *, num_workers: int = 0, rank: int = 0, world_size: int = 1) -> Any:
    return map_loader(
        source,
        ranks=Identity(rank=rank, world_size=world_size),
        batch_size=32,
        shuffle=True,
        shuffle_seed=7,
        num_workers=num_workers,
        collate_fn=source.collate_fn,
    )


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if isinstance(value, Tensor) else value == second[key]
        for key, value in first.items()
    )


def test_a_batch_holds_features_of_its_nodes_and_labels_of_its_seeds() -> None:
    source = dataset()
    batch = source.__getitems__([3, 5, 3])
    assert set(batch) == {"nodes", "edge_index", "num_seeds", "x", "y"}
    assert batch["num_seeds"] == 3
    assert batch["nodes"][:3].tolist() == [6, 10, 6]
    assert torch.equal(batch["x"], torch.from_numpy(source.features[batch["nodes"].numpy()]))  # type: ignore[index]
    assert batch["y"].tolist() == [source.labels[node] for node in (6, 10, 6)]  # type: ignore[index]
    assert batch["edge_index"].shape[0] == 2
    assert source[3]["nodes"][0] == 6


def test_features_and_labels_are_optional() -> None:
    graph, _ = planted_partition()
    assert set(NeighborDataset(graph, [1, 2])[0]) == {"nodes", "edge_index", "num_seeds"}


def test_tensors_serve_as_features_and_labels() -> None:
    features = torch.randn(600, 4, dtype=torch.bfloat16)
    batch = dataset(features=features).__getitems__([0, 1])
    assert torch.equal(batch["x"], features[batch["nodes"]])


def test_an_empty_batch_is_an_empty_subgraph() -> None:
    batch = dataset().__getitems__([])
    assert batch["num_seeds"] == 0
    assert batch["x"].shape == (0, 4)
    logits = GraphSage(4, 3)(batch["x"], batch["edge_index"], 0)
    assert logits.shape == (0, 3)


def test_an_epoch_delivers_every_seed_once() -> None:
    batches = list(loader_of(dataset()))
    delivered = [node for batch in batches for node in batch["nodes"][: batch["num_seeds"]].tolist()]
    assert sorted(delivered) == list(range(0, 600, 2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_delivers_the_same_subgraphs(num_workers: int) -> None:
    source = dataset()
    expected = list(loader_of(source))
    first = loader_of(source, num_workers=num_workers)
    batches = iter(first)
    begun = [next(batches) for _ in range(4)]
    state = first.state_dict()
    np.random.seed(99)  # whatever state the process is in
    second = loader_of(source, num_workers=num_workers)
    second.load_state_dict(state)
    resumed = list(second)
    assert len(begun) + len(resumed) == len(expected)
    assert all(same(*pair) for pair in zip(begun + resumed, expected, strict=True))


def test_epochs_draw_different_neighbors() -> None:
    source = dataset()
    loader = loader_of(source)
    nodes = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        edges = torch.cat([batch["nodes"][batch["edge_index"]] for batch in loader], dim=1)
        nodes.append({tuple(edge) for edge in edges.T.tolist()})
    assert nodes[0] != nodes[1]


def test_loading_does_not_change_the_global_generator_of_the_process() -> None:
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    list(loader_of(dataset()))
    assert np.random.random() == expected


def test_a_pickled_dataset_keeps_mapped_features_in_their_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(2).normal(size=(600, 50)).astype(np.float32))
    graph, classes = planted_partition()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = NeighborDataset(graph, [4, 8], labels=torch.from_numpy(classes), features=mapped)
    pickled = pickle.dumps(source)
    assert len(pickled) < mapped.nbytes + graph.indices.nbytes + graph.indptr.nbytes
    again = pickle.loads(pickled)
    for each in (source, again):
        np.random.seed(3)
        batch = each.__getitems__([0, 1])
        assert torch.equal(batch["x"], torch.from_numpy(np.array(mapped)[batch["nodes"].numpy()]))
    assert len(pickle.dumps(again)) == len(pickled)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"features": np.zeros((599, 2))}, "features"),
        ({"labels": np.zeros(3)}, "labels"),
        ({"labels": np.zeros(())}, "labels"),
        ({"seeds": [600]}, "seeds"),
        ({"seeds": np.ones(600, bool)}, "seeds"),
        ({"fanouts": (0,)}, "fanouts"),
    ],
)
def test_an_impossible_dataset_is_refused(arguments: dict[str, Any], field: str) -> None:
    graph, _ = planted_partition()
    with pytest.raises(InvalidArgument) as error:
        NeighborDataset(graph, **{"seeds": [0], **arguments})
    assert error.value.field == field


# -- network -----------------------------------------------------------------------------------------------------------


def test_a_layer_averages_over_incoming_edges() -> None:
    torch.manual_seed(0)
    graph, _ = planted_partition(num_nodes=20)
    x, edge_index = torch.randn(20, 3), torch.from_numpy(graph.edge_index())
    layer = SageLayer(3, 5)
    found = layer(x, edge_index)
    for node in range(20):
        neighbors = graph.neighbors(node).tolist()
        mean = x[neighbors].mean(dim=0) if neighbors else torch.zeros(3)
        expected = layer.own(x[node]) + layer.neighbors(mean)
        assert torch.allclose(found[node], expected, atol=1e-6)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 2 * 3 * 5 + 5


def test_a_full_neighborhood_gives_the_logits_of_the_whole_graph() -> None:
    """Two hops hold everything that two layers read."""
    torch.manual_seed(0)
    graph, _ = planted_partition(num_nodes=60)
    features = torch.randn(60, 4)
    model = GraphSage(4, 3, hidden=(6,))
    whole = model(features, torch.from_numpy(graph.edge_index()), 60)
    batch = NeighborDataset(graph, range(60), features=features, fanouts=(-1, -1)).__getitems__([7, 30, 59])
    found = model(batch["x"], batch["edge_index"], batch["num_seeds"])
    assert torch.allclose(found, whole[[7, 30, 59]], atol=1e-5)


def test_graph_sage_learns_a_planted_partition() -> None:
    """Features name the class of one node in ten; the others must be inferred from neighbors."""
    graph, classes = planted_partition()
    known = np.random.default_rng(4).random(600) < 0.1
    features = np.eye(3, dtype=np.float32)[classes] * known[:, None]
    torch.manual_seed(0)
    model = GraphSage(3, 3, hidden=(16,), dropout=0.1)
    train, test = np.arange(0, 600, 2), np.flatnonzero(~known & (np.arange(600) % 2 == 1))
    loader = loader_of(NeighborDataset(graph, train, labels=classes, features=features, fanouts=(10, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            cross_entropy(model(batch["x"], batch["edge_index"], batch["num_seeds"]), batch["y"]).backward()
            optimizer.step()
    model.eval()
    batch = NeighborDataset(graph, test, labels=classes, features=features, fanouts=(-1, -1)).__getitems__(
        range(len(test))
    )
    predicted = model(batch["x"], batch["edge_index"], batch["num_seeds"]).argmax(dim=1)
    assert (predicted == batch["y"]).float().mean() > 0.9


def test_every_parameter_of_graph_sage_gets_a_gradient() -> None:
    model: nn.Module = GraphSage(4, 3, hidden=(8, 8))
    batch = dataset(fanouts=(3, 3, 3)).__getitems__(range(20))
    model(batch["x"], batch["edge_index"], batch["num_seeds"]).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(("arguments", "field"), [({"hidden": (0,)}, "hidden"), ({"dropout": 1.0}, "dropout")])
def test_an_impossible_network_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GraphSage(4, 3, **arguments)
    assert error.value.field == field
