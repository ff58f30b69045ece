"""What a pyarrow expression says, as a tree that can be read, and folded where values are known.

pyarrow's expressions cannot be looked into, but they can be pickled, and what they are pickled to is an Arrow file: a
record batch of the literals, and in its metadata the calls, in order. This module reads and writes that file. So the
columns that a filter uses are known without a schema, a filter has one normal text however it was written, and a part
of it whose columns are known (a partition's values, a column that a file does not have) becomes a constant.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import decimal
import json
import keyword
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from strata.data.formats.base import Presence
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_TEXT = 4096
"""Characters; a longer text is cut and ends in a hash of the whole."""
MAX_NODES = 100_000
MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Field:
    path: tuple[str, ...]
    """A column, and where it is a struct, what to take of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    value: pa.Array
    """One value; an array, because that is what pyarrow reads and writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    function: str
    arguments: tuple[Node, ...]
    options: pa.Array | None = None


Node = Field | Literal | Call


@dataclass(frozen=True, slots=True)
class Resolved:
    """What is left of a filter where some columns are known."""

    presence: Presence
    node: Node | None
    """With SOME: what remains to be asked."""
    columns: tuple[str, ...]


def decode(expression: pc.Expression) -> Node:
    """The tree of an expression.

    Raises:
        InvalidArgument: It names columns by their number, or is too large.
    """
    try:
        _, (buffer,) = expression.__reduce__()
    except pa.ArrowNotImplementedError as error:
        raise InvalidArgument(
            f"the filter {expression} cannot be written down ({error}); "
            "name its columns: pc.field('x'), not pc.field(0)",
            field="filters",
        ) from error
    batch = pa.ipc.open_file(buffer).get_batch(0)
    words = _metadata(batch.schema)
    if len(words) > MAX_NODES:
        raise InvalidArgument(
            f"the filter has {len(words)} parts, at most {MAX_NODES} are read; use isin for long lists", field="filters"
        )
    return _parse(words, batch)


def encode(node: Node) -> pc.Expression:
    """The expression of a tree."""
    words: list[tuple[bytes, bytes]] = []
    literals: list[pa.Array] = []

    def hold(value: pa.Array) -> bytes:
        literals.append(value)
        return b"%d" % (len(literals) - 1)

    def write(node: Node) -> None:
        if isinstance(node, Literal):
            words.append((b"literal", hold(node.value)))
        elif isinstance(node, Field):
            if len(node.path) > 1:
                words.append((b"nested_field_ref", b"%d" % len(node.path)))
            words.extend((b"field_ref", name.encode()) for name in node.path)
        else:
            words.append((b"call", node.function.encode()))
            for argument in node.arguments:
                write(argument)
            if node.options is not None:
                words.append((b"options", hold(node.options)))
            words.append((b"end", node.function.encode()))

    write(node)
    batch = pa.RecordBatch.from_arrays(literals, names=[""] * len(literals)) if literals else _one_row()
    batch = batch.replace_schema_metadata(pa.KeyValueMetadata(words))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    rebuild, _ = pc.scalar(value=True).__reduce__()
    return rebuild(sink.getvalue())


def columns(node: Node) -> tuple[str, ...]:
    """The top-level columns that it uses, sorted."""
    return tuple(sorted({found.path[0] for found in _walk(node) if isinstance(found, Field)}))


def mask(table: pa.Table, expression: pc.Expression) -> pa.ChunkedArray:
    """What the expression gives for every row, in order."""
    # Imported late: it brings pandas with it, where that is installed, and only filters need it.
    import pyarrow.acero as acero  # noqa: PLC0415

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["value"]), [source])
    return project.to_table(use_threads=False)["value"]


def count(table: pa.Table, expression: pc.Expression) -> int:
    """How many rows pass: for how many the expression is true, neither false nor null."""
    return int(pc.sum(mask(table, expression)).as_py() or 0)


FLIPPED = {
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
    "equal": "equal",
    "not_equal": "not_equal",
}
"""Comparisons, and what each is with its sides exchanged."""

# --- folding ---

TRUE, FALSE, NULL, ANY = 1, 2, 4, 7
"""What a filter can be of a row: bits, of which several may be set."""
LOGIC = frozenset({"and_kleene", "or_kleene", "invert"})


def resolve(node: Node, known: pa.Table) -> list[Resolved]:
    """For every row of `known`, what is left of the filter when its columns have these values.

    Sound, not complete: NONE and ALL are certain. What lies under and, or and not is folded; a part that uses known and
    unknown columns together stays as it is.
    """
    names = set(known.column_names)
    leaves = [leaf for leaf in _leaves(node) if set(columns(leaf)) <= names]
    codes = np.full((known.num_rows, len(leaves)), NULL, np.int8)
    for number, leaf in enumerate(leaves):
        codes[:, number] = _codes(leaf, known)
    distinct, places = np.unique(codes, axis=0, return_inverse=True)
    found = [_resolved(node, {id(leaf): int(code) for leaf, code in zip(leaves, row, strict=True)}) for row in distinct]
    return [found[place] for place in places.reshape(-1).tolist()]


def _resolved(node: Node, known: dict[int, int]) -> Resolved:
    left, outcomes = _fold(node, known)
    if not outcomes & TRUE:
        return Resolved(Presence.NONE, None, ())
    if outcomes == TRUE:
        return Resolved(Presence.ALL, None, ())
    return Resolved(Presence.SOME, left, columns(left))


def _fold(node: Node, known: dict[int, int]) -> tuple[Node, int]:
    """The node with what is known put in, and which of true, false and null it can be."""
    if id(node) in known:
        code = known[id(node)]
        return Literal(pa.array([{TRUE: True, FALSE: False}.get(code)], pa.bool_())), code
    if not isinstance(node, Call) or node.function not in LOGIC:
        return node, ANY
    folded = [_fold(argument, known) for argument in node.arguments]
    outcomes = combined(node.function, [outcome for _, outcome in folded])
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


def combined(function: str, outcomes: Sequence[T]) -> T:
    """What `and`, `or` and `not` can be, where each argument can be some of true, false and null: Kleene's logic.

    For one filter, or with arrays for as many as there are units.
    """
    if function == "invert":
        (inner,) = outcomes
        return (inner & NULL) | (inner & TRUE) << 1 | (inner & FALSE) >> 1
    a, b = outcomes
    is_and = function == "and_kleene"
    # In bits: true is 1, false is 2, null is 4. Null is what two nulls give, or null and the neutral value.
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
    """As one would write it; the same for filters that mean the same by the same steps, and for no others."""
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
    """`x in (…)` and `x is None`, where the call is one of these as they are usually meant; else empty."""
    if node.function == "is_in" and _option(node, "null_matching_behavior") == 0:
        values = sorted({_literal(value) for value in node.options.field("value_set").values})  # type: ignore[union-attr]
        return f"{_operand(node.arguments[0])} {inside} ({', '.join(values)}{',' if len(values) == 1 else ''})"
    if node.function == "is_null" and not _option(node, "nan_is_null"):
        return f"{_operand(node.arguments[0])} {same} None"
    if node.function == "is_valid":
        return f"{_operand(node.arguments[0])} {'is not' if same == 'is' else 'is'} None"
    return ""


def _option(node: Call, name: str) -> Any:
    is_there = node.options is not None and node.options.type.get_field_index(name) >= 0
    return node.options.field(name)[0].as_py() if is_there else None  # type: ignore[union-attr]


def _call(node: Call) -> str:
    parts = [_text(argument) for argument in node.arguments]
    if node.options is not None:
        for field in node.options.type:
            value = node.options.field(field.name)[0]
            if field.name != "_type_name":
                parts.append(f"{field.name}={_literal(value) if value.is_valid else field.type}")
    return f"{node.function}({', '.join(parts)})"


def _operand(node: Node) -> str:
    """A side of a comparison."""
    simple = not isinstance(node, Call) or (node.function not in _INFIX and not _membership(node, "in", "is"))
    return _text(node) if simple and not (isinstance(node, Call) and node.function in LOGIC) else f"({_text(node)})"


def _inner(node: Node) -> str:
    """A part of and, or and not."""
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
    if pa.types.is_time(value.type) or pa.types.is_duration(value.type):  # Python's have other ranges, and microseconds
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
    told = str(naive.cast(pa.string())[0].as_py()).replace(" ", "T")
    if digits:
        told = told.rstrip("0").rstrip(".")
    return told + ("Z" if value.type.tz else "")


# --- the pickled form ---


def _parse(words: Sequence[tuple[bytes, bytes]], batch: pa.RecordBatch) -> Node:
    stack: list[tuple[str, list[Node], list[pa.Array]]] = [("", [], [])]
    words_left = iter(words)
    for key, value in words_left:
        if key == b"call":
            if len(stack) > MAX_DEPTH:
                raise InvalidArgument(
                    f"the filter is nested more than {MAX_DEPTH} deep; write a long `or` of one column with isin, "
                    "a long `and` in several lists",
                    field="filters",
                )
            stack.append((value.decode(), [], []))
        elif key == b"end":
            function, arguments, options = stack.pop()
            stack[-1][1].append(Call(function, tuple(arguments), options[0] if options else None))
        elif key == b"literal":
            stack[-1][1].append(Literal(batch.column(int(value))))
        elif key == b"options":
            stack[-1][2].append(batch.column(int(value)))
        elif key == b"nested_field_ref":
            stack[-1][1].append(Field(tuple(next(words_left)[1].decode() for _ in range(int(value)))))
        elif key == b"field_ref":
            stack[-1][1].append(Field((value.decode(),)))
        else:
            raise InvalidArgument(f"the filter has a part {key!r} that is not known here", field="filters")
    return stack[0][1][0]


class _CSchema(ctypes.Structure):
    """The start of `ArrowSchema` of Arrow's C data interface."""

    _fields_ = (("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_void_p))


def _metadata(schema: pa.Schema) -> list[tuple[bytes, bytes]]:
    """All pairs, in order; `schema.metadata` keeps one of each key.

    The C data interface has them as bytes: their number, then length and bytes of each key and each value.
    """
    capsule = schema.__arrow_c_schema__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = _CSchema.from_address(get_pointer(capsule, b"arrow_schema")).metadata
    if not address:
        return []
    place = address

    def number() -> int:
        nonlocal place
        place += 4
        return ctypes.c_int32.from_address(place - 4).value

    def bytes_() -> bytes:
        nonlocal place
        size = number()
        place += size
        return ctypes.string_at(place - size, size)

    return [(bytes_(), bytes_()) for _ in range(number())]


def _one_row() -> pa.RecordBatch:
    """A filter without literals (`flag`): no columns, but one row, which is what pyarrow expects to read."""
    return pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([])))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Call):
        for argument in node.arguments:
            yield from _walk(argument)
