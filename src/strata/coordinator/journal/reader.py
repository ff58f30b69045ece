"""Find the good prefix of a journal: the newest snapshot that verifies, and the events after it up to a break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.coordinator.journal.base import Damage, Loaded, Record
from strata.coordinator.journal.chain import ROOT, Mark, SnapshotRow, check_snapshot, good_prefix
from strata.coordinator.journal.tables import SCHEMA
from strata.errors import JournalDamaged, JournalError

if TYPE_CHECKING:
    from strata.coordinator.journal.tables import Reader


class Broken(Exception):
    """The state exists, but nothing in it can be trusted; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The verified contents of the tables."""

    snapshot: SnapshotRow | None
    """The newest snapshot that verifies."""
    older_snapshots: list[SnapshotRow]
    """Other snapshots that verify, newest first."""
    bad_snapshots: list[SnapshotRow]
    records: list[Record]
    """The events after the snapshot."""
    tail: Mark
    """The end of the good prefix, where appends continue."""
    truncated: Mark | None
    """The position up to which events were dropped; None if unknown."""
    reason: str
    """What is damaged; empty if nothing is."""
    num_lost: int
    reported: str
    """Damage recorded by an earlier repair that was not reported yet, as stored."""

    @property
    def start(self) -> Mark:
        return Mark(self.snapshot[0], self.snapshot[1]) if self.snapshot else ROOT

    def loaded(self, damage: Damage | None) -> Loaded:
        payload = self.snapshot[2] if self.snapshot else None
        return Loaded(snapshot=payload, snapshot_seq=self.start.seq, records=self.records, damage=damage)


def read_state(reader: Reader, name: str) -> Reading:
    """Verify the contents of the tables.

    Raises:
        Broken: Nothing can be trusted.
        JournalError: A newer version wrote the state.
    """
    settings = reader.settings()
    _refuse_newer(settings, name)
    head = Mark.parse(settings["head"]) if "head" in settings else None
    truncated = Mark.parse(settings["truncated"]) if "truncated" in settings else None
    good: list[SnapshotRow] = []
    bad: list[SnapshotRow] = []
    reasons: list[str] = []
    for row in reader.snapshots():
        problem = check_snapshot(row)
        (bad if problem else good).append(row)
        reasons += [problem] * bool(problem)
    start = Mark(good[0][0], good[0][1]) if good else ROOT
    rows = reader.events(after_seq=start.seq)
    records, tail, problem = good_prefix(rows, start)
    # Part of what follows the break was fetched: the row at which the chain broke is one.
    num_beyond = 1 + sum(1 for _ in rows) if problem else 0
    reasons += [reason for reason in (problem, reader.broken) if reason]
    if head is None:
        reasons.append("the number of the last event cannot be read")
    elif head.seq > tail.seq and not problem:
        reasons.append(f"events {tail.seq + 1} to {head.seq} are missing")
    elif head.seq <= tail.seq and head != tail:
        reasons.append(f"event {head.seq} was recorded as the last, but events continue to {tail.seq}")
    if reasons and tail == ROOT and not good:
        raise Broken("; ".join(reasons))
    return Reading(
        snapshot=good[0] if good else None,
        older_snapshots=good[1:],
        bad_snapshots=bad,
        records=records,
        tail=tail,
        truncated=truncated,
        reason="; ".join(reasons),
        num_lost=max(num_beyond, head.seq - tail.seq if head else 0),
        reported=settings.get("damage", ""),
    )


def _refuse_newer(settings: dict[str, str], name: str) -> None:
    found = settings.get("schema", str(SCHEMA))
    if int(found) > SCHEMA:
        raise JournalError(
            f"{name} was written by a newer Strata (schema {found}; this version reads up to {SCHEMA}); "
            "upgrade this coordinator, or use another state"
        )


def nothing_left(name: str, reason: str) -> JournalDamaged:
    return JournalDamaged(
        f"nothing can be read from {name}: {reason}. Restore it from a backup, or move it away to start empty"
    )
