"""Filters as trees: their columns, their canonical text, evaluation on rows, and folding of known parts.

`strata.data.pyarrow_private` decodes a pyarrow expression into a tree. The columns of a filter are therefore known
without a schema, equal filters have equal text however they were written, and a part whose columns are known (partition
values, a column that a file lacks) folds to a constant. An expression that cannot be decoded is `Opaque`: it is
evaluated on rows and folds only as a whole.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import keyword
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from strata.data.pyarrow_private import Call, Field, Literal, Node, Opaque, walk
from strata.data.pyarrow_private import decode_expression as decode
from strata.data.pyarrow_private import encode_expression as encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Call", "Field", "Literal", "Node", "Opaque", "Presence", "Resolved", "decode", "encode"]

MAX_TEXT = 4096
"""Characters; a longer text is cut and ends in a hash of the whole."""


class Presence(enum.IntEnum):
    """How many rows of a row group pass a filter, as far as statistics decide it."""

    NONE = 0
    SOME = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Resolved:
    """What remains of a filter once the values of some columns are known."""

    presence: Presence
    node: Node | None
    """The remaining filter if `presence` is SOME, else None."""
    columns: tuple[str, ...]


def columns(node: Node) -> tuple[str, ...]:
    """Return the top-level columns that a filter uses, sorted."""
    names: set[str] = set()
    for part in walk(node):
        if isinstance(part, Field):
            names.add(part.path[0])
        elif isinstance(part, Opaque):
            names.update(part.columns)
    return tuple(sorted(names))


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return the filter with a file's own column names; an opaque filter, which decides nothing, is unchanged."""
    if isinstance(node, Field):
        return Field((names[node.path[0]], *node.path[1:]))
    if isinstance(node, Call):
        parts = tuple(renamed(argument, names) for argument in node.arguments)
        return Call(node.function, parts, node.options)
    return node


def mask(table: pa.Table, expression: pc.Expression) -> pa.ChunkedArray:
    """Evaluate the expression on every row, in order."""
    # Imported late: it imports pandas where that is installed, and only filters need it.
    import pyarrow.acero as acero  # noqa: PLC0415

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["value"]), [source])
    return project.to_table(use_threads=False)["value"]


def count(table: pa.Table, expression: pc.Expression) -> int:
    """Return for how many rows the expression is true, neither false nor null."""
    return int(pc.sum(mask(table, expression)).as_py() or 0)


FLIPPED = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
    "equal": "equal",
    "not_equal": "not_equal",
}
"""Each comparison, and the same comparison with its sides exchanged."""

# --- folding ---

TRUE, FALSE, NULL, ANY = 1, 2, 4, 7
"""The possible outcomes of a filter on a row, as bits: several may be set."""
LOGIC = frozenset({"and_kleene", "or_kleene", "invert"})


def resolve(node: Node, known: pa.Table) -> list[Resolved]:
    """Return, for every row of `known`, what remains of the filter when its columns have these values.

    Sound, not complete: NONE and ALL are certain. Parts under `and`, `or` and `not` are folded; a part that combines
    known and unknown columns is kept unchanged.
    """
    names = set(known.column_names)
    leaves = [leaf for leaf in _leaves(node) if set(columns(leaf)) <= names]
    codes = np.full((known.num_rows, len(leaves)), NULL, np.int8)
    for number, leaf in enumerate(leaves):
        codes[:, number] = _codes(leaf, known)
    distinct, positions = np.unique(codes, axis=0, return_inverse=True)
    found = [_resolved(node, {id(leaf): int(code) for leaf, code in zip(leaves, row, strict=True)}) for row in distinct]
    return [found[position] for position in positions.reshape(-1).tolist()]


def _resolved(node: Node, known: dict[int, int]) -> Resolved:
    remaining, outcomes = _fold(node, known)
    if not outcomes & TRUE:
        return Resolved(Presence.NONE, None, ())
    if outcomes == TRUE:
        return Resolved(Presence.ALL, None, ())
    return Resolved(Presence.SOME, remaining, columns(remaining))


