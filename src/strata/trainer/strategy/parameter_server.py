"""`ParameterServer` and `Hybrid`: which parameters live on servers, and how old the rows may be that workers use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from strata.errors import InvalidArgument
from strata.servers.table.initial import Initial
from strata.trainer.strategy.all_reduce import AllReduce
from strata.trainer.strategy.tables import DEFAULT_MIN_BYTES
from strata.trainer.strategy.torch_rec import TorchRec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.servers.table.optimizers import RowOptimizer

MAX_SERVERS = 1_024
MAX_PREFETCH = 64
"""A worker holds the rows of as many batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer:
    """Parameters live in server processes, beside the workers.

    As the strategy of a Trainer, for all parameters. In a `Hybrid`, for the dense or the sparse part.
    """

    servers: int = 1
    """Number of server processes."""
    staleness: int | None = 0
    """How many steps a worker may be ahead of the slowest. 0: synchronous, the gradients of all workers are averaged in
    every step. None: asynchronous, every push is applied at once."""
    prefetch: int | None = None
    """Batches whose rows a worker asks for while it computes an earlier one, and steps for which it asks for dense
    parameters. Each takes a step of `staleness`, so there are at most as many, and none with 0. None: the rows of one
    batch, and no dense parameters, which change in every step."""
    wire: Literal["fp32", "fp16"] = "fp32"
    """Precision of rows and gradients between machines; within a machine they are not converted. Servers compute in
    fp32."""
    tables: str | Sequence[str] | None = None
    """Names or patterns of the embeddings that become sparse tables, such as `("user", "*.item")`; by default all of at
    least `min_bytes`."""
    min_bytes: int = DEFAULT_MIN_BYTES
    """Smaller embeddings belong to the dense part."""
    optimizer: RowOptimizer | None = None
    """Optimizer of the sparse tables; by default the one that the Trainer's optimizer uses, by row."""
    initial: Initial = field(default_factory=Initial)
    """Initial values of tables without values: those of embeddings on the device `meta`."""
    max_rows: int | None = None
    """Rows that a table may have on each server; by default all of them."""
    memory_rows: int | None = None
    """Rows of a table that each server keeps in memory; the others are in a file. None: all."""
    admit_after: int = 1
    """Batches that must contain an id before it gets a row."""
    evict_after: int | None = None
    """Steps without a gradient after which a row may be evicted to make room; None: never."""

    replicas: int = 0
    """Copies of each server's rows on another server, 0 or 1, so that none of its updates are lost when it dies. Needs
    `staleness=None` for all parameters, at least two servers, and twice the memory."""

    def __post_init__(self) -> None:
        _require_count("servers", self.servers, least=1, most=MAX_SERVERS)
        if self.staleness is not None:
            _require_count("staleness", self.staleness, least=0)
        if self.prefetch is not None:
            _require_count("prefetch", self.prefetch, least=0, most=MAX_PREFETCH)
        _require_count("replicas", self.replicas, least=0, most=1)
        if self.replicas and self.staleness is not None:
            raise InvalidArgument(
                f"replicas=1 needs staleness=None, not {self.staleness}: other runs restart exactly from their last "
                "checkpoint and have no use for copies; leave replicas= out",
                field="replicas",
            )
        if self.replicas and self.servers == 1:
            raise InvalidArgument(
                "replicas=1 needs a second server for the copies; use servers=2 or more", field="replicas"
            )
        if self.wire not in ("fp32", "fp16"):
            raise InvalidArgument(f"wire={self.wire!r} is unknown; use 'fp32' or 'fp16'", field="wire")
        if isinstance(self.tables, str):
            object.__setattr__(self, "tables", (self.tables,))
        elif self.tables is not None:
            object.__setattr__(self, "tables", tuple(self.tables))
        _require_count("min_bytes", self.min_bytes, least=0)
        _require_count("admit_after", self.admit_after, least=1)
        for name in ("max_rows", "memory_rows", "evict_after"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), least=1)
        if self.optimizer is not None and not hasattr(self.optimizer, "state_width"):
            raise InvalidArgument(
                f"optimizer={self.optimizer!r} is not an optimizer of rows; pass one of strata.servers, such as "
                "RowWiseAdagrad(lr=0.1)",
                field="optimizer",
            )

    @property
    def num_servers(self) -> int:
        return self.servers

    @property
    def num_ahead(self) -> int:
        """Batches whose rows are prefetched: those that the staleness allows."""
        return self._allowed(self.num_frozen_ahead)

    @property
    def num_dense_ahead(self) -> int:
        """Steps for which dense parameters are prefetched."""
        return self._allowed(self.prefetch or 0)

    @property
    def num_frozen_ahead(self) -> int:
        """Batches whose rows of frozen tables are prefetched, which takes no staleness."""
        return 1 if self.prefetch is None else self.prefetch

    def _allowed(self, prefetch: int) -> int:
        return prefetch if self.staleness is None else min(prefetch, self.staleness)

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers share nothing but the servers while they train."""
        return self.staleness is None

    @property
    def dense(self) -> ParameterServer:
        return self

    @property
    def sparse(self) -> ParameterServer:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """One strategy for the dense part of a module, and another for its large embedding tables."""

    dense: AllReduce | ParameterServer = field(default_factory=AllReduce)
    sparse: ParameterServer | TorchRec = field(default_factory=ParameterServer)

    def __post_init__(self) -> None:
        if not isinstance(self.dense, AllReduce | ParameterServer):
            raise InvalidArgument(f"dense={self.dense!r} is neither an AllReduce nor a ParameterServer", field="dense")
        if not isinstance(self.sparse, ParameterServer | TorchRec):
            raise InvalidArgument(
                f"sparse={self.sparse!r} is neither a ParameterServer nor a TorchRec; for tables that stay in the "
                "workers, use strategy=AllReduce()",
                field="sparse",
            )
        if isinstance(self.sparse, TorchRec):
            if not isinstance(self.dense, AllReduce):
                raise InvalidArgument(
                    "sparse=TorchRec(…) keeps all parameters in the workers; use dense=AllReduce(), or "
                    "sparse=ParameterServer(…)",
                    field="dense",
                )
            return
        if isinstance(self.dense, ParameterServer) and self.dense.servers != self.sparse.servers:
            raise InvalidArgument(
                f"dense has servers={self.dense.servers} and sparse has servers={self.sparse.servers}; both parts "
                "share the same servers, so use the same number",
                field="servers",
            )

        copies = self.dense.replicas if isinstance(self.dense, ParameterServer) else 0
        if self.sparse.replicas != copies:
            raise InvalidArgument(
                f"sparse has replicas={self.sparse.replicas} and dense has {copies}; a server restarts alone only if "
                "all parameters are asynchronous, so use dense=ParameterServer(staleness=None, replicas=1, …), too",
                field="replicas",
            )

    @property
    def num_servers(self) -> int:
        return self.sparse.servers if isinstance(self.sparse, ParameterServer) else 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers share nothing but the servers while they train."""
        parts = (self.dense, self.sparse)
        return all(isinstance(part, ParameterServer) and part.is_asynchronous for part in parts)


ServerStrategy: TypeAlias = ParameterServer | Hybrid


def torch_rec_of(strategy: object) -> TorchRec | None:
    """Return the settings of tables that torchrec shards, or None if the strategy has none."""
    return strategy.sparse if isinstance(strategy, Hybrid) and isinstance(strategy.sparse, TorchRec) else None


def num_servers(strategy: object) -> int:
    """Return how many processes serve parameters, beside the workers."""
    return strategy.num_servers if isinstance(strategy, ParameterServer | Hybrid) else 0


def is_asynchronous(strategy: object) -> bool:
    """Return whether workers share nothing but parameter servers while they train, so that each can restart alone."""
    return isinstance(strategy, ParameterServer | Hybrid) and strategy.is_asynchronous


def _require_count(name: str, value: object, *, least: int, most: int | None = None) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_count or (most is not None and isinstance(value, int) and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{name}={value!r} is not a whole number, {limit}", field=name)
