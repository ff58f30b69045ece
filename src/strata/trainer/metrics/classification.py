"""Metrics of classification: binary targets of 0 and 1, or class indices.

`from_logits` declares what the predictions are: True for logits, False for probabilities. None stands for unknown: such
predictions are read as probabilities, and a value outside [0, 1] is an error that names the cure, because a guess made
from each batch would depend on how rows are cut into batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.trainer.metrics import rows as reading
from strata.trainer.metrics.base import Better, MeanMetric, State, SumMetric, divide
from strata.trainer.metrics.rows import LOG_FLOOR, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORE_INDEX = -100
"""Class index of rows to leave out, as in `torch.nn.CrossEntropyLoss`."""


class LogLoss(MeanMetric):
    """The mean binary cross-entropy; targets may lie between 0 and 1."""

    default_name = "logloss"

    def __init__(self, *, from_logits: bool | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.from_logits = from_logits

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        return reading.binary(self.name, predictions, targets, weights, from_logits=self.from_logits, soft=True)

    def _per_row(self, rows: Rows) -> torch.Tensor:
        targets = rows.targets.double()
        if self.from_logits:
            return functional.binary_cross_entropy_with_logits(rows.predictions.double(), targets, reduction="none")
        chances = reading.probabilities(self.name, rows.predictions, from_logits=self.from_logits)
        return functional.binary_cross_entropy(chances, targets, reduction="none")


class CrossEntropy(MeanMetric):
    """The mean cross-entropy of a score per class; log-probabilities count as logits.

    Args:
        class_weights: A weight per class, which multiplies the weights of its rows, as `weight` of
            `torch.nn.CrossEntropyLoss` does.
    """

    default_name = "cross_entropy"

    def __init__(
        self,
        *,
        from_logits: bool | None = None,
        class_weights: Sequence[float] | None = None,
        ignore_index: int | None = IGNORE_INDEX,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.from_logits = from_logits
        self.ignore_index = ignore_index
        self.class_weights = None if class_weights is None else torch.as_tensor(class_weights, dtype=torch.float64)
        if self.class_weights is not None and not bool((self.class_weights >= 0).all()):
            raise InvalidArgument(
                f"class_weights={class_weights!r} has a negative or NaN weight; use 0 or more", field="class_weights"
            )

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        rows = reading.classes(self.name, predictions, targets, weights, ignore_index=self.ignore_index)
        if self.class_weights is None:
            return rows
        if len(self.class_weights) != rows.predictions.shape[1]:
            raise InvalidArgument(
                f"class_weights has {len(self.class_weights)} weights for {rows.predictions.shape[1]} classes; "
                "give one per class",
                field="class_weights",
            )
        own = self.class_weights[rows.targets]
        return Rows(rows.predictions, rows.targets, own if rows.weights is None else own * rows.weights, rows.has_nan)

    def _per_row(self, rows: Rows) -> torch.Tensor:
        if self.from_logits:
            logarithms = functional.log_softmax(rows.predictions.double(), dim=1)
            return -logarithms.gather(1, rows.targets[:, None]).squeeze(1)
        chances = reading.probabilities(self.name, rows.predictions, from_logits=self.from_logits)
        return -chances.gather(1, rows.targets[:, None]).squeeze(1).log().clamp_min(LOG_FLOOR)


class Accuracy(MeanMetric):
    """The share of correct rows: of `[N]` scores above the threshold, of `[N, C]` scores the largest.

    Args:
        threshold: The probability above which a binary prediction is positive.
    """

    better: Better = "higher"
    default_name = "accuracy"

    def __init__(
        self,
        *,
        from_logits: bool | None = None,
        threshold: float = 0.5,
        ignore_index: int | None = IGNORE_INDEX,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.from_logits = from_logits
        self.threshold = _checked_threshold(threshold)
        self.ignore_index = ignore_index

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        if _is_per_class(predictions, targets):
            return reading.classes(self.name, predictions, targets, weights, ignore_index=self.ignore_index)
        return reading.binary(self.name, predictions, targets, weights, from_logits=self.from_logits)

    def _per_row(self, rows: Rows) -> torch.Tensor:
        if rows.predictions.dim() == 2:
            return rows.predictions.argmax(dim=1) == rows.targets
        return _positive(self.name, rows.predictions, self.from_logits, self.threshold) == (rows.targets == 1)


class Calibration(SumMetric):
    """The mean prediction over the mean target: 1 is calibrated, above 1 the module predicts too much.

    The best value is 1, which neither "lower" nor "higher" expresses: monitor `logloss` for early stopping.
    """

    default_name = "calibration"
    num_sums = 3  # weight, predictions, targets

    def __init__(self, *, from_logits: bool | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.from_logits = from_logits

    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        return reading.binary(self.name, predictions, targets, weights, from_logits=self.from_logits, soft=True)

    def _terms(self, rows: Rows) -> torch.Tensor:
        if self.from_logits:
            chances = rows.predictions.double().sigmoid()
        else:
            chances = reading.probabilities(self.name, rows.predictions, from_logits=self.from_logits)
        return torch.stack((rows.total(), rows.sum(chances), rows.sum(rows.targets)))

    def _value(self, *sums: float) -> float:
        _, predicted, observed = sums
        return divide(predicted, observed)


class _ConfusionMetric(ABC):
    """Counts true positives, false positives and false negatives, per class if there are several.

    `[N]` scores, and `[N, 2]` scores of two classes, are binary: only the positive class counts. Of `[N, C]` scores the
    value is the macro average, the mean over the classes that occur among targets or predictions. A quotient without
    any row in its denominator is 0.
    """

    better: Better = "higher"
    default_name: ClassVar[str]

    def __init__(
        self,
        *,
        from_logits: bool | None = None,
        threshold: float = 0.5,
        ignore_index: int | None = IGNORE_INDEX,
        name: str | None = None,
    ) -> None:
        self.name = name or self.default_name
        self.from_logits = from_logits
        self.threshold = _checked_threshold(threshold)
        self.ignore_index = ignore_index
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def reset(self) -> None:
        self._counts = torch.zeros((3, 0), dtype=torch.float64)

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        if _is_per_class(predictions, targets) and predictions.shape[1] != 2:
            rows = reading.classes(self.name, predictions, targets, weights, ignore_index=self.ignore_index)
            num_classes = predictions.shape[1]
        else:
            rows = reading.binary(self.name, predictions, targets, weights, from_logits=self.from_logits)
            num_classes = 1
        if not len(rows):
            return
        found = self._count(rows, num_classes) if not rows.has_nan else torch.full((3, num_classes), math.nan)
        self._counts = self._added(self._counts, found)

    def state(self) -> dict[str, torch.Tensor]:
        return {"counts": self._counts.clone()}

    def merge(self, states: Sequence[State]) -> None:
        counts = torch.zeros((3, 0), dtype=torch.float64)
        for state in states:
            counts = self._added(counts, state["counts"])
        self._counts = counts

    def compute(self) -> float:
        if self._counts.shape[1] == 0 or bool(self._counts.isnan().any()):
            return math.nan
        seen = self._counts.sum(dim=0) > 0
        if self._counts.shape[1] > 1:
            return float(self._quotient(self._counts[:, seen]).mean())
        return float(self._quotient(self._counts))

    def _count(self, rows: Rows, num_classes: int) -> torch.Tensor:
        weights = torch.ones(len(rows), dtype=torch.float64) if rows.weights is None else rows.weights
        if num_classes == 1:
            predicted = _positive(self.name, rows.predictions, self.from_logits, self.threshold)
            actual = rows.targets == 1
            hits = (predicted & actual, predicted & ~actual, ~predicted & actual)
            return torch.stack([weights[hit].sum() for hit in hits])[:, None]
        chosen = rows.predictions.argmax(dim=1)
        right = torch.where(chosen == rows.targets, weights, 0.0)
        true = torch.bincount(chosen, right, num_classes)
        predicted = torch.bincount(chosen, weights, num_classes)
        return torch.stack((true, predicted - true, torch.bincount(rows.targets, weights - right, num_classes)))

    def _added(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if 0 in (left.shape[1], right.shape[1]):
            return (left if right.shape[1] == 0 else right).clone()
        if left.shape != right.shape:
            raise InvalidArgument(
                f"metric {self.name!r} got predictions for {right.shape[1]} classes after predictions for "
                f"{left.shape[1]}; every batch must have the same classes",
                field="predictions",
            )
        return left + right

    @abstractmethod
    def _quotient(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the value of each class from its true positives, false positives and false negatives."""


