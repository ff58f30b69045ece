"""Adapters that turn a plain function, or a metric of torchmetrics, into a `Metric`."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from strata.errors import InvalidArgument, LimitExceeded
from strata.trainer.metrics.base import Better, State, require_positive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_ELEMENTS = 100_000_000
"""Predictions of all ranks that are kept for a function: 400 MB of float32."""
TARGETS_FIRST = frozenset({"y_true", "target", "targets", "label", "labels"})
"""Names of a first parameter that takes the targets, as in scikit-learn."""
LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "deviance")
"""Parts of the name of a function whose smaller values are better."""


class FunctionMetric:
    """Calls a function once with all rows of all ranks.

    The function is `f(predictions, targets) -> float` over CPU tensors. If its first parameter is called `y_true`,
    `target`, `targets`, `label` or `labels`, the targets come first, so functions of scikit-learn work as they are. Row
    weights are passed as `sample_weight` if there is such a parameter. The order of the rows is not defined.

    Args:
        better: Whether lower or higher values are better. By default the name decides, as in scikit-learn: a loss or
            an error is better when lower, everything else when higher.
        max_elements: Number of predictions of all ranks above which `update` and a merge raise.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        better: Better | None = None,
        max_elements: int = MAX_ELEMENTS,
        name: str | None = None,
    ) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        is_lower = any(part in self.name.lower() for part in LOWER_IS_BETTER)
        self.better: Better = better or ("lower" if is_lower else "higher")
        self.max_elements = require_positive("max_elements", max_elements)
        parameters = _parameters(function)
        self._targets_first = bool(parameters) and parameters[0] in TARGETS_FIRST
        self.takes_weights = "sample_weight" in parameters
        self.reset()

    def __repr__(self) -> str:
        return f"FunctionMetric({self.name})"

    @property
    def num_rows(self) -> int:
        """The number of predictions so far, of which a row may have several."""
        return self._num_elements

    def reset(self) -> None:
        self._num_elements = 0
        self._has_nan = False
        self._predictions: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        if weights is not None and not self.takes_weights:
            raise InvalidArgument(
                f"metric {self.name!r} got weights, but the function has no parameter sample_weight; add it, or update "
                "this metric without weights",
                field="weights",
            )
        predictions, targets = _checked(self.name, predictions, targets)
        if weights is not None and weights.shape != targets.shape[:1]:
            raise InvalidArgument(
                f"metric {self.name!r} got weights of shape {list(weights.shape)} for {len(targets)} rows; give one "
                "per row",
                field="weights",
            )
        if not len(targets):
            return
        self._num_elements += predictions.numel()
        self.prepare(self._num_elements)
        # NumPy, and so scikit-learn, knows no bfloat16.
        predictions = predictions.float() if predictions.dtype in (torch.bfloat16, torch.float16) else predictions
        self._has_nan = self._has_nan or _has_nan(predictions)
        self._add(predictions.clone(), targets.clone(), None if weights is None else weights.detach().cpu().clone())

    def prepare(self, num_rows: int) -> None:
        """Check the number of predictions of all ranks.

        Raises:
            LimitExceeded: There are more than `max_elements`.
        """
        if num_rows > self.max_elements:
            raise LimitExceeded(
                f"metric {self.name!r} would keep {num_rows} predictions, more than max_elements={self.max_elements}; "
                "use a metric that merges sums, such as 'auc', fewer rows, or FunctionMetric with a larger limit",
                field="metrics",
            )

    def state(self) -> dict[str, torch.Tensor]:
        return {
            "num_rows": torch.tensor([self._num_elements, self._has_nan], dtype=torch.int64),
            "predictions": _joined(self._predictions),
            "targets": _joined(self._targets),
            "weights": _joined(self._weights),
        }

    def merge(self, states: Sequence[State]) -> None:
        self.reset()
        for state in states:
            num_elements, has_nan = state["num_rows"].tolist()
            self._num_elements += num_elements
            self._has_nan = self._has_nan or bool(has_nan)
            if num_elements:
                weights = state["weights"]
                self._add(state["predictions"], state["targets"], weights if len(weights) else None)
        self.prepare(self._num_elements)

    def compute(self) -> float:
        if self._has_nan or not self._predictions:
            return math.nan
        arguments = [_joined(self._predictions), _joined(self._targets)]
        options = {"sample_weight": _joined(self._weights)} if self._weights else {}
        value = self.function(*(reversed(arguments) if self._targets_first else arguments), **options)
        return _as_float(self.name, value)

    def _add(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> None:
        if weights is not None and not self._weights:
            self._weights = [torch.ones(len(chunk)) for chunk in self._targets]
        self._predictions.append(predictions)
        self._targets.append(targets)
        if weights is not None or self._weights:
            self._weights.append(torch.ones(len(targets)) if weights is None else weights)


class TorchMetric:
    """Wraps an instance of `torchmetrics.Metric`.

    Sums are kept in float64. torchmetrics' classification metrics take a batch for logits if a value lies outside
    [0, 1], so a batch of small logits would count as probabilities; with `from_logits=True` every batch is converted.

    Raises:
        InvalidArgument: A state of the metric is averaged over ranks, so its value would depend on how rows are
            distributed.
    """

    def __init__(self, metric: Any, *, from_logits: bool | None = None, name: str | None = None) -> None:
        reductions = {key: getattr(reduce, "__name__", "") for key, reduce in metric._reductions.items()}
        averaged = [key for key, reduce in reductions.items() if reduce == "dim_zero_mean"]
        if averaged:
            raise InvalidArgument(
                f"{type(metric).__name__} averages its state {averaged[0]!r} over ranks, so its value would depend on "
                "how rows are distributed; use a metric whose states are sums, or a function of all rows",
                field="metrics",
            )
        self.metric = metric.cpu().set_dtype(torch.float64)
        self.metric.sync_on_compute = False  # The states are gathered here, together with those of other metrics.
        self.name = name or type(metric).__name__
        self.better: Better = "lower" if metric.higher_is_better is False else "higher"
        self.from_logits = from_logits
        self.takes_weights = False
        self._converts = type(metric).__module__.startswith("torchmetrics.classification")
        self.reset()

    def __repr__(self) -> str:
        return f"TorchMetric({self.metric!r})"

    def reset(self) -> None:
        self.metric.reset()
        self._num_rows = 0
        self._has_nan = False

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        if weights is not None:
            raise InvalidArgument(
                f"metric {self.name!r} got weights, which torchmetrics does not take; update it without weights, or "
                "use one of our metrics",
                field="weights",
            )
        predictions, targets = _checked(self.name, predictions, targets)
        self._has_nan = self._has_nan or _has_nan(predictions)
        if self._has_nan or not len(targets):
            return
        if predictions.is_floating_point():
            predictions = predictions.double()
            if self.from_logits and self._converts:
                same = predictions.shape == targets.shape
                predictions = predictions.sigmoid() if same else predictions.softmax(dim=1)
        try:
            # Copies, because some metrics keep the batch itself.
            self.metric.update(predictions.clone(), targets.clone())
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidArgument(
                f"metric {self.name!r} refused predictions of shape {list(predictions.shape)} and targets of shape "
                f"{list(targets.shape)}: {error}",
                field="metrics",
            ) from error
        self._num_rows += len(targets)

    def state(self) -> dict[str, torch.Tensor]:
        kept = {
            f"state.{key}": _joined(value) if isinstance(value, list) else value.clone()
            for key, value in self.metric.metric_state.items()
        }
        return {"num_rows": torch.tensor([self._num_rows, self._has_nan], dtype=torch.int64), **kept}

    def merge(self, states: Sequence[State]) -> None:
        self.reset()
        for state in states:
            num_rows, has_nan = state["num_rows"].tolist()
            self._num_rows += num_rows
            self._has_nan = self._has_nan or bool(has_nan)
        filled = [state for state in states if state["num_rows"][0] > 0]
        if filled:
            self._set(
                {key: self._reduced(key, [state[f"state.{key}"] for state in filled]) for key in self.metric._defaults}
            )

    def compute(self) -> float:
        if self._has_nan or not self._num_rows:
            return math.nan
        return _as_float(self.name, self.metric.compute())

    def _reduced(self, key: str, values: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Reduce a state over ranks, as torchmetrics does when it synchronizes."""
        if isinstance(self.metric._defaults[key], list):
            return [value for value in values if value.numel()]
        if len(values) == 1:
            return values[0].clone()
        reduce = self.metric._reductions[key]
        stacked = torch.stack(values)
        return stacked if reduce is None else reduce(stacked)

    def _set(self, state: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
        for key, value in state.items():
            setattr(self.metric, key, value)
        self.metric._computed = None
        self.metric._update_count = 1  # Else `compute` warns that there are no rows.


def _checked(name: str, predictions: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both on the CPU, and predictions of `[N, 1]` as `[N]` if the targets are so."""
    predictions, targets = predictions.detach().cpu(), targets.detach().cpu()
    if predictions.dim() == 0 or predictions.shape[:1] != targets.shape[:1]:
        raise InvalidArgument(
            f"metric {name!r} got predictions of shape {list(predictions.shape)} and targets of shape "
            f"{list(targets.shape)}; give one target per row",
            field="predictions",
        )
    if predictions.dim() == targets.dim() + 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    return predictions, targets


def _has_nan(predictions: torch.Tensor) -> bool:
    return predictions.is_floating_point() and bool(predictions.isnan().any())


def _joined(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(chunks)) if chunks else torch.zeros(0)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # A function of C may have no signature.
        return []


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise InvalidArgument(
            f"metric {name!r} returned {value.numel()} values of shape {list(value.shape)}; return one number, for "
            "example an average over classes",
            field="metrics",
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"metric {name!r} returned {type(value).__name__}, which is not a number; return a float", field="metrics"
        ) from error
