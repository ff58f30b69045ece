"""Decide a filter from statistics: which row groups it excludes, and which pass entirely.

Statistics must never decide anything that evaluating the filter on the rows would not. So the bounds of a column are
evaluated by the same functions as its rows, in the same type, and the outcome for values between them follows from
their order alone. NaN and null have no order; they are evaluated as well, wherever a row group may contain them.

For every part of a filter, the possible outcomes (true, false, null) are computed, and `and`, `or` and `not` combine
them. A part that does not compare one column with literals may have any outcome. A row group is excluded if the filter
cannot be true, and passes entirely if it can only be true. Pages are decided in the same way: "row group" below stands
for any set of rows with bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from strata.data.filter.expression import (
    ANY,
    FALSE,
    FLIPPED,
    LOGIC,
    NULL,
    TRUE,
    Call,
    Field,
    Literal,
    Presence,
    combine_outcomes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from strata.data.filter.expression import Node

    Outcomes = npt.NDArray[np.int8]

_BELOW, _SAME, _ABOVE = 1, 2, 4
"""Where a value may lie relative to a literal."""
_TRUE_WHERE = {
    "less": _BELOW,
    "less_equal": _BELOW | _SAME,
    "greater": _ABOVE,
    "greater_equal": _ABOVE | _SAME,
    "equal": _SAME,
    "not_equal": _BELOW | _ABOVE,
}
_OF_VALUES = {"is_null": FALSE, "is_valid": TRUE, "is_nan": FALSE}
"""Functions with the same result for every value except null and NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds of one column, with one entry per row group."""

    lows: pa.Array
    """No value except NaN is below; null if unknown. The type is that of `comparison_type`."""
    highs: pa.Array
    may_be_null: npt.NDArray[np.bool_]
    may_be_value: npt.NDArray[np.bool_]


def comparison_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of bounds of a column. Text is compared as bytes, because a truncated bound may end within a
    character.
    """
    if pat.is_dictionary(kind):
        return comparison_type(kind.value_type)
    if pat.is_large_string(kind) or pat.is_large_binary(kind):
        return pa.large_binary()
    if pat.is_string(kind) or pat.is_binary(kind) or pat.is_fixed_size_binary(kind):
        return pa.binary()
    return kind


def unknown_bounds(kind: pa.DataType, num_groups: int) -> Bounds:
    """Return the bounds of a column without statistics."""
    nothing, may_be = pa.nulls(num_groups, comparison_type(kind)), np.ones(num_groups, np.bool_)
    return Bounds(nothing, nothing, may_be, may_be)


def presence(condition: Node, bounds: Mapping[str, Bounds], num_groups: int) -> list[Presence]:
    """Return what the bounds decide about the filter, per row group. Columns without bounds may have any value."""
    outcomes = _outcomes(condition, bounds, num_groups)
    decided = np.where(outcomes & TRUE == 0, Presence.NONE, np.where(outcomes == TRUE, Presence.ALL, Presence.SOME))
    return [Presence(each) for each in decided.tolist()]


def _outcomes(node: Node, bounds: Mapping[str, Bounds], num_groups: int) -> Outcomes:
    if isinstance(node, Call) and node.function in LOGIC:
        return combine_outcomes(node.function, [_outcomes(each, bounds, num_groups) for each in node.arguments])
    column = _column(node)
    if column is not None and column in bounds:
        try:
            return _leaf(node, bounds[column])
        except (pa.ArrowException, TypeError, ValueError):  # undecided; evaluating the rows reports the reason
            pass
    return np.full(num_groups, ANY, np.int8)


def _column(node: Node) -> str | None:
    """Return the column of a part of a filter that uses a single one."""
    fields = [node] if isinstance(node, Field) else [
        each for each in (node.arguments if isinstance(node, Call) else ()) if not isinstance(each, Literal)
    ]  # fmt: skip
    return fields[0].path[0] if len(fields) == 1 and isinstance(fields[0], Field) and len(fields[0].path) == 1 else None


def _leaf(node: Node, bounds: Bounds) -> Outcomes:
    kind = bounds.lows.type
    special = pa.array([None, math.nan], pa.float64()).cast(kind) if pat.is_floating(kind) else pa.nulls(1, kind)
    of_null, *of_nan = (NULL if each is None else TRUE if each else FALSE for each in _evaluated(node, special))
    found = np.where(bounds.may_be_value, _of_values(node, bounds), 0)
    found |= np.where(bounds.may_be_null, of_null, 0)
    for code in of_nan:
        found |= np.where(bounds.may_be_value, code, 0)
    return np.where(found == 0, ANY, found).astype(np.int8)


def _evaluated(node: Node, values: pa.Array) -> list[bool | None]:
    """Evaluate a part of a filter on each value with the same functions as for rows.

    Raises:
        ValueError: The part is not supported here.
    """
    if isinstance(node, Field):
        return list(values.cast(pa.bool_()).to_pylist())
    assert isinstance(node, Call)
    match node.function:
        case "is_null":
            nan_is_null = node.options is not None and node.options.field("nan_is_null")[0].as_py()
            found = pc.is_null(values, nan_is_null=nan_is_null)
        case "is_valid" | "is_nan":
            found = pc.call_function(node.function, [values])
        case "is_in" if _matches_nulls(node):
            found = pc.is_in(values, value_set=_members(node, values.type))
        case compare if compare in _TRUE_WHERE:
            literal, function = _literal(node)
            found = pc.call_function(function, [values, literal[0]])
        case other:
            raise ValueError(f"the outcome of {other} on null is unknown")
    return list(found.to_pylist())


