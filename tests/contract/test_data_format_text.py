"""CSV and JSON: the contract, and what is theirs alone."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pytest
import zstandard
from data_format_contract import LOCAL, PLAIN, FormatContract, data_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.data.formats.base import FileFacts, Format, Presence, Unit
from strata.data.formats.csv import CsvFormat
from strata.data.formats.json import JsonFormat, JsonlFormat
from strata.errors import ConfigError, DataFileChanged, DataFileInvalid, SchemaMismatch


class TextContract(FormatContract):
    is_columnar = False
    has_exact_units = False
    has_marks = False


class TestCsv(TextContract):
    format = CsvFormat(null_values=("",), strings_can_be_null=True)
    columns = PLAIN

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        pacsv.write_csv(table, path)

    def as_stored(self, table: pa.Table) -> pa.Table:
        return table.set_column(1, "small", table["small"].cast(pa.int64())) if "small" in table.schema.names else table


class JsonContract(TextContract):
    columns = (*PLAIN, "tags", "point")

    def as_stored(self, table: pa.Table) -> pa.Table:
        return table.set_column(1, "small", table["small"].cast(pa.int64())) if "small" in table.schema.names else table


class TestJsonl(JsonContract):
    format = JsonlFormat()

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


class TestJsonLines(TestJsonl):
    format = JsonFormat()
