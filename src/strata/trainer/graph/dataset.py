"""Sampled subgraphs as a map-style dataset: a row is a seed, and a batch is the subgraph of its seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strata.errors import InvalidArgument
from strata.trainer.graph.csr import Graph, node_ids
from strata.trainer.graph.mapped import from_pickle, plain, to_pickle
from strata.trainer.graph.sampler import NeighborSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Table = npt.NDArray[Any] | torch.Tensor


class NeighborDataset:
    """Delivers the sampled neighborhood of a batch of seeds as a dictionary of tensors.

    - `nodes`: ids in the graph, the seeds first
    - `edge_index`: `[2, edges]`, local (source, target), as layers of torch_geometric expect it
    - `num_seeds`: the rows of the batch
    - `x`: the features of the nodes, if `features` are given
    - `y`: the labels of the seeds, if `labels` are given

    `features` and `labels` have an entry per node of the graph; arrays may be memory maps. Pass
    `collate_fn=dataset.collate_fn` to a loader. The neighbors follow from numpy's global generator, which Strata's
    loaders seed for every batch: a run that resumes in the middle of an epoch sees the same subgraphs, with any number
    of loader workers.
    """

    def __init__(
        self,
        graph: Graph,
        seeds: npt.ArrayLike,
        *,
        labels: Table | None = None,
        features: Table | None = None,
        fanouts: Sequence[int] = (15, 10),
        replace: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: A seed is not a node, or a table does not have an entry per node.
        """
        self.sampler = NeighborSampler(graph, fanouts, replace=replace)
        self.seeds = node_ids(seeds, graph.num_nodes, "seeds")
        self.labels = _table(labels, graph, "labels")
        self.features = _table(features, graph, "features")

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the batch of these rows."""
        seeds = self.seeds[np.asarray(rows, np.int64)]
        subgraph = self.sampler.sample(seeds, _generator())
        batch: dict[str, Any] = {
            "nodes": torch.from_numpy(subgraph.nodes),
            "edge_index": torch.from_numpy(subgraph.edge_index),
            "num_seeds": subgraph.num_seeds,
        }
        if self.features is not None:
            batch["x"] = _take(self.features, subgraph.nodes)
        if self.labels is not None:
            batch["y"] = _take(self.labels, seeds)
        return batch

    @staticmethod
    def collate_fn(batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch as it is: `__getitems__` has already built it."""
        return batch

    def __getstate__(self) -> dict[str, Any]:
        tables = {name: getattr(self, name) for name in ("labels", "features")}
        arrays = {name: to_pickle(table) for name, table in tables.items() if isinstance(table, np.ndarray)}
        return {**self.__dict__, **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables = {name: from_pickle(state[name]) for name in ("labels", "features")}
        self.__dict__.update({**state, **tables})


def _generator() -> np.random.Generator:
    """Return a generator seeded by numpy's global one, which is seeded for every batch."""
    return np.random.default_rng(np.random.randint(0, 2**32, size=4, dtype=np.uint32))


def _table(table: Table | None, graph: Graph, name: str) -> Table | None:
    if table is None:
        return None
    if not isinstance(table, torch.Tensor):
        table = plain(np.asanyarray(table))
    if table.ndim == 0 or len(table) != graph.num_nodes:
        raise InvalidArgument(
            f"{name} has shape {list(table.shape)}, but the graph has {graph.num_nodes} nodes; pass one entry per node",
            field=name,
        )
    return table


def _take(table: Table, nodes: npt.NDArray[np.int64]) -> torch.Tensor:
    if isinstance(table, torch.Tensor):
        return table[torch.from_numpy(nodes)]
    return torch.from_numpy(table.take(nodes, axis=0))
