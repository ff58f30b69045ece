"""One schema for all files of a dataset, and the projection of each file onto it.

Files of one dataset are written over months, by several programs: a column is added, a type grows, one program writes
dictionaries where another writes plain strings. Types that can be unified without loss are (`widen`). A conflict is
found here, before the first row is read, and the error names the column and two files that disagree on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.types as pat

from strata.data.arrow_types import filterable, is_list, recast
from strata.data.filter.filter import nearest
from strata.errors import InvalidArgument, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from strata.data.config import SchemaMode
    from strata.data.formats.base import Unit


@dataclass(frozen=True, slots=True)
class Unified:
    """The schema of a dataset."""

    schema: pa.Schema
    """The delivered columns in order, then those that only the filter needs."""
    columns: tuple[str, ...]
    """The delivered columns."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Columns that some files lack and that are null there, each with one such file."""


def unify(
    schemas: Sequence[tuple[str, pa.Schema]],
    *,
    columns: Sequence[str] | None = None,
    condition_columns: Sequence[str] = (),
    partition_fields: Sequence[pa.Field] = (),
    mode: SchemaMode = "unify",
    is_typed: bool = True,
    is_keyed: bool = False,
    schema: pa.Schema | None = None,
) -> Unified:
    """Return the schema of the dataset.

    Args:
        schemas: The distinct schemas, each with the name of a file that has it, in the order of the files.
        columns: The columns to deliver, in this order; None delivers all in file order, partition columns last.
        partition_fields: Columns whose values are in paths. If the files have such a column too, the path wins, as in
            pyarrow and Spark.
        mode: "strict" refuses every difference between files in the columns that are used.
        is_typed: Whether files declare types. If types are guessed, 1 in one file and 1.5 in another are both floats.
        is_keyed: Whether files may have columns that their samples did not show; `schema` may then name them.
        schema: Types that the user chose.

    Raises:
        SchemaMismatch: Files disagree, or no file has a column.
        InvalidArgument: `columns` is empty or names a column twice, or `mode` is unknown.
    """
    if mode not in ("unify", "strict"):
        raise InvalidArgument(f"schema_mode={mode!r} is unknown; use 'unify' or 'strict'", field="schema_mode")
    partitions = {part.name: part for part in partition_fields}
    named = [(name, _by_name(found)) for name, found in schemas]
    everything = list(dict.fromkeys(column for _, fields in named for column in fields if column not in partitions))
    decided = {part.name: part.type for part in schema} if schema is not None else {}
    if is_keyed:
        everything += [column for column in decided if column not in everything and column not in partitions]
    everything += partitions
    delivered = _delivered(columns, everything)
    for column in decided:
        if column not in everything:
            raise SchemaMismatch(
                f"schema has column {column!r}, which no file has; {nearest(column, everything)}", field="schema"
            )
    fields, missing = [], {}
    for column in dict.fromkeys([*delivered, *condition_columns]):
        if column not in everything:
            late = f", or if it appears later in the files, pass its type: schema=pa.schema([({column!r}, …)])"
            cure = _cure(column, everything, named) + (late if is_keyed else "")
            raise SchemaMismatch(f"no file has a column {column!r}; {cure}")
        if column in partitions:
            made, lacking = partitions[column].remove_metadata().with_nullable(nullable=True), ""
        else:
            made, lacking = _column(
                column, named, mode=mode, is_typed=is_typed, is_keyed=is_keyed, decided=decided.get(column)
            )
        if lacking:
            missing[column] = lacking
        fields.append(made.with_type(filterable(made.type)) if condition_columns else made)
    return Unified(pa.schema(fields), tuple(delivered), missing)


