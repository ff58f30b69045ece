"""Neighbor sampling: what every subgraph satisfies, uniformity, and a full neighborhood against a plain search."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import InvalidArgument, LimitExceeded
from strata.trainer.graph import Graph, NeighborSampler, Subgraph
from strata.trainer.graph import sampler as sampler_module
from strata.trainer.graph.sampler import draw_subsets

NUM_NODES = 12
CHI_SQUARE_19 = 43.8
"""Exceeded by chance once in a thousand, with 19 degrees of freedom."""


def random_graph(seed: int, num_edges: int) -> Graph:
    """Return a graph with hubs, self-loops and nodes without neighbors."""
    rng = np.random.default_rng(seed)
    targets = np.minimum(rng.geometric(0.25, num_edges), NUM_NODES) - 1
    return Graph.from_edges(rng.integers(0, NUM_NODES, num_edges), targets, NUM_NODES)


graphs = st.builds(random_graph, st.integers(0, 1_000), st.integers(0, 80))
seeds = st.lists(st.integers(0, NUM_NODES - 1), max_size=8)
fanouts = st.lists(st.sampled_from([1, 2, 3, 5, 20]), min_size=1, max_size=3)


def hops(subgraph: Subgraph) -> list[tuple[range, np.ndarray[Any, Any]]]:
    """Return the targets of each hop, and its edges."""
    nodes = list(accumulate(subgraph.nodes_per_hop, initial=0))
    cuts = list(accumulate(subgraph.edges_per_hop, initial=0))
    frontiers = [range(first, last) for first, last in pairwise(nodes)][:-1]
    return [
        (frontier, subgraph.edge_index[:, first:last])
        for frontier, (first, last) in zip(frontiers, pairwise(cuts), strict=True)
    ]


def sampled(graph: Graph, nodes: list[int], fanouts: list[int], *, replace: bool = False, seed: int = 0) -> Subgraph:
    return NeighborSampler(graph, fanouts, replace=replace).sample(nodes, np.random.default_rng(seed))


@given(graph=graphs, seeds=seeds, fanouts=fanouts, replace=st.booleans(), seed=st.integers(0, 100))
def test_a_subgraph_consists_of_edges_of_the_graph_and_starts_with_the_seeds(
    graph: Graph, seeds: list[int], fanouts: list[int], replace: bool, seed: int
) -> None:
    found = sampled(graph, seeds, fanouts, replace=replace, seed=seed)
    assert found.num_seeds == len(seeds) == found.nodes_per_hop[0]
    assert found.nodes[: len(seeds)].tolist() == seeds
    others = found.nodes[len(seeds) :].tolist()
    assert len(set(others)) == len(others)
    assert not set(others) & set(seeds)
    assert sum(found.nodes_per_hop) == len(found.nodes)
    assert sum(found.edges_per_hop) == found.edge_index.shape[1]
    assert len(found.edges_per_hop) == len(fanouts)
    for source, target in found.nodes[found.edge_index].T.tolist():
        assert source in graph.neighbors(target)
    assert found.nodes.dtype == found.edge_index.dtype == np.int64


@given(graph=graphs, seeds=seeds, fanouts=fanouts, seed=st.integers(0, 100))
def test_a_hop_draws_the_fanout_or_all_neighbors_without_repetition(
    graph: Graph, seeds: list[int], fanouts: list[int], seed: int
) -> None:
    found = sampled(graph, seeds, fanouts, seed=seed)
    for (frontier, edges), fanout in zip(hops(found), fanouts, strict=True):
        assert len({tuple(edge) for edge in edges.T.tolist()}) == edges.shape[1]
        counts = Counter(edges[1].tolist())
        assert set(counts) <= set(frontier)
        for target in frontier:
            assert counts[target] == min(fanout, len(graph.neighbors(int(found.nodes[target]))))


@given(graph=graphs, seeds=seeds, fanouts=fanouts, seed=st.integers(0, 100))
def test_with_replacement_a_node_with_neighbors_draws_exactly_the_fanout(
    graph: Graph, seeds: list[int], fanouts: list[int], seed: int
) -> None:
    found = sampled(graph, seeds, fanouts, replace=True, seed=seed)
    for (frontier, edges), fanout in zip(hops(found), fanouts, strict=True):
        counts = Counter(edges[1].tolist())
        for target in frontier:
            assert counts[target] == (fanout if len(graph.neighbors(int(found.nodes[target]))) else 0)


@given(graph=graphs, seeds=seeds, fanouts=fanouts, replace=st.booleans())
def test_the_same_generator_state_gives_the_same_subgraph(
    graph: Graph, seeds: list[int], fanouts: list[int], replace: bool
) -> None:
    sampler = NeighborSampler(graph, fanouts, replace=replace)
    rng = np.random.default_rng(5)
    twin = copy.deepcopy(rng)
    for _ in range(2):  # the second call reuses what the first has allocated
        first, second = sampler.sample(seeds, rng), sampled_like(sampler, seeds, twin)
        assert np.array_equal(first.nodes, second.nodes)
        assert np.array_equal(first.edge_index, second.edge_index)


def sampled_like(sampler: NeighborSampler, seeds: list[int], rng: np.random.Generator) -> Subgraph:
    fresh: NeighborSampler = pickle.loads(pickle.dumps(sampler))
    return fresh.sample(seeds, rng)


def naive_neighborhood(graph: Graph, seeds: list[int], num_hops: int) -> tuple[set[int], set[tuple[int, int]]]:
    nodes, edges, frontier = set(seeds), set(), set(seeds)
    for _ in range(num_hops):
        found = {(int(source), target) for target in frontier for source in graph.neighbors(target)}
        edges |= found
        frontier = {source for source, _ in found} - nodes
        nodes |= frontier
    return nodes, edges


@given(graph=graphs, seeds=st.sets(st.integers(0, NUM_NODES - 1), max_size=5), num_hops=st.integers(1, 4))
@pytest.mark.parametrize("fanout", [-1, NUM_NODES])
def test_a_full_fanout_is_a_breadth_first_search(graph: Graph, seeds: set[int], num_hops: int, fanout: int) -> None:
    found = sampled(graph, sorted(seeds), [fanout] * num_hops)
    nodes, edges = naive_neighborhood(graph, sorted(seeds), num_hops)
    assert sorted(found.nodes.tolist()) == sorted(nodes)
    assert sorted(map(tuple, found.nodes[found.edge_index].T.tolist())) == sorted(edges)


def test_a_repeated_seed_has_neighbors_of_its_own() -> None:
    graph = Graph.from_edges(range(1, 11), [0] * 10, 11)
    found = sampled(graph, [0, 0], [10])
    assert found.nodes.tolist()[:2] == [0, 0]
    assert sorted(found.nodes.tolist()[2:]) == list(range(1, 11))
    assert Counter(found.edge_index[1].tolist()) == {0: 10, 1: 10}


def test_seeds_without_neighbors_are_alone() -> None:
    graph = Graph.from_edges([], [], 4)
    for replace in (False, True):
        found = sampled(graph, [2, 0], [3, 3], replace=replace)
        assert found.nodes.tolist() == [2, 0]
        assert found.edge_index.shape == (2, 0)
        assert found.nodes_per_hop == (2, 0, 0)
    assert sampled(graph, [], [3]).nodes.tolist() == []


# -- uniformity --------------------------------------------------------------------------------------------------------


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def test_every_subset_of_neighbors_is_drawn_equally_often() -> None:
    """6 choose 3 = 20 subsets."""
    subsets = draw_subsets(np.full(20_000, 6), 3, np.random.default_rng(0))
    counts = Counter(tuple(sorted(subset)) for subset in subsets.T.tolist())
    assert len(counts) == 20
    assert chi_square(list(counts.values())) < CHI_SQUARE_19


@pytest.mark.parametrize("replace", [False, True])
def test_every_neighbor_is_drawn_equally_often(replace: bool) -> None:
    graph = Graph.from_edges(range(1, 21), [0] * 20, 21)
    found = sampled(graph, [0] * 4_000, [5], replace=replace, seed=1)
    counts = Counter(found.nodes[found.edge_index[0]].tolist())
    assert sum(counts.values()) == 20_000
    assert chi_square([counts[node] for node in range(1, 21)]) < CHI_SQUARE_19


@given(
    counts=st.lists(st.integers(4, 2**40), min_size=1, max_size=5), size=st.integers(1, 4), seed=st.integers(0, 1_000)
)
def test_subsets_are_different_numbers_in_range(counts: list[int], size: int, seed: int) -> None:
    subsets = draw_subsets(np.array(counts), size, np.random.default_rng(seed))
    assert subsets.shape == (size, len(counts))
    for subset, count in zip(subsets.T.tolist(), counts, strict=True):
        assert len(set(subset)) == size
        assert all(0 <= number < count for number in subset)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_threads_share_a_sampler() -> None:
    graph = random_graph(3, 80)
    sampler = NeighborSampler(graph, (3, 3))

    def one(seed: int) -> list[int]:
        found = sampler.sample([seed % NUM_NODES, 1], np.random.default_rng(seed))
        return found.nodes.tolist() + found.edge_index.flatten().tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(200))) == [one(seed) for seed in range(200)]


def test_a_failed_call_does_not_disturb_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = NeighborSampler(random_graph(3, 80), (2, 2))
    expected = sampler.sample([0, 1], np.random.default_rng(0))
    monkeypatch.setattr(sampler_module, "MAX_EDGES", 3)
    with pytest.raises(LimitExceeded, match=r"a hop from 2 nodes has 4 edges, more than 3; lower fanouts=\(2, 2\)"):
        sampler.sample([0, 1], np.random.default_rng(1))
    monkeypatch.undo()
    again = sampler.sample([0, 1], np.random.default_rng(0))
    assert np.array_equal(again.edge_index, expected.edge_index)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"fanouts": ()}, "fanouts"),
        ({"fanouts": (5, 0)}, "fanouts"),
        ({"fanouts": (-2,)}, "fanouts"),
        ({"fanouts": (-1,), "replace": True}, "replace"),
    ],
)
def test_an_impossible_sampler_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        NeighborSampler(random_graph(0, 10), **arguments)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([NUM_NODES], f"seeds has node {NUM_NODES}, but the graph has {NUM_NODES} nodes"),
        ([-1], "seeds has node -1"),
        ([True, False], r"not bool of shape \[2\]; for a mask of nodes, pass np.flatnonzero"),
        ([[1]], r"not int64 of shape \[1, 1\]"),
    ],
)
def test_seeds_that_are_no_nodes_are_refused(seeds: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sampled(random_graph(0, 10), seeds, [2])
