"""From a loader's batch to what a step needs: the arguments of `forward`, the target, weights, the number of rows."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from strata.errors import InvalidArgument
from strata.trainer.binding import Binding, bind, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.trainer.config import Label


@dataclass(slots=True)
class Batch:
    """One batch on this rank. `training_step` receives it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    """The label column, the last element of a tuple, or None."""
    weight: torch.Tensor | None
    """Weights of the rows, if `fit(weight=…)` names their column."""
    num_rows: int
    raw: Any
    """What the loader delivered, on the device of the module."""

    def call(self, module: Callable[..., Any]) -> Any:
        """Call the module with its inputs."""
        return module(*self.args, **self.kwargs)


class Splitter:
    """Splits raw batches. The binding is decided with the first batch, unless the columns were known before."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        label: Label,
        inputs: Sequence[str] | None,
        weight: str | None,
        parts: Mapping[str, tuple[str, int | slice]],
        binding: Binding | None,
        device: torch.device,
        needs_target: bool,
        num_inputs: int | None = None,
    ) -> None:
        """
        Args:
            num_inputs: How many elements of a tuple are inputs, if an earlier fit has shown it.
        """
        self._forward = module.forward
        self._label = label
        self._inputs = inputs
        self._weight = weight
        self._parts = parts
        self.binding = binding
        self._device = None if device.type == "cpu" else device
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self._needs_target = needs_target
        self._max_values = _max_positional(module.forward) if num_inputs is None else num_inputs
        """A dataset of (inputs, target) pairs also serves for predictions, which ignore the target."""

    def __call__(self, raw: Any) -> Batch:
        if self._device is not None:
            raw = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), raw)
        inputs, target = self._divide(raw)
        weight = self._weight_of(raw)
        if self.binding is None:
            columns = list(inputs) if isinstance(inputs, Mapping) else None
            self.binding = bind(self._forward, columns, inputs=self._inputs, parts=self._parts)
        args, kwargs = self.binding.arguments(inputs)
        args = tuple(map(self._cast, args))
        kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return Batch(args, kwargs, target, weight, _num_rows(target, inputs), raw)

    def _cast(self, value: Any) -> Any:
        """Give a floating-point tensor the module's type: files often hold float64."""
        if isinstance(value, dict):
            return {name: self._cast(each) for name, each in value.items()}
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self._dtype
        return value.to(self._dtype) if is_float else value

    def _divide(self, raw: Any) -> tuple[Any, Any]:
        """Return the inputs and the target of a raw batch."""
        if callable(self._label) and self._needs_target:
            return raw, self._computed_target(raw, self._label)
        if isinstance(raw, Mapping):
            return self._divide_mapping(raw)
        if isinstance(self._label, str):
            raise InvalidArgument(
                f"label={self._label!r} names a column, but batches are {describe(raw)} without names; let the dataset "
                "return dictionaries, or leave label= out: the last element is the target",
                field="label",
            )
        values = list(raw) if isinstance(raw, list | tuple) else [raw]
        if not self._needs_target:
            return values[: self._max_values], None
        if len(values) < 2:
            raise InvalidArgument(
                f"a batch has one element, {describe(values)}, so there is no target for the loss; deliver "
                "(inputs, target) pairs, or pass label=",
                field="label",
            )
        return values[:-1], values[-1]

    def _computed_target(self, raw: Any, label: Callable[[Any], Any]) -> Any:
        try:
            return label(raw)
        except KeyError as error:
            raise InvalidArgument(
                f"the function label= looks for {error}, which is not in the batch: {describe(raw)}. With features=, a "
                "batch has encoded columns only; name others in Features.fit(passthrough=[…])",
                field="label",
            ) from error

    def _weight_of(self, raw: Any) -> torch.Tensor | None:
        if self._weight is None:
            return None
        if not isinstance(raw, Mapping) or self._weight not in raw:
            raise InvalidArgument(
                f"weight={self._weight!r} is not a column of the batch: {describe(raw)}; let the dataset return "
                "dictionaries with this key, or leave weight= out",
                field="weight",
            )
        weight: torch.Tensor = raw[self._weight]
        return weight

    def _divide_mapping(self, raw: Mapping[str, Any]) -> tuple[Any, Any]:
        labels = label_names(self._label)
        inputs = {name: value for name, value in raw.items() if name not in labels and name != self._weight}
        if not self._needs_target:
            return inputs, None
        check_label(labels, list(raw))
        found = [raw[name] for name in labels]
        return inputs, found[0] if isinstance(self._label, str) else torch.stack(found, dim=1)


def label_names(label: Label) -> list[str]:
    """Return the columns of the label; none if it is a function or the last element."""
    if isinstance(label, str):
        return [label]
    return [] if label is None or callable(label) else list(label)


def check_label(labels: Sequence[str], columns: Sequence[str]) -> None:
    """Check that the label exists.

    Raises:
        InvalidArgument: It does not, or none was given.
    """
    if not labels:
        raise InvalidArgument(
            f"label= is missing, so the loss has no target; name its column: {', '.join(columns)}", field="label"
        )
    for name in labels:
        if name not in columns:
            close = difflib.get_close_matches(name, columns, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InvalidArgument(
                f"label={name!r} is not a column of the data; {hint}Columns: {', '.join(columns)}", field="label"
            )


def _max_positional(forward: Callable[..., Any]) -> int | None:
    """Return how many positional arguments a function takes; None: any number."""
    found = inspect.signature(forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
        return None
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in found)


def _num_rows(target: Any, inputs: Any) -> int:
    if isinstance(target, torch.Tensor) and target.dim():
        return len(target)
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else [inputs]
    )
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.dim()), 1)
