"""The parts of pyarrow without a public API that Strata depends on, each with a version gate and a public fallback.

**What is private here.**

*Expressions.* A `pc.Expression` cannot be inspected. It can be pickled, and the pickle is an Arrow IPC file: a record
batch of the literals, and schema metadata that lists the calls in order, with repeated keys. `decode_expression` reads
that file into a tree of `Field`, `Literal` and `Call`. Strata needs the tree for the columns of a filter (before any
schema is known), for one canonical text per filter, for literals in the type of their column, for partition pruning,
and for pruning by statistics. `schema.metadata` keeps one value per key, so the pairs are read through the C data
interface, whose struct layout is a published ABI. `encode_expression` builds expressions with the public API, and
writes such a file only for calls that have no public constructor, such as `starts_with` with its options. Filters in
the form of text or tuples become trees directly, and need no private API.

*Parquet.* `pyarrow.parquet.core.ParquetReader` is the class under `pq.ParquetFile`. Strata uses it because it selects
columns by leaf number, accepts a memory pool, and does not build a dict of all column paths for every file.

*S3.* pyarrow does not pickle the retry strategy of an `S3FileSystem`. `s3_with_retries` rebuilds one from its pickle
arguments.

**What the public API offers instead** (pyarrow 26, one core, see "Private pyarrow API" in docs/design/data.md):
`Expression.to_substrait` needs the schema beforehand, inserts implicit casts, and rejects `is_in` and every function
without a Substrait mapping. `ParquetFileFragment.subset` prunes row groups but never reports that *all* rows of a row
group pass, which saves decoding them for the row count; it does not know pages; and it makes an exception of neither
NaN nor literals of another type. `pq.ParquetFile` gives the same rows as `ParquetReader`.

**The gate.** Private API is used with the major versions in `VERIFIED_MAJORS`, with which the test suite has run. With
any other version it is used only after a self-check in this process: a filter must survive decoding and encoding, and a
file in memory must be read back. If the check fails, one warning is logged and the fallback is used: an expression that
the user passes stays opaque, so it is evaluated on rows as pyarrow does it and prunes nothing; files are read through
`pq.ParquetFile`; S3 uses pyarrow's default retries. The rows are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow.parquet as pq

VERIFIED_MAJORS = range(21, 27)
"""Major versions of pyarrow with which the test suite has run."""
MAX_NODES = 100_000
MAX_DEPTH = 200
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPTIONS = re.compile(r"\{[^{}]*\}")
_NESTED = re.compile(r"FieldRef\.Nested\(FieldRef\.Name\(([^()]*)\)(?:\s*FieldRef\.Name\([^()]*\))*\)")
_NAME = re.compile(r"(?<![\w.:\[-])[^\W\d][\w.]*(?![\w.(\[])")
_RESERVED = frozenset({"and", "or", "true", "false", "null", "nan", "inf"})
"""Words in the `repr` of an expression that are not columns."""


def is_verified(version: str = pa.__version__) -> bool:
    """Return whether the private API of this pyarrow version is known."""
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) in VERIFIED_MAJORS


def _passes(what: str, check: Callable[[], bool]) -> bool:
    """Run a self-check, and log once when it fails."""
    try:
        is_sound = check()
    except Exception:  # noqa: BLE001 - an unknown version may fail in any way; the fallback is right in every case
        is_sound = False
    if not is_sound:
        logging.getLogger("strata.data").warning(
            "pyarrow %s has other internals than Strata knows: %s; reading stays correct but is slower. "
            "Install pyarrow %d to %d, or a newer Strata.",
            pa.__version__,
            what,
            VERIFIED_MAJORS.start,
            VERIFIED_MAJORS.stop - 1,
        )
    return is_sound


# --- expressions ---


@dataclass(frozen=True, slots=True)
class Field:
    path: tuple[str, ...]
    """The column, followed by the members to take where it is a struct."""


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    value: pa.Array
    """An array of one value, which is how pyarrow stores it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    function: str
    arguments: tuple[Node, ...]
    options: pa.Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An expression that cannot be decoded: it is evaluated as it is, and decides nothing in advance."""

    expression: pc.Expression
    columns: tuple[str, ...]
    """The top-level columns it uses, read from its `repr`; a wrong name fails when the filter meets the schema."""


Node = Field | Literal | Call | Opaque


class UnreadableExpression(ValueError):
    """This pyarrow pickles expressions in an unknown way."""


def decode_expression(expression: pc.Expression) -> Node:
    """Return the tree of an expression, or `Opaque` where this pyarrow version does not allow decoding it.

    Raises:
        InvalidArgument: It refers to columns by number, or is too large.
    """
    if not reads_expressions():
        return _opaque(expression)
    try:
        node = _decode(expression)
    except UnreadableExpression:
        return _opaque(expression)
    if not is_verified() and not _encode(node).equals(expression):
        return _opaque(expression)
    return node


def _opaque(expression: pc.Expression) -> Opaque:
    text = _OPTIONS.sub(" ", _QUOTED.sub(" ", str(expression)))
    nested = _NESTED.findall(text)
    plain = [word for word in _NAME.findall(_NESTED.sub(" ", text)) if word not in _RESERVED]
    return Opaque(expression, tuple(sorted({*nested, *plain})))


def encode_expression(node: Node) -> pc.Expression:
    """Return the expression of a tree: through the public API if it has a call for each part, else as a pickle.

    Raises:
        UnreadableExpression: Neither is possible with this pyarrow version.
    """
    public = _encode_publicly(node)
    if public is not None:
        return public
    if not reads_expressions() or any(isinstance(part, Opaque) for part in walk(node)):
        raise UnreadableExpression("the filter contains calls that this pyarrow version cannot rebuild")
    return _encode(node)


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and everything below it."""
    yield node
    if isinstance(node, Call):
        for argument in node.arguments:
            yield from walk(argument)


