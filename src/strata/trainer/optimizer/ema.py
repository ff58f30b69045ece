"""An exponential moving average of the weights, for evaluation and export."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Ema:
    """Averages the parameters of a module that require gradients.

    Only parameters are averaged. Buffers, such as the statistics of batch normalization, stay those of the module, as
    in `torch.optim.swa_utils.AveragedModel`, whose arithmetic this is. There is no second module: the averages are
    swapped into the module where they are needed.

    Args:
        decay: Share of the average that remains at an update, usually 0.99 to 0.9999.
        every: Number of calls of `update` per update.

    Raises:
        InvalidArgument: A value is outside its range.
    """

    def __init__(self, decay: float = 0.999, every: int = 1) -> None:
        if not 0 <= decay < 1:
            raise InvalidArgument(f"decay={decay!r} is outside [0, 1); 0.999 is usual", field="decay")
        if every != int(every) or every < 1:
            raise InvalidArgument(f"every={every!r} is not a positive whole number; use 1 or more", field="every")
        self.decay = decay
        self.every = every
        self._num_calls = 0
        self._averages: dict[str, torch.Tensor] = {}
        self._is_applied = False

    def __repr__(self) -> str:
        return f"Ema(decay={self.decay}, every={self.every})"

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Count an optimizer step, and move the averages towards the weights at every `every`-th one."""
        self._require_own_weights("update")
        self._num_calls += 1
        if self._num_calls % self.every:
            return
        by_type: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            average = self._average(name, parameter)
            if average is None:  # The first update, or a parameter that was frozen until now.
                self._averages[name] = parameter.detach().clone()
                continue
            averages, weights = by_type.setdefault((parameter.device, parameter.dtype), ([], []))
            averages.append(average)
            weights.append(parameter.detach())
        for averages, weights in by_type.values():
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Evaluate with the averages: swap them into the module, and the weights back at the end, bit for bit.

        Before the first update the weights are left as they are.
        """
        self._require_own_weights("applied")
        pairs = self._pairs(module)
        self._is_applied = True
        _swap(pairs)
        try:
            yield
        finally:
            _swap(pairs)
            self._is_applied = False

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Replace the weights of the module by the averages."""
        for parameter, average in self._pairs(module):
            parameter.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the names of their parameters, and the number of calls."""
        self._require_own_weights("state_dict")
        return {"num_calls": self._num_calls, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The averages move to the devices of their parameters when used."""
        self._require_own_weights("load_state_dict")
        self._num_calls = int(state_dict["num_calls"])
        self._averages = {name: average.detach().clone() for name, average in state_dict["averages"].items()}

    def _average(self, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
        average = self._averages.get(name)
        if average is None:
            return None
        if average.shape != parameter.shape:
            raise InvalidArgument(
                f"the average of {name!r} has the shape {list(average.shape)}, the parameter {list(parameter.shape)}; "
                "restore the moving average of this module, or start without it",
                field="ema",
            )
        if average.device != parameter.device or average.dtype != parameter.dtype:
            average = self._averages[name] = average.to(parameter)
        return average

    def _pairs(self, module: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return parameters with their averages."""
        parameters = dict(module.named_parameters())
        unknown = [name for name in self._averages if name not in parameters]
        if unknown:
            raise InvalidArgument(
                f"{type(module).__name__} has no parameter {unknown[0]!r}, but there is an average of it; pass the "
                "module that update() gets, not a wrapper of it",
                field="module",
            )
        found = [(parameter, self._average(name, parameter)) for name, parameter in parameters.items()]
        return [(parameter, average) for parameter, average in found if average is not None]

    def _require_own_weights(self, call: str) -> None:
        if self._is_applied:
            raise InvalidArgument(
                f"{call}() was called while the averages are in the module; leave the block of applied() first",
                field="ema",
            )


@torch.no_grad()
def _swap(pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    # By value, not by pointer: compiled graphs and communication buckets may hold the memory of the parameters.
    for parameter, average in pairs:
        weights = parameter.detach().clone()
        parameter.copy_(average)
        average.copy_(weights)
