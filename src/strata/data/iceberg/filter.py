"""Translate filters for pyiceberg, which prunes files, and for pyarrow, which filters rows.

A `scan_filter` is in pyiceberg's syntax and is translated to pyarrow. `filters` have the forms for files and are
translated to pyiceberg where the translation is exact; other parts prune no files.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    NotNull,
    Or,
    Reference,
)
from pyiceberg.expressions import parser as iceberg_parser
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.types import DateType, IcebergType, IntegerType, LongType, StringType, TimestampType, TimestamptzType
from pyparsing import ParseBaseException

from strata.data.filter import expression as expressions
from strata.data.filter import filter as row_filters
from strata.errors import InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from pyiceberg.schema import Schema

    from strata.data.filter.filter import Condition


@dataclass(frozen=True, slots=True, eq=False)
class ScanFilter:
    expression: BooleanExpression
    condition: Condition
    """The same filter for rows, with the table's names."""


def parse(scan_filter: str | BooleanExpression | None, filters: Any, schema: Schema) -> ScanFilter | None:
    """Parse the filters of either form, or of both; a row must pass both.

    Raises:
        InvalidArgument: A filter is malformed.
        SchemaMismatch: A filter uses an unknown column, or compares a column with an incompatible value.
    """
    scanned = _parse_scan(scan_filter, schema)
    if filters is None:
        return scanned
    condition = row_filters.parse(filters)
    row_filters.check_names(condition, [field.name for field in schema.fields])
    own = ScanFilter(_for_files(condition.tree, schema), condition)
    if scanned is None:
        return own
    both = expressions.Call("and_kleene", (scanned.condition.tree, condition.tree))
    return ScanFilter(And(scanned.expression, own.expression), row_filters.from_tree(both))


def _parse_scan(scan_filter: str | BooleanExpression | None, schema: Schema) -> ScanFilter | None:
    """Parse a scan filter and check it against the table's schema; see `parse` for errors."""
    if scan_filter is None:
        return None
    expression = _read(scan_filter)
    if isinstance(expression, AlwaysTrue):
        return None
    try:
        bound = bind(schema, expression, case_sensitive=True)
        _refuse_dots(bound, schema)
        tree = expressions.decode(expression_to_pyarrow(bound, schema))
        return ScanFilter(expression, row_filters.from_tree(_without_uuids(tree)))
    except InvalidArgument:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        named = ", ".join(field.name for field in schema.fields)
        raise SchemaMismatch(
            f"scan_filter does not fit this table: {error}; its columns are: {named}", field="scan_filter"
        ) from error


def _read(scan_filter: str | BooleanExpression) -> BooleanExpression:
    if isinstance(scan_filter, BooleanExpression):
        return scan_filter
    if not isinstance(scan_filter, str):
        raise InvalidArgument(
            f"scan_filter is a {type(scan_filter).__name__}; pass text (\"x > 3 and y = 'a'\") or an expression",
            field="scan_filter",
        )
    try:
        return iceberg_parser.parse(scan_filter)
    except (ParseBaseException, ValueError) as error:
        raise InvalidArgument(
            f"scan_filter {scan_filter!r} cannot be parsed: {error}; write it as in SQL: \"x > 3 and y in ('a', 'b')\"",
            field="scan_filter",
        ) from error


def _refuse_dots(bound: BooleanExpression, schema: Schema) -> None:
    """Reject columns with a dot in their name, which pyarrow would take for a member of a struct."""
    used = extract_field_ids(bound)
    dotted = [field.name for field in schema.fields if field.field_id in used and "." in field.name]
    if dotted:
        raise InvalidArgument(
            f"scan_filter uses the column {dotted[0]!r}, whose name contains a dot; use another column, or rename it",
            field="scan_filter",
        )


_COMPARISONS = {
    "equal": EqualTo,
    "less": LessThan,
    "less_equal": LessThanOrEqual,
    "greater": GreaterThan,
    "greater_equal": GreaterThanOrEqual,
}
_MIRRORED = {"less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal"}
_EXACT: dict[type[IcebergType], type] = {
    IntegerType: int,
    LongType: int,
    StringType: str,
    DateType: dt.date,
    TimestampType: dt.datetime,
    TimestamptzType: dt.datetime,
}
"""Types that pyiceberg and pyarrow compare in the same way. Floats are excluded: pyiceberg rounds them to the column's
width, and bounds do not cover NaN, which passes a negated comparison.
"""


def _for_files(node: expressions.Node, schema: Schema) -> BooleanExpression:
    """Return an expression that is true wherever the filter may be: if it is false for a file, no row passes."""
    if not isinstance(node, expressions.Call):
        return AlwaysTrue()
    if node.function in ("and_kleene", "or_kleene"):
        left, right = (_for_files(argument, schema) for argument in node.arguments)
        return And(left, right) if node.function == "and_kleene" else Or(left, right)
    found = _comparison(node, schema) or _membership(node, schema)
    if found is None:
        return AlwaysTrue()
    try:
        bind(schema, found, case_sensitive=True)
    except (ValueError, TypeError, NotImplementedError):
        return AlwaysTrue()
    return found


def _comparison(node: expressions.Call, schema: Schema) -> BooleanExpression | None:
    if node.function not in _COMPARISONS or len(node.arguments) != 2:
        return None
    function, (field, literal) = node.function, node.arguments
    if isinstance(field, expressions.Literal):
        function, field, literal = _MIRRORED.get(function, function), literal, field
    name = _column(field)
    if name is None or not isinstance(literal, expressions.Literal):
        return None
    value = _exact(literal.value[0], name, schema)
    return None if value is None else _COMPARISONS[function](name, value)


def _membership(node: expressions.Call, schema: Schema) -> BooleanExpression | None:
    options = node.options[0].as_py() if node.options is not None else {}
    name = _column(node.arguments[0]) if len(node.arguments) == 1 else None
    if name is None:
        return None
    if node.function == "is_valid":
        return NotNull(term=Reference(name))
    if node.function == "is_null" and not options.get("nan_is_null"):
        return IsNull(term=Reference(name))
    if node.function == "is_in" and node.options is not None:
        values = [_exact(value, name, schema) for value in node.options.field("value_set").values]
        return None if None in values else In(term=Reference(name), values=set(values))
    return None


def _column(node: expressions.Node) -> str | None:
    """Return the name of a top-level column; None otherwise, and for names with a dot, which pyiceberg splits."""
    if not isinstance(node, expressions.Field) or len(node.path) > 1 or "." in node.path[0]:
        return None
    return node.path[0]


def _exact(value: pa.Scalar, name: str, schema: Schema) -> Any:
    wanted = _EXACT.get(type(schema.find_field(name).field_type))
    if wanted is None or (pa.types.is_timestamp(value.type) and value.type.unit == "ns"):
        return None
    found = value.as_py()
    return found if type(found) is wanted else None


def _without_uuids(node: expressions.Node) -> expressions.Node:
    """Replace UUID literals by their bytes, which is how columns store them."""
    if isinstance(node, expressions.Literal) and isinstance(node.value, pa.ExtensionArray):
        return expressions.Literal(node.value.storage)
    if isinstance(node, expressions.Call):
        return expressions.Call(node.function, tuple(map(_without_uuids, node.arguments)), node.options)
    return node
