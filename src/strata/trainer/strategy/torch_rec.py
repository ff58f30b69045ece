"""`TorchRec`: the settings of tables that torchrec shards over the workers, and where each table goes by default.

Nothing in this module imports torchrec, so that a job can be described and checked without it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.errors import ConfigError, InvalidArgument
from strata.trainer.strategy.tables import DEFAULT_MIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.servers.table.optimizers import RowOptimizer

INSTALL = "pip install 'strata-runtime[torchrec]' && pip install --no-deps torchrec==1.8.0"
TABLE_WISE, ROW_WISE, COLUMN_WISE = "table_wise", "row_wise", "column_wise"
FUSED, DENSE = "fused", "dense"
"""How torchrec updates a table: during the backward pass, or afterwards by an optimizer of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRec:
    """Large tables are sharded over the workers by torchrec; as the sparse part of a `Hybrid`."""

    plan: Any = None
    """A `ShardingPlan` of torchrec for the module and this number of workers. By default, a table that is larger than
    a worker's share is split by rows, and the others are placed whole."""
    tables: str | Sequence[str] | None = None
    """Names or patterns of the modules to shard; by default all with a table of at least `min_bytes`."""
    min_bytes: int = DEFAULT_MIN_BYTES
    """Smaller tables belong to the dense part, unless they are in a collection with a larger one."""
    optimizer: RowOptimizer | None = None
    """Optimizer of the tables: `SGD`, `Adagrad` or `RowWiseAdagrad` of `strata.servers.table.optimizers`; by default
    the Trainer's optimizer."""
    fused: bool = True
    """Update rows during the backward pass, where the optimizer can. Otherwise the Trainer's optimizer updates whole
    shards, for which each worker holds a gradient as large as its shards."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("torchrec") is None:
            raise ConfigError(f"TorchRec needs torchrec, which is not installed; {INSTALL}", field="sparse")
        if self.plan is not None and not hasattr(self.plan, "plan"):
            raise InvalidArgument(
                f"plan={self.plan!r} is not a ShardingPlan of torchrec; pass what its planner returns, or None",
                field="plan",
            )
        if isinstance(self.tables, str):
            object.__setattr__(self, "tables", (self.tables,))
        elif self.tables is not None:
            object.__setattr__(self, "tables", tuple(self.tables))
        if self.plan is not None and self.tables is not None:
            raise InvalidArgument("plan= names the modules to shard; leave tables= out", field="tables")
        least: object = self.min_bytes
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise InvalidArgument(f"min_bytes={least!r} is not a whole number, at least 0", field="min_bytes")
        is_fused: object = self.fused
        if not isinstance(is_fused, bool):
            raise InvalidArgument(f"fused={is_fused!r} must be True or False", field="fused")
        if self.optimizer is not None and type(self.optimizer).__name__ not in ("SGD", "Adagrad", "RowWiseAdagrad"):
            raise InvalidArgument(
                f"optimizer={self.optimizer!r} has no fused version in torchrec on CPUs; use SGD, Adagrad or "
                "RowWiseAdagrad of strata.servers.table.optimizers, or leave it out",
                field="optimizer",
            )
        if self.optimizer is not None and not self.fused:
            raise InvalidArgument(
                "optimizer= is for fused updates, and fused=False leaves updates to the Trainer's optimizer; leave one "
                "of them out",
                field="optimizer",
            )


class Place(NamedTuple):
    """Where a table is by default."""

    kind: str
    rank: int
    """Of a table that is placed whole; 0 otherwise."""


def default_places(num_bytes: Mapping[str, int], world_size: int) -> dict[str, Place]:
    """Return where each table goes, given their sizes; the same on all ranks.

    A table larger than a worker's share of all bytes is split by rows over all workers. The others are placed whole,
    the largest first, each on the worker with the fewest bytes.
    """
    share = sum(num_bytes.values()) / world_size
    loads = [0] * world_size
    found = {}
    for name, size in sorted(num_bytes.items(), key=lambda each: (-each[1], each[0])):
        if size > share:
            found[name] = Place(ROW_WISE, 0)
            continue
        rank = loads.index(min(loads))
        loads[rank] += size
        found[name] = Place(TABLE_WISE, rank)
    return found


def check_plan(plan: Any, found: Mapping[str, Sequence[str]], world_size: int | None, *, is_rowwise: bool) -> None:
    """
    Args:
        found: The tables of each module of the plan, by its place.
        world_size: Number of workers, if it is known.
        is_rowwise: Whether the optimizer keeps one number of state per row.

    Raises:
        InvalidArgument: The plan does not fit the module or the workers, or has a part that is not supported.
    """
    for place, tables in found.items():
        of_module = plan.plan[place]
        missing = [table for table in tables if table not in of_module]
        if missing:
            raise _refusal(place, f"it has no entry for the table {missing[0]}")
        for table in tables:
            _check_table(f"{place}.{table}", of_module[table], world_size, is_rowwise=is_rowwise)


def _check_table(name: str, sharding: Any, world_size: int | None, *, is_rowwise: bool) -> None:
    if sharding.sharding_type not in (TABLE_WISE, ROW_WISE, COLUMN_WISE):
        raise _refusal(
            name, f"{sharding.sharding_type} sharding is not supported; use table_wise, row_wise or column_wise"
        )
    if sharding.compute_kernel not in (FUSED, DENSE):
        raise _refusal(name, f"the kernel {sharding.compute_kernel} is not supported; use 'fused' or 'dense'")
    if is_rowwise and sharding.sharding_type == COLUMN_WISE:
        raise _refusal(name, "RowWiseAdagrad has one sum per row, which columns cannot share; use row_wise sharding")
    ranks = [shard.placement.rank() for shard in sharding.sharding_spec.shards]
    if len(set(ranks)) < len(ranks):
        raise _refusal(name, f"a worker has several shards of this table (ranks {ranks}); give each worker one")
    if world_size is not None and max(ranks) >= world_size:
        raise _refusal(
            name, f"it has a shard on rank {max(ranks)}, and the run has {world_size} workers; plan for these workers"
        )


def _refusal(name: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"plan= does not work for {name}: {reason}, or leave plan= out", field="plan")
