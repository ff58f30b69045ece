"""Neighbor sampling: the part of a graph that a few layers of message passing around some nodes need.

The first hop draws neighbors of the seeds, the next one neighbors of the nodes that the first one found, and so on
(Hamilton et al., 2017). Everything is vectorized over the nodes of a hop. Nodes get their local ids through a table
with an entry per node of the graph, which is faster than sorting; it takes 4 bytes per node and thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import InvalidArgument, LimitExceeded
from strata.trainer.graph.csr import Graph, node_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

ALL = -1
"""A fan-out that takes all neighbors."""
MAX_EDGES = 2**31 - 1
"""Edges of one hop. Local ids have 32 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """The sampled neighborhood of some seeds, in local ids: positions in `nodes`."""

    nodes: Ints
    """Ids in the graph: the seeds as given, then the new nodes of each hop."""
    edge_index: Ints
    """Edges as (source, target), `[2, edges]`: messages flow from sources to targets. Grouped by hop and target."""
    num_seeds: int
    nodes_per_hop: tuple[int, ...]
    """New nodes of each hop; the seeds come first."""
    edges_per_hop: tuple[int, ...]


class NeighborSampler:
    """Draws up to `fanouts[h]` neighbors per node in hop h, uniformly; -1 takes all.

    Without `replace`, a node's neighbors are drawn without repetition, and a node with no more neighbors than the
    fan-out keeps all of them. With `replace`, every node that has neighbors draws exactly the fan-out. The work
    per node grows with the square of the fan-out, which does not matter below a hundred.

    Threads may share a sampler.
    """

    def __init__(self, graph: Graph, fanouts: Sequence[int] = (15, 10), *, replace: bool = False) -> None:
        """
        Raises:
            InvalidArgument: There is no fan-out, or one is neither positive nor -1.
        """
        self.graph = graph
        self.fanouts = tuple(int(fanout) for fanout in fanouts)
        self.replace = replace
        self._tables: list[npt.NDArray[np.int32]] = []
        """Tables of zeros that no thread uses now."""
        if not self.fanouts or any(fanout < 1 and fanout != ALL for fanout in self.fanouts):
            raise InvalidArgument(
                f"fanouts={self.fanouts} must be one number per hop, each 1 or more, or -1 for all neighbors",
                field="fanouts",
            )
        if replace and ALL in self.fanouts:
            raise InvalidArgument(
                "replace=True draws a fixed number of neighbors, so no fan-out can be -1; remove one of them",
                field="replace",
            )

    def sample(self, seeds: npt.ArrayLike, rng: np.random.Generator) -> Subgraph:
        """Return the neighborhood of the seeds; the same generator state gives the same result.

        A seed that occurs twice is two nodes of the result, with neighbors of their own, so that the first `num_seeds`
        nodes always are the seeds.

        Raises:
            InvalidArgument: A seed is not a node of the graph.
            LimitExceeded: A hop has more than 2³¹ - 1 edges.
        """
        frontier = node_ids(seeds, self.graph.num_nodes, "seeds")
        num_seeds = num_nodes = len(frontier)
        table = self._zeros()
        table[frontier] = np.arange(1, num_nodes + 1)
        nodes, sources, targets = [frontier], [], []
        for fanout in self.fanouts:
            neighbors, counts = self._draw(frontier, fanout, rng)
            local, found = _relabel(table, neighbors, num_nodes)
            sources.append(local)
            targets.append(np.repeat(np.arange(num_nodes - len(frontier), num_nodes), counts))
            nodes.append(found)
            num_nodes += len(found)
            frontier = found
        every = np.concatenate(nodes)
        table[every] = 0
        self._tables.append(table)  # not after an exception, which leaves it dirty
        return Subgraph(
            nodes=every,
            edge_index=np.stack([np.concatenate(sources), np.concatenate(targets)]),
            num_seeds=num_seeds,
            nodes_per_hop=tuple(len(hop) for hop in nodes),
            edges_per_hop=tuple(len(hop) for hop in sources),
        )

    def _zeros(self) -> npt.NDArray[np.int32]:
        try:
            return self._tables.pop()
        except IndexError:
            return np.zeros(self.graph.num_nodes, np.int32)

    def _draw(self, nodes: Ints, fanout: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the drawn neighbors of the nodes, one node after the other, and how many each node has."""
        starts = self.graph.indptr[nodes].astype(np.int64, copy=False)
        degrees = self.graph.indptr[nodes + 1] - starts
        if self.replace:
            counts = np.where(degrees > 0, fanout, 0)
        else:
            counts = degrees if fanout == ALL else np.minimum(degrees, fanout)
        num_edges = int(counts.sum())
        if num_edges > MAX_EDGES:
            raise LimitExceeded(
                f"a hop from {len(nodes)} nodes has {num_edges} edges, more than {MAX_EDGES}; lower "
                f"fanouts={self.fanouts} or use smaller batches",
                field="fanouts",
            )
        if self.replace:
            positions = np.repeat(starts, counts)
            positions += (rng.random(num_edges) * np.repeat(degrees, counts)).astype(np.int64)
        else:
            positions = _first_and_drawn(starts, degrees, counts, fanout, rng)
        return self.graph.indices[positions].astype(np.int64, copy=False), counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": []}


def _first_and_drawn(starts: Ints, degrees: Ints, counts: Ints, fanout: int, rng: np.random.Generator) -> Ints:
    """Return positions of all neighbors where a node has few, and of `fanout` drawn ones where it has more."""
    slots = np.cumsum(counts) - counts
    positions = np.repeat(starts - slots, counts)
    positions += np.arange(len(positions))
    many = np.flatnonzero(degrees > counts)
    if len(many):
        chosen = draw_subsets(degrees[many], fanout, rng)
        positions[slots[many] + np.arange(fanout)[:, None]] = starts[many] + chosen
    return positions


def draw_subsets(counts: Ints, size: int, rng: np.random.Generator) -> Ints:
    """Draw `size` different numbers below each count: `[size, counts]`, every subset with the same probability.

    This is Floyd's algorithm for all counts at once. Its time does not depend on the counts, so a node with a million
    neighbors costs as much as any other.
    """
    chosen = np.empty((size, len(counts)), np.int64)
    draws = rng.random(chosen.shape)
    for taken in range(size):
        last = counts - (size - taken)
        draw = (draws[taken] * (last + 1)).astype(np.int64)
        is_taken = (chosen[:taken] == draw).any(axis=0)
        chosen[taken] = np.where(is_taken, last, draw)
    return chosen


def _relabel(table: npt.NDArray[np.int32], neighbors: Ints, num_nodes: int) -> tuple[npt.NDArray[np.int32], Ints]:
    """Return the local ids of neighbors, and the nodes among them that had none yet, in the order of their new ids.

    `table` holds the local id + 1 of every node, 0 for none.
    """
    local = table[neighbors]
    unseen = np.flatnonzero(local == 0)
    candidates = neighbors[unseen]
    # Every candidate writes its position; of those that are one node, one remains and stands for the node.
    order = np.arange(len(candidates), dtype=np.int32)
    table[candidates] = order
    found = candidates[table[candidates] == order]
    table[found] = np.arange(num_nodes + 1, num_nodes + 1 + len(found))
    local[unseen] = table[candidates]
    return local - 1, found
