"""Schedulers: the port in `base`, and one module per algorithm. Pure: no I/O, no clock; random numbers come from a
seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from strata.errors import ConfigError
from strata.tune.schedulers.base import CONTINUE, Losses, Resume, RunAll, Scheduler, StartNew, Verdict, Wait
from strata.tune.schedulers.halving import asha, hyperband
from strata.tune.schedulers.median import Median
from strata.tune.schedulers.optuna import PrunerScheduler
from strata.tune.schedulers.pbt import PopulationBased

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.tune.schedulers.pbt import Perturb

__all__ = [
    "CONTINUE",
    "NAMES",
    "Losses",
    "Resume",
    "RunAll",
    "Scheduler",
    "StartNew",
    "Verdict",
    "Wait",
    "make_scheduler",
]

_BY_NAME: dict[str, Callable[..., Scheduler]] = {
    "none": RunAll,
    "asha": asha,
    "hyperband": hyperband,
    "median": Median,
}
NAMES = (*_BY_NAME, "pbt")


def make_scheduler(
    scheduler: object,
    options: Mapping[str, Any],
    *,
    perturb: Perturb,
    seed: int,
    direction: Literal["min", "max"] = "min",
) -> Scheduler:
    """Return a scheduler by its name, or for a pruner object of Optuna.

    Raises:
        ConfigError: The name or an option is unknown or invalid, or Optuna is not installed.
    """
    if not isinstance(scheduler, str):
        if options:
            raise ConfigError("options are for modes by name; pass them to the pruner itself", field="options")
        return PrunerScheduler(scheduler, direction=direction)
    name = scheduler
    if name not in NAMES:
        raise ConfigError(f"scheduler {name!r} is unknown; use {', '.join(NAMES)}", field="scheduler")
    try:
        return PopulationBased(perturb, seed=seed, **options) if name == "pbt" else _BY_NAME[name](**options)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"scheduler {name!r} does not accept {given} ({error})", field="scheduler") from None
