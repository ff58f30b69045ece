"""Parse filters from the three forms that users write, and apply them to rows.

The forms are a pyarrow expression; tuples as in `pyarrow.parquet`, `[("x", ">", 3), ("c", "in", ["a"])]`, where a list
of lists is an `or` of `and`s; and text, `x > 3 and country in ("de", "fr") and day >= date("2024-01-01")`. Text is
parsed by Python's `ast` and translated node by node; it is never evaluated as Python.

A row passes if the filter is true for it; a comparison with null is not true. As in pyarrow, `x not in (…)` is true for
null.
"""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import difflib
import io
import re
import tokenize
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from strata.data import pyarrow_private
from strata.data.filter import expression as expressions
from strata.data.filter import literals
from strata.data.filter.expression import Call, Field
from strata.errors import InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from strata.data.filter.expression import Node

MAX_LENGTH = 100_000
"""Characters of a filter in text form."""


_FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError)
"""Errors of evaluating a filter on a value: a failed cast, or a division by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A parsed filter."""

    expression: pc.Expression
    columns: tuple[str, ...]
    """The top-level columns it uses, sorted."""
    text: str
    """Canonical text: equal for all forms of a filter, and part of a dataset's fingerprint."""
    tree: Node
    """The parts of the expression."""


def parse(filters: pc.Expression | str | Sequence[Any]) -> Condition:
    """Parse a filter.

    Raises:
        InvalidArgument: The filter is malformed; the message states the correct form.
    """
    if isinstance(filters, pc.Expression):
        return from_tree(expressions.decode(filters), filters)
    if isinstance(filters, str):
        tree = _from_text(filters)
    elif isinstance(filters, list | tuple):
        tree = _from_tuples(filters)
    else:
        _refuse(
            f"filters has the type {type(filters).__name__}; pass a pyarrow expression (pc.field('x') > 3), tuples "
            "([('x', '>', 3)]) or text ('x > 3')"
        )
    return from_tree(tree)


def from_tree(tree: Node, expression: pc.Expression | None = None) -> Condition:
    """Return the condition of a tree, or of an expression with this tree.

    Raises:
        InvalidArgument: It uses no column, or is too large.
    """
    pyarrow_private.check_size(tree)
    columns = expressions.columns(tree)
    if not columns:
        _refuse(f"the filter {expressions.text(tree)} uses no column; omit filters to read all rows")
    return Condition(
        expressions.encode(tree) if expression is None else expression, columns, expressions.text(tree), tree
    )


def bind(condition: Condition, schema: pa.Schema) -> Condition:
    """Return the filter with its literals in the types of these columns (`literals.py`).

    Raises:
        SchemaMismatch: A column is missing, or its type does not support the comparison.
    """
    check_names(condition, schema.names)
    used = pa.schema([schema.field(name) for name in condition.columns])
    tree = literals.fit_literals(condition.tree, used)
    fitted = expressions.encode(tree)
    try:
        # With one row, not zero: pyarrow checks some comparisons only when it makes them.
        found = expressions.mask(pa.table([pa.nulls(1, field.type) for field in used], schema=_nullable(used)), fitted)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        types = ", ".join(f"{field.name} is {field.type}" for field in used)
        raise SchemaMismatch(
            f"the filter {condition.text} does not fit its columns: {str(error).splitlines()[0]}; {types}. Compare "
            'numbers with numbers, text with text, days with date("2024-01-01"), times with '
            'timestamp("2024-01-01T00:00:00") and, if the column has a time zone, timestamp("2024-01-01T00:00:00Z")',
            field="filters",
        ) from error
    if not pa.types.is_boolean(found.type):
        raise SchemaMismatch(
            f"the filter {condition.text} yields {found.type}, not true or false; compare it with a value",
            field="filters",
        )
    return replace(condition, expression=fitted, tree=tree)


def count(condition: Condition, table: pa.Table, where: str) -> int:
    """Return how many rows pass. `where` names the origin of the rows in errors.

    Raises:
        SchemaMismatch: The filter fails on a value: a cast, or a division by zero.
    """
    try:
        return expressions.count(table, condition.expression)
    except _FAILURES as error:
        raise _failed(condition.expression, table, where, error) from error


def passing(expression: pc.Expression, table: pa.Table, where: str) -> pa.Table:
    """Return the rows that pass.

    Raises:
        SchemaMismatch: See `count`, which statistics may have made unnecessary.
    """
    try:
        return table.filter(expression)
    except _FAILURES as error:
        raise _failed(expression, table, where, error) from error


def _failed(expression: pc.Expression, table: pa.Table, where: str, error: Exception) -> SchemaMismatch:
    columns = expressions.columns(tree := expressions.decode(expression))
    types = ", ".join(f"{name} is {table.schema.field(name).type}" for name in columns)
    return SchemaMismatch(
        f"{where}: the filter {expressions.text(tree)} fails on a row: {str(error).splitlines()[0]}; {types}. Compare "
        "columns of equal types, or change the filter so that it is defined for every value",
        field="filters",
    )


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(nullable=True) for field in schema])


