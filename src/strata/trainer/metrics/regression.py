"""Metrics of regression: the error of a prediction against a target of any size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from strata.trainer.metrics import rows as reading
from strata.trainer.metrics.base import Better, MeanMetric, State, SumMetric, divide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.trainer.metrics.rows import Rows


class _ErrorMetric(MeanMetric):
    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        return reading.paired(self.name, predictions, targets, weights)


class MeanSquaredError(_ErrorMetric):
    """The mean of the squared error."""

    default_name = "mse"

    def _per_row(self, rows: Rows) -> torch.Tensor:
        return (rows.predictions.double() - rows.targets.double()).square()


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared error, in the unit of the target."""

    default_name = "rmse"

    def _value(self, *sums: float) -> float:
        return math.sqrt(super()._value(*sums))


class MeanAbsoluteError(_ErrorMetric):
    """The mean of the absolute error."""

    default_name = "mae"

    def _per_row(self, rows: Rows) -> torch.Tensor:
        return (rows.predictions.double() - rows.targets.double()).abs()


class R2(SumMetric):
    """The share of the variance of the targets that the predictions explain; NaN if all targets are equal.

    The variance is merged from means and squared deviations (Chan et al., 1979). The difference of the sums of squares
    would cancel where the mean is much larger than the spread.
    """

    better: Better = "higher"
    default_name = "r2"
    num_sums = 4  # weight, mean of the targets, their squared deviations, squared errors

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        rows = self._read(predictions, targets, weights)
        if rows.has_nan:
            self._sums += math.nan
        elif len(rows):
            self._sums = _combine(self._sums, self._terms(rows))

    def merge(self, states: Sequence[State]) -> None:
        moments = torch.zeros(self.num_sums, dtype=torch.float64)
        for state in states:
            moments = _combine(moments, state["sums"])
        self._sums = moments

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        return reading.paired(self.name, predictions, targets, weights)

    def _terms(self, rows: Rows) -> torch.Tensor:
        targets = rows.targets.double()
        weight = rows.total()
        mean = rows.sum(targets) / weight if weight > 0 else torch.zeros((), dtype=torch.float64)
        deviations = rows.sum((targets - mean).square())
        errors = rows.sum((rows.predictions.double() - targets).square())
        return torch.stack((weight, mean, deviations, errors))

    def _value(self, *sums: float) -> float:
        _, _, deviations, errors = sums
        return 1.0 - divide(errors, deviations)


def _combine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the moments of two sets of rows together."""
    if left[0] == 0:
        return right.clone()
    if right[0] == 0:
        return left.clone()
    weight = left[0] + right[0]
    shift = right[1] - left[1]
    mean = left[1] + shift * (right[0] / weight)
    deviations = left[2] + right[2] + shift.square() * (left[0] * right[0] / weight)
    return torch.stack((weight, mean, deviations, left[3] + right[3]))