def literal(value: Any) -> Literal:
    """Return a literal of the type that pyarrow infers.

    Raises:
        pa.ArrowException, OverflowError: pyarrow has no type for the value.
    """
    return Literal(pa.repeat(value if isinstance(value, pa.Scalar) else pa.scalar(value), 1))


def is_in(node: Node, values: pa.Array) -> Call:
    """Return the tree of `expression.isin(values)`."""
    fields = {
        "value_set": pa.ListArray.from_arrays([0, len(values)], values),
        "null_matching_behavior": pa.array([0], pa.uint32()),
        "_type_name": pa.array([b"SetLookupOptions"], pa.binary()),
    }
    return Call("is_in", (node,), pa.StructArray.from_arrays(list(fields.values()), list(fields)))


def is_null(node: Node) -> Call:
    """Return the tree of `expression.is_null()`."""
    fields = {"nan_is_null": pa.array([False]), "_type_name": pa.array([b"NullOptions"], pa.binary())}
    return Call("is_null", (node,), pa.StructArray.from_arrays(list(fields.values()), list(fields)))


_PUBLIC: dict[str, Callable[..., pc.Expression]] = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "and_kleene": operator.and_,
    "or_kleene": operator.or_,
    "invert": operator.invert,
    "is_valid": pc.Expression.is_valid,
    "is_nan": pc.Expression.is_nan,
}
"""Functions without options, and the public calls that build them."""


def _encode_publicly(node: Node) -> pc.Expression | None:
    """Return the expression of a tree; None if the public API has no call for a part of it."""
    if isinstance(node, Opaque):
        return node.expression
    if isinstance(node, Field):
        return pc.field(*node.path)
    if isinstance(node, Literal):
        return pc.scalar(node.value[0])
    arguments = [_encode_publicly(argument) for argument in node.arguments]
    if any(argument is None for argument in arguments):
        return None
    if node.function in _PUBLIC and node.options is None:
        return _PUBLIC[node.function](*arguments)
    options = node.options[0].as_py() if node.function == "is_null" and node.options is not None else {}
    if options.keys() == {"nan_is_null", "_type_name"}:
        return arguments[0].is_null(nan_is_null=options["nan_is_null"])  # type: ignore[union-attr]
    if node.function == "is_in" and node.options is not None:
        names = {field.name for field in node.options.type}
        known = names == {"value_set", "null_matching_behavior", "_type_name"}
        if known and node.options.field("null_matching_behavior")[0].as_py() == 0:
            return arguments[0].isin(node.options.field("value_set").values)  # type: ignore[union-attr]
    return None


def _encode(node: Node) -> pc.Expression:
    words: list[tuple[bytes, bytes]] = []
    literals: list[pa.Array] = []

    def store(value: pa.Array) -> bytes:
        literals.append(value)
        return b"%d" % (len(literals) - 1)

    def write(node: Node) -> None:
        if isinstance(node, Literal):
            words.append((b"literal", store(node.value)))
        elif isinstance(node, Field):
            if len(node.path) > 1:
                words.append((b"nested_field_ref", b"%d" % len(node.path)))
            words.extend((b"field_ref", name.encode()) for name in node.path)
        else:
            assert isinstance(node, Call)
            words.append((b"call", node.function.encode()))
            for argument in node.arguments:
                write(argument)
            if node.options is not None:
                words.append((b"options", store(node.options)))
            words.append((b"end", node.function.encode()))

    write(node)
    batch = pa.RecordBatch.from_arrays(literals, names=[""] * len(literals)) if literals else _one_empty_row()
    batch = batch.replace_schema_metadata(pa.KeyValueMetadata(words))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    rebuild, _ = pc.scalar(value=True).__reduce__()
    return rebuild(sink.getvalue())


