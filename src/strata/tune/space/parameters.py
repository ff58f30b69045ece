"""The kinds of parameters, each with the values that it may take.

A parameter maps the unit interval to its values, so that equal parts of [0, 1) have equal probability: the logarithm of
a value with `log`, one part per value of a discrete parameter. `snap` finds the allowed value next to any number, which
corrects the rounding of a sampler.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Scalar = bool | int | float | str | None
Config = dict[str, Scalar]
"""A configuration: the values of all active parameters."""
Kind = Literal["float", "int", "categorical", "bool", "fixed"]

MAX_CHOICES = 1_000
MAX_TEXT = 1_000
"""Characters of a choice."""
MAX_INT = 2**53
"""Every int up to here is exact as a float, which samplers compute with."""
MAX_POINTS = 2**31
"""Values of a parameter with a step."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What all kinds have in common."""

    name: str
    kind: Kind
    """How it is written in YAML."""
    default: Any = None
    when: Mapping[str, tuple[Scalar, ...]]
    """Applies only if each of these parameters has one of these values."""

    @property
    def num_values(self) -> int | None:
        """Number of values; None if they are continuous."""
        raise NotImplementedError

    def at(self, unit: float) -> Any:
        """Return the value at a number in [0, 1)."""
        raise NotImplementedError

    def value(self, index: int) -> Any:
        """Return a value of a discrete parameter by its position."""
        raise NotImplementedError

    def unit(self, value: Any) -> float:
        """Return a number at which `at` gives this value."""
        raise NotImplementedError

    def contains(self, value: Any) -> bool:
        raise NotImplementedError

    def snap(self, value: Any) -> Any:
        """Return the allowed value next to this one."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the allowed values, for messages."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of the method of `SearchSpace` that adds it, without the name."""
        raise NotImplementedError

    def is_active(self, config: Mapping[str, Any]) -> bool:
        """Return whether it applies, given the values of the parameters before it."""
        return all(name in config and _holds(config[name], allowed) for name, allowed in self.when.items())

    def refuse(self, reason: str) -> ConfigError:
        return ConfigError(f"parameter {self.name!r}: {reason}", field=self.name)

    def check_default(self) -> None:
        if self.default is not None and not self.contains(self.default):
            raise self.refuse(f"default={self.default!r} is not allowed; use {self.describe()}")


