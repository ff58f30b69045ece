"""Metrics over all rows of all ranks, never means of batches.

`base` is the port, `registry.create` makes a metric from a name, an instance, a function or a torchmetrics metric, and
`MetricSet` holds those of a run and gathers their states. This folder imports torch and numpy, and no other part of
`strata.trainer`.

What a metric reads, where N is the number of rows and C that of classes:

| Name | Predictions | Targets | `from_logits` | Better |
|---|---|---|---|---|
| `auc`, `average_precision` | `[N]`, `[N, 2]` | 0 or 1 | no effect: only the order of scores counts | higher |
| `logloss` | `[N]`, `[N, 2]` | from 0 to 1 | True: logits; otherwise probabilities | lower |
| `calibration` | `[N]`, `[N, 2]` | from 0 to 1 | True: logits; otherwise probabilities | (1 is best) |
| `precision`, `recall`, `f1` | `[N]`, `[N, 2]` | 0 or 1 | True: logits; otherwise probabilities | higher |
| | `[N, C]`, macro average | class index | no effect: the largest score counts | higher |
| `accuracy` | `[N]` | 0 or 1 | True: logits; otherwise probabilities | higher |
| | `[N, C]` | class index | no effect: the largest score counts | higher |
| `accuracy@k`, `top_k_accuracy` | `[N, C]` | class index | no effect | higher |
| `recall@k` | `[N, items]` | item index, or `[N, items]` of 0 and 1 | no effect | higher |
| `cross_entropy` | `[N, C]` | class index | True: logits or log-probabilities; otherwise probabilities | lower |
| `mse`, `rmse`, `mae` | `[N]` | `[N]` | no effect | lower |
| `r2` | `[N]` | `[N]` | no effect | higher |
| torchmetrics | as torchmetrics | as torchmetrics | True: classification metrics get probabilities | its own |
| function | any | any | no effect: it gets the predictions as they are | by its name |

Rules for all of them:
- `[N, 1]` stands for `[N]`. Equal shapes `[N, D]` count every element as a row with the weight of its row. Class
  metrics also read `[N, C, …]` against `[N, …]`, and leave out rows with the target -100, as torch's losses do.
- `from_logits=None` means unknown, and reads as False: a prediction outside [0, 1] is then an error, not a guess.
- A NaN prediction makes the value NaN on every rank; an error on one rank would leave the others waiting. No rows,
  an AUC over one class, an average precision without positive rows, and an R² over equal targets are NaN, too.
- Shapes that do not fit and targets outside their range raise `InvalidArgument`.
- Weights, one per row and 0 or more, apply to every metric except torchmetrics' and functions without `sample_weight`.
"""

from strata.trainer.metrics.adapters import FunctionMetric, TorchMetric
from strata.trainer.metrics.base import Better, Metric
from strata.trainer.metrics.classification import F1, Accuracy, Calibration, CrossEntropy, LogLoss, Precision, Recall
from strata.trainer.metrics.collection import MetricSet
from strata.trainer.metrics.ranking import AUC, AveragePrecision
from strata.trainer.metrics.registry import NAMES, Spec, create
from strata.trainer.metrics.regression import R2, MeanAbsoluteError, MeanSquaredError, RootMeanSquaredError
from strata.trainer.metrics.retrieval import RecallAtK, TopKAccuracy

__all__ = [
    "AUC",
    "F1",
    "NAMES",
    "R2",
    "Accuracy",
    "AveragePrecision",
    "Better",
    "Calibration",
    "CrossEntropy",
    "FunctionMetric",
    "LogLoss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "MetricSet",
    "Precision",
    "Recall",
    "RecallAtK",
    "RootMeanSquaredError",
    "Spec",
    "TopKAccuracy",
    "TorchMetric",
    "create",
]
