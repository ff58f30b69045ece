"""How a Trainer uses parameter servers: what moves to them, the worker's and the server's side of a fit, and the way
back into a plain module.

Workers and servers receive the same job, so both compute the same `Plan` from the module, the optimizer and the
strategy, and nothing about tables is sent.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import torch
from torch import nn

from strata.errors import ConfigError, InvalidArgument
from strata.servers.connection import NUM_PUSHES
from strata.servers.process import SAVED, PartSpec, serve
from strata.servers.table.index import MAX_ROWS
from strata.servers.table.snapshot import Snapshot
from strata.servers.table.table import TableSpec
from strata.train.roles import SAVED_SERVERS
from strata.trainer import sharding
from strata.trainer.history import Result
from strata.trainer.optimizer import build as build_optimizer
from strata.trainer.optimizer.rows import ParameterGroup, group_of, release
from strata.trainer.resumption import ModuleWithout
from strata.trainer.strategy.dense_table import WIDTH, DenseTable
from strata.trainer.strategy.parameter_server import Hybrid, ParameterServer, ServerStrategy, torch_rec_of
from strata.trainer.strategy.replicas import Alone
from strata.trainer.strategy.served import Served
from strata.trainer.strategy.tables import FoundTable, find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from strata.checkpoint import CheckpointManager, CheckpointMetadata
    from strata.identity import Identity
    from strata.train.context import Context
    from strata.trainer.config import Settings
    from strata.trainer.strategy.base import Bound
    from strata.trainer.trainer import Trainer

log = logging.getLogger(__name__)

DENSE, SPARSE, ALL = "dense", "sparse", "all"
CHUNK_ROWS = 1 << 16
"""Rows whose initial values are computed at a time."""
LARGEST_SHARE = 0.9
"""Share of the available memory that tables may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What lives on the servers."""

    parts: tuple[PartSpec, ...]
    tables: tuple[FoundTable, ...]
    dense: tuple[DenseTable, ...]
    groups: Mapping[str, ParameterGroup]
    """The optimizer group of each table that is trained, by table."""
    own_rates: Mapping[str, float]
    """Learning rates of tables with an optimizer of their own."""

    def values(self) -> dict[str, NDArray[np.float32]]:
        """Return the initial rows, except those of tables without values."""
        found = {each.name: each.weight.detach().cpu().numpy() for each in self.tables if not each.weight.is_meta}
        return found | {each.name: each.values() for each in self.dense}

    def rates(self) -> dict[str, float]:
        """Return the current learning rates, which follow the schedule of the Trainer's optimizer."""
        own = self.own_rates
        return {n: group.scaled(own[n]) if n in own else group.rate for n, group in self.groups.items()}

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [*(each.weight for each in self.tables), *(one for each in self.dense for one in each.parameters)]