def same(a: Any, b: Any) -> bool:
    """Return whether two choices are the same; 1 and True are not."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _holds(value: Any, allowed: Sequence[Any]) -> bool:
    return any(same(value, each) for each in allowed)


# -- numbers in a range ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Range(Parameter):
    min: Any
    max: Any
    log: bool = False
    step: Any = None

    def _check_range(self) -> None:
        if self.min > self.max:
            raise self.refuse(f"min={self.min!r} is above max={self.max!r}; swap them")
        if self.log and self.min <= 0:
            raise self.refuse(f"log=True needs min above 0, found {self.min!r}; raise min, or drop log")
        if self.step is None:
            return
        if self.step <= 0:
            raise self.refuse(f"step={self.step!r} must be above 0")
        if self.log and self.step != 1:
            raise self.refuse("log=True and step= exclude each other; list the values with values=[…] instead")
        span = (Decimal(repr(self.max)) - Decimal(repr(self.min))) / Decimal(repr(self.step))
        if span != span.to_integral_value():
            last = Decimal(repr(self.min)) + int(span) * Decimal(repr(self.step))
            raise self.refuse(f"max={self.max!r} is not min plus a multiple of step={self.step!r}; use max={last}")
        if span >= MAX_POINTS:
            raise self.refuse(f"step={self.step!r} gives more than {MAX_POINTS:,} values; raise step")

    def describe(self) -> str:
        step = f" in steps of {self.step!r}" if self.step not in (None, 1) else ""
        return f"a number from {self.min!r} to {self.max!r}{step}"

    def to_dict(self) -> dict[str, Any]:
        found = {"min": self.min, "max": self.max}
        if self.log:
            found["log"] = True
        if self.step not in (None, 1):
            found["step"] = self.step
        return found


@dataclass(frozen=True, kw_only=True)
class Float(_Range):
    kind: Kind = "float"

    def __post_init__(self) -> None:
        for name in ("min", "max", "step", "default"):
            value = getattr(self, name)
            if value is None and name in ("step", "default"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self.refuse(f"{name}={value!r} must be a finite number")
            object.__setattr__(self, name, float(value))
        self._check_range()
        self.check_default()

    @cached_property
    def _digits(self) -> int:
        """Decimals of min and step, so that min + 2 * step is 0.3 and not 0.30000000000000004."""
        return max(0, *(-int(Decimal(repr(each)).normalize().as_tuple().exponent) for each in (self.min, self.step)))

    @property
    def num_values(self) -> int | None:
        if self.min == self.max:
            return 1
        return None if self.step is None else round((self.max - self.min) / self.step) + 1

    def at(self, unit: float) -> float:
        if self.num_values is not None:
            return self.value(_index(unit, self.num_values))
        if self.log:
            low, high = math.log(self.min), math.log(self.max)
            return self._clip(math.exp(low + unit * (high - low)))
        return self._clip(self.min * (1 - unit) + self.max * unit)

    def value(self, index: int) -> float:
        return self._clip(round(self.min + index * self.step, self._digits)) if index else float(self.min)

    def unit(self, value: Any) -> float:
        if self.num_values is not None:
            return (self._index(value) + 0.5) / self.num_values
        if self.log:
            low, high = math.log(self.min), math.log(self.max)
            return _inside((math.log(value) - low) / (high - low))
        scale = 1.0 if math.isfinite(self.max - self.min) else 0.5  # halves of subnormal numbers would be 0
        return _inside((value * scale - self.min * scale) / (self.max * scale - self.min * scale))

    def contains(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.min <= value <= self.max:
            return False
        return self.step is None or bool(value == self.value(self._index(value)))

    def snap(self, value: Any) -> float:
        value = self._clip(float(value))
        return value if self.step is None else self.value(self._index(value))

    def _index(self, value: float) -> int:
        return 0 if self.step is None else round((value - self.min) / self.step)

    def _clip(self, value: float) -> float:
        return float(min(max(value, self.min), self.max))


@dataclass(frozen=True, kw_only=True)
class Int(_Range):
    kind: Kind = "int"

    def __post_init__(self) -> None:
        for name in ("min", "max", "step", "default"):
            value = getattr(self, name)
            if value is None and name in ("step", "default"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INT:
                raise self.refuse(f"{name}={value!r} must be an integer of at most 2**53")
        object.__setattr__(self, "step", 1 if self.step is None else self.step)
        self._check_range()
        self.check_default()

    @property
    def num_values(self) -> int:
        return int((self.max - self.min) // self.step) + 1

    def at(self, unit: float) -> int:
        if not self.log:
            return self.value(_index(unit, self.num_values))
        low, high = math.log(self.min - 0.5), math.log(self.max + 0.5)
        return self.snap(math.exp(low + unit * (high - low)))

    def value(self, index: int) -> int:
        return int(min(self.min + index * self.step, self.max))

    def unit(self, value: Any) -> float:
        if not self.log:
            return (self._index(value) + 0.5) / self.num_values
        low, high = math.log(self.min - 0.5), math.log(self.max + 0.5)
        return _inside((math.log(value) - low) / (high - low))

    def contains(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return bool(self.min <= value <= self.max and (value - self.min) % self.step == 0)

    def snap(self, value: Any) -> int:
        return self.value(self._index(min(max(value, self.min), self.max)))

    def _index(self, value: float) -> int:
        return int((value - self.min) / self.step + 0.5)


# -- listed values -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice(Parameter):
    """Listed values. `is_ordered` for numbers: samplers may then assume that neighbors behave alike."""

    kind: Kind = "categorical"
    values: tuple[Scalar, ...]
    is_ordered: bool = False

    def __post_init__(self) -> None:
        if not self.values or len(self.values) > MAX_CHOICES:
            raise self.refuse(f"needs 1 to {MAX_CHOICES:,} values, found {len(self.values):,}")
        for number, value in enumerate(self.values):
            if not isinstance(value, bool | int | float | str | None):
                raise self.refuse(
                    f"value {value!r} is a {type(value).__name__}; use text, numbers, booleans or None, and map them "
                    "to objects in the training function"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise self.refuse(f"value {value!r} is not finite")
            if isinstance(value, str) and len(value) > MAX_TEXT:
                raise self.refuse(f"value {value[:20]!r}… exceeds {MAX_TEXT:,} characters")
            if any(same(value, other) for other in self.values[:number]):
                raise self.refuse(f"value {value!r} is listed twice; remove one")
        self.check_default()

    @property
    def num_values(self) -> int:
        return len(self.values)

    def at(self, unit: float) -> Scalar:
        return self.values[_index(unit, len(self.values))]

    def value(self, index: int) -> Scalar:
        return self.values[index]

    def index(self, value: Any) -> int:
        """Return the position of a value; of the next one, if they are ordered and it is not listed."""
        for number, each in enumerate(self.values):
            if same(each, value):
                return number
        if not self.is_ordered:
            raise self.refuse(f"{value!r} is not allowed; use {self.describe()}")
        numbers: list[Any] = list(self.values)
        above = bisect_left(numbers, value)
        near = [each for each in (above - 1, above) if 0 <= each < len(numbers)]
        return min(near, key=lambda each: abs(numbers[each] - value))

    def unit(self, value: Any) -> float:
        return (self.index(value) + 0.5) / len(self.values)

    def contains(self, value: Any) -> bool:
        return _holds(value, self.values)

    def snap(self, value: Any) -> Scalar:
        return self.values[self.index(value)]

    def describe(self) -> str:
        shown = ", ".join(map(repr, self.values[:8]))
        return f"one of {shown}{', …' if len(self.values) > 8 else ''}"

    def to_dict(self) -> dict[str, Any]:
        match self.kind:
            case "bool":
                return {}
            case "fixed":
                return {"value": self.values[0]}
            case "categorical":
                return {"choices": list(self.values)}
        return {"values": list(self.values)}


def _index(unit: float, num_values: int) -> int:
    return min(int(unit * num_values), num_values - 1)


def _inside(unit: float) -> float:
    return min(max(unit, 0.0), 1.0 - 2**-53)
