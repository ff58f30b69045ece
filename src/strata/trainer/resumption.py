"""Refuses a checkpoint of another module or optimizer: the error names the checkpoint, what differs, and the cure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from strata.errors import InvalidArgument
from strata.trainer.optimizer import StackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import nn

    from strata.checkpoint import CheckpointManager

MAX_NAMED = 3
"""Parameters of each kind of difference that a message names."""
_CURE = "of the earlier fit, or start a new one without resume=True, with another directory in checkpoints="


@contextlib.contextmanager
def only_fitting(module: nn.Module, optimizer: torch.optim.Optimizer, manager: CheckpointManager) -> Iterator[None]:
    """Within this context, loading a state that does not fit raises an error and leaves the module as it was.

    Raises:
        InvalidArgument: The state has other parameters, or was saved by another kind of optimizer.
    """
    differences: list[str] = []
    before: dict[str, torch.Tensor] = {}

    def look(_: nn.Module, state: Mapping[str, Any], *__: Any) -> None:
        own = module.state_dict()
        differences[:] = _differences(own, state)
        if differences:  # torch copies the tensors that fit before it refuses the others
            before.update({name: value.clone() for name, value in own.items() if _is_tensor(value)})

    def check(each: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        reason = _other_optimizer(each.state_dict()["param_groups"], state["param_groups"])
        if reason:
            raise InvalidArgument(
                f"the optimizer, {type(each).__name__}, does not fit {_named(manager)}: {reason}. Pass the optimizer "
                f"{_CURE}",
                field="optimizer",
            )

    optimizers = optimizer.optimizers.values() if isinstance(optimizer, StackedOptimizer) else [optimizer]
    handles = [
        module.register_load_state_dict_pre_hook(look),  # type: ignore[no-untyped-call]
        *(each.register_load_state_dict_pre_hook(check) for each in optimizers),
    ]
    try:
        yield
    except RuntimeError as error:
        if not differences:
            raise
        own = module.state_dict()
        for name, value in before.items():
            own[name].copy_(value)
        raise InvalidArgument(
            f"the module, {type(module).__name__}, does not fit {_named(manager)}: {'; '.join(differences)}. Pass the "
            f"module {_CURE}",
            field="module",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _differences(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return how the entries of a saved module differ from those of this one, in words."""
    reshaped = [
        f"{name!r} ({list(saved[name].shape)} in the checkpoint, {list(value.shape)} in the module)"
        for name, value in own.items()
        if _is_tensor(value) and _is_tensor(saved.get(name)) and saved[name].shape != value.shape
    ]
    found = {
        "the checkpoint has no": [repr(name) for name in own if name not in saved],
        "the module has no": [repr(name) for name in saved if name not in own],
        "other shapes:": reshaped,
    }
    return [f"{what} {_listed(names)}" for what, names in found.items() if names]


def _other_optimizer(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> str:
    """Return why these are not the parameter groups of the same optimizer; empty if they are."""
    counts, saved_counts = ([len(group["params"]) for group in groups] for groups in (own, saved))
    if counts != saved_counts:
        return f"it was saved with groups of {saved_counts} parameters and has groups of {counts}"
    missing, unknown = sorted(own[0].keys() - saved[0].keys()), sorted(saved[0].keys() - own[0].keys())
    # One of them alone does not make another optimizer: new versions of torch and schedulers add settings.
    if missing and unknown:
        return f"the checkpoint has the settings {_listed(unknown)} of another optimizer, and not {_listed(missing)}"
    return ""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _named(manager: CheckpointManager) -> str:
    latest = manager.latest()
    place = manager.place.rstrip("/")
    return f"the checkpoint in {place}" if latest is None else f"checkpoint {latest.id} in {place}"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class ModuleWithout:
    """Receives the state of a module from a checkpoint that has some of its parameters elsewhere, as tables."""

    def __init__(self, module: nn.Module, elsewhere: Collection[str]) -> None:
        self._module = module
        self._elsewhere = elsewhere

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidArgument: The state has other parameters.
        """
        found = self._module.load_state_dict(state, strict=False)
        missing = [name for name in found.missing_keys if name not in self._elsewhere]
        if missing or found.unexpected_keys:
            names = ", ".join([*missing, *found.unexpected_keys][:5])
            raise InvalidArgument(f"the checkpoint does not fit the module: {names}", field="module")
