"""The tables of one collection as torchrec shards them: this worker's shards, their updates and their state.

A *fused* table is updated by torchrec during the backward pass. A *dense* table gets a gradient as large as its shard,
which an optimizer of torch applies afterwards.

A worker describes each table of the collection in its state, even if it has no rows of it: whoever loads the checkpoint
with another number of workers then finds every table in the state of any worker.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.checkpoint import Shard
from strata.errors import InvalidArgument
from strata.servers.table.initial import Initial
from strata.servers.table.optimizers import SGD, Adagrad, RowWiseAdagrad
from strata.trainer.strategy.embedding_collections import BAGS, WEIGHT
from strata.trainer.strategy.torch_rec import DENSE, FUSED, ROW_WISE, TABLE_WISE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.servers.table.optimizers import RowOptimizer
    from strata.trainer.strategy.embedding_collections import Collection
    from strata.trainer.strategy.torch_rec import Place

CHUNK_ROWS = 1 << 16
"""Rows whose initial values are computed at a time."""
_OWN_WARNINGS = (
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not registered",
)
"""Beginnings of warnings of torch about calls of torchrec and fbgemm."""
SUM = "sum"
"""Name of Adagrad's state, as in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How the tables of a collection are updated."""

    fused: RowOptimizer | None
    """None: by an optimizer of torch, after the backward pass."""
    rate: Callable[[], float]
    """Returns the current learning rate of fused updates."""
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    renew: Callable[[torch.optim.Optimizer], None]
    """Gives the current settings, which a schedule changes, to such an optimizer."""
    clip_value: float | None = None


class ShardedTable:
    """This worker's shard of a table; empty if the worker has none."""

    def __init__(self, name: str, shape: tuple[int, int], start: tuple[int, int], local: Tensor) -> None:
        self.name = name
        self.shape = shape
        self.start = start
        self.local = local
        """The rows themselves, not a copy."""

    def fill(self, weight: Tensor) -> None:
        """Take the rows of a whole table, or initial values that depend on the row alone if it has none."""
        rows, columns = (slice(at, at + size) for at, size in zip(self.start, self.local.shape, strict=True))
        if not weight.is_meta:
            self.local.copy_(weight.detach()[rows, columns])
            return
        for first in range(rows.start, rows.stop, CHUNK_ROWS):
            values = initial_values(first, min(first + CHUNK_ROWS, rows.stop), self.shape[1])
            self.local[first - rows.start : first - rows.start + len(values)] = values[:, columns]

    def shard(self, value: Tensor) -> Shard:
        """Describe a tensor of this shard: one number per weight, or one per row."""
        return Shard(value, shape=self.shape[: value.dim()], start=self.start[: value.dim()])

    def own(self, value: Tensor, *, like: Tensor | None = None) -> Tensor:
        """Return this shard's part of a saved tensor, of which only that part may have been loaded.

        Raises:
            InvalidArgument: The tensor was saved for a table of another shape.
        """
        wanted = self.local if like is None else like
        if value.shape == wanted.shape:
            return value
        if tuple(value.shape) != self.shape[: value.dim()]:
            raise InvalidArgument(
                f"the table {self.name} has the shape {tuple(value.shape)} in the checkpoint and {self.shape} in the "
                "module; pass the module of the earlier fit",
                field="module",
            )
        places = zip(self.start, wanted.shape, strict=False)
        return value[tuple(slice(at, at + size) for at, size in places)].clone()


