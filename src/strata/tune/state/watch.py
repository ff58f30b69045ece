"""Which trials have been silent for too long.

Time is injected and monotonic, so a change of the system's clock cannot end a trial. The limit belongs to the program
that runs a study, not to the study: the journal has only what follows from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.errors import ConfigError
from strata.tune.state import events as e

if TYPE_CHECKING:
    from collections.abc import Iterable


class Watch:
    def __init__(self, limit_s: float) -> None:
        """
        Args:
            limit_s: Longest time from the start of a trial to its first report, and from each report to the next one
                or to its end.

        Raises:
            ConfigError: The limit is not above 0.
        """
        if not limit_s > 0:
            raise ConfigError(f"report_timeout={limit_s} must be above 0 seconds", field="report_timeout")
        self.limit_s = limit_s
        self._heard: dict[int, tuple[int, float]] = {}
        """Running trial → its lease, and when it last reported."""

    def note(self, facts: Iterable[e.Event], *, now_s: float) -> None:
        """Take note of what has happened."""
        for fact in facts:
            match fact:
                case e.Leased() | e.Reported():
                    self._heard[fact.trial] = fact.lease, now_s
                case e.StopSent() | e.Finished() | e.Failed() | e.Lost() | e.Stopped():
                    self._heard.pop(fact.trial, None)  # the driver itself ends a trial that ignores a stop

    def overdue(self, *, now_s: float) -> list[e.Expired]:
        """Return the trials that have been silent for longer than the limit."""
        reason = f"it reported nothing for {self.limit_s:g} s"
        return [
            e.Expired(trial=trial, lease=lease, reason=reason)
            for trial, (lease, heard_s) in self._heard.items()
            if now_s - heard_s > self.limit_s
        ]
