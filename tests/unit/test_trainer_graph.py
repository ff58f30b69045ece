"""Graphs as compressed sparse rows: building, validation, memory maps."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import InvalidArgument
from strata.trainer.graph import Graph
from strata.trainer.graph.csr import MAX_NODES

edges = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=40)


def edges_of(graph: Graph) -> list[tuple[int, int]]:
    return [(int(source), target) for target in range(graph.num_nodes) for source in graph.neighbors(target)]


@given(edges=edges, undirected=st.booleans(), coalesce=st.booleans())
def test_a_graph_holds_the_edges_it_was_made_from(
    edges: list[tuple[int, int]], undirected: bool, coalesce: bool
) -> None:
    graph = Graph.from_edges(
        [source for source, _ in edges], [target for _, target in edges], 8, undirected=undirected, coalesce=coalesce
    )
    expected = edges + [(target, source) for source, target in edges if undirected and source != target]
    if coalesce:
        expected = list(set(expected))
    assert sorted(edges_of(graph)) == sorted(expected)
    assert graph.num_edges == len(expected)
    assert graph.degrees.tolist() == [sum(target == node for _, target in expected) for node in range(8)]
    assert sorted(zip(*graph.edge_index().tolist(), strict=True)) == sorted(expected)


@given(edges=edges, seed=st.integers(0, 100))
def test_the_order_of_edges_does_not_matter(edges: list[tuple[int, int]], seed: int) -> None:
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    shuffled = np.random.default_rng(seed).permutation(pairs)
    first, second = (Graph.from_edges(each[:, 0], each[:, 1], 8) for each in (pairs, shuffled))
    assert np.array_equal(first.indptr, second.indptr)
    assert np.array_equal(first.indices, second.indices)


def test_a_graph_may_have_no_edges_or_no_nodes() -> None:
    assert repr(Graph.from_edges([], [], 3)) == "Graph(num_nodes=3, num_edges=0)"
    assert repr(Graph.from_edges([], [], 0)) == "Graph(num_nodes=0, num_edges=0)"
    assert Graph.from_edges([], [], 3).edge_index().shape == (2, 0)


def test_arrays_of_a_graph_are_not_copied() -> None:
    indptr, indices = np.array([0, 1, 2], np.int32), np.array([1, 0], np.int32)
    graph = Graph(indptr, indices, num_nodes=2)
    assert np.shares_memory(graph.indptr, indptr)
    assert np.shares_memory(graph.indices, indices)
    assert graph.degrees.dtype == np.int64
    assert Graph(indptr.astype(np.uint32), indices.astype(np.uint16)).indices.dtype == np.int64


@pytest.mark.parametrize(
    ("indptr", "indices", "num_nodes", "message"),
    [
        ([], [], None, "indptr must start with 0"),
        ([1, 2], [0, 0], None, "indptr must start with 0"),
        ([0, 2, 1, 2], [0, 1], None, "indptr decreases from 2 to 1 at node 1"),
        ([0, 1], [0, 0], None, "indptr ends with 1, but there are 2 indices"),
        ([0, 1], [0], 2, "indptr has 2 offsets, but num_nodes=2 nodes need 3"),
        ([0, 1], [1], None, "indices has node 1, but the graph has 1 nodes, from 0 to 0"),
        ([0, 1], [-1], None, "indices has node -1"),
        ([0.0, 1.0], [0], None, "indptr must be one row of integers, not float64"),
        ([0, 1], [[0]], None, r"indices must be one row of integers, not int64 of shape \[1, 1\]"),
    ],
)
def test_arrays_that_are_no_graph_are_refused(
    indptr: list[int], indices: list[int], num_nodes: int | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Graph(np.array(indptr), np.array(indices), num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("sources", "targets", "num_nodes", "message"),
    [
        ([0, 1], [1], 2, "2 sources and 1 targets"),
        ([0, 2], [1, 0], 2, "sources has node 2"),
        ([0, 1], [1, -1], 2, "targets has node -1"),
        ([], [], -1, "num_nodes=-1 must be from 0"),
        ([], [], MAX_NODES + 1, f"must be from 0 to {MAX_NODES}"),
    ],
)
def test_edges_that_are_no_graph_are_refused(
    sources: list[int], targets: list[int], num_nodes: int, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Graph.from_edges(sources, targets, num_nodes)


# -- memory maps -------------------------------------------------------------------------------------------------------


def saved(folder: Path, *, num_nodes: int = 1_000) -> Graph:
    """Return a memory-mapped ring of nodes."""
    nodes = np.arange(num_nodes)
    ring = Graph.from_edges(nodes, (nodes + 1) % num_nodes, num_nodes)
    np.save(folder / "indptr.npy", ring.indptr)
    np.save(folder / "indices.npy", ring.indices)
    return Graph(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")))


def test_a_mapped_graph_is_pickled_as_its_paths(tmp_path: Path) -> None:
    graph = saved(tmp_path)
    pickled = pickle.dumps(graph)
    assert len(pickled) < 1_000
    again = pickle.loads(pickled)
    assert np.array_equal(again.indptr, graph.indptr)
    assert np.array_equal(again.indices, graph.indices)
    assert len(pickle.dumps(again)) == len(pickled), "a second process can pass it on"


def test_a_private_copy_of_a_map_is_pickled_by_value(tmp_path: Path) -> None:
    graph = saved(tmp_path)
    private = np.load(tmp_path / "indices.npy", mmap_mode="c")
    private[0] = 7  # not in the file
    assert pickle.loads(pickle.dumps(Graph(graph.indptr, private))).indices[0] == 7


def test_a_slice_of_a_map_is_not_mistaken_for_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "nodes.npy", np.arange(10)[::-1] % 5)
    tail = np.load(tmp_path / "nodes.npy", mmap_mode="r")[5:]
    graph = Graph(np.arange(6), tail)
    assert pickle.loads(pickle.dumps(graph)).indices.tolist() == tail.tolist()


def test_a_graph_whose_file_is_missing_names_the_cure(tmp_path: Path) -> None:
    pickled = pickle.dumps(saved(tmp_path))
    (tmp_path / "indices.npy").unlink()
    with pytest.raises(InvalidArgument, match=r"cannot map .*indices\.npy.*file system that all workers share"):
        pickle.loads(pickled)


def test_an_unmapped_graph_is_pickled_by_value() -> None:
    graph = Graph.from_edges([0, 1], [1, 0], 2)
    assert edges_of(pickle.loads(pickle.dumps(graph))) == edges_of(graph)
