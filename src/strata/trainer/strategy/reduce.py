"""The all-reduce algorithms: each replaces a flat tensor on every rank by the sum over all ranks.

Ring is torch's own all-reduce. Group and torus split it into stages over the rows and columns of a grid (see
`topology.py`), so that few or small messages travel between nodes. Calls block until the result is complete; `lane.py`
takes them off the training thread. All ranks end with the same bits, because every element is summed in one place and
then copied.

`Averager` is what callers use: it scales, casts and pads a tensor, sums it, and writes the mean back.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from strata.trainer.strategy.topology import Grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from strata.trainer.strategy.cost import Choice


class Algorithm(Protocol):
    """Sums flat, contiguous tensors whose number of elements is a multiple of `multiple_of`."""

    multiple_of: int

    def sum_(self, flat: Tensor) -> None: ...


class Ring:
    """Torch's own all-reduce over all ranks. Also sums sparse tensors, of which gloo gathers all rows."""

    multiple_of = 1

    def __init__(self) -> None:
        self._group = make_world_copy()

    def sum_(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group)


class Group:
    """Reduces each row at its leader, all-reduces over the leaders, and broadcasts within each row.

    Between nodes, only the leaders talk: one connection per node, however many ranks it has.
    """

    def __init__(self, grid: Grid, rank: int) -> None:
        self.multiple_of = grid.group_size
        self._leader = grid.row(rank)[0]
        self._is_leader = rank == self._leader
        self._groups = make_groups(grid, rank)
        self._scatter = ReduceScatter(self._groups.row, grid.group_size)

    def sum_(self, flat: Tensor) -> None:
        chunk = self._scatter.sum(flat)
        parts = list(flat.chunk(self.multiple_of)) if self._is_leader else None
        dist.gather(chunk, parts, self._leader, group=self._groups.row)
        if self._is_leader:
            dist.all_reduce(flat, group=self._groups.column)  # the first column consists of the leaders
        dist.broadcast(flat, self._leader, group=self._groups.row)


class Torus:
    """Reduce-scatters within each row, all-reduces each chunk along its column, and all-gathers within each row.

    All ranks of a node send to other nodes at once, each its own chunk.
    """

    def __init__(self, grid: Grid, rank: int) -> None:
        self.multiple_of = grid.group_size
        self._groups = make_groups(grid, rank)
        self._scatter = ReduceScatter(self._groups.row, grid.group_size)

    def sum_(self, flat: Tensor) -> None:
        chunk = self._scatter.sum(flat)
        dist.all_reduce(chunk, group=self._groups.column)
        _all_gather(flat, chunk, group=self._groups.row)


class ReduceScatter:
    """Gives each rank of a group the sum of one chunk.

    Ranks exchange chunks directly and add them in rank order. Gloo's own `reduce_scatter` is an all-reduce of the whole
    tensor, with twice the bytes; its `reduce` sends up to 1.6 times as much as this and a gather.
    """

    def __init__(self, group: dist.ProcessGroup, group_size: int) -> None:
        self._group = group
        self._group_size = group_size
        self._received = Scratch()
        self._chunk = Scratch()

    def sum(self, flat: Tensor) -> Tensor:
        """Return this rank's chunk, valid until the next call."""
        received = self._received.take(flat.numel(), like=flat)
        dist.all_to_all_single(received, flat, group=self._group)
        chunk = self._chunk.take(flat.numel() // self._group_size, like=flat)
        first, second, *others = received.chunk(self._group_size)
        torch.add(first, second, out=chunk)
        for other in others:
            chunk.add_(other)
        return chunk


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, or before."""


def make_algorithm(choice: Choice, *, rank: int, world_size: int) -> Algorithm:
    """Create an algorithm and its process groups. Collective."""
    if choice.algorithm == "ring":
        return Ring()
    grid = Grid(world_size=world_size, group_size=choice.group_size)
    return Group(grid, rank) if choice.algorithm == "group" else Torus(grid, rank)


class Bucket(Protocol):
    """What DDP hands to a communication hook: the gradients of some parameters, in one flat tensor or sparse."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


class BucketAverager(Protocol):
    """Replaces the gradients of DDP's buckets by their mean over all ranks."""

    def average_bucket_(self, bucket: Bucket) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Averager:
    """Replaces tensors by their mean over all ranks."""

    def __init__(
        self, algorithm: Algorithm, world_size: int, *, wire: torch.dtype | None = None, sparse: Algorithm | None = None
    ) -> None:
        """`wire`: type in which larger floating-point types are sent and summed; `sparse`: for sparse tensors."""
        self._algorithm = algorithm
        self._sparse = sparse or algorithm
        self._world_size = world_size
        self._wire = wire
        self._packed = Scratch()

    def average_(self, flat: Tensor) -> None:
        """Average a flat, contiguous tensor in place, or a sparse one."""
        if flat.is_sparse:
            # Ranks hold different rows, so there are no equal chunks, and too few bytes to gain from a cast.
            self._sparse.sum_(flat.mul_(1 / self._world_size))
            return
        packed = self._pack(flat)
        self._algorithm.sum_(packed)
        if packed is not flat:
            flat.copy_(packed[: flat.numel()])

    def average_bucket_(self, bucket: Bucket) -> None:
        self.average_(bucket.buffer())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state of another averager: this one has none."""

    def _pack(self, flat: Tensor) -> Tensor:
        """Divide by the world size, which must come first or 16-bit sums overflow; cast and pad in the same pass."""
        scale = 1 / self._world_size
        dtype = flat.dtype
        if self._wire is not None and dtype.is_floating_point and dtype.itemsize > self._wire.itemsize:
            dtype = self._wire
        size, unit = flat.numel(), self._algorithm.multiple_of
        padded_size = -(-size // unit) * unit
        if dtype == flat.dtype and padded_size == size:
            return flat.mul_(scale)
        packed = self._packed.take(padded_size, like=flat, dtype=dtype)
        torch.mul(flat, scale, out=packed[:size])
        packed[size:].zero_()
        return packed


class Scratch:
    """A buffer for each data type and device that grows to the largest request and is reused."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, num_elements: int, *, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a flat tensor with undefined contents, valid until the next call."""
        key = (dtype or like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < num_elements:
            held = self._held[key] = torch.empty(num_elements, dtype=key[0], device=key[1])
        return held[:num_elements]


class Groups(NamedTuple):
    """The process groups of this rank's row and column."""

    row: dist.ProcessGroup
    column: dist.ProcessGroup


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Grid, Groups]] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""Groups cost connections and threads until the process group is destroyed, so each one is created once."""


def world() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "bind checks that it exists"
    return group


def make_world_copy() -> dist.ProcessGroup:
    """Return a process group of all ranks for a lane alone. Collective on the first call.

    The training thread uses the original at the same time: DDP exchanges which parameters were used, for example.
    """
    if world() not in _copies:
        _copies[world()] = dist.new_group()
    return _copies[world()]


def make_groups(grid: Grid, rank: int) -> Groups:
    """Return the process groups of a grid. Collective on the first call: rows first, then columns, on all ranks."""
    of_world = _groups.setdefault(world(), {})
    if grid not in of_world:
        of_world[grid] = Groups(
            row=dist.new_group(grid.row(rank), use_local_synchronization=True),
            column=dist.new_group(grid.column(rank), use_local_synchronization=True),
        )
    return of_world[grid]
