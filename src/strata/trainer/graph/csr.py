"""A graph as two arrays: compressed sparse rows.

Row v lists the nodes that send messages to v, that is, the sources of the edges into v. Sampling starts at the targets
of messages, so this is the direction in which a graph is read.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from strata.errors import InvalidArgument
from strata.trainer.graph.mapped import from_pickle, plain, to_pickle

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MAX_NODES = 2**31 - 1
"""Two node ids then fit into one 64-bit key."""


class Graph:
    """A directed graph: the edges into node v come from `indices[indptr[v]:indptr[v + 1]]`.

    The arrays are used as they are, without a copy. They may be memory maps, `np.load(path, mmap_mode="r")`, of graphs
    larger than memory; a pickled graph then holds their paths.
    """

    indptr: npt.NDArray[np.integer[Any]]
    indices: npt.NDArray[np.integer[Any]]

    def __init__(self, indptr: npt.ArrayLike, indices: npt.ArrayLike, *, num_nodes: int | None = None) -> None:
        """
        Raises:
            InvalidArgument: The arrays are not those of a graph with this number of nodes.
        """
        self.indptr = _integers(indptr, "indptr")
        self.indices = _integers(indices, "indices")
        self._check(num_nodes)

    @classmethod
    def from_edges(
        cls,
        sources: npt.ArrayLike,
        targets: npt.ArrayLike,
        num_nodes: int,
        *,
        undirected: bool = False,
        coalesce: bool = True,
    ) -> Self:
        """Return the graph of edges from `sources[i]` to `targets[i]`.

        `undirected=True` adds every edge in the other direction as well. With `coalesce=True`, edges that occur several
        times are kept once. Rows are sorted, so the order of the edges does not matter.

        Raises:
            InvalidArgument: The arrays differ in length, or a node is outside 0 to `num_nodes` - 1.
        """
        _check_num_nodes(num_nodes)
        heads, tails = _integers(sources, "sources"), _integers(targets, "targets")
        if len(heads) != len(tails):
            raise InvalidArgument(
                f"there are {len(heads)} sources and {len(tails)} targets; pass one of each per edge", field="targets"
            )
        for name, nodes in (("sources", heads), ("targets", tails)):
            check_nodes(nodes, num_nodes, name)
        keys = tails.astype(np.int64) * num_nodes + heads
        if undirected:
            apart = heads != tails
            keys = np.concatenate([keys, heads[apart].astype(np.int64) * num_nodes + tails[apart]])
        keys.sort()
        if coalesce and len(keys):
            keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        rows, indices = np.divmod(keys, max(num_nodes, 1))
        indptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=num_nodes), out=indptr[1:])
        return cls(indptr, indices, num_nodes=num_nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @property
    def degrees(self) -> Ints:
        """The number of edges into each node."""
        return np.diff(self.indptr).astype(np.int64, copy=False)

    def neighbors(self, node: int) -> npt.NDArray[np.integer[Any]]:
        """Return the sources of the edges into a node."""
        return self.indices[self.indptr[node] : self.indptr[node + 1]]

    def edge_index(self) -> Ints:
        """Return all edges as (source, target), int64 `[2, edges]`: the whole graph for one forward pass."""
        return np.stack([self.indices.astype(np.int64), np.repeat(np.arange(self.num_nodes), self.degrees)])

    def __repr__(self) -> str:
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges})"

    def __getstate__(self) -> dict[str, Any]:
        return {"indptr": to_pickle(self.indptr), "indices": to_pickle(self.indices)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.indptr = from_pickle(state["indptr"])
        self.indices = from_pickle(state["indices"])

    def _check(self, num_nodes: int | None) -> None:
        indptr = self.indptr
        if len(indptr) == 0 or indptr[0] != 0:
            raise InvalidArgument("indptr must start with 0; pass num_nodes + 1 offsets", field="indptr")
        _check_num_nodes(self.num_nodes)
        if num_nodes is not None and num_nodes != self.num_nodes:
            raise InvalidArgument(
                f"indptr has {len(indptr)} offsets, but num_nodes={num_nodes} nodes need {num_nodes + 1}",
                field="indptr",
            )
        if (indptr[1:] < indptr[:-1]).any():
            node = int(np.argmax(indptr[1:] < indptr[:-1]))
            raise InvalidArgument(
                f"indptr decreases from {indptr[node]} to {indptr[node + 1]} at node {node}; offsets must not decrease",
                field="indptr",
            )
        if indptr[-1] != len(self.indices):
            raise InvalidArgument(
                f"indptr ends with {indptr[-1]}, but there are {len(self.indices)} indices; both count the edges",
                field="indptr",
            )
        check_nodes(self.indices, self.num_nodes, "indices")


def check_nodes(nodes: npt.NDArray[Any], num_nodes: int, name: str) -> None:
    """Check that all node ids exist.

    Raises:
        InvalidArgument: The message names one that does not.
    """
    if len(nodes) and not (nodes.min() >= 0 and nodes.max() < num_nodes):
        wrong = nodes.min() if nodes.min() < 0 else nodes.max()
        raise InvalidArgument(
            f"{name} has node {wrong}, but the graph has {num_nodes} nodes, from 0 to {num_nodes - 1}", field=name
        )


def node_ids(values: npt.ArrayLike, num_nodes: int, name: str) -> Ints:
    """Return node ids as a one-dimensional array of their own.

    Raises:
        InvalidArgument: They are something else, such as a mask, or a node does not exist.
    """
    array: npt.NDArray[Any] = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name} must be one row of node ids, not {array.dtype} of shape {list(array.shape)}; for a mask of nodes, "
            "pass np.flatnonzero(mask)",
            field=name,
        )
    check_nodes(array, num_nodes, name)
    return array.astype(np.int64)


def _check_num_nodes(num_nodes: int) -> None:
    if not 0 <= operator.index(num_nodes) <= MAX_NODES:
        raise InvalidArgument(f"num_nodes={num_nodes} must be from 0 to {MAX_NODES}", field="num_nodes")


def _integers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.integer[Any]]:
    """Return a one-dimensional array of signed integers, without a copy if it is one."""
    array: npt.NDArray[Any] = np.asanyarray(values)
    if array.ndim == 1 and len(array) == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} must be one row of integers, not {array.dtype} of shape {list(array.shape)}", field=name
        )
    return plain(array.astype(np.int64) if array.dtype.kind == "u" else array)