def check_names(condition: Condition, names: Sequence[str]) -> None:
    """Check that the filter uses only these columns.

    Raises:
        SchemaMismatch: It uses another column.
    """
    for name in condition.columns:
        if name not in names:
            raise SchemaMismatch(
                f"the filter {condition.text} uses column {name!r}, which does not exist; {nearest(name, names)} "
                "(put text in quotes)",
                field="filters",
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: a similar one, or all known ones."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if not near:
        near = [other for other in names if other.lower() == name.lower()][:1]
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"did you mean {near[0]!r}?" if near else f"known names are: {shown or 'none'}"


def _refuse(message: str) -> NoReturn:
    raise InvalidArgument(message, field="filters")


def _all(parts: Sequence[Node]) -> Node:
    return _join(parts, "and_kleene")


def _any(parts: Sequence[Node]) -> Node:
    return _join(parts, "or_kleene")


def _join(parts: Sequence[Node], function: str) -> Node:
    """Join halves recursively, so that a long list does not become a deep tree."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return Call(function, (_join(parts[:half], function), _join(parts[half:], function)))


def _not(node: Node) -> Node:
    return Call("invert", (node,))


_FUNCTIONS = {
    "==": "equal",
    "=": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


# --- tuples ---


def _from_tuples(filters: Sequence[Any]) -> Node:
    if not filters:
        _refuse("filters is empty; omit it to read all rows")
    if isinstance(filters, tuple) and isinstance(filters[0], str):
        return _from_tuple(filters)
    if all(isinstance(part, tuple) for part in filters):
        return _all([_from_tuple(part) for part in filters])
    if not all(isinstance(part, list) and part for part in filters):
        _refuse(f"filters must be tuples, or lists of tuples (an `or` of `and`s), not {_shown(filters)}")
    return _any([_all([_from_tuple(part) for part in conjunction]) for conjunction in filters])


def _from_tuple(part: Any) -> Node:
    if not isinstance(part, tuple) or len(part) != 3 or not isinstance(part[0], str) or not isinstance(part[1], str):
        _refuse(f"a filter tuple must be (column, operator, value), such as ('x', '>', 3), not {_shown(part)}")
    name, operator, value = part
    operator = " ".join(operator.lower().split())
    if operator in ("in", "not in"):
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            _refuse(f"({name!r}, {operator!r}, …) needs a list of values, not {_shown(value)}")
        found = _is_in(Field((name,)), list(value))
        return found if operator == "in" else _not(found)
    if operator not in _FUNCTIONS:
        _refuse(f"the operator of {_shown(part)} is unknown; use one of {', '.join([*_FUNCTIONS, 'in', 'not in'])}")
    if value is None:
        _refuse(f"{_shown(part)}: nothing equals null; use pc.field({name!r}).is_null(), or the text '{name} is None'")
    return Call(_FUNCTIONS[operator], (Field((name,)), _literal(value)))


def _is_in(field: Node, values: list[Any]) -> Node:
    if not values:
        _refuse("the filter tests membership in an empty list, which no row passes; add values")
    try:
        return pyarrow_private.is_in(field, _array(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        _refuse(f"the values {_shown(values)} of the filter do not fit one type ({error}); use values of one type")


def _literal(value: Any) -> Node:
    try:
        return pyarrow_private.literal(_array([value])[0] if isinstance(value, int) else value)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        _refuse(f"the filter's value {_shown(value)} is not supported ({error}); use a number, text, date or time")


def _array(values: list[Any]) -> pa.Array:
    """Return an array of the type that pyarrow infers; integers beyond int64 become decimals."""
    is_int = [isinstance(value, int) for value in values if value is not None]
    if all(is_int) and any(not -(2**63) <= value < 2**63 for value in values if value is not None):
        return pa.array([None if value is None else decimal.Decimal(value) for value in values])
    return pa.array(values)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"


# --- text ---

_SQL = {
    "AND": "and",
    "OR": "or",
    "NOT": "not",
    "IN": "in",
    "IS": "is",
    "NULL": "None",
    "TRUE": "True",
    "FALSE": "False",
}
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_SUPPORTED = (
    "a filter consists of columns, numbers, 'text', True, False, None, date('2024-01-01'), "
    "timestamp('2024-01-01T12:00:00'), comparisons, in (…), is None, and, or, not; for anything else "
    "pass a pyarrow expression"
)


def _from_text(text: str) -> Node:
    if not text.strip():
        _refuse("filters is empty; omit it to read all rows")
    if len(text) > MAX_LENGTH:
        _refuse(f"the filter has {len(text)} characters, more than {MAX_LENGTH}; pass a pyarrow expression")
    line = _pythonic(text)
    try:
        tree = ast.parse(line, mode="eval")
        return _predicate(tree.body)
    except (SyntaxError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        _refuse(f"the filter {_shown(text)} cannot be parsed: {_syntax_cure(text, error)}")
    except (RecursionError, MemoryError):
        _refuse(f"the filter {_shown(text)} is nested too deeply; write long lists as x in (…)")


def _pythonic(text: str) -> str:
    """Replace upper-case SQL keywords by Python's, outside quoted text."""
    words: list[str] = []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(" ".join(text.split("\n"))).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return text.strip()
    for token in tokens:
        if token.type == tokenize.NAME:
            if token.string == "BETWEEN":
                _refuse("BETWEEN is not supported in a filter; write 1 <= x <= 5")
            if token.string == "LIKE":
                _refuse("LIKE is not supported in a text filter; pass pc.match_like(pc.field('x'), 'a%')")
            words.append(_SQL.get(token.string, token.string))
        elif token.type not in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER):
            words.append(token.string)
    return " ".join(words).replace("< >", "<>")


