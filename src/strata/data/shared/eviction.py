"""Which entries of the node cache make room for a new one, and how long a process waits for another. Pure.

The least recently used entries go first. An entry that a process has mapped stays: deleting it would free no memory
until that process drops it, and the limit would not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

MAX_ENTRIES = 1 << 16
"""Files in one directory. Smaller row groups than the limit divided by this are cheap to decode."""
MANY_ENTRIES = 256
"""Above this number, an eviction frees more than it must, so that the next ones need not list the directory."""
SLACK_SHARE = 16
MIN_WAIT_S = 2.0
MAX_WAIT_S = 30.0
PATIENCE = 4.0
"""How many times the longest own decode another process may take."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file of the cache."""

    name: str
    num_bytes: int
    used_ns: int
    """When a process last used it."""


@dataclass(frozen=True, slots=True)
class Eviction:
    fits: bool
    """Whether the new entry fits once the victims are gone."""
    victims: tuple[CacheEntry, ...] = ()


def choose(
    entries: Sequence[CacheEntry],
    *,
    need_bytes: int,
    max_bytes: int,
    max_entries: int = MAX_ENTRIES,
    pinned: Container[str] = (),
) -> Eviction:
    """Return which entries to delete for a new one. Nothing is deleted if it would not fit even then."""
    kept_bytes, kept = sum(entry.num_bytes for entry in entries), len(entries)
    if kept_bytes + need_bytes <= max_bytes and kept < max_entries:
        return Eviction(fits=True)
    slack_bytes = max_bytes // SLACK_SHARE if kept > MANY_ENTRIES else 0
    slack_entries = kept // SLACK_SHARE if kept > MANY_ENTRIES else 0
    victims = []
    fits = False
    for entry in sorted(entries, key=lambda entry: (entry.used_ns, entry.name)):
        if fits and kept_bytes + need_bytes + slack_bytes <= max_bytes and kept + slack_entries < max_entries:
            break
        if entry.name in pinned:
            continue
        victims.append(entry)
        kept_bytes -= entry.num_bytes
        kept -= 1
        fits = kept_bytes + need_bytes <= max_bytes and kept < max_entries
    return Eviction(fits, tuple(victims)) if fits else Eviction(fits=False)


def wait_limit_s(longest_decode_s: float) -> float:
    """Return how long to wait for a row group that another process decodes, given the longest own decode."""
    return min(MAX_WAIT_S, max(MIN_WAIT_S, PATIENCE * longest_decode_s))
