"""Constraints between parameters, as text: `batch_size * accumulate <= 512`.

The text is Python syntax, but Python never evaluates it: each node of its syntax tree becomes a closure, and a node
that is not listed here is refused. An expression can only read parameters and compute with numbers, so a space from an
untrusted YAML file cannot execute code, and cannot build a large value either.
"""

from __future__ import annotations

import ast
import math
import operator
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Compute = Callable[[Mapping[str, Any]], Any]

MAX_CHARS = 1_000
MAX_NODES = 200
MAX_DEPTH = 30

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # floats: an int could grow without bound
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_ORDERED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUAL: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sqrt": math.sqrt,
}
ALLOWED = f"+ - * / // % **, comparisons, in, and, or, not, a if b else c, and {', '.join(sorted(_FUNCTIONS))}"


class Constraint:
    """A condition that every configuration must meet."""

    def __init__(self, text: str) -> None:
        """
        Raises:
            ConfigError: The text is not an expression, or uses something that is not allowed.
        """
        self.text = text
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_CHARS:  # type: ignore[redundant-expr]
            raise _refused(str(text)[:80], f"must be text of 1 to {MAX_CHARS:,} characters")
        try:
            body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or str(error)
            raise _refused(text, f"is not an expression ({reason}); write, for example, 'a * b <= 512'") from None
        if sum(1 for _ in ast.walk(body)) > MAX_NODES:
            raise _refused(text, f"has more than {MAX_NODES} parts; split it into several constraints")
        self.names = frozenset(_names(body))
        """Parameters that it reads."""
        if not self.names:
            raise _refused(text, "names no parameter")
        self._compute = _Compiler(text).compile(body, 0)

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return whether the configuration meets it. It does not apply to a configuration in which one of its
        parameters is inactive; arithmetic without a result, such as a division by zero, does not meet it.

        Raises:
            ConfigError: It computes with values that are not numbers.
        """
        if not all(name in config for name in self.names):
            return True
        try:
            return bool(self._compute(config))
        except (ZeroDivisionError, OverflowError, ValueError):
            return False

    def __repr__(self) -> str:
        return f"Constraint({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constraint) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _names(body: ast.expr) -> set[str]:
    called = {id(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and id(node) not in called}


def _refused(text: str, reason: str) -> ConfigError:
    return ConfigError(f"constraint {text!r} {reason}", field="constraints")


class _Compiler:
    def __init__(self, text: str) -> None:
        self._text = text

    def compile(self, node: ast.expr, depth: int) -> Compute:
        if depth > MAX_DEPTH:
            raise _refused(self._text, f"is nested more than {MAX_DEPTH} deep; split it into several constraints")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._unknown(node)
        compute: Compute = method(node, depth + 1)
        return compute

    def _constant(self, node: ast.Constant, _: int) -> Compute:
        value = node.value
        if not isinstance(value, bool | int | float | str | None):
            raise self._unknown(node)
        if isinstance(value, int) and abs(value) > 1 << 64:
            raise _refused(self._text, f"contains {str(value)[:20]}…, which exceeds 64 bits")
        return lambda _config: value

    def _name(self, node: ast.Name, _: int) -> Compute:
        return operator.itemgetter(node.id)

    def _tuple(self, node: ast.Tuple | ast.List, depth: int) -> Compute:
        items = [self.compile(each, depth) for each in node.elts]
        return lambda config: [item(config) for item in items]

    _list = _tuple

    def _binop(self, node: ast.BinOp, depth: int) -> Compute:
        compute = _BINARY.get(type(node.op))
        if compute is None:
            raise self._unknown(node)
        left, right = self.compile(node.left, depth), self.compile(node.right, depth)
        return lambda config: compute(self._number(left(config)), self._number(right(config)))

    def _unaryop(self, node: ast.UnaryOp, depth: int) -> Compute:
        operand = self.compile(node.operand, depth)
        if isinstance(node.op, ast.Not):
            return lambda config: not operand(config)
        compute = _UNARY.get(type(node.op))
        if compute is None:
            raise self._unknown(node)
        return lambda config: compute(self._number(operand(config)))

    def _boolop(self, node: ast.BoolOp, depth: int) -> Compute:
        parts = [self.compile(each, depth) for each in node.values]
        decide = all if isinstance(node.op, ast.And) else any
        return lambda config: decide(part(config) for part in parts)

    def _compare(self, node: ast.Compare, depth: int) -> Compute:
        terms = [self.compile(each, depth) for each in (node.left, *node.comparators)]
        tests = [self._test(each, node) for each in node.ops]
        for test, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(test, ast.In | ast.NotIn) and not isinstance(right, ast.Tuple | ast.List):
                raise _refused(self._text, "uses 'in' without a list on its right, such as in (1, 2)")

        def compute(config: Mapping[str, Any]) -> bool:
            values = [term(config) for term in terms]
            return all(test(a, b) for test, a, b in zip(tests, values, values[1:], strict=False))

        return compute

    def _test(self, test: ast.cmpop, node: ast.Compare) -> Callable[[Any, Any], Any]:
        if type(test) in _EQUAL:
            return _EQUAL[type(test)]
        ordered = _ORDERED.get(type(test))
        if ordered is None:
            raise self._unknown(node)
        return lambda a, b: ordered(self._number(a), self._number(b))

    def _ifexp(self, node: ast.IfExp, depth: int) -> Compute:
        test, yes, no = (self.compile(each, depth) for each in (node.test, node.body, node.orelse))
        return lambda config: yes(config) if test(config) else no(config)

    def _call(self, node: ast.Call, depth: int) -> Compute:
        function = _FUNCTIONS.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if function is None or node.keywords or not node.args:
            raise self._unknown(node)
        is_list = isinstance(node.args[0], ast.Tuple | ast.List)
        num_expected = 2 if function in (min, max) else 1
        if is_list or (len(node.args) < num_expected) or (num_expected == 1 and len(node.args) > 1):
            raise _refused(self._text, f"passes the wrong number of arguments in {ast.unparse(node)!r}")
        arguments = [self.compile(each, depth) for each in node.args]
        return lambda config: function(*(self._number(each(config)) for each in arguments))

    def _number(self, value: Any) -> Any:
        if not isinstance(value, int | float):  # a bool counts as 0 or 1
            raise _refused(self._text, f"computes with {value!r}, which is not a number; compare it with == or in")
        return value

    def _unknown(self, node: ast.expr) -> ConfigError:
        return _refused(self._text, f"contains {ast.unparse(node)!r}, which is not allowed; use {ALLOWED}")
