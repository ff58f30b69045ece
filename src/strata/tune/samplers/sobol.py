"""A scrambled Sobol sequence: it covers the space more evenly than random configurations do, at any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.errors import ConfigError
from strata.tune.samplers.base import Sampler
from strata.tune.space import space as spaces

if TYPE_CHECKING:
    from strata.tune.samplers.base import Outcome
    from strata.tune.space.parameters import Config
    from strata.tune.space.space import SearchSpace

_BELOW_1 = 1.0 - 2**-53


class SobolSampler(Sampler):
    def __init__(self, space: SearchSpace, *, seed: int) -> None:
        """
        Raises:
            ConfigError: scipy is not installed.
        """
        try:
            from scipy.stats import qmc  # noqa: PLC0415 - optional, and takes a second
        except ImportError:
            raise ConfigError(
                "'sobol' needs scipy, which is not installed; pip install 'strata-runtime[tune]', or use 'random'"
            ) from None
        self._space = space
        self._points = qmc.Sobol(max(1, len(space.parameters)), scramble=True, rng=np.random.default_rng(seed))

    def ask(self, number: int) -> Config:  # noqa: ARG002 - the port
        num_parameters = len(self._space.parameters)
        for _ in range(spaces.MAX_REJECTED):
            units = self._points.random(1)[0][:num_parameters]
            config = self._space.at([min(float(each), _BELOW_1) for each in units])
            if self._space.is_allowed(config):
                return config
        return self._space.draw(np.random.default_rng(0))  # raises, with the reason

    def add(self, number: int, config: Config) -> None:
        pass

    def tell(self, number: int, outcome: Outcome) -> None:
        pass
