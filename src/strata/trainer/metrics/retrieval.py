"""Metrics of the first k: whether the right class, or the relevant items, are among the k highest scores."""

from __future__ import annotations

import torch

from strata.errors import InvalidArgument
from strata.trainer.metrics import rows as reading
from strata.trainer.metrics.base import Better, MeanMetric, require_positive
from strata.trainer.metrics.classification import IGNORE_INDEX
from strata.trainer.metrics.rows import Rows


class TopKAccuracy(MeanMetric):
    """The share of rows whose class is among the k highest of `[N, C]` scores.

    Of classes with equal scores the one with the lower index comes first, as in `argmax`: a module that gives every
    class the same score is not right about all of them.
    """

    better: Better = "higher"

    def __init__(self, *, k: int = 5, ignore_index: int | None = IGNORE_INDEX, name: str | None = None) -> None:
        super().__init__(name=name or f"accuracy@{k}")
        self.k = require_positive("k", k)
        self.ignore_index = ignore_index

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        return reading.classes(self.name, predictions, targets, weights, ignore_index=self.ignore_index)

    def _per_row(self, rows: Rows) -> torch.Tensor:
        return _ranks(rows.predictions, rows.targets) < self.k


class RecallAtK(MeanMetric):
    """The mean share of a query's relevant items that are among the k highest of its `[N, items]` scores.

    Targets are the index of the one relevant item, `[N]`, so that the value is the hit rate; or a matrix of 0 and 1,
    `[N, items]`, whose rows without a relevant item are left out.
    """

    better: Better = "higher"

    def __init__(self, *, k: int = 10, name: str | None = None) -> None:
        super().__init__(name=name or f"recall@{k}")
        self.k = require_positive("k", k)

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        if predictions.dim() != 2 or predictions.shape != targets.shape:
            return reading.classes(self.name, predictions, targets, weights, ignore_index=None)
        relevant = targets.detach().cpu()
        if not bool(((relevant == 0) | (relevant == 1)).all()):
            raise InvalidArgument(
                f"metric {self.name!r} got a relevance that is neither 0 nor 1; mark relevant items with 1",
                field="targets",
            )
        # Any valid index will do: the checks of shape, weights and NaN are the same.
        rows = reading.classes(
            self.name, predictions, torch.zeros(len(relevant), dtype=torch.int64), weights, ignore_index=None
        )
        kept = relevant.any(dim=1)
        kept_weights = None if rows.weights is None else rows.weights[kept]
        return Rows(rows.predictions[kept], relevant[kept], kept_weights, rows.has_nan)

    def _per_row(self, rows: Rows) -> torch.Tensor:
        if rows.targets.dim() == 1:
            return _ranks(rows.predictions, rows.targets) < self.k
        relevant = rows.targets.double()
        # A stable sort puts the lower index first among equal scores.
        first = rows.predictions.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        return relevant.gather(1, first).sum(dim=1) / relevant.sum(dim=1)


def _ranks(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the place of each row's class among its scores, from 0."""
    own = scores.gather(1, classes[:, None])
    indices = torch.arange(scores.shape[1])
    before = (scores > own) | ((scores == own) & (indices < classes[:, None]))
    return before.sum(dim=1)
