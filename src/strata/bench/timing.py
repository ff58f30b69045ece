"""Timing helpers for contenders."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def median_ms(work: Callable[[], object], *, repetitions: int, warm_up: int = 5) -> float:
    """Return the median of `repetitions` runs after `warm_up` runs."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
