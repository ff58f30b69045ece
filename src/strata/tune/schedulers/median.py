"""Stop a trial whose best loss is worse than the median of the others at the same step.

As in Google Vizier, the others are represented by the running means of their losses, which a single lucky report does
not change much. With several objectives, a trial is stopped if it is worse than the median in each of them.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.schedulers.base import CONTINUE, Scheduler, Verdict, check_compare

if TYPE_CHECKING:
    from strata.tune.schedulers.base import Compare, Losses
    from strata.tune.space.parameters import Config

MAX_STEPS = 10_000
"""Different steps that are compared. Reports at others count for nothing."""


@dataclass(slots=True)
class _Curve:
    """One objective of one trial."""

    best: float = math.inf
    total: float = 0.0
    num_reports: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.num_reports

    def add(self, loss: float) -> None:
        self.best = min(self.best, loss)
        self.total += loss
        self.num_reports += 1


class Median(Scheduler):
    def __init__(self, *, min_trials: int = 5, min_step: int = 0, compare: Compare = "dominance") -> None:
        """
        Args:
            min_trials: Stop no trial before this number of others have reported the same step.
            min_step: Stop no trial before this step.
            compare: "first" looks only at the first of several objectives.
        """
        check_compare(compare)
        if min_trials < 1:
            raise ConfigError(f"min_trials={min_trials} must be 1 or more", field="min_trials")
        self._min_trials = min_trials
        self._min_step = min_step
        self._is_first_only = compare == "first"
        self._curves: dict[int, list[_Curve]] = {}
        """By trial, one per objective."""
        self._means: dict[int, list[list[float]]] = {}
        """Running means of all trials by step and objective, sorted."""

    def started(self, trial: int, config: Config) -> None:  # noqa: ARG002 - the port
        self._curves[trial] = []

    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:  # noqa: ARG002
        losses = losses[:1] if self._is_first_only else losses
        curves = self._curves[trial]
        curves += [_Curve() for _ in losses[len(curves) :]]
        for curve, loss in zip(curves, losses, strict=True):
            curve.add(loss)
        if step not in self._means and len(self._means) >= MAX_STEPS:
            return CONTINUE
        others = self._means.setdefault(step, [[] for _ in losses])
        verdict = self._decide(curves, step, others)
        for each, curve in zip(others, curves, strict=True):
            insort(each, curve.mean)
        return verdict

    def ended(self, trial: int, *, is_failed: bool) -> None:  # noqa: ARG002
        self._curves.pop(trial, None)

    def _decide(self, curves: list[_Curve], step: int, others: list[list[float]]) -> Verdict:
        if step < self._min_step or len(others[0]) < self._min_trials:
            return CONTINUE
        medians = [_middle(each) for each in others]
        if any(curve.best <= median for curve, median in zip(curves, medians, strict=True)):
            return CONTINUE
        best, median = curves[0].best, medians[0]
        more = ", and so are its other objectives" if len(curves) > 1 else ""
        return Verdict("stop", f"its best loss {best:.4g} is above the median {median:.4g} at step {step}{more}")


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
