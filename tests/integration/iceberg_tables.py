"""Iceberg tables for tests, with what pyiceberg reads but does not write: delete files and ORC.

Everything lives in one directory, under a SQLite catalog; nothing is ever removed, so every snapshot can be read.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record
from pyroaring import BitMap

from strata.data.formats.base import Format
from strata.data.iceberg.planner import FORMATS
from strata.data.plan.plan import Plan
from strata.data.runtime.decoder import Recipe as DecodingRecipe
from strata.data.runtime.decoder import ThreadDecoder
from strata.data.source.source import Source

PATH_ID, POSITION_ID = 2147483546, 2147483545


class Warehouse:
    """A catalog in a directory, with its tables."""

    def __init__(self, directory: Path, **storage: str) -> None:
        self.directory = directory
        settings = {
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
            **storage,
        }
        self.config = {"name": "test", "type": "sql", **settings}
        self.catalog = SqlCatalog("test", **settings)
        self.catalog.create_namespace("db")
        self._numbers = itertools.count()

    def create(self, name: str, schema: Any, **options: Any) -> Table:
        return self.catalog.create_table(f"db.{name}", schema=schema, **options)

    def close(self) -> None:
        self.catalog.close()

    def path(self, ending: str) -> str:
        """Return the path of a new file."""
        return f"{self.directory}/files-{next(self._numbers):03}{ending}"

    # --- data files ---

    def add_parquet(self, table: Table, rows: pa.Table, *, ids: Mapping[str, int] | None, row_group_size: int) -> str:
        """Write a file with several row groups and without ids, as writers other than Iceberg do."""
        path = self.path(".parquet")
        pq.write_table(_with_ids(rows, ids, b"PARQUET:field_id"), path, row_group_size=row_group_size)
        return self._append(table, path, FileFormat.PARQUET, rows.num_rows)

    def add_orc(
        self,
        table: Table,
        rows: pa.Table,
        *,
        ids: Mapping[str, int] | None,
        partition: Record | None = None,
        stripe_size: int = 64 << 20,
    ) -> str:
        path = self.path(".orc")
        orc.write_table(_with_ids(rows, ids, b"iceberg.id"), path, stripe_size=stripe_size, batch_size=256)
        return self._append(table, path, FileFormat.ORC, rows.num_rows, partition)

    def add_partitioned_parquet(
        self, table: Table, rows: pa.Table, ids: Mapping[str, int], partition: Record, path: str = ""
    ) -> str:
        """Write a file without the partition column, as Hive does."""
        path = path or self.path(".parquet")
        pq.write_table(_with_ids(rows, ids, b"PARQUET:field_id"), path)
        return self._append(table, path, FileFormat.PARQUET, rows.num_rows, partition)

    def add_file(self, table: Table, path: str, kind: FileFormat, num_rows: int) -> str:
        """Add an existing file to the table."""
        return self._append(table, path, kind, num_rows)

    def _append(self, table: Table, path: str, kind: FileFormat, num_rows: int, partition: Record | None = None) -> str:
        file = _describe(path, kind, num_rows, DataFileContent.DATA, partition=partition or Record())
        file.spec_id = table.spec().spec_id
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as update:
            update.append_data_file(file)
        return path

    # --- deletes ---

    def delete_positions(
        self, table: Table, rows: Mapping[str, Sequence[int]], *, partition: Record | None = None, as_orc: bool = False
    ) -> None:
        """Delete rows with a position delete file."""
        pairs = sorted((path, row) for path, numbers in rows.items() for row in numbers)
        columns = {
            "file_path": pa.array([path for path, _ in pairs]),
            "pos": pa.array([row for _, row in pairs], pa.int64()),
        }
        deletes = _with_ids(pa.table(columns), {"file_path": PATH_ID, "pos": POSITION_ID}, b"PARQUET:field_id")
        path = self.path("-deletes.orc" if as_orc else "-deletes.parquet")
        (orc if as_orc else pq).write_table(deletes, path)
        bounds = {"lower_bounds": {PATH_ID: pairs[0][0].encode()}, "upper_bounds": {PATH_ID: pairs[-1][0].encode()}}
        kind = FileFormat.ORC if as_orc else FileFormat.PARQUET
        self._delete(
            table, _describe(path, kind, len(pairs), DataFileContent.POSITION_DELETES, partition=partition, **bounds)
        )

    def delete_by_vector(self, table: Table, rows: Mapping[str, Sequence[int]]) -> str:
        """Delete rows with deletion vectors, several in one Puffin file."""
        path = self.path("-deletes.puffin")
        Path(path).write_bytes(puffin({data_path: vector(numbers) for data_path, numbers in rows.items()}))
        num_rows = sum(map(len, rows.values()))
        self._delete(table, _describe(path, FileFormat.PUFFIN, num_rows, DataFileContent.POSITION_DELETES))
        return path

    def delete_equal(
        self, table: Table, keys: pa.Table, ids: Mapping[str, int], *, partition: Record | None = None
    ) -> None:
        """Delete all earlier rows that are equal in these columns, with an equality delete file."""
        path = self.path("-equal.parquet")
        pq.write_table(_with_ids(keys, ids, b"PARQUET:field_id"), path)
        self._delete(
            table,
            _describe(
                path,
                FileFormat.PARQUET,
                keys.num_rows,
                DataFileContent.EQUALITY_DELETES,
                partition=partition,
                equality_ids=list(ids.values()),
            ),
        )

    def _delete(self, table: Table, file: DataFile) -> None:
        file.spec_id = table.spec().spec_id
        with (
            table.transaction() as transaction,
            _AppendDeletes(operation=Operation.DELETE, transaction=transaction, io=table.io) as update,
        ):
            update.append_data_file(file)


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AppendDeletes(_FastAppendFiles):
    """Commit delete files."""

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return _DeleteManifestWriter(
            spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )


def _describe(path: str, kind: FileFormat, num_rows: int, content: DataFileContent, **more: Any) -> DataFile:
    more["partition"] = more.get("partition") or Record()
    return DataFile.from_args(
        content=content,
        file_path=path,
        file_format=kind,
        record_count=num_rows,
        file_size_in_bytes=Path(path).stat().st_size,
        **more,
    )


def _with_ids(rows: pa.Table, ids: Mapping[str, int] | None, key: bytes) -> pa.Table:
    if ids is None:
        return rows
    fields = [field.with_metadata({key: str(ids[field.name]).encode()}) for field in rows.schema]
    return rows.cast(pa.schema(fields))


def vector(rows: Sequence[int]) -> bytes:
    """Return a deletion vector as Iceberg 3 writes it."""
    high = sorted({row >> 32 for row in rows})
    body = b"\xd1\xd3\x39\x64" + len(high).to_bytes(8, "little")
    for key in high:
        bitmap = BitMap(row & 0xFFFFFFFF for row in rows if row >> 32 == key)
        body += key.to_bytes(4, "little") + bitmap.serialize()
    return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def puffin(vectors: Mapping[str, bytes]) -> bytes:
    """Return a Puffin file of deletion vectors, keyed by data file."""
    data, blobs = b"PFA1", []
    for path, blob in vectors.items():
        blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(data),
                "length": len(blob),
                "properties": {"referenced-data-file": path},
            }
        )
        data += blob
    footer = json.dumps({"blobs": blobs}).encode()
    return data + b"PFA1" + footer + len(footer).to_bytes(4, "little") + b"\0\0\0\0" + b"PFA1"


# --- reading ---


class _Unrecorded:
    """A recorder that discards the metrics of decoders."""

    def opened_file(self) -> None: ...

    def decoded_row_group(self, **_: int) -> None: ...


def read(source: Source, plan: Plan, formats: Mapping[str, Format] = FORMATS) -> pa.Table:
    """Read all rows of a plan in order through the runtime's decoder."""
    decoder = ThreadDecoder(DecodingRecipe(source, plan, formats), _Unrecorded())  # type: ignore[arg-type]
    try:
        parts = [decoder.decode(number) for number in range(plan.num_units)]
    finally:
        decoder.close()
    for part, expected in zip(parts, plan.unit_rows.tolist(), strict=True):
        assert part.num_rows == expected
    fields = [plan.schema.field(name).with_nullable(True) for name in plan.columns]
    return pa.concat_tables(parts).cast(pa.schema(fields))
