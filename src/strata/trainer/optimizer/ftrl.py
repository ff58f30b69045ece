"""FTRL-Proximal as a torch optimizer: per-coordinate learning rates and sparse weights for linear models.

H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1. The paper keeps z and n
per coordinate and computes the weight w from them. Here w itself is kept, with n and the subgradient d of the L1
penalty at w: d is l1 × sign(w) where w is not zero, and lies in [-l1, l1] where it is. Since z = -w × q - d with
q = (beta + √n) / lr + l2, the two are equivalent, and the update becomes

    n ← n + g²,   v ← w × q + d - g,   d ← clamp(v, -l1, l1),   w ← (v - d) / q.

Without the penalty d is zero, and a step is w ← w - g / q. This form stays correct when something else changes the
weights or the learning rate between steps: a scheduler, an average over ranks, a loaded checkpoint. In the paper's form
the next step would undo the change.
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
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._prepare(parameter, group["l1"])
            dense = [parameter for parameter in parameters if not parameter.grad.is_sparse]
            if dense:
                self._update_dense(dense, group)
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    self._update_rows(parameter, parameter.grad.coalesce(), group)
        return loss

    def _prepare(self, parameter: torch.Tensor, l1: float) -> None:
        """Create the state; without a penalty there is no `dual`."""
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if l1 == 0:
            state.pop("dual", None)
        elif "dual" not in state:
            state["dual"] = parameter.detach().sign().mul_(l1)

    def _update_dense(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients = [each.grad for each in weights if each.grad is not None]
        sums = [self.state[each]["sum"] for each in weights]
        torch._foreach_addcmul_(sums, gradients, gradients)
        if group["lr"] == 0:  # A warm-up may start there. The weights stay, and 1 / lr does not exist.
            return
        strengths = _strengths(sums, group)
        if group["l1"] == 0:
            torch._foreach_addcdiv_(weights, gradients, strengths, value=-1)
        else:
            _shrink(weights, gradients, strengths, [self.state[each]["dual"] for each in weights], group["l1"])

    def _update_rows(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.sparse_dim() != 1:
            raise InvalidArgument(
                f"FTRL: a sparse gradient of shape {list(gradient.shape)} has {gradient.sparse_dim()} sparse "
                "dimensions; only gradients whose rows are sparse, such as those of nn.Embedding, are supported",
                field="params",
            )
        rows, values, state = gradient.indices()[0], gradient.values(), self.state[parameter]
        state["sum"].index_add_(0, rows, values.square())
        if group["lr"] == 0:
            return
        strengths = _strengths([state["sum"].index_select(0, rows)], group)
        if group["l1"] == 0:
            parameter.index_add_(0, rows, values / strengths[0], alpha=-1)
            return
        weights, duals = parameter.index_select(0, rows), state["dual"].index_select(0, rows)
        _shrink([weights], [values], strengths, [duals], group["l1"])
        parameter.index_copy_(0, rows, weights)
        state["dual"].index_copy_(0, rows, duals)


def _strengths(sums: list[torch.Tensor], group: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return q of the module's docstring."""
    strengths = torch._foreach_sqrt(sums)
    torch._foreach_mul_(strengths, 1 / group["lr"])
    torch._foreach_add_(strengths, group["beta"] / group["lr"] + group["l2"])
    return strengths


def _shrink(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    strengths: tuple[torch.Tensor, ...],
    duals: list[torch.Tensor],
    l1: float,
) -> None:
    """Update weights and duals in place: v, d and w of the module's docstring."""
    values = torch._foreach_mul(weights, strengths)
    torch._foreach_add_(values, duals)
    torch._foreach_sub_(values, gradients)
    torch._foreach_copy_(duals, values)
    torch._foreach_clamp_max_(duals, l1)
    torch._foreach_clamp_min_(duals, -l1)
    torch._foreach_sub_(values, duals)
    torch._foreach_div_(values, strengths)
    torch._foreach_copy_(weights, values)


def _either(name: str, value: float | None, other: str, other_value: float | None, *, default: float) -> float:
    """Return the value of a parameter with two names."""
    if value is not None and other_value is not None:
        raise InvalidArgument(
            f"FTRL: {name}={value!r} and {other}={other_value!r} are the same parameter; pass one of them", field=name
        )
    if value is None:
        value = other_value
    return default if value is None else value
