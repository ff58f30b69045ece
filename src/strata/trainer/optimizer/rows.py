"""Optimizers of rows on parameter servers that follow an optimizer of torch.

The user passes one optimizer for the whole module. Parameters that live on servers leave it, and the servers update
them with the same formula and the same settings: those of the group that a parameter was in. The group stays, also if
it is empty, because a scheduler changes its learning rate, which every push carries to the servers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from strata.errors import InvalidArgument
from strata.servers.table import optimizers
from strata.trainer.optimizer.ftrl import FTRL
from strata.trainer.optimizer.stack import StackedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from strata.servers.table.optimizers import RowOptimizer

_UNSUPPORTED = ("momentum", "dampening", "nesterov", "weight_decay", "amsgrad", "maximize")
"""Settings with which a row would change in steps that do not touch it, or that rows have no state for."""


class ParameterGroup:
    """The group of an optimizer that a parameter belongs to, before it moves to servers or shards."""

    def __init__(self, optimizer: torch.optim.Optimizer, position: int, number: int) -> None:
        self._optimizer = optimizer
        self._position = position
        self.number = number
        """Its position among all groups of all optimizers."""
        self._first_rate = self.rate

    @property
    def _settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self._optimizer.param_groups[self._position]  # a restore replaces them
        return settings

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        return type(self._optimizer)

    def optimizer_of(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of the same kind for other parameters, in one group with the same settings."""
        made = copy.copy(self._optimizer)
        made.state = defaultdict(dict)
        made.param_groups = [{**self._settings, "params": list(parameters)}]
        return made

    def renew(self, made: torch.optim.Optimizer) -> None:
        """Give the current settings to an optimizer that `optimizer_of` returned; a schedule may have changed them."""
        settings = {key: value for key, value in self._settings.items() if key != "params"}
        made.param_groups[0].update(settings)

    @property
    def rate(self) -> float:
        """The current learning rate."""
        return float(self._settings["lr"])

    def scaled(self, rate: float) -> float:
        """Return a learning rate of the user's own, scaled as a schedule has scaled that of the group."""
        return rate * self.rate / self._first_rate if self._first_rate else rate

    def row_optimizer(self, name: str) -> RowOptimizer:
        """Return the optimizer of rows with the same settings. `name`: of the parameter, for messages.

        Raises:
            InvalidArgument: There is none, or a setting is not supported.
        """
        settings, kind = self._settings, type(self._optimizer).__name__
        for each in _UNSUPPORTED:
            if settings.get(each):
                raise InvalidArgument(
                    f"{kind}({each}={settings[each]}) does not work for {name} on parameter servers, which change only "
                    f"the rows of a batch; set {each}=0, or give this parameter its own optimizer with OptimizerStack",
                    field="optimizer",
                )
        lr = self.rate
        if type(self._optimizer) is torch.optim.SGD:
            return optimizers.SGD(lr=lr)
        if type(self._optimizer) is torch.optim.Adagrad:
            keys = ("lr_decay", "initial_accumulator_value", "eps")
            return optimizers.Adagrad(lr=lr, **{key: float(settings[key]) for key in keys})
        if type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam):
            first, second = settings["betas"]
            is_sparse = type(self._optimizer) is torch.optim.SparseAdam
            betas, eps = (float(first), float(second)), float(settings["eps"])
            return optimizers.LazyAdam(lr=lr, betas=betas, eps=eps, corrects_first=not is_sparse)
        if type(self._optimizer) is FTRL:
            return optimizers.FTRL(lr=lr, **{key: float(settings[key]) for key in ("beta", "l1", "l2")})
        raise InvalidArgument(
            f"{kind} cannot update {name} on parameter servers; use SGD, Adagrad, Adam, SparseAdam or FTRL, pass "
            "ParameterServer(optimizer=RowWiseAdagrad(lr=…)), or give this parameter its own optimizer with "
            "OptimizerStack",
            field="optimizer",
        )


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> ParameterGroup:
    """Return the group of a parameter.

    Raises:
        InvalidArgument: It is in none, so it is not trained.
    """
    groups = [
        (each, position, settings) for each in _single(optimizer) for position, settings in enumerate(each.param_groups)
    ]
    for number, (each, position, settings) in enumerate(groups):
        if any(parameter is one for one in settings["params"]):
            return ParameterGroup(each, position, number)
    raise InvalidArgument(
        f"the optimizer does not have {name}, which the strategy takes out of the module; pass the class of the "
        "optimizer, or all parameters of the module",
        field="optimizer",
    )


def release(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Take parameters out of an optimizer, whose groups stay."""
    moved = {id(each) for each in parameters}
    for each in _single(optimizer):
        for group in each.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
        for parameter in [one for one in each.state if id(one) in moved]:
            del each.state[parameter]


def _single(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(optimizer.optimizers.values()) if isinstance(optimizer, StackedOptimizer) else [optimizer]
