"""Stop a trial whose best loss is worse than the median of the others at the same step.

As in Google Vizier, the others are represented by the running means of their losses, which a single lucky report does
not change much.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.schedulers.base import CONTINUE, Scheduler, Verdict

if TYPE_CHECKING:
    from strata.tune.space.parameters import Config

MAX_STEPS = 10_000
"""Different steps that are compared. Reports at others count for nothing."""


@dataclass(slots=True)
class _Curve:
    best: float = math.inf
    total: float = 0.0
    num_reports: int = 0


class Median(Scheduler):
    def __init__(self, *, min_trials: int = 5, min_step: int = 0) -> None:
        """
        Args:
            min_trials: Stop no trial before this number of others have reported the same step.
            min_step: Stop no trial before this step.
        """
        if min_trials < 1:
            raise ConfigError(f"min_trials={min_trials} must be 1 or more", field="min_trials")
        self._min_trials = min_trials
        self._min_step = min_step
        self._curves: dict[int, _Curve] = {}
        self._means: dict[int, list[float]] = {}
        """Running means of all trials by step, sorted."""

    def started(self, trial: int, config: Config) -> None:  # noqa: ARG002 - the port
        self._curves[trial] = _Curve()

    def reported(self, trial: int, step: int, loss: float, *, is_contended: bool) -> Verdict:  # noqa: ARG002
        curve = self._curves[trial]
        curve.best = min(curve.best, loss)
        curve.total += loss
        curve.num_reports += 1
        if step not in self._means and len(self._means) >= MAX_STEPS:
            return CONTINUE
        others = self._means.setdefault(step, [])
        verdict = self._decide(curve, step, others)
        insort(others, curve.total / curve.num_reports)
        return verdict

    def ended(self, trial: int, *, is_failed: bool) -> None:  # noqa: ARG002
        self._curves.pop(trial, None)

    def _decide(self, curve: _Curve, step: int, others: list[float]) -> Verdict:
        if step < self._min_step or len(others) < self._min_trials:
            return CONTINUE
        middle = len(others) // 2
        median = others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2
        if curve.best <= median:
            return CONTINUE
        return Verdict("stop", f"its best loss {curve.best:.4g} is above the median {median:.4g} at step {step}")
