"""Bring predictions, targets and weights of a batch into one shape, or explain why they do not fit.

Three readings exist: `paired` compares every prediction with the target at the same place, `binary` does so for targets
of 0 and 1, and `classes` reads a score per class against a class index. Each returns `Rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.errors import InvalidArgument

LOG_FLOOR = -100.0
"""The smallest logarithm of a probability, as in `torch.nn.BCELoss`: a confident error costs 100, not infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Checked rows."""

    predictions: torch.Tensor
    """`[rows]`, or `[rows, classes]`."""
    targets: torch.Tensor
    """`[rows]`."""
    weights: torch.Tensor | None
    """Float64, `[rows]`; None if every row counts as 1."""
    has_nan: bool
    """A prediction is NaN."""

    def __len__(self) -> int:
        return len(self.targets)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of one value per row, in float64."""
        values = values.double()
        return values.sum() if self.weights is None else torch.dot(values, self.weights)

    def total(self) -> torch.Tensor:
        """Return the weight of all rows."""
        if self.weights is None:
            return torch.tensor(float(len(self)), dtype=torch.float64)
        return self.weights.sum()


def paired(metric: str, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
    """Pair each prediction with its target: `[N]` or `[N, 1]` against either, or equal shapes.

    Of several values per row, each is a row of its own that has the weight of its row.

    Raises:
        InvalidArgument: The shapes differ, or the weights do not fit.
    """
    predictions, targets = _plain(predictions), _plain(targets)
    num_rows = _num_rows(targets)
    if predictions.shape != targets.shape and _narrow(predictions).shape != _narrow(targets).shape:
        cure = ""
        if predictions.dim() == targets.dim() + 1:
            cure = "; for a score per class use 'cross_entropy', 'accuracy' or another metric of classes"
        raise _mismatch(metric, predictions, targets, f"give one prediction per target{cure}")
    weights = _checked_weights(metric, weights, num_rows)
    if weights is not None and targets.numel() != num_rows:
        weights = weights.repeat_interleave(targets.numel() // num_rows)
    flat = predictions.reshape(-1)
    return Rows(flat, targets.reshape(-1), weights, _has_nan(flat))


def binary(
    metric: str,
    predictions: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    from_logits: bool | None,
    soft: bool = False,
) -> Rows:
    """Pair scores with targets of 0 and 1; of the two columns of `[N, 2]`, the second is the positive class.

    Args:
        from_logits: Whether two columns are logits, whose difference is the logit of the positive class. If unknown,
            the difference still ranks rows correctly.
        soft: Also accept targets between 0 and 1.

    Raises:
        InvalidArgument: The shapes do not fit, or a target is not in the range.
    """
    predictions, targets = _plain(predictions), _plain(targets)
    narrow = _narrow(targets)
    if predictions.dim() == 2 and predictions.shape[1] == 2 and narrow.shape == predictions.shape[:1]:
        targets = narrow
        if from_logits is False:
            predictions = predictions[:, 1]
        else:  # In float64, because float32 would tie the small probabilities of an unknown kind of score.
            predictions = predictions[:, 1].double() - predictions[:, 0].double()
    rows = paired(metric, predictions, targets, weights)
    valid = (rows.targets >= 0) & (rows.targets <= 1) if soft else (rows.targets == 0) | (rows.targets == 1)
    if not bool(valid.all()):
        wrong = rows.targets[~valid][0].item()
        raise InvalidArgument(
            f"metric {metric!r} got the target {wrong}; targets must be {'in [0, 1]' if soft else '0 or 1'}: "
            "convert the label column, or use a metric of classes or of regression",
            field="targets",
        )
    return rows


def classes(
    metric: str,
    predictions: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    ignore_index: int | None,
) -> Rows:
    """Pair a score per class with the index of the right class: `[N, C]` against `[N]` or `[N, 1]`.

    Further dimensions follow the convention of `torch.nn.CrossEntropyLoss`: `[N, C, …]` against `[N, …]`. Rows whose
    target is `ignore_index` are left out.

    Raises:
        InvalidArgument: The shapes do not fit, or a target is not a class index.
    """
    predictions, targets = _plain(predictions), _plain(targets)
    if predictions.dim() == targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets.squeeze(1)
    if predictions.dim() < 2 or predictions.shape[:1] + predictions.shape[2:] != targets.shape:
        raise _mismatch(metric, predictions, targets, "give [N, C] scores and [N] class indices")
    num_rows, num_classes = _num_rows(targets), predictions.shape[1]
    weights = _checked_weights(metric, weights, num_rows)
    if weights is not None and targets.numel() != num_rows:
        weights = weights.repeat_interleave(targets.numel() // num_rows)
    predictions = predictions.movedim(1, -1).reshape(-1, num_classes)
    indices = _whole(metric, targets.reshape(-1))
    if ignore_index is not None and bool((indices == ignore_index).any()):
        kept = indices != ignore_index
        predictions, indices = predictions[kept], indices[kept]
        weights = None if weights is None else weights[kept]
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= num_classes):
        wrong = indices[(indices < 0) | (indices >= num_classes)][0].item()
        raise InvalidArgument(
            f"metric {metric!r} got the class index {wrong} for predictions with {num_classes} classes; "
            f"targets must lie in [0, {num_classes})",
            field="targets",
        )
    return Rows(predictions, indices, weights, _has_nan(predictions))


def probabilities(metric: str, predictions: torch.Tensor, *, from_logits: bool | None) -> torch.Tensor:
    """Return predictions that are probabilities as float64.

    Raises:
        InvalidArgument: A value lies outside [0, 1].
    """
    low, high = (edge.item() for edge in torch.aminmax(predictions))
    if low < 0 or high > 1:
        cure = "apply sigmoid or softmax in the module" if from_logits is False else "pass from_logits=True"
        raise InvalidArgument(
            f"metric {metric!r} got predictions from {low:g} to {high:g}, which are not probabilities; if they are "
            f"logits or log-probabilities, {cure}",
            field="predictions",
        )
    return predictions.double()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Drop a last dimension of 1."""
    return tensor.squeeze(-1) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def _num_rows(targets: torch.Tensor) -> int:
    return int(targets.shape[0])


def _has_nan(predictions: torch.Tensor) -> bool:
    return predictions.is_floating_point() and bool(predictions.isnan().any())


def _whole(metric: str, targets: torch.Tensor) -> torch.Tensor:
    """Return targets as integers: a label column may arrive as float."""
    if not targets.is_floating_point():
        return targets.long()
    indices = targets.long()
    if not bool((indices == targets).all()):
        wrong = targets[indices != targets][0].item()
        raise InvalidArgument(
            f"metric {metric!r} got the target {wrong}, which is not a class index; targets must be whole numbers",
            field="targets",
        )
    return indices


def _checked_weights(metric: str, weights: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    if weights is None:
        return None
    weights = _narrow(_plain(weights))
    if weights.shape != (num_rows,):
        raise InvalidArgument(
            f"metric {metric!r} got weights of shape {list(weights.shape)} for {num_rows} rows; give one per row",
            field="weights",
        )
    weights = weights.double()
    if not bool((weights >= 0).all()) or bool(weights.isinf().any()):
        raise InvalidArgument(
            f"metric {metric!r} got a weight that is negative or not finite; weights must be 0 or more",
            field="weights",
        )
    return weights


def _mismatch(metric: str, predictions: torch.Tensor, targets: torch.Tensor, cure: str) -> InvalidArgument:
    return InvalidArgument(
        f"metric {metric!r} got predictions of shape {list(predictions.shape)} and targets of shape "
        f"{list(targets.shape)}; {cure}",
        field="predictions",
    )
