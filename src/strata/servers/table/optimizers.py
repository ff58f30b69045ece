"""Optimizers of rows: an update touches the rows of a push and their state, and nothing else.

Each follows its counterpart in torch for a sparse gradient. `lazy`: a row without a gradient is not updated, so Adam's
moments do not decay in steps that do not touch a row, as with `torch.optim.SparseAdam`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from strata.errors import InvalidArgument
from strata.servers.table import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.float32]
    Slots = NDArray[np.int32]


class RowOptimizer(Protocol):
    """The settings of an optimizer, a frozen dataclass, and its update."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def lr(self) -> float: ...

    def state_width(self, width: int) -> int:
        """Return how many float32 numbers of state a row of `width` weights has."""
        ...

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        """Write the initial state of new rows, whose weights are written."""
        ...

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        """Apply the gradient of each slot, in place. Slots differ. `step` counts the updates of the table, from 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    lr: float = 0.01

    def __post_init__(self) -> None:
        _require_from_zero(self)

    def state_width(self, width: int) -> int:
        del width
        return 0

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        """Do nothing: there is none."""

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        del state, step
        lr = np.float32(self.lr)
        if native.sgd is not None:
            native.sgd(weights, slots, gradients, lr)
        else:
            weights[slots] -= lr * gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    lr: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require_from_zero(self)

    def state_width(self, width: int) -> int:
        return width

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        del weights
        state[slots] = self.initial_accumulator_value

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        lr, eps = np.float32(self.lr / (1 + (step - 1) * self.lr_decay)), np.float32(self.eps)
        if native.adagrad is not None:
            native.adagrad(weights, state, slots, gradients, lr, eps)
            return
        sums = state[slots] + gradients * gradients
        state[slots] = sums
        weights[slots] -= lr * (gradients / (np.sqrt(sums) + eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad:
    """Adagrad with one sum per row, of the mean square of its gradient: a sixteenth of the state of 16 columns."""

    lr: float = 0.01
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require_from_zero(self)

    def state_width(self, width: int) -> int:
        del width
        return 1

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        del weights
        state[slots] = self.initial_accumulator_value

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        del step
        lr, eps = np.float32(self.lr), np.float32(self.eps)
        if native.adagrad_rows is not None:
            native.adagrad_rows(weights, state, slots, gradients, lr, eps)
            return
        sums = state[slots] + np.mean(gradients * gradients, axis=1, keepdims=True, dtype=np.float32)
        state[slots] = sums
        weights[slots] -= (lr / (np.sqrt(sums) + eps)) * gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyAdam:
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    corrects_first: bool = False
    """Add `eps` after the bias correction, as `torch.optim.Adam` does; otherwise before it, as `SparseAdam`."""

    def __post_init__(self) -> None:
        _require_from_zero(self)
        if [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise InvalidArgument(f"betas={self.betas!r} must be two numbers in [0, 1)", field="betas")

    def state_width(self, width: int) -> int:
        return 2 * width

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        del weights
        state[slots] = 0

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        beta1, beta2 = self.betas
        correction = math.sqrt(1 - beta2**step)
        rate = np.float32(self.lr * correction / (1 - beta1**step))
        first_share, second_share = np.float32(1 - beta1), np.float32(1 - beta2)
        eps = np.float32(self.eps * correction if self.corrects_first else self.eps)
        if native.adam is not None:
            native.adam(weights, state, slots, gradients, rate, first_share, second_share, eps)
            return
        width = weights.shape[1]
        moments = state[slots]
        first, second = moments[:, :width], moments[:, width:]
        first += first_share * (gradients - first)
        second += second_share * (gradients * gradients - second)
        state[slots] = moments
        weights[slots] -= rate * (first / (np.sqrt(second) + eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class FTRL:
    """`strata.train.FTRL` for rows."""

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _require_from_zero(self)
        if not (self.lr and self.beta):
            name = "beta" if self.lr else "lr"
            raise InvalidArgument(f"{name}=0 leaves FTRL without a learning rate; use more than 0", field=name)

    def state_width(self, width: int) -> int:
        return 2 * width

    def fill_state(self, weights: Rows, state: Rows, slots: Slots) -> None:
        width = weights.shape[1]
        state[slots, :width] = 0
        state[slots, width:] = np.sign(weights[slots]) * np.float32(self.l1)

    def update(self, weights: Rows, state: Rows, slots: Slots, gradients: Rows, step: int) -> None:
        del step
        inverse, offset = np.float32(1 / self.lr), np.float32(self.beta / self.lr + self.l2)
        l1 = np.float32(self.l1)
        if native.ftrl is not None:
            native.ftrl(weights, state, slots, gradients, inverse, offset, l1)
            return
        width = weights.shape[1]
        old = state[slots]
        sums, duals = old[:, :width], old[:, width:]
        sums += gradients * gradients
        strengths = np.sqrt(sums) * inverse + offset
        values = weights[slots] * strengths + duals - gradients
        duals[...] = np.minimum(np.maximum(values, -l1), l1)
        state[slots] = old
        weights[slots] = (values - duals) / strengths


def _require_from_zero(settings: Any) -> None:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name != "betas" and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise InvalidArgument(f"{each.name}={value!r} must be a number, 0 or more", field=each.name)
