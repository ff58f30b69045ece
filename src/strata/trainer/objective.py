"""The objective: applies the user's loss to predictions and targets whose shapes and types may differ slightly.

`[rows, 1]` predictions match `[rows]` targets, and integer labels are converted for losses that need floats. Weights of
rows or classes multiply the loss of each row before the mean over rows, so that the result does not depend on how rows
are divided among ranks.
"""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TAKES_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_TAKES_LOGITS = (
    *(nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss),
    nn.NLLLoss,  # takes log-probabilities, which are logits that are already normalized
)


class Objective(nn.Module):
    """The loss as a function of predictions, targets and weights: a mean over rows."""

    def __init__(
        self, loss: Callable[..., torch.Tensor] | None, *, class_weights: Mapping[int, float] | None = None
    ) -> None:
        """
        Raises:
            InvalidArgument: The loss is not callable or does not return a mean, or cannot be weighted.
        """
        super().__init__()
        if loss is not None and not callable(loss):
            raise InvalidArgument(f"loss={loss!r} is not callable; pass a loss such as nn.MSELoss()", field="loss")
        if isinstance(loss, type):
            raise InvalidArgument(f"loss={loss.__name__} is a class; pass an instance: {loss.__name__}()", field="loss")
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(
                f"the loss has reduction={reduction!r}, but training needs one number; use reduction='mean'",
                field="loss",
            )
        self.loss = loss
        self.is_sum = reduction == "sum"
        """Whether the loss is a sum over rows; ranks then add up instead of averaging."""
        self._per_row: Callable[..., torch.Tensor] | None = None
        self._class_weights: torch.Tensor | None
        self.register_buffer("_class_weights", None, persistent=False)
        if class_weights is not None:
            self._class_weights = _table(class_weights)
            self.prepare_weights("class_weights")

    @property
    def from_logits(self) -> bool | None:
        """Whether the module's predictions are logits; None if the loss does not determine it."""
        if isinstance(self.loss, _TAKES_LOGITS):
            return True
        return False if isinstance(self.loss, nn.BCELoss) else None

    def prepare_weights(self, field: str) -> None:
        """Make the loss of single rows available.

        Raises:
            InvalidArgument: The loss has no `reduction`.
        """
        if self.loss is None:
            raise InvalidArgument(
                f"{field}= needs loss=; a module that returns its own loss applies weights itself, so pass the weights "
                "to forward as a column",
                field=field,
            )
        if not hasattr(self.loss, "reduction"):
            raise InvalidArgument(
                f"{field}= needs the loss of each row, but {self.loss!r} has no reduction=; use a loss of torch.nn, or "
                "override training_step",
                field=field,
            )
        self._per_row = copy.copy(self.loss)
        self._per_row.reduction = "none"  # type: ignore[attr-defined]

    def forward(self, output: Any, target: Any, weight: torch.Tensor | None = None) -> torch.Tensor:
        if self.loss is None:
            found = own_loss(output)
            if found is None:
                raise InvalidArgument(
                    "there is no loss: pass loss=, return a scalar loss from forward (or an object with .loss), or "
                    "override training_step",
                    field="loss",
                )
            return found
        output, target = self.aligned(output, target)
        if weight is None and self._class_weights is None:
            return self.loss(output, target)
        assert self._per_row is not None
        rows: torch.Tensor = self._per_row(output, target)
        if self._class_weights is not None:
            rows = rows * self._weights_of(target, rows)
        rows = rows.reshape(len(rows), -1).mean(dim=1)
        if weight is not None:
            rows = rows * weight
        return rows.sum() if self.is_sum else rows.mean()

    def _weights_of(self, target: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the weight of the class of each loss; classes without a weight count with 1."""
        table = self._class_weights
        assert table is not None
        if target.shape != losses.shape:
            raise InvalidArgument(
                f"class_weights= needs one class per loss, but the target is {list(target.shape)} and the losses are "
                f"{list(losses.shape)}; pass class numbers as the target, or weights of rows with weight=",
                field="class_weights",
            )
        rest = len(table) - 1
        classes = target.long()
        return table[torch.where((classes >= 0) & (classes < rest), classes, rest)]

    def aligned(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return predictions and targets with matching shapes and types."""
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            return output, target
        if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
            output = output.squeeze(-1)
        elif target.dim() == output.dim() + 1 and target.shape[-1] == 1:
            target = target.squeeze(-1)
        if isinstance(self.loss, _TAKES_CLASSES):
            is_class = not target.is_floating_point() or target.dim() < output.dim()
            return output, target.long() if is_class else target.to(output.dtype)
        if output.is_floating_point() and target.dtype != output.dtype:
            target = target.to(output.dtype)
        if output.shape != target.shape and isinstance(self.loss, nn.Module):
            raise InvalidArgument(
                f"the module returns {list(output.shape)} and the target is {list(target.shape)}; for "
                f"{type(self.loss).__name__} both need the same shape",
                field="module",
            )
        return output, target


def _table(class_weights: Any) -> torch.Tensor:
    """Return the weights by class, and 1 at the end for all other classes."""
    try:
        weights = {operator.index(label): float(weight) for label, weight in class_weights.items()}
    except (AttributeError, TypeError, ValueError):
        weights = {}
    if not weights or min(weights) < 0 or min(weights.values()) < 0:
        raise InvalidArgument(
            f"class_weights={class_weights!r} is not a mapping from class numbers to weights; write {{0: 1.0, 1: 4.0}}",
            field="class_weights",
        )
    table = torch.ones(max(weights) + 2)
    for label, weight in weights.items():
        table[label] = weight
    return table


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a module computed itself, if it did: a scalar, or the attribute or entry `loss`."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None
