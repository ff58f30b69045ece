"""Ranks that hold the same weights after every step: `DataParallel`, and `Alone` for a single rank.

`DataParallel` is torch's DistributedDataParallel. It cuts the gradients into buckets and hands each one over as soon as
the backward pass has filled it. The ring algorithm without compression is DDP itself; all others are a communication
hook that sends the bucket down a lane.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from strata.trainer.strategy.base import Bound
from strata.trainer.strategy.lane import make_lane
from strata.trainer.strategy.shared_memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from strata.trainer.strategy.cost import Decision
    from strata.trainer.strategy.lane import Future, Lane
    from strata.trainer.strategy.reduce import Bucket, BucketAverager
    from strata.trainer.strategy.shared_memory import Neighbors


class Alone(Bound):
    """A single rank: the module itself, with nothing around it."""

    is_replicated = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def accumulating(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state of another strategy."""


class DataParallel(Bound):
    """Averages gradients during the backward pass."""

    is_replicated = True

    def __init__(
        self,
        module: nn.Module,
        decision: Decision,
        averager: BucketAverager | None,
        *,
        neighbors: Neighbors | None = None,
        bucket_mb: float,
        find_unused_parameters: bool,
        static_graph: bool,
    ) -> None:
        """
        Args:
            averager: Averages buckets; with neither averager nor neighbors, DDP does.
            neighbors: All other ranks, if gradients are averaged in memory that they share.
        """
        self.decision = decision
        self._parallel = DistributedDataParallel(
            module,
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
        )
        self.module: nn.Module = self._parallel
        self._buffers = list(module.buffers())
        self._averager = averager
        self._must_communicate = static_graph
        self._neighbors = neighbors
        if neighbors is not None:
            memory = [torch.from_numpy(slab.array) for slab in neighbors.slabs]
            self._parallel.register_comm_hook(SharedMemory(memory, dist.get_rank(), neighbors), _run_hook)
            return
        if not (static_graph or find_unused_parameters) and dist.get_world_size() > 2:
            rehearse(self._parallel)
        if averager is not None:
            device = next(module.parameters()).device
            self._parallel.register_comm_hook(_Hook(averager, make_lane(device)), _run_hook)

    def accumulating(self) -> AbstractContextManager[None]:
        if self._must_communicate:  # DDP cannot learn a static graph otherwise; a mean may be averaged twice
            self._must_communicate = False
            return contextlib.nullcontext()
        return self._parallel.no_sync()

    def after_step(self, step: int) -> None:
        """Do nothing: the gradients were averaged, so all ranks have made the same step."""

    def finish(self) -> None:
        """Broadcast the buffers of rank 0, as DDP does before every forward pass."""
        broadcast_from_first(self._buffers)

    @property
    def waited_s(self) -> float:
        return 0.0 if self._neighbors is None else self._neighbors.waited_s

    def close(self) -> None:
        """Disconnect from the other ranks of this machine. The module cannot be trained any more."""
        if self._neighbors is not None:
            self._neighbors.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the compression, if it has any."""
        return {} if self._averager is None else self._averager.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the compression. The state of another strategy is ignored."""
        if self._averager is not None:
            self._averager.load_state_dict(state)


class _Hook:
    """Sends buckets down a lane."""

    def __init__(self, averager: BucketAverager, lane: Lane) -> None:
        self._averager = averager
        self._lane = lane

    def submit(self, bucket: Bucket) -> Future:
        return self._lane.submit(lambda: self._averager.average_bucket_(bucket), bucket.buffer())


def _run_hook(hook: _Hook | SharedMemory, bucket: Bucket) -> Future:
    return hook.submit(bucket)


_run_hook.__annotations__ = {}  # DDP compares them with types, and ours are strings


def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by those of rank 0."""
    pending = [dist.broadcast(tensor.detach(), 0, async_op=True) for tensor in tensors]
    for work in pending:
        work.wait()


def rehearse(parallel: DistributedDataParallel) -> None:
    """Run a backward pass that yields zeros, after which DDP forms its final buckets.

    DDP sends the gradients of its first pass in one bucket and forms smaller ones for all others. The order in which an
    all-reduce adds the ranks depends on an element's place in its bucket. Without a rehearsal, the first pass of a
    resumed run would therefore differ in the last bits from the same pass of an uninterrupted run. The final buckets
    follow the order of the parameters, last one first, which is about the order of a backward pass.

    Two ranks need none, because a sum of two has only one order. With `find_unused_parameters`, DDP keeps its first
    buckets; with `static_graph`, it must learn from a real pass, and a resumed run differs in the last bits.
    """
    module = parallel.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
        return  # the user's hooks are for real gradients
    parallel.module = _Touch(module)
    try:
        with torch.enable_grad():
            parallel().backward()
    finally:
        parallel.module = module
    for parameter in parameters:
        parameter.grad = None


class _Touch(nn.Module):
    """Returns a zero that depends on every parameter of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # DDP broadcasts its buffers
        sparse = {id(each.weight) for each in module.modules() if _has_sparse_gradient(each)}
        self._parts = [(p, id(p) in sparse) for p in module.parameters() if p.requires_grad]

    def forward(self) -> Tensor:
        device = self._parts[0][0].device
        total = torch.zeros((), device=device)
        for parameter, is_sparse in self._parts:
            part = functional.embedding(_first_row(parameter), parameter, sparse=True) if is_sparse else parameter
            total = total + part.sum().real.to(device, total.dtype)
        return total * 0


def _first_row(parameter: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.long, device=parameter.device)


def _has_sparse_gradient(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
