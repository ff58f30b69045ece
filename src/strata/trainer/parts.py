"""What the loop combines on one worker: module, strategy, optimizer, data, metrics. Built once, before the first step.

Everything that can be wrong with a user's arguments is found here or in the first batch. `build` also runs in the
calling process, with `check`, before workers are started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.errors import ConfigError, InvalidArgument
from strata.trainer import callbacks as callback_registry
from strata.trainer import sources
from strata.trainer.batches import Batch, Splitter, check_label, label_names
from strata.trainer.binding import Binding, bind, feature_parts
from strata.trainer.evaluation import Evaluator
from strata.trainer.history import Better, History
from strata.trainer.metrics import MetricSet
from strata.trainer.optimizer import Ema
from strata.trainer.optimizer import build as build_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strata.data.order.steps import Steps
    from strata.identity import Identity
    from strata.trainer.callbacks import Callback
    from strata.trainer.config import FitConfig, Settings
    from strata.trainer.objective import Objective
    from strata.trainer.strategy import Bound
    from strata.trainer.trainer import Trainer


class Parts:
    """The objects of one worker. `build` creates it."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        config: FitConfig,
        bound: Bound,
        optimizer: Any,
        loader: Any,
        valid: Any,
        splitter: Splitter,
        evaluator: Evaluator,
        history: History,
        callbacks: Sequence[Callback],
        ranks: Identity,
        device: torch.device,
    ) -> None:
        self.trainer = trainer
        self.settings: Settings = trainer.settings
        self.config = config
        self.module: nn.Module = trainer.module
        self.bound = bound
        self.objective: Objective = trainer.objective
        self.is_loss_sum = trainer.objective.is_sum
        self.optimizer = optimizer
        self.loader = loader
        self.valid = valid
        self.evaluator = evaluator
        self.history = history
        self.callbacks = callbacks
        self.replicated = replicated_names(self.module, bound)
        self.num_skipped = 0
        """Steps that were left out because of on_nan="skip"."""
        settings = trainer.settings
        self._splitter = splitter
        self._world_size = ranks.world_size
        self._parameters = [each for each in self.module.parameters() if each.requires_grad]
        self._scheduler = make_scheduler(settings, optimizer)
        self._ema = None if settings.ema is None else Ema(settings.ema)
        if self._ema is not None:
            evaluator.averaged = self._ema
        is_scaled = settings.precision == "fp16"
        self.scaler: Any = torch.amp.GradScaler(device.type) if is_scaled else _NoScaler()
        self._checks_gradients = settings.on_nan != "raise"

    # -- a step ----------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[Iterator[tuple[Batch, float, bool]]]:
        """Yield the batches of each optimizer step, with their weights and whether they are the last of the step."""
        self.module.train()
        clock = _RowClock(self.loader)
        raw = iter(self.loader)
        for first in raw:
            yield self._group(first, raw, clock)

    def _group(self, current: Any, raw: Iterator[Any], clock: _RowClock) -> Iterator[tuple[Batch, float, bool]]:
        most = self.settings.accumulate
        group_rows = clock.group_rows(most)
        for _ in range(1, most):
            following = next(raw, _END)
            if following is _END:
                break
            yield self._weighted(current, group_rows, is_last=False)
            current = following
        yield self._weighted(current, group_rows, is_last=True)

    def _weighted(self, raw: Any, group_rows: int | None, *, is_last: bool) -> tuple[Batch, float, bool]:
        """Return a batch and the weight of its mean loss, with which all ranks together average over all rows."""
        batch = self._splitter(raw)
        if self.is_loss_sum:
            weight = float(self._world_size)
        elif group_rows is None or not self.bound.is_replicated:  # ranks that train alone average over their own rows
            weight = 1.0 / self.settings.accumulate
        else:
            weight = batch.num_rows * self._world_size / group_rows
        return batch, weight, is_last

    def are_gradients_usable(self) -> bool:
        """Clip the gradients; return whether to apply them. All ranks decide the same: they share the gradients."""
        settings = self.settings
        if not self._checks_gradients and settings.clip_norm is None and settings.clip_value is None:
            return True
        if settings.precision == "fp16":
            self.scaler.unscale_(self.optimizer)
        if settings.clip_value is not None:
            nn.utils.clip_grad_value_(self._parameters, settings.clip_value)
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        if not self._checks_gradients or torch.isfinite(norm):
            return True
        self.num_skipped += 1
        if settings.on_nan == "stop":
            self.history.stop_reason = f"a gradient is not finite (norm {norm.item():g})"
        return False

    def after_step(self, step: int) -> None:
        if self._scheduler is not None and self.settings.scheduler_every == "step":
            self._scheduler.step()
        if self._ema is not None:
            self._ema.update(self.module)
        self.bound.after_step(step)

    def after_epoch(self, row: Mapping[str, float]) -> None:
        if self._scheduler is None or self.settings.scheduler_every != "epoch":
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(row[self.history.monitor])
        else:
            self._scheduler.step()

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        stateful = {"scheduler": self._scheduler, "ema": self._ema, "strategy": self.bound, "history": self.history}
        states = {name: each.state_dict() for name, each in stateful.items() if each is not None}
        return {**states, "scaler": self.scaler.state_dict(), "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_skipped = int(state["num_skipped"])
        self.history.load_state_dict(state["history"])
        self.bound.load_state_dict(state["strategy"])
        self.scaler.load_state_dict(state["scaler"])
        for name, part in (("scheduler", self._scheduler), ("ema", self._ema)):
            if part is not None and name in state:
                part.load_state_dict(state[name])


def build(trainer: Trainer, config: FitConfig, ranks: Identity, device: torch.device) -> Parts:
    """Build the parts of one worker; collective if there are several.

    Raises:
        InvalidArgument, ConfigError: An argument is invalid; the message names the cure.
    """
    settings, module = trainer.settings, trainer.module
    evaluator, loader, splitter, metrics = build_evaluator(trainer, config, ranks, device)
    if settings.compile:
        compile_in_place(module, {} if settings.compile is True else settings.compile)
    optimizer = build_optimizer(trainer.optimizer, module, trainer.optimizer_args)
    bound = trainer.strategy.bind(module, ranks)
    monitor, better = monitored(trainer, metrics, config)
    valid = None
    if config.valid is not None:
        rated = of_validation(config)
        valid = _open(config.valid, trainer, rated, decide_binding(trainer, rated), ranks, shuffle=False)
    return Parts(
        trainer=trainer,
        config=config,
        bound=bound,
        optimizer=optimizer,
        loader=loader,
        valid=valid,
        splitter=splitter,
        evaluator=evaluator,
        history=History(monitor, better, early_stopping=config.early_stopping),
        callbacks=[callback_registry.create(each) for each in trainer.callbacks] if ranks.rank == 0 else [],
        ranks=ranks,
        device=device,
    )


def compile_in_place(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Compile what a call of the module runs. Its parameters keep their names, unlike those of `torch.compile(module)`.

    `module.compile` does nothing for a module of torch itself, such as a Sequential: dynamo does not compile torch's
    own frames. It compiles the frame of a function that calls the module.

    Raises:
        InvalidArgument: torch.compile refuses the arguments.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    try:
        if type(module).forward.__module__.startswith("torch.nn."):
            module._compiled_call_impl = torch.compile(call, **arguments)
        else:
            module.compile(**arguments)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"compile={dict(arguments)} is refused by torch.compile: {error}; correct it, or write compile=True",
            field="compile",
        ) from error


def build_evaluator(
    trainer: Trainer, config: FitConfig, ranks: Identity, device: torch.device, *, needs_target: bool = True
) -> tuple[Evaluator, Any, Splitter, MetricSet]:
    """Build what evaluation and prediction need: the evaluator, and the loader of `config.train`."""
    if trainer.settings.precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision='fp16' needs an accelerator; use 'bf16' or 'fp32' on a CPU", field="precision")
    binding = decide_binding(trainer, config, needs_target=needs_target)
    trainer.module.to(device)
    trainer.objective.to(device)
    splitter = Splitter(
        trainer.module,
        label=config.label,
        inputs=config.inputs,
        weight=config.weight if needs_target else None,
        parts={} if trainer.features is None else feature_parts(trainer.features.fields),
        binding=binding,
        device=device,
        needs_target=needs_target and takes_target(trainer, config),
        num_inputs=None if needs_target else config.num_inputs,
    )
    metrics = make_metrics(trainer)
    loader = _open(config.train, trainer, config, binding, ranks, shuffle=config.shuffle, needs_target=needs_target)
    return Evaluator(trainer, splitter, metrics, device), loader, splitter, metrics


def make_scheduler(settings: Settings, optimizer: Any) -> Any:
    """Return the learning rate scheduler, or None.

    Raises:
        InvalidArgument: The function does not return a scheduler, or it needs a value at every step.
    """
    if settings.scheduler is None:
        return None
    try:
        scheduler = settings.scheduler(optimizer)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"scheduler= cannot be called with the optimizer alone: {error}; write scheduler=lambda optimizer: "
            "StepLR(optimizer, step_size=10)",
            field="scheduler",
        ) from error
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise InvalidArgument(
            f"scheduler= returned a {type(scheduler).__name__}; it must return a scheduler such as StepLR",
            field="scheduler",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and settings.scheduler_every == "step":
        raise InvalidArgument(
            "ReduceLROnPlateau follows the monitored value, which each epoch computes; use scheduler_every='epoch'",
            field="scheduler_every",
        )
    return scheduler


def make_metrics(trainer: Trainer) -> MetricSet:
    return MetricSet(trainer.metrics, from_logits=trainer.objective.from_logits)


def check(trainer: Trainer, config: FitConfig) -> tuple[str, Better]:
    """Find mistakes in the caller's process, before workers start; return the monitored key and its direction.

    Raises:
        InvalidArgument, ConfigError: An argument is invalid; the message names the cure.
    """
    sources.check_options(config.train, config.data_options)
    _require_rows(config.train)
    decide_binding(trainer, config)
    if config.valid is not None:
        _require_rows(config.valid)
        decide_binding(trainer, of_validation(config))
    for each in trainer.callbacks:
        callback_registry.create(each)
    optimizer = build_optimizer(trainer.optimizer, trainer.module, trainer.optimizer_args)
    if not isinstance(trainer.optimizer, torch.optim.Optimizer):  # a scheduler changes the user's instance
        make_scheduler(trainer.settings, optimizer)
    metrics = make_metrics(trainer)
    unweighted = [name for name in metrics.names if not getattr(metrics[name], "takes_weights", True)]
    if config.weight is not None and unweighted:
        raise InvalidArgument(
            f"metric {unweighted[0]!r} cannot use the weights of weight={config.weight!r}; use one of our metrics "
            "or a function with a parameter sample_weight, or leave weight= out",
            field="metrics",
        )
    if metrics and not takes_target(trainer, config):
        raise InvalidArgument(
            "metrics= compare predictions with a target, but there is neither loss= nor label=; name the target with "
            "label=, or leave metrics= out",
            field="metrics",
        )
    return monitored(trainer, metrics, config)


def of_validation(config: FitConfig) -> FitConfig:
    """Return how the validation data is read: like the training data, but every row."""
    known = sources.known_options(config.valid)
    options = {
        name: value
        for name, value in config.data_options.items()
        if name in known and name not in ("tail", "drop_last")
    }
    return replace(config, train=config.valid, shuffle=False, data_options=options)


def _require_rows(source: Any) -> None:
    if sources.is_map_style(source) and not len(source):
        raise InvalidArgument("the dataset has no rows; check what it was made from", field="data")


def decide_binding(trainer: Trainer, config: FitConfig, *, needs_target: bool = True) -> Binding | None:
    """Return how batches are passed to the module, if the data reveal their columns before the first batch.

    Raises:
        InvalidArgument: The label or an input is no column.
    """
    columns = sources.column_names(config.train, config.data_options)
    if columns is None:
        return None
    labels = label_names(config.label)
    if needs_target and takes_target(trainer, config) and not callable(config.label):
        check_label(labels, columns)
    if needs_target and config.weight is not None and config.weight not in columns:
        raise InvalidArgument(f"weight={config.weight!r} is no column; columns: {', '.join(columns)}", field="weight")
    features = trainer.features
    if features is not None and sources.is_path(config.train):
        varlen = [each.name for each in features.fields if each.kind == "varlen"]
        encoded = [name for name in ("sparse", "dense") if any(each.kind == name for each in features.fields)]
        return bind(
            trainer.module.forward, [*encoded, *varlen], inputs=config.inputs, parts=feature_parts(features.fields)
        )
    others = [name for name in columns if name not in labels and name != config.weight]
    return bind(trainer.module.forward, others, inputs=config.inputs)


def takes_target(trainer: Trainer, config: FitConfig) -> bool:
    """Return whether batches are divided into inputs and a target; a module that returns its loss takes all of it."""
    return trainer.objective.loss is not None or config.label is not None


def replicated_names(module: nn.Module, bound: Bound) -> tuple[str, ...]:
    """Return patterns of what is equal on all ranks, which they share the work of saving.

    Buffers, such as the statistics of a BatchNorm, differ until the next forward pass, so each rank saves its own.
    """
    if not bound.is_replicated:
        return ()
    if next(module.buffers(), None) is None:
        return ("module.*", "optimizer.*", "trainer.ema.*")
    return (*(f"module.{name}" for name, _ in module.named_parameters()), "optimizer.*", "trainer.ema.*")


def _open(
    source: Any,
    trainer: Trainer,
    config: FitConfig,
    binding: Binding | None,
    ranks: Identity,
    *,
    shuffle: bool,
    needs_target: bool = True,
) -> Any:
    features = trainer.features
    kept = [*label_names(config.label), *([config.weight] if config.weight is not None else [])] if needs_target else []
    columns: list[str] | None = None
    transform = None
    is_computed = needs_target and callable(config.label)  # from any columns
    if features is not None and sources.is_path(source):
        kept += features.passthrough if is_computed else ()
        columns = [*dict.fromkeys([*(each.name for each in features.columns), *kept])]
        transform = features.with_passthrough(*kept).encode
    elif binding is not None and binding.columns and not is_computed:
        columns = [*dict.fromkeys([*binding.columns, *kept])]
    return sources.open_loader(
        source,
        ranks=ranks,
        batch_size=config.batch_size,
        shuffle=shuffle,
        seed=trainer.settings.seed,
        columns=columns,
        transform=transform,
        options=config.data_options,
    )


def monitored(trainer: Trainer, metrics: MetricSet, config: FitConfig) -> tuple[str, Better]:
    """Return the key of the history that decides which epoch is the best, and its direction."""
    named = config.monitor or (config.early_stopping.monitor if config.early_stopping is not None else "")
    if not named and config.valid is None:
        return "loss", "lower"
    known: dict[str, Better] = {
        f"valid_{name}": better
        for name, better in metrics.better.items()
        if name != "calibration"  # best at 1, neither lower nor higher
    }
    has_loss = trainer.objective.loss is not None or not trainer.has_own_step
    known |= {"valid_loss": "lower"} if config.valid is not None and has_loss else {}
    known |= {"loss": "lower"}
    if not named:
        return next(iter(known.items()))
    for candidate in (named, f"valid_{named}"):
        if candidate in known:
            return candidate, known[candidate]
    raise InvalidArgument(f"monitor={named!r} is unknown; use one of {', '.join(known)}", field="monitor")


class _RowClock:
    """Counts the rows of all ranks in each step of a pass, without communication: the order is arithmetic."""

    def __init__(self, loader: Any) -> None:
        self._steps: Steps | None = None
        self._next_batch = 0
        if getattr(loader, "has_global_state", False):
            rows = getattr(loader, "map_rows", None)
            self._steps = (loader.dataset if rows is None else rows).steps(loader.position[1])

    def group_rows(self, accumulate: int) -> int | None:
        """Return the rows of the next `accumulate` batches; None if the loader does not know. Counts repeated rows."""
        if self._steps is None:
            return None
        first = self._next_batch
        self._next_batch += accumulate
        batches = range(first, min(first + accumulate, self._steps.num_batches))
        return sum(map(self._steps.given_rows, batches))


class _NoScaler:
    """Stands in for a gradient scaler where none is needed."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


_END = object()
