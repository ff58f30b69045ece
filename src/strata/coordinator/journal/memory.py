"""A journal in memory: for tests, and for coordinators that live no longer than their process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal.base import Entry, Loaded, Record
from strata.errors import JournalWriteFailed

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemoryJournal:
    """Keeps the promises of the port for the lifetime of the object."""

    def __init__(self, config: JournalConfig | None = None) -> None:
        self._history_events = (config or JournalConfig()).history_events
        self._records: list[Record] = []
        self._last_seq = 0
        self._snapshots: list[tuple[int, bytes]] = []
        """The newest two, oldest first."""
        self._closed = False

    def load(self) -> Loaded:
        seq, payload = self._snapshots[-1] if self._snapshots else (0, None)
        return Loaded(snapshot=payload, snapshot_seq=seq, records=[r for r in self._records if r.seq > seq])

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        if self._closed:
            raise JournalWriteFailed("this journal is closed")
        new = [Record(seq, e.job_id, e.kind, e.at_s, e.payload) for seq, e in enumerate(entries, self._last_seq + 1)]
        self._records.extend(new)  # atomic for readers in other threads: they see the whole batch or none of it
        self._last_seq += len(new)
        if snapshot is not None:
            self._keep(snapshot)
        return self._last_seq

    def read(self, *, after_seq: int = 0, limit: int = 1000, job_id: str | None = None) -> list[Record]:
        wanted = (r for r in self._records if r.seq > after_seq and job_id in (None, r.job_id))
        return [record for record, _ in zip(wanted, range(limit), strict=False)]

    def size_bytes(self) -> int:
        return sum(len(r.payload) for r in self._records) + sum(len(payload) for _, payload in self._snapshots)

    def close(self) -> None:
        self._closed = True

    def _keep(self, snapshot: bytes) -> None:
        older = [s for s in self._snapshots if s[0] < self._last_seq][-1:]
        self._snapshots = [*older, (self._last_seq, snapshot)]
        if older:
            truncated_seq = min(self._last_seq - self._history_events, older[0][0])
            self._records = [r for r in self._records if r.seq > truncated_seq]
