"""Several optimizers for the parts of one module.

`OptimizerStack` is a description without parameters, so it can be sent to workers. `compile` binds it to a module and
returns a `StackedOptimizer`, which schedulers, gradient scalers and checkpoints treat as a single optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from strata.errors import InvalidArgument
from strata.trainer.optimizer.factory import Factory, create

Match: TypeAlias = "str | Callable[[str, nn.Parameter], bool]"
REST = "*"
"""Matches every parameter that no other part matches."""
VELOCE_KEYS = frozenset({"cls", "args", "model_key"})


@dataclass(frozen=True, slots=True)
class Part:
    """An optimizer for some parameters of a module.

    Args:
        match: The name of a submodule or of a parameter; a pattern for names of parameters (`"*.bias"`); a function of
            a name and its parameter; or `"*"`, every parameter that no other part matches.
        optimizer: A name, a class, or a function of a list of parameters.
        args: Keyword arguments for the optimizer.
    """

    match: Match
    optimizer: Factory
    args: Mapping[str, Any] = field(default_factory=dict)


class OptimizerStack:
    """Describes several optimizers, each for a part of a module.

    Two forms describe the same:

        OptimizerStack({"deep": "adamw", "wide": partial(FTRL, lr=0.1), "*": torch.optim.SGD})
        OptimizerStack(Part("deep", "adamw", {"lr": 1e-3}), Part("*", "sgd"))

    Veloce's form, `OptimizerStack(dict(cls=torch.optim.Adam, args=dict(lr=1e-3), model_key="deep"), …)`, works too.

    Raises:
        InvalidArgument: There is no part, an entry has another form, or two parts match the same.
    """

    def __init__(self, *parts: Part | Mapping[str, Any]) -> None:
        found: list[Part] = []
        for entry in parts:
            found.extend(_parts(entry))
        if not found:
            raise InvalidArgument(
                'an OptimizerStack needs a part; write OptimizerStack({"deep": "adam", "*": "sgd"})', field="optimizer"
            )
        self.parts: dict[str, Part] = {}
        for number, part in enumerate(found):
            key = part.match if isinstance(part.match, str) else f"part {number}"
            if key in self.parts:
                raise InvalidArgument(f"two parts of the OptimizerStack match {key!r}; keep one", field="optimizer")
            self.parts[key] = part

    def __repr__(self) -> str:
        return f"OptimizerStack({', '.join(map(repr, self.parts.values()))})"

    def compile(self, module: nn.Module) -> StackedOptimizer:
        """Create the optimizers for the parameters of a module that require gradients.

        Raises:
            InvalidArgument: A part matches nothing, two parts match one parameter, or no part matches a parameter.
        """
        chosen = self._assign(module)
        return StackedOptimizer(
            {key: create(part.optimizer, chosen[key], part.args) for key, part in self.parts.items()}
        )

    def _assign(self, module: nn.Module) -> dict[str, list[nn.Parameter]]:
        chosen: dict[str, list[nn.Parameter]] = {key: [] for key in self.parts}
        left: list[str] = []
        for names, parameter in _trained(module):
            keys = [key for key, part in self.parts.items() if any(_matches(part, name, parameter) for name in names)]
            if len(keys) > 1:
                raise InvalidArgument(
                    f"parameter {names[0]!r} is matched by {_listed(keys)}; a parameter belongs to one optimizer: make "
                    "one pattern narrower, or replace it by '*', which takes all remaining parameters",
                    field="optimizer",
                )
            if keys:
                chosen[keys[0]].append(parameter)
            elif REST in self.parts:
                chosen[REST].append(parameter)
            else:
                left.append(names[0])
        if left:
            raise InvalidArgument(
                f"no part of the OptimizerStack matches {len(left)} parameters that require gradients: "
                f"{_listed(left)}; add a part '*' for them, or freeze them with requires_grad_(False)",
                field="optimizer",
            )
        for key, parameters in chosen.items():
            if not parameters:
                raise _unmatched(key, self.parts[key], module)
        return chosen


class StackedOptimizer(torch.optim.Optimizer):
    """Optimizers of the parts of a module, as one optimizer.

    `param_groups` are those of all parts in order, so a scheduler changes the learning rates of the parts. The state is
    in `state_dict`, by part, and in `optimizers`.
    """

    _is_bound = False

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self._is_bound = True
        self.param_groups = groups

    def __reduce__(self) -> tuple[Any, ...]:
        return StackedOptimizer, (self.optimizers,)

    def __repr__(self) -> str:
        return f"StackedOptimizer({self.optimizers!r})"

    def step(self, closure: Any = None) -> Any:
        """Step every optimizer.

        Raises:
            InvalidArgument: A closure is given: each optimizer would call it again, after others have stepped.
        """
        if closure is not None:
            raise InvalidArgument(
                "an OptimizerStack takes no closure: each optimizer would evaluate it at other weights; call "
                "backward() before step()",
                field="closure",
            )
        for optimizer in self.optimizers.values():
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_bound:
            raise InvalidArgument(
                "parameters cannot be added to an OptimizerStack; add them to one of its `optimizers` before it is "
                "compiled, or compile it again",
                field="param_group",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": {key: optimizer.state_dict() for key, optimizer in self.optimizers.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            InvalidArgument: The state has other parts.
        """
        states = state_dict.get("optimizers", {})
        if states.keys() != self.optimizers.keys():
            raise InvalidArgument(
                f"the saved state has the parts {_listed(states)}, this OptimizerStack has {_listed(self.optimizers)}; "
                "restore it with the same parts",
                field="state_dict",
            )
        for key, optimizer in self.optimizers.items():
            optimizer.load_state_dict(states[key])
        # Loading replaces the groups of an optimizer.
        self.param_groups = [group for each in self.optimizers.values() for group in each.param_groups]


