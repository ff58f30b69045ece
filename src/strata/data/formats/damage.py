"""Telling a damaged file from storage that failed, and from a file of another format.

pyarrow raises `OSError` for both a page that cannot be decompressed and a connection that broke. So a failure is looked
into: the bytes are asked for once more, alone. If they do not come, it was the storage. If they come, the decoding is
tried once more; what fails twice on bytes that are there is damage.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from strata.data.source.source import translate_errors
from strata.errors import DataFileInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from strata.data.source.source import DataFile, Source

T = TypeVar("T")

NUM_HEAD_BYTES = 16
PROBE_BYTES = 8 << 20
"""At a time, when a unit is looked into that could not be decoded."""
CURE = "copy it again from where it came from, write it again, or leave it out"
UNDECODED = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What pyarrow raises over bytes that it cannot decode."""
_UNKNOWN = re.compile(r"not (?:yet |currently )?(?:implemented|supported|built)", re.IGNORECASE)
"""How it reports what is legal and not known to it, where the exception is that of damage."""
_MARKS = (
    (b"PAR1", "parquet"),
    (b"PARE", "parquet with an encrypted footer"),
    (b"ORC", "orc"),
    (b"ARROW1", "arrow"),
    (b"FEA1", "feather of version 1"),
    (b"\xff\xff\xff\xff", "an arrow stream"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
    (b"Obj\x01", "avro"),
    (b"\x89HDF", "hdf5"),
)


def kind_of(head: bytes) -> str:
    """What a file is, by its first bytes; for messages."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if not head:
        return "empty"
    if not any(head):
        return "zeros"
    if all(byte >= 0x20 or byte in b"\t\r\n" for byte in head):  # bytes above 0x7f may be UTF-8
        return "json" if head.lstrip()[:1] in (b"{", b"[") else "text"
    return "of a format that is not known"


def attempt(
    decode: Callable[[], T],
    again: Callable[[], T],
    *,
    source: Source,
    file: DataFile,
    ranges: Iterable[tuple[int, int]],
    what: str,
) -> T:
    """What `decode` gives; `again` decodes with a fresh handle. `ranges`: (offset, bytes) that it reads.

    Raises:
        DataFileInvalid: The bytes are there but cannot be decoded. `what` is said of the place.
        DataFileMissing, StorageError: They cannot be had.
    """
    try:
        return decode()
    except pa.ArrowMemoryError:
        raise
    except UNDECODED:
        _probe(source, file, ranges, what)
    try:
        return again()
    except pa.ArrowMemoryError:
        raise
    except UNDECODED as error:
        raise undecodable(f"{file.name}: {what}", error) from error


def undecodable(what: str, error: Exception) -> DataFileInvalid:
    """Of bytes that are all there: they are damaged, or intact and of a kind that pyarrow does not know."""
    if isinstance(error, pa.ArrowNotImplementedError) or _UNKNOWN.search(str(error)):
        return DataFileInvalid(
            f"{what} is intact, but takes what pyarrow {pa.__version__} does not support: {_first_line(error)}; "
            "leave its column out with columns=, or write the file again without it, for example compressed with zstd"
        )
    return DataFileInvalid(f"{what} is damaged ({_first_line(error)}); {CURE}")


def _probe(source: Source, file: DataFile, ranges: Iterable[tuple[int, int]], what: str) -> None:
    with source.open(file) as opened, translate_errors(file.name):
        size = opened.size()
        for offset, num_bytes in ranges:
            if offset < 0 or offset + num_bytes > size:
                place = f"bytes {offset} to {offset + num_bytes}"
                raise DataFileInvalid(f"{file.name}: {what} should be {place}, but the file has {size}; {CURE}")
            for first in range(offset, offset + num_bytes, PROBE_BYTES):
                opened.read_at(min(PROBE_BYTES, offset + num_bytes - first), first)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
