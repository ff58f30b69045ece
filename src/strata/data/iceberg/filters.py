"""The user's scan filter: for pyiceberg, which leaves out files, and for pyarrow, which leaves out rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions import parser as iceberg_parser
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyparsing import ParseBaseException

from strata.data import expressions, filters
from strata.errors import InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow.compute as pc
    from pyiceberg.schema import Schema

    from strata.data.filters import Condition


@dataclass(frozen=True, slots=True, eq=False)
class ScanFilter:
    expression: BooleanExpression
    condition: Condition
    """The same for rows, by the table's names."""


def parse(scan_filter: str | BooleanExpression | None, schema: Schema) -> ScanFilter | None:
    """Reads the filter, and checks it against the table's schema.

    Raises:
        InvalidArgument: It cannot be understood.
        SchemaMismatch: It names a column that the table does not have, or compares one with what it cannot be.
    """
    if scan_filter is None:
        return None
    expression = _read(scan_filter)
    if isinstance(expression, AlwaysTrue):
        return None
    try:
        bound = bind(schema, expression, case_sensitive=True)
        _refuse_dots(bound, schema)
        return ScanFilter(expression, filters.parse(_plain(expression_to_pyarrow(bound, schema))))
    except InvalidArgument:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        named = ", ".join(field.name for field in schema.fields)
        raise SchemaMismatch(
            f"scan_filter cannot be asked of this table: {error}; its columns are: {named}", field="scan_filter"
        ) from error


def _read(scan_filter: str | BooleanExpression) -> BooleanExpression:
    if isinstance(scan_filter, BooleanExpression):
        return scan_filter
    if not isinstance(scan_filter, str):
        raise InvalidArgument(
            f"scan_filter is a {type(scan_filter).__name__}; give text (\"x > 3 and y = 'a'\"), or an expression",
            field="scan_filter",
        )
    try:
        return iceberg_parser.parse(scan_filter)
    except (ParseBaseException, ValueError) as error:
        raise InvalidArgument(
            f"scan_filter {scan_filter!r} cannot be read: {error}; write it as in SQL: \"x > 3 and y in ('a', 'b')\"",
            field="scan_filter",
        ) from error


def _refuse_dots(bound: BooleanExpression, schema: Schema) -> None:
    """A dot in a column's own name would be taken for a member of a struct."""
    used = extract_field_ids(bound)
    dotted = [field.name for field in schema.fields if field.field_id in used and "." in field.name]
    if dotted:
        raise InvalidArgument(
            f"scan_filter uses the column {dotted[0]!r}, whose name has a dot; filter by another, or rename it",
            field="scan_filter",
        )


def _plain(condition: pc.Expression) -> pc.Expression:
    """With UUIDs as the bytes that columns have."""

    def plain(node: expressions.Node) -> expressions.Node:
        if isinstance(node, expressions.Literal) and isinstance(node.value, pa.ExtensionArray):
            return expressions.Literal(node.value.storage)
        if isinstance(node, expressions.Call):
            return expressions.Call(node.function, tuple(map(plain, node.arguments)), node.options)
        return node

    return expressions.encode(plain(expressions.decode(condition)))


def renamed(node: expressions.Node, names: Mapping[str, str]) -> expressions.Node:
    """The same filter over a file's own column names."""
    if isinstance(node, expressions.Field):
        return expressions.Field((names[node.path[0]], *node.path[1:]))
    if isinstance(node, expressions.Call):
        parts = tuple(renamed(argument, names) for argument in node.arguments)
        return expressions.Call(node.function, parts, node.options)
    return node
