"""The survey: plain data about the files of a dataset, from which a plan is made without reading the files again.

It is cached between runs (`cache.py`) and broadcast from rank 0, so it has a byte format, which is validated when it is
read: lengths must agree, numbers must be possible. The numbers of row groups are packed 64-bit integers, so that a
million of them is read in milliseconds.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from strata.data.formats.base import FileFacts, Unit
from strata.data.source.source import DataFile
from strata.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

VERSION = 4
MAX_BYTES = 1 << 30
"""Limit of an uncompressed survey: about ten million row groups."""
MAX_NUMBER = 1 << 50
"""Limit of the rows and bytes of a row group, which keeps sums far from overflow."""
_MAGIC = b"strata survey %d\n" % VERSION
_DIGEST_BYTES = 16

Partition = tuple[tuple[str, str | None], ...]


class SurveyedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file that was opened. Each `bytes` field is a packed array with one entry per row group, if not noted."""

    path: str
    name: str
    size_bytes: int
    mtime_ns: int
    partition: Partition
    version: str
    schema: int
    """The index of its schema in `Survey.schemas`."""
    index: bytes
    rows: bytes
    first_row: bytes
    offset: bytes
    num_bytes: bytes
    null_counts: bytes
    """One entry per column of the schema; -1 if unknown."""
    passing: bytes | None = None
    """Rows that pass the filter; None if there is no filter or they are not counted yet."""
    num_counted: int = 0
    """Row groups that were decoded to count them."""
    parts: bytes = b""
    """The ranges of rows to read in row groups that are read in part: three numbers per range, the index of the row
    group, the first row in it and the number of rows. The other rows do not pass."""
    num_pages: int = 0
    """Pages of the columns that are read, in these row groups."""
    num_pages_skipped: int = 0
    bytes_skipped: int = 0
    """Bytes of the skipped pages."""
    num_incomplete: int = 0
    """As `FileFacts.num_incomplete`."""

    def data_file(self) -> DataFile:
        return DataFile(self.path, self.name, self.size_bytes, self.mtime_ns, self.partition)

    def facts(self, schema: pa.Schema) -> FileFacts:
        columns = (self.index, self.rows, self.first_row, self.offset, self.num_bytes)
        row_groups = tuple(Unit(*row) for row in zip(*(unpack(column).tolist() for column in columns), strict=True))
        counts = dict(zip(schema.names, unpack(self.null_counts).tolist(), strict=True))
        return FileFacts(
            schema, row_groups, self.version, {name: count for name, count in counts.items() if count >= 0}
        )


class Survey(msgspec.Struct, frozen=True):
    """What was found in the files of a dataset."""

    format: str
    is_typed: bool
    is_keyed: bool
    """Whether files may have columns that are not in their schema."""
    schemas: tuple[bytes, ...]
    """The distinct schemas of the files, as Arrow IPC."""
    partition_schema: bytes
    files: tuple[SurveyedFile, ...]
    num_files: int
    """All files, including pruned and unreadable ones."""
    num_files_pruned: int = 0
    """Files not opened, because their partition values do not pass the filter."""
    condition_text: str = ""
    condition_schema: bytes = b""
    """The filter's columns, with the types that rows were counted with."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Unreadable data that was skipped: the file (and row group), and the reason."""
    num_files_skipped: int = 0
    """Files skipped as a whole."""
    num_units_skipped: int = 0
    """Row groups skipped in other files."""


_NUMBERS = operator.attrgetter("index", "num_rows", "first_row", "offset", "num_bytes")


def facts_of(file: DataFile, facts: FileFacts, schema: int) -> SurveyedFile:
    """Pack the facts of a file; `schema` is the index of its schema in the survey."""
    columns = zip(*map(_NUMBERS, facts.units), strict=True) if facts.units else [()] * 5
    index, rows, first_row, offset, num_bytes = map(pack, columns)
    nulls = facts.null_counts
    return SurveyedFile(
        path=file.path,
        name=file.name,
        size_bytes=file.size_bytes,
        mtime_ns=file.mtime_ns,
        partition=file.partition,
        version=facts.version,
        schema=schema,
        index=index,
        rows=rows,
        first_row=first_row,
        offset=offset,
        num_bytes=num_bytes,
        num_incomplete=facts.num_incomplete,
        null_counts=pack([nulls.get(name, -1) for name in facts.schema.names]) if nulls else _unknown(facts.schema),
    )


