"""The coordinator's durable state: a log of events with snapshots, verified when read, and the leadership that may
write it.

The journal stores bytes and never interprets an event. Implementations: memory, SQLite and PostgreSQL. Of the
coordinator, it imports only `config`.
"""

from strata.coordinator.journal.base import Damage, Entry, Journal, Loaded, Record
from strata.coordinator.journal.leadership import Leader, Leadership, Term
from strata.coordinator.journal.memory import MemoryJournal
from strata.coordinator.journal.open import describe, open_journal, open_leadership

__all__ = [
    "Damage",
    "Entry",
    "Journal",
    "Leader",
    "Leadership",
    "Loaded",
    "MemoryJournal",
    "Record",
    "Term",
    "describe",
    "open_journal",
    "open_leadership",
]