def widen(a: pa.DataType, b: pa.DataType, *, is_typed: bool = True) -> pa.DataType | None:
    """Return a type that holds every value of both exactly, or None if there is no natural one."""
    if a == b:
        return a
    for one, other in ((a, b), (b, a)):
        if pat.is_null(one):
            return other.value_type if pat.is_run_end_encoded(other) else other
        if pat.is_run_end_encoded(one) or (pat.is_dictionary(one) and not pat.is_dictionary(other)):
            return widen(one.value_type, other, is_typed=is_typed)
        if not is_typed and pat.is_integer(one) and pat.is_floating(other):
            return pa.float64()
    for widen_kind in (_dictionaries, _integers, _floats, _texts, _times, _decimals, _lists, _maps, _structs):
        found = widen_kind(a, b, is_typed)
        if found is not None:
            return found
    return None


def keeps_values(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a cast changes no value, so that statistics of the found type hold for the wanted one.

    A cast that rounds, truncates or parses text may move a value across the bound of a filter.
    """
    return bool(found == wanted or widen(found, wanted) == wanted)


def retyped(
    schema: pa.Schema, dataset: pa.Schema, *, is_keyed: bool = False, partitions: Collection[str] = ()
) -> pa.Schema:
    """Return a file's columns with the types of the dataset: the schema to parse text with.

    With `is_keyed`, it includes the other columns of the dataset, which the file may have without showing them.
    """
    fields = [dataset.field(field.name) if field.name in dataset.names else field for field in schema]
    if is_keyed:
        fields += [field for field in dataset if field.name not in schema.names and field.name not in partitions]
    return pa.schema(fields)


def _by_name(schema: pa.Schema) -> dict[str, pa.Field | None]:
    """Return fields by name; None for a repeated name, which is an error only if the column is used."""
    fields: dict[str, pa.Field | None] = {}
    for part in schema:
        fields[part.name] = None if part.name in fields else part
    return fields


def _delivered(columns: Sequence[str] | None, everything: list[str]) -> list[str]:
    if columns is None:
        return everything
    if isinstance(columns, str) or not columns:
        raise InvalidArgument(
            f"columns={columns!r} is not a list of names; pass one, or leave it out for all", field="columns"
        )
    repeated = [name for number, name in enumerate(columns) if name in columns[:number]]
    if repeated:
        raise InvalidArgument(f"columns names {repeated[0]!r} twice; name each once", field="columns")
    return list(columns)


def _cure(column: str, everything: list[str], named: Sequence[tuple[str, Mapping[str, pa.Field | None]]]) -> str:
    above = column.partition(".")[0]
    for _, fields in named:
        found = fields.get(above)
        if found is not None and above != column and pat.is_struct(found.type):
            return f"{above!r} is a struct: read {above!r}, and take the field from the batch"
    return nearest(column, everything)


def _column(
    column: str,
    named: Sequence[tuple[str, Mapping[str, pa.Field | None]]],
    *,
    mode: SchemaMode,
    is_typed: bool,
    is_keyed: bool,
    decided: pa.DataType | None,
) -> tuple[pa.Field, str]:
    """Return the field of the dataset, and a file that lacks it (empty if all files have it)."""
    first = lacking = ""
    kind: pa.DataType | None = None
    nullable = False
    for name, fields in named:
        if column not in fields:
            lacking = lacking or name
            continue
        found = fields[column]
        if found is None:
            raise SchemaMismatch(
                f"{name} has two columns {column!r}, so the name is ambiguous; choose other columns with columns="
            )
        nullable = nullable or found.nullable
        if decided is not None:
            _check_cast(column, found.type, decided, name)
            kind = decided
        elif kind is None:
            kind, first = found.type, name
        elif found.type != kind:
            wider = widen(kind, found.type, is_typed=is_typed) if mode == "unify" else None
            if wider is None:
                raise _disagree(column, kind, first, found.type, name, mode)
            first = first if wider == kind else name
            kind = wider
    if is_keyed and decided is not None:
        return pa.field(column, decided), ""  # any file may have the column
    if lacking and mode == "strict":
        raise SchemaMismatch(
            f"column {column!r} is not in {lacking}; add it there, leave it out (columns=…), or pass "
            "schema_mode='unify' to read it as null"
        )
    return pa.field(column, kind, nullable=nullable or bool(lacking)), lacking


def _check_cast(column: str, found: pa.DataType, decided: pa.DataType, name: str) -> None:
    try:
        pa.nulls(0, found).cast(decided)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaMismatch(
            f"schema has column {column!r} as {decided}, but it is {found} in {name}, which cannot be cast "
            f"({error}); choose another type, or leave the column out (columns=…)",
            field="schema",
        ) from error


def _disagree(column: str, a: pa.DataType, first: str, b: pa.DataType, second: str, mode: SchemaMode) -> SchemaMismatch:
    cure = "" if mode == "unify" else ", or pass schema_mode='unify' if both fit into one type"
    return SchemaMismatch(
        f"files disagree on column {column!r}: it is {a} in {first} and {b} in {second}; leave it out (columns=…), or "
        f"choose its type (schema=pa.schema([({column!r}, …)])){cure}"
    )


# Widening, by kind of type

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_UNITS = ("s", "ms", "us", "ns")


def _dictionaries(a: pa.DataType, b: pa.DataType, is_typed: bool) -> pa.DataType | None:
    if not (pat.is_dictionary(a) and pat.is_dictionary(b)):
        return None
    index = _integers(a.index_type, b.index_type, is_typed) or pa.int64()
    if a.index_type == b.index_type:
        index = a.index_type
    values = widen(a.value_type, b.value_type, is_typed=is_typed)
    return pa.dictionary(index, values) if values is not None else None


def _integers(a: pa.DataType, b: pa.DataType, _: bool) -> pa.DataType | None:
    if not (pat.is_integer(a) and pat.is_integer(b)):
        return None
    if pat.is_signed_integer(a) == pat.is_signed_integer(b):
        return a if a.bit_width > b.bit_width else b
    unsigned, signed = (a, b) if pat.is_unsigned_integer(a) else (b, a)
    fitting = [kind for kind in _SIGNED if kind.bit_width > unsigned.bit_width and kind.bit_width >= signed.bit_width]
    return fitting[0] if fitting else None


def _floats(a: pa.DataType, b: pa.DataType, _: bool) -> pa.DataType | None:
    return max(a, b, key=_FLOATS.index) if a in _FLOATS and b in _FLOATS else None


def _texts(a: pa.DataType, b: pa.DataType, _: bool) -> pa.DataType | None:
    for plain, large, view in (
        (pa.string(), pa.large_string(), pa.string_view()),
        (pa.binary(), pa.large_binary(), pa.binary_view()),
    ):
        if a in (plain, large, view) and b in (plain, large, view):
            return large if large in (a, b) else plain
    return None


def _times(a: pa.DataType, b: pa.DataType, _: bool) -> pa.DataType | None:
    if pat.is_date(a) and pat.is_date(b):
        return pa.date64()
    finer = max(a.unit, b.unit, key=_UNITS.index) if hasattr(a, "unit") and hasattr(b, "unit") else ""
    if pat.is_timestamp(a) and pat.is_timestamp(b) and a.tz == b.tz:
        return pa.timestamp(finer, a.tz)
    if pat.is_duration(a) and pat.is_duration(b):
        return pa.duration(finer)
    if pat.is_time(a) and pat.is_time(b):
        return pa.time32(finer) if finer in ("s", "ms") else pa.time64(finer)
    return None


def _decimals(a: pa.DataType, b: pa.DataType, _: bool) -> pa.DataType | None:
    if not (pat.is_decimal(a) and pat.is_decimal(b)):
        return None
    scale = max(a.scale, b.scale)
    precision = max(a.precision - a.scale, b.precision - b.scale) + scale
    if precision > 76:
        return None
    if precision > 38 or pat.is_decimal256(a) or pat.is_decimal256(b):
        return pa.decimal256(precision, scale)
    return pa.decimal128(precision, scale)


def _is_list(kind: pa.DataType) -> bool:
    return is_list(kind) or bool(pat.is_fixed_size_list(kind))


def _lists(a: pa.DataType, b: pa.DataType, is_typed: bool) -> pa.DataType | None:
    if not (_is_list(a) and _is_list(b)):
        return None
    values = widen(a.value_type, b.value_type, is_typed=is_typed)
    if values is None:
        return None
    if pat.is_fixed_size_list(a) and pat.is_fixed_size_list(b) and a.list_size == b.list_size:
        return pa.list_(values, a.list_size)
    is_large = any(pat.is_large_list(kind) or pat.is_large_list_view(kind) for kind in (a, b))
    return pa.large_list(values) if is_large else pa.list_(values)


def _maps(a: pa.DataType, b: pa.DataType, is_typed: bool) -> pa.DataType | None:
    if not (pat.is_map(a) and pat.is_map(b)):
        return None
    keys = widen(a.key_type, b.key_type, is_typed=is_typed)
    items = widen(a.item_type, b.item_type, is_typed=is_typed)
    return pa.map_(keys, items) if keys is not None and items is not None else None


def _structs(a: pa.DataType, b: pa.DataType, is_typed: bool) -> pa.DataType | None:
    if not (pat.is_struct(a) and pat.is_struct(b)) or [part.name for part in a] != [part.name for part in b]:
        return None
    kinds = [widen(one.type, other.type, is_typed=is_typed) for one, other in zip(a, b, strict=True)]
    if any(kind is None for kind in kinds):
        return None
    return pa.struct([(part.name, kind) for part, kind in zip(a, kinds, strict=True)])


@dataclass(frozen=True, slots=True, eq=False)
class PlainProjection:
    """The projection of a file whose columns have the names of the dataset, and that has no deleted rows."""

    file_schema: pa.Schema
    schema: pa.Schema
    """The schema of the dataset."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Partition columns and their values. They override columns of the file with the same name."""
    name: str = ""
    """The name of the file, for messages."""

    def file_columns(self, columns: Sequence[str]) -> list[str]:
        present = set(self.file_schema.names)
        return [column for column in columns if column in present and column not in self.constants]

    def apply(self, table: pa.Table, row_group: Unit, columns: Sequence[str]) -> pa.Table:
        """Return the columns as the dataset has them; the table itself if nothing changes.

        Raises:
            SchemaMismatch: A value does not fit into the type of the dataset.
        """
        kinds = [self.schema.field(column).type for column in columns]
        if table.column_names == list(columns) and table.schema.types == kinds:
            return table
        if not columns:
            return table.select([])
        present = set(self.file_columns(columns))
        arrays = [
            self._cast(table.column(column), kind, column, row_group) if column in present
            # A column that is constant or missing from the file needs only the number of rows.
            else self._constant(column, kind, table.num_rows)
            for column, kind in zip(columns, kinds, strict=True)
        ]  # fmt: skip
        return pa.Table.from_arrays(arrays, names=list(columns))

    def _constant(self, column: str, kind: pa.DataType, num_rows: int) -> pa.Array:
        value = self.constants.get(column)
        return pa.nulls(num_rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), num_rows)

    def _cast(self, values: pa.ChunkedArray, kind: pa.DataType, column: str, row_group: Unit) -> pa.ChunkedArray:
        if values.type == kind:
            return values
        try:
            return pa.chunked_array([recast(chunk, kind) for chunk in values.chunks], kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise SchemaMismatch(
                f"{self.name}: column {column!r} ({values.type}), rows from {row_group.first_row}: a value does not "
                f"fit into the dataset's type {kind}: {error}; choose its type (schema=pa.schema([({column!r}, …)])), "
                "or leave it out (columns=…)"
            ) from error
