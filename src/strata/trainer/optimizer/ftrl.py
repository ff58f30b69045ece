"""FTRL-Proximal as a torch optimizer: per-coordinate learning rates and sparse weights for linear models.

H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1. The paper keeps z and n
per coordinate and computes the weight w from them. Here w itself is kept, with n and the subgradient d of the L1
penalty at w: d is l1 × sign(w) where w is not zero, and lies in [-l1, l1] where it is. Since z = -w × q - d with
q = (beta + √n) / lr + l2, the two are equivalent, and the update becomes

    n ← n + g²,   v ← w × q + d - g,   d ← clamp(v, -l1, l1),   w ← (v - d) / q.

This form stays correct when something else changes the weights or the learning rate between steps: a scheduler, an
average over ranks, a loaded checkpoint. In the paper's form the next step would undo it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from strata.errors import InvalidArgument


class FTRL(torch.optim.Optimizer):
    """FTRL-Proximal.

    Weights that start at zero give the paper's algorithm, and with `l1` a sparse model. Weights that start elsewhere
    are taken as the solution so far: a coordinate without a gradient does not change. Sparse gradients update only
    their rows.

    Args:
        params: Parameters, or groups of them, as for any torch optimizer.
        lr: Learning rate, α in the paper.
        beta: Keeps the first steps small; the paper suggests 1.
        l1: Strength of the L1 penalty, which sets weights to exactly zero.
        l2: Strength of the L2 penalty.
        weight_decay: Another name of `l2`.
        alpha: Another name of `lr`.

    Raises:
        InvalidArgument: A value is outside its range, or is given under both names.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float | None = None,
        weight_decay: float | None = None,
        alpha: float | None = None,
    ) -> None:
        defaults = {
            "lr": _either("lr", lr, "alpha", alpha, default=0.1),
            "beta": beta,
            "l1": l1,
            "l2": _either("l2", l2, "weight_decay", weight_decay, default=0.0),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for field, default in self.defaults.items():
            value = param_group.get(field, default)
            low = "more than 0" if field == "beta" else "0 or more"
            if not math.isfinite(value) or value < 0 or (value == 0 and field == "beta"):
                raise InvalidArgument(f"FTRL: {field}={value!r} is outside its range; use {low}", field=field)
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            raise InvalidArgument("FTRL: a parameter is complex; FTRL is defined for real weights", field="params")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights; `closure`, if given, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            dense = _Coordinates()
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = _initial_state(parameter, group["l1"])
                if parameter.grad.is_sparse:
                    self._update_rows(parameter, parameter.grad.coalesce(), group)
                else:
                    dense.add(parameter, parameter.grad, **self.state[parameter])
            if dense.weights:
                dense.update(group)
        return loss

    def _update_rows(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.sparse_dim() != 1:
            raise InvalidArgument(
                f"FTRL: a sparse gradient of shape {list(gradient.shape)} has {gradient.sparse_dim()} sparse "
                "dimensions; only gradients whose rows are sparse, as those of nn.Embedding, are supported",
                field="params",
            )
        rows = gradient.indices()[0]
        state = self.state[parameter]
        touched = _Coordinates()
        touched.add(parameter[rows], gradient.values(), sum=state["sum"][rows], dual=state["dual"][rows])
        touched.update(group)
        parameter[rows] = touched.weights[0]
        state["sum"][rows] = touched.sums[0]
        state["dual"][rows] = touched.duals[0]


class _Coordinates:
    """Tensors that are updated together, with one call per operation for all of them."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self.duals: list[torch.Tensor] = []

    def add(self, weights: torch.Tensor, gradient: torch.Tensor, **state: torch.Tensor) -> None:
        self.weights.append(weights)
        self.gradients.append(gradient)
        self.sums.append(state["sum"])
        self.duals.append(state["dual"])

    def update(self, group: dict[str, Any]) -> None:
        """Apply the update of the module's docstring in place."""
        lr, beta, l1, l2 = (float(group[field]) for field in ("lr", "beta", "l1", "l2"))
        torch._foreach_addcmul_(self.sums, self.gradients, self.gradients)
        if lr == 0:  # A warm-up may start there. The weights stay, and 1 / lr does not exist.
            return
        strengths = torch._foreach_sqrt(self.sums)
        torch._foreach_add_(strengths, beta)
        torch._foreach_div_(strengths, lr)
        torch._foreach_add_(strengths, l2)
        values = torch._foreach_mul(self.weights, strengths)
        torch._foreach_add_(values, self.duals)
        torch._foreach_sub_(values, self.gradients)
        torch._foreach_copy_(self.duals, values)
        torch._foreach_clamp_max_(self.duals, l1)
        torch._foreach_clamp_min_(self.duals, -l1)
        torch._foreach_sub_(values, self.duals)
        torch._foreach_div_(values, strengths)
        torch._foreach_copy_(self.weights, values)


def _initial_state(parameter: torch.Tensor, l1: float) -> dict[str, torch.Tensor]:
    return {
        "sum": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "dual": parameter.detach().sign().mul_(l1),
    }


def _either(name: str, value: float | None, other: str, other_value: float | None, *, default: float) -> float:
    """Return the value of a parameter with two names."""
    if value is not None and other_value is not None:
        raise InvalidArgument(
            f"FTRL: {name}={value!r} and {other}={other_value!r} are the same parameter; pass one of them", field=name
        )
    if value is None:
        value = other_value
    return default if value is None else value
