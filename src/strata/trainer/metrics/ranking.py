"""Metrics of ranking over all rows: AUC and average precision, exact up to a number of rows, bounded beyond it.

Neither is a function of sums, so rows are kept: 4 bytes for the score and 1 for the label, 4 more for a weight. Beyond
`max_rows` rows of all ranks they are counted in a histogram instead. Its bins are the same for all data, so the value
still does not depend on how rows are cut into batches or ranks, and `error_bound` states how far off it can be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from strata.errors import InvalidArgument
from strata.trainer.metrics import rows as reading
from strata.trainer.metrics import scores as score_groups
from strata.trainer.metrics.base import Better, State, require_positive
from strata.trainer.metrics.scores import NUM_BINS, Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

MAX_ROWS = 50_000_000
"""Rows of all ranks up to which values are exact: 250 MB."""
LARGEST_MAX_ROWS = 1 << 31
"""Twice the number of pairs of a positive and a negative row still fits an int64."""


class _RankingMetric(ABC):
    """Keeps the scores and labels of all rows, or their histogram.

    Predictions may be logits or probabilities: only their order matters. They are compared as float32, or as float64
    if they are given so; weights are float32.

    Args:
        from_logits: Only needed for `[N, 2]` predictions; see `rows.binary`.
        max_rows: Number of rows of all ranks up to which the value is exact.
    """

    better: Better = "higher"
    default_name: ClassVar[str]

    def __init__(self, *, from_logits: bool | None = None, max_rows: int = MAX_ROWS, name: str | None = None) -> None:
        self.name = name or self.default_name
        self.from_logits = from_logits
        self.max_rows = require_positive("max_rows", max_rows)
        if max_rows > LARGEST_MAX_ROWS:
            raise InvalidArgument(
                f"max_rows={max_rows} exceeds {LARGEST_MAX_ROWS}, the maximum that can be counted exactly; lower it",
                field="max_rows",
            )
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, max_rows={self.max_rows})"

    @property
    def num_rows(self) -> int:
        """The number of rows so far."""
        return self._num_rows

    def reset(self) -> None:
        self._num_rows = 0
        self._num_nan = 0
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._has_weights = False
        self._histogram: NDArray[np.float64] | None = None
        self.error_bound = 0.0
        """How far the last computed value can be from the exact one; 0 while all rows are kept."""

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        rows = reading.binary(self.name, predictions, targets, weights, from_logits=self.from_logits)
        self._num_rows += len(rows)
        if rows.has_nan:
            self._num_nan += int(rows.predictions.isnan().sum())
            return
        scores = rows.predictions
        scores = scores.clone() if scores.dtype in (torch.float32, torch.float64) else scores.float()
        kept_weights = None if rows.weights is None else rows.weights.float()
        self._add(scores, rows.targets.to(torch.uint8, copy=True), kept_weights)
        self.prepare(self._num_rows)

    def prepare(self, num_rows: int) -> None:
        """Replace the kept rows by their histogram if all ranks together have more than `max_rows`."""
        if num_rows <= self.max_rows or self._histogram is not None:
            return
        self._histogram = np.zeros((2, NUM_BINS))
        scores, labels, weights = self._rows()
        self._scores, self._labels, self._weights = [], [], []
        self._add(scores, labels, weights)

    def state(self) -> dict[str, torch.Tensor]:
        scores, labels, weights = self._rows()
        bins, counts = self._used_bins()
        return {
            "num_rows": torch.tensor([self._num_rows, self._num_nan]),
            "scores": scores,
            "labels": labels,
            "weights": torch.zeros(0) if weights is None else weights,
            "bins": torch.from_numpy(bins),
            "counts": torch.from_numpy(counts),
        }

    def merge(self, states: Sequence[State]) -> None:
        self.reset()
        totals = [state["num_rows"].tolist() for state in states]
        self._num_rows, self._num_nan = (sum(column) for column in zip(*totals, strict=True)) if totals else (0, 0)
        if any(len(state["bins"]) for state in states):
            self._histogram = np.zeros((2, NUM_BINS))
        self.prepare(self._num_rows)
        for state in states:
            self._add(state["scores"], state["labels"], state["weights"] if len(state["weights"]) else None)
            if self._histogram is not None:
                self._histogram[:, state["bins"].numpy()] += state["counts"].numpy()

    def compute(self) -> float:
        if self._num_nan or not self._num_rows:
            self.error_bound = math.nan
            return math.nan
        if self._histogram is not None:
            value, self.error_bound = self._binned(self._used_bins()[1])
            return value
        scores, labels, weights = self._rows()
        self.error_bound = 0.0
        return self._exact(scores.numpy(), labels.numpy(), None if weights is None else weights.numpy())

    def _add(self, scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> None:
        if not len(scores):
            return
        if self._histogram is not None:
            bins = score_groups.bins_of(scores.numpy())
            row_weights = np.ones(len(scores)) if weights is None else weights.numpy().astype(np.float64)
            bins += (1 - labels.numpy().astype(np.int64)) * NUM_BINS
            np.add.at(self._histogram.reshape(-1), bins, row_weights)  # Fast with a single index only.
            return
        if weights is not None and not self._has_weights:
            self._weights = [torch.ones(len(chunk)) for chunk in self._scores]
            self._has_weights = True
        self._scores.append(scores)
        self._labels.append(labels)
        if self._has_weights:
            self._weights.append(torch.ones(len(scores)) if weights is None else weights)

    def _used_bins(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers and the weights of bins with rows; most have none."""
        if self._histogram is None:
            return np.zeros(0, dtype=np.int64), np.zeros((2, 0))
        bins = np.flatnonzero(self._histogram[0] + self._histogram[1])
        return bins, self._histogram[:, bins]

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the kept rows, and keep them as one chunk from now on."""
        if len(self._scores) > 1:
            self._scores, self._labels = [torch.cat(self._scores)], [torch.cat(self._labels)]
            self._weights = [torch.cat(self._weights)] if self._has_weights else []
        if not self._scores:
            return torch.zeros(0), torch.zeros(0, dtype=torch.uint8), None
        return self._scores[0], self._labels[0], self._weights[0] if self._has_weights else None

    @abstractmethod
    def _exact(self, scores: NDArray[Any], labels: NDArray[np.uint8], weights: NDArray[np.float32] | None) -> float:
        """Return the value from all rows."""

    @abstractmethod
    def _binned(self, histogram: NDArray[np.float64]) -> tuple[float, float]:
        """Return the value and its error bound from the weights of positive and negative rows per bin."""


class AUC(_RankingMetric):
    """The area under the ROC curve: the chance that a positive row scores higher than a negative one.

    Ties count half (Mann-Whitney). The value is NaN if all rows have the same target.
    """

    default_name = "auc"

    def _exact(self, scores: NDArray[Any], labels: NDArray[np.uint8], weights: NDArray[np.float32] | None) -> float:
        return score_groups.area_under_curve(score_groups.groups(scores, labels, weights))[0]

    def _binned(self, histogram: NDArray[np.float64]) -> tuple[float, float]:
        return score_groups.area_under_curve(_as_groups(histogram))


class AveragePrecision(_RankingMetric):
    """The mean, over positive rows, of the precision at their score: the area under the precision-recall curve.

    It is not interpolated, and rows with equal scores share one precision. The value is NaN without positive rows.
    """

    default_name = "average_precision"

    def _exact(self, scores: NDArray[Any], labels: NDArray[np.uint8], weights: NDArray[np.float32] | None) -> float:
        return score_groups.average_precision(score_groups.groups(-scores, labels, weights))[0]

    def _binned(self, histogram: NDArray[np.float64]) -> tuple[float, float]:
        return score_groups.average_precision(_as_groups(histogram[:, ::-1]))


def _as_groups(histogram: NDArray[np.float64]) -> Iterable[Group]:
    positive, negative = histogram
    return [(positive, negative)]
