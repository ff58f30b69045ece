"""Rewrite comparisons so that literals have the type of their column.

pyarrow compares a column with a literal of another type by casting one of them, and the choice depends on the values:
an int64 column compared with 0.5 is cast to float32, and the scan fails at the first value above 2**24; uint64 compared
with -1 is cast to int64; a timestamp in seconds compared with one in nanoseconds overflows. Such a comparison is
rewritten to an equivalent one without a cast: `x > 0.5` becomes `x >= 1` for integers. Rows, statistics and partition
values are then compared in the same way.

A column whose values are multiples of a step (integers, decimals, times) is compared with the nearest multiple. A
literal outside the range of the type makes the comparison true, or false, for every value that is not null.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from strata.data.filter.expression import FLIPPED, Call, Field, Literal, Node

_UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
_DAY = Fraction(86_400)


def fit_literals(node: Node, schema: pa.Schema) -> Node:
    """Return the filter with literals in the column types of `schema`; columns missing there stay unchanged."""
    if not isinstance(node, Call):
        return node
    kind = _column_type(node, schema)
    if kind is not None and node.function == "is_in":
        return _fit_members(node, kind)
    if kind is not None and node.function in FLIPPED:
        return _fit_comparison(_column_first(node), kind)
    arguments = tuple(fit_literals(argument, schema) for argument in node.arguments)
    unchanged = all(new is old for new, old in zip(arguments, node.arguments, strict=True))
    return node if unchanged else replace(node, arguments=arguments)


def _column_type(node: Call, schema: pa.Schema) -> pa.DataType | None:
    """Return the type of the column that a call compares with literals; None for any other call."""
    fields = [argument for argument in node.arguments if isinstance(argument, Field)]
    literals = [argument for argument in node.arguments if isinstance(argument, Literal)]
    if len(fields) != 1 or len(fields) + len(literals) != len(node.arguments):
        return None
    found = _type_at(fields[0].path, schema)
    return found.value_type if found is not None and pat.is_dictionary(found) else found


def _type_at(path: tuple[str, ...], schema: pa.Schema) -> pa.DataType | None:
    if (index := schema.get_field_index(path[0])) < 0:
        return None
    kind = schema.field(index).type
    for name in path[1:]:
        if not pat.is_struct(kind) or (index := kind.get_field_index(name)) < 0:
            return None
        kind = kind.field(index).type
    return kind


def _column_first(node: Call) -> Call:
    left, right = node.arguments
    return node if isinstance(left, Field) else Call(FLIPPED[node.function], (right, left), node.options)


def _fit_comparison(node: Call, kind: pa.DataType) -> Node:
    column, literal = node.arguments
    assert isinstance(literal, Literal)
    value = literal.value[0]
    if not value.is_valid or value.type == kind:
        return node
    if (step := _step(kind)) is not None:
        exact = _exact(value, kind)
        return node if exact is None else _compare_in_steps(node.function, column, exact, step, kind)
    if _is_float(kind) and (pat.is_integer(value.type) or pat.is_decimal(value.type)):
        return _compare_with_float(node.function, column, value)
    return node


def _compare_in_steps(function: str, column: Node, value: Fraction | float, step: Fraction, kind: pa.DataType) -> Node:
    lowest, highest = _range(kind)
    if isinstance(value, float):  # NaN or an infinity
        if math.isnan(value):
            return _constant(column, _scalar(lowest, kind), is_true=function == "not_equal")
        value = (Fraction(highest) + 1 if value > 0 else Fraction(lowest) - 1) * step
    steps = value / step
    below, above = math.floor(steps), math.ceil(steps)
    match function:
        case "less" | "less_equal":
            bound = below if function == "less_equal" else above - 1
            if lowest <= bound < highest:
                return Call("less_equal", (column, Literal(_scalar(bound, kind))))
            is_true = bound >= highest
        case "greater" | "greater_equal":
            bound = above if function == "greater_equal" else below + 1
            if lowest < bound <= highest:
                return Call("greater_equal", (column, Literal(_scalar(bound, kind))))
            is_true = bound <= lowest
        case _:
            if below == above and lowest <= below <= highest:
                return Call(function, (column, Literal(_scalar(below, kind))))
            is_true = function == "not_equal"
    return _constant(column, _scalar(lowest, kind), is_true=is_true)


def _compare_with_float(function: str, column: Node, value: pa.Scalar) -> Node:
    """Compare a float column with a number; an integer between two floats is replaced by its neighbour."""
    exact = Fraction(value.as_py())
    nearest = _nearest(exact)
    if pat.is_integer(value.type) and Fraction(nearest if math.isfinite(nearest) else 0) != exact:
        if function in ("equal", "not_equal"):
            return _constant(column, pa.array([-math.inf], pa.float64()), is_true=function == "not_equal")
        is_upper = function in ("less", "less_equal")
        function = "less_equal" if is_upper else "greater_equal"
        if is_upper and nearest > exact:
            nearest = math.nextafter(nearest, -math.inf)
        elif not is_upper and nearest < exact:
            nearest = math.nextafter(nearest, math.inf)
    return Call(function, (column, Literal(pa.array([nearest], pa.float64()))))


def _fit_members(node: Call, kind: pa.DataType) -> Node:
    assert node.options is not None
    values = node.options.field("value_set").values
    if values.type == kind:
        return node
    if (step := _step(kind)) is not None:
        lowest, highest = _range(kind)
        kept: list[int | None] = []
        for value in values:
            exact = _exact(value, kind) if value.is_valid else None
            if value.is_valid and exact is None:
                return node
            if exact is None:
                kept.append(None)
            elif (
                isinstance(exact, Fraction) and (steps := exact / step).denominator == 1 and lowest <= steps <= highest
            ):
                kept.append(int(steps))
        return _with_values(node, _array(kept, kind))
    if _is_float(kind) and pat.is_integer(values.type):
        floats = [value.as_py() if not value.is_valid else _nearest(Fraction(value.as_py())) for value in values]
        cast = pa.array(floats, pa.float64()).cast(kind)
        pairs = zip(cast.to_pylist(), values.to_pylist(), strict=True)
        return _with_values(node, pa.array([new for new, old in pairs if new == old], kind))
    if _is_float(kind) and (pat.is_floating(values.type) or pat.is_decimal(values.type)):
        return _with_values(node, values.cast(pa.float64()).cast(kind))  # as pyarrow does for the rows
    return node


def _with_values(node: Call, values: pa.Array) -> Call:
    options = node.options
    assert options is not None
    fields = {field.name: options.field(field.name) for field in options.type}
    fields["value_set"] = pa.ListArray.from_arrays([0, len(values)], values)
    return replace(node, options=pa.StructArray.from_arrays(list(fields.values()), list(fields)))


def _constant(column: Node, lowest: pa.Array, *, is_true: bool) -> Node:
    """Return a condition that is true, or false, for every value and null for null."""
    never = Call("less", (column, Literal(lowest)))
    return Call("invert", (never,)) if is_true else never


# --- types ---


def _is_float(kind: pa.DataType) -> bool:
    return bool(pat.is_float32(kind) or pat.is_float64(kind))


def _step(kind: pa.DataType) -> Fraction | None:
    """Return the step of which all values of a type are multiples; None for types that are not rewritten."""
    if pat.is_integer(kind):
        return Fraction(1)
    if pat.is_decimal(kind):
        return Fraction(10) ** -int(kind.scale)
    if pat.is_date32(kind):
        return _DAY
    if pat.is_timestamp(kind) or pat.is_time(kind) or pat.is_duration(kind):
        return _UNITS[str(kind.unit)]
    return None


def _range(kind: pa.DataType) -> tuple[int, int]:
    """Return the smallest and the largest value, in steps."""
    if pat.is_decimal(kind):
        return 1 - 10**kind.precision, 10**kind.precision - 1
    if pat.is_unsigned_integer(kind):
        return 0, 2**kind.bit_width - 1
    return -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1


def _exact(value: pa.Scalar, kind: pa.DataType) -> Fraction | float | None:
    """Return the exact value of a literal that is compared with a column of type `kind`.

    The result is a float only for NaN and the infinities. It is None if pyarrow does not compare these types, or rounds
    the column to floats.
    """
    own = value.type
    if pat.is_integer(kind) or pat.is_decimal(kind):
        if pat.is_integer(own) or pat.is_decimal(own):
            return Fraction(value.as_py())
        if pat.is_floating(own) and pat.is_integer(kind):
            found = float(value.as_py())
            return Fraction(found) if math.isfinite(found) else found
        return None
    if _time_family(own) != _time_family(kind):
        return None
    step = _step(own)
    return value.value * step if step is not None else None


def _time_family(kind: pa.DataType) -> str:
    if pat.is_date32(kind) or (pat.is_timestamp(kind) and kind.tz is None):
        return "naive"
    if pat.is_timestamp(kind):
        return "aware"
    return "time" if pat.is_time(kind) else "duration" if pat.is_duration(kind) else ""


def _nearest(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _scalar(steps: int, kind: pa.DataType) -> pa.Array:
    return _array([steps], kind)


def _array(steps: list[int | None], kind: pa.DataType) -> pa.Array:
    if pat.is_decimal(kind):
        exact = decimal.Context(prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
        values: list[Any] = [
            None if each is None else exact.scaleb(decimal.Decimal(each), -kind.scale) for each in steps
        ]
        return pa.array(values, kind)
    if pat.is_integer(kind):
        return pa.array(steps, kind)
    return pa.array(steps, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