class ShardedTables:
    """The sharded tables of one collection."""

    def __init__(
        self,
        collection: Collection,
        updates: Updates,
        *,
        plan: Any,
        places: Mapping[str, Place],
        group: dist.ProcessGroup,
    ) -> None:
        """Collective.

        Args:
            plan: torchrec's plan for this module; None: by `places`.
            places: Where each table of the collection goes by default.
            group: A process group that nothing else uses; otherwise the order of collectives could differ by rank.
        """
        self.collection = collection
        self._updates = updates
        self._group = group
        bags = _bags(collection)
        configs = {each.name: each for each in bags.embedding_bag_configs()}
        self._num_rows = {feature: one.num_embeddings for one in configs.values() for feature in one.feature_names}
        self._is_weighted = bags.is_weighted()
        self._sharded, kernels, kinds = _shard(bags, updates.fused, plan, places, group)
        self._needs_equal_batches = dist.get_world_size(group) > 1 and ROW_WISE in kinds
        self.tables = [self._table(table, config) for table, config in configs.items()]
        for table, weight in zip(self.tables, collection.tables.values(), strict=True):
            table.fill(weight)
        self._fused = [each for each, kernel in zip(self.tables, kernels, strict=True) if kernel == FUSED]
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        dense = [each for each, kernel in zip(self.tables, kernels, strict=True) if kernel == DENSE]
        if dense:
            self._parameters = {each.name: nn.Parameter(each.local) for each in dense}
            self._optimizer = updates.optimizer_of(list(self._parameters.values()))
        self._num_uses = 0
        self._rate = updates.rate()

    def _table(self, table: str, config: Any) -> ShardedTable:
        name, shape = self.collection.parameter_name(table), (config.num_embeddings, config.embedding_dim)
        local = self._sharded.state_dict()[_key(table)].local_shards()
        if not local:
            return ShardedTable(name, shape, (0, 0), torch.empty(0, config.embedding_dim))
        first, second = local[0].metadata.shard_offsets
        return ShardedTable(name, shape, (first, second), local[0].tensor.detach())

    # -- a step ----------------------------------------------------------------------------------------------------

    def pooled(self, features: Any) -> Any:
        """Return the KeyedTensor for a KeyedJaggedTensor. Collective.

        Raises:
            InvalidArgument: An id is outside its table, or the step cannot be made with fused updates.
        """
        self._check(features)
        if torch.is_grad_enabled():
            self._begin_use()
        with _normal_mode():
            num_bags = features.stride()
            found = self._sharded(self._prepared(features, num_bags)).wait()
            return found if found.values().shape[0] == num_bags else _first_bags(found, num_bags)

    def _begin_use(self) -> None:
        self._num_uses += 1
        if self._num_uses > 1 and self._fused and not isinstance(self._updates.fused, SGD):
            raise InvalidArgument(
                f"{self.collection.place} is called several times in one step, and fused updates would count its "
                "gradients as several steps; use TorchRec(fused=False), or one call with several features",
                field="fused",
            )
        rate = self._updates.rate()
        if self._fused and rate != self._rate:
            optimizer = self._sharded.fused_optimizer
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()  # which sets the learning rate, and nothing else
            self._rate = rate

    def _check(self, features: Any) -> None:
        if features.variable_stride_per_key():
            raise InvalidArgument(
                f"the keys of a KeyedJaggedTensor for {self.collection.place} have different batch sizes; give all "
                "keys one bag per row",
                field="data",
            )
        weights = features.weights_or_none() if self._is_weighted else None
        if weights is not None and weights.requires_grad:
            raise InvalidArgument(
                f"the weights of the ids for {self.collection.place} require a gradient, which torchrec does not "
                "return; detach them, or use ParameterServer()",
                field="module",
            )
        ends = features.offset_per_key()
        for number, feature in enumerate(features.keys()):
            ids = features.values()[ends[number] : ends[number + 1]]
            most = self._num_rows.get(feature)
            if most is None or not ids.numel():
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= most:
                raise InvalidArgument(
                    f"id {low if low < 0 else high} of {feature} is outside the table of {self.collection.place}, "
                    f"which has {most} rows (0 to {most - 1}); enlarge the table, or fit a vocabulary with SparseFeat "
                    "in features=",
                    field="data",
                )

    def _prepared(self, features: Any, num_bags: int) -> Any:
        """Return the features, with empty bags up to the largest batch of a worker if a table is split by rows:
        gloo gathers only tensors of one size.
        """
        weights = features.weights_or_none()
        most = num_bags
        if self._needs_equal_batches:
            largest = torch.tensor([num_bags])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            most = int(largest)
        if most == num_bags and self._is_weighted == (weights is not None):
            return features
        keys = features.keys()
        lengths = nn.functional.pad(features.lengths().view(len(keys), num_bags), (0, most - num_bags))
        return type(features)(
            keys, features.values(), weights if self._is_weighted else None, lengths=lengths.reshape(-1)
        )

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of dense tables, and begin a new step."""
        num_uses, self._num_uses = self._num_uses, 0
        if self._optimizer is None or not num_uses:
            return
        by_name = dict(self._sharded.named_parameters())
        for table, weight in zip(self.collection.tables, self.tables, strict=True):
            parameter = self._parameters.get(weight.name)
            if parameter is None:
                continue
            # A worker without rows of the table steps too, so that all workers have the same optimizer state.
            found = by_name[_key(table)].grad if weight.local.numel() else torch.zeros_like(parameter)
            parameter.grad = found
            if self._updates.clip_value is not None and found is not None:
                found.clamp_(-self._updates.clip_value, self._updates.clip_value)
        self._updates.renew(self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._sharded.zero_grad(set_to_none=True)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {each.name: {"rows": each.shard(each.local), "state": self._state(each)} for each in self.tables}

    def _state(self, table: ShardedTable) -> dict[str, Any]:
        if table.name not in self._parameters:
            found = self._fused_sum(table)
            return {} if found is None else {SUM: table.shard(found)}
        assert self._optimizer is not None
        state = self._optimizer.state.get(self._parameters[table.name], {})
        return {key: table.shard(value) if _is_per_weight(value, table) else value for key, value in state.items()}

    def _fused_sum(self, table: ShardedTable) -> Tensor | None:
        """Return the sums of a fused Adagrad, not a copy."""
        if isinstance(self._updates.fused, SGD):
            return None
        if not table.local.numel():
            return torch.empty(0) if isinstance(self._updates.fused, RowWiseAdagrad) else torch.empty_like(table.local)
        name = next(key for key in self.collection.tables if self.collection.parameter_name(key) == table.name)
        states = self._sharded.fused_optimizer.state_dict()["state"][_key(name)]
        found: Tensor = states[f"{name}.momentum1"].local_shards()[0].tensor
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidArgument: The state has no such table, one of another shape, or one of another optimizer.
        """
        for table in self.tables:
            if table.name not in state:
                raise InvalidArgument(
                    f"the checkpoint has no table {table.name}; resume with the module and the strategy that saved it",
                    field="strategy",
                )
            saved = state[table.name]
            table.local.copy_(table.own(saved["rows"]))
            self._load(table, saved["state"])

    def _load(self, table: ShardedTable, saved: Mapping[str, Any]) -> None:
        if table.name in self._parameters:
            assert self._optimizer is not None
            own = {
                key: table.own(value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in saved.items()
            }
            self._optimizer.state[self._parameters[table.name]] = own
            return
        found = self._fused_sum(table)
        if (found is None) != (SUM not in saved) or (found is not None and found.dim() != saved[SUM].dim()):
            raise InvalidArgument(
                f"the checkpoint has the optimizer state {', '.join(saved) or 'none'} for {table.name}, which is not "
                f"that of {type(self._updates.fused).__name__}; resume with the optimizer and fused= of the earlier "
                "fit",
                field="optimizer",
            )
        if found is not None:
            found.copy_(table.own(saved[SUM], like=found))


def initial_values(first: int, end: int, width: int) -> Tensor:
    """Return the initial values of some rows of a table without values."""
    import numpy as np  # noqa: PLC0415

    return torch.from_numpy(Initial().values(np.arange(first, end, dtype=np.uint64), width))


def _is_per_weight(value: Any, table: ShardedTable) -> bool:
    return isinstance(value, Tensor) and value.shape == table.local.shape


def _key(table: str) -> str:
    return f"{BAGS}.{table}.{WEIGHT}"


def _first_bags(found: Any, num_bags: int) -> Any:
    return type(found)(found.keys(), found.length_per_key(), found.values()[:num_bags])


@contextlib.contextmanager
def _normal_mode() -> Iterator[None]:
    """Leave inference mode, for which fbgemm has no kernels on CPUs."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# -- torchrec ------------------------------------------------------------------------------------------------------


def import_torchrec() -> None:
    """Import torchrec in a worker, whose log its warnings of its own calls would fill."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec.distributed  # noqa: F401, PLC0415 - slow to import
    for message in _OWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # torchrec warns of every dense table that it would not cache, and torch of a call of torchrec's, in every worker.
    for name in ("torchrec.distributed.utils", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _bags(collection: Collection) -> Any:
    """Return the collection itself, or one over an embedding of torch."""
    if not collection.is_plain:
        return collection.module
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig  # noqa: PLC0415

    embedding = collection.module
    config = EmbeddingBagConfig(
        name=WEIGHT,
        num_embeddings=embedding.num_embeddings,
        embedding_dim=embedding.embedding_dim,
        feature_names=[WEIGHT],
    )
    return EmbeddingBagCollection([config], device=torch.device("meta"))


def _shard(
    bags: Any, fused: RowOptimizer | None, plan: Any, places: Mapping[str, Place], group: dist.ProcessGroup
) -> tuple[Any, list[str], list[str]]:
    """Return the sharded collection, and the kernel and kind of sharding of each table."""
    from torchrec.distributed import DistributedModelParallel  # noqa: PLC0415
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: PLC0415
    from torchrec.distributed.sharding_plan import (  # noqa: PLC0415
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan  # noqa: PLC0415

    sharder = EmbeddingBagCollectionSharder(fused_params={} if fused is None else _fused_settings(fused))
    world_size = dist.get_world_size(group)
    if plan is None:
        kernel = DENSE if fused is None else FUSED
        plan = construct_module_sharding_plan(
            bags,
            {
                table: table_wise(rank=place.rank, compute_kernel=kernel)
                if place.kind == TABLE_WISE
                else row_wise(compute_kernel=kernel)
                for table, place in places.items()
            },
            sharder=sharder,
            world_size=world_size,
            local_size=world_size,
            device_type="cpu",
        )
    parallel = DistributedModelParallel(
        nn.ModuleList([bags]),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    tables = [config.name for config in bags.embedding_bag_configs()]
    return parallel.module[0], [plan[each].compute_kernel for each in tables], [plan[t].sharding_type for t in tables]


def _fused_settings(optimizer: RowOptimizer) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: PLC0415

    if isinstance(optimizer, SGD):
        return {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": optimizer.lr}
    assert isinstance(optimizer, Adagrad | RowWiseAdagrad)
    kind = EmbOptimType.EXACT_ADAGRAD if isinstance(optimizer, Adagrad) else EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return {"optimizer": kind, "learning_rate": optimizer.lr, "eps": optimizer.eps}
