"""When a study was active, from the times of its facts. For people: no decision depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.tune.state import events as e

if TYPE_CHECKING:
    from strata.tune.state.events import Event


@dataclass(slots=True)
class Times:
    began_s: float | None = None
    last_s: float = 0.0
    """Time of the last fact."""
    active_s: float = 0.0
    """Time during which a driver ran, up to the last fact."""

    def add(self, fact: Event) -> None:
        if isinstance(fact, e.Opened):  # written before a driver runs
            return
        if self.began_s is None:
            self.began_s = fact.at_s
        elif not _is_first(fact):
            self.active_s += max(fact.at_s - self.last_s, 0.0)
        self.last_s = fact.at_s


def _is_first(fact: Event) -> bool:
    """Return whether a restarted driver begins with such a fact, so that nothing ran in the time before it."""
    match fact:
        case e.Extended() | e.Resized(num_slots=0) | e.Lost(is_blameless=True):
            return True
    return False
