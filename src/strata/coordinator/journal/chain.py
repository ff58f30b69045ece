"""Checksums that prove that a row is unchanged and in its place.

The checksum of every event covers that of the previous event, so a changed, missing, duplicated or moved row breaks the
chain there. A snapshot contains the chain value of its event, where verification starts after a restart. Pure
functions; the types of the rows are not trusted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from strata.coordinator.journal.base import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

EventRow = tuple[Any, Any, Any, Any, Any, Any]
"""seq, job_id, kind, at_s, payload, checksum"""
SnapshotRow = tuple[Any, Any, Any, Any]
"""seq, chain, payload, checksum"""

_EVENT = struct.Struct("<qqdII")
_SNAPSHOT = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the chain: the number of an event and its checksum."""

    seq: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.seq} {self.checksum}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        seq, checksum = text.split(" ")
        return cls(int(seq), int(checksum))


ROOT = Mark(0, 0)
"""The position before the first event."""


def event_checksum(before: int, seq: int, job_id: str, kind: str, at_s: float, payload: bytes) -> int:
    job, name = job_id.encode(), kind.encode()
    # + 0.0 turns -0.0 into 0.0, as SQLite does when it stores the value.
    return _signed(_EVENT.pack(before, seq, at_s + 0.0, len(job), len(name)) + job + name + payload)


def snapshot_checksum(seq: int, chain: int, payload: bytes) -> int:
    return _signed(_SNAPSHOT.pack(seq, chain) + payload)


def seal(key: str, value: str) -> str:
    """Return a setting with its checksum, for the table of settings."""
    return f"{value}#{xxh3_64_hexdigest(f'{key}={value}'.encode())}"


def unseal(key: str, sealed: object) -> str | None:
    """Return the setting, or None if the checksum does not match."""
    if not isinstance(sealed, str):
        return None
    value = sealed.rpartition("#")[0]
    return value if seal(key, value) == sealed else None


def check_event(row: EventRow, before: Mark) -> str:
    """Return why this row does not follow `before`; empty if it does."""
    seq, job_id, kind, at_s, payload, checksum = row
    if seq != before.seq + 1:
        return f"event {before.seq + 1} is missing"
    if not (
        isinstance(job_id, str)
        and isinstance(kind, str)
        and isinstance(at_s, float)
        and isinstance(payload, bytes)
        and isinstance(checksum, int)
    ):
        return f"event {seq} cannot be decoded"
    if event_checksum(before.checksum, seq, job_id, kind, at_s, payload) != checksum:
        return f"event {seq} does not match its checksum"
    return ""


def check_snapshot(row: SnapshotRow) -> str:
    seq, chain, payload, checksum = row
    if not all(isinstance(number, int) for number in (seq, chain, checksum)) or not isinstance(payload, bytes):
        return f"the snapshot at event {seq} cannot be decoded"
    if snapshot_checksum(seq, chain, payload) != checksum:
        return f"the snapshot at event {seq} does not match its checksum"
    return ""


def good_prefix(rows: Iterable[EventRow], start: Mark) -> tuple[list[Record], Mark, str]:
    """Return the events that follow `start` without a break, the last position, and the reason for a break."""
    records: list[Record] = []
    end = start
    for row in rows:
        if reason := check_event(row, end):
            return records, end, reason
        records.append(Record(*row[:5]))
        end = Mark(row[0], row[5])
    return records, end, ""


def _signed(data: bytes) -> int:
    """Return xxh3 as a signed 64-bit integer, the databases' BIGINT."""
    digest: int = xxh3_64_intdigest(data)
    return digest - (1 << 64) if digest >= 1 << 63 else digest
