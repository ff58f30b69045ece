"""Samplers of Optuna: TPE, Gaussian processes, CMA-ES, or any object with Optuna's interface.

Optuna keeps its study in memory. Parameters are suggested one by one, in the order of the space, and only active ones:
this is how Optuna handles conditions. With one worker, it gives the same configurations as Optuna alone with the same
seed. Listed numbers are passed as their positions, which keeps their order, and choices as indices, because Optuna
cannot distinguish 1 from True. Optuna does not know the constraints of a space: what it suggests is moved to the
nearest configuration that they allow.

Optuna cannot continue a trial that has ended. So a trial that pauses is a pruned one for Optuna, and if it finishes
later, another one with the same configuration finishes there. Nor can Optuna prune with several objectives: a pruned
trial then ends with a violated constraint, which ranks it behind all that have finished, as with one objective.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import ConfigError
from strata.tune.packages import is_gaussian_process, optuna_module, quiet
from strata.tune.samplers.base import Sampler
from strata.tune.space.neighbors import repair
from strata.tune.space.parameters import Choice, Float, Int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.samplers.base import Direction, Outcome
    from strata.tune.space.parameters import Config, Parameter
    from strata.tune.space.space import SearchSpace

MAX_GP_TRIALS = 1_000
"""Planned trials of a study up to which a Gaussian process answers within seconds."""
PRUNED = "pruned"
"""Constraint that a pruned trial violates with several objectives, the less the longer it has run."""
MANY_VALUES = 16
"""Integers and steps with more values than this count as continuous."""


class OptunaSampler(Sampler):
    def __init__(
        self,
        space: SearchSpace,
        sampler: Any,
        *,
        seed: int,
        directions: Sequence[Direction] = ("min",),
    ) -> None:
        """
        Args:
            sampler: An instance of `optuna.samplers.BaseSampler`. It is copied, so that a study which is continued
                with the same object starts from the state that the object was given in.
            seed: For what Optuna does not decide: configurations that violate a constraint.
        """
        optuna = optuna_module()
        if not isinstance(sampler, optuna.samplers.BaseSampler):
            raise ConfigError(
                f"{sampler!r} is not a sampler of Optuna; pass an instance of optuna.samplers.BaseSampler"
            )
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._is_slow = is_gaussian_process(sampler)
        """Do not ask again on a replay. A resumed study knows the same outcomes, but may continue with other
        configurations than it would have without the interruption.
        """
        self._states = optuna.trial.TrialState
        with quiet(optuna):
            self._study = optuna.create_study(
                directions=[f"{each}imize" for each in directions],
                sampler=copy.deepcopy(sampler),
                pruner=optuna.pruners.NopPruner(),
            )
        self._running: dict[int, tuple[Any, Config]] = {}
        """Optuna's trials by our numbers, with their configurations."""
        self._paused: dict[int, Config] = {}
        """Configurations of trials that have paused, which Optuna has as pruned ones."""

    def ask(self, number: int) -> Config:
        trial = self._study.ask()
        config = self._suggested(trial)
        if self._space.is_allowed(config):
            self._running[number] = trial, config
            return config
        self._study.tell(trial, state=self._states.FAIL)
        config = repair(self._space, config, self._rng)
        self.add(number, config)
        return config

    def add(self, number: int, config: Config) -> None:
        self._study.enqueue_trial(
            {name: _encoded(self._space.parameters[name], value) for name, value in config.items()}
        )
        trial = self._study.ask()
        self._suggested(trial)
        self._running[number] = trial, config

    def tell(self, number: int, outcome: Outcome) -> None:
        if outcome.state == "paused" and self._is_slow:
            return  # a Gaussian process learns nothing from pruned trials, but keeps away from running ones
        if outcome.state == "finished" and number in self._paused:
            self.add(number, self._paused.pop(number))
        if number not in self._running:
            return
        trial, config = self._running.pop(number)
        if outcome.state == "paused":
            self._paused[number] = config
        if outcome.state == "failed" or not outcome.values:
            self._study.tell(trial, state=self._states.FAIL)
            return
        for at, violation in enumerate(outcome.violations):
            trial.set_constraint(str(at), violation)
        if outcome.state == "finished":
            self._study.tell(trial, list(outcome.values))
            return
        if len(self._study.directions) == 1:
            trial.report(outcome.values[0], outcome.step or 0)
            self._study.tell(trial, state=self._states.PRUNED)
        elif self._is_slow:  # it would take the values for final ones
            self._study.tell(trial, state=self._states.FAIL)
        else:
            trial.set_constraint(PRUNED, 1.0 / (1.0 + (outcome.step or 0)))
            self._study.tell(trial, list(outcome.values))

    def replay(self, number: int, config: Config) -> None:
        if self._is_slow:
            self.add(number, config)
        else:
            super().replay(number, config)

    def _suggested(self, trial: Any) -> Config:
        found: Config = {}
        for name, parameter in self._space.parameters.items():
            if parameter.is_active(found):
                found[name] = _suggest(trial, name, parameter)
        return found


