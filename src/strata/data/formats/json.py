"""JSON: an object a line ("jsonl"), or that or one array of objects ("json").

An array cannot be cut without parsing it, so it is one unit, and bounded. It is read by pyarrow like lines are: as the
only column of one row, `{"rows": […]}`, whose elements then are the rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.records import LF, JsonRecords
from strata.data.formats.text import BOM, SAMPLE_BYTES, Text, TextFormat, TextReader, rows_only, shortened
from strata.errors import ConfigError, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from strata.data.source.source import DataFile, Source

ARRAY_BYTES_MAX: Final = 1 << 30
_PEEK_BYTES: Final = 1 << 12
_PIECE_BYTES: Final = 16 << 20
_BLANKS: Final = b" \t\r\n" + BOM
_ROWS: Final = "rows"
_MIXED: Final = re.compile(r"changed from \w+ to \w+")
"""What pyarrow says of a column whose values are of several types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFormat(TextFormat):
    """An object a line."""

    name = "jsonl"
    is_keyed = True

    @property
    def records(self) -> JsonRecords:
        return JsonRecords()

    def cure(self, error: Exception) -> str:
        if not self.can_retype(error):
            return (
                "values of one key must be of one type in all records, and schema= cannot make text of numbers: write "
                "them alike, for example all as strings"
            )
        return "mend the record, or give the column another type with schema=…"

    def can_retype(self, error: Exception) -> bool:
        return _MIXED.search(str(error)) is None

    def guess(self, header: bytes, sample: bytes) -> pa.Schema:
        assert not header
        if not sample.strip(_BLANKS):
            return pa.schema([])
        _check_lines(sample)
        return _read(sample, None).schema

    def parse(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        _check_lines(data)
        wanted = pa.schema([schema.field(name) for name in columns])
        return _read(data, wanted, is_all=self._takes_all(schema, columns)).select(list(columns))

    def is_sound(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> bool:  # noqa: ARG002
        try:
            return all(isinstance(record, dict) for record in _records(data))
        except (ValueError, RecursionError):
            return False

    def wrong_guess(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> str | None:
        if self._takes_all(schema, columns) and self.is_sound(data, schema, columns):
            key = _first(_strange_key(record, pa.struct(schema)) for record in _records(data))
            if key is not None:
                column = key.partition(".")[0]
                return (
                    f"the key {key!r} is not in the first {SAMPLE_BYTES:,} bytes of the file, by which columns are "
                    f"known, and would be lost; say what it is: schema=pa.schema([({column!r}, …)]), or name the "
                    "columns that you want: columns=…"
                )
        return TextFormat.wrong_guess(self, data, schema, columns)

    def _takes_all(self, schema: pa.Schema, columns: Sequence[str]) -> bool:
        """Whether all that records have is wanted: nobody named columns, and not only some are read, for a filter."""
        return not self.is_chosen and set(columns) >= set(schema.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat(JsonlFormat):
    """One array of objects, or an object a line."""

    name = "json"

    array_bytes_max: int = ARRAY_BYTES_MAX

    def __post_init__(self) -> None:
        if not 0 < self.array_bytes_max <= ARRAY_BYTES_MAX:
            raise ConfigError(f"array_bytes_max={self.array_bytes_max} must be above 0, at most {ARRAY_BYTES_MAX}")

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,
        with_nulls: bool = True,  # noqa: ARG002  nobody knows
    ) -> FileFacts:
        if _is_array(source, file):
            return self._inspect_array(source, file)
        return TextFormat.inspect(self, source, file, columns=columns, unit_bytes=unit_bytes)

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> TextReader:
        return _JsonReader(self, source, file, schema, version)

    def _inspect_array(self, source: Source, file: DataFile) -> FileFacts:
        with Text(source, file) as text:
            data = _read_whole(text, file, self.array_bytes_max)
        try:
            table = _parse_array(data, None)
        except (pa.ArrowException, ValueError) as error:
            raise DataFileInvalid(
                f"{file.name} is no JSON array of objects: {shortened(error)}; {self.cure(error)}"
            ) from error
        unit = Unit(index=0, num_rows=table.num_rows, first_row=0, offset=0, num_bytes=file.size_bytes)
        return FileFacts(schema=table.schema, units=(unit,) if table.num_rows else (), version=text.version)


class _JsonReader(TextReader):
    """Of lines or of an array: which of them, the first byte tells."""

    def _read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        is_whole = unit.offset == 0 and unit.num_bytes == self._file.size_bytes
        if not is_whole or not _is_array(self._source, self._file):
            return super()._read(unit, columns)
        with Text(self._source, self._file) as text:
            data = _read_whole(text, self._file, ARRAY_BYTES_MAX)
        self._finish(text)
        schema = pa.schema([self._schema.field(name) for name in columns])
        return self._parsed(unit, lambda: _parse_array(data, schema))


def _is_array(source: Source, file: DataFile) -> bool:
    head = bytearray(_PEEK_BYTES)
    with Text(source, file) as text:
        size = text.fill(memoryview(head))
    return bytes(head[:size]).lstrip(_BLANKS).startswith(b"[")


def _read_whole(text: Text, file: DataFile, bytes_max: int) -> bytearray:
    """An array, and around it what makes it the only column of one row.

    Raises:
        DataFileInvalid: It is too large.
    """
    data, piece = bytearray(), memoryview(bytearray(_PIECE_BYTES))
    while size := text.fill(piece):
        data += piece[:size]
        if len(data) > bytes_max:
            raise DataFileInvalid(
                f"{file.name} is one JSON array of more than {bytes_max:,} bytes, which cannot be read in parts; "
                f"write it as jsonl, an object a line"
            )
    start = len(BOM) if data.startswith(BOM) else 0
    data[:start] = b'{"%b":' % _ROWS.encode()
    data += b"}"
    return data


def _parse_array(data: bytearray, schema: pa.Schema | None) -> pa.Table:
    """Its elements. `schema`: the columns to take; None: all, with types that fit.

    Raises:
        pa.ArrowException, ValueError: It is no array of objects.
    """
    wrapped = None if schema is None else pa.schema([(_ROWS, pa.list_(pa.struct(schema)))])
    table = _read(data, wrapped)
    if table.column_names != [_ROWS] or table.num_rows != 1 or not pa.types.is_list(table.schema.field(0).type):
        raise ValueError("something follows the array")
    rows = table.column(0).combine_chunks().flatten()
    if not pa.types.is_struct(rows.type):
        if len(rows):
            raise ValueError(f"its elements are {rows.type}, not objects")
        return pa.table({})
    if rows.type.num_fields == 0:
        return rows_only(len(rows))
    return pa.Table.from_arrays(rows.flatten(), schema=pa.schema(list(rows.type)))


def _check_lines(data: pa.Buffer | memoryview | bytes) -> None:
    """Every line is an object. A `null` at the beginning would not only be wrong: pyarrow (26) crashes on it.

    Raises:
        ValueError: Some line is something else.
    """
    codes = np.frombuffer(data, np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(codes == LF) + 1))
    starts = starts[starts < len(codes)]
    for start in starts[codes[starts] != ord("{")]:  # few: empty lines, and those that begin with a blank
        found = bytes(memoryview(data)[start : start + _PEEK_BYTES]).lstrip(b" \t\r\n")
        if found and not found.startswith(b"{"):
            raise ValueError(f"a record begins with {found[:20]!r}, not with {{")


def _records(data: pa.Buffer | memoryview) -> Iterator[Any]:
    """One after the other, slowly; as strict as pyarrow.

    Raises:
        ValueError: It is no JSON, or has a key twice.
    """
    for line in bytes(data).split(b"\n"):
        if line.strip(_BLANKS):
            yield json.loads(line, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _strange_key(value: Any, kind: pa.DataType, above: str = "") -> str | None:
    """A key, with those above it, that the type does not have."""
    if isinstance(value, list) and pa.types.is_list(kind):
        return _first(_strange_key(each, kind.value_type, above) for each in value)
    if not isinstance(value, dict) or not pa.types.is_struct(kind):
        return None
    known = {field.name: field.type for field in kind}
    for key, each in value.items():
        if key not in known:
            return f"{above}{key}"
        if (found := _strange_key(each, known[key], f"{above}{key}.")) is not None:
            return found
    return None


def _read(
    data: pa.Buffer | memoryview | bytes | bytearray, schema: pa.Schema | None, *, is_all: bool = False
) -> pa.Table:
    """`schema`: the columns to take; None: all, with types that fit. `is_all`: whether there may be no others."""
    parsing = pajson.ParseOptions(
        explicit_schema=schema,
        newlines_in_values=False,
        unexpected_field_behavior="infer" if schema is None else "error" if is_all else "ignore",
    )
    reading = pajson.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pajson.read_json(pa.BufferReader(data), reading, parsing)
