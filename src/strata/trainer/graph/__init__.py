"""Graphs for training: neighbor sampling over compressed sparse rows, as a map-style dataset.

`Graph` (in `csr`) holds the edges, `NeighborSampler` draws the subgraph around some seeds, and `NeighborDataset` makes
batches of it for any loader over map-style datasets. `GraphSage` is a network that reads such batches; layers of
torch_geometric work as well. `mapped` keeps graphs and features that are larger than memory in their files.

The folder imports numpy, torch and the errors. It opens no files except those that the caller has mapped,
and leaves the order of rows, ranks and resuming to the loader.
"""

from __future__ import annotations

from strata.trainer.graph.csr import Graph
from strata.trainer.graph.dataset import NeighborDataset
from strata.trainer.graph.sage import GraphSage, SageLayer
from strata.trainer.graph.sampler import NeighborSampler, Subgraph

__all__ = ["Graph", "GraphSage", "NeighborDataset", "NeighborSampler", "SageLayer", "Subgraph"]
