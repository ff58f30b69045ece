"""The port of the coordinator's durable state: a log of events, and periodic snapshots of the resulting state.

The journal does not interpret events. It stores bytes, numbers them from 1 without gaps, and verifies on load that it
returns what was appended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to append."""

    job_id: str
    kind: str
    at_s: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """An event read back."""

    seq: int
    job_id: str
    kind: str
    at_s: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage found on load; must be reported to the operator."""

    seq: int
    """The first lost sequence number; the next append uses it."""
    reason: str
    num_lost: int
    """Events known to be lost; 0 if everything could be repaired."""
    kept_at: str
    """Where the damaged rows or files were moved."""


@dataclass(frozen=True, slots=True)
class Loaded:
    snapshot: bytes | None
    snapshot_seq: int
    """The snapshot is the state after this event; 0 without a snapshot."""
    records: list[Record]
    """All events after the snapshot, in order."""
    damage: Damage | None = None

    @property
    def last_seq(self) -> int:
        return self.records[-1].seq if self.records else self.snapshot_seq


class Journal(Protocol):
    """An append-only log with snapshots.

    Threads: `load`, `append`, `size_bytes` and `close` are called by one thread at a time, not always the same one.
    `read` may run in another thread during an `append`.

    Durability: when `append` returns, its entries survive `kill -9` and power loss. A batch is stored completely or not
    at all. When `append` raises, the batch is almost always absent, but a commit whose answer was lost may have
    happened; `load` shows which.
    """

    def load(self) -> Loaded:
        """Verify and read the state; must be called first, and after a failed `append`.

        Damage ends the good prefix: the rest is moved aside, the prefix is returned with `damage`, and appends continue
        after it.

        Raises:
            JournalDamaged: Nothing can be read; the damaged state stays in place.
            JournalError: The state was written by a newer version, or cannot be reached.
        """
        ...

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        """Make the entries durable in one transaction, and return the last sequence number.

        A snapshot is the state after these entries and is stored with them. The previous snapshot is kept too, with all
        events since, so that one damaged snapshot is not fatal. Older snapshots are dropped, and so are the events that
        neither it nor `history_events` needs.

        Raises:
            JournalWriteFailed: Disk full, database down, …; a later call may succeed.
        """
        ...

    def read(self, *, after_seq: int = 0, limit: int = 1000, job_id: str | None = None) -> list[Record]:
        """Return the oldest `limit` stored events after `after_seq`, including those before the snapshot.

        Raises:
            JournalDamaged: An event in that range is not what was appended.
        """
        ...

    def size_bytes(self) -> int:
        """Return the storage that the state occupies."""
        ...

    def close(self) -> None:
        """Close files, locks and connections; later calls do nothing."""
        ...
