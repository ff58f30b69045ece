"""Read deletes: rows that were deleted without rewriting their data file.

There are three kinds: lists of positions, deletion vectors (bitmaps of positions), and equality deletes ("all rows with
id 7"). Planning turns all of them into positions, which the row counts need anyway, so that readers only skip rows. For
equality deletes, the compared columns are decoded once.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc as orc
import pyarrow.parquet as pq
from pyiceberg.manifest import FileFormat
from pyiceberg.table.puffin import PuffinFile
from pyroaring import BitMap

from strata.data.formats.base import Unit
from strata.data.plan.projection import NO_ROWS, TableProjection
from strata.errors import DataError, DataFileInvalid, SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from pyiceberg.manifest import DataFile as DeleteFile
    from pyiceberg.types import NestedField

    from strata.data.iceberg.probe import FileLayouts, LazyReader, ProbedFile, Request
    from strata.data.iceberg.scan import Locator, ScannedFile
    from strata.data.source.source import DataFile, Source

    Positions = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

MAX_FILE_BYTES = 2 << 30
"""The limit for one delete file, which is read into cached."""
_VECTOR = "deletion-vector-v1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_BITMAP_BYTES = 8
"""The smallest size of a bitmap: its key and its header."""
CURE = "restore the file, or read a snapshot without it"


def read_positions(
    files: Iterable[ScannedFile], source: Source, locator: Locator, *, num_threads: int
) -> dict[str, Positions]:
    """Return the deleted rows of every data file with position deletes, sorted and unique.

    Raises:
        DataFileInvalid: A delete file is damaged.
        DataError: Its format is not supported.
    """
    targets: dict[str, list[str]] = defaultdict(list)
    deletes: dict[str, DeleteFile] = {}
    for scanned in files:
        for delete in scanned.position_deletes:
            targets[delete.file_path].append(scanned.file.file_path)
            deletes[delete.file_path] = delete

    def read(path: str) -> dict[str, Positions]:
        delete = deletes[path]
        return _read_one(delete, locator.file(path, delete.file_size_in_bytes), source, targets[path])

    found: dict[str, list[Positions]] = defaultdict(list)
    with ThreadPoolExecutor(max(1, min(num_threads, len(deletes)))) as pool:
        for rows_by_path in pool.map(read, sorted(deletes)):
            for path, rows in rows_by_path.items():
                found[path].append(rows)
    return {path: np.unique(np.concatenate(rows)) for path, rows in found.items()}


def _read_one(delete: DeleteFile, file: DataFile, source: Source, targets: Sequence[str]) -> dict[str, Positions]:
    """Read the deletes of the data files in `targets`: those of a partition can be far more than a scan needs."""
    if delete.file_format == FileFormat.PUFFIN:
        return _read_vectors(source, file, set(targets))
    table = read_deletes(delete, file, source, ["file_path", "pos"], as_codes=["file_path"])
    column = table["file_path"]
    coded = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    paths = coded.combine_chunks()
    codes = paths.indices.to_numpy(zero_copy_only=False)
    rows = table["pos"].cast(pa.int64()).to_numpy()
    named = paths.dictionary.to_pylist()
    wanted = set(targets)
    numbers = [number for number, path in enumerate(named) if path in wanted]
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    ends = zip(np.searchsorted(codes, numbers), np.searchsorted(codes, numbers, side="right"), strict=True)
    return {named[number]: rows[order[first:last]] for number, (first, last) in zip(numbers, ends, strict=True)}


def read_deletes(
    delete: DeleteFile, file: DataFile, source: Source, columns: list[str] | None, *, as_codes: Sequence[str] = ()
) -> pa.Table:
    """Return the rows of a delete file. `as_codes` names columns to keep as dictionaries where the format can.

    Raises:
        DataFileInvalid: The file is damaged.
        DataError: The file is neither Parquet nor ORC.
    """
    data = pa.BufferReader(_read_whole(source, file))
    try:
        if delete.file_format == FileFormat.PARQUET:
            return pq.ParquetFile(data, read_dictionary=list(as_codes)).read(columns=columns, use_threads=False)
        if delete.file_format == FileFormat.ORC:
            return orc.ORCFile(data).read(columns=columns)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataFileInvalid(f"{file.name}: this delete file is damaged ({error}); {CURE}", path=file.path) from error
    raise DataError(
        f"{file.name}: delete files in the format {delete.file_format.name} are not supported; compact the table "
        "(Spark: CALL system.rewrite_data_files), which applies them"
    )


def _read_whole(source: Source, file: DataFile) -> pa.Buffer:
    """Read a whole file before decoding it, so that a later failure means damage and not failed storage."""
    if file.size_bytes > MAX_FILE_BYTES:
        raise DataError(
            f"{file.name} is a delete file of {file.size_bytes} bytes, more than the limit of {MAX_FILE_BYTES}; "
            "compact the table (Spark: CALL system.rewrite_data_files), which applies it"
        )
    return source.read(file, 0, file.size_bytes)


# --- deletion vectors ---


def _read_vectors(source: Source, file: DataFile, targets: set[str]) -> dict[str, Positions]:
    """Read the deletion vectors of `targets`. A newer file may replace, and only extend, a vector of an older one."""
    data = _read_whole(source, file).to_pybytes()
    try:
        puffin = PuffinFile(data)
        vectors = [
            (blob.properties["referenced-data-file"], puffin.get_blob_payload(blob))
            for blob in puffin.footer.blobs
            if blob.type == _VECTOR
        ]
        return {path: decode_vector(payload) for path, payload in vectors if path in targets}
    except (ValueError, KeyError) as error:
        raise DataFileInvalid(
            f"{file.name}: its deletion vectors are damaged ({error}); {CURE}", path=file.path
        ) from error


def decode_vector(blob: bytes) -> Positions:
    """Return the positions in a deletion vector.

    The vector is a length, a magic number, bitmaps for 2³² positions each, and a checksum; length and checksum are
    big-endian.

    Raises:
        ValueError: The vector is damaged.
    """
    length = int.from_bytes(blob[:4], "big")
    body = blob[4 : 4 + length]
    if len(body) != length or not body.startswith(_VECTOR_MAGIC):
        raise ValueError("it is not a deletion vector")
    if zlib.crc32(body) != int.from_bytes(blob[4 + length : 8 + length], "big"):
        raise ValueError("the checksum does not match")
    num_bitmaps = int.from_bytes(body[4:12], "little")
    rest, found = body[12:], [NO_ROWS]
    for _ in range(num_bitmaps):
        if len(rest) < _BITMAP_BYTES:
            raise ValueError("it ends before its last bitmap")
        high = int.from_bytes(rest[:4], "little")
        bitmap = BitMap.deserialize(rest[4:])
        rest = rest[4 + len(bitmap.serialize()) :]
        found.append(np.asarray(bitmap.to_array(), dtype=np.int64) + (high << 32))
    return np.concatenate(found)


# --- deletes by equality ---


@dataclass(frozen=True, slots=True, eq=False)
class ValueDeletes:
    """Deletes every row whose values in some columns equal those of a key."""

    keys: pa.Table
    """The keys, under the column names of the rows to compare."""

    def matches(self, rows: pa.Table) -> Flags:
        """Return which rows are deleted. Null equals null.

        Column by column, the value of a row is replaced by its index among the keys' values, and combined with the
        previous index into a new one. Codes therefore stay below the square of the number of keys.
        """
        key_codes = np.zeros(self.keys.num_rows, dtype=np.int64)
        row_codes = np.zeros(rows.num_rows, dtype=np.int64)
        deleted = np.full(rows.num_rows, self.keys.num_rows > 0)
        for name in self.keys.column_names:
            values = pc.unique(self.keys[name])
            indexes, _ = _index_in(self.keys[name], values)
            distinct, key_codes = np.unique(key_codes * len(values) + indexes, return_inverse=True)
            indexes, known = _index_in(rows[name], values)
            row_codes, present = _search(row_codes * len(values) + indexes, distinct)
            deleted &= known & present
        return deleted


def _index_in(column: pa.ChunkedArray, values: pa.Array) -> tuple[Positions, Flags]:
    found = pc.index_in(column, value_set=values, skip_nulls=False)
    return pc.fill_null(found, 0).to_numpy().astype(np.int64), pc.is_valid(found).to_numpy()


def _search(codes: Positions, distinct: Positions) -> tuple[Positions, Flags]:
    """Return the index of each code in the sorted `distinct`, and whether it occurs there."""
    if not len(distinct):
        return np.zeros_like(codes), np.zeros(len(codes), dtype=np.bool_)
    indexes = np.minimum(np.searchsorted(distinct, codes), len(distinct) - 1)
    return indexes.astype(np.int64), distinct[indexes] == codes


class EqualityDeletes:
    """The equality deletes of a scan. They are read first, and then used by several threads."""

    def __init__(self, request: Request, layouts: FileLayouts, *, wide: bool) -> None:
        self._request = request
        self._layouts = layouts
        self._wide = wide
        self._read: dict[tuple[str, ...], ValueDeletes] = {}
        """Keyed by the paths of their files: most data files share them."""

    def read(self, deletes: Sequence[DeleteFile]) -> None:
        """Read delete files that were not read before.

        Raises:
            DataFileInvalid, DataFileMissing, StorageError: A delete file cannot be read. None is ever skipped.
            SchemaMismatch: A delete file compares a column that the table never had.
        """
        for ids, group in _by_columns(deletes).items():
            if _paths(group) not in self._read:
                fields = self._fields(ids, group[0].file_path)
                self._read[_paths(group)] = ValueDeletes(
                    pa.concat_tables([self._values(delete, fields) for delete in group])
                )

    def deleted_rows(self, probed: ProbedFile, unit: Unit, reader: LazyReader) -> Positions:
        """Return which rows of the row group are deleted, counted from the first row of the file."""
        deleted = np.zeros(unit.num_rows, dtype=np.bool_)
        for ids, group in _by_columns(probed.scanned.equality_deletes).items():
            values = self._read[_paths(group)]
            names = values.keys.column_names
            projection = TableProjection(
                replace(probed.layout.resolver, wide=self._wide).project(self._fields(ids, group[0].file_path))
            )
            deleted |= values.matches(projection.apply(reader.read(unit, projection.file_columns(names)), unit, names))
        return np.flatnonzero(deleted).astype(np.int64) + unit.first_row

    def _values(self, delete: DeleteFile, fields: Sequence[NestedField]) -> pa.Table:
        file = self._request.locator.file(delete.file_path, delete.file_size_in_bytes)
        table = read_deletes(delete, file, self._request.source, None)
        resolver = replace(self._layouts.of_deletes(file, table.schema), wide=self._wide)
        names = [each.name for each in fields]
        return TableProjection(resolver.project(fields)).apply(table, Unit(0, table.num_rows, 0, 0, 0), names)

    def _fields(self, ids: Iterable[int], where: str) -> list[NestedField]:
        """Return the compared columns, also those that were dropped, named by their ids because names may repeat."""
        table = self._request.table
        schemas = [*table.schemas().values(), table.schema()]
        known = {each.field_id: each for schema in schemas for each in schema.fields}
        for number in ids:
            if number not in known:
                raise SchemaMismatch(
                    f"{where} deletes rows by the column with field id {number}, which is not a top-level column of "
                    "the table; compact the table (Spark: CALL system.rewrite_data_files), which applies it"
                )
        return [known[number].model_copy(update={"name": f"#{number}", "required": False}) for number in ids]


def _paths(deletes: Iterable[DeleteFile]) -> tuple[str, ...]:
    return tuple(delete.file_path for delete in deletes)


def _by_columns(deletes: Iterable[DeleteFile]) -> dict[tuple[int, ...], list[DeleteFile]]:
    """Group delete files by the ids of the columns that they compare."""
    groups: dict[tuple[int, ...], list[DeleteFile]] = defaultdict(list)
    for delete in deletes:
        ids = tuple(sorted(delete.equality_ids or ()))
        if not ids:
            raise DataFileInvalid(
                f"{delete.file_path} deletes rows by equality without stating the columns; {CURE}",
                path=delete.file_path,
            )
        groups[ids].append(delete)
    return groups
