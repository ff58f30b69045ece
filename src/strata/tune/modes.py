"""The modes of tuning: each is a sampler and a scheduler, by name or as an object of Optuna."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.errors import ConfigError
from strata.tune import samplers, schedulers
from strata.tune.packages import is_gaussian_process, is_pruner, is_sampler


@dataclass(frozen=True, slots=True)
class Mode:
    sampler: str
    scheduler: str = "none"
    ask_ahead: int = 0
    """1 for a sampler that takes long: if there are several slots, the next question is asked before one is free."""
    sampler_object: Any = None
    """A sampler of Optuna, whose name is `sampler`."""
    pruner_object: Any = None
    """A pruner of Optuna, whose name is `scheduler`."""


MODES = {
    "random": Mode("random"),
    "grid": Mode("grid"),
    "sobol": Mode("sobol"),
    "bayesian": Mode("gp", ask_ahead=1),
    "tpe": Mode("tpe"),
    "cmaes": Mode("cmaes"),
    "nsga2": Mode("nsga2"),
    "hyperband": Mode("random", "hyperband"),
    "asha": Mode("random", "asha"),
    "median": Mode("random", "median"),
    "bohb": Mode("tpe", "hyperband"),
    "pbt": Mode("random", "pbt"),
}
_EXAMPLE = 'such as ("tpe", "asha") or (optuna.samplers.GPSampler(), optuna.pruners.MedianPruner())'


def find_mode(mode: object) -> Mode:
    """Return the mode of a name, of a sampler or a pruner object of Optuna, or of a pair of sampler and scheduler.

    Raises:
        ConfigError: The mode is unknown.
    """
    if isinstance(mode, str):
        if mode not in MODES:
            raise ConfigError(f"hpt_mode={mode!r} is unknown; use {', '.join(MODES)}", field="hpt_mode")
        return MODES[mode]
    if isinstance(mode, tuple | list):
        if len(mode) != 2:
            raise ConfigError(
                f"hpt_mode={mode!r} must be a pair of a sampler and a scheduler, {_EXAMPLE}", field="hpt_mode"
            )
        return _joined(*mode)
    if is_pruner(mode):
        return _joined("tpe", mode)
    return _joined(mode, "none")


def _joined(sampler: Any, scheduler: Any) -> Mode:
    is_named = isinstance(sampler, str)
    if is_named:
        sampler = MODES[sampler].sampler if sampler in MODES else sampler
        if sampler not in samplers.NAMES:
            raise ConfigError(
                f"hpt_mode: sampler {sampler!r} is unknown; use {', '.join(samplers.NAMES)}", field="hpt_mode"
            )
    elif not is_sampler(sampler):
        raise ConfigError(
            f"hpt_mode={sampler!r} is neither a name nor a sampler or a pruner of Optuna; for both, pass a pair, "
            f"{_EXAMPLE}",
            field="hpt_mode",
        )
    is_pruning = not isinstance(scheduler, str)
    if not is_pruning and scheduler not in schedulers.NAMES:
        raise ConfigError(
            f"hpt_mode: scheduler {scheduler!r} is unknown; use {', '.join(schedulers.NAMES)}", field="hpt_mode"
        )
    if is_pruning and not is_pruner(scheduler):
        raise ConfigError(
            f"hpt_mode: {scheduler!r} is not a pruner of Optuna; pass a pair, {_EXAMPLE}", field="hpt_mode"
        )
    name = sampler if is_named else f"optuna/{type(sampler).__name__}"
    return Mode(
        name,
        f"optuna/{type(scheduler).__name__}" if is_pruning else scheduler,
        ask_ahead=int(name == "gp" or is_gaussian_process(sampler)),
        sampler_object=None if is_named else sampler,
        pruner_object=scheduler if is_pruning else None,
    )


def mode_name(sampler: str, scheduler: str) -> str:
    """Return the name of the mode with this sampler and scheduler, or a description."""
    for name, mode in MODES.items():
        if (mode.sampler, mode.scheduler) == (sampler, scheduler):
            return name
    return sampler if scheduler == "none" else f"{sampler} with {scheduler}"
