"""Every metric, and every adapter, passes the same suite."""

from __future__ import annotations

import pytest
import torch
import torchmetrics

pytest.register_assert_rewrite("metric_contract")

from metric_contract import Case, MetricContract  # noqa: E402

from strata.trainer.metrics import (  # noqa: E402
    AUC,
    F1,
    R2,
    Accuracy,
    AveragePrecision,
    Calibration,
    CrossEntropy,
    FunctionMetric,
    LogLoss,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    RecallAtK,
    RootMeanSquaredError,
    TopKAccuracy,
    TorchMetric,
)

NUM_CLASSES = 5


def binary_logits(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Few distinct scores, so that ties are common."""
    scores = torch.randint(-6, 7, (num_rows,), generator=generator) / 4
    return scores, (torch.rand(num_rows, generator=generator) < scores.sigmoid()).float()


def binary_chances(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, targets = binary_logits(generator, num_rows)
    return scores.sigmoid()[:, None], targets.long()


def two_columns(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn((num_rows, 2), generator=generator)
    return scores, torch.randint(0, 2, (num_rows,), generator=generator)


def several_labels(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn((num_rows, 3), generator=generator)
    return scores, torch.randint(0, 2, (num_rows, 3), generator=generator)


def class_scores(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randint(-3, 4, (num_rows, NUM_CLASSES), generator=generator) / 2
    return scores, torch.randint(0, NUM_CLASSES, (num_rows,), generator=generator)


def class_chances(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, targets = class_scores(generator, num_rows)
    return scores.softmax(dim=1), targets[:, None].double()


def relevances(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn((num_rows, 8), generator=generator)
    return scores, torch.randint(0, 2, (num_rows, 8), generator=generator)


def values(generator: torch.Generator, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = 1_000 + torch.randn(num_rows, generator=generator)
    return targets + torch.randn(num_rows, generator=generator), targets


def mean_product(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float((predictions.double() * targets).mean())


def weighted_score(
    y_true: torch.Tensor, y_score: torch.Tensor, *, sample_weight: torch.Tensor | None = None
) -> torch.Tensor:
    weights = torch.ones(len(y_true)) if sample_weight is None else sample_weight
    return ((y_score.double() - y_true) * weights).sum()


CASES = {
    "auc": Case(make=AUC, draw=binary_logits, tolerance=1e-14),
    "auc of probabilities": Case(make=AUC, draw=binary_chances, tolerance=1e-14),
    "auc of two columns": Case(make=AUC, draw=two_columns, tolerance=1e-14),
    "auc of several labels": Case(make=AUC, draw=several_labels, tolerance=1e-14),
    "auc from a histogram": Case(make=lambda: AUC(max_rows=10), draw=two_columns),
    "auc at its limit": Case(make=lambda: AUC(max_rows=60), draw=binary_logits),
    "average precision": Case(make=AveragePrecision, draw=binary_logits),
    "average precision from a histogram": Case(make=lambda: AveragePrecision(max_rows=10), draw=two_columns),
    "logloss": Case(make=lambda: LogLoss(from_logits=True), draw=binary_logits),
    "logloss of probabilities": Case(make=LogLoss, draw=binary_chances),
    "logloss of two columns": Case(make=lambda: LogLoss(from_logits=True), draw=two_columns),
    "calibration": Case(make=lambda: Calibration(from_logits=True), draw=binary_logits),
    "accuracy": Case(make=lambda: Accuracy(from_logits=True), draw=binary_logits),
    "accuracy of classes": Case(make=Accuracy, draw=class_scores),
    "precision": Case(make=lambda: Precision(from_logits=True), draw=binary_logits),
    "recall of classes": Case(make=Recall, draw=class_scores),
    "f1": Case(make=F1, draw=binary_chances),
    "f1 of classes": Case(make=F1, draw=class_chances),
    "cross-entropy": Case(make=lambda: CrossEntropy(from_logits=True), draw=class_scores),
    "cross-entropy of probabilities": Case(make=CrossEntropy, draw=class_chances),
    "accuracy@2": Case(make=lambda: TopKAccuracy(k=2), draw=class_scores),
    "recall@3": Case(make=lambda: RecallAtK(k=3), draw=class_scores),
    "recall@3 of several items": Case(make=lambda: RecallAtK(k=3), draw=relevances),
    "mse": Case(make=MeanSquaredError, draw=values),
    "rmse": Case(make=RootMeanSquaredError, draw=values),
    "mae": Case(make=MeanAbsoluteError, draw=several_labels),
    "r2": Case(make=R2, draw=values, tolerance=1e-10),
    "function": Case(make=lambda: FunctionMetric(mean_product), draw=binary_logits, has_weights=False),
    "function like scikit-learn's": Case(make=lambda: FunctionMetric(weighted_score), draw=binary_chances),
    "torchmetrics' sums": Case(
        make=lambda: TorchMetric(torchmetrics.MeanSquaredError()), draw=values, has_weights=False
    ),
    "torchmetrics' lists": Case(
        make=lambda: TorchMetric(torchmetrics.classification.BinaryAUROC(), from_logits=True),
        draw=binary_logits,
        has_weights=False,
    ),
    "torchmetrics' classes": Case(
        make=lambda: TorchMetric(torchmetrics.classification.MulticlassF1Score(NUM_CLASSES), from_logits=True),
        draw=class_scores,
        has_weights=False,
    ),
}


class TestMetrics(MetricContract):
    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param
