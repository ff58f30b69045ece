"""Exact and binned statistics of scores against binary labels, in numpy.

Rows with equal scores form a *group*; what AUC and average precision need of a group is the weight of its positive and
of its negative rows. `groups` sorts rows and yields them in slices, so memory beyond the sorted keys stays bounded. A
histogram over the bit patterns of float32 has the same form: its bins are groups in which some scores only seem equal,
and that bounds the error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Group: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
"""Weights of the positive and of the negative rows, one element per distinct score."""

SLICE_ROWS = 1 << 18
"""Sorted rows looked at together: few enough for the cache, enough to hide the cost of numpy's calls."""
BIN_BITS = 22
"""Bits of a float32 that choose its bin: the sign, the exponent and 13 bits of the mantissa (1 part in 8,192)."""
NUM_BINS = 1 << BIN_BITS

_SIGN = np.uint32(1 << 31)


def groups(scores: NDArray[Any], labels: NDArray[np.uint8], weights: NDArray[np.float32] | None) -> Iterator[Group]:
    """Yield the groups of rows with equal scores, in ascending order of the score.

    Without weights the counts are whole numbers (int64), so sums of them are exact.
    """
    if weights is None and scores.dtype == np.float32:
        yield from _counted(scores, labels)
        return
    order = _order(scores)
    ordered = scores[order]
    for start, end in _slices(ordered):
        rows = order[start:end]
        row_weights = np.ones(end - start) if weights is None else weights[rows].astype(np.float64)
        positive = row_weights * labels[rows]
        firsts = _firsts(ordered[start:end])
        yield np.add.reduceat(positive, firsts), np.add.reduceat(row_weights - positive, firsts)


def bins_of(scores: NDArray[Any]) -> NDArray[np.int64]:
    """Return the bin of each score; a larger score never has a smaller bin."""
    return (_ordered_bits(scores.astype(np.float32, copy=False)) >> np.uint32(32 - BIN_BITS)).astype(np.int64)


def area_under_curve(slices: Iterable[Group]) -> tuple[float, float]:
    """Return the AUC and the largest error if groups held rows with different scores.

    The AUC is the share of pairs of a positive and a negative row in which the positive one has the larger score; ties
    count half. A group decides its own pairs to be ties, so each is wrong by at most one half. Both are NaN with rows
    of one class only.
    """
    twice_won: Any = 0
    tied: Any = 0
    positives: Any = 0
    below: Any = 0
    for positive, negative in slices:
        before = np.cumsum(negative) - negative + below
        twice_won += (positive * (2 * before + negative)).sum().item()
        tied += (positive * negative).sum().item()
        positives += positive.sum().item()
        below += negative.sum().item()
    pairs = positives * below
    if not pairs > 0:
        return math.nan, math.nan
    return twice_won / (2 * pairs), tied / (2 * pairs)


def average_precision(slices: Iterable[Group]) -> tuple[float, float]:
    """Return the average precision and the largest error if groups held rows with different scores.

    `slices` come in *descending* order of the score. The value is the mean, over positive rows, of the precision at the
    row's score. Within a group, the precision of a positive row lies between that with all negative rows of the group
    before it, and that with all of them behind it. Both are NaN without positive rows.
    """
    true: Any = 0
    false: Any = 0
    value = lowest = highest = 0.0
    for positive, negative in slices:
        true_after, false_after = np.cumsum(positive) + true, np.cumsum(negative) + false
        true_before, false_before = true_after - positive, false_after - negative
        value += float(positive @ _share(true_after, false_after))
        lowest += float(positive @ _share(true_before, false_after))
        highest += float(positive @ _share(true_after, false_before))
        true += positive.sum().item()
        false += negative.sum().item()
    if not true > 0:
        return math.nan, math.nan
    return value / true, max(highest - value, value - lowest) / true


def _counted(scores: NDArray[np.float32], labels: NDArray[np.uint8]) -> Iterator[Group]:
    """Yield groups from sorted 32-bit keys that hold the score and, in the lowest bit, the label.

    There is no bit to spare for the label, so negative and other scores are sorted apart, which frees the sign's.
    """
    bits = _ordered_bits(scores)
    is_upper = bits >= _SIGN
    num_upper = int(np.count_nonzero(is_upper))
    halves: list[NDArray[np.bool_] | slice] = [~is_upper, is_upper]
    if num_upper in (0, len(bits)):
        halves = [slice(None)]
    for half in halves:
        keys = (bits[half] << np.uint32(1)) | labels[half]
        keys.sort()
        for start, end in _slices(keys, spare_bits=1):
            part = keys[start:end]
            firsts = _firsts(part >> np.uint32(1))
            positive = np.add.reduceat(part & np.uint32(1), firsts, dtype=np.int64)
            yield positive, np.diff(firsts, append=end - start) - positive


def _ordered_bits(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Map float32 to uint32 so that the order is kept; -0.0 becomes 0.0, as the two are equal."""
    bits = (scores + np.float32(0)).view(np.uint32)
    # A negative float is ordered by its inverted bits; the others follow once their sign bit is set.
    return bits ^ np.where(bits >= _SIGN, np.uint32(0xFFFFFFFF), _SIGN)


def _order(scores: NDArray[Any]) -> NDArray[np.int64]:
    """Return the permutation that sorts scores; rows with equal scores keep their order."""
    if scores.dtype != np.float32 or len(scores) >= 1 << 32:
        return np.argsort(scores, kind="stable")
    # Sorting 64-bit keys of score and row takes half the time of argsort.
    keys = _ordered_bits(scores).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(scores), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _slices(ordered: NDArray[Any], *, spare_bits: int = 0) -> Iterator[tuple[int, int]]:
    """Cut sorted values into slices that keep equal values together; `spare_bits` of integers do not count."""
    start = 0
    while start < len(ordered):
        last = ordered[min(start + SLICE_ROWS, len(ordered)) - 1]
        if spare_bits:
            last |= ordered.dtype.type((1 << spare_bits) - 1)
        end = int(np.searchsorted(ordered, last, side="right"))
        yield start, end
        start = end


def _firsts(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each run of equal values starts."""
    changes = np.empty(len(ordered), dtype=np.bool_)
    changes[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=changes[1:])
    return np.flatnonzero(changes)


def _share(true: NDArray[Any], false: NDArray[Any]) -> NDArray[np.float64]:
    whole: NDArray[np.float64] = (true + false).astype(np.float64)
    share = np.zeros_like(whole)
    np.divide(true, whole, out=share, where=whole > 0)
    return share
