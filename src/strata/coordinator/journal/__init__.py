"""The coordinator's durable memory: a log of events with snapshots, verified when it is read back."""

from strata.coordinator.journal.base import Damage, Entry, Journal, Loaded, Record
from strata.coordinator.journal.memory import MemoryJournal
from strata.coordinator.journal.open import describe, open_journal

__all__ = ["Damage", "Entry", "Journal", "Loaded", "MemoryJournal", "Record", "describe", "open_journal"]
