"""Time, handed in.

Nothing below the process boundary calls `time.*`: whoever decides by time is given a `Clock`, so that a test can move
it. Leases and deadlines use `monotonic_s`, which no administrator can set back; `wall_s` is only for people to read.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class Moment(NamedTuple):
    """One look at the clock."""

    monotonic_s: float
    wall_s: float


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970, as people know it; may jump."""
        ...


def look(clock: Clock) -> Moment:
    return Moment(clock.monotonic_s(), clock.wall_s())


class SystemClock:
    # The functions themselves: a server looks at its clock several times in every call.
    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, monotonic_s: float = 1_000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        self._monotonic_s += seconds
        self._wall_s += seconds
