"""Initial values of rows: a function of seed, key and column alone.

A row starts with the same values whenever it is first seen, whichever server owns it, and again after an eviction.
The generator is counter-based: splitmix64 over (seed, key, column). Normal values come from it in pairs, by Box-Muller
with the polynomials of `native`: libraries round logarithms and sines differently, sums and products are the same on
every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strata.errors import InvalidArgument
from strata.servers.table import native
from strata.splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows

_BLOCK = 1_024
"""Rows that numpy computes at a time, so that its temporary arrays stay in the cache."""
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
            raise InvalidArgument(f"scale={self.scale!r} must be a number, 0 or more", field="scale")

    def values(self, keys: Keys, width: int) -> Rows:
        """Return the initial rows of these keys."""
        rows = np.empty((len(keys), width), np.float32)
        self.fill(keys, rows, np.arange(len(keys)))
        return rows

    def fill(self, keys: Keys, rows: Rows, at: NDArray[np.integer[Any]]) -> None:
        """Write the initial row of each key into `rows`, at the positions `at`."""
        if self.kind == "zeros":
            rows[at] = 0
            return
        is_normal = self.kind == "normal"
        word = np.uint64((self.seed * int(GOLDEN) + is_normal) & 0xFFFF_FFFF_FFFF_FFFF)
        compiled = native.fill_normal if is_normal else native.fill_uniform
        if compiled is not None:
            compiled(keys, word, self.scale, rows, at)
            return
        compute = _normal if is_normal else _uniform
        for start in range(0, len(keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            rows[at[block]] = compute(mix(mix(keys[block]) ^ word), rows.shape[1], self.scale)


def _hashes(of_key: Keys, num: int) -> Keys:
    return mix(of_key[:, None] + np.arange(num, dtype=np.uint64) * GOLDEN)


def _uniform(of_key: Keys, width: int, scale: float) -> NDArray[np.float64]:
    fractions = (_hashes(of_key, width) >> np.uint64(11)).astype(np.float64) * native.UNIT_53
    values: NDArray[np.float64] = (fractions * 2.0 - 1.0) * scale
    return values


def _normal(of_key: Keys, width: int, scale: float) -> NDArray[np.float64]:
    hashes = _hashes(of_key, -(-width // 2))
    bits = native.fraction(hashes >> np.uint64(32)).view(np.int64)
    powers = (bits - native.ROOT_HALF) >> 52
    radii = native.radius((bits - (powers << 52)).view(np.float64), powers, scale)
    angles = native.angle(hashes & np.uint64(0x7FFF_FFFF))
    signs = native.sign((hashes >> np.uint64(31)) & np.uint64(1))
    pairs = np.stack([radii * native.sine(angles), radii * native.cosine(angles) * signs], axis=-1)
    return pairs.reshape(len(of_key), -1)[:, :width]
