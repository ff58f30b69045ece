"""Samplers: the port in `base`, and one module per implementation. They may use `space`, and import scipy and Optuna
only when they are created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.samplers import optuna
from strata.tune.samplers.base import FAILED, Direction, Outcome, Sampler
from strata.tune.samplers.grid import GridSampler
from strata.tune.samplers.random import RandomSampler
from strata.tune.samplers.sobol import SobolSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.tune.space import SearchSpace

__all__ = ["FAILED", "NAMES", "Direction", "Outcome", "Sampler", "make_sampler"]

_PLAIN: dict[str, Callable[..., Sampler]] = {"random": RandomSampler, "grid": GridSampler, "sobol": SobolSampler}
_GUIDED: dict[str, Callable[..., Sampler]] = {
    "tpe": optuna.tpe,
    "gp": optuna.gaussian_process,
    "cmaes": optuna.cma_es,
    "nsga2": optuna.nsga2,
}
NAMES = (*_PLAIN, *_GUIDED)


def make_sampler(
    sampler: object,
    space: SearchSpace,
    *,
    seed: int,
    directions: Sequence[Direction] = ("min",),
    num_trials: int = 100,
) -> Sampler:
    """Return a sampler by its name, or for a sampler object of Optuna. `num_trials`: how many the study plans.

    Raises:
        ConfigError: It is unknown, does not fit the space, or needs a package that is not installed.
    """
    if not isinstance(sampler, str):
        return optuna.OptunaSampler(space, sampler, seed=seed, directions=directions)
    if sampler in _PLAIN:
        return _PLAIN[sampler](space, seed=seed)
    if sampler in _GUIDED:
        return _GUIDED[sampler](space, seed=seed, directions=directions, num_trials=num_trials)
    raise ConfigError(f"sampler {sampler!r} is unknown; use {', '.join(NAMES)}, or a sampler object of Optuna")
