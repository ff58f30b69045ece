"""Turn what users pass as `optimizer` into an optimizer of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from strata.errors import InvalidArgument
from strata.trainer.optimizer.factory import Factory, create, require_plain_step
from strata.trainer.optimizer.stack import OptimizerStack

if TYPE_CHECKING:
    from collections.abc import Mapping

OptimizerSpec: TypeAlias = "Factory | torch.optim.Optimizer | OptimizerStack"
"""A name, a class, a function of a list of parameters, an instance, or an `OptimizerStack`."""


def build(spec: OptimizerSpec, module: nn.Module, args: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters of a module that require gradients.

    Args:
        spec: See `OptimizerSpec`. An instance is returned as it is, once its parameters are known to be the module's.
        module: The module as the user wrote it, before a strategy wraps it.
        args: Keyword arguments for a name, a class or a function.

    Raises:
        InvalidArgument: Nothing can be trained, the specification is invalid, or an optimizer has parameters that are
            not the module's or are frozen, or computes the loss itself.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgument(
            f"{type(module).__name__} has no parameter that requires a gradient; unfreeze some with "
            "requires_grad_(True)",
            field="module",
        )
    if isinstance(spec, (torch.optim.Optimizer, OptimizerStack)) and args:
        raise InvalidArgument(
            f"the arguments {dict(args)} cannot be applied to {type(spec).__name__}; set them where it is created",
            field="optimizer",
        )
    if isinstance(spec, OptimizerStack):
        return spec.compile(module)
    if isinstance(spec, torch.optim.Optimizer):
        require_plain_step(spec)
        optimizer = spec
    else:
        optimizer = create(spec, trained, args)
    _check_parameters(optimizer, module)
    return optimizer


def _check_parameters(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in parameters)
    frozen = sum(id(parameter) in own and not parameter.requires_grad for parameter in parameters)
    kind = type(optimizer).__name__
    if foreign:
        raise InvalidArgument(
            f"{foreign} of the {len(parameters)} parameters of {kind} do not belong to {type(module).__name__}; create "
            "the optimizer from the parameters of this module, or pass the class",
            field="optimizer",
        )
    if frozen:
        raise InvalidArgument(
            f"{frozen} of the {len(parameters)} parameters of {kind} require no gradient, so they would never change; "
            "leave them out, or unfreeze them with requires_grad_(True)",
            field="optimizer",
        )
