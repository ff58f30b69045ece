"""Where the time of a worker process went since its first step, as the process itself has measured it."""

from __future__ import annotations

import math

import msgspec

MAX_S = 1e10
"""Three centuries: a larger value was not measured."""


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the end of the first step; none of them decreases. What the waits leave is computing."""

    measured_s: float
    data_s: float = 0.0
    """Waiting for the next batch."""
    checkpoint_s: float = 0.0
    """In a save, until training continues."""
    barrier_s: float = 0.0
    """At barriers of the runtime, and while the ranks agree on a step."""
    restore_s: float = 0.0
    """Loading a checkpoint."""
    collective_s: float | None = None
    """In collectives; None if it cannot be measured, and then part of computing."""

    @property
    def is_valid(self) -> bool:
        values = (
            self.measured_s,
            self.data_s,
            self.checkpoint_s,
            self.barrier_s,
            self.restore_s,
            self.collective_s or 0.0,
        )
        return all(math.isfinite(value) and 0 <= value <= MAX_S for value in values)

    @property
    def waiting_s(self) -> float:
        """Return everything but computing."""
        return self.data_s + self.checkpoint_s + self.barrier_s + self.restore_s + (self.collective_s or 0.0)

    @property
    def computing_s(self) -> float:
        return max(self.measured_s - self.waiting_s, 0.0)
