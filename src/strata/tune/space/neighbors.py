"""Configurations near another one: the nearest that the constraints allow, and a random perturbation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.tune.space.parameters import Choice, same

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.tune.space.parameters import Config
    from strata.tune.space.space import SearchSpace

FACTORS = (0.8, 1.2)
RESAMPLE = 0.25
"""Probability that a perturbation draws an unordered choice anew."""
NUM_CANDIDATES = 64
MAX_TRIES = 100
_BELOW_1 = 1.0 - 2**-53


def repair(space: SearchSpace, config: Config, rng: np.random.Generator) -> Config:
    """Return the configuration, or an allowed one close to it: a sampler that models the objective, but not the
    constraints, keeps most of what it meant.
    """
    if space.is_allowed(config):
        return config
    goal = np.array(space.units(config))
    best, best_distance = config, float("inf")
    for _ in range(NUM_CANDIDATES):
        origin = np.array(space.units(space.draw(rng)))
        for fraction in (0.75, 0.5, 0.25, 0.0):  # from the goal to an allowed configuration
            moved = space.at([float(each) for each in origin + fraction * (goal - origin)])
            if space.is_allowed(moved):
                distance = float(np.square(np.array(space.units(moved)) - goal).sum())
                if distance < best_distance:
                    best, best_distance = moved, distance
                break
    return best if space.is_allowed(best) else space.draw(rng)


def perturb(space: SearchSpace, config: Mapping[str, Any], rng: np.random.Generator) -> Config:
    """Return a configuration near this one: numbers 20 % up or down, ordered values one up or down, and other choices
    drawn anew with a probability of 25 %.
    """
    for _ in range(MAX_TRIES):
        moved = {name: _moved(space, name, value, rng) for name, value in config.items()}
        made: Config = {}
        for name, parameter in space.parameters.items():
            if parameter.is_active(made):  # a choice may have made others active
                made[name] = moved[name] if name in moved else parameter.at(float(rng.random()))
        if space.is_allowed(made):
            return made
    return dict(config)


def _moved(space: SearchSpace, name: str, value: Any, rng: np.random.Generator) -> Any:
    parameter = space.parameters[name]
    draw = float(rng.random())
    is_up = draw < 0.5
    if isinstance(parameter, Choice) and not parameter.is_ordered:
        return parameter.at(draw / RESAMPLE) if draw < RESAMPLE else value
    if not isinstance(parameter, Choice):
        moved = parameter.snap(value * FACTORS[is_up])
        if parameter.num_values is None or not same(moved, value):
            return moved
    unit = parameter.unit(value) + (1 if is_up else -1) / (parameter.num_values or 1)  # one value up or down
    return parameter.at(min(max(unit, 0.0), _BELOW_1))
