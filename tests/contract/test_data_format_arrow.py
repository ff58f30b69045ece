"""Arrow files and streams pass the suite of every format; below it, what only they have."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

pytest.register_assert_rewrite("data_format_contract")

from data_format_contract import FormatContract  # noqa: E402

from strata.data.formats.arrow import SAMPLE_BYTES, ArrowFormat  # noqa: E402
from strata.data.formats.base import Unit  # noqa: E402


class ArrowContract(FormatContract):
    format: ClassVar[ArrowFormat] = ArrowFormat()
    compression: ClassVar[str | None] = None

    def open_writer(self, path: Path, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        return pa.ipc.new_file(str(path), schema, options=options)

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        with self.open_writer(path, table.schema) as writer:
            writer.write_table(table.combine_chunks(), max_chunksize=rows_per_unit)

    def damage(self, path: Path, unit: Unit) -> None:
        """Only what the version does not cover: behind the header and the sample."""
        data = bytearray(path.read_bytes())
        header_bytes = 8 + int.from_bytes(data[unit.offset + 4 : unit.offset + 8], "little")
        first, last = unit.offset + header_bytes + SAMPLE_BYTES, unit.offset + unit.num_bytes
        assert first < last
        data[first:last] = b"\xff" * (last - first)
        path.write_bytes(data)


class TestArrowFile(ArrowContract):
    pass


class TestArrowFileWithLz4(ArrowContract):
    compression = "lz4"


class TestArrowStream(ArrowContract):
    def open_writer(self, path: Path, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        return pa.ipc.new_stream(str(path), schema, options=options)


class TestArrowStreamWithZstd(TestArrowStream):
    compression = "zstd"
