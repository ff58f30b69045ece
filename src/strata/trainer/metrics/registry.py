"""Create metrics from what users write: a name, an instance, a function, or a metric of torchmetrics."""

from __future__ import annotations

import copy
import difflib
import re
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from strata.errors import InvalidArgument
from strata.trainer.metrics.adapters import FunctionMetric, TorchMetric
from strata.trainer.metrics.base import Metric, ReadsLogits
from strata.trainer.metrics.classification import F1, Accuracy, Calibration, CrossEntropy, LogLoss, Precision, Recall
from strata.trainer.metrics.ranking import AUC, AveragePrecision
from strata.trainer.metrics.regression import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from strata.trainer.metrics.retrieval import RecallAtK, TopKAccuracy

if TYPE_CHECKING:
    from collections.abc import Callable

Spec: TypeAlias = "str | Metric | Callable[..., Any]"
"""A name, an instance of `Metric` or of `torchmetrics.Metric`, or a function of all predictions and targets."""

BY_NAME: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "auc": AUC,
    "average_precision": AveragePrecision,
    "calibration": Calibration,
    "cross_entropy": CrossEntropy,
    "f1": F1,
    "logloss": LogLoss,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
    "precision": Precision,
    "r2": R2,
    "recall": Recall,
    "rmse": RootMeanSquaredError,
    "top_k_accuracy": lambda: TopKAccuracy(name="top_k_accuracy"),
}
AT_K: dict[str, Callable[..., Metric]] = {"accuracy": TopKAccuracy, "recall": RecallAtK, "top_k_accuracy": TopKAccuracy}
"""Metrics of the first k, written as `accuracy@5`."""

NAMES = (*sorted(BY_NAME), "accuracy@k", "recall@k")
"""What `create` accepts as a name."""


def create(spec: Spec, *, from_logits: bool | None = None, name: str | None = None) -> Metric:
    """Return a metric of its own state: an instance is copied, so one description serves several runs.

    Args:
        spec: See `Spec`.
        from_logits: What is known of the predictions; an instance that states its own `from_logits` keeps it.
        name: Replaces the metric's own name.

    Raises:
        InvalidArgument: The name is unknown, or the object is not a metric.
    """
    metric = _named(spec) if isinstance(spec, str) else _given(spec)
    if isinstance(metric, ReadsLogits) and metric.from_logits is None:
        metric.from_logits = from_logits
    if name is not None:
        metric.name = name
    return metric


def _named(spec: str) -> Metric:
    if spec in BY_NAME:
        return BY_NAME[spec]()
    found = re.fullmatch(r"(\w+)@([1-9]\d{0,8})", spec)
    if found is not None and found[1] in AT_K:
        return AT_K[found[1]](k=int(found[2]), name=spec)
    close = [name for name in NAMES if spec and name.startswith(spec.lower())]
    close = close or difflib.get_close_matches(spec.lower(), NAMES, n=3)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise InvalidArgument(
        f"metric {spec!r} is unknown; {meant}Names are {', '.join(NAMES)}. A function of (predictions, targets) and an "
        "instance of torchmetrics.Metric work as well",
        field="metrics",
    )


def _given(spec: Metric | Callable[..., Any]) -> Metric:
    if isinstance(spec, type):
        raise InvalidArgument(
            f"metric {spec.__name__} is a class; pass an instance: {spec.__name__}()", field="metrics"
        )
    torchmetrics = sys.modules.get("torchmetrics")  # an instance exists only if it was imported
    if torchmetrics is not None and isinstance(spec, torchmetrics.Metric):
        return TorchMetric(copy.deepcopy(spec))
    if torchmetrics is not None and isinstance(spec, torchmetrics.MetricCollection):
        raise InvalidArgument("a MetricCollection is not a single metric; pass its metrics one by one", field="metrics")
    if isinstance(spec, Metric):
        metric = copy.deepcopy(spec)
        metric.reset()
        return metric
    if callable(spec):
        return FunctionMetric(spec)
    raise InvalidArgument(
        f"metric {spec!r} is neither a name, a metric nor a function; pass one of {', '.join(NAMES)}, an instance of "
        "Metric or torchmetrics.Metric, or a function of (predictions, targets)",
        field="metrics",
    )