def _fold(node: Node, known: dict[int, int]) -> tuple[Node, int]:
    """Return the node with known parts replaced by constants, and its possible outcomes."""
    if id(node) in known:
        code = known[id(node)]
        return Literal(pa.array([{TRUE: True, FALSE: False}.get(code)], pa.bool_())), code
    if not isinstance(node, Call) or node.function not in LOGIC:
        return node, ANY
    folded = [_fold(argument, known) for argument in node.arguments]
    outcomes = combine_outcomes(node.function, [outcome for _, outcome in folded])
    if node.function == "invert":
        return Call("invert", (folded[0][0],)), outcomes
    (left, a), (right, b) = folded
    neutral, decisive = (TRUE, FALSE) if node.function == "and_kleene" else (FALSE, TRUE)
    if a == neutral or b == decisive:
        return right, b
    if b == neutral or a == decisive:
        return left, a
    return Call(node.function, (left, right)), outcomes


T = TypeVar("T", int, "np.ndarray[Any, np.dtype[np.int8]]")


def combine_outcomes(function: str, outcomes: Sequence[T]) -> T:
    """Return the possible outcomes of `and`, `or` or `not`, given those of its arguments, by Kleene's logic.

    Outcomes are those of one filter, or arrays with one entry per row group.
    """
    if function == "invert":
        (inner,) = outcomes
        return (inner & NULL) | (inner & TRUE) << 1 | (inner & FALSE) >> 1
    a, b = outcomes
    is_and = function == "and_kleene"
    # In bits: true is 1, false is 2, null is 4. Two nulls give null, as do null and the neutral value.
    if is_and:
        decided = (a & b & TRUE) | ((a | b) & FALSE)
        a_neutral, b_neutral = a & TRUE, b & TRUE
    else:
        decided = (a & b & FALSE) | ((a | b) & TRUE)
        a_neutral, b_neutral = (a & FALSE) >> 1, (b & FALSE) >> 1
    a_null, b_null = (a & NULL) >> 2, (b & NULL) >> 2
    return decided | ((a_null & (b_null | b_neutral)) | (b_null & a_neutral)) << 2


def _leaves(node: Node) -> Iterator[Node]:
    if isinstance(node, Call) and node.function in LOGIC:
        for argument in node.arguments:
            yield from _leaves(argument)
    else:
        yield node


def _codes(leaf: Node, known: pa.Table) -> np.ndarray[Any, np.dtype[np.int8]]:
    values = mask(known, encode(leaf)).cast(pa.bool_())
    codes = pc.if_else(values, pa.scalar(TRUE, pa.int8()), pa.scalar(FALSE, pa.int8()))
    found: np.ndarray[Any, np.dtype[np.int8]] = pc.fill_null(codes, pa.scalar(NULL, pa.int8())).to_numpy()
    return found


# --- text ---

_INFIX = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!="}
_JOINED = {"and_kleene": " and ", "or_kleene": " or "}


def text(node: Node) -> str:
    """Return the filter as a person would write it: equal text for equal trees, and for no others."""
    whole = _text(node)
    if len(whole) <= MAX_TEXT:
        return whole
    return f"{whole[: MAX_TEXT - 40]} … #{xxhash.xxh3_128_hexdigest(whole.encode())}"


def _text(node: Node) -> str:
    if isinstance(node, Field):
        plain = all(part.isidentifier() and not keyword.iskeyword(part) for part in node.path)
        return ".".join(node.path) if plain else f"col({', '.join(map(_quoted, node.path))})"
    if isinstance(node, Literal):
        return _literal(node.value[0])
    if isinstance(node, Opaque):
        return str(node.expression)
    if node.function in _JOINED:
        return _JOINED[node.function].join(_inner(part) for part in _flat(node, node.function))
    if node.function in _INFIX and len(node.arguments) == 2:
        left, right = (_operand(argument) for argument in node.arguments)
        return f"{left} {_INFIX[node.function]} {right}"
    if node.function == "invert":
        return _negated(node.arguments[0])
    return _membership(node, "in", "is") or _call(node)


