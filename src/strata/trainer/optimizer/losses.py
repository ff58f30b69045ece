"""A weighted sum of loss functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from strata.errors import InvalidArgument

LossFn: TypeAlias = "Callable[..., torch.Tensor]"


class LossFnStack(nn.Module):
    """Adds loss functions with weights.

        LossFnStack(bce=(nn.BCEWithLogitsLoss(), 0.7), hinge=(nn.HingeEmbeddingLoss(), 0.3))

    A function without a weight counts with 1. Veloce's form, `LossFnStack(dict(fn=nn.BCELoss(), weight=0.7), …)`, works
    too. Weights are positive and need not add up to 1: that would only scale the learning rate.

    All functions receive the same arguments. Losses with parameters or buffers move with the module. After a call,
    `parts` holds the value of each function, without its weight, as a detached tensor: reading it costs a
    synchronization with a GPU, keeping it does not.

    Raises:
        InvalidArgument: There is no function, an entry has another form, or a weight is not positive.
    """

    def __init__(self, *losses: Mapping[str, Any] | LossFn, **named: LossFn | tuple[LossFn, float]) -> None:
        super().__init__()
        entries = [_entry(each) for each in losses]
        entries += [(name, *_pair(each)) for name, each in named.items()]
        if not entries:
            raise InvalidArgument(
                "a LossFnStack needs a loss; write LossFnStack(bce=(nn.BCEWithLogitsLoss(), 0.7), …)", field="loss"
            )
        self.weights: dict[str, float] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self._functions: dict[str, LossFn] = {}
        self.losses = nn.ModuleDict()  # Registers them, so that they move to a device and are saved.
        for name, function, weight in entries:
            self._append(_free_name(name, self.weights), function, weight)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the weighted sum.

        Raises:
            InvalidArgument: The losses have different shapes, for example because one is not reduced.
        """
        parts = {name: function(*args, **kwargs) for name, function in self._all()}
        shapes = {tuple(part.shape) for part in parts.values()}
        if len(shapes) > 1:
            found = {name: list(part.shape) for name, part in parts.items()}
            raise InvalidArgument(
                f"the losses of a LossFnStack have different shapes: {found}; use the same reduction for all",
                field="loss",
            )
        self.parts = {name: part.detach() for name, part in parts.items()}
        weighted = [self.weights[name] * part for name, part in parts.items()]
        return torch.stack(weighted).sum(dim=0) if len(weighted) > 1 else weighted[0]

    def with_weights(self, **weights: float) -> LossFnStack:
        """Return a copy in which these losses have other weights.

        Raises:
            InvalidArgument: There is no such loss, or a weight is not positive.
        """
        unknown = next((name for name in weights if name not in self.weights), None)
        if unknown is not None:
            raise InvalidArgument(
                f"the LossFnStack has no loss {unknown!r}; it has {', '.join(self.weights)}", field="loss"
            )
        other = copy.deepcopy(self)
        other.weights |= {name: _checked_weight(name, weight) for name, weight in weights.items()}
        return other

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {weight:g}" for name, weight in self.weights.items())

    def _all(self) -> list[tuple[str, LossFn]]:
        return [
            (name, self._functions[name] if name in self._functions else self.losses[name]) for name in self.weights
        ]

    def _append(self, name: str, function: LossFn, weight: Any) -> None:
        if not callable(function):
            raise InvalidArgument(
                f"the loss {name!r} is {function!r}, which cannot be called; pass a function of (predictions, targets)",
                field="loss",
            )
        if isinstance(function, type):
            raise InvalidArgument(f"the loss {name!r} is a class; pass an instance: {name}()", field="loss")
        self.weights[name] = _checked_weight(name, weight)
        if isinstance(function, nn.Module):
            self.losses[name] = function
        else:
            self._functions[name] = function


def _checked_weight(name: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise InvalidArgument(
            f"the loss {name!r} has weight={weight!r}; use a positive number, or leave this loss out",
            field="loss",
        )
    return float(weight)


def _entry(each: Mapping[str, Any] | LossFn) -> tuple[str, LossFn, float]:
    """Return the name, the function and the weight of a positional entry."""
    if not isinstance(each, Mapping):
        return _name(each), each, 1.0
    if "fn" not in each or not each.keys() <= {"fn", "weight", "name"}:
        raise InvalidArgument(
            f"a loss of a LossFnStack has the keys {sorted(each)}; write dict(fn=…, weight=…)", field="loss"
        )
    return each.get("name") or _name(each["fn"]), each["fn"], each.get("weight", 1.0)


def _pair(each: LossFn | tuple[LossFn, float]) -> tuple[LossFn, float]:
    if not isinstance(each, tuple):
        return each, 1.0
    if len(each) != 2:
        raise InvalidArgument(
            f"{each!r} is not a pair of a loss and a weight; write bce=(nn.BCEWithLogitsLoss(), 0.7)", field="loss"
        )
    return each


def _name(function: LossFn) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).replace(".", "_")


def _free_name(name: str, taken: Mapping[str, float]) -> str:
    """Number the second and later losses of one name."""
    candidates = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 2))]
    return next(candidate for candidate in candidates if candidate not in taken)
