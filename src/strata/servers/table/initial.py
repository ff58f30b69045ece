"""Initial values of rows: a function of seed, key and column alone.

A row starts with the same values whenever it is first seen, whichever server owns it, and again after an eviction.
The generator is counter-based: splitmix64 over (seed, key, column).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from strata.errors import InvalidArgument
from strata.splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys

_UNIT = 2.0**-53
_ONE_OF = ("uniform", "normal", "zeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """The distribution of initial values."""

    kind: Literal["uniform", "normal", "zeros"] = "normal"
    scale: float = 0.01
    """Uniform: values lie in ± scale. Normal: the standard deviation."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _ONE_OF:
            raise InvalidArgument(f"kind={self.kind!r} is unknown; use {', '.join(_ONE_OF)}", field="kind")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise InvalidArgument(f"scale={self.scale!r} is not a number from 0", field="scale")

    def values(self, keys: Keys, width: int) -> NDArray[np.float32]:
        """Return the initial rows of these keys."""
        if self.kind == "zeros" or not len(keys):
            return np.zeros((len(keys), width), np.float32)
        if self.kind == "uniform":
            drawn = (self._fractions(keys, width, stream=0) * 2.0 - 1.0) * self.scale
        else:  # Box-Muller
            radius = np.sqrt(-2.0 * np.log1p(-self._fractions(keys, width, stream=0)))
            drawn = radius * np.cos(2.0 * math.pi * self._fractions(keys, width, stream=1)) * self.scale
        return drawn.astype(np.float32)

    def _fractions(self, keys: Keys, width: int, *, stream: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1)."""
        of_key = mix(mix(keys) ^ np.uint64((self.seed * int(GOLDEN) + stream) & 0xFFFF_FFFF_FFFF_FFFF))
        counters = of_key[:, None] + np.arange(width, dtype=np.uint64) * GOLDEN
        fractions: NDArray[np.float64] = (mix(counters) >> np.uint64(11)).astype(np.float64) * _UNIT
        return fractions
