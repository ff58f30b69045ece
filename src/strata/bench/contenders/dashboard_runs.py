"""The runs that every dashboard shows. Peers load this file in their environment, so it does not import Strata."""

from __future__ import annotations

import math
import sys

RUNS = tuple(f"bench-run-{number:02d}" for number in range(4 if "--quick" in sys.argv else 16))
METRICS = ("bench_loss", "bench_accuracy", "bench_grad_norm", "bench_learning_rate")
NUM_POINTS = 360
"""Values of each metric of a run: one every 10 s for an hour."""
EVERY_S = 10
NAMES = r"bench-run-\d\d|bench_(loss|accuracy|grad_norm|learning_rate)"
"""Matches the name of any run or metric. The page that shows one of them is of use."""


def value(metric: str, run: int, step: int) -> float:
    """Return the value of a metric at a step: smooth curves that differ between runs."""
    progress = step / NUM_POINTS
    wobble = 0.02 * math.sin(step * 0.7 + run)
    match metric:
        case "bench_loss":
            return math.exp(-(2 + run / 8) * progress) + wobble
        case "bench_accuracy":
            return 1 - 0.9 * math.exp(-(3 + run / 8) * progress) + wobble
        case "bench_grad_norm":
            return 1 / (1 + 5 * progress) + wobble
        case _:
            return 1e-3 * (1 + math.cos(math.pi * progress)) / 2