def _syntax_cure(text: str, error: Exception) -> str:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    if "<>" in bare:
        return "write != instead of <>"
    if "&&" in bare or "||" in bare:
        return "write `and`, `or` instead of &&, ||"
    if re.search(r"(?<![<>=!:])=(?!=)", bare):
        return "write == to compare, not ="
    if "`" in bare or re.search(r"[A-Za-z_]\w* [A-Za-z_]\w* *[=<>!]", bare):
        return "write col('a name') for a column whose name is not an identifier"
    return f"{error.args[0] if error.args else error}; {_SUPPORTED}"


def _predicate(node: ast.expr) -> Node:
    """Translate an expression that is true or false of a row."""
    if isinstance(node, ast.BoolOp):
        parts = [_predicate(part) for part in node.values]
        return _all(parts) if isinstance(node.op, ast.And) else _any(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _not(_predicate(node.operand))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return _all([_comparison(left, operator, right) for left, operator, right in pairs])
    if _is_column(node):
        return _column(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        _refuse("a text filter uses & or |; write `and`, `or` instead")
    _refuse(f"{_source(node)} is neither true nor false; {_SUPPORTED}")


def _comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Node:
    if isinstance(operator, ast.Is | ast.IsNot):
        if not (isinstance(right, ast.Constant) and right.value is None):
            _refuse(f"`is` compares only with None; write {_source(left)} == {_source(right)}")
        null = pyarrow_private.is_null(_operand(left))
        return _not(null) if isinstance(operator, ast.IsNot) else null
    if isinstance(operator, ast.In | ast.NotIn):
        if not _is_column(left):
            _refuse(
                f"{_source(left)} in …: the left side of `in` must be a column; "
                "to search in list columns pass a pyarrow expression"
            )
        elements = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else [right]
        found = _is_in(_column(left), [_value(element) for element in elements])
        return _not(found) if isinstance(operator, ast.NotIn) else found
    for side, other in ((left, right), (right, left)):
        if isinstance(side, ast.Constant) and side.value is None:
            _refuse(f"nothing equals null; write {_source(other)} is None, or {_source(other)} is not None")
    return Call(_FUNCTIONS[_OPERATORS[type(operator)]], (_operand(left), _operand(right)))


def _operand(node: ast.expr) -> Node:
    return _column(node) if _is_column(node) else _literal(_value(node))


def _is_column(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_column(node.value)
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "col"
    )


def _column(node: ast.expr) -> Node:
    return Field(tuple(_path(node)))


def _path(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_path(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    assert isinstance(node, ast.Call)
    return _texts(node, "col('a name')")


def _timestamp(text: str) -> pa.Scalar:
    found = dt.datetime.fromisoformat(text)
    if found.tzinfo is None:
        return pa.scalar(found, pa.timestamp("us"))
    return pa.scalar(found.astimezone(dt.UTC), pa.timestamp("us", "UTC"))


_MADE: dict[str, tuple[str, Callable[[str], Any]]] = {
    "date": ("date('2024-01-01')", dt.date.fromisoformat),
    "timestamp": ("timestamp('2024-01-01T12:00:00')", _timestamp),
    "decimal": ("decimal('1.50')", decimal.Decimal),
}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes | bool | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MADE:
        example, make = _MADE[node.func.id]
        texts = _texts(node, example)
        try:
            return make(texts[0])
        except (ValueError, decimal.InvalidOperation) as error:
            _refuse(f"{_source(node)} is malformed ({error}); write it as {example}")
    if _is_column(node):
        _refuse(f"{_source(node)} is a column where a value is expected; put text in quotes: '{_source(node)}'")
    _refuse(f"{_source(node)} is not a value; {_SUPPORTED}")


def _texts(node: ast.Call, example: str) -> list[str]:
    found = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    texts = [text for text in found if isinstance(text, str)]
    if node.keywords or not texts or len(texts) != len(node.args):
        _refuse(f"{_source(node)} is malformed; write it as {example}")
    return texts


def _source(node: ast.expr) -> str:
    return _shown_text(ast.unparse(node))


def _shown_text(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
