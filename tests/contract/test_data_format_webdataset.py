"""Tar shards pass the contract of every format; the other tests are specific to tars."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
from data_format_contract import FormatContract

from strata.data.formats.webdataset.format import WebDatasetFormat

PARTS = ("id", "small", "price", "flag", "word", "ratio", "day", "time", "amount", "raw", "colour", "tags", "point")


def stored(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: object) -> None:
    with tarfile.open(path, "w", **options) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


class TestWebDataset(FormatContract):
    format = WebDatasetFormat()
    columns = PARTS
    is_columnar = False
    has_exact_units = False
    unit_bytes = 20_000
    suffix = "tar"
    added = ("__key__",)
    choices = MappingProxyType({"missing": "none"})
    test_statistics_never_contradict_the_rows: Callable[..., None] | None = None  # tar has no statistics  # type: ignore[assignment]

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        rows = table.to_pylist()
        write_tar(
            path,
            [
                (f"{number:06}.{name}", stored(value))
                for number, row in enumerate(rows)
                for name, value in row.items()
                if value is not None
            ],
        )

    def as_stored(self, table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        columns = {
            name: pa.array([None if row[name] is None else stored(row[name]) for row in rows], pa.large_binary())
            for name in table.column_names
        }
        return pa.table(columns)