@functools.cache
def reads_expressions() -> bool:
    """Return whether expressions can be decoded with this pyarrow version."""
    return is_verified() or _passes("filters given as pyarrow expressions prune nothing", _check_expressions)


def _check_expressions() -> bool:
    expression = (pc.field("a", "b") > 3) & ~pc.field("c").isin(["x", "y"])
    node = _decode(expression)
    if not isinstance(node, Call) or node.function != "and_kleene":
        return False
    comparison = node.arguments[0]
    return (
        isinstance(comparison, Call)
        and comparison.function == "greater"
        and comparison.arguments[0] == Field(("a", "b"))
        and isinstance(comparison.arguments[1], Literal)
        and comparison.arguments[1].value.to_pylist() == [3]
        and bool(_encode(node).equals(expression))
    )


def _decode(expression: pc.Expression) -> Node:
    """
    Raises:
        UnreadableExpression: The pickle has an unknown form.
        InvalidArgument: The expression refers to columns by number, or is too large.
    """
    try:
        _, (buffer,) = expression.__reduce__()
    except pa.ArrowNotImplementedError as error:
        raise InvalidArgument(
            f"the filter {expression} cannot be serialized ({error}); "
            "refer to columns by name: pc.field('x'), not pc.field(0)",
            field="filters",
        ) from error
    try:
        batch = pa.ipc.open_file(buffer).get_batch(0)
        words = _metadata_pairs(batch.schema)
    except (TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise UnreadableExpression(str(error)) from error
    try:
        node = _parse(words, batch)
    except (IndexError, StopIteration, KeyError, UnicodeDecodeError) as error:
        raise UnreadableExpression(f"unexpected end of the pickle: {error!r}") from error
    check_size(node)
    return node


def check_size(node: Node) -> None:
    """Check that a tree is not too large or too deep for functions that recurse into it.

    Raises:
        InvalidArgument: It is.
    """
    num_nodes, waiting = 0, [(node, 0)]
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise InvalidArgument(
                f"the filter has more than {MAX_NODES} parts; use isin for long lists", field="filters"
            )
        if depth > MAX_DEPTH:
            raise InvalidArgument(
                f"the filter is nested more than {MAX_DEPTH} levels deep; write a long `or` on one column with isin, "
                "and a long `and` as several lists",
                field="filters",
            )
        if isinstance(node, Call):
            waiting += [(argument, depth + 1) for argument in node.arguments]


def _parse(words: Sequence[tuple[bytes, bytes]], batch: pa.RecordBatch) -> Node:
    stack: list[tuple[str, list[Node], list[pa.Array]]] = [("", [], [])]
    words_left = iter(words)
    for key, value in words_left:
        if key == b"call":
            stack.append((value.decode(), [], []))
        elif key == b"end":
            function, arguments, options = stack.pop()
            stack[-1][1].append(Call(function, tuple(arguments), options[0] if options else None))
        elif key == b"literal":
            stack[-1][1].append(Literal(batch.column(int(value))))
        elif key == b"options":
            stack[-1][2].append(batch.column(int(value)))
        elif key == b"nested_field_ref":
            path = [next(words_left)[1].decode() for _ in range(int(value))]
            stack[-1][1].append(Field(tuple(path)))
        elif key == b"field_ref":
            stack[-1][1].append(Field((value.decode(),)))
        else:
            raise UnreadableExpression(f"unknown part {key!r}")
    return stack[0][1][0]


class _CSchema(ctypes.Structure):
    """The first fields of `ArrowSchema` in Arrow's C data interface."""

    _fields_ = (("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_void_p))


def _metadata_pairs(schema: pa.Schema) -> list[tuple[bytes, bytes]]:
    """Return all metadata pairs in order; `schema.metadata` keeps one of each key.

    The C data interface stores their number, then length and bytes of each key and each value.
    """
    capsule = schema.__arrow_c_schema__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = _CSchema.from_address(get_pointer(capsule, b"arrow_schema")).metadata
    if not address:
        return []
    position = address

    def read_int() -> int:
        nonlocal position
        position += 4
        return ctypes.c_int32.from_address(position - 4).value

    def read_bytes() -> bytes:
        nonlocal position
        size = read_int()
        position += size
        return ctypes.string_at(position - size, size)

    return [(read_bytes(), read_bytes()) for _ in range(read_int())]


def _one_empty_row() -> pa.RecordBatch:
    """Return the batch of a filter without literals (`flag`): no columns but one row, as pyarrow expects."""
    return pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([])))


# --- Parquet ---


class LowLevelReader(Protocol):
    """The methods of pyarrow's low-level reader that Strata uses."""

    @property
    def metadata(self) -> pq.FileMetaData: ...

    @property
    def schema_arrow(self) -> pa.Schema: ...

    def read_row_group(self, index: int, *, column_indices: list[int] | None = None, use_threads: bool) -> pa.Table:
        """Return these leaves, and perhaps more columns."""
        ...

    def iter_batches(
        self, num_rows: int, row_groups: list[int], *, column_indices: list[int] | None = None, use_threads: bool
    ) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None: ...


def open_parquet(
    source: pa.NativeFile,
    *,
    metadata: pq.FileMetaData | None = None,
    memory_pool: pa.MemoryPool | None = None,
    pre_buffer: bool = False,
    verify_checksums: bool = False,
) -> LowLevelReader:
    """Open a Parquet file, or a buffer that ends in a footer.

    Raises:
        OSError, pa.ArrowException: The footer cannot be parsed.
    """
    if not has_native_reader():
        return _PublicReader(source, metadata, pre_buffer=pre_buffer, verify_checksums=verify_checksums)
    reader: Any = _native_class()(memory_pool)
    reader.open(source, metadata=metadata, pre_buffer=pre_buffer, page_checksum_verification=verify_checksums)
    opened: LowLevelReader = reader
    return opened


@functools.cache
def has_native_reader() -> bool:
    """Return whether `ParquetReader` can be used with this pyarrow version."""
    return (is_verified() and _native_class() is not None) or _passes(
        "Parquet files are opened one by one through pq.ParquetFile", _check_reader
    )


@functools.cache
def _native_class() -> Any:
    try:
        from pyarrow.parquet.core import ParquetReader as Native  # noqa: PLC0415 - takes a while, for Parquet only
    except ImportError:
        return None
    return Native


def _check_reader() -> bool:
    import pyarrow.parquet as pq  # noqa: PLC0415

    table = pa.table({"a": [1, 2, 3], "b": [{"c": 1, "d": "x"}, None, {"c": 3, "d": "z"}]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    reader = _native_class()(pa.default_memory_pool())
    reader.open(pa.BufferReader(sink.getvalue()), metadata=None, pre_buffer=False, page_checksum_verification=True)
    found = [reader.read_row_group(index, column_indices=[1, 2], use_threads=False) for index in range(2)]
    batches = list(reader.iter_batches(1, [1], column_indices=[0], use_threads=False))
    is_same = pa.concat_tables(found).column("b").to_pylist() == table.column("b").to_pylist()
    reader.close()
    return bool(is_same and [batch.to_pydict() for batch in batches] == [{"a": [3]}])


class _PublicReader:
    """`LowLevelReader` over the public `pq.ParquetFile`."""

    def __init__(
        self, source: pa.NativeFile, metadata: pq.FileMetaData | None, *, pre_buffer: bool, verify_checksums: bool
    ) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        options: dict[str, Any] = {}
        if "arrow_extensions_enabled" in inspect.signature(pq.ParquetFile).parameters:
            options["arrow_extensions_enabled"] = False  # the default of the low-level reader
        self._file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=pre_buffer, page_checksum_verification=verify_checksums, **options
        )

    @property
    def metadata(self) -> pq.FileMetaData:
        return self._file.metadata

    @property
    def schema_arrow(self) -> pa.Schema:
        return self._file.schema_arrow

    def read_row_group(self, index: int, *, column_indices: list[int] | None = None, use_threads: bool) -> pa.Table:
        return self._file.read_row_group(index, self._paths(column_indices), use_threads=use_threads)

    def iter_batches(
        self, num_rows: int, row_groups: list[int], *, column_indices: list[int] | None = None, use_threads: bool
    ) -> Iterator[pa.RecordBatch]:
        paths = self._paths(column_indices)
        yield from self._file.iter_batches(num_rows, row_groups, paths, use_threads=use_threads)

    def close(self) -> None:
        self._file.close(force=True)

    def _paths(self, leaves: Iterable[int] | None) -> list[str] | None:
        """Return the dotted paths of these leaves.

        A dot in a column's own name makes paths ambiguous; pyarrow then reads more columns than these, never fewer.
        """
        return None if leaves is None else [self.metadata.schema.column(leaf).path for leaf in leaves]


# --- S3 ---


def s3_with_retries(filesystem: pafs.FileSystem, max_attempts: int) -> pafs.FileSystem:
    """Return an unpickled S3 file system with a retry strategy, or unchanged where its arguments are unknown."""
    retries = pafs.AwsStandardS3RetryStrategy(max_attempts=max_attempts)
    with contextlib.suppress(TypeError, IndexError, KeyError):
        arguments = filesystem.__reduce__()[1][0]
        return pafs.S3FileSystem(**arguments, retry_strategy=retries)
    return filesystem