def _unknown(schema: pa.Schema) -> bytes:
    return b"\xff" * (8 * len(schema))  # -1 for each column


def named_schemas(schemas: Sequence[pa.Schema], files: Sequence[SurveyedFile]) -> list[tuple[str, pa.Schema]]:
    """Return the distinct schemas, each with the name of a file, sorted by name. Files without rows are ignored if
    others have rows."""
    first: dict[int, str] = {}
    for file in [file for file in files if file.rows] or files:
        if file.schema not in first or file.name < first[file.schema]:
            first[file.schema] = file.name
    return sorted(((name, schemas[number]) for number, name in first.items()), key=lambda each: each[0])


def pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack_parts(packed: bytes) -> npt.NDArray[np.int64]:
    """Return one line per range: the index of the row group, the first row, the number of rows.

    Raises:
        ValueError: The length is not a multiple of three numbers.
    """
    return unpack(packed).reshape(-1, 3)


def unpack(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, "<i8").astype(np.int64, copy=False)


def schema_bytes(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize())


def schema_of(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(data))


def to_bytes(survey: Survey) -> bytes:
    """Encode a survey for the cache and for other ranks."""
    payload = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(survey))
    return b"".join([_MAGIC, xxhash.xxh3_128_digest(payload), payload])


def from_bytes(data: bytes) -> Survey:
    """Decode and validate a survey.

    Raises:
        DataError: The bytes are not from `to_bytes` of this version.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    payload = memoryview(data)[start:]
    if not data.startswith(_MAGIC) or len(data) < start:
        raise DataError("this is not a survey of this version of Strata; survey the dataset again")
    if xxhash.xxh3_128_digest(payload) != data[len(_MAGIC) : start]:
        raise DataError("the survey is damaged: its hash does not match; survey the dataset again")
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= MAX_BYTES:
            raise DataError(f"the survey declares {size} bytes, above the limit {MAX_BYTES}; survey the dataset again")
        survey = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(payload), type=Survey)
        _check(survey)
    except (zstandard.ZstdError, msgspec.DecodeError, pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"the survey is invalid ({error}); survey the dataset again") from error
    return survey


def _check(survey: Survey) -> None:
    """Check that the numbers of a survey are possible.

    Raises:
        ValueError, pa.ArrowException: They are not.
    """
    widths = [8 * len(schema_of(data)) for data in survey.schemas]
    schema_of(survey.partition_schema)
    if survey.condition_schema:
        schema_of(survey.condition_schema)
    for file in survey.files:
        if not 0 <= file.schema < len(widths) or len(file.null_counts) != widths[file.schema]:
            raise ValueError(f"{file.name} has an unknown schema")
        size = len(file.rows)
        others = (
            file.index,
            file.first_row,
            file.offset,
            file.num_bytes,
            file.rows if file.passing is None else file.passing,
        )
        if size % 8 or any(len(other) != size for other in others):
            raise ValueError(f"{file.name} has incomplete row groups")
    numbers = (column for file in survey.files for column in (file.rows, file.index, file.first_row, file.num_bytes))
    found = unpack(b"".join(numbers))
    if ((found < 0) | (found > MAX_NUMBER)).any():
        raise ValueError("a row group has an impossible number of rows or bytes")
    counted = [file for file in survey.files if file.passing is not None]
    passing = unpack(b"".join(file.passing or b"" for file in counted))
    if (passing < 0).any() or (passing > unpack(b"".join(file.rows for file in counted))).any():
        raise ValueError("more rows pass the filter than there are")
    for file in survey.files:
        if file.parts:
            _check_parts(file)


def _check_parts(file: SurveyedFile) -> None:
    place, first, num_rows = unpack_parts(file.parts).T
    rows = unpack(file.rows)
    if ((place < 0) | (place >= len(rows)) | (first < 0) | (num_rows <= 0) | (num_rows > MAX_NUMBER)).any():
        raise ValueError(f"{file.name} has row ranges out of bounds")
    end = first + num_rows
    follows = (place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (first[1:] >= end[:-1]))
    if (first > MAX_NUMBER).any() or (end > rows[place]).any() or not follows.all():
        raise ValueError(f"{file.name} has row ranges out of bounds")