def _parts(entry: Part | Mapping[str, Any]) -> list[Part]:
    if isinstance(entry, Part):
        return [entry]
    if not isinstance(entry, Mapping):
        raise InvalidArgument(
            f"{entry!r} is not a part of an OptimizerStack; write a mapping such as {{'deep': 'adam'}}, or "
            "Part('deep', 'adam')",
            field="optimizer",
        )
    if not entry.keys() & {"args", "model_key"}:
        return [Part(match, optimizer) for match, optimizer in entry.items()]
    if not {"cls", "model_key"} <= entry.keys() <= VELOCE_KEYS:
        raise InvalidArgument(
            f"a part of an OptimizerStack has the keys {sorted(entry)}; write dict(cls=…, args=dict(…), model_key=…)",
            field="optimizer",
        )
    return [Part(entry["model_key"], entry["cls"], entry.get("args") or {})]


def _trained(module: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Return each parameter that requires a gradient with its names: a shared one has several."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return list(found.values())


def _matches(part: Part, name: str, parameter: nn.Parameter) -> bool:
    if not isinstance(part.match, str):
        return bool(part.match(name, parameter))
    if part.match == REST:
        return False
    if any(sign in part.match for sign in "*?["):
        return fnmatchcase(name, part.match)
    return name == part.match or name.startswith(f"{part.match}.")


def _unmatched(key: str, part: Part, module: nn.Module) -> InvalidArgument:
    if any(_matches(part, name, parameter) for name, parameter in module.named_parameters()):
        return InvalidArgument(
            f"{key!r} of the OptimizerStack matches frozen parameters only; remove the part, or unfreeze them with "
            "requires_grad_(True)",
            field="optimizer",
        )
    if key == REST:
        return InvalidArgument(
            "'*' of the OptimizerStack matches nothing, because other parts match every parameter; remove it",
            field="optimizer",
        )
    names = [name for name, _ in module.named_children()]
    return InvalidArgument(
        f"{key!r} of the OptimizerStack matches no parameter; {type(module).__name__} has the submodules "
        f"{_listed(names) or 'none'}; a pattern such as '*.bias' matches names of parameters",
        field="optimizer",
    )


def _listed(names: Any, most: int = 8) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
