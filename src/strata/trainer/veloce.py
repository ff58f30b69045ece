"""Veloce's names, as thin aliases of the Trainer and its strategies.

`NeuralNetTrainer(...).run()` is `Trainer(...).fit(...)`. Its `dataset` may be anything that `Trainer.fit` takes, or a
dict with the keys `train` and `validation`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

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
PATIENCE = 2
"""Veloce's epochs without an improvement."""
TYPES = ("label_column_dtype", "feature_column_dtypes")
"""Options of a dataset without an effect: columns get the types that the module and the loss take."""


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
    are_known = arch in (Arch.PS, Arch.RingAllreduce) and update_strategy in (UpdateStrategy.Sync, UpdateStrategy.Async)
    if not are_known:
        raise ConfigError(
            f"{arch!r} with {update_strategy!r} is unknown; use Arch.RingAllreduce or Arch.PS, with "
            "UpdateStrategy.Sync or UpdateStrategy.Async",
            field="heterogeneous_strategy",
        )
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
        use_gpu: bool = False,
        backend: str = "torch",
        epochs: int = 1,
        use_static_graph: bool = False,
        optimizer_args: Mapping[str, Any] | None = None,
        ddp_options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        use_early_stopping: bool = False,
        early_stopping_args: Mapping[str, Any] | None = None,
        shared_validation_dataset: Any = None,
        heterogeneous_strategy: HeterogeneousStrategy | None = None,
        **trainer_arguments: Any,
    ) -> None:
        """
        Args:
            use_gpu: Require a GPU. One that exists is always used.
            trainer_arguments: Other arguments of `Trainer`.

        Raises:
            ConfigError: An argument has no counterpart, or does not fit; the message names the cure.
        """
        if backend != "torch":
            raise ConfigError(f"backend={backend!r} is unknown; use 'torch'", field="backend")
        if use_gpu and not torch.cuda.is_available():
            raise ConfigError(
                "use_gpu=True, but torch finds no GPU; write use_gpu=False to train on CPUs", field="use_gpu"
            )
        if ddp_options:
            raise ConfigError(
                f"ddp_options={dict(ddp_options)} have no counterpart; leave them out, or use "
                "Trainer(strategy=AllReduce(find_unused_parameters=…, bucket_mb=…))",
                field="ddp_options",
            )
        strategy = (heterogeneous_strategy or HeterogeneousStrategy()).strategy()
        if use_static_graph and isinstance(strategy, AllReduce):
            strategy = replace(strategy, static_graph=True)
        self.trainer = Trainer(
            module=_module(module, module_params),
            loss=loss_fn,
            optimizer=optimizer,
            metrics=metric_fns,
            optimizer_args=optimizer_args,
            callbacks=callbacks or (),
            workers=num_workers,
            strategy=strategy,
            **trainer_arguments,
        )
        self._dataset = dataset
        self._valid = shared_validation_dataset
        self._options = dict(dataset_options or {})
        self._batch_size = batch_size
        self._epochs = epochs
        self._early_stopping = _early_stopping(early_stopping_args) if use_early_stopping else None

    def run(self) -> list[dict[str, float]]:
        """Train; return one dict per epoch."""
        data, valid = self._dataset, self._valid
        if isinstance(data, dict) and "train" in data:
            given = data.get("validation", data.get("valid"))
            data, valid = data["train"], given if valid is None else valid
        batch_size = self._batch_size
        if batch_size is None and not is_loader(data):
            batch_size = DEFAULT_BATCH_SIZE
        options = {name: value for name, value in self._options.items() if name not in TYPES}
        label = options.pop("label_column", options.pop("label", None))
        inputs = options.pop("feature_columns", options.pop("inputs", None))
        result = self.trainer.fit(
            data,
            label=label,
            inputs=inputs,
            valid=valid,
            epochs=self._epochs,
            batch_size=batch_size,
            early_stopping=self._early_stopping,
            **options,
        )
        return result.history


def _module(module: Callable[..., Any], params: Mapping[str, Any] | None) -> Any:
    if hasattr(module, "parameters") and not isinstance(module, type):
        if params:
            raise ConfigError(
                f"module_params={dict(params)} cannot be applied to an instance; pass the class, or leave them out",
                field="module_params",
            )
        return module
    try:
        return module(**dict(params or {}))
    except TypeError as error:
        raise ConfigError(
            f"module_params={dict(params or {})} do not fit {getattr(module, '__name__', module)}: {error}; pass the "
            "arguments of the class",
            field="module_params",
        ) from error


def _early_stopping(arguments: Mapping[str, Any] | None) -> EarlyStopping:
    try:
        return EarlyStopping(**{"patience": PATIENCE, **dict(arguments or {})})
    except TypeError as error:
        raise ConfigError(
            f"early_stopping_args={dict(arguments or {})}: {error}; use patience, min_delta and monitor",
            field="early_stopping_args",
        ) from error
