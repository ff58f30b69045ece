"""Veloce's names, as thin aliases of the Trainer and its strategies.

`NeuralNetTrainer(...).run()` is `Trainer(...).fit(...)`. Its `dataset` may be anything that `Trainer.fit` takes, or a
dict with the keys `train` and `validation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError
from strata.trainer.history import EarlyStopping
from strata.trainer.sources import is_loader
from strata.trainer.strategy import AllReduce, Hybrid, ParameterServer
from strata.trainer.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.trainer.strategy import ServerStrategy


DEFAULT_BATCH_SIZE = 512
"""Veloce's."""


class Arch:
    """Veloce's names of architectures."""

    PS = "parameter-server"
    RingAllreduce = "ring-allreduce"


class UpdateStrategy:
    """Veloce's names of update modes."""

    Sync = "sync"
    Async = "async"


class HeterogeneousStrategy:
    """Chooses how the dense and the sparse part are updated."""

    def __init__(
        self,
        dense_arch: str = Arch.RingAllreduce,
        dense_update_strategy: str = UpdateStrategy.Sync,
        sparse_arch: str = Arch.RingAllreduce,
        sparse_update_strategy: str = UpdateStrategy.Sync,
    ) -> None:
        self.dense_arch = dense_arch
        self.dense_update_strategy = dense_update_strategy
        self.sparse_arch = sparse_arch
        self.sparse_update_strategy = sparse_update_strategy

    def strategy(self) -> AllReduce | ServerStrategy:
        """Return the strategy of the Trainer.

        Raises:
            ConfigError: There is no such combination.
        """
        dense = _part(self.dense_arch, self.dense_update_strategy)
        sparse = _part(self.sparse_arch, self.sparse_update_strategy)
        if isinstance(sparse, ParameterServer):
            return sparse if dense == sparse else Hybrid(dense=dense, sparse=sparse)
        if isinstance(dense, AllReduce):
            return dense
        raise ConfigError(
            "all-reduce for sparse tables cannot be combined with servers for dense parameters; use Arch.PS for the "
            "sparse part",
            field="heterogeneous_strategy",
        )


def _part(arch: str, update_strategy: str) -> AllReduce | ParameterServer:
    if arch == Arch.PS:
        return ParameterServer(staleness=0 if update_strategy == UpdateStrategy.Sync else None)
    if update_strategy == UpdateStrategy.Sync:
        return AllReduce()
    raise ConfigError(
        "Arch.RingAllreduce is synchronous; use UpdateStrategy.Sync, or Arch.PS with UpdateStrategy.Async",
        field="heterogeneous_strategy",
    )


class PSStrategy(HeterogeneousStrategy):
    """Parameter servers for both parts."""

    def __init__(self, update_strategy: str = UpdateStrategy.Sync) -> None:
        super().__init__(Arch.PS, update_strategy, Arch.PS, update_strategy)


class NeuralNetTrainer:
    """Veloce's trainer."""

    def __init__(
        self,
        module: Callable[..., Any],
        module_params: Mapping[str, Any] | None = None,
        dataset: Any = None,
        dataset_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        loss_fn: Any = None,
        optimizer: Any = "adam",
        metric_fns: Sequence[Any] = (),
        *,
        num_workers: int = 1,
        epochs: int = 1,
        optimizer_args: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        use_early_stopping: bool = False,
        early_stopping_args: Mapping[str, Any] | None = None,
        heterogeneous_strategy: HeterogeneousStrategy | None = None,
        **trainer_arguments: Any,
    ) -> None:
        is_instance = hasattr(module, "parameters") and not isinstance(module, type)
        self.trainer = Trainer(
            module=module if is_instance else module(**dict(module_params or {})),
            loss=loss_fn,
            optimizer=optimizer,
            metrics=metric_fns,
            optimizer_args=optimizer_args,
            callbacks=callbacks or (),
            workers=num_workers,
            strategy=(heterogeneous_strategy or HeterogeneousStrategy()).strategy(),
            **trainer_arguments,
        )
        self._dataset = dataset
        self._options = dict(dataset_options or {})
        self._batch_size = batch_size
        self._epochs = epochs
        self._early_stopping = EarlyStopping(**dict(early_stopping_args or {})) if use_early_stopping else None

    def run(self) -> list[dict[str, float]]:
        """Train; return one dict per epoch."""
        data, valid = self._dataset, None
        if isinstance(data, dict) and "train" in data:
            data, valid = data["train"], data.get("validation", data.get("valid"))
        batch_size = self._batch_size
        if batch_size is None and not is_loader(data):
            batch_size = DEFAULT_BATCH_SIZE
        options = dict(self._options)
        label = options.pop("label_column", options.pop("label", None))
        result = self.trainer.fit(
            data,
            label=label,
            valid=valid,
            epochs=self._epochs,
            batch_size=batch_size,
            early_stopping=self._early_stopping,
            **options,
        )
        return result.history
