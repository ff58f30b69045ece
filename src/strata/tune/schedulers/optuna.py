"""Pruners of Optuna: any object with Optuna's interface decides after each report whether a trial goes on.

Optuna keeps its study in memory, with one trial of Optuna per trial. It sees values as they were reported, so a
threshold means what its author meant. Optuna can neither resume a trial nor prune by several objectives: a pruned trial
has ended, and only the first objective counts.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal

from strata.errors import ConfigError
from strata.tune.packages import optuna_module, quiet
from strata.tune.schedulers.base import CONTINUE, Scheduler, Verdict

if TYPE_CHECKING:
    from strata.tune.schedulers.base import Losses
    from strata.tune.space.parameters import Config


class PrunerScheduler(Scheduler):
    def __init__(self, pruner: Any, *, direction: Literal["min", "max"] = "min") -> None:
        """
        Args:
            pruner: An instance of `optuna.pruners.BasePruner`. It is copied, so that a study which is continued with
                the same object starts from the state that the object was given in.
            direction: Of the first objective.
        """
        optuna = optuna_module("a pruner")
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise ConfigError(f"{pruner!r} is not a pruner of Optuna; pass an instance of optuna.pruners.BasePruner")
        self._name = type(pruner).__name__
        self._sign = 1.0 if direction == "min" else -1.0
        self._states = optuna.trial.TrialState
        with quiet(optuna):
            self._study = optuna.create_study(
                study_name="strata",  # Hyperband draws brackets from it, so it must be the same after a restart
                direction=f"{direction}imize",
                sampler=optuna.samplers.RandomSampler(seed=0),
                pruner=copy.deepcopy(pruner),
            )
        self._trials: dict[int, Any] = {}
        """Optuna's trials by our numbers."""
        self._last: dict[int, float] = {}
        """The last value of each trial."""
        self._stopped: set[int] = set()

    def started(self, trial: int, config: Config) -> None:
        found = self._trials[trial] = self._study.ask()
        for name, value in config.items():
            found.set_user_attr(name, value)

    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:  # noqa: ARG002
        value = losses[0] * self._sign if losses[0] < math.inf else math.nan
        self._last[trial] = value
        found = self._trials[trial]
        found.report(value, step)
        if not found.should_prune():
            return CONTINUE
        self._stopped.add(trial)
        return Verdict("stop", f"{self._name} stops it at step {step} with {value:.4g}")

    def ended(self, trial: int, *, is_failed: bool) -> None:
        found, value = self._trials.pop(trial, None), self._last.pop(trial, math.nan)
        if found is None:
            return
        if is_failed or math.isnan(value):
            self._study.tell(found, state=self._states.FAIL)
        elif trial in self._stopped:
            self._study.tell(found, state=self._states.PRUNED)
        else:
            self._study.tell(found, value)
        self._stopped.discard(trial)
