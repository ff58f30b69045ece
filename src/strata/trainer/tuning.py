"""Tuning of a Trainer: which argument each parameter of a search space sets, and the fit of one configuration.

A parameter is named like the argument that it sets: of `fit`, of the Trainer, of the optimizer, of the function that
builds the module, or like a loss of a `LossFnStack`, whose weight it is. `resolve` decides this before the first trial.
A trial is a fit in a process of its own, or in several once workers are free that no other trial needs. It reports
after each epoch, so the steps of its study are epochs, and it resumes from its own checkpoint, as every fit under a
launcher does, on any number of workers.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from strata.errors import ConfigError, InvalidArgument
from strata.train.orchestrator import TrainingOrchestrator
from strata.trainer.callbacks import Callback
from strata.trainer.engine import PRELOAD
from strata.trainer.objective import Objective
from strata.trainer.optimizer import LossFnStack, OptimizerStack
from strata.trainer.optimizer.factory import named
from strata.trainer.strategy import num_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.trainer.trainer import Trainer
    from strata.tune.space import SearchSpace
    from strata.tune.study import Study

Target = Literal["fit", "trainer", "optimizer", "module", "loss"]
"""What a parameter of a space is an argument of."""

_OF_FIT = ("batch_size", "epochs", "max_steps")
_OF_TRAINER = ("accumulate", "clip_norm", "clip_value", "ema", "precision")
_NOT_OF_A_TRIAL = {
    "resume": "a trial resumes by itself",
    "stream": "a study needs trials that end",
    "every": "a trial saves when it is paused, and its best epochs",
    "monitor": "pass metric=",
}
"""Arguments of `fit` that tuning determines."""


def resolve(trainer: Trainer, names: Iterable[str], factory: Callable[..., nn.Module] | None) -> dict[str, Target]:
    """Return what each parameter of a space is an argument of.

    Raises:
        InvalidArgument: It is none, or one of several; the message lists what can be tuned.
    """
    known: dict[str, tuple[str, ...]] = {
        "fit": _OF_FIT,
        "trainer": _OF_TRAINER,
        "optimizer": _optimizer_arguments(trainer),
        "module": () if factory is None else _arguments(factory, num_given=0 if trainer.features is None else 1),
        "loss": tuple(trainer.loss.weights) if isinstance(trainer.loss, LossFnStack) else (),
    }
    found: dict[str, Target] = {}
    for name in names:
        targets = [each for each in get_args(Target) if name in known[each]]
        if len(targets) > 1:
            raise InvalidArgument(
                f"parameter {name!r} is an argument of the {targets[0]} and of the {targets[1]}; pass "
                f"module=lambda …: … with another name for it",
                field="space",
            )
        if not targets:
            raise _unknown(name, known, factory)
        found[name] = targets[0]
    return found


def _unknown(name: str, known: Mapping[str, tuple[str, ...]], factory: Callable[..., nn.Module] | None) -> Exception:
    nearest = difflib.get_close_matches(name, [each for names in known.values() for each in names], n=1)
    if not nearest and name in ("learning_rate", "rate") and "lr" in known["optimizer"]:
        nearest = ["lr"]
    listed = "; ".join(f"{target}: {', '.join(names)}" for target, names in known.items() if names)
    cure = "" if factory is not None else "; pass module= with a function to tune the arguments of the module"
    meant = f"did you mean {nearest[0]!r}? " if nearest else ""
    return InvalidArgument(
        f"parameter {name!r} of the space is no argument of this Trainer; {meant}Arguments: {listed}{cure}",
        field="space",
    )


def _optimizer_arguments(trainer: Trainer) -> tuple[str, ...]:
    optimizer = trainer.optimizer
    if isinstance(optimizer, torch.optim.Optimizer | OptimizerStack):
        return ()  # its arguments are set where it is created
    return _arguments(named(optimizer) if isinstance(optimizer, str) else optimizer, num_given=1)


def _arguments(function: Callable[..., Any], *, num_given: int) -> tuple[str, ...]:
    """Return the names of the arguments that can be passed by keyword, without the first ones."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_given:]
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A Trainer and the arguments of its fits, without those that a configuration sets. Trials receive it pickled."""

    trainer: Trainer
    targets: Mapping[str, Target]
    """What each parameter of the space is an argument of."""
    factory: Callable[..., nn.Module] | None
    data: Any
    arguments: Mapping[str, Any]
    """Of `fit`."""

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        space: SearchSpace,
        data: Any,
        arguments: Mapping[str, Any],
        *,
        factory: Callable[..., nn.Module] | None,
    ) -> Tuning:
        """
        Raises:
            ConfigError, InvalidArgument: The space, the Trainer or an argument of `fit` does not fit tuning.
        """
        if not getattr(space, "parameters", None):
            raise ConfigError("space has no parameters; add some with SearchSpace().add_float(…)", field="space")
        targets = resolve(trainer, space.parameters, factory)
        _check_arguments(trainer, arguments, targets)
        return cls(trainer=trainer, targets=targets, factory=factory, data=data, arguments=dict(arguments))

    def run(self, space: SearchSpace, *, key: str, hpt_mode: object, **arguments: Any) -> Study:
        """Run the study; `key` of the row of an epoch is its metric."""
        # A fit also reports the loss of single steps, as "loss".
        metric = key if key.startswith("valid_") else f"train_{key}"
        tuning = self

        def fit(config: dict[str, Any], trial: Any) -> None:
            tuning.fit(config, _Reporter(trial, key, metric))

        fit.preload = PRELOAD  # type: ignore[attr-defined] # imported once, in the process that trials are forked from
        return TrainingOrchestrator(hpt_mode=hpt_mode).tune(fit, space=space, metric=metric, **arguments)

    def fit(self, config: Mapping[str, Any], reporter: Callback) -> None:
        """Fit a configuration in the process of a trial."""
        tuned = self.trainer_for(config)
        tuned.callbacks = [*tuned.callbacks, reporter]
        tuned.fit(self.data, **self.fit_arguments(config))

    def trainer_for(self, config: Mapping[str, Any]) -> Trainer:
        """Return a Trainer with the arguments of a configuration, and initial weights that depend on the seed alone.

        Raises:
            InvalidArgument: A value is none that the argument accepts.
        """
        chosen = self._by_target(config)
        tuned = copy.copy(self.trainer)
        tuned.module, tuned.optimizer = copy.deepcopy((tuned.module, tuned.optimizer))
        if self.factory is not None:
            tuned.module = self._built(chosen["module"])
        tuned.settings = replace(tuned.settings, **chosen["trainer"])
        tuned.optimizer_args = {**tuned.optimizer_args, **chosen["optimizer"]}
        if chosen["loss"]:
            assert isinstance(tuned.loss, LossFnStack)
            tuned.loss = tuned.loss.with_weights(**chosen["loss"])
        tuned.objective = Objective(tuned.loss, class_weights=tuned.settings.class_weights)
        tuned.checkpoints = None  # those of the trial
        # A trial saves rarely, and a process for it would take longer to start than many trials run.
        tuned.checkpoint_options = {"saver": "thread", **tuned.checkpoint_options}
        return tuned

    def fit_arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.arguments, **self._by_target(config)["fit"]}

    def _by_target(self, config: Mapping[str, Any]) -> dict[Target, dict[str, Any]]:
        found: dict[Target, dict[str, Any]] = {target: {} for target in get_args(Target)}
        for name, value in config.items():
            found[self.targets[name]][name] = value
        return found

    def _built(self, arguments: Mapping[str, Any]) -> nn.Module:
        assert self.factory is not None
        torch.manual_seed(self.trainer.settings.seed)
        features = self.trainer.features
        try:
            module = self.factory(*(() if features is None else (features.fields,)), **arguments)
        except TypeError as error:
            raise InvalidArgument(
                f"module= cannot be called with {dict(arguments)}: {error}", field="module"
            ) from error
        if not isinstance(module, nn.Module):
            raise InvalidArgument(
                f"module= returned a {type(module).__name__} for {dict(arguments)}; it must return an nn.Module",
                field="module",
            )
        return module


class _Reporter(Callback):
    """Reports epochs to a study. What it decides, or has decided during the validation, takes effect at the next step,
    where the fit can save: a trial that stopped here would make the steps since its last checkpoint again.
    """

    def __init__(self, trial: Any, key: str, metric: str) -> None:
        self._trial = trial
        self._key = key
        self._metric = metric

    def on_epoch(self, row: Mapping[str, float]) -> None:
        self._trial.note(step=int(row["epoch"]) + 1, **{self._metric: row[self._key]})


def _check_arguments(trainer: Trainer, arguments: Mapping[str, Any], targets: Mapping[str, Target]) -> None:
    """
    Raises:
        ConfigError, InvalidArgument: The Trainer or an argument of `fit` does not fit tuning.
    """
    if str(trainer.workers) != "1" or trainer.engine != "local":
        raise ConfigError(
            f"a trial starts with one worker on this machine, but the Trainer has workers={trainer.workers!r} and "
            f"engine={trainer.engine!r}; leave both out to tune, and set them for the fit that follows, or pass "
            "max_workers_per_trial= to let the best trial use workers that no other one needs",
            field="workers",
        )
    if num_servers(trainer.strategy):
        raise ConfigError(
            f"a trial has no parameter servers, but the Trainer has strategy={type(trainer.strategy).__name__}(…); "
            "leave it out to tune, and set it for the fit that follows",
            field="strategy",
        )
    for name, reason in _NOT_OF_A_TRIAL.items():
        if name in arguments:
            raise InvalidArgument(f"{name}= cannot be tuned with: {reason}; leave it out", field=name)
    for name, target in targets.items():
        if target == "fit" and name in arguments:
            raise InvalidArgument(
                f"{name}={arguments[name]!r} is also a parameter of the space; leave one of them out", field=name
            )
