"""`SearchSpace`: the parameters of a study, when they apply, and which combinations are allowed.

    space = SearchSpace()
    space.add_float("learning_rate", min=1e-5, max=1e-2, log=True, default=1e-3)
    space.add_int("batch_size", values=[32, 64, 128])
    space.add_categorical("optimizer", ["sgd", "adam"])
    space.add_float("momentum", min=0.0, max=0.99, when={"optimizer": "sgd"})
    space.add_constraint("batch_size * learning_rate <= 1")
    space.enqueue({"learning_rate": 3e-4, "batch_size": 64})

A parameter may depend on parameters added before it, so one pass in this order decides which are active. Samplers see a
configuration as a point of the unit cube, one coordinate per parameter; coordinates of inactive parameters are unused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from strata.errors import ConfigError, InvalidArgument, LimitExceeded
from strata.tune.space.expression import Constraint
from strata.tune.space.parameters import Choice, Config, Float, Int, Kind, Parameter, same

if TYPE_CHECKING:
    import os

    import numpy as np

MAX_PARAMETERS = 256
MAX_CONSTRAINTS = 100
MAX_POINTS = 1_000
"""Points to try first."""
MAX_REJECTED = 10_000
"""Random configurations in a row that may violate a constraint before the space counts as empty."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,99}")


