"""Splitmix64: spreads 64-bit numbers evenly, one to one. Row orders, shard placement, features and tables rely on its
exact values, which therefore never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The step between two numbers of splitmix64."""


def finalize(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix numbers in place, and return them: neighboring numbers end up far apart."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= np.right_shift(values, np.uint64(27), out=shifted)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= np.right_shift(values, np.uint64(31), out=shifted)
    return values


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hash of each number. Different numbers have different hashes."""
    return finalize(values + GOLDEN)
