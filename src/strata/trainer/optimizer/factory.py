"""Create an optimizer for given parameters from a name, a class or a factory."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from strata.errors import InvalidArgument
from strata.trainer.optimizer.ftrl import FTRL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Factory: TypeAlias = "str | Callable[..., torch.optim.Optimizer]"
"""A name, a class, or a function of a list of parameters, such as `functools.partial(torch.optim.Adam, lr=1e-3)`."""

BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "ftrl": FTRL,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sparse_adam": torch.optim.SparseAdam,
}

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Classes that are created with `fused=True`, unless the user chose an implementation: it passes over the memory once
instead of a dozen times per parameter. Its results differ from those of torch's default in the last bits.
"""
_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
"""Arguments with which a user chooses an implementation."""
_FUSED_TYPES = (torch.float32, torch.float64)


def create(
    spec: Factory, parameters: Sequence[torch.nn.Parameter], args: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer of these parameters.

    Args:
        spec: See `Factory`.
        parameters: All require a gradient.
        args: Keyword arguments for the class or the factory.

    Raises:
        InvalidArgument: The name is unknown, the arguments do not fit, a factory returns something else, or the
            optimizer computes the loss itself.
    """
    make = named(spec) if isinstance(spec, str) else spec
    if not callable(make):
        raise InvalidArgument(
            f"optimizer={spec!r} is not an optimizer; pass a name such as 'adam', a class, an instance, a function of "
            "the parameters, or an OptimizerStack",
            field="optimizer",
        )
    name = getattr(make, "__name__", repr(make))
    try:
        optimizer = make(list(parameters), **(args or {}), **_implementation(make, parameters, args or {}))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"optimizer {name} cannot be created with {dict(args or {})}: {error}", field="optimizer"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer {name} returned {type(optimizer).__name__}; return a torch.optim.Optimizer", field="optimizer"
        )
    require_plain_step(optimizer)
    return optimizer


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        InvalidArgument: A step needs a function that computes the loss, such as that of LBFGS.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        kind = type(optimizer).__name__
        raise InvalidArgument(
            f"{kind} computes the loss several times in a step, but a Trainer computes it once; use another optimizer, "
            "such as 'adam'",
            field="optimizer",
        )


def _implementation(
    make: Callable[..., torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that choose the fastest implementation of these parameters, if the user chose none."""
    kind, given = (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})
    is_open = kind in FUSED and _IMPLEMENTATIONS.isdisjoint({*given, *args})
    fits = all(each.dtype in _FUSED_TYPES and each.device.type in ("cpu", "cuda") for each in parameters)
    return {"fused": True} if is_open and fits else {}


def named(name: str) -> type[torch.optim.Optimizer]:
    """Return the class with a name.

    Raises:
        InvalidArgument: No optimizer has this name.
    """
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    close = difflib.get_close_matches(name.lower(), BY_NAME, n=3)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise InvalidArgument(
        f"optimizer {name!r} is unknown; {meant}Names are {', '.join(BY_NAME)}. A class or a function of the "
        "parameters works as well",
        field="optimizer",
    )
