"""JSON: an object a line ("jsonl"), or that or one array of objects ("json").

An array cannot be cut without parsing it, so it is one unit, and bounded. It is read by pyarrow like lines are: as the
only column of one row, `{"rows": […]}`, whose elements then are the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from strata.data.formats.base import FileFacts, Unit
from strata.data.formats.records import LF, JsonRecords
from strata.data.formats.text import BOM, Text, TextFormat, TextReader, rows_only, shortened
from strata.errors import ConfigError, DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.files import DataFile
    from strata.data.source import Source

ARRAY_BYTES_MAX: Final = 1 << 30
_PEEK_BYTES: Final = 1 << 12
_PIECE_BYTES: Final = 16 << 20
_BLANKS: Final = b" \t\r\n" + BOM
_ROWS: Final = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFormat(TextFormat):
    """An object a line."""

    name = "jsonl"

    @property
    def records(self) -> JsonRecords:
        return JsonRecords()

    @property
    def cure(self) -> str:
        return "mend the record, or give the column another type with schema=…"

    def guess(self, header: bytes, sample: bytes) -> pa.Schema:
        assert not header
        if not sample.strip(_BLANKS):
            return pa.schema([])
        _check_lines(sample)
        return _read(sample, None).schema

    def parse(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        _check_lines(data)
        return _read(data, pa.schema([schema.field(name) for name in columns])).select(list(columns))


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
                f"{file.name} is no JSON array of objects: {shortened(error)}; {self.cure}"
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


def _read(data: pa.Buffer | memoryview | bytes | bytearray, schema: pa.Schema | None) -> pa.Table:
    parsing = pajson.ParseOptions(
        explicit_schema=schema,
        newlines_in_values=False,
        unexpected_field_behavior="infer" if schema is None else "ignore",
    )
    reading = pajson.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return pajson.read_json(pa.BufferReader(data), reading, parsing)
