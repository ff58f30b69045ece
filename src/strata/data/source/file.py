"""What a file of a dataset is, before anybody has looked inside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataFile:
    path: str
    """As its file system knows it."""
    name: str
    """Relative to where the search began: what people read, and what stays the same when a dataset is moved."""
    size_bytes: int
    mtime_ns: int
    """With the size: whether what a cache knows of the file still holds. Not part of a dataset's fingerprint."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Hive partition keys and values, unquoted, as they stand in the path; None is the null partition."""