class SearchSpace:
    """Every method that adds something returns the space, so calls can be chained."""

    def __init__(self) -> None:
        self._parameters: dict[str, Parameter] = {}
        self._constraints: list[Constraint] = []
        self._points: list[Config] = []

    # -- declaration -----------------------------------------------------------------------------------------------

    def add_float(
        self,
        name: str,
        *,
        min: float | None = None,  # noqa: A002 - as users call it
        max: float | None = None,  # noqa: A002
        log: bool = False,
        step: float | None = None,
        values: Sequence[float] | None = None,
        default: float | None = None,
        when: Mapping[str, Any] | None = None,
    ) -> Self:
        """Add a number.

        Args:
            min: Smallest value, included.
            max: Largest value, included.
            log: Sample the logarithm, for a value whose magnitude is unknown, such as a learning rate.
            step: Only min, min + step, min + 2 * step, …
            values: Only these values, instead of a range.
            default: Value to try first.
            when: The parameter applies only if each of these parameters has this value, or one of these values.

        Raises:
            ConfigError: The range or the condition is invalid; the message names the cure.
        """
        if values is not None:
            return self._add_values(name, "float", values, default, when, is_range=not min is max is step is None)
        _check_range_given(name, min, max)
        conditions = self._conditions(name, when)
        return self._add(Float(name=name, min=min, max=max, log=log, step=step, default=default, when=conditions))

    def add_int(
        self,
        name: str,
        *,
        min: int | None = None,  # noqa: A002
        max: int | None = None,  # noqa: A002
        log: bool = False,
        step: int | None = None,
        values: Sequence[int] | None = None,
        default: int | None = None,
        when: Mapping[str, Any] | None = None,
    ) -> Self:
        """Add an integer; the arguments are those of `add_float`."""
        if values is not None:
            return self._add_values(name, "int", values, default, when, is_range=not min is max is step is None)
        _check_range_given(name, min, max)
        conditions = self._conditions(name, when)
        return self._add(Int(name=name, min=min, max=max, log=log, step=step, default=default, when=conditions))

    def add_categorical(
        self,
        name: str,
        choices: Sequence[bool | float | str | None],
        *,
        default: bool | float | str | None = None,
        when: Mapping[str, Any] | None = None,
    ) -> Self:
        """Add a choice between values without an order: text, numbers, booleans or None."""
        values = _listed(name, "choices", choices)
        return self._add(Choice(name=name, values=values, default=default, when=self._conditions(name, when)))

    def add_bool(self, name: str, *, default: bool | None = None, when: Mapping[str, Any] | None = None) -> Self:
        """Add a choice between False and True."""
        conditions = self._conditions(name, when)
        return self._add(Choice(name=name, kind="bool", values=(False, True), default=default, when=conditions))

    def add_fixed(self, name: str, value: bool | float | str | None, *, when: Mapping[str, Any] | None = None) -> Self:
        """Add a value that is the same in all configurations."""
        return self._add(Choice(name=name, kind="fixed", values=(value,), when=self._conditions(name, when)))

    def add_constraint(self, expression: str) -> Self:
        """Allow only configurations for which an expression over parameters is true, such as "layers * width <= 4096".

        A constraint is ignored where one of its parameters is inactive.

        Raises:
            ConfigError: The expression is invalid or names an unknown parameter.
        """
        constraint = Constraint(expression)
        for name in sorted(constraint.names):
            if name not in self._parameters:
                raise ConfigError(
                    f"constraint {expression!r}: {self._unknown(name)}; add parameters before constraints",
                    field="constraints",
                )
        if len(self._constraints) >= MAX_CONSTRAINTS:
            raise LimitExceeded(f"a space has at most {MAX_CONSTRAINTS} constraints", field="constraints")
        if constraint not in self._constraints:
            self._constraints.append(constraint)
        return self

    def enqueue(self, config: Mapping[str, Any]) -> Self:
        """Try this configuration before those of the sampler. Parameters that it omits take their default, or a random
        value.

        Raises:
            ConfigError: A value is not allowed, or the configuration violates a constraint.
        """
        if len(self._points) >= MAX_POINTS:
            raise LimitExceeded(f"at most {MAX_POINTS:,} configurations can be tried first", field="points")
        point = dict(config)
        for name, value in point.items():
            if name not in self._parameters:
                raise ConfigError(f"enqueue: {self._unknown(name)}", field=name)
            self._check_value(name, value)
        for name in reversed(self._parameters):  # a parameter that is given needs its conditions
            if name in point:
                for parent, allowed in self._parameters[name].when.items():
                    default = self._parameters[parent].default
                    point.setdefault(parent, default if default in allowed else allowed[0])
        if conflict := self._conflict(point):
            raise ConfigError(f"enqueue: {conflict}", field="points")
        self._points.append(point)
        return self

    # -- contents --------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return self._parameters

    @property
    def constraints(self) -> Sequence[Constraint]:
        return self._constraints

    @property
    def num_configs(self) -> int | None:
        """Upper limit of the number of configurations; None if a parameter is continuous."""
        product = 1
        for parameter in self._parameters.values():
            if parameter.num_values is None:
                return None
            product *= parameter.num_values
        return product

    def active(self, values: Mapping[str, Any]) -> Config:
        """Return the values of active parameters, in the order of the space."""
        found: Config = {}
        for name, parameter in self._parameters.items():
            if name in values and parameter.is_active(found):
                found[name] = values[name]
        return found

    def check(self, config: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidArgument: The configuration is not one of this space; the message names the value and the rule.
        """
        if reason := self.why_not(config):
            raise InvalidArgument(f"configuration {dict(config)!r}: {reason}", field="config")

    def why_not(self, config: Mapping[str, Any]) -> str:
        """Return why a configuration is not one of this space; empty if it is."""
        seen: Config = {}
        for name, parameter in self._parameters.items():
            if not parameter.is_active(seen):
                if name in config:
                    return f"{name!r} does not apply here; it needs {_in_words(parameter.when)}"
                continue
            if name not in config:
                return f"{name!r} is missing"
            if not parameter.contains(config[name]):
                return f"{name}={config[name]!r} is not allowed; use {parameter.describe()}"
            seen[name] = config[name]
        unknown = [name for name in config if name not in self._parameters]
        if unknown:
            return self._unknown(unknown[0])
        return next((f"it violates {each.text!r}" for each in self._constraints if not each.holds(config)), "")

    def is_allowed(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration of values that are allowed one by one meets all constraints."""
        return all(each.holds(config) for each in self._constraints)

    # -- points of the unit cube -----------------------------------------------------------------------------------

    def at(self, units: Sequence[float]) -> Config:
        """Return the configuration at a point of the unit cube, whether or not it meets the constraints."""
        found: Config = {}
        for unit, (name, parameter) in zip(units, self._parameters.items(), strict=True):
            if parameter.is_active(found):
                found[name] = parameter.at(unit)
        return found

    def units(self, config: Mapping[str, Any]) -> list[float]:
        """Return the point of a configuration; inactive parameters are at 0.5."""
        return [each.unit(config[name]) if name in config else 0.5 for name, each in self._parameters.items()]

    def draw(self, rng: np.random.Generator, fixed: Mapping[str, Any] | None = None) -> Config:
        """Return a random configuration that meets all constraints, with the values in `fixed` where they apply.

        Raises:
            ConfigError: The constraints leave nothing to find.
        """
        for _ in range(MAX_REJECTED):
            units = rng.random(len(self._parameters))
            found: Config = {}
            for unit, (name, parameter) in zip(units, self._parameters.items(), strict=True):
                if parameter.is_active(found):
                    found[name] = fixed[name] if fixed and name in fixed else parameter.at(float(unit))
            if self.is_allowed(found):
                return found
        texts = " and ".join(repr(each.text) for each in self._constraints[:3])
        raise ConfigError(
            f"{MAX_REJECTED:,} random configurations in a row violate {texts}; loosen the constraints, or narrow the "
            "ranges to what they allow",
            field="constraints",
        )

    def first_points(self, rng: np.random.Generator) -> list[Config]:
        """Return the configurations to try first: the defaults, if there are any, and then those of `enqueue`."""
        defaults = {name: each.default for name, each in self._parameters.items() if each.default is not None}
        points = [defaults, *self._points] if defaults else list(self._points)
        found: list[Config] = []
        for point in points:
            config = self.draw(rng, fixed=defaults | point)
            if config not in found:
                found.append(config)
        return found

    # -- YAML ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the space as plain values, which `from_dict` reads."""
        found: dict[str, Any] = {"parameters": {name: _entry(each) for name, each in self._parameters.items()}}
        if self._constraints:
            found["constraints"] = [each.text for each in self._constraints]
        if self._points:
            found["enqueue"] = [dict(each) for each in self._points]
        return found

    @staticmethod
    def from_dict(values: Mapping[str, Any], *, source: str = "space") -> SearchSpace:
        """
        Raises:
            ConfigError: A part is missing, unknown or invalid; the message starts with `source`.
        """
        from strata.tune.space.files import read_space  # noqa: PLC0415 - it imports this module

        return read_space(values, source=source)

    def to_yaml(self) -> str:
        """Return the space as the text of a YAML file."""
        from strata.tune.space.files import write_yaml  # noqa: PLC0415

        return write_yaml(self)

    @staticmethod
    def from_yaml(path: str | os.PathLike[str]) -> SearchSpace:
        """Read a space from a file.

        Raises:
            ConfigError: The file is missing or invalid; the message names the place and the cure.
        """
        from strata.tune.space.files import read_yaml_space  # noqa: PLC0415

        return read_yaml_space(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchSpace) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SearchSpace({', '.join(self._parameters)})"

    # -- checks ----------------------------------------------------------------------------------------------------

    def _add_values(
        self,
        name: str,
        kind: Kind,
        values: Sequence[Any],
        default: Any,
        when: Mapping[str, Any] | None,
        *,
        is_range: bool,
    ) -> Self:
        if is_range:
            raise ConfigError(f"parameter {name!r}: values= replaces min=, max= and step=; drop them", field=name)
        listed = _listed(name, "values", values)
        wanted = int if kind == "int" else int | float
        for value in listed:
            if isinstance(value, bool) or not isinstance(value, wanted):
                cure = "use add_categorical for other values"
                raise ConfigError(f"parameter {name!r}: value {value!r} is not {_article(kind)}; {cure}", field=name)
        converted = sorted(float(each) if kind == "float" else each for each in listed)
        conditions = self._conditions(name, when)
        default = float(default) if kind == "float" and isinstance(default, int) else default
        return self._add(
            Choice(name=name, kind=kind, values=tuple(converted), is_ordered=True, default=default, when=conditions)
        )

    def _add(self, parameter: Parameter) -> Self:
        name = parameter.name
        if name in self._parameters:
            raise ConfigError(f"parameter {name!r} is already in the space; choose another name", field=name)
        if len(self._parameters) >= MAX_PARAMETERS:
            raise LimitExceeded(f"a space has at most {MAX_PARAMETERS} parameters", field=name)
        self._parameters[name] = parameter
        return self

    def _conditions(self, name: str, when: Mapping[str, Any] | None) -> dict[str, tuple[Any, ...]]:
        """Check the name and the condition of a parameter; return the allowed values by parent."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):  # type: ignore[redundant-expr]
            raise ConfigError(
                f"parameter name {name!r} must start with a letter and contain letters, digits, '_', '-' or '.', at "
                "most 100 characters",
                field="name",
            )
        found: dict[str, tuple[Any, ...]] = {}
        if when is not None and not isinstance(when, Mapping):
            raise ConfigError(f"parameter {name!r}: when={when!r} must map parameters to values", field=name)
        for parent, allowed in (when or {}).items():
            if parent not in self._parameters:
                raise ConfigError(f"parameter {name!r}: when= names {self._unknown(parent)}; add it first", field=name)
            if self._parameters[parent].num_values is None:
                raise ConfigError(
                    f"parameter {name!r}: when= depends on {parent!r}, which is continuous; use a parameter with "
                    "listed values or a step",
                    field=name,
                )
            values = tuple(allowed) if isinstance(allowed, list | tuple | set | frozenset) else (allowed,)
            if not values:
                raise ConfigError(f"parameter {name!r}: when= lists no value of {parent!r}; add one", field=name)
            for value in values:
                self._check_value(parent, value, f"parameter {name!r}: when=")
            found[parent] = values
        return found

    def _check_value(self, name: str, value: Any, prefix: str = "") -> None:
        parameter = self._parameters[name]
        if not parameter.contains(value):
            start = f"{prefix} " if prefix else ""
            raise ConfigError(f"{start}{name}={value!r} is not allowed; use {parameter.describe()}", field=name)

    def _conflict(self, point: Config) -> str:
        """Return why a part of a configuration cannot be completed; empty if nothing speaks against it."""
        for name in point:
            for parent, allowed in self._parameters[name].when.items():
                if parent in point and not any(same(point[parent], each) for each in allowed):
                    return f"{name!r} does not apply with {parent}={point[parent]!r}; drop one of them"
        broken = [each for each in self._constraints if each.names <= point.keys() and not each.holds(point)]
        return f"{point!r} violates {broken[0].text!r}; change one of its values" if broken else ""

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(str(name), self._parameters, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(list(self._parameters)[:8]) or 'none'}"
        return f"unknown parameter {name!r} ({cure})"


def _check_range_given(name: str, low: object, high: object) -> None:
    if low is None or high is None:
        missing = "min and max" if low is high is None else "min" if low is None else "max"
        raise ConfigError(f"parameter {name!r} has no {missing}; pass min= and max=, or values=", field=name)


def _listed(name: str, argument: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ConfigError(f"parameter {name!r}: {argument}={values!r} must be a list", field=name)
    return tuple(values)


def _entry(parameter: Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"type": parameter.kind} | parameter.to_dict()
    if parameter.default is not None:
        found["default"] = parameter.default
    if parameter.when:
        found["when"] = {
            parent: list(allowed) if len(allowed) > 1 else allowed[0] for parent, allowed in parameter.when.items()
        }
    return found


def _in_words(when: Mapping[str, tuple[Any, ...]]) -> str:
    return " and ".join(f"{name} in {list(allowed)!r}" for name, allowed in when.items())


def _article(kind: Kind) -> str:
    return "an integer" if kind == "int" else "a number"