class Precision(_ConfusionMetric):
    """The share of positive predictions that are right."""

    default_name = "precision"

    def _quotient(self, counts: torch.Tensor) -> torch.Tensor:
        true, false, _ = counts
        return _ratio(true, true + false)


class Recall(_ConfusionMetric):
    """The share of positive rows that are found."""

    default_name = "recall"

    def _quotient(self, counts: torch.Tensor) -> torch.Tensor:
        true, _, missed = counts
        return _ratio(true, true + missed)


class F1(_ConfusionMetric):
    """The harmonic mean of precision and recall."""

    default_name = "f1"

    def _quotient(self, counts: torch.Tensor) -> torch.Tensor:
        true, false, missed = counts
        return _ratio(2 * true, 2 * true + false + missed)


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.where(whole > 0, part / whole, torch.zeros_like(whole))


def _is_per_class(predictions: torch.Tensor, targets: torch.Tensor) -> bool:
    """Tell a score per class, `[N, C]` against `[N]` or `[N, 1]`, from one score per target."""
    return predictions.dim() > 1 and predictions.shape[1] > 1 and predictions.shape != targets.shape


def _positive(metric: str, predictions: torch.Tensor, from_logits: bool | None, threshold: float) -> torch.Tensor:
    if from_logits:
        # Compared in the space of logits: a sigmoid in float32 would round logits near the threshold onto it.
        return predictions.double() > math.log(threshold / (1 - threshold))
    return reading.probabilities(metric, predictions, from_logits=from_logits) > threshold


def _checked_threshold(threshold: float) -> float:
    if not 0 < threshold < 1:
        raise InvalidArgument(
            f"threshold={threshold!r} is not a probability between 0 and 1; 0.5 is usual", field="threshold"
        )
    return float(threshold)
