"""What the values of a report mean: objectives in both directions, limits of other metrics, and which trials are best.

A *constraint* limits a metric: "memory_gb <= 16". Trials report the metrics of constraints like their objectives. A
trial that violates one at its end is finished, and the sampler learns from it, but it cannot be the best.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.state.events import MAX_CONSTRAINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.tune.schedulers.base import Losses
    from strata.tune.state.events import StudySpec, Values
    from strata.tune.state.trial import Trial

_LIMIT = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(<=|>=)\s*([-+]?[\w.+-]+)\s*")


@dataclass(frozen=True, slots=True)
class Limit:
    metric: str
    is_upper: bool
    bound: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """
        Raises:
            ConfigError: The text is not a metric, "<=" or ">=", and a number.
        """
        found = _LIMIT.fullmatch(text)
        try:
            bound = float(found[3]) if found is not None else math.nan
        except ValueError:
            bound = math.nan
        if found is None or not math.isfinite(bound):
            raise ConfigError(
                f"constraint {text!r} must be a metric, <= or >=, and a number, such as 'memory_gb <= 16'",
                field="constraints",
            )
        return cls(found[1], found[2] == "<=", bound)

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> list[Limit]:
        """
        Raises:
            ConfigError: One is invalid, or there are too many.
        """
        if len(texts) > MAX_CONSTRAINTS:
            raise ConfigError(
                f"{len(texts)} constraints are given, at most {MAX_CONSTRAINTS} are allowed; report the largest of "
                "several values as one metric",
                field="constraints",
            )
        return [cls.parse(text) for text in texts]

    def violation(self, value: float | None) -> float:
        """Return by how much a value is beyond the limit; infinite if it is not a number."""
        if value is None or not math.isfinite(value):
            return math.inf
        return value - self.bound if self.is_upper else self.bound - value


class Objectives:
    def __init__(self, spec: StudySpec) -> None:
        self._signs = [1.0 if each == "min" else -1.0 for each in spec.directions]
        self._limits = Limit.parse_all(spec.constraints)
        more = dict.fromkeys(each.metric for each in self._limits if each.metric not in spec.metrics)
        self.metrics = spec.metrics
        self.names = (*spec.metrics, *more)
        """The metrics in every report, in this order."""

    def losses(self, values: Values) -> Losses:
        """Return the objectives so that lower is better; infinite where they are not numbers."""
        if not values:
            return (math.inf,) * len(self._signs)
        return tuple(
            sign * value if value is not None and math.isfinite(value) else math.inf
            for sign, value in zip(self._signs, values, strict=False)
        )

    def violations(self, values: Values) -> tuple[float, ...]:
        """Return by how much each constraint is violated; it holds up to 0."""
        known = dict(zip(self.names, values, strict=False))
        return tuple(each.violation(known.get(each.metric)) for each in self._limits)

    def is_feasible(self, trial: Trial) -> bool:
        """Return whether a trial meets all constraints."""
        return all(each <= 0 for each in self.violations(trial.values))

    def best(self, trials: Iterable[Trial]) -> Trial | None:
        """Return the finished trial with the best first objective that meets all constraints."""
        return min(self._candidates(trials), key=lambda each: (self.losses(each.values), each.number), default=None)

    def pareto(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return the finished trials that meet all constraints and that no other one dominates, by number."""
        front: list[tuple[Losses, Trial]] = []
        for trial in sorted(self._candidates(trials), key=lambda each: self.losses(each.values)):
            losses = self.losses(trial.values)
            if not any(_dominates(other, losses) for other, _ in front):  # they come first in this order
                front.append((losses, trial))
        return sorted((trial for _, trial in front), key=lambda each: each.number)

    def _candidates(self, trials: Iterable[Trial]) -> list[Trial]:
        return [each for each in trials if each.state == "finished" and self.is_feasible(each)]


def _dominates(a: Losses, b: Losses) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))
