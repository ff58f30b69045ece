"""Several metrics that see the same rows: updated, gathered and computed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from strata.errors import InvalidArgument
from strata.trainer.metrics import gather
from strata.trainer.metrics.base import Better, Bounded, Metric, State
from strata.trainer.metrics.registry import Spec, create

BUFFER_ELEMENTS = 1 << 18
"""Predictions that are buffered before metrics see them: 1 MiB of float32."""


class MetricSet:
    """Holds metrics by name and updates all of them with one call.

    Batches are copied on their device and passed on together, once they hold `buffer_elements` predictions: a step
    costs a few microseconds, however many metrics there are, and a GPU is not synchronized at every step. The first
    batch is passed on at once, so an error of shape or type is raised at the first step.

    Args:
        metrics: What `create` accepts; in a mapping, the keys replace the names.
        from_logits: What is known of the predictions; see `create`.
        buffer_elements: Number of predictions to buffer.

    Raises:
        InvalidArgument: A metric is invalid, or two have the same name.
    """

    def __init__(
        self,
        metrics: Sequence[Spec] | Mapping[str, Spec] = (),
        *,
        from_logits: bool | None = None,
        buffer_elements: int = BUFFER_ELEMENTS,
    ) -> None:
        if isinstance(metrics, Mapping):
            created = [create(spec, from_logits=from_logits, name=name) for name, spec in metrics.items()]
        elif isinstance(metrics, (list, tuple)):
            created = [create(spec, from_logits=from_logits) for spec in metrics]
        else:
            raise InvalidArgument(f"metrics={metrics!r} is not a list; write metrics=[…]", field="metrics")
        self._metrics: dict[str, Metric] = {}
        for metric in created:
            if metric.name in self._metrics:
                raise InvalidArgument(
                    f"two metrics are called {metric.name!r}; remove one, or name them: "
                    'metrics={"first": …, "second": …}',
                    field="metrics",
                )
            self._metrics[metric.name] = metric
        self._buffer = _Buffer(buffer_elements)
        self._has_rows = False

    def __len__(self) -> int:
        return len(self._metrics)

    def __contains__(self, name: str) -> bool:
        return name in self._metrics

    def __getitem__(self, name: str) -> Metric:
        self._flush()
        return self._metrics[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._metrics)

    @property
    def better(self) -> dict[str, Better]:
        """Whether lower or higher values are better, by name."""
        return {name: metric.better for name, metric in self._metrics.items()}

    def reset(self) -> None:
        """Forget all rows."""
        self._buffer.clear()
        self._has_rows = False
        for metric in self._metrics.values():
            metric.reset()

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows to every metric.

        Raises:
            InvalidArgument: The rows do not fit each other or a metric. An error of values may concern rows of an
                earlier call.
        """
        if not self._metrics:
            return
        predictions = _checked(predictions, targets, weights)
        if not self._buffer.fits(predictions, targets, weights):
            self._flush()
        self._buffer.add(predictions, targets, weights)
        if self._buffer.is_full or not self._has_rows:
            self._has_rows = True
            self._flush()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state of every metric, for a checkpoint; `merge([state])` restores it."""
        self._flush()
        return {name: metric.state() for name, metric in self._metrics.items()}

    def merge(self, states: Sequence[Mapping[str, State]]) -> None:
        """Replace the states by the sums of these, given in rank order.

        Raises:
            InvalidArgument: The states are those of other metrics.
        """
        for state in states:
            if state.keys() != self._metrics.keys():
                raise InvalidArgument(
                    f"the state is of the metrics {sorted(state)}, not of {sorted(self._metrics)}; "
                    "restore it with the metrics it was saved with",
                    field="metrics",
                )
        self._buffer.clear()
        for name, metric in self._metrics.items():
            metric.merge([state[name] for state in states])

    def gather(self, group: Any = None) -> None:
        """Replace the state of every rank by that of all ranks. Collective; does nothing without other ranks."""
        self._flush()
        if not self._metrics or gather.is_alone(group):
            return
        metrics = list(self._metrics.values())
        bounded = [metric for metric in metrics if isinstance(metric, Bounded)]
        if bounded:  # Every rank learns the number of rows of all, before any sends rows that are too many.
            counts = gather.gather_numbers([metric.num_rows for metric in bounded], group)
            for each, per_rank in zip(bounded, zip(*counts, strict=True), strict=True):
                each.prepare(sum(per_rank))
        gathered = gather.gather_states([metric.state() for metric in metrics], group)
        for metric, states in zip(metrics, zip(*gathered, strict=True), strict=True):
            metric.merge(states)

    def compute(self) -> dict[str, float]:
        """Return the value of each metric, and `<name>.error_bound` of one that is not exact."""
        self._flush()
        values = {}
        for name, metric in self._metrics.items():
            values[name] = metric.compute()
            bound = getattr(metric, "error_bound", 0.0)
            if bound > 0:
                values[f"{name}.error_bound"] = bound
        return values

    def _flush(self) -> None:
        if self._buffer.is_empty:
            return
        rows = self._buffer.take()
        for metric in self._metrics.values():
            metric.update(*rows)


class _Buffer:
    """Copies of batches with one row shape, type and device."""

    def __init__(self, num_elements: int) -> None:
        self.num_elements = num_elements
        self.clear()

    def clear(self) -> None:
        self._predictions: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._kind: tuple[Any, ...] | None = None
        self._used = 0

    @property
    def is_empty(self) -> bool:
        return not self._predictions

    @property
    def is_full(self) -> bool:
        return self._used >= self.num_elements

    def fits(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> bool:
        return self._kind is None or self._kind == _kind(predictions, targets, weights)

    def add(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> None:
        # Copies, because the loader or a CUDA graph may write the next batch into the same memory.
        self._predictions.append(predictions.detach().clone())
        self._targets.append(targets.detach().clone())
        if weights is not None:
            self._weights.append(weights.detach().clone())
        self._kind = _kind(predictions, targets, weights)
        self._used += predictions.numel()

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return all rows on the CPU, and forget them."""
        rows = _joined(self._predictions), _joined(self._targets), _joined(self._weights) if self._weights else None
        self.clear()
        return rows


def _joined(batches: list[torch.Tensor]) -> torch.Tensor:
    return (torch.cat(batches) if len(batches) > 1 else batches[0]).cpu()


def _kind(*batch: torch.Tensor | None) -> tuple[Any, ...]:
    return tuple(None if part is None else (part.shape[1:], part.dtype, part.device) for part in batch)


def _checked(predictions: Any, targets: Any, weights: Any) -> torch.Tensor:
    """Check that all are tensors with as many rows; return the predictions, with a dimension of rows."""
    parts = {"predictions": predictions, "targets": targets} | ({} if weights is None else {"weights": weights})
    for field, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise InvalidArgument(
                f"metrics got {field} of type {type(part).__name__}, which is not a tensor; pass one tensor, or "
                "compute metrics of several outputs one by one",
                field=field,
            )
    rows: torch.Tensor = predictions.reshape(1) if predictions.dim() == 0 else predictions  # One row, squeezed.
    for field, part in parts.items():
        if field != "predictions" and part.shape[:1] != rows.shape[:1]:
            raise InvalidArgument(
                f"metrics got {field} of shape {list(part.shape)} and predictions of shape {list(rows.shape)}; "
                "pass the same number of rows of each",
                field=field,
            )
    return rows
