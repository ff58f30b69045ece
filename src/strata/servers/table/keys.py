"""Keys: the 64-bit names of rows, and what is computed from them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from strata.servers.table import native
from strata.splitmix import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys: TypeAlias = NDArray[np.uint64]
    Positions: TypeAlias = NDArray[np.int64]

NUM_BUCKETS = 4_096
"""Buckets of keys. A bucket is the unit that moves between servers."""
_BUCKET_SHIFT = np.uint64(64 - NUM_BUCKETS.bit_length() + 1)
_KEY_BITS = 64
_MIN_RADIX = 4_096
"""Keys from which on a radix sort, whose passes look at every digit, takes less time than numpy's."""


def buckets(keys: Keys) -> NDArray[np.int64]:
    """Return the bucket of each key."""
    return (mix(keys) >> _BUCKET_SHIFT).astype(np.int64)


class Unique(NamedTuple):
    """The different keys of a batch, and where each of them occurs."""

    keys: Keys
    """Ascending."""
    inverse: Positions
    """For each position of the batch, the index of its key in `keys`."""
    positions: Positions
    """The positions of the batch, grouped by key and ascending within a key."""
    starts: Positions
    """Where the group of each key starts in `positions`."""


def unique(keys: Keys) -> Unique:
    """Group the positions of a batch by key, with a single sort."""
    num = len(keys)
    if not num:
        empty = np.empty(0, np.int64)
        return Unique(keys.copy(), empty, empty, empty)
    bits = max((num - 1).bit_length(), 1)
    largest = int(keys.max())
    if largest >> (_KEY_BITS - bits):  # no room for the position beside the key
        positions = np.argsort(keys, kind="stable")
        in_order = keys[positions]
    elif native.group is not None and num >= _MIN_RADIX:
        different, inverse, positions, starts = np.empty_like(keys), *(np.empty(num, np.int64) for _ in range(3))
        num_different = native.group(keys, largest.bit_length(), bits, different, inverse, positions, starts)
        return Unique(different[:num_different].copy(), inverse, positions, starts[:num_different].copy())
    else:
        packed = (keys << np.uint64(bits)) | np.arange(num, dtype=np.uint64)
        packed.sort()
        in_order = packed >> np.uint64(bits)
        positions = (packed & np.uint64((1 << bits) - 1)).astype(np.int64)
    is_first = np.empty(num, np.bool_)
    is_first[0] = True
    np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    inverse = np.empty(num, np.int64)
    inverse[positions] = np.cumsum(is_first) - 1
    return Unique(in_order[starts], inverse, positions, starts)
