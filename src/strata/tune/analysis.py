"""Which parameters matter: the importances of Optuna (PED-ANOVA), computed from the finished trials of a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, RunFailed
from strata.printing import counted
from strata.tune.packages import optuna_module, quiet
from strata.tune.space.parameters import Choice, Float, Int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.tune.space import SearchSpace
    from strata.tune.space.parameters import Config, Parameter
    from strata.tune.study import Study

MIN_TRIALS = 4
"""Fewer finished trials have no best part to compare with the others."""


def importances(study: Study, objective: str | None = None) -> dict[str, float]:
    """Return how much each parameter matters; `Study.importances` documents the arguments and the errors."""
    chosen = range(len(study.metrics)) if objective is None else [index_of(study, objective)]
    finished = [
        (each.config, [each.values[place] for place in chosen]) for each in study.trials if each.state == "finished"
    ]
    return importances_of(study.name, study.space, [study.directions[each] for each in chosen], finished)


def importances_of(
    name: str, space: SearchSpace, directions: Sequence[str], finished: Sequence[tuple[Config, Sequence[float | None]]]
) -> dict[str, float]:
    """Return how much each parameter matters for the values of finished trials.

    Args:
        name: Of the study, for messages.
        finished: Configuration and values of each trial, one value per direction.

    Raises:
        ConfigError: Optuna is not installed.
        RunFailed: There are too few trials.
    """
    optuna = optuna_module("importances()")
    if len(finished) < MIN_TRIALS:
        found = counted(len(finished), "trial")
        raise RunFailed(f"importances need {MIN_TRIALS} finished trials, and {found} of {name} finished")
    parameters = {each.name: each for each in space.parameters.values() if each.num_values != 1}
    distributions = {each: _distribution(optuna, parameter) for each, parameter in parameters.items()}
    with quiet(optuna):
        mirror = optuna.create_study(directions=[f"{each}imize" for each in directions])
    mirror.add_trials(
        [
            optuna.trial.create_trial(
                values=list(values),
                params={each: _encoded(parameters[each], config[each]) for each in config.keys() & parameters},
                distributions={each: distributions[each] for each in config.keys() & parameters},
            )
            for config, values in finished
        ]
    )
    found = optuna.importance.get_param_importances(mirror)
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))


def index_of(study: Study, objective: str) -> int:
    """
    Raises:
        ConfigError: The study has no such objective.
    """
    if objective not in study.metrics:
        raise ConfigError(
            f"objective={objective!r} is unknown; study {study.name} has {', '.join(study.metrics)}", field="objective"
        )
    return study.metrics.index(objective)


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    kinds = optuna.distributions
    match parameter:
        case Float():
            return kinds.FloatDistribution(parameter.min, parameter.max, log=parameter.log, step=parameter.step)
        case Int():
            return kinds.IntDistribution(
                parameter.min, parameter.max, log=parameter.log, step=1 if parameter.log else parameter.step
            )
        case Choice(is_ordered=True):
            return kinds.IntDistribution(0, parameter.num_values - 1)
        case Choice():
            return kinds.CategoricalDistribution(list(range(parameter.num_values)))
    raise AssertionError(parameter)  # pragma: no cover - all kinds are listed


def _encoded(parameter: Parameter, value: Any) -> Any:
    return parameter.index(value) if isinstance(parameter, Choice) else value
