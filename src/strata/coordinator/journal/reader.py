"""Finding the good prefix: from the newest snapshot that verifies, as far as the chain of events holds."""

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
    """There was something, and nothing of it can be trusted as it stands; the words say why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the tables hold, judged."""

    snapshot: SnapshotRow | None
    """The newest that verifies."""
    older_snapshots: list[SnapshotRow]
    """The others that verify, newest first."""
    bad_snapshots: list[SnapshotRow]
    records: list[Record]
    """The events after the snapshot."""
    tail: Mark
    """Where the good prefix ends, and appends go on."""
    truncated: Mark | None
    """Up to where events were dropped; None if that is not known any more."""
    reason: str
    """What is broken; empty if all is well."""
    num_lost: int
    reported: str
    """Damage that an earlier repair left to be told, as it was stored."""

    @property
    def start(self) -> Mark:
        return Mark(self.snapshot[0], self.snapshot[1]) if self.snapshot else ROOT

    def loaded(self, damage: Damage | None) -> Loaded:
        payload = self.snapshot[2] if self.snapshot else None
        return Loaded(snapshot=payload, snapshot_seq=self.start.seq, records=self.records, damage=damage)


def read_state(reader: Reader, name: str) -> Reading:
    """Judge what the tables hold.

    Raises:
        Broken: Nothing of it is good.
        JournalError: It was written by a newer version.
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
    # What follows the break was fetched in part; the row at which the chain broke is one.
    num_beyond = 1 + sum(1 for _ in rows) if problem else 0
    reasons += [reason for reason in (problem, reader.broken) if reason]
    if head is None:
        reasons.append("the number of the last event cannot be read")
    elif head.seq > tail.seq and not problem:
        reasons.append(f"events {tail.seq + 1} to {head.seq} are missing")
    elif head.seq <= tail.seq and head != tail:
        reasons.append(f"event {head.seq} was recorded as the last, but events go on to {tail.seq}")
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
            "upgrade this coordinator, or give it another state"
        )


def nothing_left(name: str, reason: str) -> JournalDamaged:
    return JournalDamaged(
        f"nothing can be read back from {name}: {reason}. Restore it from a backup, or move it away to start empty"
    )