def _matches_nulls(node: Call) -> bool:
    return node.options is not None and node.options.field("null_matching_behavior")[0].as_py() == 0


def _members(node: Call, kind: pa.DataType) -> pa.Array:
    """Return the values of `is_in`.

    Raises:
        ValueError: Their type is not the column's.
    """
    assert node.options is not None
    values = node.options.field("value_set").values
    if values.type == kind:
        return values
    if not (_is_text(values.type) and _is_text(kind)):
        raise ValueError(f"the values are {values.type}, the column is {kind}")
    return values.cast(kind)


def _literal(node: Call) -> tuple[pa.Array, str]:
    """Return the literal and the comparison, with the column on the left side."""
    left, right = node.arguments
    if isinstance(right, Literal):
        return right.value, node.function
    assert isinstance(left, Literal)
    return left.value, FLIPPED[node.function]


def _of_values(node: Node, bounds: Bounds) -> Outcomes:
    """Return the possible outcomes for values that are neither null nor NaN."""
    if isinstance(node, Field):  # a boolean column
        return _of_comparison("equal", pa.array([True]), bounds)
    assert isinstance(node, Call)
    if node.function in _OF_VALUES:
        return np.full(len(bounds.lows), _OF_VALUES[node.function], np.int8)
    if node.function == "is_in":
        return _of_membership(_members(node, bounds.lows.type), bounds)
    literal, function = _literal(node)
    return _of_comparison(function, literal, bounds)


def _of_comparison(function: str, literal: pa.Array, bounds: Bounds) -> Outcomes:
    if not literal[0].is_valid:
        return np.full(len(bounds.lows), NULL, np.int8)
    if not _is_ordered_alike(literal.type, bounds.lows.type):
        return np.full(len(bounds.lows), ANY, np.int8)
    if pat.is_floating(literal.type) and math.isnan(literal[0].as_py()):
        return np.full(len(bounds.lows), TRUE if function == "not_equal" else FALSE, np.int8)
    low, high = _side(bounds.lows, literal), _side(bounds.highs, literal)
    # All sides from that of the low bound to that of the high bound; any side if a bound is unknown.
    known = (low > 0) & (high > 0) & (low <= high)
    upward, downward = (_BELOW | _SAME | _ABOVE) & ~(low - 1), (high << 1) - 1
    where = np.where(known, upward & downward, _BELOW | _SAME | _ABOVE)
    true = _TRUE_WHERE[function]
    return _either(where & true != 0, where & ~true != 0)


def _side(values: pa.Array, literal: pa.Array) -> npt.NDArray[np.int64]:
    """Return on which side of a literal each value lies, compared as rows are; 0 if unknown."""
    found = np.zeros(len(values), np.int64)
    for compare, side in ((pc.less, _BELOW), (pc.equal, _SAME), (pc.greater, _ABOVE)):
        is_on_side = compare(values, literal[0]).fill_null(False)
        found[is_on_side.to_numpy(zero_copy_only=False)] = side
    return found


def _is_ordered_alike(literal: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether the comparison leaves the column's values unchanged or widens them, and never rounds them.

    `literals.fit_literals` ensures it for all numbers and times except decimals compared with floats.
    """
    return bool(
        literal == kind
        or (pat.is_floating(literal) and pat.is_floating(kind) and literal.bit_width >= kind.bit_width)
        or (_is_text(literal) and _is_text(kind))
    )


def _is_text(kind: pa.DataType) -> bool:
    return comparison_type(kind) in (pa.binary(), pa.large_binary())


def _of_membership(values: pa.Array, bounds: Bounds) -> Outcomes:
    kind = bounds.lows.type
    values = values.drop_null()
    is_float = pat.is_floating(kind)
    if is_float:
        values = values.filter(pc.invert(pc.is_nan(values)))
    ranks = pc.rank(pa.concat_arrays([values, bounds.lows, bounds.highs]), tiebreaker="dense").to_numpy()
    members = np.unique(ranks[: len(values)])
    low, high = np.split(ranks[len(values) :], 2)
    known = bounds.lows.is_valid().to_numpy(zero_copy_only=False) & bounds.highs.is_valid().to_numpy(
        zero_copy_only=False
    )
    num_within = np.searchsorted(members, high, "right") - np.searchsorted(members, low, "left")
    can_be_true = ~known | (num_within > 0) if len(members) else np.zeros(len(low), np.bool_)
    # `is_in` distinguishes 0.0 and -0.0, bounds do not.
    is_single: Any = False if is_float else known & (low == high)
    can_be_false = ~(is_single & (num_within > 0))
    return _either(can_be_true, can_be_false)


def _either(can_be_true: npt.NDArray[np.bool_], can_be_false: npt.NDArray[np.bool_]) -> Outcomes:
    return (can_be_true * np.int8(TRUE)) | (can_be_false * np.int8(FALSE))
