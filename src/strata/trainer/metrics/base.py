"""The port of metrics, and the base of those that are functions of sums over rows.

A metric accumulates a state from batches. The states of all ranks are gathered and merged in rank order, and only then
is the value computed, so a value never is a mean over batches or over ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from strata.trainer.metrics.rows import Rows

Better: TypeAlias = Literal["lower", "higher"]
State: TypeAlias = Mapping[str, torch.Tensor]


@runtime_checkable
class Metric(Protocol):
    """Accumulates rows and computes one number from all of them.

    Promises, which `tests/contract/metric_contract.py` checks:
    - The value does not depend on how rows are cut into batches or distributed over ranks, up to float64 rounding.
    - `state` has the same keys on every rank, also on one without rows, and `merge([metric.state()])` changes nothing.
    - Without rows, or with a NaN among the predictions, the value is NaN.
    """

    name: str
    better: Better

    def reset(self) -> None:
        """Forget all rows."""

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows; `weights` holds one weight per row.

        Raises:
            InvalidArgument: The shapes do not fit each other, or values are outside their range.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as detached tensors on the CPU."""
        ...

    def merge(self, states: Sequence[State]) -> None:
        """Replace the state by the sum of these, given in rank order."""

    def compute(self) -> float:
        """Return the value over all rows."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A metric that stores rows, and therefore limits their number over all ranks."""

    @property
    def num_rows(self) -> int:
        """The number of rows so far."""
        ...

    def prepare(self, num_rows: int) -> None:
        """Prepare for a merge that will hold `num_rows` rows of all ranks, before any of them is sent."""


@runtime_checkable
class ReadsLogits(Protocol):
    """A metric whose value depends on whether predictions are logits or probabilities."""

    from_logits: bool | None


class SumMetric(ABC):
    """A metric that is a function of sums over rows.

    The sums are float64. A NaN prediction turns them into NaN, and so every value computed from them.
    """

    better: Better = "lower"
    default_name: ClassVar[str]
    num_sums: ClassVar[int] = 2

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name or self.default_name
        self._sums = torch.zeros(self.num_sums, dtype=torch.float64)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def reset(self) -> None:
        self._sums = torch.zeros(self.num_sums, dtype=torch.float64)

    def update(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        rows = self._read(predictions, targets, weights)
        if rows.has_nan:
            self._sums += math.nan
        elif len(rows):
            self._sums += self._terms(rows)

    def state(self) -> dict[str, torch.Tensor]:
        return {"sums": self._sums.clone()}

    def merge(self, states: Sequence[State]) -> None:
        # One after the other, in rank order: the same ranks always give the same bits.
        sums = torch.zeros(self.num_sums, dtype=torch.float64)
        for state in states:
            sums += state["sums"]
        self._sums = sums

    def compute(self) -> float:
        return self._value(*self._sums.tolist())

    @abstractmethod
    def _read(self, predictions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Rows:
        """Check the arguments of `update` and bring them into one shape."""

    @abstractmethod
    def _terms(self, rows: Rows) -> torch.Tensor:
        """Return the sums over these rows: float64, `[num_sums]`."""

    @abstractmethod
    def _value(self, *sums: float) -> float:
        """Return the value that follows from the sums."""


class MeanMetric(SumMetric):
    """A weighted mean over rows: the sums are the weight of the rows and the weighted sum of one value per row."""

    def _terms(self, rows: Rows) -> torch.Tensor:
        return torch.stack((rows.total(), rows.sum(self._per_row(rows))))

    def _value(self, *sums: float) -> float:
        weight, total = sums
        return divide(total, weight)

    @abstractmethod
    def _per_row(self, rows: Rows) -> torch.Tensor:
        """Return one float64 value per row."""


def divide(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN where the denominator is zero."""
    return numerator / denominator if denominator != 0 else math.nan


def require_positive(name: str, value: object) -> int:
    """Return a parameter that has to be a positive whole number.

    Raises:
        InvalidArgument: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}={value!r} is not a positive whole number; use 1 or more", field=name)
    return value
