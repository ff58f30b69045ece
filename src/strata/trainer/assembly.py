"""Builds the parts of one worker from the arguments of a Trainer and a fit, once, before the first step.

Everything that can be wrong with a user's arguments is found here or in the first batch. `check` finds what it can in
the calling process, before workers start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from strata.errors import ConfigError, InvalidArgument
from strata.identity import Identity
from strata.trainer import serving, sources
from strata.trainer.batches import Splitter, check_label, label_names
from strata.trainer.binding import Binding, bind, feature_parts
from strata.trainer.callbacks import Callbacks
from strata.trainer.callbacks import create as create_callback
from strata.trainer.evaluation import Evaluator
from strata.trainer.history import Better, History
from strata.trainer.lookahead import LookAhead
from strata.trainer.metrics import MetricSet
from strata.trainer.optimizer import build as build_optimizer
from strata.trainer.parts import Parts, make_scheduler
from strata.trainer.strategy import ServerStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from strata.train.context import Context
    from strata.trainer.config import FitConfig
    from strata.trainer.trainer import Trainer

MAX_PASSES = 1_000
"""Newest passes of a stream that its history keeps; every checkpoint contains it."""


def build(trainer: Trainer, config: FitConfig, ctx: Context) -> Parts:
    """Build the parts of one worker; collective if there are several.

    Raises:
        InvalidArgument, ConfigError: An argument is invalid; the message names the cure.
    """
    settings, module = trainer.settings, trainer.module
    ranks, device = ctx.identity, ctx.device
    evaluator, loader, splitter, metrics = build_evaluator(trainer, config, ranks, device)
    if settings.compile:
        compile_in_place(module, {} if settings.compile is True else settings.compile)
    optimizer = build_optimizer(trainer.optimizer, module, trainer.optimizer_args)
    if isinstance(trainer.strategy, ServerStrategy):
        bound = serving.bind(trainer, optimizer, ranks, ctx)
    else:
        bound = trainer.strategy.bind(module, ranks)
    ctx.time_use.add_source("collective_s", lambda: bound.waited_s)
    if bound.num_ahead and getattr(loader, "has_global_state", False):
        loader = LookAhead(loader)
    monitor, better = _monitored(trainer, metrics, config)
    valid = None
    if config.valid is not None:
        rated = _of_validation(config)
        valid = _open(config.valid, trainer, rated, _decide_binding(trainer, rated, ranks), ranks, shuffle=False)
    return Parts(
        trainer=trainer,
        config=config,
        bound=bound,
        optimizer=optimizer,
        loader=loader,
        valid=valid,
        splitter=splitter,
        evaluator=evaluator,
        history=History(
            monitor,
            better,
            early_stopping=config.early_stopping,
            max_rows=MAX_PASSES if config.is_stream else None,
        ),
        callbacks=Callbacks([create_callback(each) for each in trainer.callbacks] if ranks.rank == 0 else []),
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
    binding = _decide_binding(trainer, config, ranks, needs_target=needs_target)
    _move(trainer.module, device)
    trainer.objective.to(device)
    splitter = Splitter(
        trainer.module,
        label=config.label,
        inputs=config.inputs,
        weight=config.weight if needs_target else None,
        parts={} if trainer.features is None else feature_parts(trainer.features.fields),
        binding=binding,
        device=device,
        needs_target=needs_target and _takes_target(trainer, config),
        num_inputs=None if needs_target else config.num_inputs,
    )
    metrics = _make_metrics(trainer)
    loader = _open(config.train, trainer, config, binding, ranks, shuffle=config.shuffle, needs_target=needs_target)
    return Evaluator(trainer, splitter, metrics, device), loader, splitter, metrics


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, except tables without values, which parameter servers keep."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


def check(trainer: Trainer, config: FitConfig) -> tuple[str, Better]:
    """Find mistakes in the caller's process, before workers start; return the monitored key and its direction.

    Raises:
        InvalidArgument, ConfigError: An argument is invalid; the message names the cure.
    """
    sources.check_options(config.train, config.data_options)
    for each in (config,) if config.valid is None else (config, _of_validation(config)):
        _require_rows(each.train)
        binding = _decide_binding(trainer, each)
        if not sources.is_files(each.train):  # a loader over files has been made to find its columns
            _open(each.train, trainer, each, binding, Identity(), shuffle=each.shuffle)
    optimizer = build_optimizer(trainer.optimizer, trainer.module, trainer.optimizer_args)
    if not isinstance(trainer.optimizer, torch.optim.Optimizer):  # a scheduler changes the user's instance
        make_scheduler(trainer.settings, optimizer)
    serving.check(trainer)
    _check_stop(trainer)
    metrics = _make_metrics(trainer)
    unweighted = [name for name in metrics.names if not getattr(metrics[name], "takes_weights", True)]
    if config.weight is not None and unweighted:
        raise InvalidArgument(
            f"metric {unweighted[0]!r} cannot use the weights of weight={config.weight!r}; use one of our metrics "
            "or a function with a parameter sample_weight, or leave weight= out",
            field="metrics",
        )
    if metrics and not _takes_target(trainer, config):
        raise InvalidArgument(
            "metrics= compare predictions with a target, but there is neither loss= nor label=; name the target with "
            "label=, or leave metrics= out",
            field="metrics",
        )
    return _monitored(trainer, metrics, config)


def _check_stop(trainer: Trainer) -> None:
    """
    Raises:
        ConfigError: A rank would stop alone, and the others would wait for it.
    """
    num_local = getattr(trainer.strategy, "local_steps", 1)
    if trainer.settings.on_nan == "stop" and num_local > 1:
        raise ConfigError(
            f"on_nan='stop' does not work with local_steps={num_local}: ranks share no gradients, so the others would "
            "not stop; use 'skip', or 'raise', which ends all of them",
            field="on_nan",
        )


def _of_validation(config: FitConfig) -> FitConfig:
    """Return how the validation data is read: like the training data, but every row."""
    known = sources.known_options(config.valid)
    options = {
        name: value
        for name, value in config.data_options.items()
        if name in known and name not in ("tail", "drop_last", "length_buckets")
    }
    return replace(config, train=config.valid, shuffle=False, data_options=options)


def _require_rows(source: Any) -> None:
    if sources.is_map_style(source) and not len(source):
        raise InvalidArgument("the dataset has no rows; check what it was made from", field="data")


def _decide_binding(
    trainer: Trainer, config: FitConfig, ranks: Identity | None = None, *, needs_target: bool = True
) -> Binding | None:
    """Return how batches are passed to the module, if the data reveal their columns before the first batch.

    Raises:
        InvalidArgument: The label or an input is not a column.
    """
    columns = sources.column_names(config.train, config.data_options, ranks)
    if columns is None:
        return None
    labels = label_names(config.label)
    if needs_target and _takes_target(trainer, config) and not callable(config.label):
        check_label(labels, columns)
    if needs_target and config.weight is not None and config.weight not in columns:
        raise InvalidArgument(
            f"weight={config.weight!r} is not a column; columns: {', '.join(columns)}", field="weight"
        )
    features = trainer.features
    if features is not None and sources.is_files(config.train):
        varlen = [each.name for each in features.fields if each.kind == "varlen"]
        encoded = [name for name in ("sparse", "dense") if any(each.kind == name for each in features.fields)]
        return bind(
            trainer.module.forward, [*encoded, *varlen], inputs=config.inputs, parts=feature_parts(features.fields)
        )
    others = [name for name in columns if name not in labels and name != config.weight]
    return bind(trainer.module.forward, others, inputs=config.inputs)


def _takes_target(trainer: Trainer, config: FitConfig) -> bool:
    """Return whether batches are divided into inputs and a target; a module that returns its loss takes all of it."""
    return trainer.objective.loss is not None or config.label is not None


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
    if features is not None and sources.is_files(source):
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


def _monitored(trainer: Trainer, metrics: MetricSet, config: FitConfig) -> tuple[str, Better]:
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


def _make_metrics(trainer: Trainer) -> MetricSet:
    return MetricSet(trainer.metrics, from_logits=trainer.objective.from_logits)
