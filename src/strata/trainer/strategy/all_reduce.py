"""`AllReduce`: the settings of data-parallel training, and how they become a `Bound`."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strata.errors import InvalidArgument
from strata.trainer.strategy import links, shared_memory, topology
from strata.trainer.strategy.cost import MEMORY, RING, Choice, Decision, decide
from strata.trainer.strategy.local_steps import LocalSteps, OuterStep
from strata.trainer.strategy.power_sgd import PowerSGD, PowerSGDAverager
from strata.trainer.strategy.reduce import Averager, Ring, make_algorithm
from strata.trainer.strategy.replicas import Alone, DataParallel

if TYPE_CHECKING:
    from strata.trainer.strategy.base import Bound, Ranks
    from strata.trainer.strategy.reduce import BucketAverager
    from strata.trainer.strategy.topology import Topology

log = logging.getLogger(__name__)

AlgorithmName = Literal["memory", "ring", "group", "2d", "auto"]
CompressionName = Literal["fp16", "bf16", "powersgd"]
_WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Data-parallel training: every rank has a replica of the module, and the ranks average what they learn."""

    algorithm: AlgorithmName | None = None
    """How sums are computed. `memory`: in memory that all ranks share, which must be on one machine. `ring`: torch's
    own all-reduce. `group`: reduce within a group, all-reduce across groups, broadcast within the group. `2d`:
    reduce-scatter in rows, all-reduce in columns, all-gather in rows. `auto`: measure the links and take the one that a
    cost model predicts to be the fastest. Default: `memory` where it is possible, `ring` otherwise."""
    group_size: int | None = None
    """Ranks of a group or row; must divide the world size. Default: the ranks of a node, or else a grid as square as
    possible."""
    compression: CompressionName | PowerSGD | None = None
    """What is sent instead of 32-bit numbers: 16-bit ones, or low-rank matrices."""
    local_steps: int = 1
    """Optimizer steps between two averages. 1 averages gradients in every step; more average the weights."""
    outer_lr: float = 1.0
    """With `local_steps`: learning rate of the outer optimizer. 1.0 without momentum averages the weights."""
    outer_momentum: float = 0.0
    """With `local_steps`: Nesterov momentum of the outer optimizer; DiLoCo uses 0.9 with `outer_lr=0.7`."""
    bucket_mb: float = 25.0
    """Megabytes of gradients that are sent together."""
    find_unused_parameters: bool = False
    """Look for parameters that took no part in a forward pass; without it, such a parameter is an error."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""

    def __post_init__(self) -> None:
        _require_one_of("algorithm", self.algorithm, (*get_args(AlgorithmName), None))
        if self.compression is not None and not isinstance(self.compression, PowerSGD):
            _require_one_of("compression", self.compression, (*get_args(CompressionName), None))
        if self.group_size is not None and self.algorithm not in ("group", "2d"):
            raise InvalidArgument(
                f"group_size={self.group_size} has no effect with algorithm={self.algorithm!r}; set algorithm to "
                "'group' or '2d', or leave group_size out",
                field="group_size",
            )
        if self.group_size is not None:
            _require_count("group_size", self.group_size, least=2)
        _require_count("local_steps", self.local_steps, least=1)
        for name in ("outer_lr", "outer_momentum", "bucket_mb"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InvalidArgument(
                    f"{name}={value!r} is not a number of 0 or more; set one, or leave it out", field=name
                )
        if not self.bucket_mb:
            raise InvalidArgument("bucket_mb=0 leaves no room for a gradient; the default is 25", field="bucket_mb")
        if self.algorithm == "memory" and (self.compression is not None or self.local_steps > 1):
            raise InvalidArgument(
                "algorithm='memory' sends nothing that compression= or local_steps= could save; leave them out, or "
                "leave algorithm out",
                field="algorithm",
            )
        self._check_outer()

    def _check_outer(self) -> None:
        if self.local_steps == 1 and (self.outer_lr, self.outer_momentum) != (1.0, 0.0):
            raise InvalidArgument(
                f"outer_lr={self.outer_lr} and outer_momentum={self.outer_momentum} need local steps; set local_steps "
                "to 2 or more, or leave both out",
                field="outer_lr" if self.outer_lr != 1.0 else "outer_momentum",
            )
        if not (self.outer_lr > 0 and self.outer_momentum < 1):
            raise InvalidArgument(
                f"outer_lr={self.outer_lr} with outer_momentum={self.outer_momentum} does not converge; use a learning "
                "rate above 0 and a momentum below 1",
                field="outer_lr" if not self.outer_lr > 0 else "outer_momentum",
            )
        if self.local_steps > 1 and self._power_sgd is not None:
            raise InvalidArgument(
                "compression='powersgd' compresses gradients, which local_steps > 1 does not send; use 'fp16' or "
                "'bf16', or local_steps=1",
                field="compression",
            )

    @property
    def _power_sgd(self) -> PowerSGD | None:
        if self.compression == "powersgd":
            return PowerSGD()
        return self.compression if isinstance(self.compression, PowerSGD) else None

    @property
    def _wire(self) -> torch.dtype | None:
        return _WIRE.get(self.compression) if isinstance(self.compression, str) else None

    def bind(self, module: nn.Module, ranks: Ranks) -> Bound:
        """Return the module with its communication. Collective: all ranks call it with the same module.

        Raises:
            InvalidArgument: The module cannot be trained this way, the process group does not match `ranks`, or the
                group size does not divide the world size.
        """
        _check_module(module)
        if ranks.world_size == 1:
            return Alone(module)
        _check_process_group(ranks)
        device = next(module.parameters()).device
        places = _exchange_places(module, ranks, device)
        neighbors = self._connect(module, places, ranks, device)
        if neighbors is not None:
            decision = Decision(choice=MEMORY, reason="all ranks share the memory of one machine")
        else:
            decision = self._decide(module, places, ranks.rank, device)
        if ranks.rank == 0:
            log.info("all-reduce by %s: %s", decision.choice, decision.reason)
        if self.local_steps > 1:
            return self._bind_local(module, decision, self._make_averager(decision.choice, ranks))
        is_ddp_itself = decision.choice in (MEMORY, RING) and self.compression is None
        averager = None if is_ddp_itself else self._make_bucket_averager(module, decision.choice, ranks)
        return DataParallel(
            module,
            decision,
            averager,
            neighbors=neighbors,
            bucket_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )

    def _connect(
        self, module: nn.Module, places: Topology, ranks: Ranks, device: torch.device
    ) -> shared_memory.Neighbors | None:
        """Connect ranks that will average gradients in shared memory; None on all ranks if they will not. Collective.

        Raises:
            InvalidArgument: `algorithm="memory"` is not possible.
        """
        if self.algorithm in ("ring", "group", "2d") or self.compression is not None or self.local_steps > 1:
            return None
        neighbors = None
        if places.num_nodes == 1 and device.type == "cpu":
            weights = [weight for weight in module.parameters() if weight.requires_grad]
            num_bytes = sum(weight.nbytes + shared_memory.ALIGNMENT for weight in weights)
            neighbors = shared_memory.connect(num_bytes, rank=ranks.rank, world_size=ranks.world_size)
        if neighbors is None and self.algorithm == "memory":
            raise InvalidArgument(
                f"algorithm='memory' needs all ranks on one machine, parameters on the CPU and memory for twice their "
                f"gradients; found {places.num_nodes} machines and parameters on {device}, and the log has more. Leave "
                "algorithm out",
                field="algorithm",
            )
        return neighbors

    def _make_averager(self, choice: Choice, ranks: Ranks) -> Averager:
        algorithm = make_algorithm(choice, rank=ranks.rank, world_size=ranks.world_size)
        return Averager(algorithm, ranks.world_size, wire=self._wire, sparse=Ring())

    def _make_bucket_averager(self, module: nn.Module, choice: Choice, ranks: Ranks) -> BucketAverager:
        averager = self._make_averager(choice, ranks)
        if self._power_sgd is None:
            return averager
        return PowerSGDAverager(self._power_sgd, averager, dict(module.named_parameters()), ranks.world_size)

    def _bind_local(self, module: nn.Module, decision: Decision, averager: Averager) -> Bound:
        # A cast weight loses digits for good, a cast difference to the anchor only some of one step's.
        needs_anchor = (self.outer_lr, self.outer_momentum) != (1.0, 0.0) or self._wire is not None
        return LocalSteps(
            module,
            decision,
            averager,
            local_steps=self.local_steps,
            outer=OuterStep(lr=self.outer_lr, momentum=self.outer_momentum) if needs_anchor else None,
            bucket_mb=self.bucket_mb,
        )

    def _decide(self, module: nn.Module, places: Topology, rank: int, device: torch.device) -> Decision:
        """Return the algorithm and the reason for it, the same on all ranks. Collective."""
        if self.algorithm in (None, "ring"):
            return Decision(choice=RING, reason=f"algorithm={self.algorithm!r}")
        if self.algorithm == "auto":
            return decide(self._message_bytes(module), places, links.measure(places, rank, device))
        grid = topology.make_grid(places, self.group_size)
        if grid.is_flat:
            return Decision(
                choice=RING,
                reason=f"{grid.world_size} ranks in rows of {grid.group_size} leave nothing for {self.algorithm!r} to "
                "split",
            )
        return Decision(
            choice=Choice(algorithm=self.algorithm, group_size=grid.group_size),
            reason=f"algorithm={self.algorithm!r}, {places.ranks_per_node} ranks per node",
        )

    def _message_bytes(self, module: nn.Module) -> float:
        """Return the size of a typical message: gradients are sent in buckets of equal size."""
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        total_bytes = sum(weight.nbytes for weight in weights)
        num_buckets = max(round(total_bytes / (self.bucket_mb * 2**20)), 1)
        if self._power_sgd is not None:
            sent_bytes = sum(self._power_sgd.num_elements(weight.shape) * weight.itemsize for weight in weights)
        else:
            itemsize = self._wire.itemsize if self._wire is not None else 8
            sent_bytes = sum(weight.numel() * min(weight.itemsize, itemsize) for weight in weights)
        return sent_bytes / num_buckets


def _require_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name}={value!r} is unknown; use {', '.join(map(repr, known))}", field=name)


def _require_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name}={value!r} is not a whole number of {least} or more; correct it", field=name)


def _check_module(module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        raise InvalidArgument("the module is already wrapped in DistributedDataParallel; pass `module.module`")
    parameters = dict(module.named_parameters())
    lazy = [name for name, parameter in parameters.items() if isinstance(parameter, nn.UninitializedParameter)]
    if lazy:
        raise InvalidArgument(f"parameter {lazy[0]} has no shape yet; run the module once on a batch", field="module")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise InvalidArgument("the module has no parameter that requires a gradient; unfreeze some", field="module")


def _check_process_group(ranks: Ranks) -> None:
    if not dist.is_initialized():
        raise InvalidArgument(
            f"{ranks.world_size} ranks need torch's process group; call context.init_process_group() first",
            field="ranks",
        )
    found = (dist.get_rank(), dist.get_world_size())
    if found != (ranks.rank, ranks.world_size):
        raise InvalidArgument(
            f"torch's process group has rank {found[0]} of {found[1]}, but `ranks` is rank {ranks.rank} of "
            f"{ranks.world_size}; pass the identity that the process group was created with",
            field="ranks",
        )


def _exchange_places(module: nn.Module, ranks: Ranks, device: torch.device) -> Topology:
    """Return where all ranks are. Collective.

    Raises:
        InvalidArgument: The module of a rank differs from that of rank 0.
    """
    shapes = ";".join(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in module.named_parameters())
    digest = xxhash.xxh3_64_intdigest(shapes.encode()) >> 1  # fits into an int64
    own = torch.tensor([ranks.local_rank, ranks.local_world_size, digest], device=device)
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, own)
    local_ranks, sizes, digests = (column.tolist() for column in torch.stack(gathered, dim=1))
    different = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if different:
        raise InvalidArgument(
            f"the module of rank {different[0]} has other parameters than that of rank 0; create the same module on "
            "all ranks",
            field="module",
        )
    return topology.from_local_ranks(local_ranks, sizes)
