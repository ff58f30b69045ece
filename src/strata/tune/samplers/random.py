"""Independent random configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.tune.samplers.base import Sampler

if TYPE_CHECKING:
    from strata.tune.samplers.base import Outcome
    from strata.tune.space.parameters import Config
    from strata.tune.space.space import SearchSpace


class RandomSampler(Sampler):
    def __init__(self, space: SearchSpace, *, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)

    def ask(self, number: int) -> Config:  # noqa: ARG002 - the port
        return self._space.draw(self._rng)

    def add(self, number: int, config: Config) -> None:
        pass

    def tell(self, number: int, outcome: Outcome) -> None:
        pass