def plan(strategy: ServerStrategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    """Decide what moves to the servers.

    Raises:
        InvalidArgument: A parameter cannot move, or no parameter would; the message names the cure.
    """
    sparse = strategy.sparse
    assert isinstance(sparse, ParameterServer)  # `sharding` is for the others
    tables = find(module, sparse.tables, min_bytes=sparse.min_bytes)
    if any("" in table.places for table in tables):
        raise InvalidArgument(
            "the module is itself an embedding; wrap it in another module, for example nn.Sequential",
            field="module",
        )
    trained = [each for each in tables if not each.is_frozen]
    groups = {each.name: group_of(optimizer, each.weight, each.name) for each in trained}
    specs = [_table_spec(each, sparse, groups.get(each.name)) for each in tables]
    if isinstance(strategy.dense, ParameterServer):
        dense, dense_groups = _dense_tables(module, tables, optimizer)
        groups |= dense_groups
        dense_specs = [_dense_spec(each, dense_groups[each.name]) for each in dense]
    else:
        dense, dense_specs = [], []
        if not tables:
            raise InvalidArgument(
                f"no embedding has {sparse.min_bytes} bytes or more, so nothing would move to parameter servers; name "
                "the embeddings with ParameterServer(tables=…), lower min_bytes=, or use AllReduce()",
                field="strategy",
            )
    if isinstance(strategy, Hybrid) and dense:
        assert isinstance(strategy.dense, ParameterServer)
        named = {SPARSE: (specs, sparse), DENSE: (dense_specs, strategy.dense)}
    else:
        named = {ALL: ([*specs, *dense_specs], sparse)}
    parts = tuple(
        PartSpec(
            name=name,
            tables=tuple(own),
            staleness=of.staleness,
            is_half=of.wire == "fp16",
            num_pulls=_num_pulls(own, of),
            has_copies=of.replicas > 0,
        )
        for name, (own, of) in named.items()
        if own
    )
    own_rates = {} if sparse.optimizer is None else {each.name: sparse.optimizer.lr for each in trained}
    return Plan(parts=parts, tables=tuple(tables), dense=tuple(dense), groups=groups, own_rates=own_rates)


def _num_pulls(specs: Sequence[TableSpec], strategy: ParameterServer) -> int:
    """Return how many pulls use shared memory at a time: those of the sparse and of the dense tables for this batch and
    the ones ahead, and those of the steps before, until the servers have read the gradients beside their rows.
    """
    has_frozen = any(spec.is_frozen for spec in specs)
    return 2 * (1 + (strategy.num_frozen_ahead if has_frozen else strategy.num_ahead)) + NUM_PUSHES


def _table_spec(table: FoundTable, strategy: ParameterServer, group: ParameterGroup | None) -> TableSpec:
    """`group`: None for a frozen table, which has no optimizer, and all of its rows from the start."""
    if group is None:
        return TableSpec(
            name=table.name,
            width=table.width,
            initial=strategy.initial,
            max_rows=min(table.num_rows, MAX_ROWS),
            memory_rows=strategy.memory_rows,
            is_frozen=True,
        )
    return TableSpec(
        name=table.name,
        width=table.width,
        optimizer=strategy.optimizer or group.row_optimizer(table.name),
        initial=strategy.initial,
        max_rows=min(strategy.max_rows or table.num_rows, table.num_rows, MAX_ROWS),
        memory_rows=strategy.memory_rows,
        admit_after=strategy.admit_after,
        evict_after=strategy.evict_after,
    )


def _dense_spec(table: DenseTable, group: ParameterGroup) -> TableSpec:
    return TableSpec(
        name=table.name, width=WIDTH, optimizer=group.row_optimizer("a dense parameter"), max_rows=table.num_rows
    )


def _dense_tables(
    module: nn.Module, tables: Sequence[FoundTable], optimizer: torch.optim.Optimizer
) -> tuple[list[DenseTable], dict[str, ParameterGroup]]:
    """Return one table per optimizer group with the parameters that are not sparse tables."""
    sparse = {id(each.weight) for each in tables}
    by_settings: dict[int, tuple[ParameterGroup, list[nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in sparse:
            group = group_of(optimizer, parameter, name)
            by_settings.setdefault(group.number, (group, []))[1].append(parameter)
    found = {f"{DENSE}.{number}": each for number, each in enumerate(by_settings.values())}
    return [DenseTable(name, own) for name, (_, own) in found.items()], {n: group for n, (group, _) in found.items()}


def check(trainer: Trainer) -> None:
    """Find what cannot work with parameter servers, before workers start.

    Raises:
        InvalidArgument, ConfigError: An argument does not fit; the message names the cure.
    """
    strategy, settings = trainer.strategy, trainer.settings
    if torch_rec_of(strategy) is not None:
        sharding.check(trainer)
        return
    if not isinstance(strategy, ServerStrategy):
        for name, parameter in trainer.module.named_parameters():
            if parameter.is_meta:
                raise InvalidArgument(
                    f"parameter {name} has no values (its device is meta); only embeddings on parameter servers may, "
                    "with strategy=Hybrid(sparse=ParameterServer(…))",
                    field="module",
                )
        return
    _check_settings(settings)
    planned = plan(strategy, trainer.module, build_optimizer(trainer.optimizer, trainer.module, trainer.optimizer_args))
    if trainer.engine == "local":
        _check_memory(planned)


def _check_settings(settings: Settings) -> None:
    refused = {
        "clip_norm": (
            settings.clip_norm is not None,
            "the norm of all gradients is known to no worker; use clip_value",
        ),
        "ema": (settings.ema is not None, "rows on servers are not averaged"),
        "precision": (settings.precision == "fp16", "servers receive unscaled gradients; use 'bf16' or 'fp32'"),
        "on_nan": (settings.on_nan != "raise", "servers refuse gradients that are not finite; use 'raise'"),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigError(
                f"{name}={getattr(settings, name)!r} does not work with parameter servers: {reason}", field=name
            )


def _check_memory(planned: Plan) -> None:
    """
    Raises:
        ConfigError: The tables need more memory than this machine has.
    """
    available = psutil.virtual_memory().available
    eager = {each.name for each in planned.tables if not each.weight.is_meta}
    sizes = {
        spec.name: spec.max_bytes * (2 if part.has_copies else 1) + spec.checkpoint_bytes
        for part in planned.parts
        for spec in part.tables
    }
    needed = sum(size for name, size in sizes.items() if name in eager)
    if needed > available * LARGEST_SHARE:
        largest = max(eager, key=lambda name: sizes[name])
        raise ConfigError(
            f"the tables need {needed:,} bytes with their optimizer state and a copy for checkpoints ({largest}: "
            f"{sizes[largest]:,}), and this machine has {available:,} available; use more machines, an optimizer with "
            "less state (ParameterServer(optimizer=RowWiseAdagrad(…))), memory_rows= to keep the other rows in a "
            "file, or max_rows= with evict_after=",
            field="strategy",
        )


# -- workers and servers -------------------------------------------------------------------------------------------


def bind(trainer: Trainer, optimizer: torch.optim.Optimizer, ranks: Identity, ctx: Context) -> Bound:
    """Move parameters to the servers and bind the rest, on a worker. Rows come when they are first needed."""
    from strata.servers.link import WorkerLink  # noqa: PLC0415 - only with servers

    strategy, module = trainer.strategy, trainer.module
    if torch_rec_of(strategy) is not None:
        return sharding.bind(trainer, optimizer, ranks, ctx)
    assert isinstance(strategy, ServerStrategy)
    assert isinstance(strategy.sparse, ParameterServer)
    planned = plan(strategy, module, optimizer)
    release(optimizer, planned.parameters)
    link = WorkerLink(ctx, planned.parts)
    ctx.companion = link

    def bind_rest(rest: nn.Module) -> Bound:
        has_own = any(parameter.requires_grad for parameter in rest.parameters()) and not planned.dense
        if isinstance(strategy.dense, ParameterServer) or not has_own:
            return Alone(rest)
        return strategy.dense.bind(rest, ranks)

    dense = strategy.dense if isinstance(strategy.dense, ParameterServer) else None
    return Served(
        module,
        planned.tables,
        planned.dense,
        link,
        is_synchronous=dense is not None and dense.staleness == 0,
        num_ahead=strategy.sparse.num_ahead,
        dense_ahead=0 if dense is None else dense.num_dense_ahead,
        frozen_ahead=strategy.sparse.num_frozen_ahead,
        rates=planned.rates,
        bind=bind_rest,
    )


def completed_steps(ctx: Context) -> int:
    """Return the steps of this worker that all servers have applied, for a worker that is restarted alone."""
    link: Any = ctx.companion
    completed: int = link.completed_steps()
    return completed


def num_lost(ctx: Context) -> int:
    """Return how many pushes of this process restarted servers have lost."""
    link: Any = ctx.companion
    return 0 if link is None else int(link.num_lost)


def run_server(ctx: Context, trainer: Trainer) -> Result:
    """Serve the workers of a fit until they are done; return their result."""
    strategy = trainer.strategy
    assert isinstance(strategy, ServerStrategy)
    optimizer = build_optimizer(trainer.optimizer, trainer.module, trainer.optimizer_args)
    planned = plan(strategy, trainer.module, optimizer)
    return decode_result(serve(ctx, planned.parts, planned.values()), ctx)


def figures(ctx: Context) -> list[dict[str, float]]:
    """Return what each server of a fit has measured; nothing without servers."""
    link: Any = ctx.companion
    return [] if link is None else [each.without_rates().as_plain() for each in link.figures()]


def finish(ctx: Context, result: Result) -> None:
    """Let the servers return the result of the workers, which rank 0 sends."""
    link: Any = ctx.companion
    if link is not None:
        encoded = {field: getattr(result, field) for field in _SENT}
        link.finish(ctx.step, msgspec.json.encode({**encoded, "best": "" if result.best is None else result.best.id}))
        ctx.companion = None


_SENT = (
    "history",
    "steps",
    "best_epoch",
    "monitor",
    "checkpoints",
    "timings",
    "stop_reason",
    "servers",
    "lost_updates",
)


def decode_result(payload: bytes, ctx: Context) -> Result:
    fields = msgspec.json.decode(payload)
    best = fields.pop("best")
    return Result(**fields, best=next((each for each in ctx.checkpoints.list() if each.id == best), None))


# -- back into a plain module --------------------------------------------------------------------------------------


def require_values(module: nn.Module) -> None:
    """
    Raises:
        InvalidArgument: A parameter has no values.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise InvalidArgument(
                f"parameter {name} has no values in this process: it was not trained yet, or its "
                f"{parameter.nbytes:,} bytes do not fit into memory. Train first, or use a machine with more memory",
                field="module",
            )


def load_weights(trainer: Trainer, manager: CheckpointManager, chosen: str | None) -> None:
    """Load a checkpoint, with the rows of its servers, into the plain module. Tables that are larger than the memory of
    this machine stay in the checkpoint.
    """
    strategy, module = trainer.strategy, trainer.module
    if torch_rec_of(strategy) is not None:
        sharding.load_weights(trainer, manager, chosen)
        return
    assert isinstance(strategy, ServerStrategy)
    optimizer = build_optimizer(trainer.optimizer, module, trainer.optimizer_args)
    planned = plan(strategy, module, optimizer)
    rows = _Rows(module, planned)
    elsewhere = {f"{place}.weight" for table in planned.tables for place in table.places}
    parts = {"module": ModuleWithout(module, elsewhere), SAVED: rows}
    manager.restore(parts, id=chosen, saved_by=_all_of)
    rows.finish()


def _all_of(checkpoint: CheckpointMetadata) -> Sequence[int]:
    num_servers = int(checkpoint.metadata.get(SAVED_SERVERS, 0))
    return [0, *range(checkpoint.num_ranks - num_servers, checkpoint.num_ranks)]


class _Rows:
    """Receives the rows of each server."""

    def __init__(self, module: nn.Module, planned: Plan) -> None:
        self._dense = {each.name: (each, each.values()) for each in planned.dense}
        self._weights: dict[str, NDArray[np.float32]] = {}
        specs = {spec.name: spec for part in planned.parts for spec in part.tables}
        for table in planned.tables:
            weight = table.weight
            if weight.is_meta and weight.nbytes > psutil.virtual_memory().available * LARGEST_SHARE:
                log.warning("%s is larger than memory and stays in the checkpoint: %d bytes", table.name, weight.nbytes)
                continue
            if weight.is_meta:
                weight = nn.Parameter(torch.empty(table.num_rows, table.width), requires_grad=not table.is_frozen)
                for place in table.places:
                    module.get_submodule(place).weight = weight
                for start in range(0, table.num_rows, CHUNK_ROWS):
                    keys = np.arange(start, min(start + CHUNK_ROWS, table.num_rows), dtype=np.uint64)
                    values = specs[table.name].initial.values(keys, table.width)
                    weight.data[start : start + len(keys)] = torch.from_numpy(values)
            self._weights[table.name] = weight.detach().numpy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            if name not in self._weights and name not in self._dense:
                continue
            into = self._weights[name] if name in self._weights else self._dense[name][1]
            for part in Snapshot.of(saved):
                used = np.flatnonzero(part.used)
                into[part.keys[used].astype(np.int64)] = part.weights[used]

    def finish(self) -> None:
        for dense, values in self._dense.values():
            dense.put(values)