def _suggest(trial: Any, name: str, parameter: Parameter) -> Any:
    if parameter.num_values == 1:
        return parameter.value(0)
    match parameter:
        case Float():
            low, high = parameter.min, parameter.max
            return parameter.snap(trial.suggest_float(name, low, high, log=parameter.log, step=parameter.step))
        case Int():
            step = {} if parameter.log else {"step": parameter.step}
            return parameter.snap(trial.suggest_int(name, parameter.min, parameter.max, log=parameter.log, **step))
        case Choice(is_ordered=True):
            return parameter.value(trial.suggest_int(name, 0, parameter.num_values - 1))
        case Choice():
            return parameter.value(trial.suggest_categorical(name, list(range(parameter.num_values))))
    raise AssertionError(parameter)  # pragma: no cover - all kinds are listed


def _encoded(parameter: Parameter, value: Any) -> Any:
    return parameter.index(value) if isinstance(parameter, Choice) else value


# -- by name -----------------------------------------------------------------------------------------------------------


def tpe(space: SearchSpace, *, seed: int, directions: Sequence[Direction], num_trials: int) -> OptunaSampler:  # noqa: ARG001
    """Return a tree-structured Parzen estimator: any space, fast, good from about twenty trials on."""
    sampler = optuna_module().samplers.TPESampler(seed=_short(seed))
    return OptunaSampler(space, sampler, seed=seed, directions=directions)


def gaussian_process(
    space: SearchSpace, *, seed: int, directions: Sequence[Direction], num_trials: int
) -> OptunaSampler:
    """Return a Gaussian process, the best choice for few trials. The time that it takes grows with their number, so a
    long study has CMA-ES instead if all parameters are continuous, or else TPE; so does one without torch or scipy.
    """
    is_missing = any(importlib.util.find_spec(each) is None for each in ("torch", "scipy"))
    if num_trials > MAX_GP_TRIALS and len(directions) == 1 and _is_continuous(space) and _has_cmaes():
        return cma_es(space, seed=seed, directions=directions, num_trials=num_trials)
    if is_missing or num_trials > MAX_GP_TRIALS:
        return tpe(space, seed=seed, directions=directions, num_trials=num_trials)
    sampler = optuna_module().samplers.GPSampler(seed=_short(seed), deterministic_objective=False)
    return OptunaSampler(space, sampler, seed=seed, directions=directions)


def cma_es(space: SearchSpace, *, seed: int, directions: Sequence[Direction], num_trials: int) -> OptunaSampler:  # noqa: ARG001
    """Return CMA-ES, for long studies of continuous parameters; it draws choices at random.

    Raises:
        ConfigError: cmaes is not installed, or there are several objectives.
    """
    optuna = optuna_module()
    if not _has_cmaes():
        raise ConfigError("'cmaes' needs the package cmaes; pip install 'strata-runtime[tune]', or use 'bayesian'")
    if len(directions) > 1:
        raise ConfigError("'cmaes' optimizes one objective; use 'bayesian' for several", field="metric")
    sampler = optuna.samplers.CmaEsSampler(seed=_short(seed), warn_independent_sampling=False)
    return OptunaSampler(space, sampler, seed=seed, directions=directions)


def nsga2(space: SearchSpace, *, seed: int, directions: Sequence[Direction], num_trials: int) -> OptunaSampler:  # noqa: ARG001
    """Return NSGA-II, a genetic algorithm for hundreds of trials with several objectives."""
    sampler = optuna_module().samplers.NSGAIISampler(seed=_short(seed))
    return OptunaSampler(space, sampler, seed=seed, directions=directions)


def _has_cmaes() -> bool:
    return importlib.util.find_spec("cmaes") is not None


def _is_continuous(space: SearchSpace) -> bool:
    """Return whether CMA-ES can move all parameters: numbers with many values, without conditions."""
    return all(
        not isinstance(each, Choice) and not each.when and (each.num_values is None or each.num_values > MANY_VALUES)
        for each in space.parameters.values()
        if each.num_values != 1
    )


def _short(seed: int) -> int:
    """Return a seed of 32 bits, the most that numpy's `RandomState` accepts."""
    return seed % 2**32
