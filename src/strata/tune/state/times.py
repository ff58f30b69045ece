"""When a study was active, from the times of its facts. For people: no decision depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.tune.state import events as e

if TYPE_CHECKING:
    from strata.tune.state.events import Event

_AFTER_A_BREAK = (e.Extended, e.Resized)
"""Facts with which a driver begins; nothing ran in the time before them."""


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
        elif not (isinstance(fact, _AFTER_A_BREAK) or (isinstance(fact, e.Lost) and fact.is_blameless)):
            self.active_s += max(fact.at_s - self.last_s, 0.0)
        self.last_s = fact.at_s
