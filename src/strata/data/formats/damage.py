"""Distinguish a damaged file from failed storage and from a file of another format.

pyarrow raises `OSError` both for a page that cannot be decompressed and for a broken connection. After a failure the
bytes are therefore read once more, alone. If that fails, storage has failed. Otherwise decoding is tried once more, and
a second failure means damage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from strata.data.source.source import translate_errors
from strata.errors import DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from strata.data.formats.base import Unit
    from strata.data.source.source import DataFile, Source

T = TypeVar("T")

NUM_HEAD_BYTES = 16
PROBE_BYTES = 8 << 20
"""The size of one read when a row group that could not be decoded is read again."""
CURE = "copy it again from its origin, write it again, or leave it out"
UNDECODED = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What pyarrow raises for bytes that it cannot decode."""
_UNSUPPORTED = re.compile(r"not (?:yet |currently )?(?:implemented|supported|built)|cannot decrypt", re.IGNORECASE)
"""How pyarrow reports valid but unsupported data where the exception type is that of damage."""
_MARKS = (
    (b"PAR1", "parquet"),
    (b"PARE", "parquet with an encrypted footer"),
    (b"ORC", "orc"),
    (b"ARROW1", "arrow"),
    (b"FEA1", "feather version 1"),
    (b"\xff\xff\xff\xff", "an arrow stream"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
    (b"Obj\x01", "avro"),
    (b"\x89HDF", "hdf5"),
)


def kind_of(head: bytes) -> str:
    """Return the format of a file by its first bytes; empty if it is unknown."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if any(head) and all(byte >= 0x20 or byte in b"\t\r\n" for byte in head):  # bytes above 0x7f may be UTF-8
        return "json" if head.lstrip()[:1] in (b"{", b"[") else "text"
    return ""


def wrong_format(file: DataFile, num_bytes: int, head: bytes, wanted: str) -> DataFileInvalid:
    """Return the error for a file that does not have the expected format."""
    if not head:
        found = "it is empty"
    elif not any(head):
        found = "it begins with zeros"
    else:
        found = f"it looks like {kind_of(head)}" if kind_of(head) else "its format is unknown"
    return DataFileInvalid(
        f"{file.name} ({num_bytes} bytes) is not {wanted} file: {found}; pass its format, or narrow the path to "
        "exclude it",
        path=file.path,
    )


def attempt(
    decode: Callable[[], T],
    retry: Callable[[], T],
    *,
    source: Source,
    file: DataFile,
    unit: Unit,
    ranges: Iterable[tuple[int, int]],
    what: str,
) -> T:
    """Return the result of `decode`, or of `retry`, which decodes with a new handle.

    `ranges` are the (offset, bytes) that decoding reads; `what` describes the row group in errors.

    Raises:
        DataFileInvalid: The bytes can be read but not decoded.
        DataFileMissing, StorageError: The bytes cannot be read.
    """
    try:
        return decode()
    except pa.ArrowMemoryError:
        raise
    except UNDECODED:
        _probe(source, file, unit, ranges, what)
    try:
        return retry()
    except pa.ArrowMemoryError:
        raise
    except UNDECODED as error:
        raise undecodable(f"{file.name}: {what}", error, file=file, unit=unit) from error


def undecodable(what: str, error: Exception, *, file: DataFile, unit: Unit | None = None) -> DataFileInvalid:
    """Return the error for bytes that can be read but not decoded: damaged, or intact and unsupported by pyarrow."""
    index = unit.index if unit is not None else None
    if isinstance(error, pa.ArrowNotImplementedError) or _UNSUPPORTED.search(str(error)):
        return DataFileInvalid(
            f"{what} is intact, but uses a feature that pyarrow {pa.__version__} does not support: "
            f"{_first_line(error)}; exclude the column with columns=, or write the file again without the feature, "
            "for example compressed with zstd",
            path=file.path,
            row_group=index,
        )
    return DataFileInvalid(f"{what} is damaged ({_first_line(error)}); {CURE}", path=file.path, row_group=index)


def _probe(source: Source, file: DataFile, unit: Unit, ranges: Iterable[tuple[int, int]], what: str) -> None:
    with source.open(file) as opened, translate_errors(file.name):
        size = opened.size()
        for offset, num_bytes in ranges:
            if offset < 0 or offset + num_bytes > size:
                raise DataFileInvalid(
                    f"{file.name}: {what} should be bytes {offset} to {offset + num_bytes}, "
                    f"but the file has {size}; {CURE}",
                    path=file.path,
                    row_group=unit.index,
                )
            for first in range(offset, offset + num_bytes, PROBE_BYTES):
                opened.read_at(min(PROBE_BYTES, offset + num_bytes - first), first)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
