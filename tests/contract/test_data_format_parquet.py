"""Parquet passes the suite of every format; below it, what only Parquet has."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.register_assert_rewrite("data_format_contract")

from data_format_contract import FormatContract  # noqa: E402

from strata.data.formats.parquet import ParquetFormat  # noqa: E402


class TestParquetFormat(FormatContract):
    format: ClassVar[ParquetFormat] = ParquetFormat()

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        pq.write_table(table, path, row_group_size=rows_per_unit)
