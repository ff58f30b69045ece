"""How a Trainer uses torchrec: which tables it shards, how they are updated, and the way back into a plain module."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from torch import nn

from strata.errors import ConfigError, InvalidArgument
from strata.launch.spec import Size
from strata.servers.table.optimizers import SGD, Adagrad, RowWiseAdagrad
from strata.trainer.optimizer import FTRL
from strata.trainer.optimizer import build as build_optimizer
from strata.trainer.optimizer.rows import ParameterGroup, group_of, release
from strata.trainer.resumption import ModuleWithout
from strata.trainer.strategy.embedding_collections import find
from strata.trainer.strategy.parameter_server import torch_rec_of
from strata.trainer.strategy.replicas import Alone, broadcast_from_first
from strata.trainer.strategy.torch_rec import FUSED, check_plan, default_places

if TYPE_CHECKING:
    from strata.checkpoint import CheckpointManager
    from strata.identity import Identity
    from strata.servers.table.optimizers import RowOptimizer
    from strata.train.context import Context
    from strata.trainer.config import Settings
    from strata.trainer.strategy.base import Bound
    from strata.trainer.strategy.embedding_collections import Collection
    from strata.trainer.strategy.torch_rec import TorchRec
    from strata.trainer.strategy.torch_rec_shards import Updates
    from strata.trainer.trainer import Trainer

log = logging.getLogger(__name__)

BLOCK_COLUMNS = 4
"""Width of the blocks in which fbgemm updates rows, in columns."""
LARGEST_SHARE = 0.9
"""Share of the available memory that a table may need."""
PATH = "trainer.strategy.tables"
"""Where checkpoints keep the tables."""
_BY_WEIGHT = (
    *(torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.RMSprop, FTRL),
)
"""Optimizers that treat every weight on its own, so that shards make the steps of the whole table."""


def check(trainer: Trainer) -> None:
    """Find what cannot work with torchrec, before workers start.

    Raises:
        InvalidArgument, ConfigError: An argument does not fit; the message names the cure.
    """
    strategy = torch_rec_of(trainer.strategy)
    assert strategy is not None
    _check_settings(trainer.settings)
    optimizer = build_optimizer(trainer.optimizer, trainer.module, trainer.optimizer_args)
    found = find(trainer.module, strategy.tables, min_bytes=strategy.min_bytes, plan=strategy.plan)
    size = Size.parse(str(trainer.workers))
    _check_plan(strategy, found, size.at_least if size.at_least == size.at_most else None)
    for each in found:
        _fused(each, strategy, _group(each, optimizer), trainer.settings)


def _check_settings(settings: Settings) -> None:
    refused = {
        "clip_norm": (
            settings.clip_norm is not None,
            "the norm of all gradients is known to no worker; use clip_value",
        ),
        "ema": (settings.ema is not None, "rows of sharded tables are not averaged"),
        "precision": (settings.precision == "fp16", "tables receive unscaled gradients; use 'bf16' or 'fp32'"),
        "on_nan": (settings.on_nan != "raise", "tables may be updated in the backward pass; use 'raise'"),
        "compile": (bool(settings.compile), "a sharded table exchanges ids with other workers; leave it out"),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigError(f"{name}={getattr(settings, name)!r} does not work with TorchRec: {reason}", field=name)


def _check_plan(strategy: TorchRec, found: list[Collection], world_size: int | None) -> None:
    if strategy.plan is None:
        return
    tables = {each.place: list(each.tables) for each in found}
    check_plan(strategy.plan, tables, world_size, is_rowwise=isinstance(strategy.optimizer, RowWiseAdagrad))


def _group(collection: Collection, optimizer: torch.optim.Optimizer) -> ParameterGroup:
    """Return the optimizer group of the tables of a collection.

    Raises:
        InvalidArgument: They are in different groups.
    """
    groups = [
        group_of(optimizer, weight, collection.parameter_name(table)) for table, weight in collection.tables.items()
    ]
    if len({group.number for group in groups}) > 1:
        raise InvalidArgument(
            f"the tables of {collection.place} are in different groups of the optimizer, and torchrec updates them "
            "together; put them into one group, or into several collections",
            field="optimizer",
        )
    return groups[0]


def _fused(
    collection: Collection, strategy: TorchRec, group: ParameterGroup, settings: Settings
) -> RowOptimizer | None:
    """Return the optimizer with which torchrec updates a collection in the backward pass; None: with one of torch.

    Raises:
        InvalidArgument: The strategy or its plan demands fused updates, which are not possible; or the optimizer does
            not treat every weight on its own.
    """
    chosen, reason = _fusable(collection, strategy, group, settings)
    planned = (
        [] if strategy.plan is None else [each.compute_kernel for each in strategy.plan.plan[collection.place].values()]
    )
    is_demanded = strategy.optimizer is not None or FUSED in planned
    if chosen is None and is_demanded:
        demand = "optimizer=" if strategy.optimizer is not None else "the kernel 'fused' of plan="
        raise InvalidArgument(
            f"{demand} cannot update {collection.place} in the backward pass: {reason}", field="sparse"
        )
    is_dense = chosen is None or any(kernel != FUSED for kernel in planned)
    if is_dense and group.kind not in _BY_WEIGHT:
        raise InvalidArgument(
            f"{group.kind.__name__} does not update each weight independently, or needs sparse gradients, so it cannot "
            f"update the shards of {collection.place}; use SGD, Adagrad, Adam or FTRL, for example, or give this "
            "parameter its own optimizer with OptimizerStack",
            field="optimizer",
        )
    if chosen is None:
        log.info("%s is updated after the backward pass, by %s: %s", collection.place, group.kind.__name__, reason)
    return chosen


def _fusable(
    collection: Collection, strategy: TorchRec, group: ParameterGroup, settings: Settings
) -> tuple[RowOptimizer | None, str]:
    """Return the optimizer for fused updates, or None and the reason why there is none."""
    if not strategy.fused:
        return None, "fused=False"
    if settings.accumulate > 1:
        return None, f"accumulate={settings.accumulate} has several backward passes in a step; use accumulate=1"
    if settings.clip_value is not None:
        return None, "clip_value= changes gradients after the backward pass; leave it out"
    uneven = [weight.shape[1] for weight in collection.tables.values() if weight.shape[1] % BLOCK_COLUMNS]
    if uneven:
        return None, f"a table has {uneven[0]} columns, which is not a multiple of {BLOCK_COLUMNS}"
    chosen = strategy.optimizer
    if chosen is None:
        with contextlib.suppress(InvalidArgument):
            chosen = group.row_optimizer(collection.place)
    is_plain = not getattr(chosen, "lr_decay", 0.0) and not getattr(chosen, "initial_accumulator_value", 0.0)
    if not isinstance(chosen, SGD | Adagrad | RowWiseAdagrad) or not is_plain:
        return None, "torchrec has no fused version of the optimizer with these settings on CPUs"
    return chosen, ""


# -- workers -------------------------------------------------------------------------------------------------------


def bind(trainer: Trainer, optimizer: torch.optim.Optimizer, ranks: Identity, ctx: Context) -> Bound:
    """Shard the tables over the workers and bind the rest. Collective."""
    from strata.trainer.strategy.sharded import Sharded  # noqa: PLC0415
    from strata.trainer.strategy.torch_rec_shards import ShardedTables, import_torchrec  # noqa: PLC0415

    strategy, module = torch_rec_of(trainer.strategy), trainer.module
    assert strategy is not None
    if ctx.device.type != "cpu":
        raise ConfigError(f"TorchRec shards tables on CPUs, and this worker uses {ctx.device}", field="strategy")
    import_torchrec()
    is_ours = not dist.is_initialized()
    if is_ours:  # of a single worker
        ctx.init_process_group()
    group = dist.new_group(backend="gloo")
    found = find(module, strategy.tables, min_bytes=strategy.min_bytes, plan=strategy.plan)
    _check_plan(strategy, found, ranks.world_size)
    sizes = {each.parameter_name(table): weight.nbytes for each in found for table, weight in each.tables.items()}
    places = default_places(sizes, ranks.world_size)
    groups = {each.place: _group(each, optimizer) for each in found}
    weights = [weight for each in found for weight in each.tables.values()]
    release(optimizer, weights)
    broadcast_from_first(weight for weight in weights if not weight.is_meta)
    sharded = [
        ShardedTables(
            each,
            _updates(each, strategy, groups[each.place], trainer.settings),
            plan=None if strategy.plan is None else strategy.plan.plan[each.place],
            places={table: places[each.parameter_name(table)] for table in each.tables},
            group=group,
        )
        for each in found
    ]

    def bind_rest(rest: nn.Module) -> Bound:
        has_own = any(parameter.requires_grad for parameter in rest.parameters())
        return trainer.strategy.dense.bind(rest, ranks) if has_own else Alone(rest)  # type: ignore[union-attr]

    def leave() -> None:
        if is_ours:
            dist.destroy_process_group()

    return Sharded(module, sharded, bind=bind_rest, leave=leave)


def _updates(collection: Collection, strategy: TorchRec, group: ParameterGroup, settings: Settings) -> Updates:
    from strata.trainer.strategy.torch_rec_shards import Updates  # noqa: PLC0415

    own = strategy.optimizer
    return Updates(
        fused=_fused(collection, strategy, group, settings),
        rate=lambda: group.rate if own is None else group.scaled(own.lr),
        optimizer_of=group.optimizer_of,
        renew=group.renew,
        clip_value=settings.clip_value,
    )


# -- back into a plain module --------------------------------------------------------------------------------------


def load_weights(trainer: Trainer, manager: CheckpointManager, chosen: str | None) -> None:
    """Load a checkpoint into the plain module, with all rows. A table without values that is larger than the memory of
    this machine stays in the checkpoint.
    """
    strategy = torch_rec_of(trainer.strategy)
    assert strategy is not None
    found = find(trainer.module, strategy.tables, min_bytes=strategy.min_bytes, plan=strategy.plan)
    names = {each.parameter_name(table) for each in found for table in each.tables}
    used = manager.restore({"module": ModuleWithout(trainer.module, names)}, id=chosen)
    for each in found:
        for table, weight in each.tables.items():
            if weight.is_meta and weight.nbytes > psutil.virtual_memory().available * LARGEST_SHARE:
                log.warning("%s.%s is larger than memory and stays in the checkpoint", each.place, table)
                continue
            name = each.parameter_name(table)
            state = manager.load(id=used.id, only=[f"{PATH}.{name}.rows"])
            rows = state["trainer"]["strategy"]["tables"][name]["rows"]
            if weight.is_meta:
                each.put(table, nn.Parameter(rows))
            else:
                weight.data.copy_(rows)
