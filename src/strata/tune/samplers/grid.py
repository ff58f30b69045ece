"""All configurations of a discrete space, each once, in an order that covers it evenly from the start.

Configuration i of the product of all parameters has the digits of i in the mixed base of their numbers of values. The
order steps through the product with a stride near its golden section, so a study that ends early has seen all regions,
and no list of configurations is kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.samplers.base import Sampler

if TYPE_CHECKING:
    from strata.tune.samplers.base import Outcome
    from strata.tune.space.parameters import Config
    from strata.tune.space.space import SearchSpace

MAX_CONFIGS = 1_000_000
_GOLDEN = (math.sqrt(5) - 1) / 2


class GridSampler(Sampler):
    def __init__(self, space: SearchSpace, *, seed: int) -> None:
        """
        Raises:
            ConfigError: A parameter is continuous, or there are too many configurations.
        """
        for name, parameter in space.parameters.items():
            if parameter.num_values is None:
                raise ConfigError(
                    f"a grid needs listed values, and {name!r} is continuous; add step= or values= to it, or use "
                    "another mode",
                    field=name,
                )
        size = space.num_configs or 1
        if size > MAX_CONFIGS:
            raise ConfigError(
                f"the grid has {size:,} configurations, at most {MAX_CONFIGS:,} are allowed; list fewer values, or use "
                "'sobol'",
                field="space",
            )
        self._space = space
        self._size = size
        self._stride = next(
            each for each in range(max(1, round(size * _GOLDEN)), size + 2) if math.gcd(each, size) == 1
        )
        self._start = seed % size
        self._position = 0
        """Number of configurations of the product that were looked at."""
        self._added: list[Config] = []
        """Configurations that were chosen elsewhere, and need not be tried again."""

    def ask(self, number: int) -> Config | None:  # noqa: ARG002 - the port
        while self._position < self._size:
            config = self._at((self._start + self._position * self._stride) % self._size)
            self._position += 1
            if config is not None and config not in self._added:
                return config
        return None

    def add(self, number: int, config: Config) -> None:  # noqa: ARG002
        self._added.append(config)

    def tell(self, number: int, outcome: Outcome) -> None:
        pass

    def _at(self, index: int) -> Config | None:
        """Return a configuration of the product; None if it is not allowed, or differs from another one in inactive
        parameters only.
        """
        found: Config = {}
        for name, parameter in self._space.parameters.items():
            index, digit = divmod(index, parameter.num_values or 1)
            if parameter.is_active(found):
                found[name] = parameter.value(digit)
            elif digit:
                return None
        return found if self._space.is_allowed(found) else None
