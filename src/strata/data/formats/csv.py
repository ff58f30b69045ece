"""The CSV format: options, guessing a schema, parsing byte ranges with pyarrow. `records.py` finds the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pacsv

from strata.data.formats.records import CsvRecords
from strata.data.formats.text import BOM, UNIT_BYTES_MAX, TextFormat
from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK_BYTES_MIN = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFormat(TextFormat):
    name = "csv"

    delimiter: str = ","
    quote: str | None = '"'
    """The quote character; with None, quotes are ordinary characters."""
    header: bool = True
    """Whether the first record contains the column names."""
    column_names: tuple[str, ...] | None = None
    """Column names that replace those of the header. Without both, columns are named f0, f1, …"""
    null_values: tuple[str, ...] | None = None
    """Texts that mean null; None uses pyarrow's (the empty text, NA, null, nan, …)."""
    strings_can_be_null: bool = False
    """Whether `null_values` mean null in string columns too."""

    def __post_init__(self) -> None:
        for what, character in (("delimiter", self.delimiter), ("quote", self.quote)):
            if character is not None and (len(character) != 1 or not character.isascii() or character in "\r\n"):
                raise ConfigError(f"{what}={character!r} must be one ASCII character other than a line end")
        if self.delimiter == self.quote:
            raise ConfigError(f"delimiter and quote are both {self.quote!r}; pass another quote, or quote=None")

    @property
    def has_header(self) -> bool:
        return self.header

    @property
    def records(self) -> CsvRecords:
        return CsvRecords(self.delimiter, self.quote)

    def cure(self, error: Exception) -> str:
        text = str(error)
        if "invalid UTF8" in text:
            return (
                "the text is not UTF-8: save the file as UTF-8, or read the column as bytes with "
                "schema=pa.schema([(…, pa.binary())])"
            )
        if "Expected" in text and "columns, got" in text:
            return (
                "every record must have as many fields as the first one: correct the record, quote fields that contain "
                "the delimiter, or pass the right one with format_options={'delimiter': …}"
            )
        return (
            "correct the record, list the text for null in null_values, or pass another type for the column with "
            "schema=…; pa.string() accepts any UTF-8 text, pa.binary() any bytes"
        )

    def guess(self, header: bytes, sample: bytes) -> pa.Schema:
        names = self.column_names
        if names is None and header:
            reading = pacsv.ReadOptions(use_threads=False, block_size=_block_size(header))
            names = tuple(self._read(header + b"\n", reading, pacsv.ConvertOptions()).column_names)
        if not sample.strip(b"\r\n"):
            return pa.schema([(name, pa.null()) for name in names or ()])
        options = pacsv.ReadOptions(
            use_threads=False,
            block_size=_block_size(sample),
            column_names=names,
            autogenerate_column_names=names is None,
        )
        return self._read(sample, options, self._conversion()).schema

    def parse(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        reading = pacsv.ReadOptions(use_threads=False, block_size=_block_size(data), column_names=schema.names)
        conversion = self._conversion()
        conversion.column_types = {name: schema.field(name).type for name in columns}
        conversion.include_columns = list(columns)
        return self._read(data, reading, conversion)

    def is_sound(self, data: pa.Buffer | memoryview, schema: pa.Schema, columns: Sequence[str]) -> bool:
        texts = [(field.name, field.type if field.type == pa.binary() else pa.string()) for field in schema]
        try:
            self.parse(data, pa.schema(texts), columns)
        except (pa.ArrowException, ValueError):
            return False
        return True

    def _conversion(self) -> pacsv.ConvertOptions:
        options = pacsv.ConvertOptions(strings_can_be_null=self.strings_can_be_null)
        if self.null_values is not None:
            options.null_values = list(self.null_values)
        return options

    def _read(
        self, data: bytes | memoryview | pa.Buffer, reading: pacsv.ReadOptions, conversion: pacsv.ConvertOptions
    ) -> pa.Table:
        if bytes(memoryview(data)[: len(BOM)]) == BOM:
            data = b"\n" + bytes(data)  # pyarrow would drop these bytes as a byte order mark
        parsing = pacsv.ParseOptions(
            delimiter=self.delimiter, quote_char=self.quote or False, double_quote=True, newlines_in_values=True
        )
        return pacsv.read_csv(pa.BufferReader(data), reading, parsing, conversion)


def _block_size(data: bytes | memoryview | pa.Buffer) -> int:
    """Return a size that makes all data one block, so that pyarrow does not search for record ends again."""
    return min(max(len(data) + 2, _BLOCK_BYTES_MIN), 2 * UNIT_BYTES_MAX - 1)