def _negated(node: Node) -> str:
    negated = isinstance(node, Call) and _membership(node, "not in", "is not")
    return negated or f"not {_inner(node)}"


def _membership(node: Call, inside: str, same: str) -> str:
    """Return `x in (…)` or `x is None` for a call with the usual options of these, else an empty string."""
    if node.function == "is_in" and _option(node, "null_matching_behavior") == 0:
        values = sorted({_literal(value) for value in node.options.field("value_set").values})  # type: ignore[union-attr]
        return f"{_operand(node.arguments[0])} {inside} ({', '.join(values)}{',' if len(values) == 1 else ''})"
    if node.function == "is_null" and not _option(node, "nan_is_null"):
        return f"{_operand(node.arguments[0])} {same} None"
    if node.function == "is_valid":
        return f"{_operand(node.arguments[0])} {'is not' if same == 'is' else 'is'} None"
    return ""


def _option(node: Call, name: str) -> Any:
    has_option = node.options is not None and node.options.type.get_field_index(name) >= 0
    return node.options.field(name)[0].as_py() if has_option else None  # type: ignore[union-attr]


def _call(node: Call) -> str:
    parts = [_text(argument) for argument in node.arguments]
    if node.options is not None:
        for field in node.options.type:
            value = node.options.field(field.name)[0]
            if field.name != "_type_name":
                parts.append(f"{field.name}={_literal(value) if value.is_valid else field.type}")
    return f"{node.function}({', '.join(parts)})"


def _operand(node: Node) -> str:
    """Return the text of one side of a comparison."""
    simple = not isinstance(node, Call) or (node.function not in _INFIX and not _membership(node, "in", "is"))
    return _text(node) if simple and not (isinstance(node, Call) and node.function in LOGIC) else f"({_text(node)})"


def _inner(node: Node) -> str:
    """Return the text of an argument of `and`, `or` or `not`."""
    return f"({_text(node)})" if isinstance(node, Call) and node.function in _JOINED else _text(node)


def _flat(node: Node, function: str) -> Iterator[Node]:
    if isinstance(node, Call) and node.function == function:
        for argument in node.arguments:
            yield from _flat(argument, function)
    else:
        yield node


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(value: pa.Scalar) -> str:
    if not value.is_valid:
        return "None"
    if pa.types.is_timestamp(value.type):
        return f"timestamp({_quoted(_timestamp(value))})"
    if pa.types.is_list(value.type):
        return f"{value.type}:[{', '.join(map(_literal, value.values))}]"
    if pa.types.is_nested(value.type):
        return f"{value.type}:{value}"
    if pa.types.is_time(value.type) or pa.types.is_duration(
        value.type
    ):  # Python's types have other ranges and no nanoseconds
        return f"{value.type}({_quoted(value.cast(pa.string()).as_py())})"
    plain = value.as_py()
    if isinstance(plain, str):
        return _quoted(plain)
    if isinstance(plain, dt.date):
        return f'date("{plain.isoformat()}")'
    if isinstance(plain, decimal.Decimal):
        return f'decimal("{plain}")'
    if isinstance(plain, bool | int | float | bytes):
        return repr(plain)
    return f"{value.type}({_quoted(str(value))})"


def _timestamp(value: pa.Scalar) -> str:
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[value.type.unit]
    naive = pa.array([value.value], pa.int64()).cast(pa.timestamp(value.type.unit))
    text = str(naive.cast(pa.string())[0].as_py()).replace(" ", "T")
    if digits:
        text = text.rstrip("0").rstrip(".")
    return text + ("Z" if value.type.tz else "")
