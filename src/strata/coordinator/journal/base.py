"""The port to the coordinator's durable memory: a log of events, and now and then a snapshot of what they amount to.

The journal knows no events; it keeps bytes, numbers them from 1 without gaps, and proves at load that what it gives
back is what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to be appended."""

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
    """What was found broken at load; to be said aloud."""

    seq: int
    """The first lost sequence number; the next append takes it."""
    reason: str
    num_lost: int
    """Events known to be lost. 0: none, only something that could be made good again."""
    kept_at: str
    """Where the damaged rows or files were set aside."""


@dataclass(frozen=True, slots=True)
class Loaded:
    snapshot: bytes | None
    snapshot_seq: int
    """The snapshot is the state after this event; 0 without one."""
    records: list[Record]
    """All events after the snapshot, in order."""
    damage: Damage | None = None

    @property
    def last_seq(self) -> int:
        return self.records[-1].seq if self.records else self.snapshot_seq


class Journal(Protocol):
    """An append-only log with snapshots.

    Threads: `load`, `append`, `size_bytes` and `close` are called by one thread at a time, not always the same one.
    `read` may run in another thread while `append` runs.

    Durability: when `append` returns, its entries survive `kill -9` and power loss. A batch is there as a whole or not
    at all. When `append` raises, the batch is almost always absent, but a commit whose answer was lost may have
    happened: `load` tells.
    """

    def load(self) -> Loaded:
        """Verify and read the state back; the first call, and the one to make after a failed `append`.

        Damage ends the good prefix: what follows is set aside, the prefix is returned with `damage`, and appends go on
        after it.

        Raises:
            JournalDamaged: Nothing good is left; the damaged state stays where it is.
            JournalError: The state was written by a newer version, or cannot be reached.
        """
        ...

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        """Make the entries durable in one transaction, and return the last sequence number.

        A snapshot is the state after these entries and is stored with them. The one before it is kept too, with all
        events since, so that one damaged snapshot can be survived; older snapshots are dropped, and so are the events
        that neither it nor `history_events` needs.

        Raises:
            JournalWriteFailed: Disk full, database gone, …; a later call may succeed.
        """
        ...

    def read(self, *, after_seq: int = 0, limit: int = 1000, job_id: str | None = None) -> list[Record]:
        """The oldest `limit` events after `after_seq` that are still kept, also those before the snapshot.

        Raises:
            JournalDamaged: An event in that range is not what was appended.
        """
        ...

    def size_bytes(self) -> int:
        """What the state takes up where it is stored."""
        ...

    def close(self) -> None:
        """Let go of files, locks and connections; a second call does nothing."""
        ...
