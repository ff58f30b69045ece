"""The JSON formats: one object per line ("jsonl"), or either that or one array of objects ("json").

An array cannot be split without parsing it, so it is one row group of bounded size. pyarrow parses it as a line with
one column, `{"rows": […]}`, whose elements are then the rows.
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
from strata.data.formats.text import BOM, SAMPLE_BYTES, Text, TextFormat, TextReader, rows_only, shorten
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
"""pyarrow's message about a column with values of several types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFormat(TextFormat):
    """One object per line."""

    name = "jsonl"
    is_keyed = True

    @property
    def records(self) -> JsonRecords:
        return JsonRecords()

    def cure(self, error: Exception) -> str:
        if not self.can_retype(error):
            return (
                "the values of a key must have one type in all records, and schema= cannot turn numbers into text: "
                "write them in one type, for example all as strings"
            )
        return "correct the record, or pass another type for the column with schema=…"

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

    def explain_wrong_guess(
        self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]
    ) -> str | None:
        if self._takes_all(schema, columns) and self.is_sound(data, schema, columns):
            key = _first(_strange_key(record, pa.struct(schema)) for record in _records(data))
            if key is not None:
                column = key.partition(".")[0]
                return (
                    f"the key {key!r} does not occur in the first {SAMPLE_BYTES:,} bytes of the file, from which the "
                    f"columns are guessed, and would be lost; declare it with schema=pa.schema([({column!r}, …)]), or "
                    "select columns with columns=…"
                )
        return TextFormat.explain_wrong_guess(self, data, schema, columns)

    def _takes_all(self, schema: pa.Schema, columns: Sequence[str]) -> bool:
        """Return whether every key is wanted: the user selected no columns, and this is not a read for a filter."""
        return not self.is_chosen and set(columns) >= set(schema.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat(JsonlFormat):
    """One array of objects, or one object per line."""

    name = "json"

    array_bytes_max: int = ARRAY_BYTES_MAX

    def __post_init__(self) -> None:
        if not 0 < self.array_bytes_max <= ARRAY_BYTES_MAX:
            raise ConfigError(f"array_bytes_max={self.array_bytes_max} must be between 1 and {ARRAY_BYTES_MAX}")

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,
        with_nulls: bool = True,  # noqa: ARG002  text has no null counts
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
                f"{file.name} is not a JSON array of objects: {shorten(error)}; {self.cure(error)}", path=file.path
            ) from error
        unit = Unit(index=0, num_rows=table.num_rows, first_row=0, offset=0, num_bytes=file.size_bytes)
        return FileFacts(schema=table.schema, units=(unit,) if table.num_rows else (), version=text.version)


class _JsonReader(TextReader):
    """The reader of lines or of an array, depending on the first byte."""

    def _read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        is_whole = unit.offset == 0 and unit.num_bytes == self._file.size_bytes
        if not is_whole or not _is_array(self._source, self._file):
            return super()._read(unit, columns)
        with Text(self._source, self._file) as text:
            data = _read_whole(text, self._file, ARRAY_BYTES_MAX)
        self._finish(text)
        schema = pa.schema([self._schema.field(name) for name in columns])
        return self._translate_parse_errors(unit, lambda: _parse_array(data, schema))


def _is_array(source: Source, file: DataFile) -> bool:
    head = bytearray(_PEEK_BYTES)
    with Text(source, file) as text:
        size = text.fill(memoryview(head))
    return bytes(head[:size]).lstrip(_BLANKS).startswith(b"[")


def _read_whole(text: Text, file: DataFile, bytes_max: int) -> bytearray:
    """Return the array as the value of the key `rows` of one object.

    Raises:
        DataFileInvalid: The array is too large.
    """
    data, piece = bytearray(), memoryview(bytearray(_PIECE_BYTES))
    while size := text.fill(piece):
        data += piece[:size]
        if len(data) > bytes_max:
            raise DataFileInvalid(
                f"{file.name} is one JSON array of more than {bytes_max:,} bytes, which cannot be read in parts; "
                f"write it as jsonl, one object per line",
                path=file.path,
            )
    start = len(BOM) if data.startswith(BOM) else 0
    data[:start] = b'{"%b":' % _ROWS.encode()
    data += b"}"
    return data


def _parse_array(data: bytearray, schema: pa.Schema | None) -> pa.Table:
    """Return the elements as rows. `schema` selects columns; None reads all with inferred types.

    Raises:
        pa.ArrowException, ValueError: The data is not an array of objects.
    """
    wrapped = None if schema is None else pa.schema([(_ROWS, pa.list_(pa.struct(schema)))])
    table = _read(data, wrapped)
    if table.column_names != [_ROWS] or table.num_rows != 1 or not pa.types.is_list(table.schema.field(0).type):
        raise ValueError("the array is followed by other data")
    rows = table.column(0).combine_chunks().flatten()
    if not pa.types.is_struct(rows.type):
        if len(rows):
            raise ValueError(f"its elements are {rows.type}, not objects")
        return pa.table({})
    if rows.type.num_fields == 0:
        return rows_only(len(rows))
    return pa.Table.from_arrays(rows.flatten(), schema=pa.schema(list(rows.type)))


def _check_lines(data: pa.Buffer | memoryview | bytes) -> None:
    """Check that every line is an object. pyarrow 26 crashes on a leading `null`.

    Raises:
        ValueError: A line is not an object.
    """
    codes = np.frombuffer(data, np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(codes == LF) + 1))
    starts = starts[starts < len(codes)]
    for start in starts[codes[starts] != ord("{")]:  # few lines are empty or begin with white space
        found = bytes(memoryview(data)[start : start + _PEEK_BYTES]).lstrip(b" \t\r\n")
        if found and not found.startswith(b"{"):
            raise ValueError(f"a record begins with {found[:20]!r}, not with {{")


def _records(data: pa.Buffer | memoryview) -> Iterator[Any]:
    """Yield the records one by one, slowly and as strictly as pyarrow.

    Raises:
        ValueError: The data is not JSON, or an object contains a key twice.
    """
    for line in bytes(data).split(b"\n"):
        if line.strip(_BLANKS):
            yield json.loads(line, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object contains a key twice")
    return found


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _strange_key(value: Any, kind: pa.DataType, above: str = "") -> str | None:
    """Return the path of a key that the type does not contain."""
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
    """Parse lines. `schema` selects columns; None reads all with inferred types. With `is_all`, others are errors."""
    parsing = pajson.ParseOptions(
        explicit_schema=schema,
        newlines_in_values=False,
        unexpected_field_behavior="infer" if schema is None else "error" if is_all else "ignore",
    )
    reading = pajson.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pajson.read_json(pa.BufferReader(data), reading, parsing)
